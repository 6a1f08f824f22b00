"""experiments/seeds.py and variants.py: their arithmetic, on figures made up for the purpose."""

import json

import numpy as np
import pytest

import train  # noqa: F401  it defines the settings
from experiments import seeds, variants
from settings import KNOWN, read


def made_up(gain, sure):
    interval = [gain, gain - 0.01, gain + 0.01] if sure else [gain, -1.0, 1.0]
    before, change = {"legal": [0.6, 0.02]}, {"legal": interval, "cp_loss": None}
    sections = {"policy": before, "environment": {}, "self-play": {}}
    changes = {"policy": change, "environment": {}, "self-play": {}}
    return {"models": {"a": {"T=1": sections}, "b": {"T=1": sections}}, "difference": {"T=1": changes}}


def test_the_interval_is_students():
    """Half of it, for n seeds: where the density of t with n - 1 degrees of freedom, by itself, has left 2.5 %."""
    for n, t in seeds.STUDENT.items():
        x = np.linspace(0, 4000, 4_000_001)
        density = (1 + x**2 / (n - 1)) ** (-n / 2)
        inside = density[x <= t].sum() / density.sum()
        assert inside == pytest.approx(0.95, abs=5e-4), n


def test_gains_are_averaged_over_the_seeds():
    found = seeds.summary([made_up(0.1, True), made_up(0.2, True), made_up(0.3, False)])
    before, gains, mean, half, sure = found["T=1"]["policy legal"]
    assert (before, gains, sure) == (0.6, [0.1, 0.2, 0.3], 2) and mean == pytest.approx(0.2)
    assert half == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert list(found["T=1"]) == ["policy legal"]  # no row of what nobody knows
    assert "| policy legal | 60.0 | +10.0 | +20.0 | +30.0 | +20.0 ± 24.8 | 2 |" in seeds.table(found["T=1"])


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch, capsys):
    for seed in range(2):
        (tmp_path / f"seed-{seed}" / "model").mkdir(parents=True)
        rows = [{"step": i + 1, "P/legal": 0.1 * i, "A/next_state": 0.5, "reward": seed} for i in range(12)]
        (tmp_path / f"seed-{seed}" / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(made_up(0.1 + seed, True)))
        about = {"command": "./train.sh", "started": f"day {seed}", "commit": "c", "machine": "m", "versions": {}}
        (tmp_path / f"seed-{seed}" / "run.json").write_text(json.dumps(about))
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "--seeds", "2", "LR=1e-3"])
    monkeypatch.setattr(seeds.subprocess, "run", None)
    seeds.main()
    assert "| policy legal | 60.0 | +10.0 | +110.0 |" in capsys.readouterr().out
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "seeds.json").read_text())
    assert kept["settings"] == {"LR": "1e-3"} and [run["started"] for run in kept["runs"]] == ["day 0", "day 1"]


def test_a_variant_is_compared_with_its_start(tmp_path, monkeypatch, capsys):
    """Stars are for what is more than noise in every seed; a variant has its own settings and share of the steps."""
    asked = []

    def run(folder, seed, settings, *options):
        asked.append((folder.name, seed, settings, options))
        (folder / f"seed-{seed}").mkdir()
        about = {"started": f"day {seed}", "commit": "c", "machine": "m", "versions": {}}
        (folder / f"seed-{seed}" / "run.json").write_text(json.dumps(about))
        policy = dict.fromkeys(("legal", "candidates_legal", "worth", "eval_mae"), [0.1 + 0.1 * seed, 0.05, 0.3])
        environment = dict.fromkeys(("next_state", "worth"), [-0.02, [-0.05, -0.05][seed], [-0.01, 0.01][seed]])
        sections = {"policy": policy, "environment": environment, "environment illegal": environment}
        return {"difference": dict.fromkeys(("T=0", "T=1"), sections)}, []

    monkeypatch.setattr(variants, "run", run)
    monkeypatch.setattr(
        "sys.argv", ["variants", str(tmp_path), "--seeds", "2", "--steps", "40", "--only", "default", "epochs-4"]
    )
    variants.main()
    row = "| epochs-4 | +15.0 * | +15.0 * | +15.0 * | -2.0 | -2.0 | +15.0 * | -2.0 | -2.0 | +15.0 * |\n"
    assert row in capsys.readouterr().out
    assert [call[:2] for call in asked] == [("default", 0), ("default", 1), ("epochs-4", 0), ("epochs-4", 1)]
    assert asked[0][2] == {"STEPS": "40", "EVAL_EVERY": "0", "EVAL_POSITIONS": "8"} | variants.RATES
    assert asked[2][2] == asked[0][2] | {"STEPS": "16", "EPOCHS": "4"}
    kept = json.loads((tmp_path / "variants.json").read_text())
    assert set(kept["found"]) == {"default", "epochs-4"} and kept["made"]["epochs-4"]["settings"] == asked[2][2]
    assert [run["started"] for run in kept["made"]["default"]["runs"]] == ["day 0", "day 1"]
    assert (tmp_path / "variants.png").read_bytes().startswith(b"\x89PNG")


def test_every_variant_changes_settings_of_train():
    for name, changes in variants.VARIANTS.items():
        kinds = {setting: type(KNOWN[setting][0]) for setting in changes}  # KeyError: no such setting
        assert all(read(setting, value, kinds[setting]) is not None for setting, value in changes.items()), name
