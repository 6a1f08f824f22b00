import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chess
import pytest

from rook import positions as P
from tools import chess_label as label
from toy import ROOT

pytestmark = pytest.mark.needs("stockfish")
GAMES = "--positions", "60", "--nodes", "300", "--workers"


@pytest.fixture
def run(monkeypatch, capsys):
    """run(argument, ...) is what the tool printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["label", *map(str, arguments)])
        label.main()
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "positions.txt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["label", str(out), *GAMES, "1"])
        label.main()
    assert [file.name for file in out.parent.iterdir()] == ["positions.txt"]
    return out.read_bytes()


def test_every_line_is_a_position_with_its_best_moves_first(undisturbed):
    positions = [P.read_position(line) for line in undisturbed.decode().splitlines()]
    assert len({P.board_key(p.fen) for p in positions}) == len(positions) == 60
    assert {p.fen.split()[1] for p in positions} == {"w", "b"}
    for position in positions:
        board, game = chess.Board(position.fen), chess.Board()
        assert P.verify(position) == position and len(position.moves) == min(5, board.legal_moves.count())
        if len(position.history) < 10:  # from the game's first move
            for uci in position.history:
                game.push_uci(uci)
            assert game == board


def test_the_embedded_labels_can_be_made_again(run, tmp_path):
    """They are from Stockfish 15.1, and each version has its own."""
    engine = label.Engine(label.require())
    engine.close()
    if engine.name != "Stockfish 15.1":
        give_up = pytest.fail if os.environ.get("NANOROOK_NO_SKIP") == "1" else pytest.skip
        give_up("needs Stockfish 15.1")
    lines = gzip.open(ROOT / "data/positions.txt.gz", "rt").readlines()[:20]
    (tmp_path / "fens").write_text("\n".join(line.split(";")[0] for line in lines))
    run(tmp_path / "out", "--from", tmp_path / "fens", "--workers", 1)
    again = (tmp_path / "out").read_text().splitlines()
    assert [line.split(";")[2] for line in again] == [line.strip().split(";")[2] for line in lines]


def test_finished_games_and_mirrored_positions_are_left_out(run, tmp_path, monkeypatch):
    mate_in_one, mated = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1", "R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 0 1"
    fens, start = [mate_in_one, mated, P.mirror_fen(mate_in_one)], chess.STARTING_FEN
    asked = [f"A: {start}+{move}+{move}+{start}+0.001+0+0" for move in ("e2e4", "d2d4")]  # one board, two moves
    (tmp_path / "fens").write_text("\n".join([*fens, *asked]))
    (tmp_path / "mated").write_text(mated)
    command = tmp_path / "out.txt.gz", "--workers", 1, "--nodes", 2000, "--from"
    with pytest.raises(SystemExit, match="there is nothing to label: no position of"):
        run(*command, tmp_path / "mated")
    monkeypatch.setenv("STOCKFISH_PATH", "/bin/false")
    with pytest.raises(SystemExit, match="error: Stockfish died; the same command continues"):
        run(*command, tmp_path / "fens")
    monkeypatch.delenv("STOCKFISH_PATH")
    assert "2 positions (1 left out" in run(*command, tmp_path / "fens")  # the mirrored one was not even loaded
    first, second = P.load(tmp_path / "out.txt.gz")
    assert first.moves[0] == ("a1a8", 99999) and second.fen == chess.STARTING_FEN


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ended_and_resumed_with_other_workers_gives_the_same_file(run, tmp_path, undisturbed):
    out = tmp_path / "positions.txt"
    partial, command = Path(f"{out}.partial"), [sys.executable, "-m", "tools.chess_label", str(out), *GAMES, "2"]
    hear = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a shell's background jobs ignore it
    process = subprocess.Popen(command, cwd=ROOT, stderr=-1, text=True, start_new_session=True, preexec_fn=hear)
    wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 1)
    workers = children(process.pid)
    family = workers + [engine for worker in workers for engine in children(worker)]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers and engines get the signal, too
    err = process.communicate(timeout=60)[1]
    assert not out.exists() and len(family) >= 4  # two workers, two engines
    assert err.strip().endswith(f"Stopped; the same command continues from {partial}.") and "Traceback" not in err
    wait_for(lambda: not any(map(alive, family)))
    kept = partial.read_bytes()
    partial.write_bytes(kept + b"rnbqkbnr/pppp")  # ended in the middle of a line
    with pytest.raises(SystemExit, match="was started with other settings"):
        run(out, *GAMES, 3, "--seed", 1)
    assert f"Continuing {partial}: {kept.count(b';') // 2} positions are done." in run(out, *GAMES, 3)
    assert out.read_bytes() == undisturbed and not partial.exists()
    with pytest.raises(SystemExit, match="already exists"):
        run(out, *GAMES, 3)


def test_a_partial_file_cut_at_any_byte_keeps_its_whole_units(tmp_path):
    partial, header = tmp_path / "partial", "header"
    text, units = f"{header}\na\tb\n\nc\n", [["a", "b"], [], ["c"]]
    for cut in range(len(header) + 1, len(text) + 1):
        partial.write_text(text[:cut])
        whole = text[: text[:cut].rfind("\n") + 1]
        assert label.resume(partial, header) == units[: whole.count("\n") - 1] and partial.read_text() == whole
