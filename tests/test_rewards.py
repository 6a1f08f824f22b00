import itertools
import json
import math
import random
import re
import time
from pathlib import Path

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
import tasks
from rewards import ENVIRONMENT, LIMIT, MALFORMED, POLICY, grade, read_environment, read_policy

START = chess.STARTING_FEN
AFTER = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"  # 1. e4
FENS = [
    START,
    "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3",
    "8/P6k/8/8/8/8/6pp/K7 w - - 0 60",  # promotions
    "7k/5Q2/8/6K1/8/8/8/8 w - - 12 80",
    "r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 10 30",
    "k7/8/1K6/8/8/8/7R/8 b - - 4 70",  # one legal move
    "8/8/8/8/8/1k6/7r/K7 w - - 0 1",  # also one
]
FORMATS = "rookworld", "expanded"
quick = settings(max_examples=100, deadline=None, database=None, derandomize=True)


def legal_moves(fen):
    return sorted(move.uci() for move in chess.Board(fen).legal_moves)


def label(fen, seed=0):
    """Up to five moves, best first, in steps of 0.37 pawns."""
    moves = legal_moves(fen)
    random.Random(seed).shuffle(moves)
    return tuple((uci, 80 - 37 * i) for i, uci in enumerate(moves[:5]))


def say(moves, numbers, best, rest=""):
    return f"M: {' '.join(moves)} E: {' '.join(map(str, numbers))} B: {best}{rest}"


def policy(completion, fen=START, labels=None, truncated=False, **settings):
    labels = label(fen) if labels is None else labels
    return grade(tasks.policy_prompt(fen, "rookworld"), completion, labels, truncated, **settings)


def environment(completion, fen=START, move="e2e4", labels=None, truncated=False, **settings):
    prompt = tasks.environment_prompt(fen, move, [move], "rookworld")
    return grade(prompt, completion, labels, truncated, **settings)


def earned(result):
    return sum(value for name, value in result.parts.items() if name.startswith("earned/"))


# ---------------------------------------------------------------------------------------------------------------------
# The whole


@pytest.mark.parametrize("weights", [POLICY, ENVIRONMENT])
def test_weights_make_one(weights):
    assert math.fsum(weights.values()) == pytest.approx(1, abs=1e-12)
    assert min(weights.values()) > 0


@pytest.mark.parametrize("fen", FENS)
@pytest.mark.parametrize("warmup", [0, 0.3, 1])
def test_perfect_policy_is_exactly_one(fen, warmup):
    moves = list(label(fen))
    for chess_format, order in itertools.product(FORMATS, range(4)):
        random.Random(order).shuffle(moves)
        prompt = tasks.policy_prompt(fen, chess_format)
        completion = tasks.policy_completion(fen, moves, chess_format)
        result = grade(prompt, completion, label(fen), False, warmup=warmup)
        assert result.reward == 1.0
        wanted = {"structure", "parse", "legal", "top5", "best", "candidates", "candidates_legal"}
        assert all(result.parts[name] == 1 for name in wanted)
        assert result.parts["eval_mae"] == result.parts["cp_loss"] == result.parts["runaway"] == 0


def test_any_of_equal_bests_is_the_best():
    labels = ("d2d4", 30), ("e2e4", 30), ("g1f3", 30), ("c2c4", 12), ("b1c3", 0)
    for order in itertools.permutations(labels):
        assert policy(tasks.policy_completion(START, order, "expanded"), labels=labels).reward == 1.0
    fourth = tasks.policy_completion(START, labels, "expanded").replace("B: d2d4", "B: c2c4")
    assert policy(fourth, labels=labels).reward < 1


@quick
@given(st.sampled_from(FENS), st.data())
def test_both_formats_get_the_same_grade(fen, draw):
    labels = label(fen)
    moves = draw.draw(st.lists(st.sampled_from([*legal_moves(fen), "a1a1", "h5h4"]), min_size=1, max_size=7))
    text = say(moves, [0.5] * len(moves), moves[0])
    padded = " " * 40 + text.replace(" E:", "   E:").replace(" B:", " " * 20 + "B:") + " "
    grades = [grade(tasks.policy_prompt(fen, f), t, labels, False) for f in FORMATS for t in (text, padded)]
    assert all(g == grades[0] for g in grades)
    move = moves[0]
    answer = tasks.transition(fen, draw.draw(st.sampled_from(moves)))  # often that of another move
    grades = [
        grade(
            tasks.environment_prompt(fen, move, [move], asked),
            tasks.environment_completion(*answer, answered),
            draw.draw(st.sampled_from([None, tasks.transition(fen, move)])),
            False,
        )
        for asked in FORMATS
        for answered in FORMATS
    ]
    assert all(g == grades[0] for g in grades)


