import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import save_file

from model import GPT, GPTConfig
from nanorook.folder import check_weights, fetch, read_weights

SIZES = {"vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 4}
WEIGHTS = {"a.weight": torch.randn(3, 4), "b.weight": torch.arange(5.0), "c.bias": torch.ones(2, dtype=torch.bfloat16)}


def refused(function, *arguments):
    with pytest.raises(SystemExit) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix("error: ")


def test_config_has_defaults_and_keeps_entries_that_are_not_its_own(tmp_path):
    written = {"model_type": "gpt2", "activation_function": "gelu_pytorch_tanh", "attn_pdrop": 0.1, "bos_token_id": 256}
    kept = {"chess_format": "expanded", "n_inner": None, "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(written | SIZES | kept | {"eos_token_id": 256}))
    assert GPT.read_config(tmp_path) == GPTConfig(**SIZES, eos_token_id=256, extra=kept)


BAD_CONFIGS = {
    "n_inner is 7, but only None or 192 is supported": {"n_inner": 7},
    "activation_function is 'relu', but only": {"activation_function": "relu"},
    "scale_attn_weights is False, but only": {"scale_attn_weights": False},
    "scale_attn_by_inverse_layer_idx is True, but only": {"scale_attn_by_inverse_layer_idx": True},
    "add_cross_attention is True, but only": {"add_cross_attention": True},
    "n_layer is '3', but it has to be a whole number from 1 to 1024": {"n_layer": "3"},
    "n_layer is 0, but it has to be": {"n_layer": 0},
    "vocab_size is None, but it has to be a whole number from 1 to": {"vocab_size": None},
    "layer_norm_epsilon is -1, but it has to be a number from 0 to 1": {"layer_norm_epsilon": -1},
    "n_embd 48 is not a multiple of n_head 7": {"n_head": 7},
    "n_layer is 8388608, but it has to be": {"n_layer": 2**23},
    "cannot be read as a JSON object (": [1],
    "cannot be read as a JSON object (maximum recursion depth": "deep",
}


@pytest.mark.parametrize("reason", BAD_CONFIGS)
def test_an_unsupported_config_is_refused(tmp_path, reason):
    bad = BAD_CONFIGS[reason]
    text = (
        '{"a":' * 700 + "1" + "}" * 700 if bad == "deep" else json.dumps(SIZES | bad if isinstance(bad, dict) else bad)
    )
    (tmp_path / "config.json").write_text(text)
    assert refused(GPT.read_config, tmp_path).startswith(f"{tmp_path}/config.json: {reason}")


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_read_from_one_file_or_several_and_damage_is_named(tmp_path, shards):
    assert refused(read_weights, tmp_path).startswith(f"{tmp_path}: there is no model.safetensors; convert")
    files = {}
    for i in range(shards):
        files[f"model-{i}.safetensors" if shards > 1 else "model.safetensors"] = list(WEIGHTS)[i::shards]
    for name, tensors in files.items():
        save_file({tensor: WEIGHTS[tensor] for tensor in tensors}, last := tmp_path / name)
    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a.weight": torch.zeros(3, 4)}, tmp_path / "model_old.safetensors")  # which nobody names
    weights = read_weights(tmp_path)
    assert weights.keys() == WEIGHTS.keys()
    assert all(weights[name].dtype == t.dtype and torch.equal(weights[name], t) for name, t in WEIGHTS.items())
    last.write_bytes(last.read_bytes()[:-8])
    assert refused(read_weights, tmp_path).startswith(f"{last}: damaged")


BAD_WEIGHTS = {  # tensors, and what is said
    "int8": (
        {"a": torch.ones(2, dtype=torch.int8)},
        "a .torch.int8. has to hold finite floating-point numbers of 16 bits",
    ),
    "NaN": ({"a": torch.tensor([1.0, math.nan])}, "a .torch.float32. has to hold finite floating-point"),
    "twice": ({"a": torch.ones(2), "transformer.a": torch.zeros(2)}, "have a twice, with the prefix transformer."),
    "no index": ({}, "model.safetensors.index.json: damaged, or not an index of weights"),
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_weights_that_cannot_be_trained_are_refused(tmp_path, what):
    tensors, sentence = BAD_WEIGHTS[what]
    if tensors:
        save_file(tensors | {"h.0.attn.bias": torch.zeros(2, dtype=torch.bool)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("[]")  # of use only where there is no model.safetensors
    load = lambda folder: check_weights(folder, GPT.from_file(None, read_weights(folder)))  # noqa: E731
    assert re.search(sentence, refused(load, tmp_path))


@pytest.mark.parametrize("source", ["nowhere", "../a/b", "/a/b", "https://a.b/c"])
def test_nothing_is_downloaded_unless_a_hub_id_is_given(monkeypatch, source):
    assert refused(fetch, "nobody/nothing").startswith("nobody/nothing: there is no such folder, and the hub could")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("reached for the hub"))
    assert refused(fetch, source).startswith(f"{source}: there is no such folder")


def test_a_gated_model_asks_for_a_token(monkeypatch):
    def refuse(*_, **__):
        answer = SimpleNamespace(headers={}, request=None)
        raise GatedRepoError("401 Client Error.\n\nCannot access gated repo", response=answer)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    assert re.fullmatch(r"nobody/nothing is gated: .* HF_TOKEN to your access token.", refused(fetch, "nobody/nothing"))
