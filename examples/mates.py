"""A task that builds on chess: name a move that mates. The rules alone judge it, without a label or an engine.

    TASK=examples/mates.py ./train.sh           P: a position with a mate in one   M:   ->   d8h4

The prompt is the policy's with the first header of its answer, so the embedded model answers it with its first
candidate: five or six tokens instead of 75, and they need the same skill. Three questions in four (MATES_SHARE) are
about such positions. The others are about ordinary ones and ask for a legal move, so that legal moves are not
forgotten; a quarter of these are in check. MOVES_KL weighs the KL to the start model there.

    python -m examples.mates OUT FILE ...       makes the data from labelled positions
"""

import argparse

import rewards
from nanorook.settings import fail, new_file, setting, withdraw
from nanorook.task import Grade
from rook import mating, positions
from rook.stockfish import MATE

DEFAULTS = dict(STEPS=300, BATCH_POSITIONS=64, GROUP_SIZE=32, LR=3e-4, KL_COEF=0.03, EVAL_POSITIONS=1000)
DEFAULTS |= dict(WARMUP_STEPS=5, EVAL_EVERY=0, OUT_DIR="runs/mates")
DEFAULTS |= dict(KL_DIVERGENCE_THRESHOLD=3.0)  # single steps of sound runs had a KL of 0.8 on ordinary positions
LIMITS = {kind: rewards.LIMITS[kind] for kind in ("mates", "moves")}
start_model, show, answers = rewards.start_model, rewards.show, rewards.answers
NAMES = rewards.NAMES
WEIGHTS = {  # what each rung pays
    "mates": {"structure": 0.05, "legal": 0.15, "check": 0.2, "mate": 0.6},
    "moves": {"structure": 0.05, "legal": 0.95},
}
withdraw(rewards)  # settings of the whole chess task, which would have no effect here
MATES_SHARE = setting("MATES_SHARE", 0.75, "share of questions about positions with a mate in one", low=0, high=1)
MOVES_KL = setting("MOVES_KL", 1.0, "weight of the KL on ordinary positions, as a multiple of KL_COEF", low=0)
KL_WEIGHTS = {"moves": MOVES_KL}


def load(source, config):
    """Items are those of chess; no label is needed."""
    return mating.beside(source, *positions.split(positions.load_unfinished(source)))


def make_questions(items, count, rng, config):
    mates = [position for pool, position in items if pool == "mates"]
    ordinary = [position for pool, position in items if pool == "ordinary"]
    wanted = max(min(len(mates), round(MATES_SHARE * count)), count - len(ordinary))
    chosen = [("mates", position) for position in rng.sample(mates, wanted)]
    left = count - len(chosen)
    chosen += [("moves", position) for position in rewards.draw_ordinary(ordinary, left, left, rng)]
    return [ask(kind, position, config) for kind, position in chosen]


def ask(kind, position, config):
    question = rewards.first_question("mates", position, rewards.chess_format(config))
    return question._replace(kind=kind)


def question(text, config):
    """A FEN, typed at tools.ask."""
    asked = ask("mates", positions.Position(positions.typed_board(text.strip()).fen(), (), ()), config)
    if not asked.truth["legal"]:
        fail(f"no move is legal in {text.strip()}; ask about another position.")
    return asked if asked.truth["mate"] else asked._replace(kind="moves")


def grade(question, text, hit_limit=False):
    metrics = rewards.grade(question._replace(kind="mates"), text).metrics
    return Grade(tuple((name, weight * metrics[name]) for name, weight in WEIGHTS[question.kind].items()), metrics)


def make(out, files):
    """Writes the positions in which the engine's best move mates, a FEN in each line, ordered by their boards."""
    found = positions.distinct(position for file in files for position in positions.load(file))
    mates = [position for position in found if position.moves and position.moves[0][1] == MATE - 1]
    mates = [position for position in mates if positions.is_sound(position)]
    if not mates:
        fail("no labelled position has a best move that mates; label positions with tools.chess_label first.")
    positions.write_lines(out, sorted(position.fen for position in mates))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m examples.mates", description=make.__doc__)
    parser.add_argument("out", type=new_file, help="the file to make, gzipped if it ends in .gz")
    parser.add_argument("files", metavar="FILE", nargs="+", help="labelled positions")
    make(**vars(parser.parse_args()))
