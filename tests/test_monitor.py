import math
from types import SimpleNamespace

import pytest

import toy
from nanorook import monitor
from nanorook.task import Grade
from rollout import Answer

HEALTHY = dict(broken=False, skipped=0, kl=0, frac_zero_std=0, grad_norm=1, reward=0.5)
HEALTHY |= dict(clip_low=0, clip_high=0, logprob_gap=0)
KIND = dict(hit_limit=0, reward_max=1, frac_zero_std=0, reward=0.5, structure=1.0, kl=0, logprob_gap=0)
HEALTHY |= {f"{kind}/{name}": value for kind in "ab" for name, value in KIND.items()}


def test_metrics_are_means_over_the_answers_of_a_kind():
    questions, texts = [*[toy.Question("a", "", 0)] * 2, toy.Question("b", "", 0)], ["00", "1", "0"]
    answers = [Answer(q, t, [], t == "1", toy.grade(q, t)) for q, t in zip(questions, texts)]
    metrics = monitor.describe_answers(answers, 1)
    assert metrics["a/characters"] == 1.5 and metrics["b/characters"] == 1
    assert metrics["a/earned/even"] == pytest.approx(1 / 7) and metrics["a/earned/first"] == pytest.approx(1 / 32)
    assert metrics["a/reward"] == pytest.approx(metrics["a/earned/even"] + metrics["a/earned/first"])
    assert metrics["a/reward_max"] == pytest.approx(2 / 7) and metrics["reward_std"] > 0.1
    assert metrics["a/hit_limit"] == 0.5 and metrics["a/frac_zero_std"] == 1
    assert monitor.describe_answers(answers[:2], 2)["a/frac_zero_std"] == 0


def test_the_log_looks_back_on_the_first_step_and_on_the_last_forty(tmp_path):
    past = []
    for step in range(60):
        past = monitor.write_metrics(tmp_path / "log", past, {"step": step, "tokens": 3, "seconds": {"update": 2.0}})
    assert [row["step"] for row in past] == [0, *range(20, 60)] and past[-1]["tokens_per_second"] == 1.5


STATES = {
    "red": [{"broken": True}, {"skipped": 1}, {"b/kl": 1.5}, {"b/structure": 0.1}, {"b/hit_limit": 0.9}]
    + [{"b/reward_max": -1}],
    "yellow": [{"b/frac_zero_std": 0.6}, {"clip_low": 0.4}, {"b/logprob_gap": 0.1}, {"b/reward": 0.1}]  # it falls
    + [{"b/hit_limit": 0.3}, {"b/structure": 0.5}, {"grad_norm": 11}],
    "green": [{}, {"b/frac_zero_std": 0.6, "b/reward": 0.9}],  # most questions are solved
}


def test_advice_names_the_cause():
    """Not TEMPERATURE where the reward is capped or answers are cut off, nor the limit after a collapse."""

    def advice(**changes):
        row = HEALTHY | {f"b/{name}" if name in KIND else name: value for name, value in changes.items()}
        return monitor.diagnose(row, past, 1, 1)["advice"]

    for past in ([], [HEALTHY] * 3):
        assert "remove the cap" in advice(reward=0.2, reward_max=0.2, frac_zero_std=1.0)
        assert "no b answer gets a reward" in advice(reward_max=0, reward=0, frac_zero_std=1.0)
        assert "b answers are cut off" in advice(hit_limit=0.3, frac_zero_std=0.6)
        assert ("b answers no longer end before their limit: lower LR" in advice(hit_limit=1.0)) == bool(past)


def test_what_is_highest_in_one_kind_is_seen_also_where_it_is_not_a_number():
    kinds = {"kl": 0.3, "a/kl": 0.1, "b/kl": 0.9, "b/kl/x": 5.0}
    assert monitor.highest(kinds, "kl") == (0.9, "b")
    value, kind = monitor.highest(kinds | {"a/kl": math.nan}, "kl")
    assert math.isnan(value) and kind == "a"
    assert math.isnan(monitor.highest({"kl": 0.3}, "kl")[0])


