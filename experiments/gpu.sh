#!/usr/bin/env bash
# What has to be measured on a GPU; needs 24 GB, and 80 GB with CODER.
#
#   experiments/gpu.sh [OUT]          OUT: runs/gpu unless another folder is named
#
#   tests                  the tests of CUDA
#   bench, bench-plain     W2, W4 beside TRL, W8 and W9 with their peak memory; plain: no torch.compile
#   gsm8k                  300 steps of GRPO, if QWEN names a model (Qwen/Qwen2.5-0.5B-Instruct, or a folder)
#   ocaml                  likewise, if CODER names one (Qwen/Qwen2.5-Coder-1.5B-Instruct, or a folder)
#
# Each part writes OUT/PART.log. The same command continues after an interruption: parts that have ended well are left
# out, and a training run resumes.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
out=$(realpath -m "${1:-runs/gpu}")
mkdir -p "$out"
NEEDS="requirements.txt requirements-test.txt" source nanorook/setup.sh

part() {
    local name=$1
    shift
    if [ ! -e "$out/$name.done" ]; then
        echo "$name: $out/$name.log"
        if ! "$@" >"$out/$name.log" 2>&1; then
            tail -n 3 "$out/$name.log" >&2
            echo "error: $name failed, see $out/$name.log; the same command continues from there." >&2
            exit 1
        fi
        touch "$out/$name.done"
    fi
    printf '\n## %s\n\n' "$name"
    tail -n 20 "$out/$name.log"
}

train() { # NAME NAME=value ...
    part "$1" "$PYTHON" train.py OUT_DIR="$out/$1" EVAL_SAMPLES=16 STEPS=300 "${@:2}"
}

bench="W2 W4 W8 W9"
part tests "$PYTHON" -m pytest -q tests/test_cuda.py
part bench "$PYTHON" -m tools.bench $bench
part bench-plain env TORCHDYNAMO_DISABLE=1 "$PYTHON" -m tools.bench $bench
[ -z "${QWEN:-}" ] || train gsm8k TASK=examples/gsm8k.py MODEL="$QWEN"
[ -z "${CODER:-}" ] || train ocaml TASK=examples/ocaml_problems.py MODEL="$CODER"
