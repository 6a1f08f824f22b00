#!/usr/bin/env bash
# The model as one executable, as chess programs expect it; the argument is a model folder or hub id.
set -euo pipefail
[ ! -d "${1:-}" ] || set -- "$(realpath "$1")"
cd "$(dirname "$(realpath "$0")")/.."
NEEDS="requirements.txt" source nanorook/setup.sh
exec "$PYTHON" -m tools.chess_uci "$@"
