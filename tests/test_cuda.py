import copy
import gc
import json
import shutil
import sysconfig
import weakref
from unittest.mock import Mock

import pytest
import torch

import pretend_cuda
import toy
import train
from model import GPT, GPTConfig
from nanorook import hardware, lora, monitor, parallel
from nanorook.run import Run
from rollout import Rollout, generate
from tools import bench


@pytest.fixture
def gpu(monkeypatch):
    with pretend_cuda.on(monkeypatch) as seen:
        yield seen


PROMPTS = [[7] * n for n in range(2, 7)]
NOISE = torch.rand(10, 18, generator=torch.Generator().manual_seed(3))


def sampled(model, device="cuda", prompts=PROMPTS, **options):
    twin = copy.deepcopy(model).to(device).inference_copy(torch.float32)
    limits, noise = [18] * len(prompts), NOISE[: 2 * len(prompts)].to(device)
    return toy.to_cpu(generate(twin, prompts, 2, limits, noise=noise, **options))


def same(a, b):
    assert torch.equal(a.completions, b.completions) and torch.equal(a.hit_limit, b.hit_limit)
    torch.testing.assert_close(a.rollout_logprobs, b.rollout_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9}])
def test_one_captured_graph_decodes_as_the_cpu_does(gpu, options):
    model = toy.model()
    model.config.eos_token_id = -1  # nothing ends early
    same(sampled(model, **options), sampled(model, "cpu", **options))
    assert gpu.captures == [17]  # the first of 18 steps loads libraries and is not captured


def test_decoding_stops_on_a_gpu_when_all_rows_have_ended(gpu):
    model = toy.model()
    same(sampled(model, "cuda:1"), sampled(model, "cpu"))  # another GPU than the current one
    model.ln_f.bias.data.mul_(10)
    same(sampled(model), sampled(model, "cpu"))
    assert gpu.captures[-1] < 8


