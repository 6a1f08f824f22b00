#!/usr/bin/env bash
# Installs what the tests need into .venv if it is not there, then runs them; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
NEEDS="requirements.txt requirements-test.txt" source tools/setup.sh
exec "$PYTHON" -m pytest "$@"
