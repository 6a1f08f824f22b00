#!/usr/bin/env bash
# Installs what a run needs into .venv if it is not there, then trains. Settings: STEPS=50 ./train.sh, or as arguments.
# It stays in the folder where it is called, so that the paths of a user's files are relative to it.
set -euo pipefail
project=$(dirname "$(realpath "$0")")
NEEDS="requirements.txt" source "$project/nanorook/setup.sh"
exec "$PYTHON" "$project/train.py" "$@"
