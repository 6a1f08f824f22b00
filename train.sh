#!/usr/bin/env bash
# Sets up .venv if it is missing or stale, then trains. Settings: STEPS=50 ./train.sh, or as arguments; --help lists them.
set -euo pipefail
cd "$(dirname "$0")"
source tools/setup.sh
if [ "${NPROC:-1}" -gt 1 ]; then
    exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" train.py "$@"
fi
exec "$PYTHON" train.py "$@"
