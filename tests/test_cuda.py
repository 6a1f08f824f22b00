"""The CUDA path, on a pretended GPU or by the rule behind it: devices, captures, host waits, memory."""

import copy
import json
import shutil
import weakref

import pytest
import torch

import grpo
import pretend_cuda
import toy
import train
from model import GPT
from nanorook import hardware, parallel
from rollout import Batch, generate, microbatches


@pytest.fixture
def gpu(monkeypatch):
    with pretend_cuda.on(monkeypatch) as seen:
        yield seen


PROMPTS = [[7] * n for n in range(2, 7)]
NOISE = torch.rand(10, 18, generator=torch.Generator().manual_seed(3))


def sampled(model, device="cuda", prompts=PROMPTS, **options):
    twin = copy.deepcopy(model).to(device).cast(torch.float32)
    return generate(twin, prompts, 2, 18, noise=NOISE[: 2 * len(prompts)].to(device), **options).to("cpu")


def same(a, b):
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.hit_limit, b.hit_limit)
    torch.testing.assert_close(a.rollout_logprobs, b.rollout_logprobs, atol=1e-5, rtol=0)


# Rollouts
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_k": 15, "top_p": 0.9}])
def test_one_captured_graph_decodes_as_the_cpu_does(gpu, options):
    model = toy.model()
    model.config.eos_token_id = -1  # nothing ends early
    same(sampled(model, **options), sampled(model, "cpu", **options))
    assert gpu.captures == [17]  # the first of 18 steps loads libraries and is not captured
    same(sampled(model, graph=False, **options), sampled(model, "cpu", **options))
    assert gpu.captures == [17]


def test_decoding_stops_on_a_gpu_when_all_rows_have_ended(gpu):
    model = toy.model()
    model.ln_f.bias.data.mul_(10)
    same(sampled(model), sampled(model, "cpu"))
    assert gpu.captures[-1] < 8


def test_another_gpu_than_the_current_one_captures_its_own_kernels(gpu):
    same(sampled(toy.model(), "cuda:1"), sampled(toy.model(), "cpu"))


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda logits, t: logits + int(t), pretend_cuda.CaptureError),
        (lambda logits, t: logits[torch.isfinite(logits).all(1)], pretend_cuda.CaptureError),
        (lambda logits, t: logits + torch.zeros(257), pretend_cuda.DeviceError),
    ],
)
def test_what_a_capture_or_a_device_forbids_is_noticed(gpu, monkeypatch, change, error):
    decode = GPT.decode
    monkeypatch.setattr(GPT, "decode", lambda *args: change(decode(*args), args[-1]))
    with pytest.raises(error):
        sampled(toy.model())


# A whole run
def test_a_run_with_checkpoint_resume_and_going_back(gpu, toy_run, monkeypatch, tmp_path):
    waits, update = [], train.update

    def counted(model, *args, **options):
        gpu.waits.clear()
        metrics = update(model, *args, **options)
        waits.append(sum(not line.startswith("rollout.py") for line in gpu.waits))  # that cuts microbatches
        assert all(p.is_cuda for p in model.parameters())
        return metrics

    monkeypatch.setattr(train, "update", counted)
    settings = dict(DEVICE="auto", DTYPE="auto", SAVE_EVERY=1, EVAL_EVERY=0, LR_SCHEDULE="constant")
    settings |= dict(EPOCHS=2, REF_UPDATE_EVERY=2)
    rows = toy_run(STEPS=2, **settings)
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["machine"] == "pretended GPU" and about["dtype"] == "bfloat16"
    assert abs(rows[0]["kl"]) < 1e-5 and rows[1]["kl"] > 0 and not any(row["skipped"] for row in rows)
    toy_run(STEPS=4, KL_DIVERGENCE_THRESHOLD=1e-12, **settings)
    assert [row["step"] for row in toy.rows(tmp_path / "out")] == [1, 2, 3, 4]
    assert 0 < max(waits[1:]) <= 6  # two for each epoch and two for the step, however many microbatches it has


# Memory
def batch_of(groups, G=2, T=9):
    """Random rows of which each group is a token longer than the one before."""
    mask = torch.arange(T) < (1 + torch.arange(groups) % T).repeat_interleave(G)[:, None]
    tokens = torch.randint(256, mask.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~mask, 256)
    prompts, lengths = torch.full((groups, 5), 65), torch.full((groups,), 5)
    zeros = torch.zeros(mask.shape)
    advantages = torch.linspace(-1, 1, len(mask))[:, None].expand_as(zeros)
    return Batch(prompts, lengths, tokens, mask, zeros, mask.all(1), advantages)


def test_an_update_that_runs_out_of_memory_is_tried_with_smaller_microbatches(toy_settings, monkeypatch, capsys):
    """In the second epoch, after a first microbatch, whose gradient must not count twice; and until it fits."""
    toy_settings(MICROBATCH_TOKENS=4096, EPOCHS=2)
    forward, failed, most = train.forward, [], 99

    def limited(model, batch):
        assert not any(tensor() is not None for tensor in failed)  # nothing of a failed try is kept
        logprobs, entropy = forward(model, batch)
        if batch.old_logprobs is not None and len(batch.tokens) > most:
            failed.append(weakref.ref(logprobs))
            raise torch.OutOfMemoryError("injected")
        return logprobs, entropy

    def update():
        model, reference = toy.model(), toy.model(seed=1).cast(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return train.update(model, reference, optimizer, [batch_of(1), batch_of(6)], 0.1), model.state_dict()

    monkeypatch.setattr(train, "forward", limited)
    whole, expected = update()
    most = 4
    metrics, weights = update()
    assert capsys.readouterr().out.count("out of memory; once more") == len(failed) == 2
    assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0)
    most = 0
    with pytest.raises(SystemExit, match="single question: lower GROUP_SIZE, or the limit of new tokens"):
        update()


