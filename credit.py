"""Which word of an answer earned what.

GRPO pays all tokens of a completion for the whole answer. But one illegal move among five candidates says nothing about
the other four, nor a wrong rank about the other seven, and the verifier knows which is which. So a word is compared
with the word at the same place in the other answers of its group, and its tokens are paid for it alone: GRPO with
process supervision (Shao et al., 2024, DeepSeekMath, section 4.1.3), the rules of chess being the process reward model.

CREDIT=square goes on: to the two squares of a move, to each square of a board that writes all of them, and a word that
nobody can judge is paid nothing.
"""

import math
import re
from functools import partial

import torch

import rewards
import tasks

POLICY = [f"{field}{i}" for field in "ME" for i in range(1, 6)] + ["B"]
BOARD = [f"rank {i}" for i in range(8, 0, -1)] + ["turn", "castling", "passant", "halfmoves", "move"]
ENVIRONMENT = [*BOARD, "reward", "terminated", "truncated"]
LEFT = [f"{name} from" for name in POLICY if name[0] != "E"]  # the squares that moves leave
SQUARES = [f"{rank} {file}" for rank in BOARD[:8] for file in "abcdefgh"]
WHOLE = 0  # the place of all that is in no word: headers, text after the answer, the end token, malformed answers
PLACES = {name: place for place, name in enumerate(["whole", *POLICY, *ENVIRONMENT, *LEFT, *SQUARES])}

WORD = re.compile(r"[^ ]+ ?")  # with the space that ends it, for to end a word is part of writing it
FIELD = re.compile(r"[^ +/]+[ +/]?")


def policy_words(prompt, completion, labels, kind="word"):
    answer = rewards.read_policy(completion)[1]
    if answer is None:
        return
    moves, numbers, best, _ = answer
    legal, five = rewards.knowledge(prompt, labels)
    spans = [match.span() for match in WORD.finditer(completion)]
    for i, (move, number) in enumerate(zip(moves[:5], numbers)):
        new = legal.difference(moves[:i])
        yield from move_words(*spans[1 + i], f"M{i + 1}", move, new, partial(listed, new=new, five=five), kind)
        if move in new and move in five:
            yield *spans[2 + len(moves) + i], f"E{i + 1}", 1 / (1 + rewards.distance(number, five[move]))
        elif kind == "square":  # nobody knows what it should say
            yield *spans[2 + len(moves) + i], f"E{i + 1}", math.nan
    worth = partial(chosen, moves=moves, legal=legal, five=five)
    yield from move_words(*spans[3 + 2 * len(moves)], "B", best, legal, worth, kind)


def listed(move, new, five):
    """What a candidate is worth that is legal and not yet listed, or not."""
    paid, known = rewards.POLICY, move in new and move in five
    worth = paid["candidates_legal"] * (1 if move in new else -rewards.WASTED) + paid["candidates"] * known
    return worth / (paid["candidates_legal"] + paid["candidates"])


def chosen(move, moves, legal, five):
    """What a best move is worth."""
    shares = rewards.choice(move, moves, legal, five)
    return sum(rewards.POLICY[rung] * share for rung, share in shares.items()) / sum(map(rewards.POLICY.get, shares))


def move_words(start, end, name, move, allowed, worth, kind):
    """A move is one word; or two, the square it leaves, which is worth as much as the best move that is allowed from
    there, and the square it goes to, which nobody can judge where none is."""
    if kind == "word":
        yield start, end, name, worth(move)
        return
    from_here = [worth(m) for m in allowed if m[:2] == move[:2]]
    yield start, start + 2, f"{name} from", max(from_here, default=worth(move))
    yield start + 2, end, name, worth(move) if from_here else math.nan


def environment_words(prompt, completion, labels, kind="word"):
    true = labels or rewards.truth(prompt)
    said = list(FIELD.finditer(completion))
    right, wide = (FIELD.findall(tasks.environment_completion(*true, form)) for form in ("rookworld", "expanded"))
    if rewards.read_environment(completion) is None or len(said) != len(right):
        return
    for name, match, word, row in zip(ENVIRONMENT, said, right, wide):
        start, written, word, row = match.start(), *(text.strip(" +") for text in (match[0], word, row))
        squares = written.replace("1", ".")
        if kind == "square" and name in BOARD[:8] and len(squares) == len(row):
            for i, file in enumerate("abcdefgh"):  # the last one with what ends the rank
                end = i + 1 if file != "h" else len(match[0])
                yield start + i, start + end, f"{name} {file}", float(squares[i:end] == row[i:end])
        else:
            written = tasks.contract(written) if name in BOARD[:8] else written
            yield *match.span(), name, float(written == word)


WORDS = {"P: ": policy_words, "A: ": environment_words}  # (start, end, place, worth) of the words of an answer


def credit(samples, texts, grades, tokens, tokenizer, kind):
    """What answers earned (N, K), the whole and then its words by place, and the place (N, T) of every token.

    With kind="answer" K is 1, and all tokens share the answer's reward; so do those of a task without words. A word
    that an answer lacks, or that nobody can judge, is worth the mean of its group, which makes its advantage zero.
    """
    whole = torch.tensor([[g.reward] for g in grades])  # (N, 1)
    places = torch.zeros(tokens.shape, dtype=torch.long)
    if kind == "answer":
        return whole, places
    group_size = len(texts) // len(samples)
    worth = torch.full((len(texts), len(PLACES)), torch.nan)
    for row, (text, ids) in enumerate(zip(texts, tokens.tolist())):
        sample, owner = samples[row // group_size], [WHOLE] * len(text)  # of each letter
        words = WORDS.get(sample.prompt[:3])
        if words and text.isascii():
            for start, end, name, value in words(sample.prompt, text, sample.labels, kind):
                worth[row, PLACES[name]] = value
                owner[start:end] = [PLACES[name]] * (end - start)
        end = 0
        for t, token in enumerate(ids):  # a token belongs to the word of its last letter: " e2" to the move
            end += len(tokenizer.token_bytes.get(token, b""))
            if token == tokenizer.eos or end > len(text):
                break
            places[row, t] = owner[end - 1]
    groups = worth[:, 1:].view(len(samples), group_size, -1)  # (B, G, K - 1)
    groups = torch.where(groups.isnan(), groups.nanmean(1, keepdim=True), groups).nan_to_num(0)
    return torch.cat([whole, groups.flatten(0, 1)], 1), places
