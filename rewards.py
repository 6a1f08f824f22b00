"""What a completion is worth: the grammar of the answers, the rules of chess as judge, graduated rewards and penalties.

`grade` gives a reward in [-0.3, 1] and its parts. A task is one function: it reads a completion, says what is right
in it (`metrics`), and which share of each piece of the reward that earns (`shares`, at most 1). No tensors in here.
"""

import re
from functools import lru_cache
from typing import NamedTuple

import chess
from rapidfuzz.distance import Levenshtein

import tasks

# ---------------------------------------------------------------------------------------------------------------------
# Grade.parts: plain names say what is right, `earned/...` what it paid. All are floats.
#
#   both tasks     runaway           the completion hit its length limit without an end token
#                  structure         its fields are there and in order; 0 is malformed (the environment's "invalid")
#   policy         parse             the moves and numbers can be read
#                  legal, top5, best the move after B: is legal, one of the engine's five, (as good as) its best
#                  candidates        of the engine's five, the share that is listed after M:
#                  candidates_legal  of the moves listed, the share that is legal; a repeated one counts once
#                  eval_mae          error of the evaluations in pawns, over the candidates that the engine names too
#                  cp_loss           what the best move gives away, in pawns; known for the engine's five
#   environment    next_state        the very FEN
#                  next_state_nls    normalised Levenshtein similarity of the FEN
#                  reward_match, reward_mae, terminated_match, truncated_match   the other three fields
#   what was paid  earned/NAME       NAME is a key of POLICY or ENVIRONMENT below, or `malformed`; together they are
#                                    the reward before the runaway penalty
#
# What cannot be known is left out: eval_mae, cp_loss and reward_mae where there is nothing to compare, and top5, best
# and candidates for a position without labels (there only the rungs up to `legal` can be earned).

MALFORMED = -0.3
LIMIT = 4096  # characters; no answer has a tenth of it, and it bounds the work on any other
PAWNS = 10.0  # evaluations count up to here: beyond it, and at a mate, a game is won
WASTED = 0.25  # what an illegal or repeated candidate costs, where a legal one earns 1: to list one pays from 20 % on

# The policy's ladder: structure < parse < legal < top5 < best. Each of the last three outweighs all that can be earned
# beside them (clean to evals, and what wasted candidates cost), so no list of candidates makes up for a worse move.
POLICY = {
    "structure": 0.02,
    "parse": 0.04,
    "clean": 0.02,  # no text after the last field
    "listed": 0.01,  # the best move is one of the candidates
    "candidates_legal": 0.08,
    "candidates": 0.05,
    "evals": 0.03,
    "legal": 0.22,
    "top5": 0.22,
    "loss": 0.09,  # how little the move gives away, within the engine's five
    "best": 0.22,
}

# The very FEN outweighs the other three fields together.
ENVIRONMENT = {
    "structure": 0.1,
    "next_state": 0.4,
    "fields": 0.15,  # how many of the FEN's six fields are right
    "similarity": 0.1,  # and how near each of them is, by edit distance
    "reward": 0.05,  # by distance
    "reward_match": 0.05,
    "terminated_match": 0.075,
    "truncated_match": 0.075,
}


class Grade(NamedTuple):
    reward: float
    parts: dict


def grade(prompt, completion, labels, truncated, *, runaway_multiplier=0.3, warmup=1.0):
    """The worth of `completion`, a text without its end token; `truncated` says that it had none when it hit its limit.

    `labels` is ((uci, centipawns), ...) for `P: ` and what tasks.transition says for `A: ` (None: it is asked here).
    A `warmup` below 1 moves weight from the content to the structure; at 0 the structure is all that counts.
    """
    task, weights = TASKS[prompt[:3]]
    metrics, shares = task(prompt, completion, labels)
    form = sum(weights.get(name, 0) for name in ("structure", "parse"))
    raised = (1 - warmup * (1 - form)) / form
    earned = {"earned/malformed": 0.0 if metrics["structure"] else MALFORMED}
    for name, weight in weights.items():
        earned["earned/" + name] = weight * shares[name] * (raised if name in ("structure", "parse") else warmup)
    reward = round(sum(earned.values()), 9)  # a perfect answer is worth 1.0, not 0.9999999999999999
    if truncated and reward > 0:  # a factor keeps the order of rewards, where a cap would make them all one
        reward *= runaway_multiplier
    metrics["runaway"] = truncated
    return Grade(reward, {name: float(value) for name, value in (metrics | earned).items()})


# ---------------------------------------------------------------------------------------------------------------------
# The grammar. Only the space separates, and a run of them is one (RookWorld pads its fields); digits are ASCII.

UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def split_words(text):
    return [word for word in text.split(" ") if word] if len(text) <= LIMIT else []


def read_policy(completion):
    """(structure, answer) of `M: moves E: numbers B: move`. The answer is (moves, numbers, best, words after it), or
    None where the three headers stand in order but what is between them cannot be read."""
    words = split_words(completion)
    try:
        e = words.index("E:")
        b = words.index("B:", e)
    except ValueError:
        return False, None
    if words[0] != "M:":
        return False, None
    moves, numbers, best = words[1:e], words[e + 1 : b], words[b + 1 : b + 2]
    if (
        not (moves and best and len(moves) == len(numbers))
        or not all(map(UCI.fullmatch, moves + best))
        or not all(map(NUMBER.fullmatch, numbers))
    ):
        return True, None
    return True, (moves, [float(number) for number in numbers], best[0], words[b + 2 :])


