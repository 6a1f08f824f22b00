import itertools
import math
import random
import time
from unittest.mock import Mock

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
import toy
from rewards import ENVIRONMENT_WEIGHTS, MALFORMED, POLICY_WEIGHTS, Question, grade
from rollout import Answer
from rook.positions import Position
from tools import chess_texts as texts

START = chess.STARTING_FEN
AFTER = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"  # 1. e4
CASTLING = "r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 10 30"
ONE_MOVE = "k7/8/1K6/8/8/8/7R/8 b - - 4 70"
FENS = [START, CASTLING, "8/P6k/8/8/8/8/6pp/K7 w - - 0 60", ONE_MOVE]
FORMATS = "rookworld", "expanded"
quick = settings(max_examples=100, deadline=None, database=None, derandomize=True)


def legal_moves(fen):
    return sorted(move.uci() for move in chess.Board(fen).legal_moves)


def label(fen):
    moves = legal_moves(fen)
    random.Random(0).shuffle(moves)
    return tuple((uci, 80 - 37 * i) for i, uci in enumerate(moves[:5]))


def answer(moves, numbers, best, rest=""):
    return f"M: {' '.join(moves)} E: {' '.join(map(str, numbers))} B: {best}{rest}"


def policy(text, fen=START, labels=None, text_format="rookworld", **how):
    labels = label(fen) if labels is None else labels
    return grade(rewards.policy_question(Position(fen, (), labels), text_format), text, **how)


def environment(text, fen=START, move="e2e4", text_format="rookworld", **how):
    prompt = rewards.environment_prompt(fen, move, [move], text_format)
    return grade(Question("environment", prompt, rewards.transition(fen, move)), text, **how)


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """The engine that is asked where labels lack. It knows no moves unless a test teaches it some."""
    engine = Mock(label=Mock(return_value=()))
    monkeypatch.setattr(rewards.stockfish, "label", engine.label)
    return engine


# Invariant 7: any text has a reward
def fragments():
    words = "M: E: B: e2e4 e7e8q 0.3 -2.82 + 0 1 0.001 -1.0 nan ٣ 1e999 8 . / é 🙂 \0 \n".split(" ") + ["", "\ud800"]
    words += [AFTER, AFTER + "+0.001+0+0", "M: e2e4 E: 0.3 B: e2e4", "9" * 400, "8/" * 500, "e2e4 " * 900]
    known = st.lists(st.sampled_from(words), max_size=24).map(" ".join)
    return known | known.map(lambda text: text.replace(" ", "")) | st.text(st.characters(), max_size=60)


@st.composite
def damaged(draw):
    """An ideal answer of either task in either format, changed in up to four places."""
    text_format, move = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(["e2e4", "e2e5"]))
    next_board = texts.environment_completion(*rewards.transition(START, move), text_format)
    text = draw(st.sampled_from([texts.policy_completion(START, label(START), text_format), next_board]))
    for _ in range(draw(st.integers(0, 4))):
        a, b = sorted(draw(st.integers(0, len(text))) for _ in "ab")
        text = text[:a] + draw(st.sampled_from(["", text[a:b] * 2, text[a:b][::-1]]) | fragments()) + text[b:]
    return text


@settings(quick, max_examples=300)
@given(fragments() | damaged(), st.booleans(), st.booleans())
def test_any_text_has_a_finite_reward_that_its_pieces_add_up_to(text, hit_limit, labelled):
    results = [policy(text, labels=label(START) if labelled else (), hit_limit=hit_limit)]
    results.append(environment(text, hit_limit=hit_limit))
    for result in results:
        assert type(result.reward) is float and MALFORMED == -0.3 <= result.reward <= 1
        assert {type(value) for value in result.metrics.values()} == {float}
        assert all(map(math.isfinite, result.metrics.values()))
        names, values = zip(*[piece[:2] for piece in result.pieces])
        assert len(set(names)) == len(names) and sum(values) == pytest.approx(result.reward, abs=1e-8)
        assert all(0 <= a < b <= len(text) for piece in result.pieces for a, b in piece[2:])
        assert (result.reward == MALFORMED) == (names == ("malformed",)) == (result.metrics["structure"] == 0)