FORBIDDEN = {
    "makes the host wait": lambda logits, t: logits + int(t),
    "a boolean mask": lambda logits, t: logits[torch.isfinite(logits).all(1)],
    "cpu": lambda logits, t: logits + torch.zeros(257),  # two devices
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_a_capture_or_a_device_forbids_is_noticed(gpu, monkeypatch, what):
    decode = GPT.decode
    monkeypatch.setattr(GPT, "decode", lambda *args: FORBIDDEN[what](decode(*args), args[-1]))
    with pytest.raises(pretend_cuda.Forbidden, match=what):
        sampled(toy.model())


def test_a_run_with_checkpoint_resume_and_going_back(gpu, toy_run, monkeypatch, tmp_path):
    waits, update = [], train.update

    def counted(model, *args, **options):
        gpu.waits.clear()
        metrics = update(model, *args, **options)
        waits.append(sum(not line.startswith("rollout.py") for line in gpu.waits))  # that cuts microbatches
        assert all(p.is_cuda for p in model.parameters())
        return metrics

    monkeypatch.setattr(train, "update", counted)
    monkeypatch.setattr(train, "distinct_rows", Mock(side_effect=AssertionError))  # its numbers of rows cost waits
    settings = dict(DEVICE="auto", DTYPE="auto", SAVE_EVERY=1, EVAL_EVERY=0, LR_SCHEDULE="constant", EPOCHS=2)
    rows = toy_run(STEPS=2, MICROBATCH_TOKENS=1, **settings)
    about = json.loads((tmp_path / "out" / "run.json").read_text())
    assert about["machine"] == "pretended GPU" and about["dtype"] == "bfloat16"
    assert abs(rows[0]["kl"]) < 1e-5 and rows[1]["kl"] > 0 and not any(row["skipped"] for row in rows)
    toy_run(STEPS=4, KL_DIVERGENCE_THRESHOLD=1e-12, **settings)
    assert [row["step"] for row in toy.rows(tmp_path / "out")] == [1, 2, 3, 4]
    assert 0 < waits[1] == waits[2] < 24  # at a step's end, however many microbatches it has


def test_what_going_back_restores_is_kept_in_the_hosts_memory(gpu, tmp_path):
    """On a GPU the weights and both moments, twice, would take the room of microbatches."""
    model = toy.model().to("cuda")
    optimizers, run = train.make_optimizers(model), Run(tmp_path)
    model(torch.zeros(1, 2, dtype=torch.long, device="cuda")).sum().backward()
    optimizers[0].step()
    run.good = run.snapshot(model, optimizers)
    weights, moments = run.good.values()
    kept = [*weights.values(), *(t for state in moments[0].values() for t in state.values())]
    assert len(kept) == 4 * len(weights) and {tensor.device.type for tensor in kept} == {"cpu"}
    optimizers[0].step()
    run.go_back(model, optimizers, 0.5)
    assert all(tensor.is_cuda and torch.equal(tensor.to("cpu"), weights[n]) for n, tensor in model.state_dict().items())
    assert {state["exp_avg"].device.type for state in optimizers[0].state.values()} == {"cuda"}


def test_the_bounds_of_the_first_step_are_those_of_the_precision():
    """A fifth of the answers of each kind have to be well-formed. GPT-2's kernels on two devices in bf16 gave a KL
    of 4e-5."""
    good = {"q/logprob_gap": 0.0, "q/structure": 0.2, "q/hit_limit": 0.0}
    assert not monitor.check_answers(good, toy.LIMITS) and not monitor.check_agreement(good, torch.float32)
    assert "well-formed" in monitor.check_answers(good | {"q/structure": 0.19}, toy.LIMITS)
    for wrong, said in ({"q/logprob_gap": 2e-3}, "disagree"), ({"q/kl": 4e-5}, "not the start model"):
        assert not monitor.check_agreement(good | wrong, torch.bfloat16)
        assert said in monitor.check_agreement(good | wrong, torch.float32)


@pytest.mark.parametrize("name, expected", [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_process_works_on_the_gpu_that_is_asked_for_or_its_own(gpu, monkeypatch, name, expected):
    device = parallel.start(hardware.choose_device(name), 1)
    assert str(device) == expected and torch.cuda.current_device() == device.index
    with pytest.raises(SystemExit, match="no device cuda:2 to train on"):
        parallel.start(torch.device("cuda:2"), 1)
    with pytest.raises(SystemExit, match=r"^error: NPROC=3, but this machine has 2 GPU\(s\)"):
        parallel.start(torch.device("cuda"), 3)
    with pytest.raises(SystemExit, match="^error: DEVICE=cuda:1 names one GPU, but NPROC=2"):
        parallel.start(torch.device("cuda:1"), 2)
    monkeypatch.setattr(parallel, "join", lambda backend: None)
    told = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (told | {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert str(parallel.start(torch.device("cuda"), 4)) == "cuda:1" and torch.cuda.current_device() == 1


def test_a_device_that_cannot_train_is_refused(gpu, monkeypatch):
    assert [str(hardware.choose_device(good)) for good in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    for name in "mps", "cuda:x", "cuda:2":
        with pytest.raises(SystemExit, match=f"^error: .*{name}.*; use auto"):
            hardware.choose_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert str(hardware.choose_device()) == "cpu"
    with pytest.raises(SystemExit, match="no device cuda to train on; use auto or cpu"):
        hardware.choose_device("cuda")


AUTOMATIC = [("cuda", True, True, 8), ("cuda", False, True, 7), ("cuda", True, False, 8), ("cpu", True, True, 9)]


@pytest.mark.parametrize("device, gcc, headers, major", AUTOMATIC)
def test_what_is_automatic_follows_the_device(monkeypatch, toy_settings, tmp_path, capsys, device, gcc, headers, major):
    monkeypatch.setattr(shutil, "which", lambda name: gcc and name == "gcc" or None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: tmp_path)
    if headers:
        (tmp_path / "Python.h").touch()
    with pretend_cuda.on(monkeypatch, (major, 0)):
        toy_settings(DEVICE=device, COMPILE="auto", MICROBATCH_TOKENS=0)
        assert hardware.compiles("auto", hardware.choose_device(device)) == (device == "cuda" and gcc and headers)
        assert ("apt install gcc" in capsys.readouterr().out) == (not gcc or not headers)
        model = toy.model().to(device)
        assert train.plan_memory(model, toy.questions()) == (32768 if device == "cuda" else 4096)
        fastest = torch.bfloat16 if major >= 8 else torch.float32  # older cards only emulate bf16
        assert device == "cpu" or hardware.fastest_dtype(torch.device("cuda:0")) == fastest


SIZES = {"124M": GPTConfig(), "embedded": GPTConfig(257, 384, 256, 6, 8)}
FREE = [("124M", 10e9, 10000, 20000), ("124M", 79e9, 32768, 32768), ("embedded", 7.5e9, 32768, 32768)]


@pytest.mark.parametrize("name, free, least, most", FREE)
def test_microbatches_fit_the_free_memory_of_a_gpu(monkeypatch, name, free, least, most):
    """Of 12, 80 and 8 GB, without what its libraries and the model take."""
    with torch.device("meta"):
        model = GPT(SIZES[name]).set_compute_dtype(torch.bfloat16)
    with pretend_cuda.on(monkeypatch, free=free):
        model.to_empty(device="cuda")
        model.most_logits = hardware.most_logits(model)
        tokens = hardware.microbatch_tokens(model, 200)
    assert least <= tokens <= most
    assert hardware.bytes_in_training(model, tokens, 200) < 0.81 * free


LLAMA = dict(bench.SMOLLM2, hidden_size=192, intermediate_size=768, num_hidden_layers=3, num_attention_heads=3)
LLAMA |= dict(num_key_value_heads=1, vocab_size=500)
KEEPING = {"embedded": GPTConfig(257, 384, 256, 2, 8), "other": GPTConfig(500, 384, 192, 3, 3), "llama": LLAMA}
QWEN = dict(bench.QWEN, hidden_size=224, intermediate_size=1216, num_hidden_layers=2, num_attention_heads=7)
KEEPING |= {"qwen": QWEN | dict(num_key_value_heads=1, vocab_size=500)}
KEEPING |= {"qwen3": LLAMA | dict(model_type="qwen3", head_dim=128)}


SOME = [("embedded", 0), ("llama", 0), ("qwen", 0), ("qwen3", 0), ("other", 8), ("llama", 8)]  # and the rank of LoRA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, rank", SOME)
def test_a_token_keeps_the_bytes_that_microbatches_are_chosen_by(name, rank, dtype, toy_settings):
    """And its logits. Counted are all tensors kept for the backward pass but the weights."""
    model = bench.random_model(KEEPING[name]).set_compute_dtype(dtype)
    if rank:
        for p in model.parameters():
            p.data = p.data.to(dtype) if p.ndim == 2 else p.data  # as it is loaded
        lora.add(model, rank, 0, "")

    def count(B, G=8, P=30, T=20):
        prompts = torch.ones(B, P, dtype=torch.long)
        tokens = torch.arange(B * G * T).view(-1, T) % model.config.vocab_size  # no answer twice
        rollout, kept = Rollout(prompts, torch.full((B,), P), tokens, tokens >= 0, None, None), []

        def keep(x):
            x = x.detach()
            kept.append(weakref.ref(x))  # not x: it would keep what the graph frees, and a bare address may be reused
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = train.forward(model, rollout, 1.0)
        storages = [x.untyped_storage() for x in (reference() for reference in kept) if x is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(sizes.values()), B * (P + G * T), result

    (one, fewer, _), (two, more, _) = count(1), count(2)
    expected = hardware.bytes_of_a_token(model, 50) + dtype.itemsize * model.config.vocab_size
    assert 0.9 < (two - one) / (more - fewer) / expected < 1.08


def test_counting_what_is_kept_keeps_no_weights():
    model = bench.random_model(LLAMA)
    weight = weakref.ref(next(model.h[0].parameters()))
    assert hardware.try_a_block(model, 8)[0] > 0
    del model
    gc.collect()
    assert weight() is None


def test_a_resumed_run_keeps_its_microbatches(toy_run, tmp_path, monkeypatch, capsys):
    cuts, update = [], train.update

    def counted(*args, most_tokens, **more):
        cuts.append(most_tokens)
        return update(*args, most_tokens, **more)

    monkeypatch.setattr(train, "update", counted)
    for steps, most in ((1, 77), (2, 99)):
        monkeypatch.setattr(hardware, "CPU_MICROBATCH", most)
        toy_run(STEPS=steps)
    toy_run(STEPS=3, MICROBATCH_TOKENS=55)
    assert cuts == [77, 77, 55] and capsys.readouterr().out.count("microbatches of 77 tokens") == 2
    toy_run(STEPS=4)  # that was not its own
    assert cuts[3:] == [99]
    file = max(tmp_path.glob("out/step-*")) / "trainer.pt"
    saved = torch.load(file, weights_only=True)
    assert (saved["device"], saved["dtype"], saved["microbatch"]) == ("cpu", "", 99)
    torch.save(saved | {"device": "cuda", "dtype": "bfloat16", "microbatch": 32768}, file)
    toy_run(STEPS=5)  # begun on a GPU, whose choices do not hold here
    assert cuts[4:] == [99]
