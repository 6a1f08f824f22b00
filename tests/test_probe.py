"""experiments/probe.py: it reads where it says it reads, and counts what can be told."""

import random
from itertools import islice

import chess
import torch

import data
import tasks
from experiments import probe
from model import GPT


def test_a_place_is_where_its_name_says():
    positions, rng = data.load("builtin"), random.Random(0)

    def some(fact, yes):
        return islice(filter(None, (fact(position, yes, rng) for position in positions)), 20)

    for yes in (True, False):
        for text, places in some(probe.captures, yes):
            fen, move = text[3:].split("+")[:2]
            board, move = chess.Board(tasks.contract(fen)), chess.Move.from_uci(move)
            assert board.is_capture(move) == yes
            assert text[places["the move in the prompt"]] == move.uci()[3]
            after = text[places["before the square it goes to"] + 1]
            assert after == board.piece_at(move.from_square).symbol()
            assert text[places["before the clock"]] == " "
            clock = text[places["before the clock"] + 1 :].split(" ")[0]
            assert int(clock) == (0 if yes else board.halfmove_clock + 1)
        for text, places in some(probe.in_check, yes):
            assert chess.Board(tasks.policy_fen(text[:94])).is_check() == yes
            assert text.endswith("M: ") and places == {"before the first candidate": len(text) - 1}


def test_what_is_read_are_the_hidden_states_of_transformers(hf_model, hf_folder):
    model = GPT.load(hf_folder)
    model.tokenizer = type("Letters", (), {"encode": lambda self, text: list(text.encode())})()
    texts, places = ["a board", "another, longer one"], [{"end": 6}, {"end": 18}]
    found = probe.residuals(model, texts, places)["end"]  # (L, n, C)
    for n, text in enumerate(texts):
        states = hf_model(torch.tensor([list(text.encode())]), output_hidden_states=True).hidden_states
        for layer, state in enumerate(states[1:-1]):  # the last one is after the final norm
            torch.testing.assert_close(found[layer, n], state[0, -1], atol=1e-4, rtol=1e-4)


def test_accuracy_is_that_of_what_can_be_told_and_no_more():
    torch.manual_seed(0)
    y = (torch.rand(probe.COUNTED + 1500) < 0.5).float()
    x = torch.randn(len(y), 30)
    assert abs(probe.accuracy(x, y) - 0.5) < 0.1
    x[:, 3] += 4 * y
    assert probe.accuracy(x, y) > 0.95
