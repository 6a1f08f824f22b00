"""What one and two processes take for the same step on this machine, and the costs that the model needs.

    python -m experiments.scaling.measure [STEPS]      # 8 steps each: about 4 minutes on 2 quiet cores

Writes measured.json beside itself; `python -m experiments.scaling.model` compares it with what the model says.
"""

import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import data
import parallel
import tasks
from model import GPT
from rewards import grade
from skill import sample_and_grade

HERE = Path(__file__).parent
SETTINGS = dict(BATCH_POSITIONS=16, GROUP_SIZE=8, DTYPE="float32", TRAIN="all", EVAL_EVERY=0, EVAL_POSITIONS=1)
RUNS = [(1, 1), (1, 2), (2, 1)]  # processes, threads of each


def run(processes, threads, steps):
    """The median step of train.sh, without the first, which warms up."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "PYTHON": sys.executable, "NPROC": str(processes), "OMP_NUM_THREADS": str(threads)}
        env |= {name: str(value) for name, value in SETTINGS.items()}
        env |= {"STEPS": str(steps + 1), "SAVE_EVERY": "1000000", "OUT_DIR": folder}
        subprocess.run(["./train.sh"], cwd=HERE.parent.parent, env=env, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")][1:]
    found = {part: statistics.median(row["seconds"][part] for row in rows) for part in ("rollout", "update")}
    found["length"] = round(statistics.mean(row["length"] for row in rows), 1)
    return {"processes": processes, "threads": threads, "steps": steps, **found}


def best(work, repeats, clock=time.process_time):
    """Seconds of the quickest of some tries; of this process alone, so other work on the machine hardly matters."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return min(times)


def serial():
    """Seconds that a prompt or a completion costs in Python, on one core; and how much lengths differ."""
    model, rng = GPT.load("weights/tiny"), random.Random(0)
    positions = rng.sample(data.load("builtin"), 200)
    samples = [tasks.policy_sample(p, "expanded") for p in positions]
    found = {
        "policy_sample": best(lambda: [tasks.policy_sample(p, "expanded") for p in positions], 5) / 200,
        "environment_sample": best(lambda: [tasks.environment_sample(p, rng, "expanded") for p in positions], 5) / 200,
    }
    rollout, texts, grades = sample_and_grade(model, samples[:32], 8, 144, 1.0, torch.Generator().manual_seed(0))
    owners = [sample for sample in samples[:32] for _ in range(8)]
    graded = list(zip([sample.prompt for sample in owners], texts, grades))
    packed = pickle.dumps(graded)
    said = rollout.tokens.tolist()

    def read_and_grade():
        return [grade(s.prompt, model.tokenizer.decode(row), s.labels, False) for s, row in zip(owners, said)]

    found["grade"] = best(read_and_grade, 5) / 256
    found["pickle"] = best(lambda: pickle.dumps(graded), 5) / 256
    found["unpickle"] = best(lambda: pickle.loads(packed), 5) / 256
    found["pickled_bytes"] = len(packed) / 256
    found["noise"] = best(lambda: torch.rand(256, 8, 144), 5) / (256 * 8 * 144)
    lengths = rollout.mask.sum(1).float()
    found |= {"length_mean": lengths.mean().item(), "length_sd": lengths.std().item()}
    return found | {"group_sd": lengths.view(32, 8).mean(1).std().item()}  # what makes processes unequal


def reduce():
    """In each of two processes: the gradients of the embedded model added up, one by one and all at once."""
    parallel.start("cpu")
    grads = [torch.ones_like(p) for p in GPT.load("weights/tiny").parameters()]
    flat, small = torch.cat([grad.flatten() for grad in grads]), torch.ones(1)
    clock = time.perf_counter
    found = {
        "tensors": len(grads),
        "bytes": 4 * flat.numel(),
        "one_by_one": best(lambda: [parallel.total(grad) for grad in grads], 20, clock),
        "all_at_once": best(lambda: parallel.total(flat), 20, clock),
        "latency": best(lambda: [parallel.total(small) for _ in range(100)], 20, clock) / 100,
    }
    if parallel.RANK == 0:
        (HERE / "reduce.json").write_text(json.dumps(found))
    parallel.finish()


def products(threads):
    """FLOPs a second of a product of the embedded model's update."""
    torch.set_num_threads(threads)
    x, w = torch.randn(2048, 256), torch.randn(1024, 256)
    return 2 * 2048 * 256 * 1024 / best(lambda: x @ w.t(), 50, time.perf_counter)


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    torch.set_num_threads(1)
    found = {"date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0], "settings": SETTINGS, "serial": serial()}
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m".split()
    subprocess.run([sys.executable, *command, __spec__.name, "reduce"], check=True)
    found["reduce"] = json.loads((HERE / "reduce.json").read_text())
    (HERE / "reduce.json").unlink()
    found["flops"] = {threads: products(threads) for threads in (1, 2)}
    found["runs"] = []
    for processes, threads in RUNS:
        found["runs"].append(run(processes, threads, steps))
        print(found["runs"][-1], flush=True)
    (HERE / "measured.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    reduce() if sys.argv[1:] == ["reduce"] else main()
