"""tools/evaluate.py: players whose skill is known get the figures they should."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chess
import pytest
import torch

import rewards
from nanorook import monitor, positions, stockfish
from nanorook.positions import Position
from rollout import Batch
from tools import evaluate

ROOT = Path(__file__).parent.parent
POSITIONS = positions.load("builtin")[:6000]
HELD_OUT = positions.split(POSITIONS)[1]
LABELS = {position.fen: position.moves for position in POSITIONS}
MATE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"  # a1a8
STALEMATE = "7k/8/5K2/8/8/8/8/6Q1 w - - 0 1"  # g1g6
QUEENS = "3qk3/8/8/8/8/8/3Q4/4K3 w - - 0 1"  # whoever is to move takes a queen


def answer_of(best, moves=None, evals=None):
    moves = moves or [best]
    return f"M: {' '.join(moves)} E: {' '.join(map(str, evals or [0.0] * len(moves)))} B: {best}"


def perfect_policy(fen):
    """The labels where there are some, a mate where there is one, else any legal move."""
    if fen in LABELS:
        return rewards.policy_completion(fen, LABELS[fen], "expanded")
    board = chess.Board(fen)
    return answer_of((*evaluate.mating_moves(board), *(move.uci() for move in board.legal_moves))[0])


def perfect_environment(fen, move, history):
    return rewards.environment_completion(*rewards.transition(fen, move), "expanded")


@pytest.fixture
def player(byte_model, monkeypatch):
    """player(policy, environment): a model that answers as these functions of (fen) and of (fen, move, history) do."""

    def make(policy=perfect_policy, environment=perfect_environment):
        def generate(model, prompts, *_, **__):
            tokenizer, texts = model.tokenizer, []
            for prompt in map(tokenizer.decode, prompts):
                fen, *rest = prompt[3:].strip().split("+")
                fen = positions.contract_board(fen)
                texts.append(environment(fen, rest[0], rest[1].split()) if rest else policy(fen))
            rows = [tokenizer.encode(text) + [tokenizer.eos] for text in texts]
            tokens = torch.tensor([row + [tokenizer.eos] * (max(map(len, rows)) - len(row)) for row in rows])
            return Batch(None, None, tokens, tokens >= 0, torch.zeros(tokens.shape), torch.zeros(len(rows)) > 0)

        monkeypatch.setattr(evaluate, "generate", generate)
        return byte_model

    return make


def measure(model, some=HELD_OUT, mates=(), engine=None, **options):
    a = SimpleNamespace(**{"judged": 20, "self_play": 0, "rows": 512} | options)
    sections = evaluate.measure(model, some, {"mate in one": list(mates)}, engine, a, 0.0)
    return {section: {row: evaluate.figure(c) for row, c in columns.items()} for section, columns in sections.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Rows of the table


def test_a_perfect_player_is_perfect_in_every_row(player):
    """The engine is not needed: no move is outside of the labels."""
    some = [position for position in HELD_OUT if len(position.moves) > 1]
    found = measure(player(), some, evaluate.find_mates(POSITIONS, 50), engine=object(), self_play=4)
    for section in ("policy", "environment"):
        for row, figure in found[section].items():
            assert figure == ((0, 0) if row.endswith("pawns") else (1, 0)), row
    assert found["self-play"]["illegal moves"] == (0, 0)
    rows = {row for section in found.values() for row in section}
    assert {f"{row}: {side}" for row in ("legal move", "best move") for side in ("White", "Black", "in check")} <= rows
    assert {f"next state: {kind}" for kind in evaluate.KINDS} - rows <= {"next state: en passant"}  # the rarest
    published = {row for section in evaluate.PUBLISHED.values() for row in section}
    assert published - rows == {"mate in one: BIG-bench"}


@pytest.mark.parametrize(
    "what, test",
    [
        ("White", lambda board: board.turn),
        ("Black", lambda board: not board.turn),
        ("in check", chess.Board.is_check),
    ],
)
def test_sides_and_checks_are_told_apart(player, what, test):
    model = player(lambda fen: perfect_policy(fen) if test(chess.Board(fen)) else answer_of("a1a1"))
    found = measure(model)["policy"]
    assert found[f"legal move: {what}"] == found[f"best move: {what}"] == (1, 0)
    share = sum(test(chess.Board(position.fen)) for position in HELD_OUT) / len(HELD_OUT)
    assert found["legal move"][0] == pytest.approx(share) and 0 < share < 1


def test_an_environment_that_does_not_know_one_thing_fails_in_its_row_alone(player):
    def no_promotions(fen, move, history):
        return perfect_environment(fen, move, history) if len(move) == 4 else "nonsense"

    found = measure(player(environment=no_promotions))["environment"]
    assert found["next state: promotion"] == (0, 0)
    assert found["next state: castling"] == found["next state: illegal move"] == (1, 0)
    assert 0 < 1 - found["structure"][0] == pytest.approx(1 - found["next state"][0])

    def reads_the_move_from_the_history(fen, move, history):
        return perfect_environment(fen, history[-1] if len(history) > 1 else "a1a1", history)

    some = [position for position in HELD_OUT if position.history]
    found = measure(player(environment=reads_the_move_from_the_history), some)["environment"]
    assert found["next state: legal move, short history"] == (0, 0)
    assert found["next state"] == found["truncated: illegal move"] == (1, 0)


def test_kinds_of_moves_are_recognised():
    for fen, move, expected in (
        ("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8q", {"promotion"}),
        ("4k3/8/8/8/8/8/8/4K2R w K - 0 1", "e1g1", {"castling"}),
        ("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6", {"en passant", "capture"}),
        (MATE, "a1a8", {"game over"}),
        (STALEMATE, "g1g6", {"game over"}),
        (MATE, "a1a2", set()),
    ):
        prompt = rewards.environment_prompt(fen, move, [move], "expanded")
        question = rewards.Question("environment", prompt, ())
        assert evaluate.kinds(question) == expected | {"legal move"}, (fen, move)
    prompt = rewards.environment_prompt(MATE, "a1b2", ["a1b2"], "rookworld")
    assert evaluate.kinds(rewards.Question("environment", prompt, ())) == {"illegal move"}


def test_agreement_is_that_of_the_best_move_and_the_highest_evaluation():
    moves = ["e2e4", "d2d4", "g1f3"]
    assert evaluate.agrees(answer_of("d2d4", moves, [0.1, 0.3, -1.0])) is True
    assert evaluate.agrees(answer_of("e2e4", moves, [0.1, 0.3, -1.0])) is False
    assert evaluate.agrees(answer_of("a2a3", moves, [0.1, 0.3, -1.0])) is False  # no candidate
    assert evaluate.agrees(answer_of("e2e4", moves, [0.3, 0.3, -1.0])) is None  # nothing is ranked first
    assert evaluate.agrees(answer_of("e2e4", ["e2e4"] * 3, [0.3, 0.1, 0.2])) is None  # nor is a single move
    assert evaluate.agrees("nonsense") is False


def test_positions_without_labels_are_asked_too(player, monkeypatch):
    monkeypatch.setattr(rewards, "labeller", lambda: SimpleNamespace(label=lambda fen: ()))  # there is no Stockfish
    rewards.policy_truth.cache_clear()
    mated = Position("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1", (), (), "g8h8")  # has a question about a move alone
    bare = [position._replace(moves=()) for position in HELD_OUT[:30]] + [mated]
    found = measure(player(), bare, engine=object())
    assert found["policy"]["legal move"] == found["environment"]["next state"] == (1, 0)
    assert found["policy"]["best move"] is None and "mate in one" not in found["policy"]


@pytest.mark.needs("stockfish")
def test_what_a_move_gives_away_comes_from_the_label_or_from_stockfish():
    engine = stockfish.Engine(stockfish.require())
    question = rewards.Question("policy", rewards.policy_prompt(QUEENS, "expanded"), (("d2d8", 900), ("d2d1", 300)))

    def lost(move, question=question, engine=engine):
        text = answer_of(move)
        return evaluate.pawns_lost(engine, question, text, rewards.grade(question, text))

    assert lost("d2d1", engine=None) == 6  # a label
    assert 14 <= lost("d2d6") <= 19  # from a queen up to a queen down; evaluations count up to ten pawns
    assert lost("d2a1") is None  # illegal
    assert lost("d2d8", question._replace(truth=(("d2d1", -50),))) == 0  # better than all that have labels
    assert evaluate.judge(engine, MATE, "a1a8") == stockfish.MATE / 100
    assert evaluate.judge(engine, STALEMATE, "g1g6") == 0
    engine.close()


def test_mates_are_held_out_and_complete():
    found = dict(evaluate.find_mates(POSITIONS, 1000))
    assert len(found) > 10 and len(evaluate.find_mates(POSITIONS, 3)) == 3
    for fen, mating in found.items():
        board, expected = chess.Board(fen), set()
        for move in list(board.legal_moves):
            board.push(move)
            expected |= {move.uci()} if board.is_checkmate() else set()
            board.pop()
        assert positions.held_out(fen) and mating == expected and expected
    keys = {positions.board_key(fen) for fen in found}
    labelled = [p for p in HELD_OUT if p.moves[0][1] == stockfish.MATE - 1]
    assert labelled and all(positions.board_key(p.fen) in keys for p in labelled) and len(keys) == len(found)


def test_bigbench_games_are_read(tmp_path):
    file = tmp_path / "task.json"
    example = {"input": "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4.", "target": "Qxf7#", "target_scores": {"Qxf7#": 1}}
    file.write_text(json.dumps({"name": "checkmate_in_one", "examples": [example]}))
    [(fen, mating)] = evaluate.read_bigbench(file)
    assert mating == {"h5f7"} and fen.startswith("r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq")
    for content in ("no json", "[]", '{"examples": [{"input": "1. e4"}]}'):
        file.write_text(content)
        with pytest.raises(positions.DataError, match="checkmate_in_one"):
            evaluate.read_bigbench(file)


def test_self_play_counts_half_moves_before_an_illegal_one_or_the_end(player):
    def until_move_6(fen):
        moves = sorted(move.uci() for move in chess.Board(fen).legal_moves)
        return answer_of("e1e9" if int(fen.split()[-1]) == 6 else random.Random(fen).choice(moves))

    columns = evaluate.self_play(player(until_move_6), [chess.STARTING_FEN] * 2, 0.0, 1)
    assert columns == {"half-moves before an illegal one": [(10, 1)] * 2, "illegal moves": [(1, 11)] * 2}
    mate = {"w": ["f2f3", "g2g4"], "b": ["e7e5", "d8h4"]}
    draw = {"w": ["g1f3", "f3g1"], "b": ["g8f6", "f6g8"]}  # the third time
    for moves, expected in (mate, 4), (draw, 8):
        model = player(lambda fen: answer_of(moves[fen.split()[1]][(int(fen.split()[-1]) - 1) % 2]))  # noqa: B023
        columns = evaluate.self_play(model, [chess.STARTING_FEN], 0.0, 1)
        assert columns == {"half-moves before an illegal one": [(expected, 1)], "illegal moves": [(0, expected)]}


def test_answers_do_not_depend_on_how_many_are_sampled_at_once(byte_model):
    questions = evaluate.policy_questions([position.fen for position in HELD_OUT[:5]], byte_model.config)
    answers = [evaluate.sample(byte_model, questions, 1.0, rows) for rows in (2, 5)]
    assert answers[0] == answers[1] != evaluate.sample(byte_model, questions, 1.0, 5, seed=1)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def test_values_that_are_not_known_weigh_nothing():
    c = evaluate.column([1, None, 0, 1, None])
    mean, half = evaluate.figure(c)
    assert mean == pytest.approx(2 / 3) and half == pytest.approx(monitor.interval([1, 0, 1])[1], rel=0.15)
    assert evaluate.figure(evaluate.column([None, None])) is None
    assert evaluate.difference(c, evaluate.column([None] * 5)) is None


def test_differences_are_taken_question_by_question():
    rng = random.Random(1)
    hard = [rng.random() for _ in range(1000)]  # what both models share: some questions are easier than others
    a, b = ([(h + 0.1 * rng.random() + gain, 1) for h in hard] for gain in (0, 0.02))
    mean, half = evaluate.difference(a, b)
    assert (mean, half) == pytest.approx(monitor.interval([y - x for (x, _), (y, _) in zip(a, b)]))
    assert 0 < half < mean < evaluate.figure(a)[1] + evaluate.figure(b)[1]
    assert evaluate.difference(a, a) == (0, 0)


def test_intervals_hold_what_they_say():
    """The true share of illegal moves, and the true difference of two, is within it in 95 of 100 experiments."""
    rng, held, held_difference = random.Random(2), 0, 0
    for _ in range(300):
        lengths = [[rng.randrange(1, 40) for _ in range(60)] for _ in range(2)]
        games = [[(sum(rng.random() < 0.1 for _ in range(n)), n) for n in of_one] for of_one in lengths]
        mean, half = evaluate.figure(games[0])
        held += abs(mean - 0.1) <= half
        mean, half = evaluate.difference(*games)
        held_difference += abs(mean) <= half
    assert 270 <= held <= 297 and 270 <= held_difference <= 297


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, byte_model):
    byte_model.save(tmp_path / "one")
    byte_model.save(tmp_path / "two")
    data = tmp_path / "some.txt"
    data.write_text("".join(positions.write_position(position) + "\n" for position in HELD_OUT[:6]))

    def command(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, arguments)])
        evaluate.main()
        return capsys.readouterr()

    return command


def test_the_command_compares_two_models(run, tmp_path):
    shown = run("one", "two", "--data", "some.txt", "some.txt", "--positions", 3, "--judged", 0, "--json", "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written["models"]) == ["one", "two"] and written["settings"]["positions"] == 3
    one, two = written["models"].values()
    assert (
        one == two
        and one["T=0"]["policy"]["structure"] == [0, 0]
        and one["T=1"]["self-play"]["illegal moves"] == [1, 0]
    )
    assert written["difference"]["T=0"]["environment"]["structure"] == [0, 0]
    assert " B - A |" in shown.out and "\ngreedy\n" in shown.out and "\nT=1\n" in shown.out
    assert shown.err == "" and not list(tmp_path.glob("*.tmp"))  # no progress where nobody watches


def test_the_command_prints_one_model_beside_the_published_one(run):
    out = run("one", "--data", "some.txt", "--positions", 2, "--temperature", 0, 0.7, "--judged", 0).out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in lines]
    assert rows[0][-3:] == ["greedy", "T=0.7", "RookWorld-LM 124M"] and len(set(map(len, lines))) == 1
    assert ["best move", "2", "0.0 ± 0.0 %", "0.0 ± 0.0 %", "16.6 %"] in rows
    assert evaluate.cell("evaluation error, pawns", (0.5, 0.25), "+") == "+0.50 ± 0.25 *"
    assert evaluate.cell("best move", (-0.01, 0.02), "+") == "-1.0 ± 2.0 %  "


def test_what_is_wrong_is_said_in_one_sentence(run, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "tools.evaluate", str(tmp_path / "nowhere")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    (tmp_path / "poem.txt").write_text("Shall I compare thee to a summer's day?\n")
    with pytest.raises(positions.DataError, match="poem.txt, line 1: expected"):
        run("one", "--data", "poem.txt")
    for wrong in (["a", "b", "c"], ["a", "--positions", 0], ["a", "--rows", 0], ["a", "--json", "/nowhere/x"]):
        with pytest.raises(SystemExit, match="2"):
            run(*wrong)
    monkeypatch.setenv("STOCKFISH_PATH", "/nowhere/stockfish")
    with pytest.raises(SystemExit, match="STOCKFISH_PATH is /nowhere/stockfish, which is no program"):
        run("one", "--data", "some.txt")
