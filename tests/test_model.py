import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model import GPT
from rollout import pad_prompts

TOKENS = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))


def logits_of(hf, tokens=TOKENS):
    with torch.no_grad():
        return hf.eval()(tokens).logits


@pytest.fixture
def folder(hf_folder, tmp_path):
    return shutil.copytree(hf_folder, tmp_path / "m")


# Invariant 1: a Hugging Face folder in and out
def test_logits_equal_transformers(hf_model, model):
    """In training too: a folder whose config.json asks for dropout gets none."""
    assert hf_model.config.resid_pdrop == 0.1
    torch.testing.assert_close(model.train()(TOKENS), logits_of(hf_model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_folder_opens_in_transformers(model, tmp_path, dtype):
    model.config.extra["chess_format"] = "expanded"  # an entry that is a task's, not GPT's
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").write_text("mine")  # stays
    model.save(tmp_path / "m", dtype)
    assert (tmp_path / "m" / "README.md").exists() and len(list(tmp_path.iterdir())) == 1
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert hf.config.resid_pdrop == hf.config.attn_pdrop == hf.config.embd_pdrop == 0
    assert hf.config.eos_token_id == 256 and hf.config.chess_format == "expanded"
    again = GPT.load(tmp_path / "m")
    assert again.config == model.config
    assert all(p.dtype == torch.float32 and p.requires_grad for p in again.parameters())
    torch.testing.assert_close(again(TOKENS), logits_of(hf), atol=1e-4, rtol=0)
    if dtype == torch.float32:
        assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values()))
    text = "P: rn.q/é… \t w KQkq - 0 1"
    assert AutoTokenizer.from_pretrained(tmp_path / "m")(text).input_ids == again.tokenizer.encode(text)


def rewrite(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


MASKS = {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
GOOD = {
    "no prefix": lambda w: {name.removeprefix("transformer."): t for name, t in w.items()},
    "head": lambda w: {**w, "lm_head.weight": w["transformer.wte.weight"].clone()},
    "mask buffers": lambda w: {**w, **MASKS},
}


@pytest.mark.parametrize("name", GOOD)
def test_every_published_form_loads(hf_model, folder, name):
    rewrite(folder, GOOD[name])
    torch.testing.assert_close(GPT.load(folder)(TOKENS), logits_of(hf_model), atol=1e-4, rtol=0)


WTE = "transformer.wte.weight"
BAD = {  # the incident: a model that was never loaded wrote random text, and every parse failed
    'Missing key.* "h.1.ln_2.bias"': lambda w: {k: v for k, v in w.items() if "h.1.ln_2.bias" not in k},
    'Unexpected key.* "extra"': lambda w: {**w, "extra": torch.ones(2)},
    "size mismatch for ln_f.bias: .* shape torch": lambda w: {**w, "transformer.ln_f.bias": torch.ones(2)},
    "size mismatch for wpe.weight": lambda w: {**w, "transformer.wpe.weight": torch.ones(64, 48)},
    "lm_head.weight differs": lambda w: {**w, "lm_head.weight": -w[WTE]},
    "tokenizer has more tokens": lambda w: {**w, WTE: w[WTE][:100].clone()},
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_wrong_folder_is_refused_in_one_sentence(folder, sentence):
    rewrite(folder, BAD[sentence])
    if "tokenizer" in sentence:
        config = folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 100}))
    with pytest.raises(SystemExit, match=sentence) as error:
        GPT.load(folder)
    assert "\n" not in str(error.value)


# Invariant 5: a prompt that is shared
@pytest.mark.parametrize("sizes", [(1, 7, 20), (5,)])
@pytest.mark.parametrize("G", [1, 4])
def test_shared_prompts_equal_concatenated_ones(model, sizes, G):
    """Logprobs, and the gradient of any function of them, as with a copy of the prompt before each completion."""
    g = torch.Generator().manual_seed(0)
    T, prompts = 9, [torch.randint(0, 256, (n,), generator=g).tolist() for n in sizes]
    completions = torch.randint(0, 256, (len(sizes) * G, T), generator=g)
    weights = torch.randn(len(sizes) * G, T, generator=g)

    def logprob(logits, tokens):
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def gradients(logprobs):
        model.zero_grad()
        (logprobs * weights).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    shared = logprob(model.head(model.score(*pad_prompts(prompts, "cpu"), completions)), completions)
    rows = []
    for i, completion in enumerate(completions):
        prompt = prompts[i // G]
        text = torch.tensor([prompt + completion.tolist()])
        rows.append(logprob(model(text[:, :-1])[:, len(prompt) - 1 :], text[:, len(prompt) :])[0])
    plain = torch.stack(rows)
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients(shared), gradients(plain)):
        torch.testing.assert_close(a, b, atol=5e-5 * b.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_twin_computes_what_the_model_does_and_has_no_gradients(model, dtype):
    prompts, lengths = pad_prompts([[1, 2, 3], [4] * 9], "cpu")
    exact, twin = model(TOKENS), model.set_compute_dtype(dtype).inference_copy(dtype)
    assert torch.equal(twin(TOKENS), model(TOKENS)) and twin.tokenizer is model.tokenizer
    assert torch.equal(twin.score(prompts, lengths, TOKENS[:2]), model.score(prompts, lengths, TOKENS[:2]))
    assert not any(p.requires_grad for p in twin.parameters())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    gap = (twin(TOKENS).float() - exact).abs().mean() / exact.std()
    assert gap == 0 if dtype == torch.float32 else 0 < gap < 0.05
