#!/usr/bin/env bash
# Everything behind docs/what-rl-does.md: the runs, then their tables and pictures. On one core a run takes a quarter of
# an hour, all of them about eight hours. The same command continues where it was stopped.
#
#   experiments/study.sh [OUT]          OUT: runs/study unless another folder is named
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
out=$(realpath -m "${1:-runs/study}")
NEEDS="requirements.txt requirements-test.txt" source nanorook/setup.sh
S="TASK=examples/mates.py STEPS=60 KL_DIVERGENCE_THRESHOLD=100 DTYPE=float32"
sweep="$PYTHON -m tools.sweep $out EVAL_POSITIONS=100"

# GRPO. In groups of G the gradient is 1/k - 1/G times that of the expected best of k. For G other than 32, KL_COEF is
# scaled by the ratio of this factor to that at G = 32.
$sweep $S --vary "plain: default"
$sweep $S --controls 0 --vary \
    "mean: SCALE_REWARDS=mean" \
    "best of 4: BEST_OF=4" \
    "paper: CREDIT=answer SCALE_REWARDS=std KL_ESTIMATOR=k3 LOSS=grpo" \
    "q8 plain: GROUP_SIZE=8 KL_COEF=0.0271" \
    "q8 best of 4: GROUP_SIZE=8 BEST_OF=4 KL_COEF=0.01714" \
    "g64 plain: BATCH_POSITIONS=32 GROUP_SIZE=64 KL_COEF=0.03048" \
    "g64 best of 4: BATCH_POSITIONS=32 GROUP_SIZE=64 BEST_OF=4 KL_COEF=0.03214"
$sweep $S --seeds 1 --controls 0 --vary \
    "g8 best of 4: BATCH_POSITIONS=256 GROUP_SIZE=8 BEST_OF=4 KL_COEF=0.01714"

# The exact gradient, without samples
exact() { # NAME SEED NAME=value ...
    local folder="$out/exact-$1/seed-$2"
    [ -e "$folder/settings.json" ] || "$PYTHON" -m tools.exact_gradient $S SEED="$2" OUT_DIR="$folder" "${@:3}"
}
for seed in 0 1 2; do exact plain $seed; done
exact best-of-4 0 BEST_OF=4
exact 4-to-1 0 BEST_OF=4 BEST_OF_SCHEDULE=linear
exact log 0 OBJECTIVE=log
exact anchored 0 OBJECTIVE=anchored

# The default
$sweep DTYPE=float32 COMPILE=0 NPROC=1 EVAL_EVERY=0 --controls 1 --vary "default: default"

"$PYTHON" -m experiments.study "$out" TASK=examples/mates.py DATA=data/test.txt.gz
