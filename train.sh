#!/usr/bin/env bash
# Sets up .venv if it is missing or stale, then trains. Settings: STEPS=50 ./train.sh, or as arguments; --help lists them.
set -euo pipefail
cd "$(dirname "$0")"
source tools/setup.sh
# Without a GPU two processes with half of the cores each are faster than one with all of them.
if [ -z "${NPROC:-}" ] && [ "$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && ! command -v nvidia-smi >/dev/null; then
    export NPROC=2
fi
exec "$PYTHON" train.py "$@"
