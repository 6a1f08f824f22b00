import importlib
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import types
from unittest import mock

import chess
import pytest

import train
from examples import mates
from experiments import estimators, every_question, imitate, seeds, variants
from nanorook import settings
from nanorook.statistics import figure
from nanorook.tables import table as show
from nanorook.task import draw_questions
from nanorook.tokenizer import Tokenizer
from toy import ROOT


def test_seeds_are_compared_with_controls_and_not_run_again(tmp_path, monkeypatch, capsys):
    started = []

    def run(command, stdout, cwd, env):
        assert env["PATH"] and "LR" not in env  # which the arguments have
        known = seeds.read(tmp_path / "seeds.json")["settings"]  # from now on the folder is of these
        assert "STEPS=9" in known and "LR=0.5" in known and "KL_COEF=0.2" in known and "CONTROL=0" not in known
        given = dict(argument.split("=", 1) for argument in command[2:])
        started.append((given["SEED"], given["CONTROL"], given["STEPS"]))
        out = tmp_path / given["OUT_DIR"].split("/")[-1]
        out.mkdir()
        gain = 0 if given["CONTROL"] == "shuffle" else 0.1 + 0.2 * int(given["SEED"])
        skill = {t: {"policy reward T=0": figure([0.4 + x, 0.6 + x])} for t, x in (("before", 0), ("after", gain))}
        about = {"machine": "m", "finished": "today", "questions": {"policy": [int(given["SEED"]), 7]}}
        for name, content in {"skill": skill, "settings": {"STEPS": 9}, "run": about}.items():
            (out / f"{name}.json").write_text(json.dumps(content))
        return types.SimpleNamespace(wait=lambda seconds: 1)  # a run that collapsed has finished, too

    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "--seeds", "2", *arguments])
        with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN):
            seeds.main()

    monkeypatch.setattr(seeds, "subprocess", types.SimpleNamespace(Popen=run))
    monkeypatch.setenv("LR", "0.5")
    for arguments in (["STEPS=9"], ["STEPS=9", "--curves", "policy reward T=0"]):
        main(*arguments)
        (tmp_path / "seeds.json").unlink()
        row = "| policy reward T=0 | 50.0 | 70.0 | +20.0 ± 127.1 | +0.0 ± 65.8 |"  # Student's, and Wilson's of 0 of 2
        assert row in re.sub(" +", " ", capsys.readouterr().out)
        assert started == [(seed, control, "9") for control in ("none", "shuffle") for seed in "01"]
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    main("STEPS=9")
    for arguments, environment, said in (
        (["STEPS=10"], {}, r"was made with other settings (STEPS=10, STEPS=9); name"),
        (["STEPS=9"], {"LR": "0.1"}, "was made with other settings (LR=0.1, LR=0.5); name"),
        (["STEPS=9", "--task", "examples/sums.py"], {}, "KL_COEF=0.03, KL_COEF=0.2, "),
        (["STEPS=9", "--curves", "policy rewards T=0"], {}, "have no figure 'policy rewards T=0'"),
        (["SEED=5"], {}, "SEED is decided for each run by --task"),
        (["CONTROL=1"], {}, "CONTROL is decided for each run by --task"),
        (["STEPS=9"], {"SEED": "5"}, "SEED is decided for each run by --task"),
        (["STPES=9"], {}, "did you mean STEPS=9?"),
    ):
        with pytest.raises(SystemExit) as stopped, mock.patch.dict("os.environ", environment):
            main(*arguments)
        assert said in f"{stopped.value}{capsys.readouterr().err}"
    assert len(started) == 4
    known = (file := tmp_path / "seeds.json").read_text()
    file.unlink()
    with pytest.raises(SystemExit, match="seed-0 was made with STEPS=9, not 10; delete it, or name another OUT"):
        main("STEPS=10")
    file.write_text(known)
    (tmp_path / "seed-0" / "run.json").unlink()
    with pytest.raises(SystemExit, match="records seed-0, whose folder is gone, so no run can be added"):
        main("STEPS=9", "--seeds", "3")
    assert len(started) == 4
    (tmp_path / "seeds.json").write_text("{")
    with pytest.raises(SystemExit, match="seeds.json is damaged .*: name another folder, or delete the file."):
        main("STEPS=9")


