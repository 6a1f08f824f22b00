import json
import re
import sys
from statistics import fmean

import pytest

import toy
import train
from nanorook import settings, tables
from tools import evaluate


@pytest.fixture
def shown(toy_settings, monkeypatch, capsys):
    """What the command prints, with the task and the settings of toy.py: (its first line, {row: cells})."""

    def run(*arguments, **given):
        monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, arguments)])
        monkeypatch.setattr(settings, "GIVEN", settings.GIVEN | given)
        evaluate.main()
        first, _, *lines = capsys.readouterr().out.splitlines()
        return first, {line[0]: line[1:] for line in (re.split("  +", line) for line in lines)}

    return run


def test_the_table_is_that_of_the_run_which_made_the_model(shown, toy_run, toy_model, monkeypatch, tmp_path, capsys):
    toy_run(EVAL_POSITIONS=20)
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", None)  # the run's own figures are not measured again
        patch.setattr(sys, "argv", ["evaluate", str(tmp_path / "out")])
        capsys.readouterr()
        evaluate.main()
        printed = capsys.readouterr().out.splitlines()
    for more in ("EVAL_SAMPLES=4", "--training"):
        with pytest.raises(SystemExit, match=f"to evaluate with {more}, name .*/out/model"):
            shown(tmp_path / "out", more)
    monkeypatch.setattr(train, "EVAL_POSITIONS", 20)
    monkeypatch.setattr(train, "MODEL", toy_model)
    first, rows = shown(tmp_path / "out" / "model", run={"MODEL": toy_model})
    assert first.endswith(f"A is {toy_model}, B is {tmp_path}/out/model") and len(rows) == 9
    names = {"A": "before", "B": "after"}
    for name, cells in rows.items():
        assert [name, *(names.get(cell, cell) for cell in cells)] in [re.split("  +", line) for line in printed]
    skill = json.loads((tmp_path / "out" / "skill.json").read_text())
    values = [skill[title]["short reward T=1"][2] for title in ("before", "after")]
    gain = tables.with_interval(*tables.gain(*values)[:2], "+.3f")
    assert rows["short reward, sampled"][2].removesuffix(" *") == gain and values[0] != values[1]


def test_a_runs_model_is_compared_with_what_it_began_with_whatever_it_is_asked(shown, toy_model, tmp_path):
    (tmp_path / "own.py").write_text(
        f"DEFAULTS, LIMITS = {{}}, {{'q': 1}}\ndef start_model():\n    return {toy_model!r}\n"
        "def load(source, config): ...\ndef make_questions(items, count, rng, config): ...\n"
        "def grade(question, text, hit_limit): ...\n"
    )
    first, _ = shown(toy_model, run={"TASK": str(tmp_path / "own.py")})  # toy's own start_model returns None
    assert first == f"4 held-out questions of {toy.__file__}: A is {toy_model}, B is {toy_model}"


def test_a_start_model_that_was_made_again_is_not_taken_for_the_old_one(shown, toy_run, tmp_path, monkeypatch, capsys):
    start = tmp_path / "start"
    toy.model().save(start)
    monkeypatch.setattr(train, "MODEL", str(start))
    for rank in (0, 2):
        toy_run(f"rank-{rank}", STEPS=1, MODEL=str(start), LORA_RANK=rank)
        capsys.readouterr()
        first, _ = shown(tmp_path / f"rank-{rank}" / "model", run={"MODEL": str(start), "LORA_RANK": f"{rank}"})
        assert f"A is {start}, B is " in first
    toy.model(1).save(start)
    for rank in (0, 2):
        with pytest.raises(SystemExit, match=f"start is not the model that the run of .*/rank-{rank}/model began with"):
            shown(tmp_path / f"rank-{rank}" / "model", run={"MODEL": str(start), "LORA_RANK": f"{rank}"})


