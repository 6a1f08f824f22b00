"""The tables and pictures of docs/what-rl-does.md, from policies that are known."""

import os
import re
import subprocess

import numpy as np
import pytest
import torch

from experiments import study
from nanorook.settings import SETTINGS
from nanorook.task import Grade, Question
from tools import compare, exact, exact_gradient
from toy import ROOT, program

RIGHT = np.array([[True, False, False], [False, True, False]])


def policy(*rows):
    return compare.Policy(np.array(rows), RIGHT, np.ones_like(RIGHT))


START = policy((0.2, 0.5, 0.3), (0.3, 0.1, 0.5))  # no most likely answer is right; 0.1 of the second is unlisted
AFTER = policy((0.6, 0.2, 0.2), (0.7, 0.1, 0.2))  # the first one is found, a wrong answer of the second gains 0.4


def test_gains_are_taken_position_by_position():
    head, start, gain = study.skill_rows(START, {"run": [AFTER]})
    before, gains = dict(zip(head, start)), dict(zip(head, gain))
    assert before["pass@1"] == "15.0" and before["other"] == "5.0"
    assert gains["likeliest"].startswith("+50.0 ±") and gains["pass@1"].startswith("+20.0 ±")
    _, _, both = study.skill_rows(START, {"two seeds": [AFTER, AFTER]})
    assert dict(zip(head, both))["pass@1"].startswith("+20.0 ±")


def test_a_run_is_shown_with_its_control():
    head, likeliest, once, *_ = study.run_and_control_rows(START, [AFTER], [START])
    assert head == ["", "before", "after", "gain", "gain of the shuffled control"]
    assert likeliest[:3] == ["mates found, likeliest", "0.0", "50.0"]
    assert once[:3] == ["mates found pass@1", "15.0", "35.0"]
    assert once[3].startswith("+20.0 ±") and once[4].startswith("+0.0 ±")


def test_runs_that_were_stopped_are_left_out(tmp_path):
    for name, record in {"seed-0": '{"finished": "today"}', "seed-1": "{}", "seed-2": None}.items():
        (tmp_path / "plain" / name / "model").mkdir(parents=True)
        if record:
            (tmp_path / "plain" / name / "run.json").write_text(record)
    assert [model.parent.name for model in study.models_in(tmp_path)["plain"]] == ["seed-0", "seed-2"]


def test_a_policy_is_kept_for_these_weights_and_questions_alone(tmp_path, monkeypatch):
    known = iter([START, AFTER, START])
    monkeypatch.setattr(study.architectures, "load", lambda weight: torch.nn.ParameterList([torch.tensor(weight)]))
    monkeypatch.setattr(study.compare, "policy", lambda model, questions: next(known))
    question = exact.Listed(Question("mates", "prompt", None), ["a"], [Grade((("legal", 1.0),), {})])

    def kept(weight, questions):
        return study.policy_of(weight, questions, tmp_path / "policies", "cpu").whole.tolist()

    assert kept(1.0, [question]) == kept(1.0, [question]) == START.whole.tolist()
    assert kept(2.0, [question]) == AFTER.whole.tolist()
    assert kept(2.0, [question, question]) == START.whole.tolist()


def test_what_moved_is_counted():
    head, row = study.change_rows(START, {"run": [AFTER]})
    counted = dict(zip(head, row))
    assert counted["mate likelier"].startswith("50.0 ±")  # that of the second fell, of what is listed
    assert counted["a wrong move gained"].startswith("50.0 ±")


@pytest.mark.parametrize("draw", [study.draw_pass_at_k, study.draw_policies])
def test_a_picture_names_its_settings(draw, tmp_path):
    draw(START, {"plain": [AFTER], "best of 4": [AFTER, AFTER]}, tmp_path / "picture.svg")
    assert "best of 4" in (tmp_path / "picture.svg").read_text()


def test_the_front_is_drawn_from_the_table_alone(tmp_path):
    models = {"plain, one seed": [AFTER], "exact gradient, log, 2 seeds": [AFTER, AFTER]}
    study.draw_front(study.skill_rows(START, models), tmp_path / "front.svg")
    assert "exact gradient, log, 2 seeds" in (tmp_path / "front.svg").read_text()


def test_the_script_makes_the_folders_that_the_tables_read(tmp_path):
    """With a Python that makes nothing, and says what it is asked for, an argument on each line."""
    python = program(tmp_path / "python", """case "$*" in -c*) ;; *) printf '%s\\n' "$@";; esac""")
    command = [str(ROOT / "experiments" / "study.sh"), str(tmp_path / "out")]
    said = subprocess.run(command, env=os.environ | {"PYTHON": python}, capture_output=True, text=True, check=True)
    made = {"plain/control-*", "default/control-*"}
    made |= {f"{folder}/seed-*" for folder in re.findall("(exact-[^/]+)/seed-", said.stdout)}
    for variant in re.findall("^([a-z0-9 ]+): ", said.stdout, re.MULTILINE):
        made.add(f"{variant.replace(' ', '-')}/seed-*")
    assert made == {*study.RUNS}
    assert exact_gradient.OBJECTIVE and {*re.findall(r"\b([A-Z][A-Z_]+)=", said.stdout)} <= {*SETTINGS}
