# Sourced by train.sh, test.sh and other starters: leaves in $PYTHON an interpreter that has what the requirements files
# in $NEEDS name.
# PYTHON=/some/python is used as it is.
if [ -n "${PYTHON:-}" ] && ! "$PYTHON" -c 'import importlib.util as i; assert i.find_spec("torch")' 2>/dev/null; then
    echo "error: PYTHON=$PYTHON is not a Python that has torch; install requirements.txt there, or leave PYTHON out." >&2
    exit 1
fi
if [ -z "${PYTHON:-}" ]; then
    pushd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null
    PYTHON=$PWD/.venv/bin/python
    [ -x "$PYTHON" ] || rm -rf .venv # the Python that it was made with is gone
    for file in $NEEDS; do
        if cmp -s "$file" ".venv/$file"; then
            continue
        fi
        size=
        [ "$file" != requirements.txt ] || size=": about 200 MB and one to five minutes (with CUDA's libraries 3 GB)"
        echo "Installing $file into .venv, once$size." >&2
        recent='import sys; sys.exit(sys.version_info < (3, 11))'
        if ! "$PYTHON" -c "import pip; $recent" >/dev/null 2>&1; then
            if ! python3 -c "$recent"; then
                echo "error: Python 3.11 or later is needed; install it as python3, or make .venv with it (python3.12 -m venv .venv)." >&2
                exit 1
            fi
            python3 -m venv --clear .venv
        fi
        bar=$([ -t 2 ] || echo --progress-bar off) # a log gets one line for each package
        "$PYTHON" -m pip install $bar --disable-pip-version-check --requirement "$file"
        cp "$file" ".venv/$file" # last, so that an installation cut short is begun again
    done
    popd >/dev/null
fi
