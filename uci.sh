#!/usr/bin/env bash
# The model as one executable, as chess programs want it; the argument is a model folder or hub id.
set -euo pipefail
cd "$(dirname "$0")"
source tools/setup.sh
exec "$PYTHON" -m tools.uci "$@"
