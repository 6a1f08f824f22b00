from types import SimpleNamespace
from unittest import mock

import chess
import pytest

import rewards
import toy
from nanorook import settings
from tools import ask

FEN, TOY = chess.STARTING_FEN, f"TASK={toy.__file__}"
NEXT = "rnbqkbnr/pppppppp/......../......../....P.../......../PPPP.PPP/RNBQKBNR b KQkq - 0 1+0.001+0+0"


def output(capsys, *words):
    precision = mock.patch.dict("os.environ", DTYPE="float32")  # which of the two is faster takes a second to measure
    with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN), precision:
        with mock.patch("sys.argv", ["ask", *words]):
            settings.read_user()
            ask.main()
    return capsys.readouterr().out


def test_chess(capsys):
    lines = output(capsys, "weights/tiny", *f"{FEN} e2e4".split(), "--answers", "2").splitlines()
    assert lines[0].startswith("environment: ") and lines[0].endswith("+e2e4+e2e4+") and lines[1][12:] == NEXT
    question = rewards.question(f"{FEN} e2e4", SimpleNamespace(extra={}))
    for answer, grade in zip(lines[1:7:2], lines[2:7:2], strict=True):
        assert f"{rewards.grade(question, answer[12:]).reward:.4g}" == grade.split()[0]
    assert lines[7].startswith(f"reference answer: ('{question.truth[0]}', 0.001, False, False)"[:110])


def test_another_seed_gives_other_samples(capsys, toy_model):
    one, other = (output(capsys, toy_model, "37+58=", TOY, f"SEED={seed}").splitlines() for seed in (0, 1))
    assert one[:2] == other[:2] and one[2:] != other[2:]


def test_the_truth_of_a_position_is_what_the_engine_says_and_a_few_of_the_legal_moves(capsys, monkeypatch):
    monkeypatch.setitem(rewards.LIMITS, "policy", 8)
    monkeypatch.setattr(rewards.stockfish, "label", lambda fen: (("e2e4", 30), ("g1f3", 28)))
    told = [line for line in output(capsys, "weights/tiny", FEN, "--answers", "1").splitlines() if "reference" in line]
    found = dict(line.removeprefix("reference answer, ").split(": ", 1) for line in told)
    assert "e2e4" in found["five"] and "g1h3" in found["legal"] and found["legal"].endswith(" ...")


@pytest.mark.parametrize("fen", [FEN, FEN.rsplit(" ", 2)[0]])
def test_a_move_may_be_asked_about_in_either_notation(fen, byte_model):
    moves = "Nf3", "g1f3", "e4", "e2e4", "g1g3"
    asked = {move: rewards.question(f"{fen} {move}", byte_model.config) for move in moves}
    assert asked["Nf3"] == asked["g1f3"] and asked["e4"] == asked["e2e4"] != asked["Nf3"]
    assert asked["g1g3"].truth[3] and rewards.question(fen, byte_model.config).kind == "policy"


def test_other_tasks(capsys, toy_model):
    asked = output(capsys, toy_model, "k f q b t =", "TASK=examples/letters.py")
    assert asked.startswith("letters: k f q b t =\n  greedy -> ") and asked.endswith("\nreference answer: tqkfb\n")
    asked = output(capsys, toy_model, "37+58=", TOY)  # it has no `question`
    assert ": 37+58=\n  greedy ->" in asked and "reference answer:" not in asked and "\nnot graded: " in asked
    assert output(capsys, toy_model, TOY).count("\nreference answer: ") == ask.HELD_OUT


@pytest.fixture
def own_task(tmp_path):
    """The task of toy.py with these changes."""

    def write(text):
        (tmp_path / "own.py").write_text(f"from toy import *\n{text}\n")
        return f"TASK={tmp_path}/own.py"

    return write


def test_a_tasks_own_defaults_hold(capsys, toy_model, own_task):
    task = own_task(
        "DEFAULTS = dict(DATA='elsewhere', TEMPERATURE=0.5)\n"
        "load = lambda source, config: ([source], [source])\n"
        "make_questions = lambda items, count, rng, config: [Question('short', items[0], 7)]"
    )
    asked = output(capsys, toy_model, task)
    assert asked.startswith("short: elsewhere\n") and "  T=0.5  -> " in asked


def test_a_task_without_question_need_not_show_what_has_no_truth(capsys, toy_model, own_task):
    asked = output(capsys, toy_model, "WHERE ID=3", own_task("show = lambda question, text: str(question.truth % 10)"))
    assert ": WHERE ID=3\n  greedy ->" in asked and "\nnot graded: " in asked


def test_a_task_without_held_out_items(capsys, toy_model, own_task):
    with pytest.raises(SystemExit, match="error: DATA=builtin has no held-out items; provide more"):
        output(capsys, toy_model, own_task("load = lambda source, config: ([1], [])"))


WRONG = {
    "37+58=": "'37.58=' is not the FEN",
    f"{FEN} Nf4": "'Nf4' is not a legal move in rnbq",
    "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1 TASK=examples/mates.py": "no move",
    "hello TASK=examples/letters.py": "'hello' is not five different letters",
    f"37+58= {TOY} MY_OWN=3": "MY_OWN is not a setting of .*toy.py; leave it out",
    f"{'.' * 30} {TOY}": "30 tokens, which leaves no room",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_asked_is_one_sentence(text, capsys, toy_model):
    with pytest.raises(SystemExit, match=f"^error: .*{WRONG[text]}"):
        output(capsys, toy_model, *text.split())
