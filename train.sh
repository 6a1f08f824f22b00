#!/usr/bin/env bash
# Installs what a run needs into .venv if it is not there, then trains. Settings: STEPS=50 ./train.sh, or as arguments.
set -euo pipefail
cd "$(dirname "$0")"
NEEDS="requirements.txt" source tools/setup.sh
exec "$PYTHON" train.py "$@"
