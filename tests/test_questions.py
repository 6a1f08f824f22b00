import collections
import random
import re
from types import SimpleNamespace

import chess
import pytest

import rewards
import rollout
from examples import mates
from nanorook.tokenizer import Tokenizer
from rook import mating
from rook import positions as P
from rook.positions import Position
from tools import chess_texts as texts

START = chess.STARTING_FEN
CASTLING = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"
FOOLS = "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2"
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"


@pytest.fixture(scope="module")
def builtin():
    return P.load("builtin")


@pytest.fixture(scope="module")
def positions(builtin):
    return builtin[:4000]


def test_texts_are_written_as_documented():
    fen, moves = "7k/8/8/8/8/8/R7/K7 w - - 0 1", (("a2h2", 512), ("a2a3", -30), ("a1b1", 99998))
    pad = " " * (90 - len(fen))
    assert rewards.policy_prompt(fen, "rookworld") == f"P: {fen}"
    written = f"{pad}M: {'a2h2 a2a3 a1b1':30}E: {'5.12 -0.3 999.98':40}B: a1b1"
    assert texts.policy_completion(fen, moves, "rookworld") == written
    expanded = ".......k/......../......../......../......../......../R......./K....... w - - 0 1"
    assert rewards.policy_prompt(fen, "expanded") == f"P: {expanded}".ljust(94)
    assert texts.policy_completion(fen, moves, "expanded") == "M: a2h2 a2a3 a1b1 E: 5.12 -0.3 999.98 B: a1b1"
    assert rewards.environment_prompt(fen, "a2h2", ("a8b8", "a2h2"), "rookworld") == f"A: {fen}+a2h2+a8b8 a2h2+"
    assert rewards.environment_prompt(fen, "a2h2", ("a2h2",), "expanded") == f"A: {expanded}+a2h2+a2h2+".ljust(160)
    assert texts.environment_completion(fen, 0.001, False, True, "rookworld") == f"{fen}+0.001+0+1"
    assert texts.environment_completion(fen, 1.0, True, False, "expanded") == f"{expanded}+1.0+1+0"


def test_the_longest_prompts_fit_their_width():
    fen = "1n1qkbnr/p1p1p1p1/1p1p1p1p/r7/7R/1P1P1P1P/P1P1P1P1/RNBQK1N1 w KQkq e3 149 249"
    moves = ("a2a4",) * 9 + ("a7a8q",)
    for text_format, encode in (("expanded", str), ("squares", Tokenizer.of_bytes(chess.SQUARE_NAMES).encode)):
        prompts = rewards.policy_prompt(fen, text_format), rewards.environment_prompt(fen, "a7a8q", moves, text_format)
        assert {prompt[:3]: len(encode(prompt)) for prompt in prompts} == rewards.WIDTH[text_format]


MOVES = {  # a position and a move: the next position, reward, terminated, truncated
    (START, "e2e4"): ("rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1", 0.001, False, False),
    ("8/P6k/8/8/8/8/8/K7 w - - 3 9", "a7a8n"): ("N7/7k/8/8/8/8/8/K7 b - - 0 9", 0.5, True, False),  # bare material
    (CASTLING, "e1c1"): ("r3k2r/8/8/8/8/8/8/2KR3R b kq - 1 1", 0.001, False, False),
    ("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6"): ("4k3/8/3P4/8/8/8/8/4K3 b - - 0 2", 0.001, False, False),
    (FOOLS, "d8h4"): ("rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3", 1.0, True, False),
    ("7k/8/8/6Q1/8/8/8/K7 w - - 0 1", "g5g6"): ("7k/8/6Q1/8/8/8/8/K7 b - - 1 1", 0.5, True, False),  # stalemate
    ("8/8/4k3/8/8/8/R7/K7 w - - 149 99", "a2b2"): ("8/8/4k3/8/8/8/1R6/K7 b - - 150 99", 0.5, True, False),
    ("8/8/4k3/8/8/8/R7/K7 w - - 148 99", "a2b2"): ("8/8/4k3/8/8/8/1R6/K7 b - - 149 99", 0.001, False, False),
    (MATE_IN_ONE.replace("0 1", "149 99"), "a1a8"): ("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 150 99", 1.0, True, False),
    (START, "a1a3"): None,  # illegal: through its own pawn
    ("4k3/4r3/8/8/8/8/4B3/4K3 w - - 0 1", "e2d3"): None,  # pinned
    ("4kr2/8/8/8/8/8/8/4K2R w K - 0 1", "e1g1"): None,  # castles through check
    ("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8"): None,  # promotes to nothing
    (START, "0000"): None,
    (START, "e2x9"): None,
}