def read_environment(completion):
    """(FEN, reward, terminated, truncated) of `FEN+reward+terminated+truncated`, or None. The FEN may be any text."""
    fields = [field.strip(" ") for field in " ".join(split_words(completion)).split("+")]
    if len(fields) != 4 or not NUMBER.fullmatch(fields[1]) or not {*fields[2:]} <= {"0", "1"}:
        return None
    board, space, rest = fields[0].partition(" ")  # a dot is an empty square on the board alone
    return tasks.contract(board) + space + rest, float(fields[1]), fields[2] == "1", fields[3] == "1"


# ---------------------------------------------------------------------------------------------------------------------
# Policy: `P: FEN` -> `M: m1 m2 m3 m4 m5 E: e1 e2 e3 e4 e5 B: best`


@lru_cache(1024)  # a group shares its prompt
def legal_moves(prompt):
    return frozenset(move.uci() for move in chess.Board(tasks.policy_fen(prompt)).legal_moves)


def distance(a, b):
    """Of two evaluations, in pawns."""
    return abs(max(-PAWNS, min(PAWNS, a)) - max(-PAWNS, min(PAWNS, b)))


def knowledge(prompt, labels):
    """The legal moves, and the engine's five with their evaluations in pawns."""
    legal = legal_moves(prompt)
    return legal, {uci: cp / 100 for uci, cp in sorted(labels or (), key=lambda move: -move[1])[:5] if uci in legal}


def policy(prompt, completion, labels):
    legal, five = knowledge(prompt, labels)
    names = "structure", "parse", "legal", "candidates_legal", *(("top5", "best", "candidates") if five else ())
    metrics, shares = dict.fromkeys(names, 0.0), dict.fromkeys(POLICY, 0.0)

    structure, answer = read_policy(completion)
    metrics["structure"] = shares["structure"] = structure
    if answer is None:
        return metrics, shares
    moves, numbers, best, rest = answer
    metrics["parse"] = shares["parse"] = 1
    shares["clean"] = not rest
    shares["listed"] = best in moves

    # Each place in the list is worth the same, and a longer list makes each worth less: more moves are no better net.
    wanted = min(5, len(legal))
    places = max(wanted, len(moves))
    found = legal.intersection(moves)
    useful = min(len(found), wanted)
    metrics["candidates_legal"] = len(found) / len(moves)
    shares["candidates_legal"] = (useful - WASTED * (len(moves) - useful)) / places
    errors = {}
    for move, number in zip(moves, numbers):
        if move in five and move not in errors:
            errors[move] = distance(number, five[move])
    shares["candidates"] = len(errors) / places
    shares["evals"] = sum(1 / (1 + error) for error in errors.values()) / places
    if errors:
        metrics["eval_mae"] = sum(errors.values()) / len(errors)

    metrics["legal"] = shares["legal"] = best in legal
    if five:
        metrics["candidates"] = len(errors) / len(five)
    if best in five:
        top = max(five.values())
        metrics["cp_loss"] = distance(top, five[best])
        metrics["top5"] = shares["top5"] = 1
        metrics["best"] = shares["best"] = five[best] == top  # one of two mates in one is as good as the other
        shares["loss"] = 1 / (1 + metrics["cp_loss"])
    return metrics, shares


# ---------------------------------------------------------------------------------------------------------------------
# Environment: `A: FEN+move+recent moves+` -> `next FEN+reward+terminated+truncated`


@lru_cache(1024)
def truth(prompt):
    fen, move, *_ = prompt[3:].split("+")
    return tasks.transition(tasks.contract(fen), move)


def environment(prompt, completion, labels):
    names = "structure", "next_state", "next_state_nls", "reward_match", "terminated_match", "truncated_match"
    metrics, shares = dict.fromkeys(names, 0.0), dict.fromkeys(ENVIRONMENT, 0.0)
    answer = read_environment(completion)
    if answer is None:
        return metrics, shares
    fen, reward, terminated, truncated = answer
    next_fen, true_reward, true_terminated, true_truncated = labels or truth(prompt)
    metrics["structure"] = shares["structure"] = 1

    # Field by field, for then each field that gets better makes the whole better. An edit distance between whole FENs
    # has no such order: it may align one field with its neighbour.
    said, true = fen.split(" "), next_fen.split(" ")
    count = max(len(said), len(true))
    metrics["next_state"] = shares["next_state"] = fen == next_fen
    metrics["next_state_nls"] = Levenshtein.normalized_similarity(fen, next_fen)
    shares["fields"] = sum(a == b for a, b in zip(said, true)) / count
    shares["similarity"] = sum(map(Levenshtein.normalized_similarity, said, true)) / count

    metrics["reward_mae"] = min(2.0, abs(reward - true_reward))  # rewards are between -1 and 1
    shares["reward"] = 1 - metrics["reward_mae"] / 2
    metrics["reward_match"] = shares["reward_match"] = reward == true_reward
    metrics["terminated_match"] = shares["terminated_match"] = terminated == true_terminated
    metrics["truncated_match"] = shares["truncated_match"] = truncated == true_truncated
    return metrics, shares


TASKS = {"P: ": (policy, POLICY), "A: ": (environment, ENVIRONMENT)}
