"""tools/evaluate.py, games.py and mates.py: players whose skill is known get the figures they should."""

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import chess
import chess.pgn
import numpy as np
import pytest
import torch

import data
import engine as stockfish
import skill
import tasks
from rollout import Rollout
from tokenizer import Tokenizer
from tools import evaluate, games, mates

ROOT = Path(__file__).parent.parent
POSITIONS = data.load("builtin")[:6000]
HELD_OUT = data.split(POSITIONS)[1]
LABELS = {position.fen: position.moves for position in POSITIONS}
MATE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"  # a1a8


def say(best, moves=None, evals=None):
    moves = moves or [best]
    return f"M: {' '.join(moves)} E: {' '.join(map(str, evals or [0.0] * len(moves)))} B: {best}"


def best_of_labels(fen):
    """The ideal answer where there is one, a mate where there is one, else any legal move."""
    if fen in LABELS:
        return tasks.policy_completion(fen, LABELS[fen], "expanded")
    board = chess.Board(fen)
    return say((*mates.mating_moves(board), *(move.uci() for move in board.legal_moves))[0])


def truth(fen, move):
    return tasks.environment_completion(*tasks.transition(fen, move), "expanded")


@pytest.fixture
def player(byte_model, monkeypatch):
    """player(policy, environment): a model that answers what these functions of (fen) and of (fen, move) say."""
    byte_model.tokenizer = tokenizer = Tokenizer.of_bytes()

    def make(policy=best_of_labels, environment=truth):
        def generate(model, prompts, *rest):
            texts = []
            for prompt in map(tokenizer.decode, prompts):
                fen, *move = prompt[3:].strip().split("+")
                fen = tasks.contract(fen)
                texts.append(policy(fen) if prompt.startswith("P: ") else environment(fen, move[0]))
            rows = [tokenizer.encode(text) + [tokenizer.eos] for text in texts]
            width = max(map(len, rows))
            tokens = torch.tensor([row + [tokenizer.eos] * (width - len(row)) for row in rows])
            return Rollout(tokens, tokens >= 0, torch.zeros(tokens.shape), torch.zeros(len(rows), dtype=torch.bool))

        monkeypatch.setattr(skill, "generate", generate)
        return byte_model

    return make


@pytest.fixture(scope="module")
def engine():
    engine = stockfish.Engine(stockfish.find_stockfish())
    yield engine
    engine.close()


