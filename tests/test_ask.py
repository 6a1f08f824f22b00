import json
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
    with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN), mock.patch("sys.argv", ["ask", *words]):
        settings.read_user()
        ask.main()
    return capsys.readouterr().out


def test_chess(capsys, monkeypatch):
    monkeypatch.setitem(rewards.LIMITS, "policy", 30)  # cut off, which takes less time
    lines = output(capsys, "weights/tiny", *f"{FEN} e2e4".split(), "--answers", "2").splitlines()
    assert lines[0].startswith("environment: ") and lines[0].endswith("+e2e4+e2e4+") and lines[2][12:] == NEXT
    question = rewards.Question("environment", "", json.loads(lines[1].removeprefix("truth: ")))
    for answer, grade in zip(lines[2:8:2], lines[3:8:2], strict=True):
        assert f"{rewards.grade(question, answer[12:]).reward:.4g}" == grade.split()[0]
    one, other = (output(capsys, "weights/tiny", FEN, "--answers", "1", "--seed", s).splitlines() for s in "01")
    assert one[0].startswith("policy: P: rnbqkbnr/pppppppp/......../") and one[2] == other[2] and one[4:] != other[4:]


def test_other_tasks(capsys, toy_model):
    asked = output(capsys, toy_model, "k f q b t =", "TASK=examples/letters.py")
    assert asked.startswith('letters: k f q b t =\ntruth: "tqkfb"\n  greedy -> ')
    asked = output(capsys, toy_model, "37+58=", TOY)  # it has no `question`
    assert ": 37+58=\n  greedy ->" in asked and "truth:" not in asked and "\nnot graded: " in asked
    assert output(capsys, toy_model, TOY).count("\ntruth: ") == ask.HELD_OUT


WRONG = {"37+58=": "'37.58=' is not the FEN", "8/8/8/8/8/8/8/8 w - - 0 1": "is not the FEN"}
WRONG |= {"hello TASK=examples/letters.py": "'hello' is not five different letters"}
WRONG |= {"7k/5Q2/6K1/8/8/8/8/8 b - - 0 1 TASK=examples/mates.py": "no move"}
WRONG |= {"7k/5Q2/6K1/8/8/8/8/8 b - - 0 1": "no move", f"{'.' * 30} {TOY}": "30 tokens leaves no room"}


@pytest.mark.parametrize("text", WRONG)
def test_what_cannot_be_asked_is_one_sentence(text, capsys, toy_model):
    with pytest.raises(SystemExit, match=f"^error: .*{WRONG[text]}"):
        output(capsys, toy_model, *text.split())
