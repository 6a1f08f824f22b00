import json
import re
import runpy
import types
from unittest import mock

import pytest

from nanorook.statistics import figure
from nanorook.tables import table as show
from tools import sweep


def leave(folder, values, names=(1, 2), **settings):
    """What a finished run leaves: its questions had values[0] before the run and values[1] after it."""
    folder.mkdir(parents=True, exist_ok=True)
    skill = {title: {"q right T=0": figure(some)} for title, some in zip(("before", "after"), values)}
    about = {"machine": "m", "finished": "today", "questions": {"q": names}}
    for name, content in {"skill": skill, "settings": settings, "run": about}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    steps = [{"entropy": 0.5, "frac_zero_std": 0.1, "clip_low": 0.1, "clip_high": 0.3}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.fixture
def started(monkeypatch):
    """The settings of each run that is started, which here takes no time. It gains 20 and 40 points, half as many with
    LR=1, and none as a control."""
    runs = []

    def start(command, stdout, cwd):
        if command[-1] == "--help":  # only checks the settings
            return types.SimpleNamespace(wait=lambda: int("LSOS=grpo" in command))
        given = dict(argument.split("=", 1) for argument in command[2:])
        runs.append({name: value for name, value in given.items() if name != "OUT_DIR"})
        seed = int(given["SEED"])
        rise = 0 if given["CONTROL"] == "shuffle" else 0.2 * (seed + 1) / (2 if given.get("LR") == "1" else 1)
        settings = {name: float(value) if name == "LR" else value for name, value in given.items()}
        values = [0.4, 0.6], [0.4 + rise, 0.6 + rise]
        leave(sweep.Path(given["OUT_DIR"]), values, [seed, 7], **{"STEPS": 9, **settings})
        return types.SimpleNamespace(wait=lambda: 1)  # a run that collapsed has finished, too

    monkeypatch.setattr(sweep.subprocess, "Popen", start)
    return runs


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """main(argument, ...) is what the program prints, without the progress of the runs."""

    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["sweep", str(tmp_path), *arguments])
        sweep.main()
        return re.sub(" +", " ", capsys.readouterr().out)

    return main


def test_one_setting_is_shown_before_and_after_beside_its_controls_and_not_made_again(main, started, tmp_path):
    for _ in range(2):
        printed = main("LR=3e-2", "--seeds", "2")
        assert "| q right T=0 | 50.0 | 80.0 | +30.0 ± 127.1 | +0.0 ± 65.8 |" in printed  # Student's, and Wilson's
        assert [(run["SEED"], run["CONTROL"]) for run in started] == [
            (seed, control) for seed in "01" for control in ("none", "shuffle")
        ]
        assert {run["LR"] for run in started} == {"3e-2"}
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert record["figures"][0] == "q right T=0" and record["about"] == {"machine": "m", "finished": "today"}
    assert record["variants"]["default"]["runs"][1][0] == [0.9, 0.5, 0.4, pytest.approx(0, abs=1)]
    lines = (tmp_path / "sweep.json").read_text().splitlines()
    assert sum("[0.9, 0.5, 0.4" in line and "[0.5], [0.1], [0.4]" in line for line in lines) == 1  # a run in a line


def test_settings_by_name_are_compared_after_the_runs(main, started, tmp_path):
    printed = main("--vary", "default", "high rate: LR=1 STEPS=9", "--seeds", "2", "--controls", "1",
                   "--show", "q right T=0", "entropy", "clipped")  # fmt: skip
    assert "| | q right T=0 | entropy | clipped |" in printed
    assert "| default | 80.0 ± 127.1 | 0.50 | 40.0 |" in printed
    assert "| high rate | 65.0 ± 63." in printed and "| high rate, shuffled | 50.0 |" in printed
    assert [run.get("LR", "") for run in started] == ["", "", "1", "1", "", "1"]  # seed by seed
    assert (tmp_path / "high-rate" / "seed-1").is_dir()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["SEED=5"], "SEED=5 is not .*, or it is a setting that OUT, --seeds and --controls decide"),
        (["--vary", "fast: LR=1 8"], "8 is not in the form NAME=value"),
        (["--show", "q wrong T=0"], "--show: the runs have no figure 'q wrong T=0', but q right T=0, entropy"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, main, started, capsys):
    with pytest.raises(SystemExit):
        main(*arguments)
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


