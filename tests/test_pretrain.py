"""tools/pretrain.py: its texts are right, a run can be killed, and it learns."""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import types

import chess
import numpy as np
import pytest
import torch

import pretend_cuda
import rewards
from model import GPT
from nanorook import positions
from nanorook.positions import contract_board, expand_board
from tools import pretrain

TINY = "--layers 1 --width 32 --heads 2 --rows 8 --eval-positions 4 --dtype float32".split()
FORMATS = {"squares": "squares", "expanded": "bytes", "rookworld": "bytes"}  # and a tokenizer for it
LABELLED = positions.split(positions.load("builtin")[:6000])
RARE = pretrain.rare_kinds(LABELLED[0])
FEN = "r1b1k2r/pp3ppp/2n5/3qP3/3P4/2P2N2/P4PPP/R1BQK2R w KQkq - 1 11"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run("folder", "--steps", 3, at={2: action}) is a run in this process, with something that happens at a step."""

    def run(out, *arguments, at=types.MappingProxyType({})):
        schedule = pretrain.schedule
        monkeypatch.setattr(sys, "argv", ["pretrain", str(tmp_path / out), *TINY, *map(str, arguments)])
        with monkeypatch.context() as patch:
            for kind in rewards.LIMITS:
                patch.setitem(rewards.LIMITS, kind, 4)
            patch.setattr(pretrain, "schedule", lambda step: at.get(step, lambda: None)() or schedule(step))
            pretrain.main()
        return tmp_path / out

    return run


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    file = tmp_path_factory.mktemp("positions") / "few.txt"
    file.write_text("\n".join(map(positions.write_position, LABELLED[0][:10] + LABELLED[1][:4])))
    return file


@pytest.fixture
def draw(monkeypatch):
    def draw(step, text_format="squares", rows=96, init=None):
        names = dict(text_format=text_format, tokenizer=pretrain.TOKENIZERS[FORMATS[text_format]](), n_positions=512)
        names |= dict(labelled=LABELLED[0], rare=RARE, args=argparse.Namespace(seed=0, rows=rows, init=init))
        for name, value in names.items():
            monkeypatch.setattr(pretrain, name, value, raising=False)
        return pretrain.draw_texts(step)

    return draw


def board_of(prompt):
    return chess.Board(contract_board(prompt[3:].split("+")[0].strip()))


@pytest.mark.parametrize("text_format", FORMATS)
def test_every_text_is_a_perfect_answer(draw, text_format):
    both = [*LABELLED[0], *map(positions.mirror, LABELLED[0])]
    texts, labels = draw(2000, text_format), {p.fen: p.moves for p in both}
    for prompt, answer in texts["policy"]:
        grade = rewards.grade(rewards.Question("policy", prompt, labels[board_of(prompt).fen()]), answer)
        assert grade.reward == pytest.approx(1)
    first = [answer.split("M: ")[1].startswith(answer.split("B: ")[1]) for _, answer in texts["policy"]]
    assert all(first) or text_format == "rookworld" and any(first)  # it alone lists moves in random order
    for prompt, answer in texts["environment"]:
        move, history = prompt.split("+")[1:3]
        assert history.split()[-1] == move
        truth = rewards.transition(board_of(prompt).fen(), move)
        assert rewards.grade(rewards.Question("environment", prompt, truth), answer).reward == pytest.approx(1)
    for prompt, answer in texts["legal"]:
        legal, moves = {move.uci() for move in board_of(prompt).legal_moves}, answer.split()
        assert set(moves) <= legal and len(set(moves)) == len(moves) == min(19, len(legal))
    assert ("judge" in texts) == (text_format != "rookworld")
    for prompt, answer in texts.get("judge", []):
        legal = {move.uci() for move in board_of(prompt).legal_moves}
        assert [(word[:-1] in legal) == (word[-1] == "+") for word in answer.split()] == [True] * 16
        assert {word[-1] for word in answer.split()} == {"+", "-"}
    assert min(map(len, texts.values())) >= 11


def test_no_text_shows_a_held_out_board_and_what_is_rare_comes_often(draw):
    checks, legal, captures, texts = 0, 0, 0, draw(4000, rows=2000)
    for prompt, answer in (text for some in texts.values() for text in some):
        board = board_of(prompt)
        checks += board.is_check()
        assert not positions.held_out(board.fen())
        if prompt.startswith("A: "):
            assert not positions.held_out(contract_board(answer.split("+")[0]))
            if answer.endswith("+0"):
                legal += 1
                captures += board.is_capture(chess.Move.from_uci(prompt.split("+")[1]))
    assert 0.12 < checks / 2000 < 0.25  # a twelfth in games
    assert 0.34 < captures / legal < 0.46
    assert draw(7) == draw(7) != draw(8)
    assert "legal" in draw(0) and "legal" not in draw(0, init="model")  # which knows the rules already


def test_what_is_easy_counts_less_and_what_decides_counts_more(draw):
    draw(0)
    question = rewards.environment_question(positions.Position(FEN, (), (), "e1g1"), random.Random(0), "squares")
    answer = rewards.environment_completion(*question.truth, "squares")
    policy = positions.Position(FEN, (), (("e1g1", 20), ("d1d3", 90)), None)
    other = pretrain.policy_text(policy, random.Random(0), "squares")
    inputs, places, targets, weights, *_ = pretrain.tokenize([(question.prompt, answer), other])
    assert inputs.shape == (2, 224) and places[0] == question.prompt.index("e1g1") - 1
    assert weights[:3].tolist() == [0, 0, pretrain.DECISIVE_WEIGHT] and targets[2] == ord("+")  # it is legal
    places, targets, weights = places[3:], targets[3:], weights[3:]
    assert places[0] == 127 and inputs[0, 128] == targets[0]
    n = len(pretrain.tokenizer.encode(answer)) + 1
    changed = {i for i in range(71) if answer[i] != expand_board(FEN)[i]}
    move, clock = {7 * 9 + 4, 7 * 9 + 6}, {answer.index(" 2 11+") + 1}  # e1 and g1; the rook's squares change too
    assert changed == move | {7 * 9 + 5, 7 * 9 + 7}
    counts = {weight: {i for i in range(n) if weights[i] == weight} for weight in set(weights[:n].tolist())}
    assert counts.pop(pretrain.ENVIRONMENT_WEIGHT * pretrain.DECISIVE_WEIGHT) == move | clock
    assert counts.pop(pretrain.ENVIRONMENT_WEIGHT) == (changed - move) | {*range(71, n)} - clock
    unchanged = np.float32(pretrain.UNCHANGED_WEIGHT) * pretrain.ENVIRONMENT_WEIGHT
    assert counts == {np.float32(unchanged): {*range(71)} - changed}
    text, best = targets[n:], slice(-3, -1)  # two squares and the end
    assert pretrain.tokenizer.decode(text).endswith("B: d1d3") and pretrain.tokenizer.decode(text[best]) == "d1d3"
    assert set(weights[n:][best]) == {pretrain.DECISIVE_WEIGHT} and set(weights[n:][:-3]) == {1} == {weights[-1]}


@pytest.mark.parametrize("text_format", ["squares", "expanded"])
def test_probability_that_leads_to_no_legal_move_is_counted_wherever_a_text_has_moves(draw, text_format):
    """At each token of a move: the tokens with which some move that is legal, and not listed before, goes on."""
    drawn = draw(2000, text_format, rows=64)
    name = pretrain.tokenizer.decode
    for task, texts in drawn.items():
        _, _, targets, weights, moves, allowed = pretrain.tokenize(texts)
        assert allowed.shape == (len(moves), pretrain.tokenizer.vocab_size) and allowed.any(1).all()
        right = allowed[range(len(moves)), targets[moves]]
        if task == "environment":  # illegal moves are asked about, too, and no move is predicted by itself
            assert 0.6 < right.mean() < 1 and not weights[moves].any() and (weights == 0).sum() == len(moves)
        elif task == "judge":
            assert len(moves) == 0 and set(targets[weights > 0]) == {ord("+"), ord("-")}
            assert (weights > 0).sum() == 16 * len(texts) and set(weights) == {0, pretrain.DECISIVE_WEIGHT}
        else:
            lists = [answer.removeprefix("M: ").partition(" E:")[0] for _, answer in texts]
            assert right.all() and weights.all() and name(targets[moves]) == "".join("".join(lists).split())

    fen = "8/P6k/8/8/8/8/8/K7 w - - 0 1"
    if text_format == "squares":
        seven, eight, near = [{"a7", "a1"}], [{"a8"}], [{"a2", "b1", "b2"}]
    else:
        seven, eight, near = [{"a"}, {"7", "1"}], [{"a"}, {"8"}], [{"a", "b"}, {"1", "2"}]
    prompts = {task: rewards.policy_prompt(fen, text_format) for task in ("policy", "legal")}
    prompts["environment"] = rewards.environment_prompt(fen, "a7a8n", ["a7a8n"], text_format)
    answers = {"policy": "M: a7a8n a1b1 E: 1 2 B: a1b1", "legal": "a7a8n a1b1", "environment": "..."}
    for task, answer in answers.items():
        ids = pretrain.tokenizer.encode(prompts[task] + answer)
        found = list(pretrain.go_on(prompts[task], answer))
        assert name([ids[place + 1] for place, _ in found]) == "a7a8na1b1"[: 5 if task == "environment" else 9]
        wanted = [*seven, *eight, set("qrbn"), *seven, *near]
        assert [{name([token]) for token in tokens} for _, tokens in found] == wanted[: len(found)]
    illegal = rewards.environment_prompt(fen, "a1h8", ["a1h8"], text_format)
    found = [{name([token]) for token in tokens} for _, tokens in pretrain.go_on(illegal, "...")]
    assert found == [*seven, *near[:1]]  # nothing goes on after h


def test_killed_and_resumed_equals_never_killed(run, few, tmp_path, capsys):
    arguments = "--data", few, "--steps", 6, "--eval-every", 2
    run("whole", *arguments)
    with pytest.raises(ZeroDivisionError):
        run("broken", *arguments, at={5: lambda: 1 / 0})  # the end of step 4 was saved, step 5 is lost
    with pytest.raises(SystemExit, match="stopped at step 5; the same command goes on from there"):
        run("broken", *arguments, at={4: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    run("broken", *arguments, "--workers", 2)  # no draw depends on how many processes make the texts
    assert "resumed" in capsys.readouterr().out
    whole, broken = (torch.load(tmp_path / name / "trainer.pt") for name in ("whole", "broken"))
    for name in "step", "model", "optimizers":
        torch.testing.assert_close(whole[name], broken[name], rtol=0, atol=0)
    rows = [[json.loads(row) for row in open(tmp_path / name / "skill.jsonl")] for name in ("whole", "broken")]
    assert [{**row, "seconds": 0} for row in rows[0]] == [{**row, "seconds": 0} for row in rows[1]]
    assert [row["texts"] for row in rows[0]] == [16, 32, 48] and "environment next_state T=1" in rows[0][0]

    torch.save({"model": {}, "optimizers": []}, tmp_path / "whole/trainer.pt")
    with pytest.raises(SystemExit, match="trainer.pt is damaged or of another model"):
        run("whole", *arguments)


def test_a_resumed_run_on_a_gpu_does_not_wait_for_step_counters(run, few, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pretend_cuda.on(monkeypatch) as seen:
        arguments, waits = ("--data", few, "--device", "cuda", "--eval-every", 100), {}
        steps = {i: (lambda i=i: waits.update({i: len(seen.waits)})) for i in range(6)}
        run("m", *arguments, "--steps", 3, at=steps)
        run("m", *arguments, "--steps", 6, at=steps)
    assert "torch.compile is left out: apt install gcc" in capsys.readouterr().out
    assert waits[2] - waits[1] == waits[5] - waits[4] == 26  # 24 arrays sent; whether the gradient is finite


def test_learning_rates_rise_are_held_and_fall_to_zero_at_the_end(monkeypatch):
    args = argparse.Namespace(steps=1000, decay=0.3, hold=False)
    monkeypatch.setattr(pretrain, "args", args, raising=False)
    rates = [pretrain.schedule(step) for step in range(1000)]
    assert rates[:100] == [pytest.approx((i + 1) / 100) for i in range(100)] and set(rates[100:701]) == {1}
    assert rates[700:] == [pytest.approx((1000 - i) / 300) for i in range(700, 1000)]
    args.hold = True
    assert {pretrain.schedule(step) for step in range(100, 1000)} == {1}


def test_it_learns(run, few, monkeypatch):
    """The loss of the ideal answers to its training positions falls from chance, log 321 = 5.8, to far below it."""
    monkeypatch.setattr(pretrain, "WARMUP", 5)
    model = GPT.load(run("m", "--data", few, "--steps", 80, "--eval-every", 1000, "--lr", 0.01, "--lr-matrix", 0.03))
    texts = [pretrain.policy_text(p, random.Random(0), "squares") for p in positions.split(positions.load(few))[0]]
    inputs, places, targets, *_ = map(torch.from_numpy, pretrain.tokenize(texts))
    assert len(texts) == 10 and torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1)[places], targets) < 2.5


def test_gpt2s_kind_of_model_in_rookworlds_format(run, few, bpe_folder):
    """The 124M configuration in small: its text format, a byte-level BPE from a folder, weights to start from."""
    shape = "--tokenizer", bpe_folder, "--format", "rookworld", "--positions", 512, "--half"
    first = run("m", "--data", few, "--steps", 2, *shape)
    model = GPT.load(run("n", "--data", few, "--steps", 1, "--init", first))
    assert model.config.extra["chess_format"] == "rookworld"
    assert model.config.vocab_size == model.tokenizer.vocab_size


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--data nowhere.txt", "nowhere.txt"),
        ("--tokenizer nowhere --format rookworld", "nowhere"),
        ("--data {0}/fens.txt", "no labelled position"),
        ("--positions 200", "has to be at least 288"),
        ("--tokenizer bytes", "fixed places"),
    ],
)
def test_what_cannot_be_done_is_said(run, tmp_path, arguments, said, capsys):
    (tmp_path / "fens.txt").write_text("4k3/8/8/8/8/8/8/4K2R w K - 0 1\n4k3/8/8/8/8/8/8/R3K3 w Q - 0 1")
    with pytest.raises(SystemExit) as stopped:
        run("m", "--steps", 1, *arguments.format(tmp_path).split())
    assert said in str(stopped.value) + capsys.readouterr().err
    assert not (tmp_path / "m").exists()
