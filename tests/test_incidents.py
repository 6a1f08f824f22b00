"""The incident gallery: its failing runs fail, its defaults do not, and docs/incidents.md says what was recorded."""

import json
import re
from pathlib import Path

import pytest

from experiments import incidents
from rewards import grade

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/incidents.md").read_text()
RECORD = json.loads((ROOT / "experiments/incidents.json").read_text())
NAMES = list(incidents.INCIDENTS)


def last_step(name, label, steps=1, **changes):
    """The last metrics of a run of the gallery with one prompt, and what the program said."""
    settings, patches = incidents.INCIDENTS[name][3][label]
    rows, words = incidents.run(steps, settings | {"BATCH_POSITIONS": 1} | changes, patches)
    assert len(rows) == steps
    return rows[-1], words


@pytest.mark.slow
def test_explosion():
    broken, _ = last_step("explosion", "no limits", steps=2, LR=0.03)
    assert broken["kl"] > 1 and broken["structure"] == 0
    sound, _ = last_step("explosion", "default limits", steps=2, LR=0.03)
    assert sound["grad_norm"] > 100 and sound["kl"] < 1e-3 and sound["structure"] == 1


def test_collapse():
    capped, _ = last_step("collapse", "hard cap")
    assert (capped["frac_zero_std"], capped["grad_norm"]) == (1, 0) and capped["reward"] == pytest.approx(0.05)
    by_word, _ = last_step("collapse", "hard cap, CREDIT=word")
    assert by_word["frac_zero_std"] == 1 and by_word["grad_norm"] > 0
    scaled, _ = last_step("collapse", "default penalty")
    assert scaled["runaway"] == 1 and scaled["frac_zero_std"] == 0 and scaled["grad_norm"] > 0


def test_cliff():
    cliff, _ = last_step("cliff", "best move or nothing")
    assert (cliff["frac_zero_std"], cliff["grad_norm"], cliff["reward"]) == (1, 0, -1)
    graduated, _ = last_step("cliff", "default rewards")
    assert graduated["frac_zero_std"] == 0 and graduated["grad_norm"] > 0


def test_dropout_and_random_weights_are_refused():
    dropped, words = last_step("dropout", "dropout 0.1")
    assert dropped["kl"] > 1e-3 and dropped["logprob_gap"] > 0.01
    assert len(words) == 1 and "sampling and training disagree" in words[0]
    random, words = last_step("random", "never loaded")
    assert (random["frac_zero_std"], random["structure"]) == (1, 0) and random["reward"] == pytest.approx(-0.3)
    assert len(words) == 1 and "only 0% of the first completions" in words[0]
    sound, words = last_step("random", "default")
    assert sound["kl"] == 0 and sound["structure"] == 1 and sound["frac_zero_std"] == 0 and not words


def test_filibuster():
    """Its runs are long; here is what its verifier pays, and what became of it in the recorded runs."""
    fen = "r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3"
    labels = (("f1b5", 60), ("d2d4", 40), ("f1c4", 30), ("b1c3", 20), ("c2c3", 5))
    answer = "M: f1b5 d2d4 f1c4 b1c3 c2c3 E: 0.6 0.4 0.3 0.2 0.05 B: f1b5"
    cases = [(answer, False), (answer + " a2a3 a2a3 a2", True), (answer + "+7/ g6", True)]
    blind = [incidents.blind(f"P: {fen}", text, labels, cut).reward for text, cut in cases]
    default = [grade(f"P: {fen}", text, labels, cut).reward for text, cut in cases]
    assert blind == [1, 1, 1] and default[0] == 1 and max(default[1:]) < 0.3
    failing, _, sound = (run["curves"]["runaway"] for run in RECORD["filibuster"]["runs"].values())
    assert failing[0] == sound[0] and sum(failing[-5:]) > sum(sound[-5:]) + 1


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_of_these_runs(name):
    title, _, panels, runs = incidents.INCIDENTS[name]
    incident = RECORD[name]
    assert (incident["title"], incident["shared"]) == (title, incidents.SMALL)
    assert [*incident["runs"]] == [*runs] and incident["started"].startswith("2026-11-2")
    for label, (settings, patches) in runs.items():
        found = incident["runs"][label]
        assert found["settings"] == settings and [*found["curves"]] == [*panels]
        assert [bug.split(":")[0] for bug in found["patches"].values()] == [bug.__name__ for *_, bug in patches]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_was_recorded(name):
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(RECORD[name]["title"] + "\n")]
    table = incidents.table(RECORD[name])
    assert table in section and f"](incidents/{name}.png)" in section
    known = {*re.findall(r"\d[\d.,]*\d|\d", table + json.dumps(RECORD[name]))}
    for number in re.findall(r"\d+\.\d+|\d+,\d{3}", section.replace(table, "")):
        assert number in known, f"{number} is in no record of {name}"


def test_the_page_names_the_pictures_that_exist():
    pictures = {path.name for path in (ROOT / "docs/incidents").iterdir()}
    assert pictures == {f"{name}.png" for name in NAMES} == {*re.findall(r"\]\(incidents/(.+?)\)", PAGE)}
    assert {*RECORD} == {*NAMES}


def test_redrawing_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(incidents, "record", None)
    command = ["incidents", str(tmp_path), "--only", "random", "--redraw", str(ROOT / "experiments/incidents.json")]
    monkeypatch.setattr("sys.argv", command)
    incidents.main()
    assert (tmp_path / "random.png").read_bytes().startswith(b"\x89PNG")
    assert incidents.table(RECORD["random"]) in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [tmp_path / "random.png"]
