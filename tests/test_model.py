"""model.py against transformers: the same logits both ways, and no folder that is wrong in any part gets in."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import model as model_module
from model import GPT
from rollout import pad_prompts
from tokenizer import LoadError, Tokenizer

TOKENS = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))


def logits_of(hf, tokens=TOKENS):
    with torch.no_grad():
        return hf.eval()(tokens).logits


def test_gpt2_124m_equals_transformers_both_ways(tmp_path):
    torch.manual_seed(0)
    hf = GPT2LMHeadModel(GPT2Config(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1))
    hf.save_pretrained(tmp_path / "hf")
    tokens = torch.randint(0, 50257, (2, 64))
    expected = logits_of(hf, tokens)
    model = GPT.load(tmp_path / "hf")
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    with torch.no_grad():
        for mode in (True, False):  # no dropout: training is the same function as evaluation
            torch.testing.assert_close(model.train(mode)(tokens), expected, atol=1e-4, rtol=0)
    model.save(tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(logits_of(back, tokens), expected, atol=1e-5, rtol=0)
    assert back.config.resid_pdrop == back.config.attn_pdrop == back.config.embd_pdrop == 0


def rewrite(folder, change):
    """Apply `change` to the tensors of a folder's model.safetensors."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def without_prefix(folder):
    rewrite(folder, lambda w: {k.removeprefix("transformer."): v for k, v in w.items()})


def with_head(folder):
    rewrite(folder, lambda w: {**w, "lm_head.weight": w["transformer.wte.weight"].clone()})


