"""tools/uci.py: python-chess's engine client plays with it, and a raw client sends what no good program would."""

import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import chess
import chess.engine
import pytest
import torch
from chess.engine import Cp, Limit, Mate

import rollout
from nanorook import positions
from rollout import Batch
from tools import uci

ROOT = Path(__file__).parent.parent
PATIENCE = 200  # seconds; only a program that hangs needs them, or a machine that is very busy
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"
STALEMATE = "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"
CASTLING = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"
PROMOTION = "8/P6k/8/8/8/8/7K/8 w - - 0 1"
DEFAULTS = {name: default for name, (default, _, _) in uci.OPTIONS.items()}


class Raw(subprocess.Popen):
    """The program on two pipes, with bytes in and lines out."""

    def __init__(self):
        super().__init__([sys.executable, "-m", "tools.uci"], cwd=ROOT, stdin=-1, stdout=-1, stderr=-1)
        timer = threading.Timer(PATIENCE, self.kill)
        timer.daemon = True
        timer.start()

    def send(self, *lines):
        self.stdin.write(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
        self.stdin.flush()

    def until(self, start):
        """Its lines up to the one that begins with `start`."""
        lines = [""]
        while not lines[-1].startswith(start):
            lines.append(self.stdout.readline().decode().strip())
            assert self.poll() is None or lines[-1], "it has ended"
        return lines[1:]

    def ask(self, *lines):
        """All it says to some lines that start no thinking."""
        self.send(*lines, "isready")
        return self.until("readyok")[:-1]


@pytest.fixture(scope="module")
def shared_raw():
    raw = Raw()
    yield raw
    raw.send("setoption name Samples value 256", "go infinite")
    raw.until("info depth 0")
    raw.send("quit")  # in the middle of thinking
    last, errors = raw.communicate(timeout=PATIENCE)
    assert raw.returncode == 0 and errors == b"" and last.splitlines()[-1].startswith(b"bestmove")
    assert b"info depth 1" not in last


def test_the_end_of_the_input_is_answered():
    raw = Raw()
    last, errors = raw.communicate(b"setoption name Samples value 1\ngo infinite\n", timeout=PATIENCE)
    assert raw.returncode == 0 and last.splitlines()[-1].startswith(b"bestmove") and errors == b""


@pytest.fixture
def raw(shared_raw):
    """After each test it is idle, alive and has said nothing that nobody asked for."""
    assert shared_raw.ask("setoption name Samples value 2", "position startpos") == []
    yield shared_raw
    assert shared_raw.ask() == []


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    where = dict(cwd=tmp_path_factory.mktemp("elsewhere"), env={**os.environ, "PYTHON": sys.executable})
    with chess.engine.SimpleEngine.popen_uci(str(ROOT / "tools" / "uci.sh"), timeout=PATIENCE, **where) as engine:
        engine.configure({"Samples": 2})
        yield engine
        engine.quit()
        assert engine.protocol.returncode.result() == 0


def test_moves_end_before_an_illegal_one(capsys):
    for said in ("e1g1", "e1h1"):  # some programs write castling the second way
        board = uci.read_position(["fen", *CASTLING.split(), "moves", said])
        assert board.fen() == "r3k2r/8/8/8/8/8/8/R4RK1 b kq - 1 1"
    for illegal in ("e2e5", "0000", "hello", "♔"):
        board = uci.read_position(["startpos", "moves", "d2d4", "d7d5", illegal, "g1f3"])
        assert [move.uci() for move in board.move_stack] == ["d2d4", "d7d5"]
        assert capsys.readouterr().out.startswith(f"info string {illegal} is illegal in {board.fen()}")


def test_time_is_divided_and_never_overrun():
    def allowed(limits, turn=chess.WHITE):
        return uci.seconds(uci.read_limits(limits.split()), turn)

    assert allowed("infinite") == allowed("depth 3 mate 2") == allowed("wtime soon") == math.inf
    assert allowed("movetime 1000") == 1 - uci.OVERHEAD
    assert allowed("wtime 60000 btime 2000 winc 100 binc 0", chess.BLACK) == pytest.approx(0.1 - uci.OVERHEAD)
    for left in (-100, 1, 50, 400, 10**9):
        for rest in ("", " movestogo 1", " movestogo 0", " winc 60000", " movestogo -3 winc 5"):
            assert allowed(f"wtime {left}{rest}") < max(0, left / 1000)


def test_moves_are_ranked_by_their_probability_after_the_header(byte_model):
    before = f"P: {positions.expand_board(PROMOTION)}".ljust(94) + "M:"
    moves = [move.uci() for move in chess.Board(PROMOTION).legal_moves]
    ranked = uci.rank(byte_model, chess.Board(PROMOTION), moves)
    for move in ("a7a8q", "h2g1"):  # of five letters and of four
        tokens = list(f"{before} {move}".encode())
        with torch.no_grad():
            logprobs = byte_model(torch.tensor([tokens])).log_softmax(-1)[0]
        expected = sum(logprobs[i - 1, tokens[i]].item() for i in range(len(before), len(tokens)))
        assert ranked[move] == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def search(byte_model, monkeypatch, capsys):
    """search(texts, go, ...): (candidates, bestmove line, all lines), where the answers are `texts`."""

    def run(texts, go="", **options):
        rows = [byte_model.tokenizer.encode(text) + [256] for text in texts]
        tokens = torch.tensor([row + [256] * (max(map(len, rows)) - len(row)) for row in rows])
        batch = Batch(None, None, tokens, tokens >= 0, torch.zeros(tokens.shape), torch.zeros(len(rows)) > 0)
        monkeypatch.setattr(rollout, "generate", lambda *_, **__: batch)
        uci.Search(byte_model, None, chess.Board(), go.split(), DEFAULTS | options).join()
        lines = capsys.readouterr().out.splitlines()
        last = [line.split() for line in lines if line.startswith("info depth 1 ")]
        candidates = {int(words[4]): (" ".join(words[6:8]), words[-1]) for words in last if "score" in words}
        return candidates, lines[-1], lines

    return run


def test_answers_vote_and_the_legal_ones_count(search, byte_model):
    two, three = "M: e2e4 d2d4 E: 0.3 0.1 B: d2d4", "M: e2e4 d2d4 g1g3 E: 0.5 -0.2 9.0 B: e2e4"
    mates, illegal = "M: e2e4 d2d4 E: 999.98 -999.97 B: d2d4", ["M: e2e5 E: 1.0 B: e2e5"] * 3
    candidates, best, _ = search([two, three, mates, *illegal, "nonsense"])
    assert best == "bestmove d2d4"
    assert candidates == {1: ("cp -20", "d2d4"), 2: ("cp 50", "e2e4")}  # the median; no illegal move is shown
    assert search([mates])[0] == {1: ("mate -3", "d2d4"), 2: ("mate 2", "e2e4")}

    moves = [move.uci() for move in chess.Board().legal_moves]
    likeliest = max(moves, key=uci.rank(byte_model, chess.Board(), moves).get)
    for useless in (["nonsense"], illegal):
        _, best, lines = search(useless)
        assert best == f"bestmove {likeliest}" and lines[-2].startswith("info string no answer gave a legal move")
    assert search([two], Samples=0)[1] == f"bestmove {likeliest}"


def test_unknown_words_are_skipped_and_garbage_ignored(raw):
    assert raw.ask("joho debug on", "ucinewgame", "", "   ", "bestmove e2e4", "stop", "ponderhit", "Go") == []
    rng = random.Random(0)
    assert raw.ask(*(rng.randbytes(rng.randrange(200)).replace(b"\n", b"") for _ in range(300)), "x" * 100_000) == []
    too_long = f"position fen {CASTLING.rsplit(' ', 1)[0]} {'1' * 1000}"  # it would make a prompt of any length
    for line in ("position", "position fen \xff\xfe w", "position startpos moves e2e5", "setoption", too_long):
        [said] = raw.ask(line)
        assert said.startswith("info string ")


def test_what_waits_answers_at_stop_alone(raw):
    raw.send("go infinite")
    lines = raw.until("info depth 1 multipv 1")
    time.sleep(0.1)
    lines += raw.ask()
    assert not [said for said in lines if said.startswith("bestmove")]
    raw.send("stop")
    assert raw.until("bestmove")[-1].split()[1] in {move.uci() for move in chess.Board().legal_moves}


@pytest.mark.parametrize("end", ["stop", "movetime"])
def test_time_up_in_the_middle_of_thinking(raw, end):
    """A round of 256 answers takes seconds; it is cut short, and the likeliest move is played."""
    raw.send("setoption name Samples value 256", "go movetime 100" if end == "movetime" else "go")
    likeliest = raw.until("info depth 0")[-1].split()[-1]
    if end == "stop":
        assert raw.ask() == []  # it is still thinking, and answers
        raw.send(end)
    lines = raw.until("bestmove")
    assert lines[0].startswith("info string no answer") and lines[1:] == [f"bestmove {likeliest}"]


def test_the_seed_decides(raw):
    said = []
    for seed in (5, 5, 6):
        raw.send(f"setoption name Seed value {seed}", "go")
        said.append([line.split(" nodes")[0] for line in raw.until("bestmove")])
    assert said[0] == said[1] != said[2]


def test_it_plays_itself(engine):
    """python-chess's client raises at any illegal move and at any line out of turn."""
    board = chess.Board()
    for limit in Limit(white_clock=60, black_clock=60), Limit(nodes=1), Limit(depth=1), *[Limit(time=0.001)] * 9:
        result = engine.play(board, limit, info=chess.engine.INFO_ALL)
        assert board.is_legal(result.move) and result.info["pv"] == [result.move]
        board.push(result.move)
    for fen, score in ((MATED, Mate(-0)), (STALEMATE, Cp(0))):
        result = engine.play(chess.Board(fen), Limit(depth=1), info=chess.engine.INFO_SCORE)
        assert result.move is None and result.info["score"].relative == score
