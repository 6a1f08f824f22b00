"""tools/bench.py: what it counts against PyTorch's own counter, and what a small run reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import train
from model import GPT, GPTConfig
from rollout import generate, pad_prompts
from tools import bench

CONFIG = GPTConfig(97, 160, 64, 3, 4, eos_token_id=-1)
CPU = torch.device("cpu")
SMALL = {"config": GPTConfig(257, 160, 32, 2, 2, eos_token_id=256), "prompts": 2, "group": 2, "new": 5}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT(CONFIG)


@pytest.fixture(scope="module")
def asked():
    return bench.questions()


@pytest.fixture
def small(monkeypatch, asked):
    """bench's own road with workloads of a few tokens."""
    found = {title: w._replace(**SMALL) for title, w in bench.workloads(CPU).items()}
    monkeypatch.setattr(bench, "workloads", lambda device: found)
    monkeypatch.setattr(bench, "questions", lambda: asked)
    return found


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    bench.main()
    torch.set_flush_denormal(False)


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# The limit


def test_forward_flops_are_pytorchs_where_nothing_is_masked(model):
    """Prompts of one token share nothing, and completions of one token see themselves: then all products count."""
    tokens, lengths, completions = torch.zeros(3, 1).long(), torch.ones(3).long(), torch.zeros(12, 1).long()
    expected = bench.forward_flops(CONFIG, [1] * 3, 4, 1)
    assert counted(lambda: model(torch.zeros(12, 1).long())) == expected
    assert counted(lambda: model.score(tokens, lengths, completions).sum().backward()) == 3 * expected