def measure(model, engine=None, found=(), **options):
    a = SimpleNamespace(**{"judged": 20, "self_play": 4, "games": 0, "level": 0} | options)
    sections = evaluate.measure(model, "it", a, HELD_OUT, {"mate_in_one": list(found)}, engine, 0.0)[0]
    return {section: {n: evaluate.figure(c) for n, c in columns.items()} for section, columns in sections.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def test_a_perfect_player_is_perfect_in_everything(player, engine):
    figures = measure(player(), engine, mates.find_mates(POSITIONS))
    for colour in ("", " white", " black", " in check"):
        for name in ("structure", "legal", "best", "top5", "candidates", "candidates_legal", "mate_in_one"):
            assert figures["policy" + colour][name] == (1, 0), (colour, name)
        assert figures["policy" + colour]["eval_mae"] == (0, 0)
    for colour in ("", " white", " black"):  # none of the few that are judged is in check
        assert figures["policy" + colour]["cp_loss"] == (0, 0)
    rare = {f"environment {kind}" for kind in ("capture", "promotion", "castling", "en passant", "mate", "illegal")}
    assert rare <= figures.keys()
    for section in ("environment", *rare):
        for name in ("next_state", "reward", "terminated", "truncated"):
            assert figures[section][name] == (1, 0), (section, name)
    assert figures["environment"]["invalid"] == figures["environment"]["reward_mae"] == (0, 0)
    assert figures["self-play"]["illegal"] == figures["closed loop"]["untrue"] == (0, 0)


def test_white_and_black_are_told_apart(player):
    figures = measure(player(lambda fen: best_of_labels(fen) if " w " in fen else say("a1a1")), self_play=0)
    assert figures["policy white"]["legal"] == figures["policy white"]["best"] == (1, 0)
    assert figures["policy black"]["legal"] == figures["policy black"]["best"] == (0, 0)
    white = sum(" w " in position.fen for position in HELD_OUT)
    assert figures["policy"]["legal"][0] == pytest.approx(white / len(HELD_OUT))


def test_checks_are_told_apart(player):
    checked = player(lambda fen: best_of_labels(fen) if chess.Board(fen).is_check() else say("a1a1"))
    figures = measure(checked, self_play=0)
    assert figures["policy in check"]["legal"] == figures["policy in check"]["best"] == (1, 0)
    checks = sum(chess.Board(position.fen).is_check() for position in HELD_OUT)
    assert figures["policy"]["legal"][0] == pytest.approx(checks / len(HELD_OUT))


def test_an_environment_that_ignores_the_rules_of_promotion_fails_there_alone(player):
    wrong = player(environment=lambda fen, move: truth(fen, move) if len(move) == 4 else "nonsense")
    figures = measure(wrong, self_play=0)
    assert figures["environment promotion"]["next_state"] == (0, 0)
    assert figures["environment castling"]["next_state"] == figures["environment illegal"]["next_state"] == (1, 0)
    assert 0 < figures["environment"]["invalid"][0] == pytest.approx(1 - figures["environment"]["next_state"][0])


def test_rare_moves_are_recognised():
    for fen, move, expected in (
        ("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8q", {"promotion"}),
        ("4k3/8/8/8/8/8/8/4K2R w K - 0 1", "e1g1", {"castling"}),
        ("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2", "e5d6", {"en passant", "capture"}),
        (MATE, "a1a8", {"mate"}),
        ("6k1/P4ppp/8/8/8/8/5PPP/6K1 w - - 0 1", "a7a8r", {"promotion", "mate"}),
        ("7k/8/5K2/8/8/8/8/6Q1 w - - 0 1", "g1g6", {"stalemate"}),
        (MATE, "a1b2", {"illegal"}),
        (MATE, "a1a2", set()),
    ):
        prompt = tasks.environment_prompt(fen, move, [move], "expanded")
        assert evaluate.kinds(tasks.Sample(prompt, ())) == expected, (fen, move)


def test_positions_without_labels_are_asked_too(player):
    a = SimpleNamespace(judged=5, self_play=2, games=0, level=0)
    bare = [position._replace(moves=()) for position in HELD_OUT[:30]]
    assert evaluate.labelled(bare, None) == bare
    sections = evaluate.measure(player(), "it", a, bare, {"mate_in_one": []}, None, 0.0)[0]
    assert evaluate.figure(sections["policy"]["legal"]) == (1, 0) and len(sections["policy"]["legal"]) == 30
    assert evaluate.figure(sections["policy"]["best"]) is None and "mate_in_one" not in sections["policy"]


def test_stockfish_labels_what_has_no_labels(engine):
    fen = "3qk3/8/8/8/8/8/3Q4/4K3 w - - 0 1"
    bare, known = tasks.Position(fen, (), ()), tasks.Position(fen, (), (("d2d1", 5),))
    found = evaluate.labelled([bare, known], engine)
    assert found[0].moves[0][0] == "d2d8" and len(found[0].moves) == 5 and found[1] == known


def test_what_a_move_gives_away_comes_from_the_label_or_from_stockfish(engine):
    fen = "3qk3/8/8/8/8/8/3Q4/4K3 w - - 0 1"  # whoever is to move takes a queen
    sample = tasks.Sample(tasks.policy_prompt(fen, "expanded"), (("d2d8", 900), ("d2d1", 300)))
    known = {"legal": 1.0, "cp_loss": 6.0}
    assert evaluate.cp_loss(None, sample, say("d2d1"), SimpleNamespace(parts=known)) == 6.0  # asks no engine
    lost = evaluate.cp_loss(engine, sample, say("d2d6"), SimpleNamespace(parts={"legal": 1.0}))
    assert 14 <= lost <= 19  # from a queen up to a queen down; evaluations count up to ten pawns
    assert evaluate.cp_loss(engine, sample, say("d2a1"), SimpleNamespace(parts={"legal": 0.0})) is None
    modest = sample._replace(labels=(("d2d1", -50),))  # a move that is better than the labelled ones gives nothing away
    assert evaluate.cp_loss(engine, modest, say("d2d8"), SimpleNamespace(parts={"legal": 1.0})) == 0
    assert evaluate.judge(engine, MATE, "a1a8") == stockfish.MATE
    assert evaluate.judge(engine, "7k/8/5K2/8/8/8/8/6Q1 w - - 0 1", "g1g6") == 0


# ---------------------------------------------------------------------------------------------------------------------
# Mates in one


def test_mates_are_held_out_and_complete():
    found = dict(mates.find_mates(POSITIONS))
    assert len(found) > 10
    for fen, mating in found.items():
        board, expected = chess.Board(fen), set()
        for move in list(board.legal_moves):
            board.push(move)
            if board.is_checkmate():
                expected.add(move.uci())
            board.pop()
        assert tasks.held_out(fen) and set(mating) == expected and expected
    keys = {tasks.board_key(fen) for fen in found}
    labelled = [p for p in HELD_OUT if p.moves[0][1] == stockfish.MATE - 1]
    assert labelled and all(tasks.board_key(p.fen) in keys for p in labelled) and len(keys) == len(found)


def test_bigbench_games_are_read(tmp_path):
    file = tmp_path / "task.json"
    example = {"input": "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4.", "target": "Qxf7#", "target_scores": {"Qxf7#": 1}}
    file.write_text(json.dumps({"name": "checkmate_in_one", "examples": [example]}))
    [(fen, mating)] = mates.read_bigbench(file)
    assert mating == ("h5f7",) and fen.startswith("r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq")
    for content in ("no json", "[]", '{"examples": [{"input": "1. e4"}]}'):
        file.write_text(content)
        with pytest.raises(data.DataError, match="checkmate_in_one"):
            mates.read_bigbench(file)


# ---------------------------------------------------------------------------------------------------------------------
# Games


START = tasks.Position(chess.STARTING_FEN, (), ())


def any_move(fen):
    return say(random.Random(fen).choice([move.uci() for move in chess.Board(fen).legal_moves]))


def until(last, policy=any_move):
    """Plays on to move number `last`, and then White plays nonsense."""
    return lambda fen: say("e1e9") if int(fen.split()[-1]) == last else policy(fen)


def test_self_play_counts_half_moves_before_an_illegal_one(player):
    columns = games.self_play(player(until(6)), [START, START], 0.0, None)
    assert columns["half_moves"].tolist() == [[10, 1], [10, 1]]
    assert evaluate.figure(columns["illegal"]) == (pytest.approx(1 / 11), 0)


def test_a_game_that_ends_by_the_rules_counts_its_half_moves(player):
    fool = {"w": ["f2f3", "g2g4"], "b": ["e7e5", "d8h4"]}
    mated = player(lambda fen: say(fool[fen.split()[1]][int(fen.split()[-1]) - 1]))
    columns = games.self_play(mated, [START], 0.0, None)
    assert columns["half_moves"].tolist() == [[4, 1]] and columns["illegal"].tolist() == [[0, 4]]
    shuffle = {"w": ["g1f3", "f3g1"], "b": ["g8f6", "f6g8"]}
    drawn = player(lambda fen: say(shuffle[fen.split()[1]][(int(fen.split()[-1]) - 1) % 2]))
    assert games.self_play(drawn, [START], 0.0, None)["half_moves"].tolist() == [[8, 1]]  # the third time


def test_the_closed_loop_lasts_while_the_environment_is_true(player):
    columns = games.closed_loop(player(until(5)), [START], 0.0, None)
    assert [columns[n].tolist() for n in ("half_moves", "illegal", "untrue")] == [[[8, 1]], [[1, 1]], [[0, 1]]]

    def forgetful(fen, move):
        return truth(fen, move) if int(fen.split()[-1]) < 3 else truth(fen, "a1a1")

    columns = games.closed_loop(player(any_move, forgetful), [START], 0.0, None)
    assert [columns[n].tolist() for n in ("half_moves", "illegal", "untrue")] == [[[4, 1]], [[0, 1]], [[1, 1]]]
    for lie in (lambda fen, move: "what", lambda fen, move: truth(fen, move)[:-3] + "1+0"):  # the game is over, it says
        columns = games.closed_loop(player(any_move, lie), [START], 0.0, None)
        assert columns["half_moves"].tolist() == [[0, 1]] and columns["untrue"].tolist() == [[1, 1]]


def test_the_closed_loop_shows_the_environment_the_last_ten_moves(player, monkeypatch):
    histories = []
    ask = tasks.environment_prompt
    monkeypatch.setattr(tasks, "environment_prompt", lambda *args: histories.append(args[2]) or ask(*args))
    games.closed_loop(player(until(3)), [START._replace(history=tuple("abcdefghi"))], 0.0, None)
    assert [len(history) for history in histories] == [10, 10, 10, 10]
    assert histories[0][:9] == tuple("abcdefghi") and histories[3][:6] == tuple("defghi")


def test_games_against_stockfish_are_written_as_pgn(player):
    columns, texts = games.match(player(until(12)), "it", 4, 20, 0.0, None)
    read = [chess.pgn.read_game(io.StringIO(text)) for text in texts]
    assert [game.headers["White"] == "it" for game in read] == [True, False, True, False]
    for game, (score, _), (half_moves, _), (illegal, moved) in zip(
        read, columns["score"], columns["half_moves"], columns["illegal"]
    ):
        assert not game.errors and len(list(game.mainline_moves())) == half_moves > 0
        side = game.headers["White"] == "it"
        assert moved == (half_moves + side) // 2 + (illegal if (half_moves % 2 == 0) == side else 0)
        if game.headers["Termination"] == "rules infraction":
            assert game.headers["Result"] == ("0-1" if side else "1-0") and score == 0 and illegal == 1
        else:
            assert game.end().board().is_game_over() or game.end().board().is_repetition(3)
    assert columns["illegal"][0].tolist() == [1, 12]  # it is White there, and plays nonsense at its twelfth move


def test_the_model_falls_back_on_its_candidates(player):
    def weak(fen):
        legal = sorted(move.uci() for move in chess.Board(fen).legal_moves)
        return say("h1h1", [legal[0], legal[-1]], [0.1, 0.9])

    board = chess.Board()
    [wanted] = games.choose(player(weak), [board], 0.0, None)
    legal = sorted(move.uci() for move in board.legal_moves)
    assert wanted == ["h1h1", legal[-1], legal[0]]
    [wanted] = games.choose(player(lambda fen: "what"), [board], 0.0, None)
    assert wanted == [None] and not games.is_legal(board, None)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def test_differences_are_taken_prompt_by_prompt():
    rng = np.random.default_rng(1)
    hard = rng.random(1000)  # what both models share: some prompts are easier than others
    a, b = (np.stack([hard + 0.1 * rng.random(1000) + gain, np.ones(1000)], 1) for gain in (0, 0.02))
    mean, low, high = evaluate.difference(a, b)
    each = b[:, 0] - a[:, 0]
    half = 1.96 * each.std(ddof=1) / np.sqrt(1000)
    assert mean == pytest.approx(each.mean())
    assert low == pytest.approx(mean - half, abs=half / 8) and high == pytest.approx(mean + half, abs=half / 8)
    assert low > 0  # seen, although each model's own interval is wider than the difference
    assert evaluate.figure(a)[1] > 0.015
    assert evaluate.difference(a, a) == (0, 0, 0)


def test_a_difference_is_rarely_seen_where_there_is_none():
    rng, seen = np.random.default_rng(2), 0
    for _ in range(200):
        a, b = (np.stack([rng.random(300) < 0.3, np.ones(300)], 1).astype(float) for _ in range(2))
        _, low, high = evaluate.difference(a, b)
        seen += low > 0 or high < 0
    assert 2 <= seen <= 22  # 5 % of 200, and what chance allows


def test_values_that_are_not_known_weigh_nothing():
    c = evaluate.column([1, None, 0, 1, None])
    mean, half = evaluate.figure(c)
    assert mean == pytest.approx(2 / 3) and half == pytest.approx(skill.interval([1, 0, 1])[1], rel=0.15)
    assert evaluate.figure(evaluate.column([None, None])) is None
    assert evaluate.difference(c, evaluate.column([None] * 5)) is None


# ---------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "some.txt"
    file.write_text("".join(data.write_position(position) + "\n" for position in HELD_OUT[:12]))
    return file


@pytest.fixture
def run(monkeypatch):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, arguments)])
        evaluate.main()

    return command


