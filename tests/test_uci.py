import io
import os
import random
import sys
from types import SimpleNamespace

import chess
import chess.engine
import pytest
import torch
from chess.engine import Cp, Limit, Mate

from rollout import Answer
from rook import positions
from tools import chess_uci as uci
from toy import ROOT

PATIENCE = 200  # seconds; only a program that hangs needs them, or a machine that is very busy
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"
STALEMATE = "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"
CASTLING = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"
PROMOTION = "8/P6k/8/8/8/8/7K/8 w - - 0 1"


@pytest.fixture
def talk(monkeypatch, capsys):
    """talk(lines, lines, ...) is all that tools.chess_uci says of these lines, a list for each of the arguments."""

    def talk(*parts):
        said = [line.encode() if isinstance(line, str) else line for part in parts for line in (*part, "isready")]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(said))))
        monkeypatch.setattr(sys, "argv", ["uci"])
        uci.main()
        printed = capsys.readouterr()
        assert printed.err == ""
        return [part.strip().splitlines() for part in printed.out.split("readyok\n")]

    return talk


def test_moves_end_before_an_illegal_one(capsys):
    for said in ("e1g1", "e1h1"):  # some programs write castling the second way
        board = uci.read_position(["fen", *CASTLING.split(), "moves", said])
        assert board.fen() == "r3k2r/8/8/8/8/8/8/R4RK1 b kq - 1 1"
    for illegal in ("e2e5", "0000", "hello", "♔"):
        board = uci.read_position(["startpos", "moves", "d2d4", "d7d5", illegal, "g1f3"])
        assert [move.uci() for move in board.move_stack] == ["d2d4", "d7d5"]
        assert capsys.readouterr().out.startswith(f"info string {illegal} is illegal in {board.fen()}")


def test_moves_are_ranked_by_their_probability_after_the_header(byte_model, monkeypatch):
    board, list_made, padding = chess.Board(PROMOTION), "M: a7a8q h2g1 E: 9.0 -1.0 ", " " * (90 - len(PROMOTION))
    moves = [move.uci() for move in board.legal_moves]

    def check(before):
        ranked = dict(zip(moves, uci.rank(byte_model, board, moves).tolist()))
        for move in ("a7a8q", "h2g1"):  # of five letters and of four
            tokens = list(f"{before} {move}".encode())
            with torch.no_grad():
                logprobs = byte_model(torch.tensor([tokens])).log_softmax(-1)[0]
            expected = sum(logprobs[i - 1, tokens[i]].item() for i in range(len(before), len(tokens)))
            assert ranked[move] == pytest.approx(expected, abs=1e-4)

    check(f"P: {positions.expand_board(PROMOTION)}".ljust(94) + "M:")
    monkeypatch.setitem(byte_model.config.extra, "chess_format", "rookworld")
    for said, header in ((f"{list_made}B: a7a8q", f"{list_made}B:"), ("nonsense", f"{padding}M:")):
        answer = Answer(None, said, [], False)
        monkeypatch.setattr(uci, "sample", lambda *_, answer=answer, **__: [SimpleNamespace(answers=[answer])])
        check(f"P: {PROMOTION}{header}")


def test_the_likeliest_move_is_played_and_a_temperature_draws(byte_model, monkeypatch, capsys):
    board, chances = chess.Board(PROMOTION), {"h2g1": 0.5, "a7a8q": 0.25, "a7a8n": 0.125}
    logprobs = lambda _, board, moves: torch.tensor([chances.get(move, 1e-9) for move in moves]).log()  # noqa: E731
    monkeypatch.setattr(uci, "rank", logprobs)
    assert uci.choose(byte_model, board, 0.0) == uci.choose(byte_model, board, 0.01) == "h2g1"
    assert capsys.readouterr().out.startswith("info string h2g1 57%, a7a8q 29%, a7a8n 14%, ")
    torch.manual_seed(0)
    drawn = [uci.choose(byte_model, board, 1.0) for _ in range(200)]
    assert set(drawn) == set(chances) and 95 < drawn.count("h2g1") < 135


def test_garbage_is_ignored_and_what_waits_answers_at_stop_alone(talk):
    rng = random.Random(0)
    garbage = ["joho debug on", "ucinewgame", "", "   ", "bestmove e2e4", "stop", "ponderhit", "Go", "x" * 100_000]
    garbage += [rng.randbytes(rng.randrange(200)).replace(b"\n", b"") for _ in range(300)]
    too_long = f"position fen {CASTLING.rsplit(' ', 1)[0]} {'1' * 1000}"  # it would make a prompt of any length
    wrong = "position", "position fen \xff\xfe w", "position startpos moves e2e5", "setoption", too_long
    start = ["position startpos", "go infinite"]
    searches = start, ["stop"], ["go infinite", "go"], start
    ignored, *refused, searching, stopped, two, _, last = talk(garbage, *([line] for line in wrong), *searches)
    assert ignored == [] and len(refused) == len(wrong)
    for [said] in refused:
        assert said.startswith("info string ")
    assert searching and not [line for line in searching if line.startswith("bestmove")]
    [said] = stopped
    assert said.split()[1] in {move.uci() for move in chess.Board().legal_moves}
    assert [line.split()[0] for line in two].count("bestmove") == 2  # the first one is answered first
    [said] = last  # the end of the input is answered
    assert said.startswith("bestmove ")


@pytest.mark.slow
def test_it_plays_itself(tmp_path):
    """python-chess's client raises at any illegal move and at any line out of turn."""
    where = dict(cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable})
    with chess.engine.SimpleEngine.popen_uci(str(ROOT / "tools" / "chess_uci.sh"), timeout=PATIENCE, **where) as engine:
        engine.configure({"Temperature": 50})
        board = chess.Board()
        for limit in Limit(white_clock=60, black_clock=60), Limit(nodes=1), Limit(depth=1), *[Limit(time=0.001)] * 9:
            result = engine.play(board, limit, info=chess.engine.INFO_ALL)
            assert board.is_legal(result.move) and result.info["pv"] == [result.move]
            board.push(result.move)
        asked = [chess.Move.from_uci("a2a3")]
        assert engine.play(chess.Board(), Limit(depth=1), root_moves=asked).move == asked[0]
        for fen, score in ((MATED, Mate(-0)), (STALEMATE, Cp(0))):
            result = engine.play(chess.Board(fen), Limit(depth=1), info=chess.engine.INFO_SCORE)
            assert result.move is None and result.info["score"].relative == score
        engine.quit()
        assert engine.protocol.returncode.result() == 0
