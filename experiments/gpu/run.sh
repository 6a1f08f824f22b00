#!/usr/bin/env bash
# Half an hour on one GPU: labels, pretraining, GRPO, the tables, for the embedded shape and for GPT-2 124M.
#
#   experiments/gpu/run.sh                      everything; run it again to continue where it was stopped or killed
#   experiments/gpu/run.sh label pretrain       only the stages whose names begin with these words
#   MINUTES=60 OUT=/data/gpu experiments/gpu/run.sh
#
# README.md beside this file says what a machine without a package registry needs, and what OUT holds afterwards.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
OUT=$(realpath -m "${OUT:-$root/runs/gpu}") # before cd, so that it is where the caller means
for name in POSITIONS GPT2_TOKENIZER STOCKFISH_PATH QWEN GSM8K CODER; do # a model may also be an id on the hub
    [ ! -e "${!name:-}" ] || printf -v "$name" %s "$(realpath "${!name}")"
done
cd "$root"
carried=$root/experiments/gpu
PYTHON=${PYTHON:-python3}

fail() {
    echo "error: $*" >&2
    exit 1
}

stages="label pretrain-tiny decay-tiny pretrain-gpt2 decay-gpt2 before-tiny before-gpt2 grpo-tiny grpo-gpt2"
stages+=" after-tiny after-gpt2 grpo-gsm8k grpo-ocaml bench"
chosen=("$@")
for name in "$@"; do
    [[ " $stages" == *" $name"* ]] || fail "$name is not a stage; the stages are: $stages."
done

[[ "$OUT${POSITIONS:-}${GPT2_TOKENIZER:-}" != *[[:space:]]* ]] || fail "OUT, POSITIONS and GPT2_TOKENIZER must not contain spaces."

# A run that is killed may leave a child that still writes; it holds this lock too, so no second run joins it. The ten
# seconds are for one that is about to end.
mkdir -p "$OUT"
exec 9>"$OUT/.lock"
flock -w 10 9 || fail "$OUT is in use by another run, or by what one has left; wait for it to end, or name another OUT."

# ----------------------------------------------------------------------------------------------------------------------
# What has to be there. Wheels are unpacked rather than installed: a bare machine may have no pip.