@pytest.fixture
def folder(byte_model, tmp_path):
    byte_model.tokenizer = Tokenizer.of_bytes()
    byte_model.save(tmp_path / "one")
    return tmp_path


def test_the_command_compares_two_models(byte_model, run, folder, some, capsys):
    byte_model.save(folder / "two")
    run(folder / "one", folder / "two", "--data", some, "--limit", 3, "--json", folder / "out.json")
    written = json.loads((folder / "out.json").read_text())
    assert list(written["models"]) == [str(folder / "one"), str(folder / "two")]
    one, two = written["models"].values()
    assert one == two and one["T=0"]["policy"]["structure"] == [0, 0] and one["T=1"]["self-play"]["illegal"] == [1, 0]
    assert written["difference"]["T=0"]["environment"]["invalid"] == [0, 0, 0]
    assert written["settings"]["limit"] == 3 and not list(folder.glob("*.tmp"))
    shown = capsys.readouterr()
    assert " B - A |" in shown.out and "\ngreedy\n" in shown.out and "\nT=1\n" in shown.out
    assert shown.err == ""  # no progress where nobody watches


def test_the_command_prints_one_model_beside_the_published_one(run, folder, some, capsys):
    arguments = "--data", some, "--limit", 2, "--temperature", 0.7, "--games", 1, "--pgn", folder / "games.pgn"
    run(folder / "one", *arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["", "n", "greedy", "T=0.7", "RookWorld-LM 124M"]
    assert len({len(row) for row in rows}) == 1 and len(set(map(len, lines))) == 1
    assert ["best", "2", "0.0 ± 0.0 %", "0.0 ± 0.0 %", "16.6 %"] in rows
    game = chess.pgn.read_game(io.StringIO((folder / "games.pgn").read_text()))
    assert game.headers["Result"] == "0-1" and game.headers["Termination"] == "rules infraction"


def test_what_is_wrong_is_said_in_one_sentence(run, some, tmp_path):
    command = [sys.executable, "-m", "tools.evaluate", str(tmp_path / "nowhere"), "--data", str(some)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    (tmp_path / "poem.txt").write_text("Shall I compare thee to a summer's day?\n")
    with pytest.raises(data.DataError, match="poem.txt, line 1: expected"):
        run("weights/tiny", "--data", tmp_path / "poem.txt")
    with pytest.raises(data.DataError, match="expected BIG-bench's"):
        run("weights/tiny", "--data", some, "--bigbench", some)


def test_stockfish_is_needed_for_games_only(monkeypatch, capsys):
    monkeypatch.setenv("STOCKFISH_PATH", "/nowhere/stockfish")
    assert evaluate.stockfish(SimpleNamespace(judged=5, games=0)) is None
    assert "cp_loss is left out" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="STOCKFISH_PATH"):
        evaluate.stockfish(SimpleNamespace(judged=0, games=1))
    for arguments in (["a", "b", "c"], ["a", "--level", "21"], ["a", "--limit", "0"], ["a", "--json", "/nowhere/x"]):
        monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
        with pytest.raises(SystemExit, match="2"):
            evaluate.arguments()