@pytest.mark.parametrize("fen, move", MOVES)
def test_transition_by_hand(fen, move):
    assert rewards.transition(fen, move) == (MOVES[fen, move] or (fen, -1.0, False, True))


def test_environment_questions_hold_the_truth_and_show_ten_moves(positions):
    rng = random.Random(3)
    for position in rng.sample(positions, 100):
        question = rewards.environment_question(position, rng, "expanded")
        fen, move, history, rest = question.prompt.removeprefix("A: ").split("+")
        fen = P.contract_board(fen)
        assert rest.strip() == "" and history.split() == [*position.history, move][-10:]
        assert P.board_key(fen) == P.board_key(position.fen)  # only the counters may be others
        assert question.truth == rewards.transition(fen, move)
    asked = Position(MATE_IN_ONE, ("h7h6",), (), "a1a8")
    labels = ("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1", 1.0, True, False)
    question = rewards.environment_question(asked, rng, "rookworld")
    assert question[:3] == ("environment", f"A: {MATE_IN_ONE}+a1a8+h7h6 a1a8+", labels)


def test_environment_questions_have_every_kind(positions):
    rng, kinds = random.Random(4), collections.Counter()
    for position in positions:
        question = rewards.environment_question(position, rng, "rookworld", illegal_share=1 / 3)
        fen, uci, *_ = question.prompt.removeprefix("A: ").split("+")
        board, move = chess.Board(fen), chess.Move.from_uci(uci)
        piece, illegal = board.piece_at(move.from_square), question.truth[3]
        own = piece is not None and piece.color == board.turn
        kinds.update(["illegal"] * illegal, own=illegal and own, other=illegal and not own)
        kinds.update(check=illegal and board.is_pseudo_legal(move), castling=not illegal and board.is_castling(move))
        if not illegal:
            promotion = f"promotion to {move.promotion}" if move.promotion else "none"
            kinds.update([promotion, P.game_end(board, move)], en_passant=board.is_en_passant(move))
    assert 0.3 < kinds["illegal"] / len(positions) < 0.37
    least = dict(own=120, other=120, check=60, en_passant=3, castling=50)
    least |= {f"promotion to {piece}": 3 for piece in (chess.KNIGHT, chess.BISHOP, chess.ROOK, chess.QUEEN)}
    least |= {end: n for end, n in zip(chess.Termination, (20, 2, 1, 25))}
    assert all(kinds[kind] >= number for kind, number in least.items()), kinds


def test_no_training_question_shows_or_reaches_a_held_out_board(positions):
    rng = random.Random(6)
    train, _ = P.split(positions)
    moves = [(p, uci) for p in train[:200] for uci, _ in p.moves]
    reaching = [p._replace(asked=uci) for p, uci in moves if P.held_out(rewards.transition(p.fen, uci)[0])]
    assert len(reaching) > 25  # without the rule these would get through
    for position in train[:100] + reaching:
        question = rewards.environment_question(position, rng, "rookworld")
        assert not P.held_out(question.prompt[3:].split("+")[0]) and not P.held_out(question.truth[0])


