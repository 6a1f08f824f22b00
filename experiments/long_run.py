"""A long run of the embedded model: does it hold its memory and its speed?

    python -m experiments.long_run OUT_DIR            # 2,000 steps; about 17 minutes on one core

Trains with OUT_DIR (new), looks at the memory of the process after every step, and says what became of both between
the steps 200 and STEPS, in tenths. Exits with 1 if the memory of a tenth is more than 2 % off that of the first.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = dict(STEPS=2000, BATCH_POSITIONS=1, GROUP_SIZE=2, MAX_NEW_TOKENS=80, MIX_ENV_RATIO=0)
SETTINGS |= dict(LR=1e-6, KL_COEF=0, EVAL_EVERY=0, EVAL_POSITIONS=1, SAVE_EVERY=100, DTYPE="float32", NPROC=1)
SKIP = 200  # steps, until caches are full


def memory(pid):
    """MB that the process uses now."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def train(out):
    """Runs train.py; memory after each step."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in SETTINGS.items()}}
    process = subprocess.Popen([sys.executable, "train.py", f"OUT_DIR={out}"], cwd=ROOT, env=env, stdout=-1, text=True)
    used = [memory(process.pid) for line in process.stdout if line.startswith("step ")]
    if process.wait():
        sys.exit(process.returncode)
    return used


def tenths(values):
    size = len(values) // 10
    return [statistics.median(values[i * size : (i + 1) * size]) for i in range(10)]


def main():
    used = train(sys.argv[1])
    rows = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
    assert [row["step"] for row in rows] == list(range(1, SETTINGS["STEPS"] + 1)), "a step is missing"
    seconds = [sum(row["seconds"].values()) for row in rows]
    memories, times = tenths(used[SKIP:]), tenths(seconds[SKIP:])
    print("| tenth | memory (MB) | step (ms) |\n| ---: | ---: | ---: |")
    for i, (mb, second) in enumerate(zip(memories, times), 1):
        print(f"| {i} | {mb:.1f} | {1000 * second:.0f} |")
    spread = max(abs(mb / memories[0] - 1) for mb in memories)
    faster = statistics.median(seconds[-SKIP:]) / statistics.median(seconds[SKIP : 2 * SKIP]) - 1
    print(f"memory within {spread:.1%} of the first tenth; the last {SKIP} steps take {faster:+.1%} time")
    sys.exit(spread > 0.02)


if __name__ == "__main__":
    main()
