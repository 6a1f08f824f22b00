import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo
import toy
import train
from nanorook.task import Grade
from tools import doctor

NAMES = "computing,questions,form,long completions,short completions,long rewards,short rewards,update,learning"


@pytest.fixture
def examine(monkeypatch):
    """The checks by name: of train.py with changed functions, of another policy, reference, ..."""

    def run(policy=None, reference=None, parameters=None, questions=None, **settings):
        task = SimpleNamespace(**{**vars(toy), "LIMITS": {"short": 19, "long": 19}})  # few answers are cut off
        usual = dict(task=task, BATCH_POSITIONS=8, GROUP_SIZE=4, COMPILE="0", LR=1e-3, DEVICE="cpu")
        for name, value in (usual | settings).items():
            monkeypatch.setattr(train, name, value)
        policy, reference = policy or toy.model(), reference or train.make_reference(toy.model())
        optimizer = torch.optim.AdamW(parameters or policy.parameters(), lr=train.LR, weight_decay=0)
        checks = doctor.run_checks(policy, reference, [optimizer], questions or toy.questions(8))
        return {check.name: check.sentence for check in checks}

    return run


def said(found, name, words):
    wrong, sentence = next((name, sentence) for name, sentence in found.items() if sentence)
    assert name in wrong and words in sentence


def test_a_healthy_rollout_passes_every_check(examine):
    found = examine()
    assert sorted(found) == sorted(NAMES.split(",")) and not any(found.values()), found
    bf16 = [toy.model().set_compute_dtype(torch.bfloat16) for _ in range(2)]
    found = examine(bf16[0], train.make_reference(bf16[1]))
    assert not any(found[name] for name in ("weights", "computing", "update")), found


def test_a_machine_that_multiplies_wrongly(examine, monkeypatch):
    linear = torch.nn.functional.linear
    wrong = lambda x, *rest: linear(x, *rest) * (1.02 if x.dtype == torch.float32 else 1)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    said(examine(), "computing", "float32 is off by")


def test_weights_halfway_between_two_numbers_of_bf16():
    """fp16 has three more bits than bf16, so an eighth of its numbers lie halfway between two of bf16."""
    model = toy.model()
    assert not doctor.halfway(model).sentence
    for p in model.parameters():
        p.data = p.data.half().float()
    sentence = doctor.halfway(model).sentence
    assert sentence.startswith("1") and "% of the weights lie halfway" in sentence


def test_a_truth_that_is_a_stub_or_missing(examine, monkeypatch):
    """Where a question lacks labels, grade() asks the engine, and its metrics say if that knew."""
    same = [question._replace(truth=7) for question in toy.questions(16)]
    assert not examine(questions=same[:8])["questions"]  # so few may agree by chance
    said(examine(questions=same), "questions", "have the same reference answer")
    one_lacks_it = [*toy.questions(7), same[0]._replace(truth=None)]
    said(examine(questions=one_lacks_it), "questions", "1 have no reference answer")
    questions, grade = [question._replace(truth=None) for question in toy.questions(8)], toy.grade
    monkeypatch.setattr(toy, "grade", lambda *args: grade(*args)._replace(metrics={"unlabelled": 0.0}))
    assert not examine(questions=questions)["questions"]


SPOILED = {
    "not the text": lambda r: replace(r, completions=r.completions.where(r.completions > 250, r.completions + 1)),
    "so it is not trained": lambda r: replace(r, completion_mask=r.completion_mask & (r.completions != 256)),
}


@pytest.mark.parametrize("words", SPOILED)
def test_a_rollout_that_is_not_what_was_graded(examine, monkeypatch, words):
    add = train.add_advantages

    def spoiled(rollout, *rest):
        add(rollout, *rest)
        vars(rollout).update(vars(SPOILED[words](rollout)))

    monkeypatch.setattr(train, "add_advantages", spoiled)
    monkeypatch.setattr(train.monitor, "check_agreement", lambda *_: "")  # which would end a run
    said(examine(), "completions", words)


WORTHS = {"scale them": lambda r: 1e6 * r, "if grade caps it": lambda r: min(0.05, r / 9)}


@pytest.mark.parametrize("words", WORTHS)
def test_rewards_that_teach_nothing_or_too_much(examine, monkeypatch, words):
    honest = toy.grade
    monkeypatch.setattr(toy, "grade", lambda *args: Grade((("all", WORTHS[words](honest(*args).reward)),), {}))
    said(examine(), "rewards", words)


def test_one_likely_answer_is_no_cap():
    likely = SimpleNamespace(question=toy.questions(1)[0], text="abc", grade=Grade((("all", 0.2),), {}))
    assert not doctor.rewards(SimpleNamespace(answers=[likely] * 8, kind="short")).sentence


def test_text_without_structure_does_not_start_a_run(examine, monkeypatch):
    monkeypatch.setattr(toy, "grade", lambda question, text, hit_limit=False: Grade((), {"structure": 0.0}))
    assert "answers are well-formed" in examine()["form"]


def test_sides_that_differ_are_named_as_a_run_names_them(examine, monkeypatch):
    said(examine(reference=train.make_reference(toy.model(1))), "update", "reference is not the start model")
    sample = doctor.sample
    monkeypatch.setattr(doctor, "sample", lambda m, q, g, n, _, *rest: sample(m, q, g, n, 1.0, *rest))
    assert "ampling and training disagree by" in examine(TEMPERATURE=0.7)["update"]


def test_learning_rates_and_signs(examine, monkeypatch):
    said(examine(LR=5.0), "learning", "lower LR=5")
    policy = toy.model()
    said(examine(policy, policy.inference_copy(torch.float32)), "update", "The reference moved with the policy")
    said(examine(LR=0.0), "update", "did not move")
    said(examine(parameters=copy.deepcopy(toy.model()).parameters()), "update", "whether the optimizer has all of them")
    said(found := examine(CONTROL="zero"), "update", "The gradient is 0")
    assert "learning" not in found
    loss = grpo.policy_loss
    monkeypatch.setattr(grpo, "policy_loss", lambda *a, **k: (-(result := loss(*a, **k))[0], result[1]))
    said(examine(CONTROL="none"), "learning", "look for a wrong sign")


def test_a_kind_whose_questions_stop_at_different_texts_is_one_kind(examine, monkeypatch):
    questions = [q._replace(kind="long", stop="e" * (n > 3)) for n, q in enumerate(toy.questions(8))]
    add, paid = train.add_advantages, iter([1, 0])  # of the two rollouts only the first is paid

    def scaled(rollout, *rest):
        add(rollout, *rest)
        rollout.advantages *= next(paid)

    monkeypatch.setattr(train, "add_advantages", scaled)
    assert "learning" in examine(questions=questions)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_command(rank, monkeypatch, capsys, toy_settings, toy_model):
    toy_settings(MODEL=toy_model, BATCH_POSITIONS=8, LORA_RANK=rank, LR=1e-2, KL_COEF=0.1)
    monkeypatch.setattr("sys.argv", ["doctor"])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    assert end.value.code == 0 and "all checks are ok" in capsys.readouterr().out
