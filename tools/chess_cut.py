"""A GPT-2 in RookWorld's format without the tokens that its texts never use: the same model, but faster on a CPU.

python -m tools.chess_cut MODEL OUT            MODEL: a Hugging Face folder or a hub id

Of GPT-2's 50,257 tokens, 2,052 are left. Where answers are short, a softmax over all tokens takes most of a step.
Texts have the same tokens as before, under new ids, and the layers stay as they are.
"""

import argparse
import dataclasses
import random
import re
from pathlib import Path

import architectures
import rewards
from model import GPT
from nanorook.settings import fail
from nanorook.tokenizer import END, GPT2_WORDS, Tokenizer
from rook import positions
from tools import chess_texts as texts

# A token of a text is pieces, a number, a letter of a square or a header, or a sign; or it is the space.
TEXT_TOKEN = re.compile(rb" ?([pnbrqkPNBRQK]+|[0-9]+|[a-hwMEBPAL]|[-/+:.])| ")


def cut(model):
    """The same model with single bytes, the tokens that a text can contain, and the end token."""
    tokenizer = model.tokenizer
    tokens = sorted(tokenizer.token_bytes.items())
    kept = [i for i, token in tokens if len(token) == 1 or TEXT_TOKEN.fullmatch(token)]
    ranks = {tokenizer.token_bytes[i]: new for new, i in enumerate(kept)}  # the order of the ids is that of the merges
    extra = model.config.extra | ({"pad_token_id": len(ranks)} if "pad_token_id" in model.config.extra else {})
    config = dataclasses.replace(model.config, vocab_size=len(ranks) + 1, eos_token_id=len(ranks), extra=extra)
    small, weights = GPT(config), model.state_dict()
    weights["wte.weight"] = weights["wte.weight"][[*kept, tokenizer.eos]]
    small.load_state_dict(weights)
    small.tokenizer = Tokenizer(ranks, {END: len(ranks)}, (len(ranks),), [GPT2_WORDS])
    return small


def main():
    parser = argparse.ArgumentParser("python -m tools.chess_cut", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="the model to cut")
    parser.add_argument("out", type=Path, help="the folder to write")
    args = parser.parse_args()
    if args.out.exists() and (args.out.is_file() or any(args.out.iterdir())):
        fail(f"{args.out} is not an empty folder; name another one.")
    model = architectures.load_merged(args.model)
    if type(model) is not GPT or rewards.chess_format(model.config) != "rookworld":
        fail(f"{args.model} is not a GPT-2 in RookWorld's format, the only one whose unused tokens are known.")
    small, rng = cut(model), random.Random(0)
    for position in rng.sample(positions.load("builtin"), 100):
        text = "".join(texts.policy_text(position, rng, "rookworld"))
        before, after = ([t.token_bytes[i] for i in t.encode(text)] for t in (model.tokenizer, small.tokenizer))
        if before != after or model.tokenizer.beginning:
            fail(f"{args.model} has a tokenizer unlike GPT-2's, so its texts would get other tokens.")
    small.save(args.out)
    print(f"{args.out}: {small.config.vocab_size:,} of {model.config.vocab_size:,} tokens are left.")


if __name__ == "__main__":
    main()