def fragments():
    """Texts that are nearly answers, mixed with ones that are anything but."""
    pieces = "M: E: B: e2e4 e7e8q 0.3 -2.82 + 0 1 0.001 -1.0 nan ٣ 1e999 8".split() + [" ", "  ", "\ud800"]
    pieces += [AFTER, AFTER + "+0.001+0+0", "M: e2e4 E: 0.3 B: e2e4"]
    known = st.lists(st.sampled_from(pieces), max_size=24).map(" ".join)
    return known | known.map(lambda text: text.replace(" ", "")) | st.text(st.characters(), max_size=60)


@settings(quick, max_examples=300)
@given(fragments(), st.booleans(), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_any_text_has_a_finite_reward_in_range_and_the_parts_add_up(text, truncated, warmup, multiplier, labelled):
    for task in policy, environment:
        labels = None if labelled or task is environment else ()
        result = task(text, labels=labels, truncated=truncated, warmup=warmup, runaway_multiplier=multiplier)
        assert -0.3 <= result.reward <= 1 and all(map(math.isfinite, result.parts.values()))
        assert {type(value) for value in result.parts.values()} == {float}
        assert json.loads(json.dumps(result.parts)) == result.parts
        whole = earned(result)
        assert result.reward == pytest.approx(whole * multiplier if truncated and whole > 0 else whole, abs=1e-8)
        assert (result.reward == MALFORMED) == (result.parts["structure"] == 0)
        assert result.parts["earned/malformed"] == (MALFORMED if result.parts["structure"] == 0 else 0)
        assert result.parts["runaway"] == truncated


def test_names_of_parts_are_stable():
    """What logs and the evaluation rely on: the same names whatever is said, but for what cannot be known."""
    paid = {"earned/malformed", *("earned/" + name for name in POLICY)}
    always = {"structure", "parse", "legal", "top5", "best", "candidates", "candidates_legal", "runaway"} | paid
    perfect = tasks.policy_completion(START, label(START), "expanded")
    assert policy(perfect).parts.keys() == always | {"eval_mae", "cp_loss"}
    assert policy("").parts.keys() == policy("M: E: B:").parts.keys() == always
    assert policy(perfect, labels=()).parts.keys() == always - {"top5", "best", "candidates"}
    paid = {"earned/malformed", *("earned/" + name for name in ENVIRONMENT)}
    always = {"structure", "next_state", "next_state_nls", "reward_match", "terminated_match", "truncated_match"} | paid
    assert environment("").parts.keys() == always | {"runaway"}
    assert environment("x+1+0+0").parts.keys() == always | {"runaway", "reward_mae"}


# ---------------------------------------------------------------------------------------------------------------------
# The policy's ladder


def policy_rungs(fen, labels):
    """Completions by rung, each with the best and the worst of everything else."""
    five = [uci for uci, _ in labels]
    others = [uci for uci in legal_moves(fen) if uci not in five]
    best = max(labels, key=lambda move: move[1])[0]
    lists = [five, five[1:] or five, others[:5], ["a1a1"] * 5, ["a1a1"], ["a1a1"] * 30, five + five, five + others]
    lists += [five[:1] * 5, five[:2] + ["a1a1", "b1b1", "c1c1"]]
    true = {uci: cp / 100 for uci, cp in labels}
    rungs = {name: [] for name in ("malformed", "structure", "parse", "legal", "top5", "best")}
    for moves, exact, rest in itertools.product(filter(None, lists), (True, False), ("", " e2e4", " M: x E: y B: z")):
        numbers = [true.get(uci, 0) if exact else "-99999.5" for uci in moves]
        answers = {"parse": ["a1a1", "h8h8"], "legal": others[:6], "top5": five[1:], "best": [best]}
        for rung, moves_of_rung in answers.items():
            rungs[rung] += [say(moves, numbers, uci, rest) for uci in moves_of_rung]
        text = say(moves, numbers, best, rest)
        rungs["structure"] += [
            text.replace("E: ", "E: 1 ", 1),
            text.replace("M: ", "M: e9e4 ", 1),
            text.replace("B: ", "B: -", 1),
            say(moves, numbers, "", rest and " x"),
            say(moves, ["nan", *numbers[1:]], best, rest),
        ]
        rungs["malformed"] += [text[1:], "So " + text, text.replace("E:", ""), text.replace("B:", "b:")]
        rungs["malformed"] += [f"E: {moves[0]} M: {moves[0]} B: {moves[0]}", f"M: {moves[0]} B: {moves[0]} E: 0.1"]
    return rungs


@pytest.mark.parametrize("fen", FENS)
@pytest.mark.parametrize("warmup", [0.01, 0.5, 1])
@pytest.mark.parametrize("mates", [False, True])
def test_each_rung_pays_more_than_the_one_below(fen, warmup, mates):
    labels = label(fen)
    if mates:  # all within a mate of each other: hardly anything is given away
        labels = tuple((uci, 99999 - i) for i, (uci, _) in enumerate(labels))
    rungs = policy_rungs(fen, labels)
    assert all(rungs[name] for name in ("malformed", "structure", "parse", "best"))
    below = -math.inf
    for name, completions in rungs.items():
        grades = [policy(text, fen, labels, warmup=warmup) for text in completions]
        if grades:  # few legal moves: none is outside the five
            assert min(g.reward for g in grades) > below, name
            below = max(g.reward for g in grades)
            order = "structure", "parse", "legal", "top5", "best"
            reached = ("malformed", *order).index(name)
            assert all([g.parts[o] for o in order] == [1] * reached + [0] * (5 - reached) for g in grades), name
    assert {policy(text, fen, labels).reward for text in rungs["malformed"]} == {-0.3}


def test_ladder_holds_for_every_list_of_candidates():
    """By the weights themselves, for any shares."""
    beside = sum(POLICY[name] for name in ("clean", "listed", "candidates_legal", "candidates", "evals"))
    wasted = -policy(say(["a1a1"] * 9, [0] * 9, "a1a1")).parts["earned/candidates_legal"]
    assert 0 < wasted < POLICY["parse"]
    assert min(POLICY["legal"], POLICY["top5"], POLICY["best"]) > beside + wasted


SLOTS = ["a1a1", "h6h5", "a8a1", *legal_moves(START)]


@settings(quick, max_examples=200)
@given(
    st.lists(st.sampled_from(SLOTS), min_size=1, max_size=8),
    st.lists(st.floats(-30, 30).map(lambda x: round(x, 2)), min_size=8, max_size=8),
    st.sampled_from(SLOTS),
    st.sampled_from(["", " e2e4", " and so on"]),
    st.data(),
)
def test_a_better_policy_answer_never_scores_lower(moves, numbers, best, rest, draw):
    labels = label(START)
    five, true = [uci for uci, _ in labels], {uci: cp / 100 for uci, cp in labels}
    legal = legal_moves(START)
    numbers = numbers[: len(moves)]
    reward = policy(say(moves, numbers, best, rest)).reward
    i = draw.draw(st.integers(0, len(moves) - 1))

    def worth(uci):
        return (uci in legal) + (uci in five)

    # a better best move: further up the ladder, or less given away; the list as it is
    for better in SLOTS:
        if better not in moves and best not in moves:
            if worth(better) > worth(best) or (better in five and best in five and true[better] > true[best]):
                assert policy(say(moves, numbers, better, rest)).reward > reward
    # a better candidate in the place of one that earns less (the best move's own place is another part, `listed`)
    wasted = moves[i] not in legal or moves[i] in moves[:i]
    for better in SLOTS:
        if better not in moves and better in legal and (wasted or worth(better) > worth(moves[i])):
            changed = moves[:i] + [better] + moves[i + 1 :]
            if best != moves[i] and best != better and moves.count(moves[i]) == 1 + (moves[i] in moves[:i]):
                assert policy(say(changed, numbers, best, rest)).reward > reward - 1e-9
    # a better number
    if moves[i] in five:
        middle = round((numbers[i] + true[moves[i]]) / 2, 4)
        for number in middle, true[moves[i]]:
            assert policy(say(moves, numbers[:i] + [number] + numbers[i + 1 :], best, rest)).reward >= reward
    # an illegal or repeated candidate left out
    if wasted and len(moves) > 1 and (moves[i] != best or moves.count(best) > 1) and moves[i] not in five:
        assert policy(say(moves[:i] + moves[i + 1 :], numbers[:i] + numbers[i + 1 :], best, rest)).reward >= reward
    # nothing after the last field
    if rest:
        assert policy(say(moves, numbers, best)).reward > reward


def test_candidates():
    five = [uci for uci, _ in label(START)]
    numbers = [cp / 100 for _, cp in label(START)]
    other = [uci for uci in legal_moves(START) if uci not in five]
    perfect = policy(say(five, numbers, five[0])).reward

    def reward(moves):
        return policy(say(moves, [0.1] * len(moves), five[0])).reward

    # one more illegal candidate, one more place out of the five, a repeated one, one too few, one too many
    falling = [reward(five), reward(five[:4] + other[:1]), reward(five[:3] + other[:2]), reward(five[:3] + other[:1])]
    assert falling == sorted(falling, reverse=True) and len({*falling}) == 4
    assert reward(five[:4] + ["a1a1"]) < reward(five[:4]) < reward(five)
    assert reward(five + five[:1]) < reward(five)
    assert reward(five + other[:1]) < reward(five)
    assert reward(five[:1] * 5) < reward(five[:1]) < reward(five[:2])
    # In expectation a try at a further legal move pays from 20 % on; so neither silence nor repetition is the way.
    tried = 0.3 * reward(five[:1] + other[:1]) + 0.7 * reward(five[:1] + ["a1a1"])
    assert tried > reward(five[:1]) > reward(five[:1] * 2)
    # the first number said of a repeated candidate is the one that counts
    assert policy(say(five[:1] * 2, [numbers[0], 9], five[0])).parts["eval_mae"] == 0
    assert policy(say(five[:1] * 2, [9, numbers[0]], five[0])).parts["eval_mae"] > 8
    # a legal best move that is not listed costs, but is worth more than an illegal one that is
    assert policy(say(five[1:], numbers[1:], "a1a1")).reward < policy(say(other[:5], numbers, five[0])).reward
    assert policy(say([*five[1:], other[0]], [*numbers[1:], 0], five[0])).reward < perfect
    assert policy(say(five[1:] + ["a1a1"], numbers, "a1a1")).parts["earned/listed"] == POLICY["listed"]


def test_the_five_are_the_best_five_of_the_labels():
    labels = [(uci, 10 * i) for i, uci in enumerate(legal_moves(START)[:7])]  # worst first
    text = tasks.policy_completion(START, labels[2:], "expanded")
    assert policy(text, labels=labels).reward == 1.0
    assert policy(say([labels[0][0]], [0], labels[0][0]), labels=labels).parts["top5"] == 0


def test_few_legal_moves_need_few_candidates():
    fen = "k7/8/1K6/8/8/8/7R/8 b - - 4 70"
    assert policy("M: a8b8 E: -999.98 B: a8b8", fen, (("a8b8", -99998),)).reward == 1.0
    assert 0.3 < policy("M: a8b8 a8b8 E: -999.98 -999.98 B: a8b8", fen, (("a8b8", -99998),)).reward < 1


def test_evaluations_are_compared_in_pawns_and_bounded():
    labels = ("e2e4", 30), ("d2d4", -99998), ("c2c4", 1500), ("g1f3", 0), ("b1c3", 0)

    def error(move, number):
        return policy(say([move], [number], "e2e4"), labels=labels).parts["eval_mae"]

    assert error("e2e4", "0.3") == 0 and error("e2e4", "1.3") == pytest.approx(1)
    assert error("e2e4", "30") == error("e2e4", "9" * 2000) == pytest.approx(9.7)
    assert error("d2d4", "-999.98") == error("d2d4", "-999.5") == 0 and error("d2d4", "999.98") == 20
    assert error("c2c4", "15.0") == error("c2c4", "999.97") == 0
    assert error("g1f3", "-0") == error("g1f3", "-0.0") == 0
    assert policy(say(["a2a3"], [0], "e2e4"), labels=labels).parts.get("eval_mae") is None
    assert policy(say(["a2a3"], [0], "c2c4"), labels=labels).parts["cp_loss"] == 0  # both win
    given_away = policy(say(["a2a3"], [0], "d2d4"), labels=labels).parts
    assert given_away["cp_loss"] == 20 and given_away["top5"] == 1 and given_away["best"] == 0


def test_black_best_move_is_best_for_black():
    """RookWorld's own data has it the other way round: the worst of the five after `B:`."""
    board = chess.Board("rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2")
    labels = ("d8h4", 99999), ("d7d5", 150), ("f8c5", 90), ("b8c6", 70), ("a7a6", -20)
    names, numbers = [uci for uci, _ in labels], [cp / 100 for _, cp in labels]
    mate, worst = (policy(say(names, numbers, uci), board.fen(), labels) for uci in ("d8h4", "a7a6"))
    assert mate.reward == 1 and mate.parts["best"] == 1
    assert worst.parts["best"] == 0 and worst.parts["cp_loss"] == pytest.approx(10.2)
    assert worst.parts["earned/loss"] < 0.1 * mate.parts["earned/loss"]
    board.push_uci("d8h4")
    assert board.is_checkmate()
    white = tasks.mirror_fen(board.root().fen())  # the same for White, by the mirror
    mirrored = tuple((tasks.mirror_move(uci), cp) for uci, cp in labels)
    names = [uci for uci, _ in mirrored]
    assert policy(say(names, numbers, names[4]), white, mirrored) == worst
    assert policy(say(names, numbers, names[0]), white, mirrored[::-1]) == mate  # whatever the order of the labels


def test_without_labels_the_ladder_ends_at_legal():
    moves = legal_moves(START)[:5]
    best = policy(say(moves, [0] * 5, moves[0]), labels=())
    names = "structure", "parse", "clean", "listed", "candidates_legal", "legal"
    assert best.reward == pytest.approx(sum(POLICY[name] for name in names))
    rewards = [policy(text, labels=()).reward for text in ("", "M: E: B:", say(moves, [0] * 5, "a1a1"))]
    assert rewards == sorted({*rewards}) and rewards[-1] < best.reward
    other = legal_moves(START)[7]
    assert policy(say(moves, [3] * 5, other), labels=()).reward < best.reward  # not listed
    assert policy(say([*moves, other], [0] * 6, moves[0]), labels=()).reward < best.reward  # one too many


def test_a_finished_game_has_no_legal_answer():
    fen = "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"  # stalemate
    assert MALFORMED < policy("M: h8g8 E: 0 B: h8g8", fen, ()).reward < POLICY["legal"]


# ---------------------------------------------------------------------------------------------------------------------
# The grammar

GOOD = "M: e2e4 d2d4 E: 0.3 -0.25 B: e2e4"


@pytest.mark.parametrize(
    "text", [GOOD, "  " + GOOD + "   ", GOOD.replace(" ", "     "), "M: e7e8q a7a8n E: 12 -0 B: e7e8q"]
)
def test_grammar_reads(text):
    structure, answer = read_policy(text)
    assert structure and len(answer[0]) == len(answer[1]) == 2 and answer[2] == answer[0][0] and answer[3] == []


ODD_NUMBERS = "nan inf -inf 1e999 1e3 0x1 1_000 ٣ １ ² .5 5. --1 1,5 -".split() + ["0.3\n"]
ODD_MOVES = "e2e9 i2i4 E2E4 e2-e4 e7e8k e7e8Q e2e4e 0000 e4 Nf3 e２e4 е2е4 --".split() + ["e2e4\n"]  # some not ASCII


@pytest.mark.parametrize("number", ODD_NUMBERS)
def test_grammar_numbers_are_plain_decimals(number):
    assert read_policy(GOOD.replace("0.3", number)) == (True, None)
    assert read_environment(f"8/8/8/8/8/8/8/8 w - - 0 1+{number}+0+0") is None


@pytest.mark.parametrize("move", ODD_MOVES)
def test_grammar_moves_are_uci(move):
    assert read_policy(GOOD.replace("d2d4", move)) == (True, None)
    assert read_policy(GOOD.replace("B: e2e4", f"B: {move}")) == (True, None)


@pytest.mark.parametrize(
    "text",
    [
        "M: E: B:",
        "M: e2e4 E: B: e2e4",  # a number short
        "M: e2e4 E: 0.3 0.2 B: e2e4",  # one too many
        "M: E: B: e2e4",
        "M: e2e4 E: 0.3 B:",
        "M: M: e2e4 E: 0.3 B: e2e4",
        "M: e2e4 E: E: 0.3 B: e2e4",
        "M: e2e4 B: e2e4 E: 0.3 B: e2e4",
        "M: e2e4, E: 0.3 B: e2e4",
        "M: e2e4 E: +0.3 B: e2e4",
    ],
)
def test_structure_alone(text):
    assert read_policy(text) == (True, None)
    assert policy(text).reward == pytest.approx(POLICY["structure"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "M:",
        "M: e2e4 E: 0.3",
        "E: 0.3 M: e2e4 B: e2e4",
        "M: e2e4 B: e2e4 E: 0.3",
        "M:e2e4 E:0.3 B:e2e4",
        "m: e2e4 e: 0.3 b: e2e4",
        "Well, M: e2e4 E: 0.3 B: e2e4",
        GOOD.replace(" ", "\u00a0"),
        GOOD.replace(" ", "\n"),
        "\n" + GOOD,
        " " * LIMIT + GOOD,
    ],
)
def test_malformed(text):
    assert policy(text).reward == policy(text, truncated=True).reward == -0.3
    assert environment(text).reward == -0.3


def test_text_after_the_last_field_costs():
    clean = policy(GOOD)
    for rest in " ", "   ":
        assert policy(GOOD + rest) == clean
    for rest in " .", " e2e4", " \n", " " + GOOD:
        assert clean.reward - policy(GOOD + rest).reward == pytest.approx(POLICY["clean"])
    assert policy(GOOD + "\n").reward == pytest.approx(POLICY["structure"])  # the move itself is none
    assert environment("x+1+0+0 ").reward > MALFORMED
    for rest in "+", " 0", "+0", "\n", " x", "0", ".":
        assert environment("x+1+0+0" + rest).reward == MALFORMED


# ---------------------------------------------------------------------------------------------------------------------
# The environment

# (FEN, move in SAN or None for an illegal one, move, reward, terminated)
CASES = {
    "quiet": (START, "e4", "e2e4", 0.001, False),
    "kingside castling": ("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 10 30", "O-O", "e1g1", 0.001, False),
    "queenside castling": ("r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 10 30", "O-O-O", "e8c8", 0.001, False),
    "lost right": ("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 10 30", "Rxa8+", "a1a8", 0.001, False),
    "en passant": ("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 9", "exd6", "e5d6", 0.001, False),
    "en passant square": ("4k3/8/8/8/3p4/8/4P3/4K3 w - - 5 9", "e4", "e2e4", 0.001, False),
    "queen": ("7k/P7/8/8/8/8/8/K7 w - - 3 50", "a8=Q+", "a7a8q", 0.001, False),
    "knight": ("8/P6k/8/8/8/8/8/K6Q w - - 3 50", "a8=N+", "a7a8n", 0.001, False),
    "capture with promotion": ("1r5k/P7/8/8/8/8/8/K7 w - - 3 50", "axb8=R+", "a7b8r", 0.001, False),
    "mate by White": ("7k/5Q2/6K1/8/8/8/8/8 w - - 0 1", "Qg7#", "f7g7", 1.0, True),
    "mate by Black": ("rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2", "Qh4#", "d8h4", 1.0, True),
    "stalemate": ("7k/8/5QK1/8/8/8/8/8 w - - 0 1", "Qf7", "f6f7", 0.5, True),
    "bare kings": ("8/8/4k3/8/8/3pK3/8/8 w - - 0 1", "Kxd3", "e3d3", 0.5, True),
    "75 moves": ("7k/8/8/8/8/8/R7/K7 w - - 149 200", "Rb2", "a2b2", 0.5, True),
    "mate before 75 moves": ("7k/8/6K1/8/8/8/R7/8 w - - 149 200", "Ra8#", "a2a8", 1.0, True),
    "50 moves are only a claim": ("7k/8/8/8/8/8/R7/K7 w - - 99 200", "Rb2", "a2b2", 0.001, False),
    "not how a knight goes": (START, None, "g1g3", -1.0, False),
    "empty square": (START, None, "e4e5", -1.0, False),
    "their piece": (START, None, "e7e5", -1.0, False),
    "into check": ("4r2k/8/8/8/8/8/4N3/4K3 w - - 0 1", None, "e2c3", -1.0, False),
    "through check": ("5r1k/8/8/8/8/8/8/4K2R w K - 0 1", None, "e1g1", -1.0, False),
    "promotion without a piece": ("7k/P7/8/8/8/8/8/K7 w - - 3 50", None, "a7a8", -1.0, False),
    "en passant too late": ("4k3/8/8/3pP3/8/8/8/4K3 w - - 0 9", None, "e5d6", -1.0, False),
}


@pytest.mark.parametrize("name", CASES)
def test_environment_truth(name):
    fen, san, move, reward, terminated = CASES[name]
    board = chess.Board(fen)
    if san:
        assert board.parse_san(san).uci() == move and board.san(board.parse_san(san)) == san
        board.push_san(san)
    assert san is None or board.is_game_over() == terminated
    for chess_format in FORMATS:
        text = tasks.environment_completion(board.fen(), reward, terminated, san is None, chess_format)
        prompt = tasks.environment_prompt(fen, move, ["h2h3", move], chess_format)
        for labels in None, tasks.transition(fen, move):
            result = grade(prompt, text, labels, False)
            assert result.reward == 1.0
            metrics = "structure", "next_state", "next_state_nls", "reward_match", "terminated_match", "truncated_match"
            assert all(result.parts[metric] == 1 for metric in metrics) and result.parts["reward_mae"] == 0
    # and anything else is less
    for wrong in {-1.0, 0.001, 0.5, 1.0} - {reward}:
        assert environment(f"{board.fen()}+{wrong}+{terminated:d}+{san is None:d}", fen, move).reward < 1
    assert environment(f"{board.fen()}+{reward}+{not terminated:d}+{san is None:d}", fen, move).reward < 1
    assert environment(f"{board.fen()}+{reward}+{terminated:d}+{san is not None:d}", fen, move).reward < 1
    assert environment(f"{board.fen()}0+{reward}+{terminated:d}+{san is None:d}", fen, move).reward < 1


def test_environment_grades():
    exact = environment(AFTER + "+0.001+0+0")
    copied = environment(START + "+0.001+0+0")
    one_off = environment(AFTER.replace("4P3", "3P4") + "+0.001+0+0")
    assert exact.reward == 1 > one_off.reward > copied.reward > environment("x+0.001+0+0").reward > 0
    assert one_off.parts["next_state_nls"] == pytest.approx(1 - 2 / len(AFTER)) and one_off.parts["next_state"] == 0
    # the very FEN with all else wrong is more than all else right with another FEN
    assert environment(AFTER + "+-1+1+1").reward > one_off.reward
    # the reward by distance, and exactly right is best; huge ones are bounded
    said = [environment(f"{AFTER}+{r}+0+0") for r in ("0.001", "0.0011", "0.002", "0.5", "1", "-1.0", "9" * 400)]
    rewards = [result.reward for result in said]
    assert rewards == sorted({*rewards}, reverse=True) and said[-1].parts["reward_mae"] == 2
    assert environment(AFTER + "+0.0010+0+0").reward == 1.0
    # a seventh field takes its share
    longer = environment(AFTER + " x+0.001+0+0").parts
    assert longer["earned/fields"] == pytest.approx(6 / 7 * ENVIRONMENT["fields"])
    assert longer["earned/similarity"] == pytest.approx(6 / 7 * ENVIRONMENT["similarity"])
    # spaces: any run is one; within the fields they are text
    assert environment(f"  {AFTER.replace(' ', '   ')} + 0.001 + 0 + 0  ").reward == 1.0
    assert environment(AFTER.replace(" ", "") + "+0.001+0+0").parts["next_state"] == 0


@pytest.mark.parametrize("board", ["8/8/8/8/8/8/8/4K2k", "......../8/8/8/8/8/8/....K..k"])
def test_dots_are_empty_squares_on_the_board_alone(board):
    labels = "8/8/8/8/8/8/8/4K2k w - - 2 12", 0.5, True, False
    assert environment(f"{board} w - - 2 12+0.5+1+0", labels=labels).reward == 1.0
    for fen in f"{board} w - - .. 12", f"{board} w - - 2 1..", board.replace("K", "4K") + " w - - 2 12":
        assert environment(f"{fen}+0.5+1+0", labels=labels).parts["next_state"] == 0


@pytest.mark.parametrize(
    "text",
    ["+0.001+0+0+", "+0.001+0", "+0.001", "+x+0+0", "++0+0", "+0.001+2+0", "+0.001+0+-0", "+0.001+00+0", "+0.001+a+0"],
)
def test_environment_malformed(text):
    assert environment(AFTER + text).reward == -0.3


@settings(quick, max_examples=200)
@given(
    st.lists(st.sampled_from([*AFTER.split(" "), *START.split(" "), "x", "pppp", "12"]), min_size=1, max_size=8),
    st.sampled_from(["0.001", "0.5", "1.0", "-1", "7"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 80),
)
def test_a_better_environment_answer_never_scores_lower(fields, reward, terminated, truncated, which, where):
    def worth(fields=fields, reward=reward, terminated=terminated, truncated=truncated):
        return environment(f"{' '.join(fields)}+{reward}+{terminated:d}+{truncated:d}").reward

    base, true = worth(), AFTER.split(" ")
    if which < len(fields) and fields[which] != true[which]:
        assert worth(fields=fields[:which] + [true[which]] + fields[which + 1 :]) > base
        # nor does one more character of the field that is right
        said, aim = fields[which], true[which]
        if len(said) == len(aim):
            cut = where % len(aim)
            assert worth(fields=fields[:which] + [aim[:cut] + said[cut:]] + fields[which + 1 :]) >= base
    if len(fields) > 6:
        assert worth(fields=fields[:6]) >= base
    assert worth(fields=true) >= base and worth(reward="0.001") >= base
    assert worth(terminated=False) >= base and worth(truncated=False) >= base
    assert (worth(fields=true) > base) == (fields != true) and (worth(terminated=False) > base) == terminated


# ---------------------------------------------------------------------------------------------------------------------
# Runaways and warm-up


def spread():
    """Completions of every kind, for both tasks."""
    texts = [text for rung in policy_rungs(START, label(START)).values() for text in rung]
    tails = "+0.001+0+0", "+1+1+0", "+-1.0+1+1", ""
    return [(policy, text) for text in texts] + [
        (environment, fen + tail) for fen in (AFTER, START, "x", "") for tail in tails
    ]


def test_runaway_keeps_the_order():
    pairs = [(task(text).reward, task(text, truncated=True).reward) for task, text in spread()]
    assert {math.copysign(1, free) for free, _ in pairs} == {-1, 1}
    for free, runaway in pairs:
        assert runaway == (free if free <= 0 else pytest.approx(0.3 * free))
    pairs = sorted({*pairs})
    assert len(pairs) > 50 and all(a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert policy(GOOD, truncated=True, runaway_multiplier=0.5).reward == pytest.approx(policy(GOOD).reward / 2)


def test_warmup_moves_weight_from_structure_to_content():
    assert policy("M: E: B:", warmup=0).reward == pytest.approx(1 / 3)
    assert policy(say(["a1a1"], [0], "a1a1", " x"), warmup=0).reward == 1  # the structure is all that counts
    assert environment("x+0+1+1", warmup=0).reward == 1
    for task, text in spread():
        rewards = [task(text, warmup=warmup).reward for warmup in (0, 0.25, 0.5, 1)]
        assert all(-0.3 <= reward <= 1 for reward in rewards)
        assert rewards == sorted(rewards, reverse=True)  # less is given for structure alone
        assert (rewards[0] == MALFORMED) == (rewards[-1] == MALFORMED)


# ---------------------------------------------------------------------------------------------------------------------
# Time

MB = 2**20
NASTY = {
    "a": "a" * 4 * MB,
    "spaces": " " * 4 * MB,
    "headers": "M: E: B: " * MB,
    "many candidates": "M: " + "e2e4 " * MB + "E: " + "0.3 " * MB + "B: e2e4",
    "digits": "M: e2e4 E: " + "9" * MB + " B: e2e4",
    "minus": "M: e2e4 E: " + "-" * MB + " B: e2e4",
    "decimals": "M: e2e4 E: 0." + "1" * MB + "x B: e2e4",
    "plus": "+" * MB,
    "FEN": AFTER + "8" * MB + "+0.001+0+0",
    "dots": "." * MB + "+0.001+0+0",
    "reward": AFTER + "+" + "0" * MB + "+0+0",
    "long digits": "M: e2e4 E: " + "9" * (LIMIT - 40) + " B: e2e4",
    "long decimals": "M: e2e4 E: 0." + "7" * (LIMIT - 40) + " B: e2e4",
    "long list": "M: " + "e2e4 " * 400 + "E: " + "0.3 " * 400 + "B: e2e4",
    "long list of numbers": "M: e2e4 E: " + "1 " * 2000 + "B: e2e4",
    "long field": "8" * (LIMIT - 40) + "+0.001+0+0",
    "long fields": "8 " * (LIMIT // 2 - 40) + "+0.001+0+0",
    "long dots": "." * (LIMIT - 40) + "+0.001+0+0",
    "alternating": ".8" * (LIMIT // 2 - 40) + "+0.001+0+0",
    "long reward": AFTER + "+0." + "3" * (LIMIT - 200) + "+0+0",
    "long pluses": "+" * LIMIT,
    "astral": "\U0001f600" * (LIMIT - 40) + "+0.001+0+0",
    "surrogates": "\ud800\udfff" * 1000 + "+0.001+0+0",
    "null": "\0" * LIMIT,
    "right to left": "M: \u202ee2e4 E: ٠٫٣ B: e2e4",
}


@pytest.mark.parametrize("name", NASTY)
def test_nasty_text_takes_under_5_ms(name):
    for task in policy, environment:
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            assert -0.3 <= task(NASTY[name]).reward < 1
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.005


def test_speed():
    """2,000 gradings a second on one core, with a group's shared prompt; half of it here, for a busy machine."""
    work = []
    for fen in FENS:
        for text in random.Random(0).sample([t for r in policy_rungs(fen, label(fen)).values() for t in r], 40):
            work.append((tasks.policy_prompt(fen, "expanded"), text, label(fen)))
        move = legal_moves(fen)[0]
        for after in AFTER, tasks.transition(fen, move)[0]:
            text = tasks.environment_completion(after, 0.001, False, False, "expanded")
            work += [(tasks.environment_prompt(fen, move, [move], "expanded"), text, None)] * 20
    start = time.process_time()
    for prompt, text, labels in work:
        grade(prompt, text, labels, False)
    assert len(work) / (time.process_time() - start) > 1000


def test_the_task_of_the_readme(monkeypatch):
    """Its block is code that works."""
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if b.startswith("# rewards.py"))
    monkeypatch.setattr(rewards, "TASKS", dict(rewards.TASKS))
    exec(block, vars(rewards))
    prompt = "L: 7k/8/8/8/8/8/8/K7 w - - 0 1"
    rewards_of = [rewards.grade(prompt, text, (), False).reward for text in ("", "a1a8", "a1a2 a1a8", "a1a2 a1b1 a1b2")]
    assert rewards_of[0] == pytest.approx(-0.3) and rewards_of[-1] == 1 and sorted(rewards_of) == rewards_of
    del rewards.LEGAL, rewards.legal_list
