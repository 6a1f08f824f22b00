#!/usr/bin/env bash
# Installs what the tests need into .venv if it is not there, then runs them; arguments go to pytest. The default suite,
# and the slow tests as ./test.sh -m slow, run in two halves at once, since the tests compute on one thread.
set -euo pipefail
cd "$(dirname "$0")"
NEEDS="requirements.txt requirements-test.txt" source nanorook/setup.sh
[ $# = 0 ] || [ "$*" = "-m slow" ] || exec "$PYTHON" -m pytest "$@"
# What the second half prints is shown when both have ended.
second=$(mktemp) status=0
trap 'exit 130' INT
trap 'kill $(jobs -p) 2>/dev/null || true; rm "$second"' EXIT
"$PYTHON" -m pytest "$@" tests/test_[p-z]*.py >"$second" 2>&1 &
"$PYTHON" -m pytest "$@" tests/test_[a-o]*.py || status=$?
wait $! || status=$?
cat "$second"
exit $status
