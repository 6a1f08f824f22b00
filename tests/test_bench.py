"""tools/bench.py and tools/limits.py: the counting against PyTorch's own counter, and what a small run reports."""

import json
import os
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import parallel
import train
from model import GPT, GPTConfig
from rollout import generate, pad_prompts
from tools import bench, limits, peers
from tools.team import Team

CONFIG = GPTConfig(97, 160, 64, 3, 4, eos_token_id=96)


@pytest.fixture(autouse=True)
def settings():
    """bench sets train's; the tests after these want them as they were."""
    before = {name: value for name, value in vars(train).items() if name.isupper()}
    yield
    vars(train).update(before)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT(CONFIG)


@pytest.fixture(scope="module")
def found():
    return bench.positions()


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_forward_flops_are_pytorchs_where_nothing_is_masked(model):
    """Prompts of one token share nothing, and completions of one token see themselves: then all products count."""
    tokens, lengths, completions = torch.zeros(3, 1).long(), torch.ones(3).long(), torch.zeros(12, 1).long()
    expected = limits.forward_flops(CONFIG, [1] * 3, 4, 1)
    assert counted(lambda: model(torch.zeros(12, 1).long())) == expected
    assert counted(lambda: model.score(tokens, lengths, completions).sum().backward()) == 3 * expected


