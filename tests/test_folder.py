"""nanorook/folder.py: a GPT-2 in one file or in several is read; damaged folders are refused."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from model import GPTConfig
from nanorook.folder import fetch, read_config, read_weights

SIZES = {"vocab_size": 300, "n_embd": 48, "n_layer": 3, "n_head": 4}
WEIGHTS = {"a.weight": torch.randn(3, 4), "b.weight": torch.arange(5), "c.bias": torch.ones(2, dtype=torch.bfloat16)}


def refused(function, *arguments):
    """The one sentence that it refuses with."""
    with pytest.raises(SystemExit) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix("error: ")


@pytest.fixture
def write_config(tmp_path):
    def write(**entries):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **SIZES, **entries}))

    return write


def test_config_has_defaults_and_keeps_entries_that_are_not_its_own(tmp_path, write_config):
    written = {"architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "torch_dtype": "float16", "bos_token_id": 256}
    kept = {"chess_format": "expanded", "n_inner": None, "use_cache": True}
    write_config(**written, **kept, eos_token_id=256, activation_function="gelu_pytorch_tanh")
    assert read_config(tmp_path, GPTConfig) == GPTConfig(**SIZES, eos_token_id=256, extra=kept)


BAD_CONFIGS = [
    ({"n_inner": 7}, "n_inner is 7, but only None or 192 is supported"),
    ({"n_layer": "3"}, "n_layer is '3', which no GPT-2 has"),
    ({"n_layer": 0}, "n_layer is 0, which no GPT-2 has"),
    ({"n_head": 7}, "n_embd 48 is no multiple of n_head 7"),
]


@pytest.mark.parametrize("entries, reason", BAD_CONFIGS)
def test_an_unsupported_config_is_refused(tmp_path, write_config, entries, reason):
    write_config(**entries)
    assert refused(read_config, tmp_path, GPTConfig) == f"{tmp_path}/config.json: {reason}."


@pytest.mark.parametrize("content", [None, b"{nope", b"[1]", b"\xff\x00\x80"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refused(read_config, tmp_path, GPTConfig)


# Weights
def as_safetensors(folder, weights=WEIGHTS, length=None):
    save_file(weights, file := folder / "model.safetensors")
    file.write_bytes(file.read_bytes()[:length])


def as_shards(folder, weights=WEIGHTS):
    for i, (name, tensor) in enumerate(weights.items(), 1):
        save_file({name: tensor}, folder / f"model-{i:05}-of-{len(weights):05}.safetensors")


@pytest.mark.parametrize("write", [as_safetensors, as_shards])
def test_weights_are_read_from_one_file_or_several(tmp_path, write):
    write(tmp_path)
    weights = read_weights(tmp_path)
    assert weights.keys() == WEIGHTS.keys()
    assert all(weights[name].dtype == t.dtype and torch.equal(weights[name], t) for name, t in WEIGHTS.items())


BAD_WEIGHTS = {
    "none": (lambda folder: None, ": there is no model.safetensors; transformers'"),
    "cut": (partial(as_safetensors, length=-8), "/model.safetensors: damaged"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_bad_weights_are_refused(tmp_path, name):
    write, reason = BAD_WEIGHTS[name]
    write(tmp_path)
    assert refused(read_weights, tmp_path).startswith(f"{tmp_path}{reason}")


# The hub
@pytest.mark.parametrize("source", ["nowhere", "../a/b", "/a/b", "https://a.b/c"])
def test_nothing_is_downloaded_unless_a_hub_id_is_given(monkeypatch, source):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("reached for the hub"))
    assert refused(fetch, source).startswith(f"{source}: there is no such folder")


def test_an_unreachable_hub_id_is_one_sentence():
    assert refused(fetch, "nobody/nothing").startswith("nobody/nothing: no such folder here, and the hub did not")
