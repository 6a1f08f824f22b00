import json
import runpy
import types
from unittest import mock

import pytest

import train
from experiments import pass_at_k, seeds, variants
from nanorook import settings


def test_seeds_are_compared_with_controls_and_not_run_again(tmp_path, monkeypatch, capsys):
    started = []

    def run(command, stdout, **_):
        known = seeds.read(tmp_path / "seeds.json")["settings"]  # from now on the folder is of these
        assert "STEPS=9" in known and "LR=0.5" in known and "KL_COEF=0.1" in known and "CONTROL=0" not in known
        given = dict(argument.split("=", 1) for argument in command[2:])
        started.append((given["SEED"], given["CONTROL"], given["STEPS"]))
        out = tmp_path / given["OUT_DIR"].split("/")[-1]
        (out / "model").mkdir(parents=True)
        gain = 0 if given["CONTROL"] == "shuffle" else 0.1 + 0.2 * int(given["SEED"])
        skill = {title: {"policy reward T=0": [0.4 + x, 0.6 + x]} for title, x in (("before", 0), ("after", gain))}
        about = {"machine": "m", "questions": {"policy": [int(given["SEED"]), 7]}}
        for name, content in {"skill": skill, "settings": {"STEPS": 9}, "run": about}.items():
            (out / f"{name}.json").write_text(json.dumps(content))
        return types.SimpleNamespace(wait=lambda: 0)

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
        assert row in capsys.readouterr().out
        assert started == [(seed, control, "9") for control in ("none", "shuffle") for seed in "01"]
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    main("STEPS=9")
    for arguments, environment, said in (
        (["STEPS=10"], {}, r"was made with other settings (STEPS=10, STEPS=9); name"),
        (["STEPS=9"], {"LR": "0.1"}, "was made with other settings (LR=0.1, LR=0.5); name"),
        (["STEPS=9", "--task", "examples/sums.py"], {}, "KL_COEF=0.0, KL_COEF=0.1, "),
        (["STEPS=9", "--curves", "policy rewards T=0"], {}, "have no figure 'policy rewards T=0'"),
        (["SEED=5"], {}, "the experiment itself chooses SEED for each run"),
        (["CONTROL=1"], {}, "the experiment itself chooses CONTROL for each run"),
        (["STEPS=9"], {"SEED": "5"}, "the experiment itself chooses SEED for each run"),
        (["STPES=9"], {}, "did you mean STEPS=9?"),
    ):
        with pytest.raises(SystemExit) as stopped, mock.patch.dict("os.environ", environment):
            main(*arguments)
        assert said in f"{stopped.value}{capsys.readouterr().err}"
    assert len(started) == 3


def test_ctrl_c_ends_an_experiment_with_a_sentence_and_does_not_kill_its_run(tmp_path, monkeypatch):
    run = mock.Mock(**{"wait.side_effect": KeyboardInterrupt})
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: run)
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "STEPS=9"])
    with mock.patch.dict(settings.SETTINGS), mock.patch.dict(settings.GIVEN):
        with pytest.raises(SystemExit, match="^stopped; the run at hand ends when it has saved its step"):
            runpy.run_module("experiments.seeds", run_name="__main__")
    assert run.mock_calls == [mock.call.wait()]


def test_questions_that_seeds_share_widen_the_interval_of_the_table(tmp_path):
    """Two runs that ask the same four questions, of which half gain, and two that ask different ones."""
    tables = []
    for names in ([[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [5, 6, 7, 8]]):
        folders, runs = [tmp_path / f"{names[1][0]}-{i}" for i in range(2)], []
        for folder, asked, values in zip(folders, names, ([1, 1, 0, 0.02], [1, 1, 0, 0])):
            folder.mkdir()
            skill = {"before": {"q right T=0": [0, 0, 0, 0]}, "after": {"q right T=0": values}}
            for name, content in {"skill": skill, "settings": {"STEPS": 9}, "run": {"questions": {"q": asked}}}.items():
                (folder / f"{name}.json").write_text(json.dumps(content))
            (folder / "model").mkdir()
            runs.append(seeds.run(folder, []))
        tables.append(seeds.table(runs, [], [seeds.shared(folders), {}]))
    assert "| q right T=0 | 0.0 | 50.2 | +50.2 ± 48.8 |  |" in tables[0] and "+50.2 ± 3.2 |" in tables[1]


def test_pass_at_k_counts_all_answers_to_a_question(monkeypatch, capsys):
    wrong, right = {"structure": 0.0}, {"structure": 1.0, "right": 1.0, "pawns": 2.0}
    monkeypatch.setattr(pass_at_k, "tries", lambda *_: {"q": [wrong, *[right] * 63, *[wrong] * 64]})
    monkeypatch.setattr("sys.argv", f"pass_at_k {seeds.ROOT}/tests/toy.py start".split())
    pass_at_k.main()
    rows = [line.split(" ± ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == [f"| q {name} | {k} | {share}" for name in ("structure", "right")
                        for k, share in ((1, 49.2), (4, 50.0), (16, 50.0), (64, 50.0))]  # fmt: skip


def test_variants_are_settings_of_train_as_recorded_and_not_run_again(tmp_path, monkeypatch, capsys):
    for table in variants.TABLES.values():
        names = {name for changes in table.variants.values() for name in changes}
        assert all(hasattr(train, name) or hasattr(table.task, name) for name in names)
    for name, file in (("letters", "variants.json"), ("sums", "variants-sums.json")):
        assert seeds.read(seeds.ROOT / "experiments" / file)["about"] == variants.TABLES[name].about()
    measured, row = [], dict.fromkeys(variants.TABLES["letters"].columns(), 0.5)
    measure = lambda _, settings: measured.append(settings) or (None if settings["SEED"] else row)  # noqa: E731
    monkeypatch.setattr(variants, "measure", measure)
    monkeypatch.setattr("sys.argv", f"variants {tmp_path}/v.json --seeds 2 --only default EPOCHS=2".split())
    for _ in range(2):
        variants.main()
        assert "| EPOCHS=2 (1 of 2 runs) | 50.0 | 50.0 | 0.50 | 50.0 |" in capsys.readouterr().out
        assert measured == [{"SEED": 0}, {"EPOCHS": 2, "SEED": 0}, {"SEED": 1}, {"EPOCHS": 2, "SEED": 1}]
    monkeypatch.setattr("sys.argv", ["variants", "--seeds", "0"])
    with pytest.raises(SystemExit):
        variants.main()
    assert "argument --seeds: 0 is not a whole number of at least 1." in capsys.readouterr().err
