"""Which word of an answer earned what.

GRPO pays all tokens of a completion for the whole answer. But one illegal move among five candidates says nothing about
the other four, nor a wrong rank about the other seven, and the verifier knows which is which. So a word is compared
with the word at the same place in the other answers of its group, and its tokens are paid for it alone: GRPO with
process supervision (Shao et al., 2024, DeepSeekMath, section 4.1.3), the rules of chess being the process reward model.
"""

import re

import torch

import rewards
import tasks

POLICY = [f"{field}{i}" for field in "ME" for i in range(1, 6)] + ["B"]
BOARD = [f"rank {i}" for i in range(8, 0, -1)] + ["turn", "castling", "passant", "halfmoves", "move"]
ENVIRONMENT = [*BOARD, "reward", "terminated", "truncated"]
WHOLE = 0  # the place of all that is in no word: headers, text after the answer, the end token, malformed answers
PLACES = {name: place for place, name in enumerate(["whole", *POLICY, *ENVIRONMENT])}

WORD = re.compile(r"[^ ]+ ?")  # with the space that ends it, for to end a word is part of writing it
FIELD = re.compile(r"[^ +/]+[ +/]?")


def policy_words(prompt, completion, labels):
    answer = rewards.read_policy(completion)[1]
    if answer is None:
        return
    moves, numbers, best, _ = answer
    legal, five = rewards.knowledge(prompt, labels)
    paid, spans = rewards.POLICY, [match.span() for match in WORD.finditer(completion)]
    for i, (move, number) in enumerate(zip(moves[:5], numbers)):
        new = move not in moves[:i]
        worth = paid["candidates_legal"] * (1 if new and move in legal else -rewards.WASTED)
        worth += paid["candidates"] * (new and move in five)
        yield *spans[1 + i], f"M{i + 1}", worth / (paid["candidates_legal"] + paid["candidates"])
        if new and move in five:  # else nobody knows what it should say
            yield *spans[2 + len(moves) + i], f"E{i + 1}", 1 / (1 + rewards.distance(number, five[move]))
    shares = rewards.policy(prompt, completion, labels)[1]
    rungs = "listed", "legal", "top5", "loss", "best"
    worth = sum(paid[rung] * shares[rung] for rung in rungs) / sum(paid[rung] for rung in rungs)
    yield *spans[3 + 2 * len(moves)], "B", worth


def environment_words(prompt, completion, labels):
    true = tasks.environment_completion(*(labels or rewards.truth(prompt)), "rookworld")
    said, right = list(FIELD.finditer(completion)), FIELD.findall(true)
    if rewards.read_environment(completion) is None or len(said) != len(right):
        return
    for name, match, word in zip(ENVIRONMENT, said, right):
        written = tasks.contract(match[0]) if name.startswith("rank") else match[0]
        yield *match.span(), name, float(written.strip(" +") == word.strip(" +"))


WORDS = {"P: ": policy_words, "A: ": environment_words}  # (start, end, place, worth) of the words of an answer


def credit(samples, texts, grades, tokens, tokenizer, kind):
    """What answers earned (N, K), the whole and then its words by place, and the place (N, T) of every token.

    With kind="answer" K is 1, and all tokens share the answer's reward; so do those of a task without words. A word
    that an answer lacks is worth the mean of its group, which makes its advantage zero.
    """
    whole = torch.tensor([[g.reward] for g in grades])  # (N, 1)
    if kind == "answer":
        return whole, torch.zeros(tokens.shape, dtype=torch.long)
    group_size = len(texts) // len(samples)
    worth = torch.full((len(texts), len(PLACES)), torch.nan)
    places = [[WHOLE] * tokens.shape[1] for _ in texts]
    for row, (text, ids) in enumerate(zip(texts, tokens.tolist())):
        sample, owner = samples[row // group_size], [WHOLE] * len(text)  # of each letter
        words = WORDS.get(sample.prompt[:3])
        if words and text.isascii():
            for start, end, name, value in words(sample.prompt, text, sample.labels):
                worth[row, PLACES[name]] = value
                owner[start:end] = [PLACES[name]] * (end - start)
        end = 0
        for t, token in enumerate(ids):  # a token belongs to the word of its last letter: " e2" to the move
            end += len(tokenizer.token_bytes.get(token, b""))
            if token == tokenizer.eos or end > len(text):
                break
            places[row][t] = owner[end - 1]
    groups = worth[:, 1:].view(len(samples), group_size, -1)  # (B, G, K - 1)
    groups = torch.where(groups.isnan(), groups.nanmean(1, keepdim=True), groups).nan_to_num(0)
    return torch.cat([whole, groups.flatten(0, 1)], 1), torch.tensor(places)
