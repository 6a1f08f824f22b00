"""experiments/seeds.py: its arithmetic, on figures made up for the purpose."""

import json

import numpy as np
import pytest

from experiments import seeds


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
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "--seeds", "2", "LR=1e-3"])
    monkeypatch.setattr(seeds.subprocess, "run", None)
    seeds.main()
    assert "| policy legal | 60.0 | +10.0 | +110.0 |" in capsys.readouterr().out
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "seeds.json").read_text())["settings"] == {"LR": "1e-3"}
