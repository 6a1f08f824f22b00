import os
import sys
from types import SimpleNamespace

import chess
import chess.engine
import pytest
import torch
from chess.engine import Limit

from rollout import Answer
from rook import positions
from tools import chess_uci as uci
from toy import ROOT

PATIENCE = 200  # seconds; only a program that hangs needs them, or a machine that is very busy
MATED = "rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3"
CASTLING = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"
PROMOTION = "8/P6k/8/8/8/8/7K/8 w - - 0 1"


def test_a_conversation(monkeypatch, capsys, byte_model):
    said = ["uci", "isready", "joho", "ucinewgame", "stop", "position startpos", "go nodes 1", "stop"]
    said += ["position startpos moves e2e5", f"position fen {PROMOTION} moves a7a8q h7h8", "position fen x", "go"]
    said += [f"position fen {PROMOTION} moves a7a8q h7g7", "go infinite", "isready", "stop", "quit", "go"]
    monkeypatch.setattr(uci.architectures, "load", lambda name: byte_model)
    monkeypatch.setattr(sys, "stdin", said)
    monkeypatch.setattr(sys, "argv", ["uci"])
    monkeypatch.setattr(uci, "choose", lambda model, board, temperature: board.fen())
    uci.main()
    heard = capsys.readouterr().out.splitlines()
    moves = [line.removeprefix("bestmove ") for line in heard if line.startswith("bestmove")]
    assert moves == [chess.STARTING_FEN] * 2 + ["Q7/6k1/8/8/8/8/7K/8 w - - 1 2"]
    assert heard[-2] == "readyok" and sum("so the position stays what it was" in line for line in heard) == 3
    assert "uciok" in heard and len(heard) == 12


def test_castling_is_read_in_both_ways():
    for said in ("e1g1", "e1h1"):
        board = uci.read_position(["fen", *CASTLING.split(), "moves", said])
        assert board.fen() == "r3k2r/8/8/8/8/8/8/R4RK1 b kq - 1 1"


def test_moves_are_ranked_by_their_probability_after_the_header(byte_model, monkeypatch):
    board, list_made = chess.Board(PROMOTION), "M: a7a8q h2g1 E: 9.0 -1.0 "
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
    answer = Answer(None, f"{list_made}B: a7a8q", [], False)
    monkeypatch.setattr(uci, "sample", lambda *_, **__: [SimpleNamespace(answers=[answer])])
    check(f"P: {PROMOTION}{list_made}B:")


def test_the_likeliest_move_is_played_and_a_temperature_draws(byte_model, monkeypatch, capsys):
    board, chances = chess.Board(PROMOTION), {"h2g1": 0.5, "a7a8q": 0.25, "a7a8n": 0.125}
    logprobs = lambda _, board, moves: torch.tensor([chances.get(move, 1e-9) for move in moves]).log()  # noqa: E731
    monkeypatch.setattr(uci, "rank", logprobs)
    assert uci.choose(byte_model, board, 0.0) == uci.choose(byte_model, board, 0.01) == "h2g1"
    assert capsys.readouterr().out.startswith("info string h2g1 57%, a7a8q 29%, a7a8n 14%, ")
    torch.manual_seed(0)
    drawn = [uci.choose(byte_model, board, 1.0) for _ in range(200)]
    assert set(drawn) == set(chances) and 95 < drawn.count("h2g1") < 135


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
        assert engine.play(chess.Board(MATED), Limit(depth=1)).move is None
        engine.quit()
        assert engine.protocol.returncode.result() == 0
