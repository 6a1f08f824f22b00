"""Two processes take the same step as one with the same global batch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
STEP = """
import sys, torch
import data, parallel, train
from model import GPT

parallel.start("cpu")
train.DTYPE = torch.float32
model = GPT.load("weights/tiny")
positions = data.load("builtin")[:300]
batches, graded = train.rollout(model, train.draw_prompts(positions, 3, "expanded"), 3)
reference = GPT.load("weights/tiny")
with torch.no_grad():
    reference.h[0].ln_1.weight.mul_(1.1)  # so that there is a KL to pull on
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
metrics = train.update(model, reference, optimizer, batches, 0.1)
if parallel.RANK == 0:
    torch.save({"metrics": metrics, "weights": model.state_dict(), "texts": sorted(g[1] for g in graded)}, sys.argv[1])
parallel.finish()
"""


def step(tmp_path, processes, loss):
    (tmp_path / "step.py").write_text(STEP)
    out = tmp_path / f"{loss}-{processes}.pt"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOSS": loss, "SCALE_REWARDS": "batch"}
    env |= {"BATCH_POSITIONS": "4", "GROUP_SIZE": "4", "MIX_ENV_RATIO": "0.5", "EPOCHS": "2"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = run if processes > 1 else [sys.executable]
    result = subprocess.run([*command, str(tmp_path / "step.py"), str(out)], cwd=ROOT, env=env, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()[-2000:]
    return torch.load(out, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_two_processes_take_the_step_of_one(tmp_path, loss):
    one, two = step(tmp_path, 1, loss), step(tmp_path, 2, loss)
    assert one["texts"] == two["texts"] and len(one["texts"]) == 16
    assert one["metrics"]["kl"] > 1e-4 and one["metrics"]["grad_norm"] > 1e-3
    for name, value in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    moved = 0.0
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)
        moved = max(moved, (weight - two["weights"][name]).abs().max().item())
    assert moved < 1e-5