@pytest.mark.parametrize("lengths, group, new", [([20, 24, 31], 4, 16), ([2, 2], 1, 40), ([90], 16, 2)])
def test_a_rollout_and_an_update_do_the_work_that_is_counted_and_little_else(model, lengths, group, new):
    """Beyond the formula are masked pairs, padding and layer L of the prompts: all known, all counted here."""
    prompts = [[1] * n for n in lengths]
    (tokens, sizes), N = pad_prompts(prompts, "cpu"), len(lengths) * group
    C, L, S = CONFIG.n_embd, CONFIG.n_layer, max(lengths) - 1
    needed = bench.forward_flops(CONFIG, lengths, group, new)
    padding = (len(lengths) * S - sum(n - 1 for n in lengths)) * (24 * (L - 1) + 4) * C * C
    pairs = len(lengths) * S * S * 4 * C * (L - 1) - sum(n * (n - 1) // 2 for n in lengths) * 4 * C * (L - 1)
    last = len(lengths) * S * (20 * C * C + 4 * C * S)
    own = N * new * (S + new) - sum(group * (new * (n - 1) + new * (new + 1) // 2) for n in lengths)
    known = needed + padding + pairs + own * 4 * C * L
    done = counted(lambda: model.score(tokens, sizes, torch.zeros(N, new).long()))
    assert own >= 0 and pairs >= 0 and known <= done <= known + last
    assert needed <= counted(lambda: generate(model, prompts, group, new)) <= known + last


def test_bytes_are_those_of_weights_caches_and_optimizer(model):
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "wpe.weight")
    w = bench.Workload("", CONFIG, 1, 1, 1, kl=0.0)
    # one prompt of 11 tokens, one row, one new token: ten shared keys and values and one of its own
    assert bench.needed(w, [11], 0, 4)["rollout"].bytes == 4 * (matrices + 11 * 2 * 3 * 64)
    wide = w._replace(group=2, new=3)  # two rows share their prompt's cache, but not their own
    more = (
        bench.needed(wide, [11], 0, 4)["rollout"].bytes - bench.needed(w._replace(new=3), [11], 0, 4)["rollout"].bytes
    )
    assert more == 4 * (1 + 2 + 3) * 2 * 3 * 64
    count = sum(p.numel() for p in model.parameters())  # weights and both moments twice, the gradient twice
    assert bench.needed(w, [11], count, 4)["optimizer"].bytes == 2 * 4 * 3 * count + 2 * 4 * count
    assert set(bench.needed(w._replace(kl=None), [11], count, 4)) == {"rollout"}


def test_the_limit_is_the_larger_of_products_and_copies(monkeypatch):
    monkeypatch.setattr(bench, "matmul_rate", lambda *a: 50.0 if a[-1] else 100.0)  # a[-1]: backward, too
    monkeypatch.setattr(bench, "copy_rate", lambda size, device: 10.0)
    parts = {"rollout": bench.Part(1000, 50), "update": bench.Part(100, 500), "optimizer": bench.Part(0, 20)}
    w = bench.Workload("", CONFIG, 2, 2, 5)
    assert bench.limit(w, parts, torch.float32, CPU) == {"rollout": 10.0, "update": 50.0, "optimizer": 2.0}


# A run


def test_a_small_run_reports_what_it_promises(small, tmp_path, monkeypatch, capsys):
    broken = {"broken": (torch.float32, "none such", {})}
    monkeypatch.setattr(bench, "TRANSFORMERS", dict(list(bench.TRANSFORMERS.items())[:2]) | broken)
    monkeypatch.setattr(bench, "TRL", {"float32": bench.TRL["float32"]})
    run(monkeypatch, "W1", "W4", "--runs", 2, "--json", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert "W1 W4 --runs 2" in result["machine"]["command"] and set(result["workloads"]) == {"W1", "W4"}
    for title, other in (("W1", "transformers, default"), ("W4", "TRL, float32")):
        w = result["workloads"][title]
        assert set(w["ours"]) == {"float32", "bfloat16"} and len(w["others"][other]) == 2
        for row in w["ours"].values():
            assert row["tokens_per_second"] == pytest.approx(2 * 2 * 5 / row["seconds"])
            assert 0 < row["of_limit"] < 1 and row["times_as_fast"][other] > 0
    said = capsys.readouterr().out
    assert "broken: failed" in said and "of the limit" in said and "times as fast as TRL, float32" in said


def test_only_nanorook_and_many_steps(small, monkeypatch, capsys):
    monkeypatch.setattr(bench, "silence", lambda: 1 / 0)  # the others are not even imported
    monkeypatch.setattr(bench, "limit", lambda *a: 1 / 0)
    run(monkeypatch, "W3", "--runs", 1, "--only", "nanorook", "--watch", 21)
    said = capsys.readouterr().out
    assert said.count("nanorook, float32") == said.count("nanorook, bfloat16") == 1
    assert "21 steps: 0 graphs compiled" in said and "transformers" not in said


def test_ratios_are_medians_of_rounds():
    """The machine gets slower from round to round, and once halts in the middle of a round."""
    rounds = [{"float32": a, "limit, float32": a / 2, "peer, x": b} for a, b in ((1.0, 3.0), (2.0, 6.0), (4.0, 40.0))]
    result = {"ours": {}}
    bench.summarise(result, rounds, small_workload := bench.Workload("", CONFIG, 2, 2, 5))
    row = result["ours"]["float32"]
    assert row["times_as_fast"] == {"peer, x": 3.0} and row["of_limit"] == 0.5 and row["seconds"] == 2.0
    assert row["tokens_per_second"] == small_workload.new * 4 / 2


def test_transformers_completes_the_same_prompts_with_the_same_weights(small, asked, monkeypatch, tmp_path):
    """Where only the likeliest token may be drawn, its side makes the project's own greedy tokens."""
    from transformers import GPT2LMHeadModel

    seen, original = [], GPT2LMHeadModel.generate
    patched = lambda self, **settings: seen.append(original(self, **{**settings, "top_k": 1})) or seen[-1]  # noqa: E731
    monkeypatch.setattr(GPT2LMHeadModel, "generate", patched)
    w = small["W1"]
    model = bench.build(w, CPU)
    model.save(tmp_path)
    peers = bench.generators(w, model, asked[:2], tmp_path)
    for peer in list(peers)[:2]:  # those in fp32 and without a compiler
        assert peers[peer](0) > 0
    prompts = [model.tokenizer.encode(question.prompt) for question in asked[:2]]
    expected = generate(model, prompts, w.group, w.new, temperature=0).tokens
    assert len(seen) == 2 and all(torch.equal(tokens[:, max(map(len, prompts)) :], expected) for tokens in seen)


def test_a_step_of_the_bench_is_a_step_of_training(small, asked, monkeypatch):
    """The reference is consulted, every token is trained, and the weights move."""
    seen, original = [], train.update
    monkeypatch.setattr(train, "update", lambda *a: seen.append(a + (original(*a),)))
    w = small["W4"]
    model = bench.build(w, CPU)
    step, before = bench.steps(w, model, asked[:2]), model.wte.weight.clone()
    assert set(step(torch.float32, 0)) == {"rollout", "update"}
    step(torch.bfloat16, 1)
    (_, first, _, _, kl, metrics), (_, second, _, _, _, later) = seen
    assert metrics["tokens"] == 2 * 2 * 5 and not metrics["skipped"] and metrics["grad_norm"] > 0
    assert abs(metrics["kl"]) < 1e-6 < later["kl"] and kl == 0.02 and later["logprob_gap"] < 0.05
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(before, model.wte.weight)


def test_recompiles_and_memory_are_counted_from_the_end_of_the_warm_up(small, asked, monkeypatch):
    graphs, drawn = {"unique_graphs": 0}, []
    monkeypatch.setattr(torch._dynamo.utils, "counters", {"stats": graphs})
    monkeypatch.setattr(bench, "peak_memory", lambda device: 1.0 + graphs["unique_graphs"])

    def step(dtype, i, some):
        drawn.append(some)
        graphs["unique_graphs"] += len(drawn) < 3 or len(drawn) == 6  # two graphs at first, one after the warm-up

    seen = bench.watch(step, asked, small["W3"], CPU, 8, warm=4)
    assert seen == {"steps": 8, "warm_up": 4, "recompiles": 1, "grown_gb": 1.0}
    assert len({tuple(question.prompt for question in some) for some in drawn}) == 8  # other prompts in every step


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["W9"], "'W9'"),
        (["--speed=1"], "--speed=1"),
        (["--runs", "0"], "--runs 0"),
        (["--json", "no/o.json"], "no/o.json"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as leaving:
        run(monkeypatch, *arguments)
    assert said in f"{leaving.value}{capsys.readouterr().err}"


def test_settings_of_training_are_not_read_from_the_environment():
    """DTYPE=fp16 python -m tools.bench --help once failed."""
    command, root = [sys.executable, "-m", "tools.bench", "--help"], Path(bench.__file__).parent.parent
    result = subprocess.run(command, cwd=root, env={**os.environ, "DTYPE": "fp16"}, capture_output=True, text=True)
    assert result.returncode == 0 and "--only" in result.stdout, result.stderr
