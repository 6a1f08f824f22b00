"""What pretraining teaches the inner layers: the rules of chess, square by square, and which evaluation is the highest.

A text says little about its board: five moves, or what one move changes. From texts alone a small model needs millions
to know how pieces move; from these labels, 4,096 for each square of a board, it needs some ten thousand boards. Later
layers read what earlier ones know. The heads are thrown away: what is left is a GPT-2.
"""

import chess
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Where a square has a fixed place: the places of a8, b8, ..., h1 (9: a slash ends a rank), and eight places behind the
# board, from the one that says whose turn it is.
SQUARES = [len("P: ") + 9 * rank + file for rank in range(8) for file in range(8)]
RANKS = range(SQUARES[-1] + 2, SQUARES[-1] + 10)


def label_board(fen):
    """(3, 64, 64), 1 where the piece on one square attacks another; may move there if it were its turn; may move there
    now. Squares are in the order of the text, from a8 to h1."""
    board, turn = chess.Board(fen), chess.Board(fen).turn
    masks = np.zeros((3, 64), dtype="<u8")
    masks[0] = [board.attacks_mask(square) for square in chess.SQUARES]
    for board.turn in chess.COLORS:
        for move in board.legal_moves:
            masks[1, move.from_square] |= np.uint64(1 << move.to_square)
        if board.turn == turn:
            masks[2] = [masks[1, square] if board.color_at(square) == turn else 0 for square in chess.SQUARES]
    bits = np.unpackbits(masks.view(np.uint8).reshape(3, 64, 8), axis=-1, bitorder="little")
    order = list(chess.SQUARES_180)
    return bits[:, order][:, :, order]


def label_evaluations(answer, tokenizer):
    """For each evaluation in a policy's answer: the number of tokens up to its end, and the squares of the move that is
    the best of those evaluated so far."""
    words, labels = answer.split(), []
    moves = words[1 : words.index("E:")]
    evaluations = [float(word) for word in words[len(moves) + 2 : 2 * len(moves) + 2]]
    for k in range(1, len(moves) + 1):
        best = moves[max(range(k), key=evaluations.__getitem__)]
        squares = [chess.SQUARES_180.index(chess.parse_square(name)) for name in (best[:2], best[2:4])]
        labels.append((len(tokenizer.encode(" ".join(words[: len(moves) + 2 + k]))), squares))
    return labels


class Rules(nn.Module):
    """A square sees the squares before it, so a pair of squares is judged at the second one. What depends on the whole
    board, the moves that are legal now, is judged behind it: at each of eight places those from one rank."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.layers = [max(1, i) for i in (config.n_layer // 3, config.n_layer // 2, config.n_layer - 1)]
        self.attacks, self.moves = nn.Linear(C, 2 * 64), nn.Linear(C, 2 * 64)
        self.legal, self.best = nn.Linear(C, 8 * 64), nn.Linear(C, 2 * 64)
        self.register_buffer("earlier", torch.ones(64, 64).tril(-1)[:, None], persistent=False)

    def forward(self, states, boards, ends, best):
        """Losses by name, given the states (R, S, C) of all layers, boards (R, 3, 64, 64), the places (K,) in R·S where
        evaluations end, the squares (K, 2) of the best move so far."""
        first, second, late = (F.layer_norm(states[i - 1], states[0].shape[-1:]) for i in self.layers)
        attacks, moves, legal = boards.float().unbind(1)
        losses = {
            "attacks": self.judge_pairs(self.attacks(squares(first)), attacks),
            "moves": self.judge_pairs(self.moves(squares(second)), moves),
            "legal now": judge(self.legal(late[:, RANKS.start : RANKS.stop]), legal),
        }
        if len(ends):
            losses["best so far"] = F.cross_entropy(self.best(late.flatten(0, 1)[ends]).view(-1, 64), best.flatten())
        return losses

    def judge_pairs(self, logits, truth):
        """At each square: which of the squares before it does its piece reach, from which is it reached?"""
        return judge(logits, torch.stack([truth, truth.mT], 2), self.earlier)


def judge(logits, truth, seen=1.0):
    """Nats for each square of a board."""
    nats = F.binary_cross_entropy_with_logits(logits.view_as(truth), truth, reduction="none")
    return (nats * seen).sum() / (64 * len(truth))


def squares(x):
    """Of (R, S, C) what stands at SQUARES; an index would be sent to the GPU, and waited for."""
    return x[:, SQUARES[0] : SQUARES[-1] + 2].unflatten(1, (8, 9))[:, :, :8].flatten(1, 2)
