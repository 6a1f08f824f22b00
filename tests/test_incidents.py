"""The incident gallery: in one step with one question its failing runs fail, and its defaults do not."""

import json

import pytest

from experiments import incidents


def first_step(name, label, steps=1, **changes):
    """The last metrics of a run of the gallery, and what the program said."""
    settings, patches = incidents.INCIDENTS[name][3][label]
    rows, words = incidents.run(steps, settings | {"BATCH_POSITIONS": 1, "KL_COEF": 0.01} | changes, patches)
    assert len(rows) == steps
    return rows[-1], words


@pytest.mark.slow
def test_explosion():
    broken, _ = first_step("explosion", "no limits", steps=2, LR=0.03)
    assert broken["kl"] > 1 and broken["structure"] == 0
    sound, _ = first_step("explosion", "default limits", steps=2, LR=0.03)
    assert sound["grad_norm"] > 100 and sound["kl"] < 0.01 and sound["structure"] == 1


def test_old_bugs_fail_in_their_first_step_and_defaults_do_not():
    capped, _ = first_step("collapse", "hard cap", KL_COEF=0.0)
    assert (capped["frac_zero_std"], capped["grad_norm"]) == (1, 0) and capped["reward"] == pytest.approx(0.05)
    scaled, _ = first_step("collapse", "default penalty", KL_COEF=0.0)
    assert scaled["hit_limit"] == 1 and scaled["frac_zero_std"] == 0 and scaled["grad_norm"] > 0

    dropped, words = first_step("dropout", "dropout 0.1")
    assert dropped["kl"] > 1e-3 and dropped["logprob_gap"] > 0.01
    assert "sampling and training disagree" in words[0]

    random, words = first_step("random", "never loaded")
    assert (random["frac_zero_std"], random["structure"]) == (1, 0) and random["reward"] == pytest.approx(-0.3)
    assert len(words) == 1 and words[0].startswith("only 0% of the first answers")
    sound, words = first_step("random", "default")
    assert abs(sound["kl"]) < 1e-6 and sound["structure"] > 0.5 and not words


def test_the_gallery_leaves_a_picture_and_figures(tmp_path, monkeypatch):
    rows = [{"kl": 0.1, "logprob_gap": 0.1, "reward": 0.2}, {"kl": 0.2, "logprob_gap": 0.1, "reward": 0.3}]
    monkeypatch.setattr(incidents, "run", lambda *_: (rows, ["refused"]))
    monkeypatch.setattr("sys.argv", ["incidents", str(tmp_path), "--only", "dropout"])
    incidents.main()
    assert (tmp_path / "dropout.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "incidents.json").read_text())["dropout"]["runs"]["dropout 0.1"]
    assert found["words"] == ["refused"] and found["curves"]["kl"] == [0.1, 0.2]