def test_one_model_two_models_and_several_tries(shown, toy_model, tmp_path, monkeypatch):
    first, rows = shown(toy_model, "EVAL_SAMPLES=4")
    assert first == f"4 held-out questions of {toy.__file__}: A is {toy_model}" and rows["held-out"] == ["A"]
    assert "long reward, greedy" in rows and not any("pass@" in name for name in rows)  # characters are no share
    _, rows = shown(toy_model, toy_model, "EVAL_SAMPLES=1", "SEED=0")
    assert rows["long reward, sampled"][-1].startswith("+0.000 ± ")
    draw, items = evaluate.draw_questions, []
    spy = lambda task, some, *rest: items.append(some) or draw(task, some, *rest)  # noqa: E731
    monkeypatch.setattr(evaluate, "draw_questions", spy)
    first, rows = shown(toy_model, "--training")
    assert first == f"4 training questions of {toy.__file__}: A is {toy_model}" and rows["training"] == ["A"]
    shown(toy_model)
    assert items == [*toy.load("builtin", None)]
    (tmp_path / "LR=1").symlink_to(toy_model)
    assert shown(tmp_path / "LR=1")[0].endswith(f"A is {tmp_path}/LR=1")
    with pytest.raises(SystemExit, match="EVAL_POSITION=3 is not a setting .*did you mean EVAL_POSITIONS=3"):
        shown(toy_model, "EVAL_POSITION=3")


def test_pass_at_k_is_asked_of_the_same_model_and_questions(toy_settings, toy_run, tmp_path, monkeypatch):
    honest = toy.grade
    grade = lambda *a: toy.Grade((("all", 0.5),), {"even": float(honest(*a).reward > 0.3)})  # noqa: E731
    monkeypatch.setattr(toy, "grade", grade)
    toy_settings(TEMPERATURE=0.5)
    model, questions = toy.model(), toy.questions(12)
    skill, _ = train.evaluate(model, questions, samples=16)
    shares = [skill[f"short even pass@{k}"][0] for k in (1, 4, 16)]
    assert 0 < shares[0] < shares[1] < shares[2] <= 1 and "short even pass@64" not in skill
    answers = train.answer_questions(model, questions, 0.5, 16)
    assert shares[0] == pytest.approx(fmean(a.grade.metrics["even"] for a in answers if a.question.kind == "short"))
    assert len(skill["short even T=0.5"][2]) == len(skill["short even pass@4"][2])
    toy_run(STEPS=2, EVAL_EVERY=1, EVAL_SAMPLES=4)
    kept = json.loads((tmp_path / "out" / "skill.json").read_text())
    assert all("long even pass@4" in figures for figures in kept.values()) and len(kept) == 3


def test_tools_take_the_settings_of_the_run_whose_model_they_are_given(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    run = {"TASK": "mine.py", "MODEL": "start", "TEMPERATURE": 0.7, "OVERFIT": True, "LR": 1e-05, "DEVICE": "cuda:7"}
    (tmp_path / "settings.json").write_text(json.dumps(run))
    names = {"TASK": "rewards.py", "MODEL": "", "TEMPERATURE": 1.0, "OVERFIT": False, "LR": 1.0, "DEVICE": "auto"}
    for arguments in ([f"{tmp_path}/model"], [f"MODEL={tmp_path}/model"], []):
        if not arguments:
            monkeypatch.setenv("MODEL", f"{tmp_path}/model")
        monkeypatch.setattr(sys, "argv", ["tool", *arguments, "LR=3"])
        monkeypatch.setattr(settings, "GIVEN", {name: {} for name in settings.GIVEN})
        monkeypatch.setattr(settings, "SETTINGS", {})
        settings.read_run()
        found = {name: settings.setting(name, default, "") for name, default in names.items()}
        model = run["MODEL"] if arguments == [f"{tmp_path}/model"] else f"{tmp_path}/model"
        assert found == run | {"LR": 3.0, "DEVICE": "auto", "MODEL": model}
        settings.read_user()  # as train.py does
    monkeypatch.delenv("MODEL")
    monkeypatch.setattr(settings, "GIVEN", {name: {} for name in settings.GIVEN})
    settings.read_user()
    assert settings.setting("TEMPERATURE", 1.0, "") == 1.0
    (tmp_path / "settings.json").write_text("// {}")  # another program's
    monkeypatch.setattr(sys, "argv", ["tool", str(tmp_path / "model")])
    settings.read_run()
    assert settings.setting("TEMPERATURE", 1.0, "") == 1.0 and not settings.GIVEN["run"]
    (tmp_path / "settings.json").write_text(json.dumps(run))  # above the folder in which a user stands
    monkeypatch.chdir(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["tool", "a/hub-id"])
    settings.read_run()
    assert not settings.GIVEN["run"]
