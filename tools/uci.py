"""The model as a chess engine: UCI on stdin and stdout, for chess programs and match runners.

There is no search. Several answers to one prompt vote with the move after `B:`, among the legal moves alone. The
model's own probability of each legal move breaks ties, and decides where no answer names a legal move or time is up.
The main thread reads stdin, each `go` has a thread of its own. The protocol: UCI, by Huber and Meyer-Kahlen.
"""

import argparse
import math
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path

import chess
import torch

from model import GPT
from nanorook import hardware
from nanorook.settings import refuse
from nanorook.stockfish import MATE
from rewards import LIMITS, Question, chess_format, parse_policy, policy_prompt, start_model
from rollout import pad_prompts, sample
from tools.texts import policy_completion

ROOT = Path(__file__).parent.parent  # a chess program starts this one in a folder of its own
OPTIONS = {  # name: (default, lowest, highest)
    "Temperature": (100, 0, 1000),  # in hundredths, as UCI has whole numbers only
    "Samples": (8, 0, 256),  # answers for a move; 0: the probability of the moves decides
    "Seed": (0, 0, 2**31 - 1),
}
COMMANDS = "uci debug isready setoption register ucinewgame position go stop quit".split()
SHOWN = 5  # candidates in a report
OVERHEAD = 0.05  # seconds of a move's time that are left for the way to the client
COUNTER = 9999  # a FEN's counters end here, or a prompt could be of any length
MATES = 1000  # an evaluation that is so near to MATE is a mate, any other is centipawns

stdout = threading.Lock()  # two threads write


def send(*lines):
    with stdout:
        print("\n".join(lines), flush=True)


# ---- What the client says ----------------------------------------------------------------------------------


def set_option(options, words):
    """`name N value V` into the options, V within its bounds; the option's name, or None."""
    match = re.fullmatch(r"name (\S+) value (-?[0-9]{1,15})", " ".join(words), re.IGNORECASE)
    name = next((name for name in OPTIONS if match and name.lower() == match[1].lower()), None)
    if name:
        _, low, high = OPTIONS[name]
        options[name] = max(low, min(high, int(match[2])))
    else:
        takes = (f"{name} ({low} to {high})" for name, (_, low, high) in OPTIONS.items())
        send(f"info string the options are whole numbers: {', '.join(takes)}")
    return name


def read_position(words):
    """The board of `startpos|fen FEN [moves ...]`. From the first illegal move on, the moves are left out."""
    at = words.index("moves") if "moves" in words else len(words)
    if words[:1] == ["startpos"]:
        board = chess.Board()
    elif words[:1] == ["fen"]:
        board = chess.Board(" ".join(words[1:at]))
    else:
        raise ValueError("a position is startpos, or fen and a FEN")
    if max(board.halfmove_clock, board.fullmove_number) > COUNTER:
        raise ValueError("no game lasts so long")
    for word in words[at + 1 :]:
        try:
            if not (move := board.parse_uci(word.lower())):
                raise ValueError("a null move")
            board.push(move)
        except ValueError:
            send(f"info string {word} is illegal in {board.fen()}, so the moves end before it")
            break
    return board


def read_limits(words):
    """{"wtime": 1000, ...} from the words after `go`; those without a number are left out."""
    pairs = zip(words, words[1:])
    return {name: int(value) for name, value in pairs if re.fullmatch("-?[0-9]{1,15}", value)}


def seconds(limits, turn):
    """How long a move may take. The model is done when its answers are, and has no use for more time."""
    clock, increment = ("wtime", "winc") if turn else ("btime", "binc")
    allowed = limits.get("movetime", math.inf)
    if clock in limits:
        left, moves = limits[clock], max(1, min(20, limits.get("movestogo", 20)))
        allowed = min(allowed, left / moves + limits.get(increment, 0), 0.8 * left)
    return allowed / 1000 - OVERHEAD


# ---- What the model says -----------------------------------------------------------------------------------


def prompt_of(model, board):
    return model.tokenizer.encode(policy_prompt(board.fen(), chess_format(model.config)))


@torch.no_grad()
def rank(model, board, moves):
    """{move: log-probability} of each of `moves` as the first one after `M:`, in one batch.

    RookWorld lists the engine's five best moves in random order, so there this is a fifth of the probability to be
    among them. The embedded model lists the best first, so there it is the probability to be the best.
    """
    encode, device = model.tokenizer.encode, model.wte.weight.device
    answer = policy_completion(board.fen(), [(moves[0], 0)], chess_format(model.config))
    prompt = prompt_of(model, board) + encode(answer.partition("M:")[0] + "M:")  # RookWorld's format pads before it
    tokens, lengths = pad_prompts([encode(f" {move}") for move in moves], device)  # (N, T), (N,)
    logits = model.score(*pad_prompts([prompt], device), tokens)  # (N, T, V)
    logprobs = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    padding = torch.arange(tokens.shape[1], device=device) >= lengths[:, None]
    return dict(zip(moves, logprobs.masked_fill(padding, 0).sum(1).tolist()))


def score(pawns):
    """An evaluation as UCI writes it; mate in n is labelled ±(MATE - n) centipawns."""
    centipawns = round(max(-MATE, min(MATE, 100 * pawns)))
    mate = max(1, MATE - abs(centipawns))
    if mate > MATES:
        return f"cp {centipawns}"
    return f"mate {mate if centipawns > 0 else -mate}"