@pytest.mark.parametrize("lengths, group, new", [([20, 24, 31], 4, 16), ([2, 2], 1, 40), ([90], 16, 2)])
def test_a_rollout_and_an_update_do_the_work_that_is_counted_and_little_else(model, lengths, group, new):
    """Beyond the formula are masked pairs, padding and layer L of the prompts: all known, all counted here."""
    prompts = [[1] * n for n in lengths]
    (tokens, sizes), N = pad_prompts(prompts, "cpu"), len(lengths) * group
    C, L, S = CONFIG.n_embd, CONFIG.n_layer, max(lengths) - 1
    needed = limits.forward_flops(CONFIG, lengths, group, new)
    # The whole rectangle of prompts through L - 1 layers, and with every pair; at most all of layer L, too
    shared = sum(n - 1 for n in lengths)
    padding = (len(lengths) * S - shared) * (24 * (L - 1) + 4) * C * C
    pairs = len(lengths) * S * S * 4 * C * (L - 1) - sum(n * (n - 1) // 2 for n in lengths) * 4 * C * (L - 1)
    last = len(lengths) * S * (20 * C * C + 4 * C * S)
    own = N * new * (S + new) - sum(group * (new * (n - 1) + new * (new + 1) // 2) for n in lengths)
    assert own >= 0 and pairs >= 0
    known = needed + padding + pairs + own * 4 * C * L
    assert (
        known <= counted(lambda: model.score(tokens, sizes, torch.zeros(N, new).long())) <= known + last
    )  # layer L may be left out
    # Decoding sees as many keys as its cache has room for, never more than all
    assert needed <= counted(lambda: generate(model, prompts, group, new, eos=-1)) <= known + last


def test_bytes_are_those_of_weights_caches_and_optimizer(model):
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name != "wpe.weight")
    layer, head = limits.matrices(CONFIG)
    assert CONFIG.n_layer * layer + head == matrices
    # one prompt of 11 tokens, one row, one new token: ten shared keys and values and one of its own
    assert limits.decoding_bytes(CONFIG, [11], 1, 1, 4) == 4 * (matrices + 11 * 2 * 3 * 64)
    # two rows share their prompt's cache, but not their own
    more = limits.decoding_bytes(CONFIG, [11], 2, 3, 4) - limits.decoding_bytes(CONFIG, [11], 1, 3, 4)
    assert more == 4 * (1 + 2 + 3) * 2 * 3 * 64
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    kept = sum(t.numel() * t.element_size() for t in [*parameters, *state])
    count = sum(p.numel() for p in parameters)
    # weights and both moments are read and written, the gradient is read twice
    assert limits.parts(CONFIG, count, [11], 1, 1, 4, False)["optimizer"].bytes == 2 * kept + 2 * 4 * count


def test_the_limit_is_the_larger_of_products_and_copies(monkeypatch):
    monkeypatch.setattr(limits, "matmul_rate", lambda *a: 50.0 if a[-1] else 100.0)  # a[-1]: backward, too
    monkeypatch.setattr(limits, "copy_rate", lambda size, device: 10.0)
    work = {"rollout": limits.Part(1000, 50), "update": limits.Part(100, 500), "optimizer": limits.Part(0, 20)}
    least, rates = limits.seconds(CONFIG, work, 4, 5, torch.float32, "cpu")
    assert least == {"rollout": 10.0, "update": 50.0, "optimizer": 2.0}
    assert rates["flops_per_second"] == {"rollout": 100.0, "update": 50.0}


@pytest.fixture
def tiny(monkeypatch):
    """bench's own road with workloads of a few tokens, on the CPU."""
    small = {"config": GPTConfig(257, 160, 32, 2, 2, eos_token_id=256), "prompts": 2, "group": 2, "new": 5}
    some = {"W1": bench.Workload("rollout", **small), "W4": bench.Workload("step", **small, kl=0.02)}
    settings = dict(list(peers.SETTINGS.items())[:2]) | {"broken": (torch.float32, "none such", "gelu_new", False)}
    monkeypatch.setattr(peers, "SETTINGS", settings)
    monkeypatch.setattr(bench, "WORKLOADS", some)
    monkeypatch.setattr(bench, "DTYPES", {"float32": torch.float32, "bfloat16": torch.bfloat16})
    monkeypatch.setattr(bench, "GROWTH", {"group": (2, 4), "prompts": (2, 4), "new": (3, 6)})
    monkeypatch.setattr(bench, "GROWS", some["W4"]._replace(kl=0.0))
    monkeypatch.setattr(bench, "CUDA", False)
    monkeypatch.setattr(bench, "PROCESSES", 1)
    for name, value in {"DEVICE": "cpu", "REF_DEVICE": "cpu", "COMPILE": False}.items():
        monkeypatch.setattr(train, name, value)
    return some


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
    bench.main()


def test_a_small_run_reports_what_it_promises(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "default_run", lambda runs: {"runs": runs})
    run(monkeypatch, "--runs", 3, "--json", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result) == {"machine", "threads", "run", "workloads", "growth"} and result["run"] == {"runs": 3}
    assert "tools.bench --runs 3" in result["machine"]["command"] and set(result["workloads"]) == {"W1", "W4"}
    for name, halves in (("W1", {"rollout"}), ("W4", {"rollout", "update"})):
        assert set(result["workloads"][name]["ours"]) == {"float32", "bfloat16"}
        for row in result["workloads"][name]["ours"].values():
            assert len(row["all_seconds"]) == 3 and row["seconds"] == sorted(row["all_seconds"])[1]
            assert row["tokens_per_second"] == pytest.approx(2 * 2 * 5 / row["seconds"])
            assert 0 < row["of_limit"] < 1 and 0.05 < row["peak_memory_gb"] < 100
            assert set(row["halves"]) == halves and all(s > 0 for s in row["halves"].values())
            assert set(row["limit"]) == set(row["work"]) == (halves if name == "W1" else halves | {"optimizer"})
            assert all(s > 0 for s in [*row["phases"].values(), *row["limit"].values()])
            assert sum(row["limit"].values()) < row["seconds"]
    w1, w4 = result["workloads"]["W1"], result["workloads"]["W4"]
    assert set(w1["ours"]["float32"]["phases"]) == {"prefill", "decoding", "rest"}
    assert set(w4["ours"]["float32"]["phases"]) == {"rest"} | {phase for _, _, phase, _ in bench.STEP_PHASES}
    assert set(w1["transformers"]) == set(peers.SETTINGS) and "failed" in w1["transformers"]["broken"]
    assert peers.DEFAULT in w1["others"] and all(len(seconds) == 3 for seconds in w1["others"].values())
    grown = [(row["group"], row["prompts"], row["new"]) for row in result["growth"]]
    assert grown == [(2, 2, 5), (4, 2, 5), (2, 2, 5), (2, 4, 5), (2, 2, 3), (2, 2, 6)]
    assert result["growth"][1]["gflop"] < result["growth"][0]["gflop"]  # a larger group shares its prompt further
    said = capsys.readouterr().out
    assert limits.EXPLANATION in said and "of the limit" in said and "times as fast" in said


def test_ratios_are_medians_of_pairs(tiny, found, monkeypatch):
    """The machine gets slower from round to round, and once halts in the middle of a round."""
    ours, theirs, halt = [1.0, 2.0, 4.0], [3.0, 6.0, 40.0], iter([0.5, 1.0, 2.0])
    monkeypatch.setattr(bench, "DTYPES", {"float32": torch.float32})
    monkeypatch.setattr(bench, "rollouts", lambda *a: lambda dtype, i: {"rollout": ours[i - 10] if i >= 10 else 1.0})
    monkeypatch.setattr(peers, "generate", lambda *a: {peers.DEFAULT: lambda i: theirs[i]})
    monkeypatch.setattr(limits, "seconds", lambda *a: ({"rollout": next(halt)}, {}))
    r = bench.measure(tiny["W1"], found, 3)
    assert r["transformers"] == {peers.DEFAULT: 6.0}  # the better of the two after the first
    row = r["ours"]["float32"]
    assert row["times_as_fast"] == {peers.DEFAULT: 3.0} and row["of_limit"] == 0.5 and row["seconds"] == 2.0


def report_for_duty(pipe, seconds):
    """A member of a team that takes a second longer than the one before."""
    while True:
        (i,) = pipe.recv()
        pipe.send({"world": parallel.WORLD, "late": parallel.RANK * seconds, "asked": i})


def test_a_team_is_as_fast_as_its_slowest_member():
    team = Team(2, report_for_duty, 0.5)
    assert team.ask(7) == {"world": 2, "late": 0.5, "asked": 7} and team.ask(8)["asked"] == 8
    team.dismiss()
    assert not any(process.is_alive() for process, _ in team.members)
    assert "RANK" not in os.environ


@pytest.mark.slow
def test_two_processes_share_a_workload(tiny, found, monkeypatch):
    monkeypatch.setattr(bench, "PROCESSES", 2)
    rows = {"float32", "bfloat16", "float32, 2 processes", "bfloat16, 2 processes"}
    for w, peer in ((tiny["W1"], {peers.DEFAULT, f"{peers.DEFAULT}, 2 processes"}), (tiny["W4"], set())):
        r = bench.measure(w, found, 2)
        assert set(r["ours"]) == rows and peer <= set(r["others"])
        for name, row in r["ours"].items():
            assert len(row["all_seconds"]) == 2 and 0 < row["of_limit"] < 1
            assert all(s > 0 for s in row["halves"].values()) and ("phases" in row) == ("processes" not in name)
            assert peer <= set(row["times_as_fast"])
        bench.show("W", r)


def test_the_processes_of_a_workload_have_different_prompts(tiny, found, monkeypatch):
    shares = []
    for rank in range(2):
        monkeypatch.setattr(parallel, "RANK", rank)
        monkeypatch.setattr(parallel, "WORLD", 2)
        shares.append(bench.start(tiny["W1"]._replace(prompts=5), found)[2])
    monkeypatch.undo()
    whole = bench.start(tiny["W1"]._replace(prompts=5), found)[2]
    assert shares == [whole[::2], whole[1::2]] and len(whole) == 5


def test_peers_complete_the_same_prompts_with_the_same_weights(model, monkeypatch):
    """Where only the likeliest token may be drawn, transformers' side makes the project's own greedy tokens."""
    from transformers import GPT2LMHeadModel

    seen, original = [], GPT2LMHeadModel.generate

    def greedy(self, **settings):
        assert settings["do_sample"] and settings.pop("top_k") == 0
        seen.append(original(self, top_k=1, **settings))
        return seen[-1]

    monkeypatch.setattr(GPT2LMHeadModel, "generate", greedy)
    prompts = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 14)]
    runners = peers.generate(model, prompts, 3, 12, "cpu")
    assert set(runners) == set(peers.SETTINGS)
    seconds = [runners[name](0) for name in list(runners)[:3]]  # those in fp32
    expected = generate(model, prompts, 3, 12, temperature=0, eos=-1).tokens
    assert all(s > 0 for s in seconds) and len(seen) == 3
    for tokens in seen:
        assert torch.equal(tokens[:, 14:], expected)


