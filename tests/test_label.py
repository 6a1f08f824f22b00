import fcntl
import functools
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
from toy import ROOT, program

pytestmark = pytest.mark.needs("stockfish")
GAMES = "--positions", 100, "--nodes", 300


def start(*args, **env):
    command, env = [sys.executable, "-m", "tools.chess_label", *map(str, args)], {**os.environ, **env}
    options = {"cwd": ROOT, "env": env, "text": True, "stdout": -1, "stderr": -1, "start_new_session": True}
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    return subprocess.Popen(command, preexec_fn=hear, **options)


def run(*args, wrong="", **env):
    """What the tool printed, whose bar ends at 100 %; `wrong` is in the sentence with which it ends otherwise."""
    process = start(*args, **env)
    out, err = process.communicate(timeout=120)
    assert bool(process.returncode) == bool(wrong) and "Traceback" not in err, err
    assert (wrong or "100%") in err.splitlines()[-1]
    return out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "positions.txt"
    run(out, *GAMES, "--workers", 1)
    assert [file.name for file in out.parent.iterdir()] == ["positions.txt"]
    return out.read_bytes()


def test_every_line_is_a_position_with_its_best_moves_first(undisturbed):
    positions = [P.read_position(line) for line in undisturbed.decode().splitlines()]
    assert len({P.board_key(p.fen) for p in positions}) == len(positions) == 100
    assert {p.fen.split()[1] for p in positions} == {"w", "b"}
    for position in positions:
        board, game = chess.Board(position.fen), chess.Board()
        assert P.verify(position) == position and len(position.moves) == min(5, board.legal_moves.count())
        if len(position.history) < 10:  # from the game's first move
            for uci in position.history:
                game.push_uci(uci)
            assert game == board


def test_finished_games_and_mirrored_positions_are_left_out(tmp_path):
    mate_in_one, mated = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1", "R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 0 1"
    fens, start = [mate_in_one, mated, P.mirror_fen(mate_in_one)], chess.STARTING_FEN
    asked = [f"A: {start}+{move}+{move}+{start}+0.001+0+0" for move in ("e2e4", "d2d4")]  # one board, two moves
    (tmp_path / "fens").write_text("\n".join([*fens, *asked]))
    out = run(tmp_path / "out.txt.gz", "--from", tmp_path / "fens", "--nodes", 2000)
    assert "2 positions (1 left out" in out  # the mirrored one was not even loaded
    first, second = P.load(tmp_path / "out.txt.gz")
    assert first.moves[0] == ("a1a8", 99999) and second.fen == chess.STARTING_FEN


def test_positions_of_finished_games_alone_are_nothing_to_label(tmp_path):
    (tmp_path / "mated").write_text("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 0 1")
    run(tmp_path / "out.txt", "--from", tmp_path / "mated", wrong="there is nothing to label: no position of")
    assert [file.name for file in tmp_path.iterdir()] == ["mated"]


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


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_ended_and_resumed_with_other_workers_gives_the_same_file(how, tmp_path, undisturbed):
    out = tmp_path / "positions.txt"
    partial, process = Path(f"{out}.partial"), start(out, *GAMES, "--workers", 2)
    wait_for(lambda: partial.exists() and partial.read_bytes().count(b"\n") > 1)
    workers = children(process.pid)
    family = workers + [engine for worker in workers for engine in children(worker)]
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: workers and engines get the signal too
    else:
        process.kill()
    err = process.communicate(timeout=60)[1]
    assert not out.exists() and len(family) >= 4  # two workers, two engines
    if how == signal.SIGINT:
        assert err.strip().endswith(f"Stopped; the same command continues from {partial}.") and "Traceback" not in err
    wait_for(lambda: not any(map(alive, family)))
    kept = partial.read_bytes() + b"rnbqkbnr/pppp"  # ended in the middle of a line
    partial.write_bytes(kept)
    run(out, *GAMES, "--seed", 1, wrong="was started with other settings")
    with open(partial, "a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        run(out, *GAMES, wrong="is in use by another run")
    done = kept[: kept.rindex(b"\n")].count(b";") // 2
    assert done > 0 and f"Continuing {partial}: {done} positions are done." in run(out, *GAMES, "--workers", 3)
    assert out.read_bytes() == undisturbed and not partial.exists()
    run(out, *GAMES, wrong="already exists")


def test_a_partial_file_cut_at_any_byte_keeps_its_whole_units(tmp_path):
    partial, header = tmp_path / "partial", b'{"seed": 0}\n'
    a, b, c = (f"4k3/8/8/8/8/8/8/{rank} w - - 0 1;;e1e2:{cp}" for rank, cp in (("4K3", 1), ("4KB2", 2), ("4KN2", 3)))
    text, units = header + f"{a}\t{b}\n\n{c}\n".encode(), [[a, b], [], [c]]
    for cut in range(len(text) + 1):
        partial.write_bytes(text[:cut])
        whole = max(header, text[: text[:cut].rfind(b"\n") + 1], key=len)
        assert label.resume(open(partial, "a+b"), header) == units[: whole.count(b"\n") - 1]
        assert partial.read_bytes() == whole
    for damage in b"\xff", b"what", b"\x0b", b"\t":
        partial.write_bytes(damaged := text.replace(b"e1e2:2", b"e1e2:2" + damage))
        with pytest.raises(SystemExit, match="partial is damaged .*; delete it to start again"):
            label.resume(open(partial, "a+b"), header)
        assert partial.read_bytes() == damaged


@pytest.mark.slow
def test_an_engine_that_dies_once_is_started_again_and_a_missing_one_is_said(tmp_path, undisturbed):
    out, died = tmp_path / "out", tmp_path / "died"
    run(out, STOCKFISH_PATH="/bin/false", wrong="error: Stockfish (/bin/false) died.")
    run(out, "--from", tmp_path / "none.txt", wrong=str(tmp_path / "none.txt"))
    run(tmp_path, wrong=f"argument OUT: {tmp_path} cannot be written: it is a folder")
    assert list(tmp_path.iterdir()) == []
    text = f"""[ -e {died} ] && exec {label.require()}
        while read word rest; do case $word in uci) echo uciok;; go) touch {died}; exit 1;; esac; done"""
    run(out, *GAMES, "--workers", 1, STOCKFISH_PATH=program(tmp_path / "engine", text))
    assert died.exists() and out.read_bytes() == undisturbed
