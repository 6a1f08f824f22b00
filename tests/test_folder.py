import json

import pytest
import torch
from safetensors.torch import save_file

from model import GPTConfig
from nanorook.folder import fetch, read_config, read_weights

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
    assert read_config(tmp_path, GPTConfig) == GPTConfig(**SIZES, eos_token_id=256, extra=kept)


BAD_CONFIGS = {
    "n_inner is 7, but only None or 192 is supported": {"n_inner": 7},
    "n_layer is '3', which no GPT-2 has": {"n_layer": "3"},
    "n_layer is 0, which no GPT-2 has": {"n_layer": 0},
    "n_embd 48 is no multiple of n_head 7": {"n_head": 7},
    "expected a JSON object": [1],
}


@pytest.mark.parametrize("reason", BAD_CONFIGS)
def test_an_unsupported_config_is_refused(tmp_path, reason):
    bad = BAD_CONFIGS[reason]
    (tmp_path / "config.json").write_text(json.dumps(SIZES | bad if isinstance(bad, dict) else bad))
    assert refused(read_config, tmp_path, GPTConfig).startswith(f"{tmp_path}/config.json: {reason}")


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_read_from_one_file_or_several_and_damage_is_named(tmp_path, shards):
    assert refused(read_weights, tmp_path).startswith(f"{tmp_path}: there is no model.safetensors; transformers'")
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


@pytest.mark.parametrize("source", ["nowhere", "../a/b", "/a/b", "https://a.b/c"])
def test_nothing_is_downloaded_unless_a_hub_id_is_given(monkeypatch, source):
    assert refused(fetch, "nobody/nothing").startswith("nobody/nothing: no such folder here, and the hub did not")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("reached for the hub"))
    assert refused(fetch, source).startswith(f"{source}: there is no such folder")