def test_a_figure_that_not_every_evaluation_has_is_drawn_where_it_is(tmp_path, monkeypatch):
    titles, names = [], ["q right T=0", "q right T=0.7"]
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda self, title: titles.append(title))
    skill = {"0": dict.fromkeys(names, [0.1, 0.0]), "5": {}, "9": dict.fromkeys(names, [0.2, 0.0])}
    seeds.draw([{"skill": skill}], [], names, tmp_path / "some.png")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert titles == ["q right greedy", "q right at temperature 0.7"]


def test_ctrl_c_ends_an_experiment_with_a_sentence_and_does_not_kill_its_run(tmp_path, monkeypatch):
    run = mock.Mock(**{"wait.side_effect": KeyboardInterrupt})
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: run)
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "STEPS=9"])
    with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN):
        with pytest.raises(SystemExit, match="^stopped; the current run ends when it has saved its step"):
            runpy.run_module("experiments.seeds", run_name="__main__")
    assert run.mock_calls == [mock.call.wait(10)]


def test_questions_that_seeds_share_widen_the_interval_of_the_table(tmp_path):
    """Two runs that ask the same four questions, of which half gain, and two that ask different ones."""
    tables = []
    for names in ([[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [5, 6, 7, 8]]):
        folders, runs = [tmp_path / f"{names[1][0]}-{i}" for i in range(2)], []
        for folder, asked, values in zip(folders, names, ([1, 1, 0, 0.02], [1, 1, 0, 0])):
            folder.mkdir()
            about = {"questions": {"q": asked}, "finished": "today"}
            skill = {t: {"q right T=0": figure(v)} for t, v in (("before", [0, 0, 0, 0]), ("after", values))}
            for name, content in {"skill": skill, "settings": {"STEPS": 9}, "run": about}.items():
                (folder / f"{name}.json").write_text(json.dumps(content))
            runs.append(seeds.run(folder, []))
        tables.append(show(seeds.rows(runs, [], [seeds.shared(folders), {}]), markdown=True))
    assert "control" not in tables[0]  # there was none
    assert "50.2 | +50.2 ± 48.8 |" in tables[0] and "50.2 | +50.2 ± 3.2 |" in re.sub(" +", " ", tables[1])


def test_variants_are_settings_of_train_as_recorded_and_not_run_again(tmp_path, monkeypatch, capsys):
    for name, table in variants.VARIANTS.items():
        task, shared = importlib.import_module(f"examples.{name}"), variants.SHARED[name]
        changed = {name for changes in (shared, *table.values()) for name in changes}
        assert all(hasattr(train, name) or hasattr(task, name) for name in changed)
        recorded = seeds.read(seeds.ROOT / "experiments" / f"variants-{name}.json")
        assert recorded["about"] == {"shared": shared, "variants": table}
        assert recorded["runs"].keys() == table.keys()
    made = []

    def run(folder, arguments):
        made.append(arguments)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"clip_low": 0.1, "clip_high": 0.3, "entropy": 0.5}\n')
        return {"skill": {"0": {}, "30": {"letters last T=0": [0.5, 0.1], "letters last T=1": [0.25, 0.1]}}}

    monkeypatch.setattr(variants, "run", run)
    monkeypatch.setattr(variants, "__file__", f"{tmp_path}/variants.py")  # beside which the file is written
    shared = ["TASK=examples/letters.py", "STEPS=30", "EVAL_POSITIONS=400", "KL_COEF=0.0"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["variants", str(tmp_path), "--seeds", "2", "--only", "default", "EPOCHS=2"])
        with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN):
            variants.main()
            assert {"LR", "STEPS"} < settings.SETTINGS.keys()
        rows = re.sub(" +", " ", capsys.readouterr().out)
        assert "| EPOCHS=2 | 50.0 ± 0.0 | 25.0 ± 0.0 | 0.50 ± 0.00 | 40.0 ± 0.0 |" in rows
        assert made == [[*shared, *more, f"SEED={seed}"] for seed in (0, 1) for more in ([], ["EPOCHS=2"])]
    monkeypatch.setattr("sys.argv", ["variants", "--seeds", "0"])
    with pytest.raises(SystemExit):
        variants.main()
    assert "argument --seeds: 0 is not a whole number of at least 1." in capsys.readouterr().err


