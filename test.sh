#!/usr/bin/env bash
# Sets up .venv if it is missing or stale, then runs the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"
source tools/setup.sh
exec "$PYTHON" -m pytest "$@"
