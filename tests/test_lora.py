"""nanorook/lora.py: adapters compute what PEFT's do, a run trains them alone, and a step needs what they need."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import architectures
import toy
import train
from model import GPT
from nanorook import hardware, lora
from nanorook.run import Run, read_tensors
from rollout import generate
from test_evaluate import shown  # noqa: F401
from test_llama import KINDS, SIZES
from tools import ask

TOKENS = torch.randint(0, 256, (3, 30), generator=torch.Generator().manual_seed(0))
GPT2 = dict(vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=4, eos_token_id=256)
CONFIGS = {"gpt2": GPT2, "llama": SIZES | KINDS["llama"], "qwen2": SIZES | KINDS["qwen2"]}
each_kind = pytest.mark.parametrize("folder", CONFIGS, indirect=True)
BF16 = torch.bfloat16


@pytest.fixture(scope="module", params=["qwen2"])
def folder(request, tmp_path_factory):
    hf = toy.hf_model(request.param, **CONFIGS[request.param])
    return toy.save_hf(hf, tmp_path_factory.mktemp(request.param))


def adapted(folder, rank=4, dtype=torch.float32, trained=True):
    """The model of a folder with adapters, which have been trained if B is no longer zero."""
    model = architectures.load(folder, dtype).set_compute_dtype(dtype)
    lora.add(model, rank, 0, str(folder))
    generator = torch.Generator().manual_seed(1)
    for layer in lora.matrices(model).values():
        layer.adapter.B.data += trained * 0.1 * torch.randn(layer.adapter.B.shape, generator=generator)
    return model


def gradients(logits, adapters):
    """Of a function of the logits: {name: gradient} of the adapters."""
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, TOKENS[:, 1:, None])
    found = torch.autograd.grad(logprobs.square().mean(), [*adapters.values()])
    return dict(zip(adapters, found, strict=True))


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- PEFT --------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.needs("peft", "pip install peft")
def test_logits_and_gradients_are_those_of_peft(folder, tmp_path, recwarn):
    from peft import PeftModel

    model = adapted(folder)
    lora.save(model, tmp_path / "adapters")
    hf = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = hf(TOKENS).logits.detach()
    theirs = PeftModel.from_pretrained(hf, tmp_path / "adapters", is_trainable=True)
    assert theirs.active_peft_config.base_model_name_or_path == str(folder)
    assert not [warning for warning in recwarn if "fan_in_fan_out" in str(warning.message)]
    ours, expected = model(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert (ours - plain).abs().max() > 0.1  # the adapters matter

    adapters = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    peft = {name.replace(".default", ""): p for name, p in gradients(expected, adapters).items()}
    own = gradients(ours, {name: p for name, p in model.named_parameters() if p.requires_grad})
    renamed = {name.replace(".adapter.", ".lora_") + ".weight": p for name, p in own.items()}
    own = {lora.PREFIX + name: p for name, p in model.to_file(renamed).items()}
    assert own.keys() == peft.keys()
    for name in own:
        torch.testing.assert_close(own[name], peft[name], atol=1e-4, rtol=1e-4)
    assert max(gradient.abs().max() for gradient in own.values()) > 0.01


@each_kind
@pytest.mark.needs("peft", "pip install peft")
def test_adapters_made_by_peft_open(folder, tmp_path):
    """With another alpha, and on some matrices only."""
    from peft import LoraConfig, get_peft_model

    hf = AutoModelForCausalLM.from_pretrained(folder).eval()
    some = ["c_attn"] if folder.name.startswith("gpt2") else ["q_proj", "down_proj"]
    theirs = get_peft_model(hf, LoraConfig(r=3, lora_alpha=8, target_modules=some, init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    ours = architectures.load(tmp_path)
    assert ours.lora == lora.Lora(3, str(folder), 8)
    expected = theirs.eval()(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(lora.merged(ours)(TOKENS), expected, atol=1e-4, rtol=0)


# ---- The model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_new_adapters_change_nothing_bit_for_bit(folder, dtype):
    plain = architectures.load(folder, dtype).set_compute_dtype(dtype)
    assert torch.equal(adapted(folder, dtype=dtype, trained=False)(TOKENS), plain(TOKENS))


def test_what_is_frozen_is_kept_once_in_bf16(folder):
    """By policy, reference and sampler; the residual stream is fp32."""
    model = adapted(folder, dtype=BF16)
    reference = architectures.load(folder, BF16).set_compute_dtype(BF16).inference_copy(BF16)
    sampler = model.inference_copy(BF16)
    assert {p.dtype for p in reference.parameters() if p.ndim == 2} == {BF16}
    frozen = {name: p for name, p in model.named_parameters() if p.ndim == 2 and not p.requires_grad}
    twin = dict(sampler.named_parameters())
    assert len(frozen) > 8 and all(p.data_ptr() == twin[name].data_ptr() for name, p in frozen.items())
    assert sampler.unembedding.data_ptr() == model.head_weight.data_ptr()
    seen = []
    model.h[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].dtype))
    assert torch.equal(sampler(TOKENS), model(TOKENS)) and seen == [torch.float32]
    for layer in lora.matrices(model).values():
        layer.adapter.A.data += 0.1
    assert not torch.equal(sampler(TOKENS), model(TOKENS))
    sampler.sync_from(model)
    assert torch.equal(sampler(TOKENS), model(TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_recorded_logprobs_are_those_of_the_training_forward(folder, dtype, toy_settings):
    model = adapted(folder, dtype=dtype)
    rollout = generate(model.inference_copy(dtype), [[7] * n for n in (2, 9, 5)], 4, [12] * 3, noise=torch.rand(12, 12))
    logprobs, _ = train.forward(model, rollout, 1.0)
    gap = torch.where(rollout.completion_mask, logprobs - rollout.rollout_logprobs, 0).abs()
    assert gap.max() < (1e-4 if dtype == torch.float32 else 0.2) and gap.mean() < 0.02


def test_recomputed_blocks_give_the_same_gradients(folder, toy_settings):
    model = adapted(folder)
    rollout = generate(model, [[7] * n for n in (2, 9, 5)], 4, [12] * 3, noise=torch.rand(12, 12))
    found = []
    for model.recompute in (False, True):
        model.zero_grad()
        logprobs, _ = train.forward(model, rollout, 1.0)
        logprobs.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert equal(*found) and len(found[0]) == 2 * len(lora.matrices(model))


def test_the_seed_determines_the_adapters(toy_model):
    def A(seed):
        model = architectures.load(toy_model)
        lora.add(model, 2, seed, toy_model)
        return {name: p for name, p in lora.trained_state(model).items() if name.endswith(".A")}

    assert equal(A(0), A(0)) and not equal(A(0), A(1))


# ---- A run -------------------------------------------------------------------------------------------------

RUN = dict(LORA_RANK=4, LR=0.01, LR_SCHEDULE="constant", KL_COEF=0.1, EVAL_EVERY=0)


RUNS = [("gpt2", dict(DTYPE="bfloat16", MICROBATCH_TOKENS=60)), ("qwen2", {})]


@pytest.mark.parametrize("folder, changes", RUNS, indirect=["folder"])
def test_a_run_trains_adapters_alone_and_resumes_exactly(folder, toy_run, tmp_path, changes):
    settings = RUN | changes | dict(MODEL=str(folder))
    rows = toy_run("whole", STEPS=3, **settings)
    exact = "DTYPE" not in changes
    assert rows[0]["logprob_gap"] < (1e-4 if exact else 0.05)
    assert rows[0]["kl"] == 0 and rows[0]["grad_norm"] > 0 and rows[2]["kl"] > 0
    toy_run("parts", STEPS=1, **settings)
    assert toy_run("parts", STEPS=3, **settings) == rows
    names = ["model/model.safetensors", "adapters/adapter_model.safetensors"]
    whole, parts = ([(tmp_path / out / name).read_bytes() for name in names] for out in ("whole", "parts"))
    assert whole == parts

    saved = read_tensors(tmp_path / "whole" / "step-000003" / "trainer.pt")
    count = 2 * len(lora.matrices(architectures.load(folder)))
    [moments] = saved["optimizer"]
    assert len(saved["model"]) == len(moments) == len(saved["good"]["weights"]) == count
    assert all(".adapter." in name for name in saved["model"])
    start, trained = architectures.load(folder), architectures.load(tmp_path / "whole" / "model")
    changed = {name for name, p in trained.state_dict().items() if not torch.equal(p, start.state_dict()[name])}
    rounded = {name for name, p in start.state_dict().items() if not exact and p.ndim == 2}  # the frozen model is bf16
    matrices = {f"{name}.weight" for name in lora.matrices(start)}
    assert matrices <= changed <= matrices | rounded


def test_without_a_reward_nothing_moves(toy_run, toy_model, tmp_path):
    toy_run(CONTROL="zero", **RUN | dict(LR=0.1, KL_COEF=0.0))
    assert equal(GPT.load(toy_model).state_dict(), GPT.load(tmp_path / "out" / "model").state_dict())


def test_a_run_that_breaks_goes_back_to_its_adapters(toy_run, monkeypatch, tmp_path, capsys):
    rows = toy_run(STEPS=2, **RUN | dict(KL_DIVERGENCE_THRESHOLD=1e-9, EVAL_POSITIONS=1))
    assert rows[1]["kl"] > 1e-9 and "back to the last good state" in capsys.readouterr().out
    back = load_file(tmp_path / "out" / "adapters" / lora.WEIGHTS)
    assert not any(p.any() for name, p in back.items() if "lora_B" in name)  # as at the start


def test_a_start_model_that_was_replaced_is_noticed_whatever_dtype_is(toy_run, tmp_path):
    for seed in (0, 1):
        toy.model(seed).save(tmp_path / f"model-{seed}")
    base = tmp_path / "model-0"
    toy_run(STEPS=1, MODEL=str(base), **RUN)
    toy_run(STEPS=2, MODEL=str(base), **RUN, DTYPE="bfloat16")  # resumed
    (base / "model.safetensors").write_bytes((tmp_path / "model-1" / "model.safetensors").read_bytes())
    with pytest.raises(SystemExit, match="are not those that the run in .* began with"):
        toy_run(STEPS=3, MODEL=str(base), **RUN)


# ---- Memory ------------------------------------------------------------------------------------------------

QWEN = dict(model_type="qwen2", vocab_size=151936, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6)
QWEN |= dict(num_key_value_heads=2, tie_word_embeddings=True, hidden_size=896, intermediate_size=4864)
QWEN |= dict(num_hidden_layers=24, num_attention_heads=14)  # Qwen2.5-0.5B


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 16])
def test_qwen_fits_a_gpu_that_people_have(rank, tmp_path, monkeypatch, toy_settings):
    """8 answers to each of 8 questions, after prompts of 100 tokens, with a reference, in 8 GB. By the formula, with
    half a GB for the libraries of the GPU."""
    B, G, new, total = 8, 8, 200, 7.5e9
    keys = new + 100
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    model = architectures.without_weights(tmp_path).set_compute_dtype(BF16)
    if rank:
        lora.add_empty(model, lora.Lora(rank, ""))
    loaded = hardware.bytes_loaded(model, has_reference=True)
    monkeypatch.setattr(hardware, "memory", lambda device: (max(1, total - loaded), total))
    monkeypatch.setitem(toy.LIMITS, "long", new)
    toy_settings(GROUP_SIZE=G, MICROBATCH_TOKENS=0)
    monkeypatch.setattr(train, "prompt_ids", lambda *_: range(100))
    tokens = train.plan_memory(model, [toy.Question("long", "", None)])
    fits = loaded + hardware.bytes_in_training(model, max(tokens, G * new + 100), keys) <= total
    fits &= loaded + hardware.bytes_in_sampling(model, B * G, keys) <= total
    assert fits == (rank > 0) == (tokens > G * new + 100)


def test_adapters_are_merged_in_fp32_so_the_start_model_is_the_same_in_each_dtype(toy_run, toy_model, tmp_path):
    """And what they were trained on is not overwritten."""
    toy_run("first", STEPS=2, **RUN)
    start = str(tmp_path / "first" / "adapters")
    whole, half = (architectures.load_merged(start, dtype).state_dict() for dtype in (torch.float32, BF16))
    assert all(torch.equal(p.to(half[name].dtype), half[name]) for name, p in whole.items())
    again = lora.Lora(2, str(tmp_path / "second" / "model"))
    config = tmp_path / "first" / "adapters" / lora.CONFIG
    config.write_text(config.read_text().replace(json.loads(config.read_text())["base_model_name_or_path"], again.base))
    (tmp_path / "second" / "model").mkdir(parents=True)
    with pytest.raises(SystemExit, match="second/model, lies in OUT_DIR=.*second, where the run overwrites models"):
        Run(tmp_path / "second").forbid_model_inside(start)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    smaller = dict(num_hidden_layers=4, hidden_size=448, intermediate_size=2432)
    (tmp_path / "config.json").write_text(json.dumps(QWEN | smaller))  # there are no weights
    monkeypatch.setattr(hardware, "memory", lambda device: (1e9, 1e9))
    changes = dict(MODEL=tmp_path, DTYPE="bfloat16", STEPS=1)
    said = toy.main(tmp_path / "out", **changes)
    missing = (
        r"needs at least 2\.\d GB of memory, but cpu has only 1\.0 available, so 1\.\d GB are missing: set LORA_RANK=16"
    )
    assert re.search(rf"this model {missing}, which needs at least 0\.\d GB\.$", said), said
    assert "model.safetensors" in toy.main(tmp_path / "out", LORA_RANK=16, **changes)  # it fits, so it would be loaded
    monkeypatch.setattr(hardware, "memory", lambda device: (1e8, 1e8))
    said = toy.main(tmp_path / "out", LORA_RANK=16, **changes)
    assert "GB are missing: take a smaller model, or lower GROUP_SIZE" in said
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


# ---- A folder of adapters ----------------------------------------------------------------------------------


def test_a_checkpoint_of_adapters_opens_in_evaluate_and_ask(shown, toy_run, tmp_path, monkeypatch, capsys):  # noqa: F811
    toy_run(STEPS=2, **RUN | dict(EVAL_POSITIONS=20))
    skill = json.loads((tmp_path / "out" / "skill.json").read_text())["after"]
    monkeypatch.setattr(train, "EVAL_POSITIONS", 20)
    capsys.readouterr()
    first, rows = shown(tmp_path / "out" / "step-000002", tmp_path / "out" / "model")
    assert first.startswith("20 held-out questions")
    for name in ("short reward", "long reward"):
        adapters, whole, _ = rows[f"{name}, sampled"]
        assert adapters == whole and adapters.startswith(f"{skill[f'{name} T=1'][0]:.3f} ±")
    monkeypatch.setattr("sys.argv", ["ask", str(tmp_path / "out" / "adapters"), f"TASK={toy.__file__}"])
    monkeypatch.setattr(ask, "setting", lambda name, default, *_, **__: toy.SETTINGS.get(name, default))
    ask.main()
    assert "greedy" in capsys.readouterr().out


def test_a_run_may_begin_with_adapters(toy_run, tmp_path):
    toy_run("first", STEPS=2, **RUN)
    adapters = tmp_path / "first" / "adapters"
    for rank in (0, 2):
        [row] = toy_run(f"second-{rank}", STEPS=1, MODEL=str(adapters), **RUN | dict(LORA_RANK=rank))
        assert row["kl"] == 0
    last = architectures.load(tmp_path / "second-2" / "adapters")  # beside what the first run had added
    assert last.lora.base == str(adapters)
    tokens = torch.tensor([[1, 2, 3, 4]])
    merged = architectures.load(tmp_path / "second-2" / "model")
    assert torch.allclose(last(tokens), merged(tokens), atol=1e-4)
    assert not torch.allclose(last(tokens), architectures.load(adapters)(tokens), atol=1e-4)


WRONG = {
    "base_model_name_or_path has to name": lambda config, weights: config.pop("base_model_name_or_path"),
    "use_dora is True, but only False": lambda config, weights: config.update(use_dora=True),
    "rank_pattern is {'c_fc': 8}, but only None": lambda config, weights: config.update(rank_pattern={"c_fc": 8}),
    "the adapter of h.0.attn.c_attn does not fit": lambda config, weights: config.update(r=3),
    "wte.lora_A.weight is not an adapter of a matrix": lambda config, weights: weights.update(
        {f"{lora.PREFIX}transformer.wte.lora_A.weight": torch.ones(4, 4)}
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_adapters_are_refused_in_one_sentence(sentence, toy_model, tmp_path):
    lora.save(adapted(toy_model), tmp_path)
    config, weights = json.loads((tmp_path / lora.CONFIG).read_text()), load_file(tmp_path / lora.WEIGHTS)
    WRONG[sentence](config, weights)
    (tmp_path / lora.CONFIG).write_text(json.dumps(config))
    save_file(weights, tmp_path / lora.WEIGHTS)
    with pytest.raises(SystemExit, match=sentence):
        architectures.load(tmp_path)