@pytest.mark.parametrize("side", [0, 1])
def test_first_candidates_are_asked_and_their_rungs_are_those_of_the_rules_and_the_labels(positions, side, monkeypatch):
    items = mating.beside("builtin", *P.split(positions))[side]
    config = SimpleNamespace(extra={"chess_format": "expanded"})
    asked = rewards.make_questions(items, 100, random.Random(0), config)
    kinds = collections.Counter(question.kind for question in asked)
    first = round((100 - kinds["environment"]) * rewards.MIX_FIRST_RATIO)
    assert kinds["mates"] == first // 2 and kinds["moves"] == first - first // 2
    monkeypatch.setattr(rewards, "MIX_ENV_RATIO", 0.07)  # 100 times which is 7.000000000000001
    asked_again = rewards.make_questions(items, 100, random.Random(0), config)
    assert sum(question.kind == "environment" for question in asked_again) == 7
    monkeypatch.undo()
    for question in (question for question in asked if question.kind in ("moves", "mates")):
        fen = P.contract_board(question.prompt[3:].removesuffix("M: ").strip())
        board, rungs = chess.Board(fen), dict(question.truth)
        assert P.held_out(fen) == bool(side) and rungs.pop("legal") == [move.uci() for move in board.legal_moves]
        for uci in rungs.get("mate", ()):
            (after := board.copy()).push_uci(uci)
            assert after.is_checkmate() and uci in rungs["check"]
        assert rewards.grade(question, f"{[*question.truth.values()][-1][0]} ").reward == 1
        assert rewards.grade(question, f"{rungs.popitem()[1][0]}x").reward == 0
    rookworld = rewards.make_questions(items, 100, random.Random(0), SimpleNamespace(extra={}))
    assert [(q.kind, q.truth) for q in rookworld] == [(q.kind, q.truth) for q in asked]
    for one, other in zip(rookworld, asked):
        if one.stop:
            fen = P.contract_board(other.prompt[3:].removesuffix("M: ").strip())
            assert (one.prompt, one.stop, one.stop_after) == (f"P: {fen}{' ' * (90 - len(fen))}M:", " ", 1)


@pytest.mark.parametrize("load", [rewards.load, mates.load])
def test_mates_are_those_of_a_users_data_if_both_sides_have_some(load, tmp_path, positions, capsys):
    mate = [[p.fen for p in side[:3]] for side in mating.embedded()]
    quiet = [[p.fen for p in side if not P.mating_moves(chess.Board(p.fen))][:20] for side in P.split(positions[:600])]
    for name, own in ("some", sum(mate, [])), ("train", mate[0]), ("none", []):
        (tmp_path / name).write_text("\n".join(own + sum(quiet, [])))
        sides = load(tmp_path / name, None)
        found = [[p.fen for pool, p in side if pool == "mates"] for side in sides]
        told = f"{name} has {sum(fen in own for fen in mate[0])} positions with a mate in one to train on and "
        assert told in (said := capsys.readouterr().out)
        assert said.endswith(", so questions about mates are about the embedded positions.\n") == (name != "some")
        assert [*map(sorted, found)] == [*map(sorted, mate)] if name == "some" else len(found[0]) > 12_000


def test_the_labels_of_a_users_data_say_where_there_is_no_mate(monkeypatch):
    looked, mating_moves = [], P.mating_moves
    monkeypatch.setattr(P, "mating_moves", lambda board: looked.append(board.fen()) or mating_moves(board))
    mate, quiet, later = (
        Position(fen, (), ((uci, cp),))
        for fen, uci, cp in ((MATE_IN_ONE, "a1a8", 99999), (START, "e2e4", 30), (FOOLS, "d7d6", 99998))
    )
    assert [p.fen for p in mating.find([mate, quiet, later])] == looked == [MATE_IN_ONE]


@pytest.mark.parametrize("task", [rewards, mates])
def test_a_quarter_of_the_positions_are_in_check_and_half_of_the_moves_asked_about_are_illegal(task, positions):
    config, items = SimpleNamespace(extra={}), mating.beside("builtin", *P.split(positions))[0]
    others, illegal = [], []
    for seed in range(3):
        asked = task.make_questions(items, 80, random.Random(seed), config)
        assert len({question.prompt for question in asked}) == 80
        groups = [P.groups(question.prompt) for question in asked if question.kind == "moves"]
        assert groups.count(["in_check"]) == round(0.25 * len(groups))
        others += [P.groups(question.prompt) for question in asked if question.kind == "policy"]
        illegal += [question.truth[3] for question in asked if question.kind == "environment"]
    assert task is mates or 0 < others.count(["in_check"]) < len(others) / 5  # as often as in games
    assert task is mates or 0.4 < sum(illegal) / len(illegal) < 0.6
    ordinary = [position for pool, position in items if pool == "ordinary"][:200]
    assert {*rewards.draw_ordinary(ordinary, 200, 190, random.Random(0))} == {*ordinary}  # where all are asked for