class Search(threading.Thread):
    """One `go`. The main thread says when time is up, also while it thinks, and when it may answer."""

    def __init__(self, model, generator, board, words, options):
        super().__init__(daemon=True)
        self.model, self.generator, self.board, self.options = model, generator, board, dict(options)
        self.moves = [move.uci() for move in board.legal_moves]
        limits = read_limits(words)
        self.samples = min(options["Samples"], limits.get("nodes", math.inf))  # an answer is a node
        if not options["Temperature"]:
            self.samples = min(1, self.samples)  # greedy ones are all alike
        self.started, self.deadline, self.free = time.monotonic(), math.inf, threading.Event()
        if "infinite" not in words:
            self.release(seconds(limits, board.turn))
        self.start()

    def release(self, seconds=0.0):
        """It has so long from now, and may answer."""
        self.deadline = time.monotonic() + seconds
        self.free.set()

    def run(self):
        try:
            best = "(none)"
            if self.moves:
                best = self.choose()
            else:
                send(f"info depth 0 score {'mate 0' if self.board.is_checkmate() else 'cp 0'}")
            self.free.wait()
            send(f"bestmove {best}")
        except BaseException:  # without an answer the client would wait for ever, but it sees that a program is gone
            traceback.print_exc()
            os._exit(1)

    def choose(self):
        """The best move so far when time is up, or after one round of answers; with `infinite` after as many rounds as
        there is time for."""
        chances = rank(self.model, self.board, self.moves)
        votes, evaluations, depth = Counter(), defaultdict(list), 0
        best = self.report(chances, votes, evaluations, depth)
        again = self.samples > 0
        while again and time.monotonic() < self.deadline:
            try:
                answers = self.sample()
            except TimeoutError:
                break
            for moves, numbers, (vote, _), _ in answers:
                votes[vote] += vote in chances
                for (move, _), (number, _) in zip(moves, numbers):
                    evaluations[move].append(number)
            depth += 1
            best = self.report(chances, votes, evaluations, depth)
            again = self.options["Temperature"] and not self.free.is_set()
        if not votes.total():
            send("info string no answer gave a legal move in time, so the likeliest one is played")
        return best

    def sample(self):
        """One round of answers, those that can be read; TimeoutError at the first token after the deadline."""

        def check(*_):
            if time.monotonic() >= self.deadline:
                raise TimeoutError

        model, temperature = self.model, self.options["Temperature"] / 100
        question = Question("policy", policy_prompt(self.board.fen(), chess_format(model.config)), ())
        noise = torch.rand(1, self.samples, LIMITS["policy"], generator=self.generator)
        hook = model.ln_f.register_forward_pre_hook(check)  # a layer that every token passes once
        try:  # a replayed CUDA graph would not call the hook
            ((_, answers),) = sample(model, [question], self.samples, LIMITS, temperature, noise=noise, graph=False)
        finally:
            hook.remove()
        return list(filter(None, (parse_policy(answer.text)[1] for answer in answers)))

    def report(self, chances, votes, evaluations, depth):
        """Says the candidates and returns the best of them. It is said last: match runners read the last line."""
        order = sorted(chances, key=lambda move: (votes[move], chances[move]), reverse=True)
        shown = order[:1] + [move for move in order[1:] if move in evaluations]
        nodes, passed = depth * self.samples, round(1000 * (time.monotonic() - self.started))
        lines = []
        for place, move in enumerate(shown[:SHOWN], 1):
            value = f"score {score(statistics.median_high(evaluations[move]))} " if move in evaluations else ""
            lines.append(f"info depth {depth} multipv {place} {value}nodes {nodes} time {passed} pv {move}")
        send(*reversed(lines))
        return order[0]


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.uci", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a model folder or hub id (default: weights/tiny)")
    name = parser.parse_args().model or ROOT / start_model()
    hardware.flush_denormals()
    device = hardware.choose_device()
    model = GPT.load(name).to(device).cast(hardware.fastest_dtype(device))
    if model.config.n_positions - len(prompt_of(model, chess.Board())) < LIMITS["policy"]:
        refuse(f"{name}: the model's positions leave too few tokens after a prompt for an answer.")
    generator = torch.Generator().manual_seed(OPTIONS["Seed"][0])
    options = {option: default for option, (default, _, _) in OPTIONS.items()}
    board, search = chess.Board(), None
    for line in sys.stdin.buffer:
        words = line.decode("ascii", "ignore").split()
        while words and words[0] not in COMMANDS:  # the protocol: what is unknown is skipped
            words.pop(0)
        command, *words = words or [""]
        if command == "uci":
            send(f"id name nanorook {Path(name).resolve().name}", "id author the nanorook authors")
            for option, (default, low, high) in OPTIONS.items():
                send(f"option name {option} type spin default {default} min {low} max {high}")
            send("uciok")
        elif command == "isready":
            send("readyok")
        elif command == "setoption":
            if set_option(options, words) == "Seed":
                generator.manual_seed(options["Seed"])
        elif command == "position":
            try:
                board = read_position(words)
            except ValueError as error:
                send(f"info string {error}, so the position stays what it was")
        elif command == "go":
            if search:
                search.release()
                search.join()
            search = Search(model, generator, board, words, options)
        elif command == "stop" and search:
            search.release()
        elif command == "quit":
            break
    if search:  # at the end of the input what was asked is answered; `quit` does not wait for it
        search.release() if command == "quit" else search.free.set()
        search.join()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # nobody listens any more
        os._exit(1)