def test_estimators_are_compared_on_each_task_before_and_after(tmp_path, monkeypatch, capsys):
    made = []

    def run(folder, arguments):
        made.append(dict(argument.split("=") for argument in arguments))
        folder.mkdir()
        steps = [{"entropy": 0.5, "frac_zero_std": 0.1}, {"entropy": 0.25, "frac_zero_std": 0.4}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        names = [
            f"{name} {way}" for name in ("mates mate", "moves legal") for way in ("T=0", "T=1", "pass@4", "pass@16")
        ]
        return {"skill": {step: dict.fromkeys(names, [value]) for step, value in (("0", 0.25), ("120", 0.75))}}

    monkeypatch.setattr(estimators, "run", run)
    monkeypatch.setattr(estimators, "__file__", f"{tmp_path}/estimators.py")  # beside which the file is written
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["estimators", f"{tmp_path}/runs", "--only", "mates", "--seeds", "2"])
        with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN):
            estimators.main()
        table = re.sub(" +", " ", capsys.readouterr().out)
        assert "| | greedy | sampled | form | pass@4 | pass@16 | entropy | without signal |" in table
        assert f"| mates, start {5 * '| 25.0 ± 0.0 '}| 0.50 ± 0.00 | 10.0 ± 0.0 |" in table
        assert f"| mates, best of 4 {5 * '| 75.0 ± 0.0 '}| 0.25 ± 0.00 | 40.0 ± 0.0 |" in table
        names = "SEED", "SCALE_REWARDS", "BEST_OF", "BEST_OF_SCHEDULE"
        assert [tuple(run[name] for name in names if name in run) for run in made] == [
            (seed, *changed) for seed in "01" for changed in ((), ("std",), ("mean",), ("4",), ("4", "linear"))
        ]
    for *_, given in estimators.TASKS.values():
        task = importlib.import_module(given["TASK"].removesuffix(".py").replace("/", "."))
        assert all(hasattr(train, name) or hasattr(task, name) for name in given)


def test_runs_have_no_settings_from_the_environment_in_whatever_order_tasks_are_named(tmp_path):
    """In a process of its own, as the task of mates drops settings of chess when it is imported."""
    program = f"""if True:
        import sys, types
        from experiments import estimators, seeds
        estimators.__file__, sys.argv = "{tmp_path}/estimators.py", ["", "{tmp_path}", "--only", "mates", "chess"]
        Popen = lambda command, env, **_: sys.exit(f"{{'MIX_ENV_RATIO' in env}} {{'LR' in env}} {{'PATH' in env}}")
        seeds.subprocess = types.SimpleNamespace(Popen=Popen)
        estimators.main()"""
    environment = os.environ | {"MIX_ENV_RATIO": "1", "LR": "1"}
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.stderr.endswith("False False True\n")


def test_every_held_out_position_is_asked_in_every_kind(monkeypatch):
    for name in every_question.KINDS["rewards.py"]["policy"]:  # which the program changes
        monkeypatch.setattr(train.task, name, getattr(train.task, name))
    found = train.task.load("builtin", None)[1]
    moves = [item for item in found if item[0] == "moves"]
    few = found[:3] + [item for item in moves if chess.Board(item[1].fen).is_check()][:1] + moves[:5]
    monkeypatch.setattr(every_question, "load_items", lambda *_: ([], few))
    figures = every_question.ask(train.task.start_model(), "rewards.py")
    counts = {name: len(values) for name, values in figures.items()}
    assert [*counts] == every_question.ROWS["rewards.py"]
    assert all(count == (3 if name.startswith("mates") else 6) for name, count in counts.items())
    for legal, illegal in zip(*(figures[f"environment next_state_{move} T=0"] for move in ("legal", "illegal"))):
        assert (legal is None) != (illegal is None)
    monkeypatch.setattr(train, "task", mates)
    figures = every_question.ask(mates.start_model(), "examples/mates.py", tries=4)
    assert [*figures] == [*every_question.ROWS["examples/mates.py"], "mates mate pass@1", "mates mate pass@4"]
    assert len(figures["mates mate pass@4"]) == 3
    assert len(figures["mates mate T=0"]) == 3 and len(figures["moves legal T=0"]) == 6


