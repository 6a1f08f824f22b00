"""tools/rules.py: the labels are what python-chess says, square by square, and inner layers learn them."""

import random

import chess
import pytest
import torch

import rewards
from model import GPT, GPTConfig
from nanorook import positions
from nanorook.positions import expand_board
from nanorook.tokenizer import Tokenizer
from tools import pretrain, rules

TOKENIZERS = {"squares": Tokenizer.squares(), "expanded": Tokenizer.of_bytes()}
LABELLED = [p for p in positions.load("builtin")[:3000] if p.moves]
ORDER = [chess.parse_square(file + rank) for rank in "87654321" for file in "abcdefgh"]


@pytest.mark.parametrize("text_format", TOKENIZERS)
@pytest.mark.parametrize("prefix", ["P: ", "A: ", "L: "])
def test_places_are_those_of_squares_and_of_what_follows_the_board(prefix, text_format):
    for position in LABELLED[:20]:
        text = rewards.write_prompt(prefix, expand_board(position.fen), text_format)
        tokens = TOKENIZERS[text_format].encode(text)
        board = chess.Board(position.fen)
        shown = [str(board.piece_at(square) or ".") for square in ORDER]
        assert [chr(tokens[place]) for place in rules.SQUARES] == shown
        assert rules.squares(torch.tensor([tokens])[:, :, None])[0, :, 0].tolist() == [tokens[i] for i in rules.SQUARES]
        assert chr(tokens[rules.RANKS[0]]) == position.fen.split()[1] and len(rules.RANKS) == 8
        assert rules.RANKS.stop <= len(tokens)


def test_labels_are_what_python_chess_says():
    some = random.Random(0).sample(LABELLED, 60)
    some += [p for p in LABELLED if chess.Board(p.fen).is_check()][:20]
    some += [p for p in LABELLED if chess.Board(p.fen).ep_square][:5]
    assert len(some) == 85
    for fen in (p.fen for p in some):
        attacks, moves, legal = rules.label_board(fen)
        board = chess.Board(fen)
        for i, square in enumerate(ORDER):
            assert {ORDER[j] for j in attacks[i].nonzero()[0]} == set(board.attacks(square))
        pairs = {(ORDER[i], ORDER[j]) for i, j in zip(*legal.nonzero())}
        assert pairs == {(move.from_square, move.to_square) for move in board.legal_moves}
        board.turn = not board.turn
        others = {(move.from_square, move.to_square) for move in board.legal_moves}
        assert {(ORDER[i], ORDER[j]) for i, j in zip(*moves.nonzero())} == pairs | others


@pytest.mark.parametrize("text_format", TOKENIZERS)
def test_the_best_so_far_stands_where_an_evaluation_has_ended(text_format):
    tokenizer = TOKENIZERS[text_format]
    moves = ("e2e4", -31), ("b7b8q", -20), ("g1f3", -999.99), ("a1h8", 12), ("d2d4", 3)
    answer = rewards.policy_completion(chess.STARTING_FEN, moves, text_format)
    labels = rules.label_evaluations(answer, tokenizer)
    ends = [tokenizer.decode(tokenizer.encode(answer)[:end]).split()[-1] for end, _ in labels]
    assert ends == ["-0.31", "-0.2", "-9.9999", "0.12", "0.03"]
    assert {tokenizer.encode(answer)[end] for end, _ in labels} == {ord(" ")}
    best = [tuple(chess.square_name(ORDER[i]) for i in squares) for _, squares in labels]
    assert best == [("e2", "e4"), ("b7", "b8"), ("b7", "b8"), ("a1", "h8"), ("a1", "h8")]


def test_a_pair_of_squares_is_judged_where_both_are_seen():
    """The loss does not depend on what is said of a square and those after it, and does on those before it."""
    logits = torch.randn(1, 64, 128, requires_grad=True)
    rules.Rules(GPTConfig(n_embd=8, n_layer=3)).judge_pairs(logits, torch.zeros(1, 64, 64)).backward()
    used = logits.grad.view(64, 2, 64) != 0
    assert torch.equal(used, torch.ones(64, 64).tril(-1)[:, None].bool().expand(64, 2, 64))


def test_inner_layers_learn_and_outer_ones_are_left_alone():
    """The labels of a few boards are learned by heart; each loss falls, from chance, to below a third."""
    torch.manual_seed(0)
    tokenizer, boards = Tokenizer.squares(), LABELLED[:4]
    model = GPT(GPTConfig(tokenizer.vocab_size, 320, 64, 6, 4, eos_token_id=tokenizer.eos))
    teacher = rules.Rules(model.config)
    texts = [pretrain.policy_text(p, random.Random(0), "squares") for p in boards]
    tokens = [tokenizer.encode(prompt + answer) for prompt, answer in texts]
    tokens = torch.tensor([row + [0] * (200 - len(row)) for row in tokens])
    labels = torch.stack([torch.from_numpy(rules.label_board(p.fen)) for p in boards])
    ends, best = torch.tensor([120, 320, 520]), torch.tensor([[3, 4], [5, 6], [7, 8]])
    optimizer, seen = torch.optim.Adam([*model.parameters(), *teacher.parameters()], lr=0.003), []
    for _ in range(60):
        losses = teacher(pretrain.hidden(model, tokens)[0], labels, ends, best)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        seen.append({name: loss.item() for name, loss in losses.items()})
    assert set(seen[0]) == {"attacks", "moves", "legal now", "best so far"}
    for name in seen[0]:
        assert seen[-1][name] < seen[0][name] / 3, name
    assert [p.grad is None for p in model.h[5].parameters()] == [True] * 12
    assert all(p.grad is not None for p in model.h[:5].parameters())
