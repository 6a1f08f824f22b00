import math
import random
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rewards
import toy
import train
from examples import mates
from model import GPT, GPTConfig
from nanorook.task import Grade, Question
from nanorook.tokenizer import Tokenizer
from rook import positions
from tools import chess_cut as cut
from tools import compare, exact, exact_gradient

FENS = "r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4", "4k3/P7/4K3/8/8/8/8/7R w - - 0 1"


def chess_questions(text_format):
    found = [positions.Position(fen, (), ()) for fen in FENS]
    return [rewards.first_question("mates", position, text_format) for position in found]


def small_model(text_format, folder):
    """With a tokenizer of the format, and with weights that know a little of the answers, so that samples hit them."""
    torch.manual_seed(0)
    tokenizer = {"expanded": Tokenizer.of_bytes, "squares": lambda: Tokenizer.of_bytes(squares())}
    tokenizer = tokenizer.get(text_format, lambda: Tokenizer.load(folder))()
    sizes = dict(n_positions=128, n_embd=16, n_layer=1, n_head=2, extra={"chess_format": text_format})
    model = GPT(GPTConfig(tokenizer.vocab_size, eos_token_id=tokenizer.eos, **sizes))
    model.tokenizer = tokenizer
    if text_format == "rookworld":  # 2,052 of GPT-2's tokens, with which the samples take seconds
        model = cut.cut(model).requires_grad_(True)
    questions = exact.listed(mates, chess_questions(text_format))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        loss = 0
        for part in exact.parts(model, mates.LIMITS, questions):
            logp = exact.logprobs(model, part, 1.0).masked_fill(~part.real, -math.inf)
            loss = loss - logp.logsumexp(1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def squares():
    return [file + rank for file in "abcdefgh" for rank in "12345678"]


@pytest.mark.parametrize("text_format", ["expanded", "squares", pytest.param("rookworld", marks=pytest.mark.slow)])
def test_probabilities_are_those_of_samples_and_add_up_to_one_with_other(text_format, gpt2_folder):
    model, questions = small_model(text_format, gpt2_folder), exact.listed(mates, chess_questions(text_format))
    n, temperature = 8_000, 0.8
    probabilities = exact.policy(model, mates.LIMITS, questions, temperature)
    asked, noise = [q.question for q in questions], torch.rand(2, n, 6, generator=torch.Generator().manual_seed(0))
    answers = []
    for part in noise.split(2000, 1):
        for rollout in train.sample(model, asked, 2000, mates.LIMITS, temperature, part):
            answers += rollout.answers
    for question, chances in zip(questions, probabilities):
        seen = Counter(spelling(a) for a in answers if a.question is question.question)
        shares = np.array([seen[text.strip()] for text in question.texts]) / n
        # Samples also reach an answer in other tokens, which these models have hardly learnt.
        assert shares == pytest.approx(chances, abs=0.002 + 4 * math.sqrt(chances.max() / n))
        assert 0.2 < chances.sum() < 1 and shares.sum() == pytest.approx(chances.sum(), abs=0.02)
        assert (abs(shares - chances) / np.sqrt(chances * (1 - chances) / n + 1e-9)).mean() < 1.5


def spelling(answer):
    """The move of an answer that ended."""
    return answer.text.split(" ")[answer.question.stop_after] if " " in answer.text and not answer.hit_limit else ""


def test_a_promotion_needs_all_six_tokens_and_a_seventh_is_never_sampled(gpt2_folder):
    question, tokenizer = chess_questions("rookworld")[1], Tokenizer.load(gpt2_folder)
    texts = rewards.answers(question)
    assert " a7a8q " in texts and len(texts) == len(question.truth["legal"])
    tokens, ends = exact.spell(tokenizer, question, " a7a8q ", 6)
    assert [tokenizer.token_bytes[i] for i in tokens[:-1]] == [b" a", b"7", b"a", b"8", b"q"]
    assert len(ends) > 20_000 and all(tokenizer.token_bytes[i].startswith(b" ") for i in ends)
    assert exact.spell(tokenizer, question, " a7a8q ", 5) is None  # it is cut off
    assert exact.spell(tokenizer, question, " a7 a8 ", 9) is None  # it has ended before
    question, tokenizer = Question("short", "1?", 1), Tokenizer.of_bytes()  # without a stop the end token follows
    assert exact.spell(tokenizer, question, "ab", 3) == ([97, 98, 256], (256,))
    assert exact.spell(tokenizer, question, "ab", 2) is None
    assert exact.spell(tokenizer, question, "", 1) == ([256], (256,))


def test_a_part_of_questions_changes_nothing(byte_model, monkeypatch):
    questions = exact.listed(mates, chess_questions("expanded") * 2)
    together = exact.policy(byte_model, mates.LIMITS, questions, 1.0)
    monkeypatch.setattr(exact, "MOST_TOKENS", 1)
    for one, other in zip(together, exact.policy(byte_model, mates.LIMITS, questions, 1.0)):
        assert one == pytest.approx(other, rel=1e-3)


def test_an_answer_that_is_listed_twice_is_refused():
    task = SimpleNamespace(answers=lambda question: ["a", "a"], grade=None)
    with pytest.raises(SystemExit, match="answers to '1.' contain one twice"):
        exact.listed(task, [Question("short", "1?", 1)])


class Letters:
    """A task in which one of four letters is asked for; the first is right, the second a little."""

    LIMITS = {"letter": 2}
    worth = {"a": 1.0, "b": 0.25, "c": 0.0, "d": 0.0}

    @staticmethod
    def answers(question):
        return [*"abcd"]

    @staticmethod
    def grade(question, text, hit_limit):
        worth = Letters.worth.get(text, 0.0)
        return Grade((("all", worth),), {"letter": 1.0, "right": float(worth == 1)})


QUESTIONS = [Question("letter", f"{n}?", n) for n in range(40)]


def test_evaluate_gives_pass_at_k_of_what_the_probabilities_are(byte_model, monkeypatch):
    chances = np.linspace(0, 0.9, 40)
    policies = [np.array([p, 0.05, 0.01, 0.0]) for p in chances]
    monkeypatch.setattr(exact, "policy", lambda *_: policies)
    found = exact.figures(byte_model, Letters, QUESTIONS, 1.0)
    for k in exact.TRIES:
        assert found[f"letter right pass@{k} exact"][2] == pytest.approx((1 - (1 - chances) ** k).tolist())
    assert found["letter other exact"][0] == pytest.approx(1 - 0.06 - chances.mean())
    assert found["letter reward exact, at least"][0] == pytest.approx(chances.mean() + 0.25 * 0.05)
    assert not any("letter letter" in name for name in found)  # which all listed answers have
    assert exact.figures(toy.model(), toy, toy.questions(), 1.0) == {}


# ---- tools.compare


def random_policy(seed, questions=400, answers=6):
    rng = np.random.default_rng(seed)
    whole = rng.dirichlet(0.5 * np.ones(answers), questions) * 0.9
    right = np.zeros((questions, answers), bool)
    right[:, 0] = True
    return compare.Policy(whole, right, np.ones_like(right))


def cells(rows):
    return {row[0]: row[1:] for row in rows}


def test_a_model_that_was_sharpened_by_hand_is_found_to_be():
    start = random_policy(0)
    after = start._replace(whole=0.8 * compare.sharpened(start, 1.7))
    assert compare.exponent(start, after) == pytest.approx(1.7, abs=1e-4)
    rows = cells(compare.change_rows(start, [after]))
    assert rows["α of the nearest sharpened start"] == ["1.70"]
    assert rows["explained by sharpening, all"][0].startswith("100.0 ± ")
    assert rows["explained by sharpening, median"] == ["100.0"]
    exactly = compare.percent([(after.p * after.right).sum(1)])
    assert rows["pass@1 of the sharpened start"] == [exactly]
    other = cells(compare.change_rows(start, [random_policy(1)]))  # which has nothing in common with the start
    assert float(other["explained by sharpening, all"][0].split()[0]) < 80


def test_alpha_has_the_lowest_divergence_and_padding_does_not_count():
    start, other = random_policy(0), random_policy(1)
    after = start._replace(whole=(start.whole + other.whole) / 2)
    alpha = compare.exponent(start, after)
    near = alpha - 0.02, alpha, alpha + 0.02
    assert min(near, key=lambda a: compare.kl(after.p, compare.sharpened(start, a)).mean()) == alpha
    wider = [compare.Policy(*(np.pad(x, ((0, 0), (0, 3))) for x in policy)) for policy in (start, after)]
    assert compare.exponent(*wider) == pytest.approx(alpha)
    assert compare.change_rows(*[wider[0], [wider[1]]]) == compare.change_rows(start, [after])


def test_where_little_changed_nothing_is_explained_and_seeds_widen_the_interval():
    start = random_policy(0)
    nearly = start._replace(whole=compare.sharpened(start, 1.05))
    assert not any("explained" in name for name in cells(compare.change_rows(start, [nearly])))
    same = cells(compare.policy_rows(start, [nearly] * 3))["pass@1"][1]
    assert same == cells(compare.policy_rows(start, [nearly]))["pass@1"][1]  # equal seeds are no more questions
    far = start._replace(whole=compare.sharpened(start, 2.0))
    apart = cells(compare.policy_rows(start, [nearly, far]))["pass@1"][1]
    assert float(apart.split(" ± ")[1]) > float(same.split(" ± ")[1])


def test_what_moved_is_counted_by_hand():
    """Three questions: the right answer is found, a wrong favourite is amplified, nothing happens."""
    whole = np.array([[0.02, 0.58, 0.4], [0.3, 0.6, 0.1], [0.8, 0.1, 0.1]])
    right = np.array([[1, 0, 0]] * 3, bool)
    start = compare.Policy(whole, right, np.ones_like(right))
    after = start._replace(whole=np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1]]))
    rows = cells(compare.change_rows(start, [after]))
    moved = [rows[name][0].split()[0] for name in rows if "likelier" in name or "gained" in name]
    assert moved == ["33.3", "50.0", "33.3"]
    bands = {row[0]: [cell.split(" ")[0] for cell in row[1:]] for row in compare.band_rows(start, [after])[1:]}
    assert bands["0.01 to 0.05"] == ["1", "2.00", "50.0", "100.0", "100.0", "0.0"]
    assert bands["0.2 to 1"] == ["2", "55.00", "45.0", "0.0", "", "100.0"]


