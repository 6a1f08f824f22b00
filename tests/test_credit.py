"""credit.py: each token is paid for its own word, and all words together make the reward."""

import random
import re

import chess
import pytest
import torch

import data
import grpo
import tasks
import train
from credit import ENVIRONMENT, PLACES, WHOLE, credit, environment_words, policy_words
from model import GPT
from rewards import POLICY, grade
from tokenizer import Tokenizer

FEN = "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3"
FIVE = (("g8f6", 10), ("f8c5", -5), ("d7d6", -20), ("f8e7", -30), ("g7g6", -70))
SAID = "M: g8f6  a1a8 d7d6 g8f6 h7h5 E: 0.1 3.0 -1.2 0.1 -0.9 B: d7d6"  # the best, illegal, good, repeated, legal
TOKENIZERS = {
    "bytes": Tokenizer.of_bytes(),
    "merged": Tokenizer(
        {bytes([b]): b for b in range(256)} | {b" g": 257, b"8f": 258, b" B": 259, b" B:": 260, b"d6": 261, b"6 ": 262},
        256,
    ),
}


@pytest.mark.parametrize("chess_format", ["expanded", "rookworld"])
def test_what_each_word_is_worth(chess_format):
    prompt = tasks.policy_prompt(FEN, chess_format)
    said = {name: (SAID[a:b].strip(" "), worth) for a, b, name, worth in policy_words(prompt, SAID, FIVE)}
    assert {name: text for name, (text, _) in said.items()} == {
        "M1": "g8f6", "M2": "a1a8", "M3": "d7d6", "M4": "g8f6", "M5": "h7h5", "E1": "0.1", "E3": "-1.2", "B": "d7d6",
    }  # fmt: skip
    worth = {name: worth for name, (_, worth) in said.items()}
    assert worth["M1"] == worth["M3"] == worth["E1"] == 1  # legal and of the five; a repeated move earns once
    assert 0.5 < worth["M5"] < 1 and worth["M2"] == worth["M4"] < 0
    assert worth["E3"] == pytest.approx(1 / 2)  # one pawn off
    assert 0.5 < worth["B"] < 1


def test_all_together_they_are_the_reward():
    """What the grammar earns, and each word's worth times what its place pays: nothing is lost or paid twice."""
    rng, prompt = random.Random(0), tasks.policy_prompt(FEN, "expanded")
    legal = [move.uci() for move in chess.Board(FEN).legal_moves]
    form = POLICY["structure"] + POLICY["parse"] + POLICY["clean"]
    move, number = (POLICY["candidates_legal"] + POLICY["candidates"]) / 5, POLICY["evals"] / 5
    paid = {"M": move, "E": number, "B": 1 - form - 5 * (move + number)}
    rewards = set()
    for _ in range(500):
        moves = [rng.choice([*legal, *(uci for uci, _ in FIVE), "a1a8", "e1e8"]) for _ in range(5)]
        numbers = " ".join(str(rng.randrange(-300, 300) / 100) for _ in moves)
        text = f"M: {' '.join(moves)} E: {numbers} B: {rng.choice([*moves, *legal])}"
        reward = grade(prompt, text, FIVE, False).reward
        earned = sum(worth * paid[name[0]] for _, _, name, worth in policy_words(prompt, text, FIVE))
        assert form + earned == pytest.approx(reward)
        rewards.add(reward)
    assert len(rewards) > 100


@pytest.mark.parametrize("chess_format", ["expanded", "rookworld"])
def test_each_word_of_a_board_stands_for_itself(chess_format):
    labels = tasks.transition(FEN, "g8f6")
    prompt = tasks.environment_prompt(FEN, "g8f6", ["g8f6"], chess_format)
    right = tasks.environment_completion(*labels, chess_format)
    assert [worth for *_, worth in environment_words(prompt, right, labels)] == [1.0] * 16
    parts = re.split(r"([ +/])", right)
    for i, wrong in enumerate("rp ppP 1p6 k p p PPp RN b Qk e3 7 9 0.5 1 1".split()):
        changed = [*parts]
        changed[2 * i] = wrong
        said = {name: worth for _, _, name, worth in environment_words(prompt, "".join(changed), None)}
        assert list(said) == ENVIRONMENT
        assert [name for name, worth in said.items() if worth == 0] == [ENVIRONMENT[i]]
    for broken in ("", right.split("/", 1)[1], right.replace("/", "", 1), right + "+0", right.replace("+", " ")):
        assert not list(environment_words(prompt, broken, labels))


@pytest.mark.parametrize("tokens", TOKENIZERS)
def test_a_token_belongs_to_its_word(tokens):
    tokenizer = TOKENIZERS[tokens]
    names = {place: name for name, place in PLACES.items()}
    samples = [tasks.Sample(tasks.policy_prompt(FEN, "expanded"), FIVE)]
    texts = [SAID, SAID + " more", "M: g8f6 E: x B:", "M: gé E: 0.1 B: d7d6"]
    rows = [[*tokenizer.encode(text), tokenizer.eos] for text in texts]
    T = max(map(len, rows))
    padded = torch.tensor([row + [tokenizer.eos] * (T - len(row)) for row in rows])
    grades = [grade(samples[0].prompt, text, FIVE, False) for text in texts]
    rewards, places = credit(samples, texts, grades, padded, tokenizer, "word")
    assert rewards[:, WHOLE].tolist() == pytest.approx([g.reward for g in grades])
    for row, owners in zip(padded[:2].tolist(), places.tolist()):
        said = {}
        for token, place in zip(row, owners):
            said[names[place]] = said.get(names[place], b"") + tokenizer.token_bytes.get(token, b"")
        said = {name: text.strip() for name, text in said.items()}
        wanted = {"M1": b"g8f6", "M2": b"a1a8", "M4": b"g8f6", "M5": b"h7h5", "E1": b"0.1", "E3": b"-1.2"}
        assert (wanted | {"B": b"d7d6"}).items() <= said.items() and "E2" not in said
    assert not places[2:].any()  # malformed: all of it is the whole answer's
    assert grpo.advantages(rewards, 4)[2:, 1:].abs().max() < 1e-6  # and a word that it lacks is compared with nobody's


def test_without_it_this_is_plain_grpo(monkeypatch):
    small = dict(BATCH_POSITIONS=2, GROUP_SIZE=4, DTYPE=torch.float32, MIX_ENV_RATIO=0.5, TEMPERATURE=1.0)
    for name, value in small.items():
        monkeypatch.setattr(train, name, value)
    model = GPT.load("weights/tiny")
    samples = train.draw_prompts(data.load("builtin")[:200], 0, "expanded")
    by_kind = {}
    for kind in ("answer", "word"):
        monkeypatch.setattr(train, "CREDIT", kind)
        batches, graded = train.rollout(model, samples, 0)
        rewards, by_kind[kind] = train.compare_groups(batches)
        assert rewards[:, 0].tolist() == pytest.approx([g.reward for _, _, g in graded])
    one_each = grpo.advantages(rewards[:, 0], 4)
    rows = torch.cat([batch.advantages[:, 0] for batch in by_kind["answer"]])
    torch.testing.assert_close(rows, one_each)
    for whole, word in zip(by_kind["answer"], by_kind["word"]):
        assert (whole.advantages == whole.advantages[:, :1]).all()
        assert torch.equal(whole.tokens, word.tokens) and len(word.advantages[0].unique()) > 2
        last = word.mask.sum(1) - 1  # the end token answers for the whole
        torch.testing.assert_close(word.advantages.gather(1, last[:, None]), whole.advantages[:, :1])
