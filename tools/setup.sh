# Sourced by train.sh and test.sh: leaves in $PYTHON an interpreter with what requirements.txt asks for.
# PYTHON=/some/python is used as it is.
if [ -z "${PYTHON:-}" ]; then
    PYTHON=.venv/bin/python
    if ! cmp -s requirements.txt .venv/requirements.txt; then
        if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
            echo "error: Python 3.10 or later is needed as python3; install one, or name it with PYTHON=/path/to/python." >&2
            exit 1
        fi
        echo "Setting up .venv from requirements.txt, once; this takes a few minutes." >&2
        python3 -m venv .venv
        $PYTHON -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
        cp requirements.txt .venv/requirements.txt # last, so that a set-up cut short is begun again
    fi
fi
