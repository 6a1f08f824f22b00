import json
import re
import types

import pytest

import train
from experiments import seeds, variants


def test_seeds_are_compared_with_controls_and_not_run_again(tmp_path, monkeypatch, capsys):
    started = []

    def run(command, stdout, **_):
        assert seeds.read(tmp_path / "seeds.json")["settings"] == ["STEPS=9"]  # nobody goes on with other ones
        given = dict(argument.split("=", 1) for argument in command[2:])
        started.append((given["SEED"], given["CONTROL"], given["STEPS"]))
        out = tmp_path / given["OUT_DIR"].split("/")[-1]
        (out / "model").mkdir(parents=True)
        gain = 0 if given["CONTROL"] == "1" else 0.1 + 0.2 * int(given["SEED"])
        skill = {"before": {"policy reward T=0": [0.5, 0.1]}, "after": {"policy reward T=0": [0.5 + gain, 0.1]}}
        for name, content in {"skill": skill, "settings": {"STEPS": 9}, "run": {"machine": "m"}}.items():
            (out / f"{name}.json").write_text(json.dumps(content))
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(seeds, "subprocess", types.SimpleNamespace(run=run))
    command = ["seeds", str(tmp_path), "--seeds", "2", "STEPS=9"]
    for arguments in (command, [*command, "--curves", "policy reward T=0"]):
        monkeypatch.setattr("sys.argv", arguments)
        seeds.main()
        (tmp_path / "seeds.json").unlink()
        row = re.sub(" +", " ", capsys.readouterr().out.splitlines()[2])
        assert row == "| policy reward T=0 | 50.0 | 70.0 | +20.0 ± 127.1 | +0.0 |"  # Student's
        assert started == [("0", "0", "9"), ("1", "0", "9"), ("0", "1", "9")]
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    seeds.main()
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "STEPS=10"])
    with pytest.raises(SystemExit):
        seeds.main()
    monkeypatch.setattr("sys.argv", [*command, "--curves", "policy rewards T=0"])
    with pytest.raises(SystemExit):
        seeds.main()
    assert "have no figure 'policy rewards T=0'" in capsys.readouterr().err


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
        assert "| EPOCHS=2 (1 of 2 runs) | 50.0 | 50.0 | 0.50 | 50.0 |" in re.sub(" +", " ", capsys.readouterr().out)
        assert measured == [{"SEED": 0}, {"EPOCHS": 2, "SEED": 0}, {"SEED": 1}, {"EPOCHS": 2, "SEED": 1}]