def test_compare_as_a_user_starts_it(toy_settings, byte_model, tmp_path, monkeypatch, capsys):
    toy_settings(TASK="Letters")
    monkeypatch.setattr(train, "task", Letters)
    items = lambda *_: ([*range(40)], [*range(40)])  # noqa: E731
    monkeypatch.setattr(compare, "load_items", items)
    monkeypatch.setattr(compare, "draw_questions", lambda task, some, count, *_: QUESTIONS[:count])
    byte_model.save(tmp_path / "start")
    with torch.no_grad():
        for p in byte_model.parameters():
            p.mul_(1.1)
    byte_model.save(tmp_path / "after")
    command = ["compare", tmp_path / "start", tmp_path / "after", "SEED=0"]
    monkeypatch.setattr(sys, "argv", [*map(str, command)])
    compare.main()
    printed = capsys.readouterr().out
    assert printed.startswith("40 held-out questions of the kind letter: ") and "pass@1024" in printed
    assert "right answer became likelier" in printed
    monkeypatch.setattr(Letters, "answers", lambda question: ["a"])
    with pytest.raises(SystemExit, match="lists no answers with unequal rewards"):
        compare.main()


# ---- tools.exact_gradient


def test_the_expected_best_of_k_is_that_of_k_draws(monkeypatch):
    monkeypatch.setattr(train, "GROUP_SIZE", 10**9)  # the factor 1/k - 1/G is then 1/k
    rewards_of, policy = [0.4, 1.0, 0.4, 0.2], [0.3, 0.1, 0.2, 0.15]  # and 0.25 for answers that earn nothing
    rng = random.Random(0)
    for k in (1, 4):
        draws = [max(rng.choices([*rewards_of, 0.0], [*policy, 0.25], k=k)) for _ in range(20_000)]
        given = torch.tensor([policy]), torch.tensor([rewards_of])
        assert k * exact_gradient.objective(*given, k).item() == pytest.approx(np.mean(draws), abs=0.01)
    monkeypatch.setattr(exact_gradient, "OBJECTIVE", "log")
    levels = {0.2: 0.75, 0.4: 0.6, 1.0: 0.1}  # the chance to earn at least as much
    expected = sum(gain * math.log(levels[at]) for gain, at in ((0.2, 0.2), (0.2, 0.4), (0.6, 1.0)))
    assert exact_gradient.objective(*given, 1).item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_is_that_of_many_samples(toy_settings, monkeypatch):
    """It points where REINFORCE points with fifty thousand samples, for the expected reward."""
    toy_settings(KL_COEF=0.0, GROUP_SIZE=10**6)
    monkeypatch.setattr(train, "task", Letters)
    model, question = toy.model(), [QUESTIONS[7]]
    exact_gradient.step_gradient(model, model, exact.listed(Letters, question), 1)
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    n = 50_000
    noise = torch.rand(1, n, 2, generator=torch.Generator().manual_seed(0))
    [rollout] = train.sample(model, question, n, Letters.LIMITS, 1.0, noise)
    worth = torch.tensor([Letters.worth.get(a.text, 0.0) * (not a.hit_limit) for a in rollout.answers])
    logprobs, _ = train.forward(model, rollout, 1.0)
    (-(worth - worth.mean())[:, None] * logprobs * rollout.completion_mask).sum().div(n).backward()
    sampled = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.nn.functional.cosine_similarity(found, sampled, 0) > 0.95
    sampled /= len(model.tokenizer.encode(Letters.answers(question[0])[0])) + 1  # a mean over tokens, as in train.py
    assert found.norm() == pytest.approx(sampled.norm().item(), rel=0.5)  # of some thirty rewards


