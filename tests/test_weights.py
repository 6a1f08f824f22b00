import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rewards
from model import GPT
from nanorook.task import grade_answers
from rollout import detokenize, sample
from tools import chess_texts as texts
from toy import ROOT

FOLDER = ROOT / rewards.start_model()


@pytest.fixture(scope="module")
def tiny():
    return GPT.load(FOLDER)


@pytest.fixture(scope="module")
def questions(tiny):
    held_out = rewards.load("builtin", tiny.config)[1]
    return rewards.make_questions(held_out, 200, random.Random(0), tiny.config)


def test_it_is_small_and_opens_in_transformers(tiny, questions):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 12e6
    prompt = questions[0].prompt
    ids = AutoTokenizer.from_pretrained(FOLDER)(prompt, return_tensors="pt").input_ids
    assert ids[0].tolist() == tiny.tokenizer.encode(prompt) and detokenize(tiny.tokenizer, ids[0].tolist())[0] == prompt
    assert tiny.tokenizer.eos == tiny.config.eos_token_id < tiny.tokenizer.vocab_size <= tiny.config.vocab_size
    hf = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(tiny(ids), hf(ids).logits, atol=1e-3, rtol=0)  # logits reach 25


def test_ideal_answers_fit_behind_its_prompts(tiny, questions):
    text_format = rewards.chess_format(tiny.config)
    for kind, prompt, truth, *_ in questions:
        if kind == "policy":
            labels = [(uci, round(100 * pawns)) for uci, pawns in truth["five"].items()]
            answer = texts.policy_completion(rewards.contract_board(prompt[3:].strip()), labels, text_format)
        elif kind == "environment":
            answer = texts.environment_completion(*truth, text_format)
        else:
            answer = max(truth["legal"], key=len) + " "
        prompt, answer = map(tiny.tokenizer.encode, (prompt, answer))
        length = len(answer) + (kind in ("policy", "environment"))  # and the token that ends it
        assert length <= rewards.LIMITS[kind] and len(prompt) + length <= tiny.config.n_positions


def test_it_is_fluent(tiny, questions):
    """At temperature 1, so that groups have answers to be told apart."""
    torch.set_flush_denormal(True)  # as train.py does; conftest.py undoes it
    questions = [q for kind in rewards.LIMITS for q in [q for q in questions if q.kind == kind][:6]]
    noise = torch.rand(len(questions), 1, max(rewards.LIMITS.values()), generator=torch.Generator().manual_seed(0))
    for rollout in sample(tiny, questions, 1, rewards.LIMITS, noise=noise):
        grades = [answer.grade for answer in grade_answers(rewards, rollout.answers)]
        assert sum(grade.metrics["structure"] for grade in grades) >= 0.8 * len(grades) >= 4
        if rollout.kind == "policy":
            assert sum(grade.metrics["legal"] for grade in grades) >= 0.3 * len(grades)