def test_a_rollout_that_runs_out_of_memory_is_made_in_halves(toy_settings, monkeypatch):
    toy_settings(GROUP_SIZE=3)
    model, questions, failed, most = toy.model(), toy.questions(9), [], 99

    def limited(model, prompts, *args):
        assert not any(tensor() is not None for tensor in failed)
        batch = generate(model, prompts, *args)
        if len(prompts) > most:
            failed.append(weakref.ref(batch.tokens))
            raise torch.OutOfMemoryError("injected")
        return batch

    def rollout():
        results = train.rollout(model, questions, 0)
        return sorted((s.question.prompt, s.text) for _, samples in results for s in samples)

    monkeypatch.setattr(train, "generate", limited)
    whole = rollout()
    most = 2
    assert rollout() == whole and len(failed) >= 2
    most = 0
    with pytest.raises(SystemExit, match="single question: lower GROUP_SIZE"):
        rollout()


# Devices, precision, compiling
def test_a_reference_in_the_hosts_memory(gpu, toy_settings, monkeypatch):
    """It is compiled as the policy is. In bf16 two devices round differently, which is no reason to refuse."""
    compiled = set()
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: lambda *a: compiled.add(str(a[1].device)) or f(*a))
    toy_settings(DEVICE="cuda", REF_DEVICE="cpu", KL_COEF=0.1, COMPILE="1", GROUP_SIZE=4)
    model = toy.model().to("cuda").use(torch.bfloat16)
    batches = [batch for batch, _ in train.rollout(model, toy.questions(), 0)]
    reference = train.make_reference(model, "cuda", torch.bfloat16)
    assert reference.wte.weight.device.type == "cpu" and model.wte.weight.is_cuda
    metrics = train.update(model, reference, train.make_optimizer(model), batches, 0.1)
    assert metrics["kl"] < 1e-3 and not metrics["skipped"] and compiled == {"cpu", "cuda:0"}


def test_the_bound_of_the_first_kl_is_that_of_the_precision():
    """Seen with GPT-2's kernels on two devices in bf16: 4e-5."""
    metrics = {"logprob_gap": 0.0, "kl": 4e-5}
    train.check_start(metrics, torch.bfloat16)
    with pytest.raises(SystemExit, match="not the start model"):
        train.check_start(metrics, torch.float32)


@pytest.mark.parametrize("name, expected", [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_process_works_on_the_gpu_that_is_asked_for(gpu, name, expected):
    device = parallel.start(hardware.choose(name), 1)
    assert str(device) == expected and torch.cuda.current_device() == device.index
    assert [hardware.peak_memory(torch.device("cuda", i)) for i in (0, 1)] == [0, 1]  # as pretended, of each
    with pytest.raises(SystemExit, match="there is no cuda:2"):
        parallel.start("cuda:2", 1)


def test_each_process_of_a_machine_has_a_gpu_of_its_own(gpu, monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert str(parallel.start("cuda", 4)) == "cuda:1" and torch.cuda.current_device() == 1


@pytest.mark.parametrize(
    "device, gcc, capability", [("cuda", True, (8, 0)), ("cuda", False, (7, 5)), ("cpu", True, (9, 0))]
)
def test_what_is_automatic_follows_the_device(monkeypatch, toy_settings, capsys, device, gcc, capability):
    monkeypatch.setattr(shutil, "which", lambda name: gcc and name == "gcc" or None)
    with pretend_cuda.on(monkeypatch, capability):
        toy_settings(DEVICE=device, COMPILE="auto", MICROBATCH_TOKENS=0)
        assert hardware.compiles("auto", hardware.choose(device)) == (device == "cuda" and gcc)
        assert ("apt install gcc" in capsys.readouterr().out) == (not gcc)
        model = toy.model().to(device)
        assert train.microbatch_tokens(model) == (65536 if device == "cuda" else 4096)
        logits = torch.empty(1).to(device).expand(512, 64, 50257)  # takes no memory
        assert len(grpo.chunks(logits)) == 512 if device == "cpu" else len(grpo.chunks(logits)) < 8
        fastest = torch.bfloat16 if capability >= (8, 0) else torch.float32  # older cards only emulate bf16
        assert device == "cpu" or hardware.fastest_dtype(torch.device("cuda:0")) == fastest


@pytest.mark.parametrize("groups, most, sizes", [(9, 80, [5, 2, 2]), (4, 25, [2, 1, 1])])
def test_no_cut_leaves_one_group_behind_where_two_fit(groups, most, sizes):
    """torch.compile makes graphs of its own for a dimension of one, and has a limit for their number."""
    parts = microbatches(batch_of(groups), most)
    assert [len(part.prompts) for part in parts] == sizes
    assert all(part.tokens.shape[1] == part.completion_mask.sum(1).max() for part in parts)  # cut to its longest
