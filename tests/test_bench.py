import mmap
import re
import sys

import pytest
import torch

import examples.mates
import rewards
import train
from model import GPTConfig
from nanorook import sizes
from tools import bench

CPU = torch.device("cpu")
SIZES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, vocab_size=300)
SIZES |= dict(num_attention_heads=6, num_key_value_heads=2)


def smaller(workload):
    other = isinstance(workload.config, dict)
    shape = workload.config | SIZES if other else GPTConfig(257, 160, 32, 2, 2, eos_token_id=256)
    return workload._replace(config=shape, prompts=2, group=2, new=5)


@pytest.fixture
def small(monkeypatch):
    found = {title: smaller(w) for title, w in bench.workloads(CPU).items()}
    monkeypatch.setattr(bench, "workloads", lambda device: found)
    monkeypatch.setattr(bench.os, "environ", {**bench.os.environ})  # which main() changes
    return found, bench.random_prompts(2, 60)


def test_figures_are_medians_of_rounds():
    """The machine gets slower from round to round, and once halts in the middle of one."""
    rounds = [{"nanorook": (a, 1.0), "peer": (b, 2.0)} for a, b in ((1.0, 3.0), (2.0, 6.0), (4.0, 40.0))]
    median, ratio = bench.summary(rounds, bench.Workload("", None, 2, 2, 5)).splitlines()
    assert median.split() == "median 2.000 s, 1.000 s of CPU, 10 tokens/s".split()
    assert ratio.split() == "peer takes 3.00 times as long, 2.00 times the CPU time".split()


@pytest.mark.slow
@pytest.mark.parametrize("title", ["W3", "W6"])
def test_a_step_is_compared_with_the_settings_of_trl_that_are_named(title, small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", title, "--only", "float32", "--runs", "2"])
    bench.main()
    said = capsys.readouterr().out
    assert re.findall("(.+) takes ", said) == ["  TRL, float32"] and "peak memory" in said
    assert said.count("  TRL, float32  ") == 3  # one does not count


def test_the_peak_of_memory_is_that_of_one_workload():
    with mmap.mmap(-1, 2 * 10**8) as memory:
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 1  # what is never written does not exist
    before = bench.peak_memory(CPU)
    bench.reset_peak(CPU)
    assert bench.peak_memory(CPU) < before - 0.1


def test_two_workloads_have_the_sizes_of_rookworlds_model():
    """Two of the eight questions of a step ask for a whole answer, six for a first candidate: 40 tokens on average."""
    sized = sizes.TABLE[50e6]["BATCH_POSITIONS"], sizes.TABLE[50e6]["GROUP_SIZE"]
    whole, first = rewards.LIMITS["policy"], rewards.LIMITS["moves"]
    default, mates = (bench.workloads(CPU)[title] for title in ("W8", "W9"))
    assert default[1:6] == (GPTConfig(), *sized, (2 * whole + 6 * first) // 8, train.KL_COEF)
    assert mates[1:6] == (GPTConfig(), *sized, first, examples.mates.DEFAULTS["KL_COEF"])


@pytest.mark.parametrize("workload", ["W4", "W7"])
def test_a_step_of_the_bench_is_a_step_of_training(workload, small, monkeypatch):
    seen, original = [], train.update
    monkeypatch.setattr(train, "update", lambda *a: seen.append(original(*a)) or seen[-1])
    model, step = bench.prepare(small[0][workload], small[1], CPU, torch.float32)
    before = model.wte.weight.clone()
    step(), step()
    first, later = seen
    assert first["tokens"] == 2 * 2 * 5 and not first["skipped"] and first["grad_norm"] > 0
    if workload == "W4":  # the other one has no reference
        assert abs(first["kl"]) < 1e-8 < later["kl"]
    assert later["logprob_gap"] < 1e-4 and all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(before, model.wte.weight)
