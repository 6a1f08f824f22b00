"""Prompts in pieces, and chats that are made of them."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import toy
from examples.chat import chat
from nanorook.task import Question, prompt_ids, prompt_text
from nanorook.tokenizer import END, Special, Tokenizer
from rollout import sample
from tools import ask

CHATS = {
    "a question": [("user", "What is 2 + 3?")],
    "spaces and breaks": [("user", "  <b>\n\n x < y & z > 1 \n")],
    "a system and an example": [
        ("system", "Answer with a number."), ("user", "1 + 1 ="), ("assistant", " 2\n"), ("user", "é 中 🙂 22"),
    ],
}  # fmt: skip


def folder_of(name):
    return toy.ROOT / "tests/published" / name


def config_of(folder):
    return SimpleNamespace(tokenizer=Tokenizer.load(folder))


def messages_of(*said):
    return [{"role": role, "content": content} for role, content in said]


@pytest.mark.parametrize("said", CHATS)
@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_same_ids_as_transformers(name, said):
    settings = json.loads((folder_of(name) / "tokenizer_config.json").read_text())
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder_of(name) / "tokenizer.json"), **settings)
    config, messages = config_of(folder_of(name)), messages_of(*CHATS[said])
    for options in ({}, {"enable_thinking": False}):  # Qwen3's writes an empty thought then
        prompt = chat(config, messages, **options)
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
        assert prompt_ids(prompt, config.tokenizer) == expected
        shown = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        assert prompt_text(prompt) == shown


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_what_a_message_holds_stays_text(name):
    """Also where it holds what the template splits at, a character that could be taken for a mark, or nothing."""
    config = config_of(folder_of(name))
    harmless = prompt_ids(chat(config, messages_of(("user", "x"))), config.tokenizer)
    special = {*config.tokenizer.special.values()}
    parts = st.sampled_from([*config.tokenizer.special, "<|im_", "end|>", "\ufdd0", "0", "\ufdd00\ufdd0", "\n", "a"])

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.lists(parts).map("".join))
    def check(text):
        prompt = chat(config, messages_of(("user", text)))
        ids = prompt_ids(prompt, config.tokenizer)
        assert [i for i in ids if i in special] == [i for i in harmless if i in special]
        assert prompt_text(prompt) == prompt_text(chat(config, messages_of(("user", "TEXT")))).replace("TEXT", text)

    check()


def test_a_template_may_be_a_file_of_its_own_and_has_what_transformers_gives_it(tmp_path):
    shutil.copytree(folder_of("smollm2"), tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    template.write_text("""{{ bos_token }}
    {% for message in messages %}
{% if message.role == "no" %}{{ raise_exception("a role of its own") }}{% endif %}
{%- generation %}{{ message | tojson }}{% endgeneration -%}{% break %}
    {% endfor %}
{{ strftime_now("%d %b") }}{{ tools is none }}{{ add_generation_prompt }}""")
    config = config_of(tmp_path)
    assert chat(config, messages_of(("é", "<"), ("b", "c"))) == (
        Special("<|im_start|>"), '\n{"role": "é", "content": "<"}26 JulTrueTrue'
    )  # fmt: skip
    for said, sentence in ((("no", "x"), "refuses a message: a role of its own"), (("user", 3), "fails: TypeError")):
        with pytest.raises(SystemExit, match=f"the model's chat template {sentence}"):
            chat(config, messages_of(said))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [
        {"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"},
    ]}))  # fmt: skip
    template.unlink()
    assert chat(config_of(tmp_path), messages_of(("user", "hello"))) == ("hello",)
    template.write_text("{{ ''.__class__.__mro__ }}")  # a folder from the hub is not to be trusted
    with pytest.raises(SystemExit, match="SecurityError"):
        chat(config_of(tmp_path), [])
    with pytest.raises(SystemExit, match="the model's folder has no chat template; choose"):
        chat(SimpleNamespace(tokenizer=Tokenizer.of_bytes()), [])


def test_a_prompt_in_pieces_is_asked_shown_and_written(toy_run, tmp_path, monkeypatch, capsys):
    """Its text is read as it stands, even where it holds an end token's name."""
    honest, text = toy.make_questions, f"{END} and "

    def make_questions(items, count, rng, config):
        assert config.tokenizer.ends == (256,)
        return [q._replace(prompt=(Special(END), "<|", q.prompt)) for q in honest(items, count, rng, config)]

    monkeypatch.setattr(toy, "make_questions", make_questions)
    toy_run(STEPS=1)
    said = capsys.readouterr().out
    assert "answers end with <|endoftext|>\n" in said and ": <|endoftext|><|" in said
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert prompts and all(prompt.startswith("<|endoftext|><|") for prompt in prompts)
    model = toy.model()
    [rollout] = sample(model, [Question("short", (Special(END), "ab"), 1)], 2, toy.LIMITS)
    assert rollout.prompts.tolist() == [[256, 97, 98]]
    for said in (END, text, (END, text)):
        assert prompt_ids(said, model.tokenizer) == list(prompt_text(said).encode())
    monkeypatch.setattr(model.config, "n_positions", 64)
    monkeypatch.setattr(model.wpe, "weight", torch.nn.Parameter(torch.zeros(64, 32)))
    ask.ask(model, toy, Question("short", (Special(END), text), 1), True, 1.0, 1)
    assert "short: <|endoftext|><|endoftext|> and\n" in capsys.readouterr().out
