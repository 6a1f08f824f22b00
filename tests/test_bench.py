"""tools/bench.py: what it counts against PyTorch's own counter, and what a small run reports."""

import json
import sys

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


def test_a_rollout_and_an_update_do_the_work_that_is_counted_and_little_else(model):
    """Beyond the formula are masked pairs, padding and the last layer of the prompts."""
    lengths, group, new = [20, 24, 31], 4, 16
    prompts, needed = [[1] * n for n in lengths], bench.forward_flops(CONFIG, lengths, group, new)
    completions = torch.zeros(len(lengths) * group, new).long()
    assert needed <= counted(lambda: model.score(*pad_prompts(prompts, "cpu"), completions)) < 1.3 * needed
    assert needed <= counted(lambda: generate(model, prompts, group, new)) < 1.3 * needed


def test_bytes_are_those_of_weights_caches_and_optimizer(model):
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "wpe.weight")
    w = bench.Workload("", CONFIG, 1, 1, 1, kl=0.0)

    def rollout(**changes):
        return bench.needed(w._replace(**changes), [11], 0, 4)["rollout"].bytes

    # one prompt of 11 tokens, one row, one new token: ten shared keys and values and one of its own
    assert rollout() == 4 * (matrices + 11 * 2 * 3 * 64)
    # two rows share their prompt's cache, but not their own
    assert rollout(group=2, new=3) - rollout(new=3) == 4 * (1 + 2 + 3) * 2 * 3 * 64
    count = sum(p.numel() for p in model.parameters())  # weights and both moments twice, the gradient twice
    assert bench.needed(w, [11], count, 4)["optimizer"].bytes == 2 * 4 * 3 * count + 2 * 4 * count


def test_the_limit_is_the_larger_of_products_and_copies(monkeypatch):
    monkeypatch.setattr(bench, "matmul_rate", lambda *a: 50.0 if a[-1] else 100.0)  # a[-1]: backward, too
    monkeypatch.setattr(bench, "copy_rate", lambda size, device: 10.0)
    parts = {"rollout": bench.Part(1000, 50), "update": bench.Part(100, 500), "optimizer": bench.Part(0, 20)}
    w = bench.Workload("", CONFIG, 2, 2, 5)
    assert bench.limit(w, parts, torch.float32, CPU) == {"rollout": 10.0, "update": 50.0, "optimizer": 2.0}


# A run


def test_a_small_run_reports_what_it_promises(small, tmp_path, monkeypatch, capsys):
    broken = {"broken": (torch.float32, "none such", {})}
    monkeypatch.setattr(bench, "TRANSFORMERS", dict(list(bench.TRANSFORMERS.items())[:1]) | broken)
    monkeypatch.setattr(bench, "TRL", {"float32": bench.TRL["float32"]})
    run(monkeypatch, "W1", "W4", "--runs", 2, "--json", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert "W1 W4 --runs 2" in result["machine"]["command"] and set(result["workloads"]) == {"W1", "W4"}
    w = result["workloads"]["W4"]
    assert set(w["ours"]) == {"float32", "bfloat16"} and len(w["others"]["TRL, float32"]) == 2
    for row in w["ours"].values():
        assert row["tokens_per_second"] == pytest.approx(2 * 2 * 5 / row["seconds"])
        assert 0 < row["of_limit"] < 1 and row["times_as_fast"]["TRL, float32"] > 0
    said = capsys.readouterr().out
    assert "broken: failed" in said and "of the limit" in said and "times as fast as TRL, float32" in said


def test_only_nanorook_and_many_steps(small, monkeypatch, capsys):
    monkeypatch.setattr(bench, "silence", lambda: 1 / 0)  # the others are not even imported
    run(monkeypatch, "W3", "--runs", 1, "--only", "nanorook", "--watch", 21)
    said = capsys.readouterr().out
    assert said.count("nanorook, float32") == said.count("nanorook, bfloat16") == 1
    assert "21 steps: 0 graphs compiled" in said and "transformers" not in said


def test_ratios_are_medians_of_rounds():
    """The machine gets slower from round to round, and once halts in the middle of a round."""
    rounds = [{"float32": a, "limit, float32": a / 2, "peer, x": b} for a, b in ((1.0, 3.0), (2.0, 6.0), (4.0, 40.0))]
    result = {"ours": {}}
    bench.summarise(result, rounds, bench.Workload("", CONFIG, 2, 2, 5))
    row = result["ours"]["float32"]
    assert row["times_as_fast"] == {"peer, x": 3.0} and row["of_limit"] == 0.5 and row["seconds"] == 2.0
    assert row["tokens_per_second"] == 5 * 4 / 2


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
    monkeypatch.setattr(train, "update", lambda *a: seen.append(original(*a)) or seen[-1])
    w = small["W4"]
    model = bench.build(w, CPU)
    step, before = bench.steps(w, model, asked[:2]), model.wte.weight.clone()
    assert set(step(torch.float32, 0)) == {"rollout", "update"}
    step(torch.bfloat16, 1)
    first, later = seen
    assert first["tokens"] == 2 * 2 * 5 and not first["skipped"] and first["grad_norm"] > 0
    assert abs(first["kl"]) < 1e-6 < later["kl"] and later["logprob_gap"] < 0.05
    assert not torch.equal(before, model.wte.weight)
