"""Chats in the form that an instruction-tuned model knows, made by its folder's template. No message can break it.

`prompt` and `is_held_out` are what a task needs whose questions are texts, such as examples/jsonl.py."""

import functools
import json
import re
import zlib
from datetime import datetime

from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanorook.settings import fail
from nanorook.tokenizer import Special, token_name


def chat_template(config):
    """The chat template of the model's folder, or None."""
    files = config.tokenizer.files
    try:
        if "chat_template.jinja" in files:
            return files["chat_template.jinja"].decode()
        found = json.loads(files.get("tokenizer_config.json", b"{}")).get("chat_template")
        if isinstance(found, list):  # several, each with a name
            found = {one["name"]: one["template"] for one in found}.get("default")
        if not isinstance(found, str | None):
            raise TypeError(f"{found!r:.60} is not a text")
    except (ValueError, LookupError, TypeError) as error:
        fail(f"the chat template in the model's folder cannot be read: {type(error).__name__}: {error}")
    return found


def chat(config, messages, **options):
    """The prompt for [{"role": "user", "content": text}, ...], up to where the answer begins, in pieces: the template's
    special tokens are Special, and everything in a message is text. `options` are passed to the template (such as
    enable_thinking=False for Qwen3)."""
    tokenizer = config.tokenizer
    settings = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}"))
    if not (template := chat_template(config)):
        fail("the model's folder has no chat template; choose an instruction-tuned model, or write the prompt as text.")
    special = sorted(tokenizer.special, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, special))})")
    # A special token's name in a message is rendered as one character of Unicode's last planes, which are for private
    # use, from a block that no message contains. So no template can take a name apart or mistake it for its own.
    texts = {*"".join(str(text) for message in messages for text in message.values())}
    blocks = range(0xF0000, 0x10FFFE - len(special), len(special) or 1)
    first = next(start for start in blocks if texts.isdisjoint(map(chr, range(start, start + len(special)))))
    hidden_names = {name: chr(first + i) for i, name in enumerate(special)}
    shown_names = str.maketrans({character: name for name, character in hidden_names.items()})

    def hide(text):
        return pattern.sub(lambda found: hidden_names[found[0]], text)

    try:
        names = {n: token_name(v) for n, v in settings.items() if v and n.endswith("_token") and n[:4] != "add_"}
        options = {"tools": None, "documents": None, "add_generation_prompt": True, **names, **options}
        hidden = [{name: hide(text) for name, text in message.items()} for message in messages]
        pieces = pattern.split(compiled(template).render(messages=hidden, **options))
    except Exception as error:  # whatever a template raises
        fail(f"the model's chat template fails: {type(error).__name__}: {error}")
    pieces = [piece for piece in pieces if piece]
    return tuple(Special(p) if p in tokenizer.special else p.translate(shown_names) for p in pieces)


def prompt(config, question, system="", examples=()):
    """The prompt of a question: a chat if the model's folder has a template, or else plain text with the same parts.
    `examples` are pairs (question, answer), shown before it."""
    if not chat_template(config):
        shown = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in examples)
        return f"{system}\n\n" * bool(system) + f"{shown}Question: {question}\nAnswer:"
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answer in examples:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    # A model that can think at length before it answers (Qwen3) would reach the limit first, so it is told not to.
    return chat(config, [*messages, {"role": "user", "content": question}], enable_thinking=False)


def is_held_out(question):
    """Whether a question is evaluated on and never trained on: one in five, by a hash of its text. So it stays held out
    when more questions join it, and other spaces or capitals do not make it a new one."""
    words = " ".join(question.lower().split())
    return zlib.crc32(words.encode(errors="replace")) % 5 == 0


@functools.cache
def compiled(template):
    """The template in the environment that transformers gives it. Only the date stays the same, so that a run that is
    resumed asks the same questions."""
    # {% generation %} marks what a model is trained on; it renders nothing.
    template = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", template)
    template = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", template)
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    env.globals["raise_exception"] = lambda message: fail(f"the model's chat template refuses a message: {message}")
    env.globals["strftime_now"] = lambda form: datetime(2024, 7, 26).strftime(form)  # Llama 3's own default
    return env.from_string(template)