def with_mask_buffers(folder):
    rewrite(folder, lambda w: {**w, "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4).bool(),
                               "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)})  # fmt: skip


def as_pytorch_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_shards(folder):
    GPT2LMHeadModel.from_pretrained(folder).save_pretrained(folder / "sharded", max_shard_size="100KB")
    (folder / "model.safetensors").unlink()
    for file in (folder / "sharded").iterdir():
        shutil.move(file, folder / file.name)
    assert len(list(folder.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("change", [without_prefix, with_head, with_mask_buffers, as_pytorch_bin, as_shards])
def test_every_published_form_loads(hf_model, hf_folder, tmp_path, change):
    folder = shutil.copytree(hf_folder, tmp_path / "m")
    change(folder)
    torch.testing.assert_close(GPT.load(folder)(TOKENS), logits_of(hf_model), atol=1e-4, rtol=0)


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def escape(folder):
    as_shards(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name, shard = next(iter(content["weight_map"].items()))
    shutil.copy(folder / shard, folder.parent / "outside.safetensors")  # it would load
    content["weight_map"][name] = "../outside.safetensors"
    index.write_text(json.dumps(content))


class Code:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def pickle_with_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Code()}, folder / "pytorch_model.bin")


def drop_shard(folder):
    as_shards(folder)
    next(folder.glob("model-*.safetensors")).unlink()


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BAD = {
    "missing folder": (lambda f: shutil.rmtree(f), "no such folder"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{nope"), "config.json"),
    "config a list": (lambda f: (f / "config.json").write_text("[1]"), "object"),
    "config empty": (lambda f: (f / "config.json").write_text(""), "config.json"),
    "config binary": (lambda f: (f / "config.json").write_bytes(b"\xff\x00\x80"), "config.json"),
    "config deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json"),
    "another model": (lambda f: edit_config(f, model_type="llama"), "llama"),
    "another activation": (lambda f: edit_config(f, activation_function="relu"), "relu"),
    "another width": (lambda f: edit_config(f, n_inner=7), "n_inner"),
    "size of another type": (lambda f: edit_config(f, n_layer="3"), "n_layer"),
    "negative size": (lambda f: edit_config(f, n_layer=-1), "n_layer"),
    "no size": (lambda f: edit_config(f, n_layer=0), "size"),
    "heads do not divide": (lambda f: edit_config(f, n_head=7), "n_head"),
    "unknown chess format": (lambda f: edit_config(f, chess_format="emoji"), "emoji"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "weights cut": (cut, "model.safetensors"),
    "weights empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "weights junk": (lambda f: (f / "model.safetensors").write_bytes(os.urandom(5000)), "model.safetensors"),
    "missing tensor": (lambda f: rewrite(f, lambda w: {k: v for k, v in w.items() if "h.1.ln_2.bias" not in k}),
                       "h.1.ln_2.bias"),
    "unexpected tensor": (lambda f: rewrite(f, lambda w: {**w, "extra": torch.ones(2)}), "extra"),
    "wrong shape": (lambda f: rewrite(f, lambda w: {**w, "transformer.ln_f.bias": torch.ones(2)}), "ln_f.bias"),
    "other sizes": (lambda f: edit_config(f, n_positions=64), "wpe.weight"),
    "untied head": (lambda f: rewrite(f, lambda w: {**w, "lm_head.weight": -w["transformer.wte.weight"]}), "lm_head"),
    "missing shard": (drop_shard, "missing"),
    "index out of the folder": (escape, "outside"),
    "pickled code": (pickle_with_code, "pytorch_model.bin"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_folder_is_refused_in_one_sentence(hf_folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(hf_folder, tmp_path / "m")
    change, named = BAD[name]
    change(folder)
    with pytest.raises(LoadError) as error:
        GPT.load(folder)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "pwned").exists()


def test_an_unreachable_hub_id_is_one_sentence():
    with pytest.raises(LoadError, match="^nobody/nothing: no such folder here, and the hub did not give it") as error:
        GPT.load("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_tokenizer_larger_than_the_model_is_refused(model, tmp_path):
    model.tokenizer = Tokenizer.of_bytes()
    model.save(tmp_path / "m")
    small = GPT.load(tmp_path / "m")
    small.config.vocab_size = 100
    small.wte = torch.nn.Embedding(100, small.config.n_embd)
    small.save(tmp_path / "small")
    with pytest.raises(LoadError, match="tokenizer"):
        GPT.load(tmp_path / "small")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_folder_opens_in_transformers(byte_model, tmp_path, dtype):
    byte_model.tokenizer = Tokenizer.of_bytes()
    byte_model.save(tmp_path / "m", dtype)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    again = GPT.load(tmp_path / "m")
    assert all(p.dtype == torch.float32 and p.requires_grad for p in again.parameters())
    assert again.config == byte_model.config
    torch.testing.assert_close(again(TOKENS), logits_of(hf), atol=1e-5, rtol=0)
    if dtype == torch.float32:
        assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), byte_model.state_dict().values()))
    text = "P: rn.q/é… \t w KQkq - 0 1"
    assert AutoTokenizer.from_pretrained(tmp_path / "m")(text).input_ids == again.tokenizer.encode(text)


def test_a_failed_save_leaves_nothing_and_a_good_one_keeps_other_files(model, tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model_module, "save_file", full_disk)
        with pytest.raises(OSError):
            model.save(tmp_path / "out" / "m")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out" / "m").mkdir()
    (tmp_path / "out" / "m" / "README.md").write_text("mine")
    model.save(tmp_path / "out" / "m")
    names = {file.name for file in (tmp_path / "out" / "m").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["m"]


def test_shared_prompt_equals_concatenation(model):
    """Section 3 of the road: the group's prompt runs once, and its gradient is that of G separate copies."""
    torch.manual_seed(0)
    B, G, T = 3, 4, 9
    prompts = [torch.randint(0, 256, (n,)).tolist() for n in (1, 7, 20)]
    completions = torch.randint(0, 256, (B * G, T))
    weights = torch.randn(B * G, T)  # any function of the logprobs will do

    def gradients(logprobs):
        model.zero_grad()
        (logprobs * weights).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def logprob(logits, tokens):
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    shared = logprob(model.score(*pad_prompts(prompts, "cpu"), completions), completions)
    rows = []
    for i, completion in enumerate(completions):
        prompt = prompts[i // G]
        text = torch.tensor([prompt + completion.tolist()])
        rows.append(logprob(model(text[:, :-1])[:, len(prompt) - 1 :], text[:, len(prompt) :])[0])
    plain = torch.stack(rows)
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients(shared), gradients(plain)):
        torch.testing.assert_close(a, b, atol=1e-5 * b.abs().max().item(), rtol=1e-5)