def test_figures_have_gaps_where_there_is_no_value():
    found = [("b", {"right": 1.0}), ("a", {}), ("c", {"right": 0.0, "pawns": 3.0})]
    grades = [(prompt, Grade((("all", i / 4),), metrics)) for i, (prompt, metrics) in enumerate(found)]
    answers = [Answer(toy.Question("k", prompt, 0), "", [], False, grade) for prompt, grade in grades]
    expected = {"k reward": [0.0, 0.25, 0.5], "k right": [1.0, None, 0.0], "k pawns": [None, None, 3.0]}
    assert monitor.values_by_name(answers) == expected
    assert monitor.describe_answers(answers, 3)["k/right"] == 0.5


@pytest.mark.parametrize("state", STATES)
def test_a_step_is_diagnosed(state):
    for change in STATES[state]:
        past = [HEALTHY] * 20 + [HEALTHY | change] * 20
        found = monitor.diagnose(HEALTHY | change, past, kl_threshold=1.0, max_grad_norm=1.0)
        assert found["state"] == state and bool(found["advice"]) == (state != "green"), change
        assert (" b " in found["advice"]) == any(name.startswith("b/") for name in change if state != "green"), found


def test_a_step_is_one_line():
    row = HEALTHY | {"a/reward": 0.25, "b/reward": 0.75, "seconds": {"rollout": 3.0, "update": 1.0}, "advice": "x"}
    line = monitor.progress_line([row | {"step": step, "state": "red"} for step in (6, 7, 8)], 80, 22.4)
    assert (
        line == "step 8/80 reward 0.500 (a 0.25, b 0.75) kl 0.0000 zero-std 0% 0:05:10 left ● red\n  x"
    )  # evaluations counted


def test_the_worst_and_the_best_answer_are_shown_with_parts_that_add_up(capsys):
    grades = [(("form", 0.0375), ("legal 1", 0.025), ("legal 2", 0.0125)), (("form", 0.0375), ("runaway", -0.3)), ()]
    texts, question = ["fine", "\x1b]0;title\x07 \r\x9b2J\u202e\ud800", "x"], toy.Question("a", "why?\n", 0)
    answers = [Answer(question, text, [], False, Grade(pieces, {})) for text, pieces in zip(texts, grades)]
    monitor.show(toy, answers)
    worst = r"worst of 3: why?|-> \x1b]0;title\x07 \r\x9b2J\u202e\ud800|-0.2625 = 0.0375 form - 0.3 runaway"
    best = "best of 3: why?|-> fine|0.075 = 0.0375 form + 0.0375 legal"
    assert "|".join(map(str.strip, capsys.readouterr().out.splitlines())) == f"{worst}|{best}"
    html, text = (SimpleNamespace(show=lambda question, text, form=form: form + text) for form in ("<b>", "seen: "))
    for task, shown in ((html, "x"), (text, "seen: x")):  # a terminal draws no HTML
        monitor.show_answer(task, answers[2]._replace(hit_limit=True), "greedy ")
        assert capsys.readouterr().out == f"  greedy -> {shown} ... (cut off)\n            0 = 0\n"
        monitor.show_answer(task, answers[2]._replace(grade=None), "greedy ")  # its question may have no truth
        assert capsys.readouterr().out == "  greedy -> x\n"


def test_pass_at_k_is_the_chance_that_k_draws_hold_a_right_answer():
    assert monitor.pass_at_k([1, *[0] * 3, *[1.0] * 4, *[None] * 4, *[0] * 4], 4, 2) == [1 - 3 / 6, 1, None, 0]
    wrong, right = {"structure": 0.0, "right": False}, {"structure": 1.0, "right": True, "pawns": 2.0}
    tried = [wrong, *[right] * 63, *[wrong] * 64]  # two questions
    answers = [Answer(toy.Question("q", "", 0), "", [], False, Grade((), metrics)) for metrics in tried]
    found = {name: figure[0] for name, figure in monitor.pass_rates(answers, 64).items()}
    ks = {1: 63 / 128, 4: 0.5, 16: 0.5, 64: 0.5}
    assert found == {f"q {name} pass@{k}": pytest.approx(x) for name in ("structure", "right") for k, x in ks.items()}