def test_grades_that_no_run_would_take_are_refused(monkeypatch):
    grade = Letters.grade
    monkeypatch.setattr(Letters, "grade", lambda *args: grade(*args)._replace(pieces=(("right", math.nan),)))
    with pytest.raises(SystemExit, match="the task's grade for the listed answer .*a finite number"):
        exact.listed(Letters, QUESTIONS)


@pytest.mark.parametrize("chosen", ["best", "log", "anchored"])
def test_each_objective_learns_and_leaves_a_model_for_the_tools(chosen, toy_settings, tmp_path, monkeypatch, capsys):
    out, start = tmp_path / "out", tmp_path / "start"
    toy.model().save(start)
    small = dict(MODEL=str(start), OUT_DIR=str(out), STEPS=12, BATCH_POSITIONS=4, LR=1e-2, KL_COEF=0.01, BEST_OF=2)
    toy_settings(**small)
    monkeypatch.setattr(train, "task", Letters)
    monkeypatch.setattr(exact_gradient, "OBJECTIVE", chosen)
    monkeypatch.setattr(exact_gradient, "load_items", lambda *_: ([*range(40)], []))
    draw = lambda task, items, count, rng, _: rng.sample(QUESTIONS, count)  # noqa: E731
    monkeypatch.setattr(exact_gradient, "draw_questions", draw)
    monkeypatch.setattr(sys, "argv", ["exact_gradient"])
    exact_gradient.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 5", "step 10", "step 11"]
    assert "KL 0.0000" in lines[0] and "KL 0.0000" not in lines[-1]
    before, after = (exact.figures(GPT.load(f), Letters, QUESTIONS, 1.0) for f in (start, out / "model"))
    name = "letter right pass@1 exact"
    assert after[name][0] > 2 * before[name][0] and (out / "settings.json").exists()
    with pytest.raises(SystemExit, match="is not empty"):
        exact_gradient.main()
    for folder, worth, said in (
        (out / "settings.json", 0.5, "is no folder that"),
        (tmp_path / "new", -0.5, "reward -0.5"),
    ):
        monkeypatch.setattr(train, "OUT_DIR", str(folder))
        monkeypatch.setattr(Letters, "worth", Letters.worth | {"b": worth})
        with pytest.raises(SystemExit, match=said):
            exact_gradient.main()