def test_a_step_of_the_bench_is_a_step_of_training(tiny, found, monkeypatch):
    """The reference is consulted, every token is trained, and the weights move."""
    seen, original = [], train.update
    monkeypatch.setattr(train, "update", lambda *a: seen.append(a + (original(*a),)))
    step, model, _ = bench.start(tiny["W4"], found)
    before = model.wte.weight.clone()
    step(torch.float32, 0)
    step(torch.bfloat16, 1)
    (_, first, _, _, kl, metrics), (_, second, _, _, _, later) = seen
    assert metrics["tokens"] == 2 * 2 * 5 and not metrics["skipped"] and metrics["grad_norm"] > 0
    assert abs(metrics["kl"]) < 1e-6 < later["kl"] and kl == 0.02 and later["logprob_gap"] < 0.05
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(before, model.wte.weight)


def test_the_default_run_is_measured_by_phase(tiny, monkeypatch):
    for name, value in {"BATCH_POSITIONS": 2, "GROUP_SIZE": 2, "TASKS": {"P: ": 4, "A: ": 4}}.items():
        monkeypatch.setattr(train, name, value)
    seen = bench.default_run(1)
    halves = seen.pop("rollout") + seen.pop("update")
    assert seen.pop("whole step") == halves > 0
    assert set(seen) == {"rest"} | {phase for _, _, phase, _ in bench.STEP_PHASES}
    assert sum(seen.values()) == pytest.approx(halves, rel=0.1)


