import json
from unittest.mock import Mock
from zlib import crc32

import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo
import toy
import train
from model import GPT
from nanorook import hardware, monitor, report, settings
from nanorook.run import STEP
from nanorook.statistics import figure
from nanorook.task import Grade
from rollout import generate


def test_a_run_leaves_what_it_promises(tmp_path, toy_model, monkeypatch, capsys):
    monkeypatch.setenv("SAVE_EVERY", "1")
    monkeypatch.setattr(toy.NO_REPORT[1], "side_effect", report.write)  # here it is written
    out = tmp_path / "out"
    assert toy.main(out, MODEL=toy_model, BATCH_POSITIONS=8, EVAL_POSITIONS=21) is None
    assert [row["step"] for row in toy.rows(out)] == [1, 2]
    assert "<html" in (out / "report.html").read_text().lower()
    assert sorted(folder.name for folder in out.glob(STEP)) == ["step-000001", "step-000002"]
    rows = {f"{kind} reward T={temperature}" for kind in ("short", "long") for temperature in (0, 1)}
    assert rows <= {*json.loads((out / "skill.json").read_text())["after"]}
    assert json.loads((out / "settings.json").read_text())["SAVE_EVERY"] == 1
    about = json.loads((out / "run.json").read_text())
    assert {"commit", "machine", "dtype"} <= {*about} and f"OUT_DIR={out}" in about["command"]
    assert "SAVE_EVERY=1" in about["command"]
    told = capsys.readouterr().out
    assert "step 2/2 reward" in told and "● " in told
    assert "EVAL_POSITIONS=21, but only 20 items are held out; all are used" in told
    trained, before = GPT.load(out / "model"), GPT.load(toy_model).state_dict()
    assert not [name for name, weight in trained.state_dict().items() if torch.equal(weight, before[name])]
    tokens, hf = torch.arange(20)[None], AutoModelForCausalLM.from_pretrained(out / "model")
    torch.testing.assert_close(hf(tokens).logits, trained(tokens), atol=1e-4, rtol=0)


def test_a_start_model_is_not_overwritten_and_bad_settings_delete_nothing(toy_run, tmp_path):
    toy_run(STEPS=1)
    folder = str(tmp_path / "out" / "step-000001")
    for model, fresh, sentence in (folder, 0, "lies in OUT_DIR"), (folder, 1, "lies in OUT_DIR"), ("x", 1, "no such"):
        with pytest.raises(SystemExit, match=sentence):
            toy_run(MODEL=model, FRESH=fresh)
        assert len(toy.rows(tmp_path / "out")) == 1 and GPT.load(folder)