def test_a_misspelt_setting_ends_the_program_before_any_run(main, started):
    with pytest.raises(SystemExit):
        main("--vary", "default", "LSOS=grpo")
    assert not started


def test_runs_with_other_start_models_are_not_mixed(main, started, tmp_path):
    main("--seeds", "1", "--controls", "0")
    file = tmp_path / "default" / "seed-0" / "run.json"
    main("--seeds", "2", "--controls", "0")  # of an older version, which recorded no hash
    file.write_text(json.dumps(json.loads(file.read_text()) | {"start_hash": "another"}))
    file = tmp_path / "default" / "seed-1" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"start_hash": "one"}))
    with pytest.raises(SystemExit, match="seed-1 and .*seed-0 began with different models"):
        main("--seeds", "2", "--controls", "0")


def test_runs_with_other_settings_are_not_mixed(main, started, tmp_path):
    main("LR=3e-2", "--seeds", "1")
    with pytest.raises(SystemExit, match=r"seed-0 was made with LR=0\.03, not 0\.1; delete it, or name another OUT"):
        main("LR=0.1", "--seeds", "1")
    leave(tmp_path / "default" / "control-0", ([0.4, 0.6],) * 2, [0, 7], LR=0.03, STEPS=8, SEED="0", CONTROL="shuffle")
    with pytest.raises(SystemExit, match="control-0 was made with STEPS=8, not 9; delete it, or name another OUT"):
        main("LR=3e-2", "--seeds", "1")


def test_a_path_may_be_spelled_as_a_user_spells_it(main, started, tmp_path):
    leave(tmp_path / "default" / "seed-0", ([0.4, 0.6],) * 2, [0, 7], TASK="examples/sums.py", SEED="0", CONTROL="none")
    main("TASK=./examples/sums.py", "--seeds", "1", "--controls", "0")
    assert not started


def test_a_run_that_does_not_finish_is_named(main, monkeypatch):
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda *_, **__: mock.Mock(**{"wait.return_value": 0}))
    with pytest.raises(SystemExit, match="seed-0 did not finish; its error is above, and its output in .*seed-0.log"):
        main()


def test_ctrl_c_ends_the_program_with_a_sentence_and_does_not_kill_its_run(tmp_path, monkeypatch):
    run = mock.Mock(**{"wait.side_effect": KeyboardInterrupt})
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: run)
    monkeypatch.setattr("sys.argv", ["sweep", str(tmp_path)])
    with pytest.raises(SystemExit, match="^stopped; the current run ends when it has saved its step"):
        runpy.run_module("tools.sweep", run_name="__main__")
    assert run.mock_calls == [mock.call.wait()]


def test_questions_that_seeds_share_widen_the_interval_of_the_table(tmp_path):
    """Two runs that ask the same four questions, of which half gain, and two that ask different ones."""
    tables = []
    for case, names in enumerate(([[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [5, 6, 7, 8]])):
        folders = [tmp_path / str(case) / f"seed-{i}" for i in range(2)]
        for folder, asked, after in zip(folders, names, ([1, 1, 0, 0.02], [1, 1, 0, 0])):
            leave(folder, ([0, 0, 0, 0], after), asked)
        record = sweep.record_of({"default": {"runs": folders, "controls": []}})
        tables.append(re.sub(" +", " ", show(sweep.gain_rows(record), markdown=True)))
    assert "control" not in tables[0]  # there was none
    assert "50.2 | +50.2 ± 134.2 |" in tables[0] and "50.2 | +50.2 ± 3.2 |" in tables[1]
