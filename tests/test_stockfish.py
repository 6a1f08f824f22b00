import os

import chess
import chess.engine
import pytest

from rook import stockfish
from rook.stockfish import NODES, Engine, EngineError
from tools.chess_label import require
from toy import program

OPENING = "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3"
MIDDLE_GAME = "r4rk1/1pp1qppp/p1np1n2/2b1p1B1/2B1P1b1/P1NP1N2/1PP1QPPP/R4RK1 w - - 0 10"
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
MATED_SOON = "7k/R7/1R6/8/8/8/8/7K b - - 0 1"  # one legal move, then Rb8
needs_stockfish = pytest.mark.needs("stockfish")


@pytest.fixture
def engine():
    engine = Engine(require())
    yield engine
    engine.close()


@needs_stockfish
def test_labels_are_those_of_python_chess_s_engine(engine):
    board, depths = chess.Board(MIDDLE_GAME), {}
    with chess.engine.SimpleEngine.popen_uci(require()) as other:
        other.configure({"Threads": 1, "Hash": 16})
        with other.analysis(board, chess.engine.Limit(nodes=NODES), multipv=5, game=object()) as analysis:
            for line in analysis:
                if "multipv" in line and not {"upperbound", "lowerbound"} & line.keys():
                    label = line["pv"][0].uci(), line["score"].relative.score()
                    depths.setdefault(line["depth"], {}).setdefault(line["multipv"], label)
    lines = depths[max(depth for depth, lines in depths.items() if len(lines) == 5)]
    expected = tuple(lines[i] for i in range(1, 6))
    assert engine.search(board, 3 * NODES, afresh=False) != expected  # fills its table
    assert engine.search(board, NODES) == expected
    assert engine.search(chess.Board(MATE_IN_ONE), 2000)[0] == ("a1a8", 99999)
    assert len(engine.search(chess.Board(OPENING), 1)) == 5  # nodes are doubled until a depth is finished
    assert engine.search(chess.Board(MATED_SOON), 2000) == (("h8g8", -99999),)


def info(depth, rank, score, move):
    return f"info depth {depth} seldepth 9 multipv {rank} score {score} nodes 9 pv {move}"


def test_evaluations_come_from_one_finished_depth(tmp_path):
    """Here the nodes run out in depth 3, and depth 2 was first reported with a bound."""
    lines = [info(2, 1, "cp 70 lowerbound", "a1b1")]
    lines += [info(2, 1, "cp 5", "a1b2"), info(2, 2, "mate -3", "a1b1"), info(2, 3, "cp 8", "a1a2")]
    lines += [info(3, 1, "mate 2", "a1a2"), info(2, 2, "cp 5", "a1b2"), info(2, 3, "cp 3", "a1b1")]
    said = "; ".join(f"echo '{line}'" for line in [*lines, "bestmove a1a1"])
    loop = f"while read word rest; do case $word in uci) echo uciok;; go) {said};; esac; done"
    engine = Engine(program(tmp_path / "engine", loop))
    moves = engine.search(chess.Board("7k/8/8/8/8/8/8/K7 w - - 0 1"), NODES)
    assert moves == (("a1a2", 8), ("a1b2", 5), ("a1b1", -99997))
    engine.close()


@pytest.mark.parametrize("text", ["exec sleep 100", "exit 1"])
def test_an_engine_that_fails_when_it_starts_leaves_no_process(tmp_path, monkeypatch, text):
    monkeypatch.setattr(Engine, "TIMEOUT", 1.0)
    with pytest.raises(EngineError, match="died|gave no answer for 1 seconds"):
        Engine(program(tmp_path / "engine", f"echo $$ > {tmp_path}/pid\n{text}"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_missing_program_is_one_sentence(monkeypatch):
    monkeypatch.setenv("STOCKFISH_PATH", "/no/such")
    stockfish.labelling_engine.cache_clear()
    with pytest.raises(SystemExit, match="STOCKFISH_PATH is /no/such, which is not a program"):
        stockfish.label(OPENING)
    monkeypatch.delenv("STOCKFISH_PATH")
    monkeypatch.setattr(stockfish.shutil, "which", lambda *args, **options: None)
    with pytest.raises(SystemExit, match="apt install stockfish"):
        require()
    assert stockfish.label(OPENING) == ()  # grades by the rules alone


@pytest.mark.parametrize("text", ["exit 1", "exec sleep 100", "while read x; do echo uciok; echo bestmove e9e9; done"])
def test_a_run_whose_engine_fails_ends_in_one_sentence(tmp_path, monkeypatch, text):
    monkeypatch.setenv("STOCKFISH_PATH", program(tmp_path / "engine", text))
    monkeypatch.setattr(Engine, "TIMEOUT", 0.1)
    stockfish.labelling_engine.cache_clear()
    with pytest.raises(SystemExit, match="error: Stockfish .*: label the positions beforehand with tools.chess_label"):
        stockfish.label(OPENING)
    stockfish.labelling_engine.cache_clear()


@needs_stockfish
def test_labels_of_a_run_are_those_of_an_engine_of_its_own(engine):
    stockfish.labelling_engine.cache_clear()
    for fen in (OPENING, MIDDLE_GAME):
        assert stockfish.label(fen) == engine.search(chess.Board(fen))
    assert os.getsid(engine.process.pid) != os.getsid(0)  # Ctrl-C does not reach it: a step is finished first
    stockfish.labelling_engine().close()
    stockfish.labelling_engine.cache_clear()