@pytest.mark.parametrize("name, error", [
    ("decode", torch.OutOfMemoryError("CUDA out of memory. Tried ...")),
    ("score", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate ...")),
])  # fmt: skip
def test_out_of_memory_is_one_sentence(name, error, tmp_path, toy_model, monkeypatch):
    monkeypatch.setattr(GPT, name, Mock(side_effect=error))
    said = toy.main(tmp_path, MODEL=toy_model, MICROBATCH_TOKENS=77)
    assert said.startswith("error: out of memory: in the update, set MICROBATCH_TOKENS") and "BATCH_POSITIONS" in said


def test_a_run_is_the_same_each_time_and_its_seed_is_kept(toy_run, tmp_path):
    rows = toy_run("a")
    assert toy_run("b") == rows != toy_run("c", SEED=1)
    with pytest.raises(SystemExit, match="started with SEED=1; use that again, name another OUT_DIR, or start over"):
        toy_run("c", SEED=2)
    assert toy_run("c", SEED=0, FRESH=True) == rows
    with pytest.raises(SystemExit, match="contains a run of 2 steps, so none is left with STEPS=2; raise STEPS, name"):
        toy_run("c", SEED=0)
    toy_run("c", SEED=0, STEPS=3)
    assert list(json.loads((tmp_path / "c" / "skill.json").read_text())) == ["before", "step 2", "after"]


def test_a_run_is_not_resumed_with_another_control_loss_or_setting_of_the_task(toy_run, monkeypatch, tmp_path):
    """Its verdict goes by the last value: 30 shuffled steps and 10 paid ones once ended green."""
    toy_run(STEPS=1)
    left = toy.left_by(tmp_path / "out")
    with pytest.raises(SystemExit, match="started with CONTROL=none; use that again, name another OUT_DIR, or start"):
        toy_run(STEPS=2, CONTROL="shuffle")
    assert toy.left_by(tmp_path / "out") == left
    monkeypatch.setitem(settings.SETTINGS, "TASKS_OWN", ("1.0", "a setting of the task", 1.0))
    old = settings.values()
    decides = "CONTROL CREDIT LOSS BEST_OF BEST_OF_SCHEDULE SCALE_REWARDS KL_ESTIMATOR TASKS_OWN".split()
    for name in [*decides, "MODEL", "DATA", "TASK", "SEED", "TEMPERATURE", "LORA_RANK"]:
        with pytest.raises(SystemExit, match=f"started with {name}=other"):
            settings.changed_since(old | {name: "other"})
    assert settings.changed_since(old | {"LR": 7, "OUT_DIR": "other"}) == [("LR", 7, old["LR"])]
    assert {*settings.MAY_CHANGE} < old.keys()


def test_a_resumed_run_follows_todays_settings_and_optimizer_and_records_the_changes(toy_run, tmp_path, monkeypatch):
    def changes():
        return json.loads((tmp_path / "out/run.json").read_text())["changes"]

    toy_run(STEPS=1, LR_SCHEDULE="constant")
    assert changes() == []
    assert toy_run(STEPS=2, LR=0.01, LR_SCHEDULE="constant")[1]["lr"] == 0.01
    assert changes() == [[1, "STEPS", 1, 2], [1, "LR", 0.001, 0.01]]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # before it has saved a checkpoint
        patch.setattr(train, "update", Mock(side_effect=KeyboardInterrupt))
        toy_run(STEPS=3, LR=0.01, LR_SCHEDULE="constant")
    made = []
    adamw = lambda model: made.append(torch.optim.AdamW(model.parameters(), weight_decay=0.5)) or made  # noqa: E731
    monkeypatch.setattr(train, "make_optimizers", adamw)
    toy_run(STEPS=3, LR=0.01, LR_SCHEDULE="constant")
    assert changes() == [[1, "STEPS", 1, 2], [1, "LR", 0.001, 0.01], [2, "STEPS", 2, 3]]
    assert made[0].param_groups[0]["weight_decay"] == 0.5  # today's, with the moments of the checkpoint
    assert {state["step"].item() for state in made[0].state.values()} == {3}


class Halved(GPT):
    """An architecture whose training forward is its own."""

    def score(self, *args):
        return super().score(*args) / 2


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_an_architecture_is_trained_with_its_own_score(wanted, toy_settings, monkeypatch):
    """It is compiled once, for policy and reference alike."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda score, dynamic: compiled.append(score) or score)
    toy_settings(COMPILE=wanted)
    plain = toy.model()
    policy = Halved(plain.config)
    policy.load_state_dict(plain.state_dict())
    policy.tokenizer = plain.tokenizer
    rollout = generate(policy, [[7, 8], [9]], 2, [5, 5], noise=torch.rand(4, 5))
    hidden = policy.score(rollout.prompts, rollout.prompt_lengths, rollout.completions)
    V, most_logits = policy.config.vocab_size, policy.most_logits
    expected, _ = grpo.logprobs_and_entropy(hidden, rollout.completions, policy.head, V, 1.0, most_logits)
    found = [train.forward(model, rollout, 1.0)[0] for model in (policy, train.make_reference(policy), plain)]
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[0], found[1]) and (found[0] - found[2]).abs().max() > 0.1
    assert compiled == [Halved.score, GPT.score] * (wanted == "1")


def test_without_a_kl_no_reference_is_loaded(toy_run, monkeypatch):
    monkeypatch.setattr(train, "make_reference", Mock(side_effect=AssertionError))
    assert "kl" not in toy_run(STEPS=1, KL_COEF=0.0)[0]


def test_the_best_checkpoint_is_kept_whenever_it_is_evaluated(toy_settings, toy_run, monkeypatch, tmp_path):
    scores, answers = iter([0.0, 0.9, 0.5, 0.2]), train.answer_questions(toy.model(), toy.questions(2), 1)
    evaluate = lambda *_: ({"kind reward T=1": figure([next(scores)])}, answers)  # noqa: E731
    monkeypatch.setattr(train, "evaluate", evaluate)
    toy_run(STEPS=6, EVAL_EVERY=2, SAVE_EVERY=5)
    assert sorted(folder.name for folder in (tmp_path / "out").glob(STEP)) == [f"step-{n:06d}" for n in (2, 5, 6)]


def test_the_dtype_is_decided_once(toy_run, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "fastest_dtype", lambda device: torch.bfloat16)
    toy_run(DTYPE="auto", STEPS=1)
    monkeypatch.setattr(hardware, "fastest_dtype", lambda device: torch.float32)
    toy_run(DTYPE="auto", STEPS=2)  # although another is faster now
    assert json.loads((tmp_path / "out/run.json").read_text())["dtype"] == "bfloat16"


def test_a_batch_that_cannot_be_filled_is_refused(toy_run):
    with pytest.raises(SystemExit, match="has 100 items to train on and .* but at least BATCH_POSITIONS=101"):
        toy_run("large", BATCH_POSITIONS=101)


def test_evaluation_is_the_mean_of_the_grades(toy_settings):
    model, questions = toy.model(), toy.questions(40)
    figures, shown = train.evaluate(model, questions)
    noise = torch.rand(40, 1, 7, generator=torch.Generator().manual_seed(0))
    for t in (0, 1):
        rollouts = train.sample(model, questions, 1, toy.LIMITS, t, noise)
        answers = [answer for rollout in rollouts for answer in rollout.answers]
        expected = monitor.figures(train.grade_answers(toy, answers))
        assert len(expected) == 4 and figures | {f"{name} T={t}": value for name, value in expected.items()} == figures
    assert {(a.question, a.text) for a in shown} == {(a.question, a.text) for a in answers}  # the sampled ones


def test_training_asks_about_its_own_side_and_each_step_draws_anew(toy_run, monkeypatch):
    asked, honest = [], toy.make_questions

    def listen(items, n, rng, config):
        asked.append((n, {*items}, questions := honest(items, n, rng, config)))
        return questions

    monkeypatch.setattr(toy, "make_questions", listen)
    first, second = toy_run(STEPS=2, EVAL_POSITIONS=5, OVERFIT=True, CONTROL="zero")
    assert {n: items for n, items, _ in asked} == {4: {*range(100)}, 5: {*range(100, 120)}} and len(asked) == 4
    assert asked[2][2] == asked[3][2] and first["reward"] != second["reward"]  # the same questions, other answers


def test_each_seed_draws_its_own_held_out_questions_and_names_them(toy_run, tmp_path):
    asked = {}
    for out, changes in {"a": dict(SEED=0), "b": dict(SEED=1), "a again": dict(SEED=0, STEPS=2)}.items():
        folder = tmp_path / out[0]
        toy_run(folder, **dict(STEPS=1, EVAL_POSITIONS=9) | changes)  # the last one is resumed
        asked[out] = json.loads((folder / "run.json").read_text())["questions"]
        skill = json.loads((folder / "skill.json").read_text())
        assert all(len(skill[title][f"{k} reward T=1"][2]) == len(asked[out][k]) for k in asked[out] for title in skill)
    assert asked["a"] == asked["a again"] != asked["b"]


def test_values_stand_in_the_order_of_the_questions_even_if_one_is_asked_twice(toy_run, tmp_path, monkeypatch):
    honest = toy.make_questions
    monkeypatch.setattr(toy, "make_questions", lambda *given: (some := honest(*given))[:-1] + some[:1])
    monkeypatch.setattr(toy, "grade", lambda question, text, _: Grade((("x", len(text)),), {"item": question.truth}))
    toy_run("out", EVAL_POSITIONS=9)
    names = json.loads((tmp_path / "out" / "run.json").read_text())["questions"]
    values = json.loads((tmp_path / "out" / "skill.json").read_text())["before"]
    items = {crc32(("." * (item % 3) + f"{item}?").encode()): item for item in range(100, 120)}
    assert all(values[f"{kind} item T=0"][2] == [items[name] for name in asked] for kind, asked in names.items())


def test_in_bf16_the_sampler_follows_the_weights(toy_run):
    changes = dict(DTYPE="bfloat16", LR=0.02, LR_SCHEDULE="constant", KL_COEF=0.0, EVAL_EVERY=0)
    assert toy_run(STEPS=4, **changes)[-1]["logprob_gap"] < 0.05
