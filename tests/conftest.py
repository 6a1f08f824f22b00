import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test reaches for the network

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from model import GPT, GPTConfig


@pytest.fixture(scope="session")
def hf_model():
    """A small GPT-2 made by transformers, with weights large enough that its predictions differ from place to place."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_positions=128, n_embd=48, n_layer=3, n_head=4, bos_token_id=256, eos_token_id=256
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4).add_(torch.randn_like(p), alpha=0.02)  # biases and layer norms count too
    return model


@pytest.fixture(scope="session")
def hf_folder(hf_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    hf_model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(hf_folder):
    return GPT.load(hf_folder)


@pytest.fixture
def byte_model():
    """Random weights over bytes: 256 is the end token."""
    torch.manual_seed(1)
    return GPT(GPTConfig(257, 384, 32, 2, 2, eos_token_id=256, chess_format="expanded"))


@pytest.fixture(autouse=True)
def denormal_numbers():
    """train.main() turns them off for its process; other tests, and hypothesis, count on them."""
    yield
    torch.set_flush_denormal(False)