def test_fewer_positions_than_questions_are_filled_up_with_mates():
    items = [("mates", Position(MATE_IN_ONE, (), ()))] * 9 + [("ordinary", Position(START, (), (("e2e4", 30),)))]
    asked = rewards.make_questions(items, 10, random.Random(0), SimpleNamespace(extra={}))
    assert [question.kind for question in asked] == ["environment"] + ["mates"] * 9


def test_the_prompt_for_a_first_candidate_begins_a_line_in_gpt2s_tokens(builtin, gpt2_folder):
    """Otherwise a model would see tokens that no text has taught it, and the stop would not end the move."""
    tokenizer, rng = Tokenizer.load(gpt2_folder), random.Random(7)
    question = rewards.first_question("moves", builtin[0], "rookworld")
    stops, found = rollout.stop_tokens_of(tokenizer, "moves", question.stop, question.stop_after), collections.Counter()
    promotions = [p for p in builtin if any(len(uci) == 5 for uci, _ in p.moves)]
    for position in promotions + rng.sample(builtin, 800 - len(promotions)):
        line = "".join(texts.policy_text(position, rng, "rookworld"))
        move = re.search("M: ([^ ]+)", line)[1]
        prompt, tokens = map(tokenizer.encode, (rewards.first_prompt(position.fen, "rookworld"), line))
        assert tokens[: len(prompt)] == prompt
        answer = tokens[len(prompt) :]
        end = next(i for i, token in enumerate(answer, 1) if i > stops.get(token, len(answer)))
        text, _ = rollout.detokenize(tokenizer, answer[:end])
        asked = question._replace(truth={"best": [move]})
        assert end <= rewards.LIMITS["moves"] and rewards.grade(asked, text).metrics == {"structure": 1, "best": 1}
        found[len(move)] += 1
    assert found[4] > 400 and found[5] > 100


@pytest.mark.parametrize("text_format, width", [("expanded", 94), ("squares", 92)])
def test_the_formats_of_small_models_ask_for_a_first_candidate_as_ever(positions, text_format, width):
    encode = str if text_format == "expanded" else Tokenizer.of_bytes(chess.SQUARE_NAMES).encode
    for position in positions[:20]:
        for kind in ("moves", "mates"):
            question = rewards.first_question(kind, position, text_format)
            header = question.prompt.removeprefix(f"P: {P.expand_board(position.fen)}")
            assert header.strip(" ") == "M:" and header.endswith("M: ")
            assert len(encode(question.prompt)) == width + len("M: ")
            assert (question.stop, question.stop_after) == (" ", 0)


def test_a_first_candidate_is_worth_more_on_each_rung_and_known_without_labels(monkeypatch):
    monkeypatch.setattr(rewards.stockfish, "label", lambda fen: ())
    labels = (("g1f1", 50), ("g1h1", 20))
    for kind, moves, ladder in (
        ("moves", ("g1g7 ", "f2f3 ", "g1h1 ", "g1f1 "), [0.05, 0.7, 0.9, 1.0]),
        ("mates", ("g1g7 ", "f2f3 ", "a1a8 "), [0.05, 0.3, 1.0]),
    ):
        question = rewards.first_question(kind, Position(MATE_IN_ONE, (), labels), "expanded")
        assert [rewards.grade(question, text).reward for text in moves] == ladder
        assert {rewards.grade(question, text).reward for text in ("", " ", "g1f1", "M: g1f1 ", "g1f1  ")} == {0}
        question = rewards.first_question(kind, Position(MATE_IN_ONE, (), labels), "rookworld")
        for after in (" ", " d", " E"):  # the token that ends a move may begin what follows
            assert [rewards.grade(question, f" {text[:-1]}{after}").reward for text in moves] == ladder
        assert {rewards.grade(question, text).reward for text in ("", " ", " g1f1", "g1f1 ", "  g1f1 ")} == {0}
    unknown = rewards.first_question("moves", Position(MATE_IN_ONE, (), ()), "expanded")
    assert rewards.grade(unknown, "f2f3 ")[:1] == ((("structure", 0.05), ("legal", 0.65)),)
