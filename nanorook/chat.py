"""A chat as an instruction-tuned model was taught it: the template of its folder, which no message can break out of."""

import datetime
import json
import re

from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanorook.settings import fail
from nanorook.tokenizer import Special


def chat(config, messages, **options):
    """A prompt of `messages`, [{"role": "user", "content": ...}, ...], up to where the answer begins. It is in pieces:
    special tokens of the template are Special, and what a message holds is text. `options` are the template's own, as
    enable_thinking=False of Qwen3."""
    tokenizer = config.tokenizer
    settings = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}"))
    template = tokenizer.files.get("chat_template.jinja", b"").decode() or settings.get("chat_template")
    if not template:
        fail("the model's folder has no chat template, which a chat needs; take an instruction-tuned model.")
    special = sorted(tokenizer.special, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, special)) + ")")
    # A special token in a message is replaced by its number between two marks until those of the template are found.
    mark = next(c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in str([*map(dict.values, messages)]))

    def hide(text):
        return pattern.sub(lambda found: f"{mark}{special.index(found[0])}{mark}", text)

    def restore(text):
        return re.sub(f"{mark}(\\d+){mark}", lambda found: special[int(found[1])], text)

    def raise_exception(message):
        raise ValueError(message)

    # The same environment as in transformers, for whose apply_chat_template templates are written.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    names = {name: value for name, value in settings.items() if name.endswith("_token")}
    names = {name: value["content"] if isinstance(value, dict) else value for name, value in names.items() if value}
    try:
        hidden = [{name: hide(text) for name, text in message.items()} for message in messages]
        options = {"tools": None, "documents": None, "add_generation_prompt": True, **names, **options}
        rendered = environment.from_string(template).render(messages=hidden, **options)
    except Exception as error:  # whatever a template raises
        fail(f"the model's chat template refuses these messages: {type(error).__name__}: {error}")
    pieces = [piece for piece in pattern.split(rendered) if piece]
    return tuple(Special(piece) if piece in tokenizer.special else restore(piece) for piece in pieces)