def test_recompiles_and_memory_are_counted_from_the_end_of_the_warm_up(tiny, found, monkeypatch):
    graphs, drawn = {"unique_graphs": 0}, []
    monkeypatch.setattr(torch._dynamo.utils, "counters", {"stats": graphs})
    monkeypatch.setattr(bench, "peak_memory", lambda device: 1.0 + graphs["unique_graphs"])

    def step(dtype, i, samples):
        drawn.append(samples)
        graphs["unique_graphs"] += len(drawn) < 3 or len(drawn) == 6  # two graphs at first, one after the warm-up

    seen = bench.watch(step, found, 2, 8, warm=4)
    assert seen == {"steps": 8, "warm_up": 4, "recompiles": 1, "grown_gb": 1.0}
    assert all(50 <= len(s.prompt) <= 70 for samples in drawn for s in samples)
    assert len({tuple(s.prompt for s in samples) for samples in drawn}) == 8  # other prompts in every step


def test_phases_add_up_and_leave_nothing_changed(monkeypatch):
    class Work:
        def outer(self):
            self.inner()

        def inner(self):
            pass

    ticks, original = iter(range(100)), Work.outer
    monkeypatch.setattr(bench, "clock", lambda: next(ticks))
    with bench.phases([(Work, "outer", "out", "rest"), (Work, "inner", "in", "out")]) as spent:
        Work().outer()
        Work().inner()  # not within outer: counts as rest
    assert spent == {"rest": 2, "out": 2, "in": 1} and Work.outer is original


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["W9"], "'W9'"),
        (["--speed=1"], "--speed=1"),
        (["--runs", "0"], "--runs 0"),
        (["--json", "nowhere/out.json"], "nowhere/out.json"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as leaving:
        run(monkeypatch, *arguments)
    assert leaving.value.code and said in f"{leaving.value.code} {capsys.readouterr().err}"