def test_right_answers_are_imitated_and_only_the_answers(monkeypatch, capsys, gpt2_folder):
    few = [[item for item in train.task.load("builtin", None)[0] if item[0] == kind][:4] for kind in ("mates", "moves")]
    for name, value in {"task": train.task, "LR": train.LR}.items():  # which the program changes
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(imitate, "load_items", lambda *_: (sum(few, []),) * 2)
    monkeypatch.setattr(imitate, "ASKED", 4)  # three about mates
    monkeypatch.setattr("sys.argv", "imitate weights/tiny --steps 15 --rows 4 --eval-every 100".split())
    imitate.main()
    before, before_of_trained, after, _ = (line.split()[3:] for line in capsys.readouterr().out.splitlines()[1:])
    assert before == before_of_trained  # here these are the same questions
    assert before[0] != "100.0%" and after[0] == "100.0%"
    seen = []
    monkeypatch.setattr(imitate, "draw_questions", lambda *a: seen.append([k for k, _ in a[1]]) or draw_questions(*a))
    monkeypatch.setattr("sys.argv", "imitate weights/tiny --steps 1 --rows 2 --share 0.5".split())
    imitate.main()  # asks about what is held out, then about what it learns from, and learns
    assert [(kinds.count("mates"), kinds.count("moves")) for kinds in seen] == [(4, 4), (2, 4), (2, 4)]
    question, tokenizer = mates.ask("mates", few[0][0][1], types.SimpleNamespace(extra={})), Tokenizer.load(gpt2_folder)
    tokens, targets = imitate.texts([question], tokenizer, " ", random.Random(0))
    shown, answer = (
        b"".join(map(tokenizer.token_bytes.get, ids)).decode()
        for ids in (tokens[0].tolist(), targets[targets >= 0].tolist())
    )
    assert shown.startswith(question.prompt) and answer.startswith(shown.removeprefix(question.prompt))
    assert answer[1:] in question.truth["mate"]


def test_a_row_changed_if_all_rows_together_leave_little_to_chance(tmp_path, monkeypatch, capsys):
    """Sixty questions and two runs: all answers to `mates mate` get better, and two of 60 to `mates legal`."""
    start = dict.fromkeys(every_question.ROWS["rewards.py"], [0.0] * 60)
    better = start | {"mates mate T=0": [1.0] * 60, "mates legal T=1": [1.0, 1.0] + [0.0] * 58}
    asked = []
    monkeypatch.setattr(
        every_question, "ask", lambda source, *_: asked.append(source) or (better if asked[1:] else start)
    )
    monkeypatch.setattr("sys.argv", ["every_question", str(tmp_path)])
    with pytest.raises(SystemExit):
        every_question.main()
    assert "has no finished run seed-N" in capsys.readouterr().err
    monkeypatch.setattr(every_question, "finished", lambda folder: folder.name != "seed-2")
    for name, model in (("seed-0", ""), ("seed-1", "mine"), ("seed-2", "")):
        (tmp_path / name).mkdir()
        seeds.record(tmp_path / name / "settings.json", every_question.ASKED | {"TASK": "rewards.py", "MODEL": model})
    with pytest.raises(SystemExit):
        every_question.main()
    assert "seed-1 was trained with another TASK, MODEL or DATA" in capsys.readouterr().err
    shutil.copy(tmp_path / "seed-0/settings.json", tmp_path / "seed-1")
    for _ in range(2):
        every_question.main()
        table = re.sub(" +", " ", capsys.readouterr().out)
        assert "| mates mate T=0 | 0.0 | 100.0 | +100.0 ± 6.0 * |" in table
        assert "| mates legal T=1 | 0.0 | 3.3 | +3.3 ± 6.7 |" in table
    assert asked == [train.task.start_model(), *(str(tmp_path / f"seed-{n}" / "model") for n in "01")]
    assert seeds.read(tmp_path / "every_question.json")["rows"][1][1:3] == ["0.0", "100.0"]
    start, better = (some | {"mates mate pass@1": [0.5] * 60} for some in (start, better))
    asked.clear()
    monkeypatch.setattr("sys.argv", ["every_question", str(tmp_path), "--tries", "1"])
    every_question.main()  # asks again, as figures are missing
    assert len(asked) == 3 and "| mates mate pass@1 | 50.0 " in re.sub(" +", " ", capsys.readouterr().out)
    assert every_question.rows(start, [better])[1][3] == "+100.0 ± 6.0 *"  # of one run, for other questions
