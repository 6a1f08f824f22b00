"""tools/label.py against python-chess and its own Stockfish interface; it needs Stockfish, as the tool does."""

import gzip
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chess
import chess.engine
import pytest

import data
import tasks
from engine import named_or_installed
from tools import label

ROOT = Path(__file__).parent.parent
STOCKFISH = named_or_installed()
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
MATED = "R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 0 1"
MATED_SOON = "7k/R7/1R6/8/8/8/8/7K b - - 0 1"  # one legal move, then Rb8
BLACK_WINS = "4k3/8/8/8/8/8/q7/6K1 b - - 0 1"


@pytest.fixture(autouse=True)
def stockfish_is_there():
    assert STOCKFISH, "The labels are Stockfish's, which is not there; install it: apt-get install stockfish."


def start(*args, **env):
    command, env = [sys.executable, "-m", "tools.label", *map(str, args)], {**os.environ, **env}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=-1, stderr=-1, start_new_session=True)


def run(*args, **env):
    process = start(*args, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def refused(*args, **env):
    """The one sentence with which the tool ends."""
    code, out, err = run(*args, **env)
    sentence = err.strip().splitlines()[-1]
    assert code != 0 and "Traceback" not in err
    return sentence


GAMES = "--positions", 100, "--nodes", 300


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A small run that nobody disturbed, with one worker."""
    out = tmp_path_factory.mktemp("unbroken") / "positions.txt"
    code, _, err = run(out, *GAMES, "--workers", 1)
    assert code == 0, err
    assert [p.name for p in out.parent.iterdir()] == ["positions.txt"]  # nothing is left over
    return out.read_bytes()


def test_every_line_is_a_position_with_its_best_moves_first(unbroken):
    positions = [data.read_position(line) for line in unbroken.decode().splitlines()]
    assert len({tasks.board_key(p.fen) for p in positions}) == len(positions) == 100
    assert {p.fen.split()[1] for p in positions} == {"w", "b"}
    assert max(len(p.history) for p in positions) == 10
    for position in positions:
        board = chess.Board(position.fen)
        legal = {move.uci() for move in board.legal_moves}
        names, scores = zip(*position.moves)
        assert board.is_valid() and len(set(names)) == len(names) == min(5, len(legal)) and legal.issuperset(names)
        assert list(scores) == sorted(scores, reverse=True)
        if len(position.history) < 10:  # from the game's first move
            game = chess.Board()
            for uci in position.history:
                game.push_uci(uci)
            assert game.fen() == position.fen
        last = chess.Move.from_uci(position.history[-1]) if position.history else None
        assert last is None or board.color_at(last.from_square) is None
        assert last is None or board.color_at(last.to_square) == (not board.turn)


def test_labels_are_those_of_python_chess_s_engine(tmp_path):
    fens = [
        "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3",
        "r4rk1/1pp1qppp/p1np1n2/2b1p1B1/2B1P1b1/P1NP1N2/1PP1QPPP/R4RK1 w - - 0 10",
    ]
    (tmp_path / "fens.txt").write_text("\n".join(fens) + "\n")
    assert run(tmp_path / "out.txt", "--from", tmp_path / "fens.txt", "--nodes", 6000)[0] == 0
    positions = data.load(str(tmp_path / "out.txt"))
    assert [p.fen for p in positions] == fens
    with chess.engine.SimpleEngine.popen_uci(STOCKFISH) as engine:
        engine.configure({"Threads": 1, "Hash": 16})
        for position in positions:
            board, depths = chess.Board(position.fen), {}
            with engine.analysis(board, chess.engine.Limit(nodes=6000), multipv=5, game=object()) as analysis:
                for info in analysis:
                    if "multipv" in info and not {"upperbound", "lowerbound"} & info.keys():
                        depths.setdefault(info["depth"], {}).setdefault(info["multipv"], info)
            deepest = max(depth for depth, infos in depths.items() if len(infos) == 5)
            expected = [depths[deepest][rank] for rank in range(1, 6)]
            assert position.moves == tuple((i["pv"][0].uci(), i["score"].relative.score()) for i in expected)


def test_mates_finished_games_and_twins_of_a_fen_list(tmp_path):
    twin = chess.Board(MATE_IN_ONE).mirror().fen()
    fens = [MATE_IN_ONE, MATED, MATED_SOON, BLACK_WINS, twin]
    with gzip.open(tmp_path / "fens.txt.gz", "wt") as file:
        file.write("\n".join(fens) + "\n")
    code, out, err = run(tmp_path / "out.txt.gz", "--from", tmp_path / "fens.txt.gz", "--nodes", 2000)
    assert code == 0 and "3 positions (2 left out" in out, err
    mate, mated, black = data.load(str(tmp_path / "out.txt.gz"))
    assert mate.moves[0] == ("a1a8", 99999)
    assert mated.moves == (("h8g8", -99999),)
    assert black.moves[0][1] > 500  # from the side to move's view
    assert (tmp_path / "out.txt.gz").read_bytes()[4:8] == bytes(4)  # no time in a gzip header: same labels, same bytes


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [grand for child in children for grand in descendants(child)]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_killed_and_resumed_with_other_workers_is_as_if_never_killed(tmp_path, unbroken):
    out, partial = tmp_path / "positions.txt", tmp_path / "positions.txt.partial"
    process = start(out, *GAMES, "--workers", 2)
    wait_for(lambda: partial.exists() and b"# unit 0\n" in partial.read_bytes())
    family = descendants(process.pid)
    process.kill()
    process.communicate()
    assert not out.exists() and len(family) >= 4  # two workers, two engines
    wait_for(lambda: not any(map(alive, family)))  # a killed parent leaves nobody behind

    kept = partial.read_bytes() + b"rnbqkbnr/pppp"  # killed in the middle of a line
    partial.write_bytes(kept)
    assert "was begun with other settings" in refused(out, *GAMES, "--seed", 1)
    assert partial.read_bytes() == kept
    code, said, err = run(out, *GAMES, "--workers", 3)
    done = kept[: kept.rindex(b"# unit ")].count(b";") // 2
    assert code == 0 and done > 0 and f"Going on with {partial}: {done} positions are done." in said, err
    assert out.read_bytes() == unbroken and not partial.exists()
    assert "is there already" in refused(out, *GAMES)
    assert out.read_bytes() == unbroken


def test_a_partial_file_cut_at_any_byte_keeps_its_whole_units(tmp_path):
    partial, header = tmp_path / "partial", b'{"seed": 0}\n'
    units = [b"a;;x:1\nb;;y:2\n# unit 0\n", b"# unit 1\n", b"c;;z:3\n# unit 2\n"]
    text = header + b"".join(units)
    for cut in range(len(text) + 1):
        partial.write_bytes(text[:cut])
        whole = [unit for i, unit in enumerate(units) if len(header + b"".join(units[: i + 1])) <= cut]
        lines, count = label.resume(partial, header)
        assert count == len(whole)
        assert "".join(lines).encode() == re.sub(rb"# unit .\n", b"", b"".join(whole))
        assert partial.read_bytes() == header + b"".join(whole)


def test_ctrl_c_leaves_with_a_sentence_and_loses_nothing(tmp_path, unbroken):
    out, partial = tmp_path / "positions.txt", tmp_path / "positions.txt.partial"
    process = start(out, *GAMES, "--workers", 2)
    wait_for(lambda: partial.exists() and b"# unit 0\n" in partial.read_bytes())
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers and their engines get it too
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "Traceback" not in err
    assert err.strip().splitlines()[-1] == f"Stopped; the same command goes on from {partial}."
    wait_for(lambda: not any(map(alive, family)))
    assert run(out, *GAMES)[0] == 0
    assert out.read_bytes() == unbroken


def script(path, text):
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_an_engine_that_dies_once_is_started_again(tmp_path, unbroken):
    dies = f"""[ -e {tmp_path}/died ] && exec {STOCKFISH}
        while read word rest; do case $word in uci) echo uciok;; go) touch {tmp_path}/died; exit 1;; esac; done"""
    engine = script(tmp_path / "engine", dies)
    code, _, err = run(tmp_path / "out", *GAMES, "--workers", 1, STOCKFISH_PATH=engine)
    assert code == 0 and (tmp_path / "died").exists(), err
    assert (tmp_path / "out").read_bytes() == unbroken


def test_what_is_done_is_not_asked_again(tmp_path):
    """The engine dies on a position of the second unit; the next run asks for what is missing and knows the twins."""
    boards, rng = [chess.Board()], random.Random(0)
    while len(boards) < 2 * label.CHUNK:
        boards.append(boards[-1].copy())
        boards[-1].push(rng.choice(list(boards[-1].legal_moves)))
    fens = [board.fen() for board in boards]
    twin = boards[3].mirror().fen()
    (tmp_path / "fens").write_text("\n".join([*fens, twin]))
    arguments = tmp_path / "out", "--from", tmp_path / "fens", "--nodes", 300, "--workers", 1

    marker = fens[label.CHUNK + 2].split()[0].replace("/", ".")
    dies = script(tmp_path / "dies", f"sed -u '/{marker}/q' | {STOCKFISH}")
    assert refused(*arguments, STOCKFISH_PATH=dies) == f"Stockfish ({dies}) died, and again after a restart."
    listens = script(tmp_path / "listens", f"tee -a {tmp_path}/heard | {STOCKFISH}")
    code, said, err = run(*arguments, STOCKFISH_PATH=listens)
    assert code == 0 and f"{label.CHUNK} positions are done" in said and "(1 left out" in said, err
    heard = re.findall(r"position fen (.*)", (tmp_path / "heard").read_text())
    assert heard == [*fens[label.CHUNK :], twin]
    assert [p.fen for p in data.load(str(tmp_path / "out"))] == fens


def test_an_engine_that_is_missing_or_broken_is_one_sentence(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert "STOCKFISH_PATH is /no/such" in refused(out, STOCKFISH_PATH="/no/such")
    assert refused(out, STOCKFISH_PATH="/bin/false") == "Stockfish (/bin/false) died."
    answers = 'while read word; do case $word in uci) echo uciok;; go*) echo "$ANSWER"; echo bestmove a1a1;; esac; done'
    engine = script(tmp_path / "engine", answers)
    for answer in "I resign", *[f"info depth 1 multipv {rank} score cp 9 pv a1a1" for rank in (1, 2)]:
        sentence = refused(out, "--workers", 1, STOCKFISH_PATH=engine, ANSWER=answer)
        assert sentence.startswith(f"Stockfish ({engine}) gave no legal moves for ")
        assert sentence.endswith(", and again after a restart.")
    assert not out.exists()

    monkeypatch.setattr(label.Engine, "SILENCE", 0.1)
    with pytest.raises(label.EngineError, match="said nothing for 0.1 seconds"):
        label.Engine("/bin/cat")
    monkeypatch.delenv("STOCKFISH_PATH", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    with pytest.raises(SystemExit, match="apt install stockfish"):
        label.find_stockfish()


def test_bad_arguments_are_one_sentence(tmp_path):
    assert str(tmp_path / "none.txt") in refused(tmp_path / "out", "--from", tmp_path / "none.txt")
    assert "argument --nodes: invalid" in refused(tmp_path / "out", "--nodes", 0)
    assert refused(tmp_path / "no" / "out") == f"{tmp_path}/no/out cannot be written: No such file or directory."
    assert list(tmp_path.iterdir()) == []


def test_describe_counts_what_the_file_consists_of(tmp_path, unbroken):
    (tmp_path / "positions.txt").write_bytes(unbroken)
    code, out, err = run(tmp_path / "positions.txt", "--describe")
    assert code == 0, err
    counts = {what: int(count) for what, count in re.findall(r"^\| (.+?) \| (\d+) \|", out, re.M)}
    positions = [data.read_position(line) for line in unbroken.decode().splitlines()]
    assert counts["White to move"] == sum(" w " in p.fen for p in positions) == 100 - counts["Black to move"]
    assert counts["held out"] == sum(map(tasks.held_out, (p.fen for p in positions)))
    pieces = [len(re.findall("[NBRQ]", p.fen.split()[0].upper())) for p in positions]
    assert counts["few (at most 6)"] == sum(n <= 6 for n in pieces) > 0
