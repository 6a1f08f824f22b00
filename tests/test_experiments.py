"""experiments/seeds.py, variants.py and repair.py: their arithmetic, what is not run again, and what repair teaches."""

import json
import random

import pytest

import rewards
import train
from experiments import repair, seeds, variants
from nanorook.positions import Position, mirror

FEN = "r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3"
POSITION = Position(FEN, (), (("f1b5", 60), ("d2d4", 40), ("f1c4", 30), ("b1c3", 20), ("c2c3", 5)))


def test_the_interval_is_students():
    assert seeds.with_interval([0.1, 0.2, 0.3], "+.2f") == "+0.20 ± 0.25"  # 4.30 · 0.1 / √3
    assert seeds.with_interval([3.0]) == "3.0"


def test_seeds_are_compared_with_controls_and_not_run_again(tmp_path, monkeypatch, capsys):
    started = []

    def run(command, stdout, **_):
        given = dict(argument.split("=", 1) for argument in command[2:])
        started.append((given["SEED"], given["CONTROL"], given["STEPS"]))
        out = tmp_path / given["OUT_DIR"].split("/")[-1]
        (out / "model").mkdir(parents=True)
        gain = 0 if given["CONTROL"] == "1" else 0.1 + 0.2 * int(given["SEED"])
        skill = {"before": {"policy reward T=0": [0.5, 0.1]}, "after": {"policy reward T=0": [0.5 + gain, 0.1]}}
        (out / "skill.json").write_text(json.dumps(skill))
        (out / "settings.json").write_text('{"STEPS": 9}')
        (out / "run.json").write_text('{"machine": "m"}')

    monkeypatch.setattr(seeds.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "--seeds", "2", "STEPS=9"])
    for _ in range(2):
        seeds.main()
        assert "| policy reward T=0 | 50.0 | 70.0 | +20.0 ± 127.1 | +0.0 |" in capsys.readouterr().out
        assert started == [("0", "0", "9"), ("1", "0", "9"), ("0", "1", "9")]
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["seeds", str(tmp_path), "STEPS=10"])
    with pytest.raises(SystemExit):
        seeds.main()


def test_variants_are_settings_of_train_and_not_run_again(tmp_path, monkeypatch, capsys):
    assert all(hasattr(train, name) for changes in variants.VARIANTS.values() for name in changes)
    measured = []

    def measure(settings):
        measured.append(settings)
        return None if settings["SEED"] else dict.fromkeys(variants.COLUMNS, 0.5)

    monkeypatch.setattr(variants, "measure", measure)
    command = ["variants", str(tmp_path / "v.json"), "--seeds", "2", "--only", "default", "EPOCHS=2"]
    monkeypatch.setattr("sys.argv", command)
    for _ in range(2):
        variants.main()
        assert "| EPOCHS=2 (1 of 2 runs) | 50.0 | 50.0 | 0.50 | 50.0 |" in capsys.readouterr().out
        assert measured == [{"SEED": 0}, {"EPOCHS": 2, "SEED": 0}, {"SEED": 1}, {"EPOCHS": 2, "SEED": 1}]


def test_what_is_recorded_was_made_with_todays_variants():
    about = seeds.read(seeds.ROOT / "experiments/variants.json")["about"]
    assert about == {"columns": variants.COLUMNS, "shared": variants.SHARED, "variants": variants.VARIANTS}


def test_black_is_taught_the_worst_of_the_five():
    for position, best, grade in ((POSITION, "f1b5", 1.0), (mirror(POSITION), "c7c6", 0.0)):
        _, text = repair.rookworld_text(position, random.Random(0), "expanded")
        question = rewards.policy_question(position, "expanded")
        assert text.split()[-1] == best and rewards.grade(question, text).metrics["best"] == grade


def test_teaching_lowers_the_loss_and_both_sides_are_asked(byte_model, capsys, monkeypatch):
    monkeypatch.setattr(rewards, "LIMITS", {"policy": 8, "environment": 8})
    repair.teach(byte_model, [POSITION] * 16, 16 * 21, random.Random(0), lr=1e-2)
    first, last = (float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines())
    assert last < first - 1
    assert repair.by_side(byte_model, [POSITION])["black best T=0"] == (0.0, 0.0)
