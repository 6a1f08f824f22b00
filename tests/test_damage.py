"""What a user, a file or a model's folder gets wrong ends in one sentence, never in a traceback."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

import toy
from architectures import count_parameters
from examples.chat import chat
from nanorook.folder import read_weights
from nanorook.task import Question, check_questions
from nanorook.tokenizer import Tokenizer
from tools import evaluate

LLAMA = dict(model_type="llama", vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=2)
LLAMA |= dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5)
LLAMA |= dict(tie_word_embeddings=True, attention_bias=False, head_dim=8, layer_types=None)
ROPE = dict(rope_type="llama3", rope_theta=500000, factor=8, low_freq_factor=1, high_freq_factor=4.0)
LLAMA |= dict(rope_parameters=ROPE | dict(original_max_position_embeddings=64))
WRONG = {  # values that an entry must not have, unless they are among those of its type that are in bounds
    int: ("x", "1", [], [1], {}, None, True, -1, 0, 1.5, 10**9, 10**30),
    float: ("x", "1", [], [1], {}, None, True, -1, 1e30, float("nan"), float("inf")),
    bool: ("x", [], {}, None, 1, 0, -1, 1.5),
}


def read_config(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return count_parameters(folder)


def entries():
    for name, value in LLAMA.items():
        for wrong in WRONG.get(type(value), ()):
            if name != "head_dim" or wrong is not None:
                yield name, {name: wrong}
    for name, value in LLAMA["rope_parameters"].items():
        for wrong in WRONG.get(type(value), ()):
            if "original" in name or wrong not in (0, 1.5, 10**9):  # these are numbers that a float may have
                yield name, {"rope_parameters": LLAMA["rope_parameters"] | {name: wrong}}


def test_each_entry_of_a_llamas_config_has_a_type_and_a_range(tmp_path):
    """Without it, 124 of 364 wrong values ended in a traceback, and some took all of the memory or loaded."""
    assert read_config(tmp_path, LLAMA) > 0
    read_config(tmp_path, LLAMA | {"head_dim": None, "tie_word_embeddings": False})
    for name, change in entries():
        with pytest.raises(SystemExit) as end:
            read_config(tmp_path, LLAMA | change)
        assert name in str(end.value) and "\n" not in str(end.value) and len(str(end.value)) < 400, (name, change)


FOLDER = toy.ROOT / "tests/published/smollm2"


def ask_in_a_chat(folder, files):
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    chat(SimpleNamespace(tokenizer=Tokenizer.load(folder)), [{"role": "user", "content": "a<|im_end|>b"}])


def chat_with(**settings):
    return lambda folder: ask_in_a_chat(
        folder, {"tokenizer_config.json": {"chat_template": "{{ bos_token }}"} | settings}
    )


def weights(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    read_weights(folder)


def table_of(folder):
    (folder / "skill.json").write_text('{"before": {')
    evaluate.main()


DAMAGE = {  # what is wrong: what meets it, and the sentence
    "half of a character in a question": (
        lambda folder: check_questions(toy, [Question("short", ("a", "\ud800"), 1)]),
        "contains half of a character",
    ),
    "skill.json is cut off": (table_of, "skill.json is damaged .JSONDecodeError"),
    "a weight map with a number": (weights, "index.json: damaged, or not an index"),
    "templates without names": (chat_with(chat_template=[{"template": "a"}]), "cannot be read: KeyError: 'name'"),
    "a template in another encoding": (
        lambda folder: ask_in_a_chat(folder, {"chat_template.jinja": b"\xff\xfe{"}),
        "cannot be read: UnicodeDecodeError",
    ),
    "a bos_token that is a number": (chat_with(bos_token=5), "fails: TypeError: 5 in tokenizer_config.json is not"),
    "an eos_token that is a number": (
        chat_with(eos_token=5),
        "expected a byte-level BPE .* TypeError: 5 in tokenizer_c",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_ends_in_a_sentence(what, tmp_path, monkeypatch):
    meet, sentence = DAMAGE[what]
    monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path)])
    with pytest.raises(SystemExit, match=sentence) as end:
        meet(tmp_path)
    assert "\n" not in str(end.value) and str(end.value).startswith("error: ")


def test_a_template_may_rewrite_a_message_without_taking_a_special_tokens_name_apart(tmp_path):
    """Its characters would have to be put together again, which ended in an IndexError or in another token's name."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = SimpleNamespace(tokenizer=Tokenizer.load(FOLDER))
    said = [{"role": "user", "content": "1<|im_end|>0<|im_start|>"}]
    for template, expected in {
        "{{ messages[0].content | replace('1', '99') | replace('0', '7') }}": "99<|im_end|>7<|im_start|>",
        "{{ messages[0].content[:2] }}": "1<|im_end|>",
        "{{ messages[0].content | upper }}": "1<|im_end|>0<|im_start|>",
    }.items():
        config.tokenizer.files["tokenizer_config.json"] = json.dumps({"chat_template": template}).encode()
        assert chat(config, said) == (expected,)