@settings(quick, max_examples=30)
@given(fragments() | damaged())
def test_any_answer_can_be_shown(text):
    first = [(rewards.first_prompt(START, text_format), {"legal": ["e2e4"]}) for text_format in FORMATS]
    for prompt, truth in (*first, ("P: " + START, {"five": {"e2e4": 0.3}}), (f"A: {START}+e2e4+e2e4+", [AFTER])):
        assert rewards.show(Question("", prompt, truth), text)[:4] in ("<svg", "")


HOSTILE = ["M: E: B: " * 2**19, "M: " + "e2e4 " * 400 + "E: " + "0.3 " * 400 + "B: e2e4"]
HOSTILE += ["8" * 4000 + "+0.001+0+0", "/" * 4000 + "+0.001+0+0", AFTER + "+0." + "3" * 3900 + "+0+0"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_takes_milliseconds(text):
    for task in policy, environment:
        start = time.process_time()
        assert MALFORMED <= task(text).reward < 1
        assert time.process_time() - start < 0.05


# Invariant 13: each part of the reward reaches the gradient
def advantages(toy_settings, kind, credit):
    """What train.py makes of answers that differ in each piece; a token is a character, half have hit their limit."""
    task = {"policy": policy, "environment": environment}[kind]
    some = [text for of, text in spread() if of is task]
    some = [*some[:: max(1, len(some) // 20)], ""]
    asked = Question("short", "", None)  # a kind of the toy task
    answers = [Answer(asked, t, range(1, len(t) + 1), False, task(t, hit_limit=i % 2 == 0)) for i, t in enumerate(some)]
    toy_settings()
    return toy.advantages(answers, 1 + max(map(len, some)), credit)


PENALTIES = dict(MALFORMED=-0.6, WASTED=1.0)
WORTHS = [("policy", None, name, value) for name, value in PENALTIES.items()]
WORTHS += [("policy", "POLICY_WEIGHTS", name, 2 * value) for name, value in POLICY_WEIGHTS.items()]
WORTHS += [("environment", "ENVIRONMENT_WEIGHTS", name, 2 * value) for name, value in ENVIRONMENT_WEIGHTS.items()]


@pytest.mark.parametrize("credit", ["piece", "answer"])
@pytest.mark.parametrize("kind, table, name, value", WORTHS)
def test_each_weight_and_penalty_changes_the_advantages(toy_settings, monkeypatch, kind, table, name, value, credit):
    before = advantages(toy_settings, kind, credit)
    monkeypatch.setitem(vars(rewards)[table] if table else vars(rewards), name, value)
    assert (advantages(toy_settings, kind, credit) - before).abs().max() > 1e-3


def judged_words(task, text):
    pieces = task(text).pieces
    return {name: [text[slice(*span)].strip(" /+") for span in spans] for name, _, *spans in pieces if spans}


@pytest.mark.parametrize("text_format", FORMATS)
def test_each_piece_judges_its_own_words(text_format):
    judged = judged_words(policy, texts.policy_completion(START, label(START), text_format))
    for i, (uci, cp) in enumerate(label(START)):
        assert judged[f"candidates_legal {i}"] == judged[f"candidates {i}"] == [uci]
        assert judged[f"evals {i}"] == [str(cp / 100)]
    text = texts.environment_completion(*rewards.transition(START, "e2e4"), text_format)
    judged, (fen, *rest) = judged_words(environment, text), text.split("+")
    words = [[word] for word in fen.replace("/", " ").split()]
    assert [judged[f"words {i}"] for i in range(13)] == [judged[f"similarity {i}"] for i in range(13)] == words
    assert [*judged["next_state"], *judged["reward"], *judged["terminated"], *judged["truncated"]] == [fen, *rest]
    for best in label(START)[1][0], "a2a4", "e2e5":  # where it is listed too, though the last two earn nothing
        judged = judged_words(policy, answer(["b2b4", best, "c2c4"], [0.3, 0.2, 0.1], best))
        assert all(judged[name] == [best, best] for name in ("listed", "legal", "top5", "sound", "best"))
        assert judged_words(policy, answer(["b2b4"], [0.3], best))["legal"] == [best]
    text = AFTER.replace(" b ", " w ").replace("pppppppp", "ppp1pppp") + "+0.001+0+0"
    assert judged_words(environment, text)["next_state"] == ["ppp1pppp", "w"]  # its wrong words alone


@pytest.mark.parametrize("fen", FENS)
@pytest.mark.parametrize("text_format", FORMATS)
def test_a_perfect_answer_is_worth_one(fen, text_format):
    text = texts.policy_completion(fen, label(fen), text_format)
    result = policy(text, fen, text_format=text_format)
    assert policy(f"  {text.replace(' ', '   ')} ", fen).reward == 1.0  # any run of spaces is one
    assert result.reward == 1.0 and result.metrics.pop("eval_error") == result.metrics.pop("move_error") == 0
    assert {result.metrics[name] for name in ("legal", "top5", "best", "candidates", "candidates_legal")} == {1.0}
    for move in label(fen)[0][0], "e2e5":
        text = texts.environment_completion(*rewards.transition(fen, move), text_format)
        result = environment(text, fen, move, text_format)
        assert environment(text.replace(" ", "   ").replace("+", " + "), fen, move, text_format).reward == 1.0
        assert result.reward == result.metrics["next_state"] == result.metrics["truncated"] == 1.0


def rungs(fen, labels):
    """Answers by rung of the ladder, each with the best and the worst of everything else."""
    five, true = [uci for uci, _ in labels], {uci: cp / 100 for uci, cp in labels}
    others = [uci for uci in legal_moves(fen) if uci not in five]
    lists = [five, others[:5], ["a1a1"] * 30, five + others, five[:2] + ["a1a1", "b1b1", "c1c1"]]
    found = {name: [] for name in ("malformed", "structure", "parse", "legal", "top5", "best")}
    for moves, exact, rest in itertools.product(filter(None, lists), (True, False), ("", " e2e4", " M: x E: y B: z")):
        numbers = [true.get(uci, 0) if exact else "-99999.5" for uci in moves]
        for rung, best in ("parse", ["a1a1", "h8h8"]), ("legal", others[:6]), ("top5", five[1:]), ("best", five[:1]):
            found[rung] += [answer(moves, numbers, uci, rest) for uci in best]
        text = answer(moves, numbers, five[0], rest)
        found["structure"] += [text.replace("E: ", "E: 1 ", 1), answer(moves, numbers, "")]
        found["malformed"] += [text[1:], text.replace("E:", "")]
    return found


@pytest.mark.parametrize("fen", FENS)
def test_each_rung_is_worth_more_than_the_one_below(fen):
    labels = label(fen)
    below, order = -math.inf, ("structure", "parse", "legal", "top5", "best")
    for reached, (name, answers) in enumerate(rungs(fen, labels).items()):
        grades = [policy(text, fen, labels) for text in answers]
        if grades:  # with few legal moves none is outside the five
            assert min(g.reward for g in grades) > below, name
            below = max(g.reward for g in grades)
            assert all([g.metrics[o] for o in order] == [1] * reached + [0] * (5 - reached) for g in grades), name


SLOTS = ["a1a1", "h6h5", *legal_moves(START)]
SOME_MOVES = st.lists(st.sampled_from(SLOTS), min_size=1, max_size=8, unique=True)
SOME_NUMBERS = st.lists(st.floats(-30, 30).map(lambda x: round(x, 2)), min_size=8, max_size=8)


@settings(quick, max_examples=100)
@given(SOME_MOVES, SOME_NUMBERS, st.sampled_from(SLOTS), st.sampled_from(["", " e2e4", " so on"]), st.integers(0, 7))
def test_a_better_policy_answer_never_scores_lower(moves, numbers, best, rest, i):
    true, legal = {uci: cp / 100 for uci, cp in label(START)}, legal_moves(START)
    numbers, i = numbers[: len(moves)], i % len(moves)

    def reward(moves=moves, numbers=numbers, best=best, rest=rest):
        return policy(answer(moves, numbers, best, rest)).reward

    def worth(uci):
        return (uci in legal) + (uci in true)

    for better in SLOTS:
        if best not in moves and better not in [*moves, best]:  # whether the best is listed is a piece of its own
            if (worth(better), true.get(better, 0)) > (worth(best), true.get(best, 0)):
                assert reward(best=better) > reward()
            if worth(better) > worth(moves[i]):
                assert reward(moves[:i] + [better] + moves[i + 1 :]) > reward() - 1e-9
    if moves[i] in true:
        for number in round((numbers[i] + true[moves[i]]) / 2, 4), true[moves[i]]:
            assert reward(numbers=numbers[:i] + [number] + numbers[i + 1 :]) >= reward()
    assert reward(rest="") > reward() or not rest


def test_the_worth_of_a_list_of_candidates():
    """Each move outside of the five costs, each one left out, each illegal, repeated or further one. A try at a further
    legal move pays from 20 % on, so neither silence nor repetition is the way."""
    five = [uci for uci, _ in label(START)]
    other = [uci for uci in legal_moves(START) if uci not in five]

    def reward(moves):
        return policy(answer(moves, [0.1] * len(moves), five[0])).reward

    assert reward(five) > reward(five[:4] + other[:1]) > reward(five[:3] + other[:2]) > reward(five[:3] + other[:1])
    assert reward(five[:4] + ["a1a1"]) < reward(five[:4])
    assert max(reward(five + five[:1]), reward(five + other[:1])) < reward(five)
    tried = 0.3 * reward(five[:1] + other[:1]) + 0.7 * reward(five[:1] + ["a1a1"])
    assert tried > reward(five[:1]) > reward(five[:1] * 2)


def test_evaluations_are_compared_in_pawns_and_bounded():
    for move, number, error in (
        *(("e2e4", "0.3", 0), ("e2e4", "1.3", 1), ("e2e4", "30", 9.7), ("e2e4", "9" * 2000, 9.7)),
        *(("d2d4", "-999.5", 0), ("d2d4", "999.98", 20)),  # a mate in more moves is a mate
    ):
        labels = ("e2e4", 30), ("d2d4", -99998)
        assert policy(answer([move], [number], "e2e4"), labels=labels).metrics["eval_error"] == pytest.approx(error)


def test_the_best_move_is_best_for_the_side_to_move():
    """RookWorld's own data has it the other way round for Black: the worst of the five after `B:`."""
    fen = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
    labels = ("d8h4", 99999), ("d7d5", 150), ("f8c5", 90), ("b8c6", 70), ("a7a6", 50), ("h7h6", -500)
    mate, worst, out = (policy(answer([uci], [0], uci), fen, labels).metrics for uci in ("d8h4", "a7a6", "h7h6"))
    assert (mate["best"], mate["top5"], worst["best"], worst["top5"], out["top5"]) == (1, 1, 0, 1, 0)
    equal = ("d2d4", 30), ("e2e4", 30)  # one of two equal bests is as good as the other
    assert all(policy(answer(["a2a3"], [0], uci), labels=equal).metrics["best"] == 1 for uci in ("d2d4", "e2e4"))


def test_an_engine_is_asked_where_labels_lack_and_without_one_the_ladder_ends_at_legal(engine):
    moves = legal_moves(START)
    legal, illegal = (policy(answer(moves[:5], [0] * 5, best), labels=()) for best in (moves[0], "a1a1"))
    unknown = sum(POLICY_WEIGHTS[name] for name in ("candidates", "evals", "top5", "sound", "best"))
    assert legal.reward == pytest.approx(1 - unknown) and legal.reward > illegal.reward
    assert legal.metrics["unlabelled"] == 1.0 and not {"top5", "best", "candidates"} & legal.metrics.keys()
    first = rewards.first_question("moves", Position(START, (), ()), "squares")
    assert rewards.grade(first, f"{moves[0]} ").metrics == {"structure": 1.0, "legal": 1.0, "unlabelled": 1.0}
    engine.reset_mock()
    engine.label.side_effect = label
    for text in GOOD, "M: e2e4 E: 0 B: e2e4":
        assert policy(text, labels=()).pieces == policy(text).pieces
    assert engine.label.call_args_list == [((START,),)] * 2  # never where there are labels


GOOD = "M: e2e4 d2d4 E: 0.3 -0.25 B: e2e4"


ODD_NUMBERS = "nan inf 1e3 0x1 ٣ .5 5. +0.3 --1 1,5 -".split() + ["0.3\n"]
ODD_MOVES = "e2e9 i2i4 E2E4 e2-e4 e7e8k e2e4e 0000 Nf3 e2e4,".split() + ["e2e4\n"]
STRUCTURE = ["M: E: B:", "M: e2e4 E: 0.3 0.2 B: e2e4", "M: e2e4 E: 0.3 B:", "M: M: e2e4 E: 0.3 B: e2e4"]
STRUCTURE += [GOOD.replace("0.3", number) for number in ODD_NUMBERS]
STRUCTURE += [GOOD.replace("d2d4", move) for move in ODD_MOVES] + [GOOD[:-4] + move for move in ODD_MOVES]
NONE = ["", " ", "M:", "M: e2e4 E: 0.3", "E: 0.3 M: e2e4 B: e2e4", "M: e2e4 B: e2e4 E: 0.3", "M:e2e4 E:0.3 B:e2e4"]
NONE += [GOOD.lower(), "Well, " + GOOD, GOOD.replace(" ", "\u00a0"), GOOD.replace(" ", "\n"), " " * 4096 + GOOD]
TAILS = "+0.001+0+0+ +0.001+0 +x+0+0 ++0+0 +0.001+2+0 +0.001+0+-0 +0.001+00+0".split()
NONE += [AFTER + tail for tail in TAILS + [f"+{number}+0+0" for number in ODD_NUMBERS]]


EN_PASSANT, PROMOTION = "4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "1n5k/P7/8/8/8/8/8/K7 w - - 0 1"
ROOKS = "4k3/8/8/8/8/8/8/R3K2R w KQ - 0 1"
ASKED = [
    (START, "e2e4", 10, set()),
    (START, "e2e5", 1, {"illegal"}),
    (ROOKS, "e1g1", 9, {"castling", "short_history"}),
    (ROOKS, "a1a8", 10, set()),
    (EN_PASSANT, "e5d6", 10, {"en_passant", "capture"}),
    (PROMOTION, "a7b8q", 10, {"promotion", "capture"}),
]


@pytest.mark.parametrize("fen, move, moves, groups", ASKED)
@pytest.mark.parametrize("text_format", FORMATS)
def test_what_hides_in_the_mean_of_next_states_has_rows_of_its_own(fen, move, moves, groups, text_format):
    prompt = rewards.environment_prompt(fen, move, ["a1a2"] * (moves - 1) + [move], text_format)
    truth = rewards.transition(fen, move)
    for text, right in ((texts.environment_completion(*truth, text_format), 1), ("", 0)):
        found = grade(Question("environment", prompt, truth), text).metrics
        rows = {name.removeprefix("next_state_"): found[name] for name in found if name.startswith("next_state_")}
        assert rows == dict.fromkeys(groups, right) and found["next_state"] == right


@pytest.mark.parametrize("text_format", FORMATS)
def test_legal_moves_in_check_have_a_row_of_their_own(text_format):
    for fen, row in (("4k3/8/8/8/8/8/8/q3K3 w - - 0 1", True), (START, False)):
        position = Position(fen, (), ())
        asked = [rewards.first_question(kind, position, text_format) for kind in ("moves", "mates")]
        for question in [*asked, rewards.policy_question(position, text_format)]:
            for move, right in (("e1e2" if row else "e2e4", 1), ("e1e3", 0)):
                whole, first = answer([move], [0], move), f" {move} x" if question.stop_after else f"{move} "
                metrics = grade(question, whole if question.kind == "policy" else first).metrics
                assert metrics["legal"] == right and metrics.get("legal_in_check") == (right if row else None)


@pytest.mark.parametrize("text", STRUCTURE)
def test_only_the_structure_is_right(text):
    assert policy(text).reward == POLICY_WEIGHTS["structure"]


@pytest.mark.parametrize("text", NONE)
def test_malformed(text):
    assert policy(text).reward == policy(text, hit_limit=True).reward == environment(text).reward == MALFORMED


def test_the_next_position_outweighs_the_other_fields_and_the_reward_counts_by_distance():
    assert environment(AFTER + "+-1+1+1").reward > environment(AFTER.replace(" b", " w") + "+0.001+0+0").reward
    # exactly right is best, and huge ones are bounded
    said = [environment(f"{AFTER}+{r}+0+0").reward for r in ("0.001", "0.0011", "0.5", "1", "-1.0", "9" * 400)]
    assert said == sorted({*said}, reverse=True)


NUMBERS = st.sampled_from(["0.001", "0.5", "1.0", "-1", "7"])
WORDS = st.lists(st.sampled_from([*AFTER.split(), *START.split(), "x", "pppp", "12"]), min_size=1, max_size=8)


@settings(quick, max_examples=200)
@given(WORDS, NUMBERS, st.booleans(), st.booleans(), st.integers(0, 12), st.integers(0, 80))
def test_a_better_environment_answer_never_scores_lower(fields, reward, terminated, truncated, which, where):
    whole = " ".join(fields)
    said, true = (fen.replace("/", " ").split(" ") for fen in (whole, AFTER))

    def worth(fen=whole, reward=reward, terminated=terminated, truncated=truncated):
        return environment(f"{fen}+{reward}+{terminated:d}+{truncated:d}").reward

    def with_word(word):
        return worth(" ".join(said[:which] + [word] + said[which + 1 :]))  # a space separates ranks as well

    base = worth()
    if which < len(said) and said[which] != true[which]:
        assert with_word(true[which]) > base
        if len(said[which]) == len(true[which]):  # nor does one more character that is right
            cut = where % len(true[which])
            assert with_word(true[which][:cut] + said[which][cut:]) >= base
    assert (worth(AFTER) > base) == (whole != AFTER) and worth(reward="0.001") >= base
    assert (worth(terminated=False) > base) == terminated and (worth(truncated=False) > base) == truncated


def spread():
    policies = [(policy, text) for texts in rungs(START, label(START)).values() for text in texts]
    fens = AFTER, AFTER.replace("4P3", "3P4"), AFTER.replace(" b", " w"), START, "x"
    return policies + [(environment, fen + tail) for fen in fens for tail in ("+0.001+0+0", "+1+1+0", "+-1.0+1+1")]


def test_the_runaway_penalty_keeps_the_order():
    """The incident: a hard cap gave all answers one reward, and then there is no gradient."""
    pairs = sorted({(task(text).reward, task(text, hit_limit=True).reward) for task, text in spread()})
    for free, runaway in pairs:
        assert runaway == (free if free <= 0 else pytest.approx(0.3 * free))
    assert len(pairs) > 50 and all(a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert pairs[0][0] == MALFORMED and pairs[-1][0] == 1


def test_a_game_that_is_over_is_no_question(tmp_path):
    (file := tmp_path / "positions.txt").write_text(
        f"rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3\n{START}"
    )
    assert [position.fen for position in rewards.positions.load_unfinished(file)] == [START]