packages="chess tiktoken safetensors rapidfuzz tqdm numpy"
[ -z "${QWEN:-}${CODER:-}" ] || packages+=" huggingface_hub" # which their tasks import
export PYTHONPATH=$OUT/packages${PYTHONPATH:+:$PYTHONPATH}
missing() {
    "$PYTHON" -c "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if not u.find_spec(n)])" "$@"
}
[ -z "$(missing torch)" ] || fail "$PYTHON has no PyTorch; install it, or name an interpreter that has it with PYTHON=."
if [ -n "$(missing $packages)" ]; then
    for wheel in "$carried"/wheels/*.whl; do
        [ ! -e "$wheel" ] || "$PYTHON" -m zipfile -e "$wheel" "$OUT/packages"
    done
    lacking=$(missing $packages)
    [ -z "$lacking" ] || fail "$PYTHON lacks $lacking: install them with pip, or put their wheels into $carried/wheels."
fi
if [ -z "${STOCKFISH_PATH:-}" ] && [ -e "$carried/stockfish.gz" ]; then
    export STOCKFISH_PATH=$OUT/stockfish
    gunzip -c "$carried/stockfish.gz" >"$OUT/stockfish"
    chmod +x "$OUT/stockfish"
fi
[ -n "${GPT2_TOKENIZER:-}" ] || [ ! -e "$carried/gpt2/vocab.json" ] || GPT2_TOKENIZER=$carried/gpt2
"$PYTHON" - "${GPT2_TOKENIZER:-}" "${TINY:-}" "${POSITIONS:-}" <<'END' || exit 1
import sys
import torch
if sys.version_info < (3, 11) or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
    sys.exit("error: Python 3.11 or later with PyTorch 2.6 or later is needed; name it with PYTHON=/path/to/python.")
from nanorook.tokenizer import Tokenizer
from tools.chess_label import require

folder, tiny, positions = sys.argv[1:]
if not positions:  # with POSITIONS no labels are made, so Stockfish may be missing
    require()
try:
    Tokenizer.load(folder) if folder else Tokenizer.gpt2()
except SystemExit as error:
    sys.exit(f"{error} Set GPT2_TOKENIZER=FOLDER to a folder with vocab.json and merges.txt.")
if not tiny and not torch.cuda.is_available():
    sys.exit("error: PyTorch sees no GPU; TINY=1 rehearses this script on a CPU with models too small to be of use.")
END

# ----------------------------------------------------------------------------------------------------------------------
# Stages

seconds=$(awk "BEGIN { print int(60 * ${MINUTES:-30}) }")
child= name=preparation
trap '[ -z "$child" ] || { kill "$child" && wait "$child"; } || true
      fail "stopped in $name; the same command continues from there."' INT TERM HUP

# stage NAME SHARE COMMAND ...: runs COMMAND within SHARE percent of the time, over all calls. A stage cut by its limit
# counts as done too: all save as they go, except for the tables before and after, which have time to spare.
stage() {
    name=$1 limit=$((seconds * $2 / 100))
    shift 2
    if [ ${#chosen[@]} -gt 0 ]; then
        local prefix mine=
        for prefix in "${chosen[@]}"; do [[ $name != "$prefix"* ]] || mine=1; done
        [ -n "$mine" ] || return 0
    fi
    if [ -e "$OUT/$name.done" ]; then
        echo "$name: $(cat "$OUT/$name.done") before"
        return 0
    fi
    local used left began=$SECONDS status=0
    used=$(cat "$OUT/$name.used" 2>/dev/null || echo 0)
    left=$((limit > used ? limit - used : 1))
    echo "$name: $left s at most, $OUT/$name.log"
    timeout --foreground --kill-after 60 "$left" "$@" >>"$OUT/$name.log" 2>&1 &
    child=$!
    # A script that is killed cannot say how long it ran, so the time is written down twice a second.
    while sleep 0.5; do
        echo $((used + SECONDS - began)) >"$OUT/used.part" && mv "$OUT/used.part" "$OUT/$name.used"
        kill -0 $child 2>/dev/null || break
    done
    wait $child || status=$?
    child=
    case $status in
        0) echo finished >"$OUT/$name.done" ;;
        124 | 137) [ $((SECONDS - began)) -ge $left ] || fail "$name was killed, perhaps for lack of memory ($OUT/$name.log)"
            echo "cut by its time limit" >"$OUT/$name.done" ;;
        *) fail "$name: $(tail -n 1 "$OUT/$name.log" | tr '\r' '\n' | tail -n 1) ($OUT/$name.log)" ;;
    esac
    echo "$name: $(cat "$OUT/$name.done")"
    summarize
}

# What each stage that is done has printed last: its table, its verdict, or how far it came. That is the last paragraph
# of its log, without progress bars. The bench prints a paragraph for each workload, so its whole log is shown.
summarize() {
    local file stage
    {
        echo "# Half an hour on one GPU"
        for file in $(ls -tr "$OUT"/*.done); do
            stage=$(basename "$file" .done)
            printf '\n## %s: %s, %s s\n\n' "$stage" "$(cat "$file")" "$(cat "$OUT/$stage.used")"
            if [ "$stage" = bench ]; then
                sed 's/^/    /' "$OUT/bench.log"
            else
                sed 's/.*\r//' "$OUT/$stage.log" | awk -v RS= 'END { print }' | tail -n 80
            fi
        done
    } >"$OUT/summary.md.tmp"
    mv "$OUT/summary.md.tmp" "$OUT/summary.md"
}

positions=${POSITIONS:-$OUT/positions.txt.gz}
workers=$(($(nproc) > 3 ? $(nproc) - 2 : 1))
shape_gpt2="--positions 1024 --layers 12 --width 768 --heads 12"
format_gpt2="--format rookworld${GPT2_TOKENIZER:+ --tokenizer $GPT2_TOKENIZER}"
table="--positions 500 --self-play 20"
bench=("$PYTHON" -m tools.bench W4 W2 W8 W9 --runs 3)
if [ -n "${TINY:-}" ]; then
    label="--positions 100 --nodes 100 --workers 1"
    tiny="--layers 1 --width 64 --heads 2 --rows 14 --eval-every 120 --eval-positions 2 --workers 1 --dtype float32"
    tiny+=" --lr 0.005 --lr-matrix 0.03" # in so few steps an answer's form is learnt and no more
    gpt2="$tiny --positions 512" steps_tiny=480 steps_gpt2=40
    table="--positions 4 --self-play 1 --data $positions"
    grpo="STEPS=2 BATCH_POSITIONS=4 GROUP_SIZE=4 EVAL_POSITIONS=4 DTYPE=float32 TEMPERATURE=0.5 MIX_FIRST_RATIO=1"
    bench=("$PYTHON" -m tools.bench W3 --runs 1 --only nanorook)
else
    label="--positions 600000 --seed 1"
    # More steps than there is time for, at a constant rate: the limit ends them, and a cut loses nothing.
    steps_tiny=10000000 steps_gpt2=10000000
    tiny="--rows 512 --eval-every 2500 --half --workers $workers"
    gpt2="$shape_gpt2 --rows 256 --eval-every 500 --lr 0.0006 --workers $workers"
    grpo="STEPS=100000 LR_SCHEDULE=constant BATCH_POSITIONS=64 GROUP_SIZE=8 EVAL_EVERY=0 SAVE_EVERY=50"
fi

# decay NAME OUT ...: pretraining continues for a tenth of its steps so far, over which its learning rate falls to zero.
tenth="import sys, torch; print(torch.load(sys.argv[1], 'cpu', weights_only=True)['step'] // 10 + 1)"
decay='file=$OUT/$1.decay; shift # written once, so that a stage that was stopped continues to the same end
[ -s "$file" ] || "$PYTHON" -c "$tenth" "$1/trainer.pt" >"$file"
exec "$PYTHON" -m tools.chess_pretrain "$@" --steps $((11 * $(cat "$file"))) --decay 0.09'
export tenth OUT PYTHON

if [ -z "${POSITIONS:-}" ]; then
    stage label 7 "$PYTHON" -m tools.chess_label "$positions" $label
    if [ -e "$OUT/label.done" ] && [ ! -e "$positions" ]; then # cut: all but the last line, which may be half written
        sed '1d;$d' "$positions.partial" | tr '\t' '\n' | sed '/^$/d' | gzip >"$positions.tmp"
        mv "$positions.tmp" "$positions"
    fi
fi
read -ra tiny <<<"$OUT/tiny --data builtin $positions $tiny"
read -ra gpt2 <<<"$OUT/gpt2 --data builtin $positions $gpt2 $format_gpt2"
evaluate=("$PYTHON" -m tools.chess_benchmark --markdown)
stage pretrain-tiny 13 "$PYTHON" -m tools.chess_pretrain "${tiny[@]}" --steps $steps_tiny --decay 0
stage decay-tiny 4 bash -c "$decay" decay tiny "${tiny[@]}"
stage pretrain-gpt2 14 "$PYTHON" -m tools.chess_pretrain "${gpt2[@]}" --steps $steps_gpt2 --decay 0
stage decay-gpt2 5 bash -c "$decay" decay gpt2 "${gpt2[@]}"
stage before-tiny 4 "${evaluate[@]}" "$OUT/tiny" $table
stage before-gpt2 4 "${evaluate[@]}" "$OUT/gpt2" $table
stage grpo-tiny 8 "$PYTHON" train.py MODEL="$OUT/tiny" OUT_DIR="$OUT/grpo-tiny" $grpo
stage grpo-gpt2 12 "$PYTHON" train.py MODEL="$OUT/gpt2" OUT_DIR="$OUT/grpo-gpt2" $grpo
stage after-tiny 5 "${evaluate[@]}" "$OUT/tiny" "$OUT/grpo-tiny/model" $table
stage after-gpt2 6 "${evaluate[@]}" "$OUT/gpt2" "$OUT/grpo-gpt2/model" $table
# Not measured. They come on top of the half hour, and only where a model is named: an id on the hub, or a folder.
long="STEPS=100000 LR_SCHEDULE=constant EVAL_EVERY=0 EVAL_POSITIONS=200"
[ -z "${QWEN:-}" ] || stage grpo-gsm8k 50 "$PYTHON" train.py TASK=examples/gsm8k.py MODEL="$QWEN" \
    DATA="${GSM8K:-builtin}" OUT_DIR="$OUT/grpo-gsm8k" $long
[ -z "${CODER:-}" ] || stage grpo-ocaml 50 "$PYTHON" train.py TASK=examples/ocaml.py MODEL="$CODER" \
    OUT_DIR="$OUT/grpo-ocaml" DTYPE=auto COMPILE=auto $long
stage bench 18 "${bench[@]}" --json "$OUT/bench.json"
[ -e "$OUT/summary.md" ] || fail "no stage was run: grpo-gsm8k needs QWEN, grpo-ocaml needs CODER, and POSITIONS replaces label."
cat "$OUT/summary.md"
