"""What a run says at its end, from files as a run leaves them."""

import json

import pytest

import toy
from nanorook.run import finished
from nanorook.statistics import beyond_chance, figure, gain
from nanorook.verdict import verdict

N = 100  # held-out questions
START = {"q reward T=0": [0.2] * N, "q reward T=1": [0.1, 0.3] * (N // 2), "q right T=0": [0.0, 1.0] * (N // 2)}
RISEN = {"q reward T=0": [0.8] * N, "q reward T=1": [0.7, 0.9] * (N // 2), "q right T=0": [1.0] * N}
FALLEN = {name: [0.0] * N for name in START}
LR = dict(LR=0.3, KL_COEF=0.0, STEPS=40)


def row(step, reward=0.2, **changes):
    found = {"step": step, "reward": reward, "reward_std": 0.1, "frac_zero_std": 0.2, "skipped": 0, "tokens": 800}
    found |= {"length": 5.0, "seconds": {"sampling": 1.0, "update": 2.0}, "q/structure": 1.0, "q/hit_limit": 0.0}
    return found | {"q/reward": reward, "q/reward_max": max(0, reward + 0.2)} | changes


@pytest.fixture
def said(tmp_path):
    """The verdict on a run with these evaluations and steps."""

    def write(skills, rows, **settings):
        skill = {title: {name: figure(values) for name, values in skill.items()} for title, skill in skills.items()}
        for name, content in {"skill": skill, "settings": LR | settings}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return verdict(tmp_path)

    return write


STEADY = [row(step, 0.2 + 0.01 * (step % 3)) for step in range(1, 41)]


def test_what_rose_is_said_largest_first_with_its_cost(said, tmp_path):
    tried = [{"q right pass@4": [chance, chance + 0.2] * (N // 2)} for chance in (0.4, 0.6)]
    skills = {"before": START | tried[0], "step 20": START, "after": RISEN | tried[1]}
    first, fell, cost, then = said(skills, STEADY)
    assert first.startswith(
        "● green  Improved on 100 held-out questions: q reward, greedy 0.20 → 0.80 (+0.60 ± 0.00), sampled 0.20 →"
    )
    assert "; q right, greedy 50.0 → 100.0 % (+50.0 ± " in first
    assert ", pass@4 50.0 → 70.0 % (+20.0 ± 0.0)." in first
    assert fell == "Nothing got significantly worse."
    assert cost == "Cost: 40 steps, 6,400 answers, 0:02:00 excluding evaluations."
    assert f"python -m tools.evaluate {tmp_path} prints all metrics" in then and "report.html" in then


def test_what_fell_is_said_and_a_reward_that_fell_is_not_green(said):
    pawns = {"q pawns T=0": [2.0, 3.0] * (N // 2)}, {"q pawns T=0": [4.0, 5.0] * (N // 2)}
    before, after = START | pawns[0], RISEN | {"q reward T=0": [0.15] * N} | pawns[1]
    first, fell, others, *_ = said({"before": before, "after": after}, STEADY)
    assert first.startswith("● yellow  Improved on") and fell.startswith(
        "Got worse: q reward, greedy 0.20 → 0.15 (-0.05 ± 0.00)."
    )
    assert others == "Also changed: q pawns, greedy 2.50 → 4.50 (+2.00 ± 0.00)."  # of no known sense
    before, after = START | {"q a_error T=0": [0.1] * N}, START | {"q a_error T=0": [0.9] * N}
    assert said({"before": before, "after": after}, STEADY)[0].startswith("● yellow  Nothing improved")


def test_pass_at_1_is_said_where_sampled_answers_say_nothing(said):
    once = {"q right pass@1": [0.2, 0.4] * (N // 2)}, {"q right pass@1": [0.5, 0.7] * (N // 2)}
    first, *_ = said({"before": START | once[0], "after": START | once[1]}, STEADY)
    assert first.startswith("● green  Improved on 100 held-out questions: q right, pass@1 30.0 → 60.0 % (+30.0 ± 0.0).")
    both = RISEN | {"q right T=1": [1.0] * N} | once[1]
    first, *_ = said({"before": START | {"q right T=1": [0.0] * N} | once[0], "after": both}, STEADY)
    assert "sampled" in first and "pass@1" not in first


CAUSES = {  # of a run in which nothing rose
    "the start model's most likely answers are right": dict(skill=START | {"q reward T=0": [1.0] * N}),
    "so raise TEMPERATURE or GROUP_SIZE": dict(frac_zero_std=0.9),
    "every answer got the same reward (0.2), so remove the cap if the task's grade has one": dict(
        frac_zero_std=1.0, reward_std=0.0
    ),
    "40 of 40 updates were skipped, so lower LR": dict(skipped=1),
    "as CONTROL requests": dict(CONTROL="shuffle"),
    "a gain in reward of less than 0.037 would go unnoticed; raise STEPS, LR or EVAL_POSITIONS": dict(),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_where_nothing_rose_the_likely_reason_is_said(cause, said):
    changes = dict(CAUSES[cause])
    skill, control = changes.pop("skill", START), changes.pop("CONTROL", "none")
    after = skill | {"q reward T=1": [v + 0.1 * ((i // 2) % 2) - 0.05 for i, v in enumerate(skill["q reward T=1"])]}
    first, *_, then = said(
        {"before": skill, "after": after}, [row(s, **changes) for s in range(1, 41)], CONTROL=control
    )
    assert first.startswith("● yellow  Nothing improved on 100 held-out questions: ") and cause in first
    assert "TEMPERATURE" not in first or "TEMPERATURE" in cause


def test_a_gain_of_training_questions_alone_is_named(said):
    first, *_ = said({"before": START, "after": START}, [row(step, 0.01 * step) for step in range(1, 41)])
    assert "the reward rose from 0.06 to 0.36 on training questions only" in first
    first, *_ = said({"before": START, "after": START}, [row(step, 0.5 - 0.005 * step) for step in range(1, 41)])
    assert "the reward fell in training, so lower LR or raise KL_COEF" in first


def test_the_verdict_says_when_greedy_answers_have_nothing_to_gain(said):
    before, after = (skill | {"q reward T=0": [1.0] * N} for skill in (START, RISEN))
    lines = said({"before": before, "after": after}, STEADY)
    assert lines[0].startswith("● green") and "greedy answers had nothing to gain there" in lines[2]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"q/hit_limit": 0.9}, "90% of them were cut off, so raise MAX_NEW_TOKENS, or the task's LIMITS"),
        ({"q/structure": 0.1}, "only 10% of them were well-formed, so teach"),
        ({}, "the questions are too hard, or the task's grade caps the reward"),
    ],
)
def test_the_verdict_says_why_a_run_never_earns_anything(changes, reason, said):
    rows = [row(step, 0.0, **{"q/reward_max": 0.0, "frac_zero_std": 1.0, **changes}) for step in range(1, 41)]
    first, *_ = said({"before": FALLEN, "after": FALLEN}, rows)
    assert first.startswith(f"● red  No answer got a reward in 40 steps: {reason}") and "TEMPERATURE" not in first


def test_a_kind_of_question_that_the_last_step_lacks_counts(said):
    other = {"p/structure": 1.0, "p/hit_limit": 0.0, "p/reward": 0.0, "p/reward_max": 0.0}
    rare = [{name: x for name, x in row(step, 0.0).items() if name[:2] != "q/"} | other for step in range(2, 41)]
    unpaid = row(1, 0.0, **{"q/reward_max": 0.0})
    assert said({"before": FALLEN, "after": FALLEN}, [unpaid, *rare])[0].startswith("● red  No answer got a reward")
    assert said({"before": FALLEN, "after": RISEN}, [*rare, *STEADY])[2].startswith("No answer to p questions got")


def test_a_run_that_learnt_and_collapsed_is_red(said):
    rows = [row(step, 0.02 * step if step < 30 else 0.0) for step in range(1, 41)]
    first, *_ = said({"before": START, "after": FALLEN}, rows)
    assert first.startswith("● red  The q reward collapsed: it was 0.20 before the run and is 0.00 at the end.")
    assert first.endswith("Lower LR from 0.3 to 0.03, or raise KL_COEF (now 0).")
    first, *_ = said({"before": START, "step 20": RISEN, "after": FALLEN}, STEADY)
    assert "it was 0.80 at step 20 and is 0.00 at the end" in first


def test_a_collapse_is_judged_by_what_was_seen_last(said):
    rising = [row(step, 0.02 * step) for step in range(1, 31)]
    assert not said({"before": START}, rising)[0].startswith("● red")  # the evaluation was before these steps
    falling = [row(step, 0.9 if step < 25 else 0.0) for step in range(1, 41)]
    first, *_ = said({"before": START, "step 20": RISEN}, falling)
    assert first.startswith("● red  The q reward collapsed") and first.count("is 0.00 at the end")


def test_held_out_questions_that_always_earned_less_are_no_collapse(said):
    rows = [row(step, min(0.9, 0.2 + 0.03 * step)) for step in range(1, 41)]
    first, *_ = said({"before": START, "after": START}, rows)
    assert first.startswith("● yellow  Nothing improved") and "on training questions only" in first
    first, *_ = said({"before": START, "after": START}, [row(step, 0.9 if step < 25 else 0.1) for step in range(1, 41)])
    assert first.startswith("● red  The q reward collapsed: it was 0.90 around step 10 and is 0.10 at the end.")


def test_a_piece_of_the_reward_named_reward_is_no_kind(said):
    rows = [row(step, 0.2, **{"q/earned/reward": 0.04 if step < 25 else 0.01}) for step in range(1, 41)]
    assert not said({"before": START, "after": START}, rows)[0].startswith("● red")
    rows = [row(step, 0.0, **{"q/earned/reward": 0.0, "q/reward_max": 0.0}) for step in range(1, 41)]
    assert said({"before": FALLEN, "after": FALLEN}, rows)[0].startswith("● red  No answer got a reward")


def test_a_run_that_was_stopped_says_what_is_known(said):
    first, *_, cost, _ = said({"before": START}, STEADY[:30])
    assert "evaluated only before the run" in first and first.endswith("went from 0.21 to 0.21.")
    assert cost.startswith("Cost: 30 of 40 steps") and cost.endswith("last evaluated before the run.")
    first, *_, cost, _ = said(
        {"before": START, "step 20": RISEN}, STEADY[:20] + [row(step, 0.8) for step in range(21, 31)]
    )
    assert first.startswith("● green  Improved") and cost.endswith("; last evaluated at step 20.")


def test_a_control_that_rises_is_not_green(said):
    first, *_ = said({"before": START, "after": RISEN}, STEADY, CONTROL="shuffle")
    assert first.startswith("● yellow  Improved on 100") and first.endswith("so the reward did not cause it.")


def test_among_many_rows_chance_is_counted_once():
    assert beyond_chance({"a": (0.11, 0.1, 99)}) == ["a"]  # alone, an interval that leaves zero out is enough
    many = {str(i): (0.0, 0.1, 99) for i in range(50)}
    assert beyond_chance(many | {"a": (0.11, 0.1, 99)}) == []
    assert beyond_chance({"0": (0.0, 0.0, 99)} | many | {"a": (-0.3, 0.1, 99), "b": (1.0, 0.0, 99)}) == ["b", "a"]


@pytest.mark.parametrize("count, certain", [(3, False), (30, True)])
def test_a_few_questions_that_all_changed_are_no_success_among_many_rows(count, certain):
    rows = {str(i): gain([0.0, 1.0] * 50, [0.0, 1.0] * 50) for i in range(70)}
    few = gain([0.0] * count + [None] * 100, [1.0] * count + [None] * 100)
    assert beyond_chance(rows | {"few": few}) == ["few"] * certain


def test_an_untouched_folder_has_no_verdict(tmp_path):
    assert verdict(tmp_path) == ["● yellow  The run has not made a step yet."]


def test_a_run_ends_with_its_verdict_a_card_and_a_code(toy_run, tmp_path, monkeypatch, capsys):
    toy_run(EVAL_POSITIONS=20)
    printed, out = capsys.readouterr().out, tmp_path / "out"
    assert "short reward T=1 " not in printed  # the table is that of tools.evaluate
    told = " ".join(printed.split())
    assert all(line.split("  ")[0] in told for line in verdict(out)) and "Cost: 2 steps" in printed
    card = (out / "model" / "README.md").read_text()
    assert (
        f"- Task: {toy.__file__}" in card
        and verdict(out)[-2] in card
        and str(tmp_path / "out") not in card.split("## Verdict")[1]
        and "transformers" in card
    )
    monkeypatch.setattr(toy, "grade", lambda *_: toy.Grade((), {}))
    with pytest.raises(SystemExit) as ended:
        toy_run("unpaid")
    assert ended.value.code == 1 and "● red  No answer got a reward in 2 steps" in capsys.readouterr().out
    assert (tmp_path / "unpaid/model/README.md").exists()


@pytest.mark.parametrize("error", [SystemExit("error: show of the task failed."), ValueError("no picture")])
def test_a_report_that_fails_does_not_fail_the_run(error, toy_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toy.NO_REPORT[1], "side_effect", error)
    toy_run()
    assert f"{error}\nThe report could not be written." in capsys.readouterr().out and finished(tmp_path / "out")
