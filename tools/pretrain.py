"""Supervised training: from labelled positions to a model that knows both tasks (made weights/tiny).

python -m tools.pretrain out/mine --steps 30000                              on a CPU, in many hours
python -m tools.pretrain out/mine --steps 10000 --rows 1024 --workers 14     on a GPU with 16 cores

Two tasks more teach the rules: to list the legal moves of a position (L:), which starts as most of the mix and fades,
and to mark moves as legal or not (J:). A batch is a pure function of the seed and the step, so a resumed run sees the
same batches.
"""

import argparse
import json
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
from pathlib import Path

import chess
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

import rewards
from model import GPT, GPTConfig, causal_bias
from nanorook import checkpoint, hardware, positions
from nanorook.settings import refuse
from nanorook.stockfish import CANDIDATES, MATE
from nanorook.tokenizer import Tokenizer
from tools.evaluate import sample_and_grade

RARE = 1 / 3  # share of texts about boards of rare_kinds(), which games seldom show
CAPTURES = 0.35  # share of moves that are captures outright where there is one; with the rest, 40 % of legal moves
ILLEGAL = 0.35  # share of illegal moves among the rest, 30 % of all
LEGAL, LEGAL_STEPS = 0.56, 4000  # share of texts that list legal moves: at first; none after these steps
JUDGE = 0.12  # share of texts that mark moves as legal or not
ENVIRONMENT = 0.5  # share of the environment's among the other texts
ENVIRONMENT_WEIGHT = 2.0  # of their loss: rules decide each token, where a policy's moves and numbers are half chance
UNCHANGED_WEIGHT = 0.3  # of the loss on a square that the move leaves as it was: most squares, and easy to learn
DECISIVE_WEIGHT = 5.0  # on the few tokens of an answer that matter most, see weigh()
LEGAL_WEIGHT = 4.0  # of the loss on probability that leads to no legal move, see go_on()
WARMUP = 100  # steps in which the learning rate rises
BUCKET = 16  # sequences are padded to a multiple of this, so that compiled code and kernels meet few shapes
TOKENIZERS = {"squares": Tokenizer.squares, "bytes": Tokenizer.of_bytes, "gpt2": Tokenizer.gpt2}
SKILL = {"policy": ("legal", "candidates_legal", "top5", "best"), "environment": ("next_state", "truncated")}
FIXED_PLACES = {"squares": "squares", "expanded": "bytes"}  # format: the tokenizer that gives a square one place


def arguments():
    p = argparse.ArgumentParser("python -m tools.pretrain", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("out", help="the model folder to write; run the same command again to resume")
    p.add_argument("--data", nargs="+", default=["builtin"], help="labelled positions, as nanorook/positions.py reads")
    p.add_argument("--init", help="start from this model instead of random weights")
    p.add_argument("--tokenizer", default="squares", help="squares, bytes, gpt2, or a folder with tokenizer files")
    p.add_argument("--format", default="squares", choices=[*rewards.WIDTH, "rookworld"], help="see rewards.py")
    p.add_argument("--layers", type=int, default=6, help="12 for GPT-2 124M")
    p.add_argument("--width", type=int, default=256, help="768 for GPT-2 124M")
    p.add_argument("--heads", type=int, default=8, help="12 for GPT-2 124M")
    p.add_argument("--positions", type=int, default=320, help="the longest text; 1024 for GPT-2 124M")
    p.add_argument("--steps", type=int, required=True, help="where the run ends, counted from its beginning")
    p.add_argument("--decay", type=float, default=0.3, help="last share of --steps, where the rates fall to zero")
    p.add_argument("--hold", action="store_true", help="no decay yet: without --hold and with more --steps it goes on")
    p.add_argument("--rows", type=int, default=32, help="texts in a step; 1024 suits a GPU")
    p.add_argument("--lr-matrix", type=float, default=0.01, help="Muon's learning rate")
    p.add_argument("--lr", type=float, default=0.0005, help="AdamW's learning rate")
    p.add_argument("--eval-every", type=int, default=250, help="steps between saves with a line of skill")
    p.add_argument("--eval-positions", type=int, default=64, help="held-out positions for that line")
    p.add_argument("--workers", type=int, default=0, help="processes that make texts; 0 makes them in this one")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the faster one")
    p.add_argument("--half", action="store_true", help="write the weights in bf16, half the size")
    p.add_argument("--seed", type=int, default=0, help="of the first weights and of all draws")
    p.add_argument("--device", default="auto", help="cpu, cuda, ...; auto: cuda if there is one")
    a = p.parse_args()
    if a.rows < 8 or not 0 < a.decay <= 1:
        p.error("--rows has to be at least 8, so that each task has some, and --decay above 0 and at most 1.")
    if not a.init and (a.positions < 288 or FIXED_PLACES.get(a.format, a.tokenizer) != a.tokenizer):
        p.error("--positions has to be at least 288 for texts to fit; --format squares needs --tokenizer squares, "
                "expanded needs bytes, for squares to have fixed places.")  # fmt: skip
    return a


# ---------------------------------------------------------------------------------------------------------------------
# Texts: (prompt, completion)


def policy_text(position, rng, text_format):
    """RookWorld lists its moves in random order. In the formats of small models the best comes first: with a random one
    such a model never learned (in 250,000 texts) to choose the move that its own numbers rank first."""
    fen, moves = position.fen, position.moves
    if text_format not in rewards.WIDTH:
        moves = rng.sample(moves, len(moves))
    return rewards.policy_prompt(fen, text_format), rewards.policy_completion(fen, moves, text_format)


def environment_text(position, rng, text_format):
    """Half of the texts have a short history, down to the move alone: with ten moves always, a model reads the move at
    the tenth place, and fails where it is empty. Captures change most, so they are asked more often than in RL."""
    if rng.random() < 0.5:
        earlier = rng.randrange(10)
        position = position._replace(history=position.history[-earlier:] if earlier else ())
    if rng.random() < CAPTURES and (captures := list(chess.Board(position.fen).generate_legal_captures())):
        position = position._replace(asked=rng.choice(captures).uci())
    question = rewards.environment_question(position, rng, text_format, ILLEGAL)
    return question.prompt, rewards.environment_completion(*question.truth, text_format)


def legal_text(position, rng, text_format):
    moves = [move.uci() for move in chess.Board(position.fen).legal_moves]
    prompt = "L" + rewards.policy_prompt(position.fen, text_format)[1:]
    return prompt, " ".join(rng.sample(moves, min(19, len(moves))))  # then the text is as long as a policy's


def judge_text(position, rng, text_format):
    """16 moves, each with a mark, + where it is legal: practice for the environment, whose texts judge a move each."""
    board = chess.Board(position.fen)
    legal = [move.uci() for move in board.legal_moves]
    moves = [rng.choice(legal) if rng.random() < 0.5 else positions.illegal_move(board, rng).uci() for _ in range(16)]
    prompt = "J" + rewards.policy_prompt(position.fen, text_format)[1:]
    return prompt, " ".join(f"{move}{'+' if move in legal else '-'}" for move in moves)


TASKS = {"policy": policy_text, "environment": environment_text, "judge": judge_text, "legal": legal_text}


def rare_kinds(labelled):
    """Boards that rules are about and games seldom show, a list for each kind."""
    rights = {"e1g1": "K", "e1c1": "Q", "e8g8": "k", "e8c8": "q"}
    kinds = [
        [p for p in labelled if p.moves[0][1] == MATE - 1],
        [p for p in labelled if any(rights.get(uci, "?") in p.fen.split(" ")[2] for uci, _ in p.moves)],  # castlings
        [p for p in labelled if any(len(uci) == 5 for uci, _ in p.moves)],  # promotions
        [p for p in labelled if p.fen.split(" ")[3] != "-"],  # en passant
        [p for p in labelled if len(p.moves) < CANDIDATES],  # checks, and the last kings and pawns
        [p for p in labelled if chess.Board(p.fen).is_check()],
    ]
    return [kind for kind in kinds if kind]


def draw_texts(step):
    rng, unit = random.Random(f"{args.seed}/{step}"), max(1, args.rows // 32)  # few numbers of rows are few shapes
    left = 0 if args.init else max(0, 1 - step / LEGAL_STEPS)  # a model that is taught further knows the rules
    marks = JUDGE if text_format in FIXED_PLACES else 0  # elsewhere the random moves before them would be targets, too
    legal, judge = (round(share * args.rows / unit) * unit for share in (LEGAL * left, marks))
    environment = round(ENVIRONMENT * (args.rows - legal - judge) / unit) * unit

    def draw():
        position = rng.choice(rng.choice(rare) if rare and rng.random() < RARE else labelled)
        return positions.mirror(position) if rng.random() < 0.5 else position

    policy = args.rows - environment - judge - legal
    rows = {"policy": policy, "environment": environment, "judge": judge, "legal": legal}
    return {task: [TASKS[task](draw(), rng, text_format) for _ in range(rows[task])] for task in TASKS if rows[task]}


class Batches(Dataset):
    def __getitem__(self, step):
        return {task: tokenize(texts) for task, texts in draw_texts(step).items()}


def tokenize(texts):
    """Inputs (R, S), places (K,) in R·S whose next token is to be predicted, these tokens (K,), their weights (K,), the
    rows (M,) of these K that are tokens of moves, the tokens that are legal there (M, V)."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer) + [tokenizer.eos]) for prompt, answer in texts]
    S = min(n_positions, -(-max(len(p) + len(c) - 1 for p, c in rows) // BUCKET) * BUCKET)
    inputs, targets = np.zeros((len(texts), S), dtype=np.int64), np.full((len(texts), S), -1)
    weights, legal = np.ones((len(texts), S), dtype=np.float32), []
    for i, (p, c) in enumerate(rows):
        ids, start = (p + c)[: S + 1], len(p) - 1
        inputs[i, : len(ids) - 1] = ids[:-1]
        targets[i, start : len(ids) - 1] = ids[len(p) :]
        if text_format not in FIXED_PLACES:
            continue
        prompt, answer = texts[i]
        weights[i, start : start + len(c)] = weigh(prompt, answer)
        for place, tokens in go_on(prompt, answer):
            weights[i, place] *= targets[i, place] >= 0  # the move in an environment's prompt is no target itself
            targets[i, place] = ids[place + 1]
            legal.append((i * S + place, tokens))
        if prompt.startswith("A: "):  # behind its move stands a judge's mark, in place of what begins the history
            place = len(tokenizer.encode("+".join(prompt.split("+")[:2]))) - 1
            targets[i, place], weights[i, place] = ord("+" if answer.endswith("+0") else "-"), DECISIVE_WEIGHT
    places, allowed = np.flatnonzero(targets >= 0), np.zeros((len(legal), tokenizer.vocab_size), dtype=bool)
    for row, (_, tokens) in zip(allowed, legal):
        row[tokens] = True
    moves = np.searchsorted(places, np.array([place for place, _ in legal], dtype=np.int64))
    return inputs, places, targets.ravel()[places], weights.ravel()[places], moves, allowed


def place_on_board(square):
    return 9 * (7 - chess.square_rank(square)) + chess.square_file(square)  # 9: a slash ends a rank


def weigh(prompt, answer):
    """The weight of each token of an answer and of the end token."""
    weights = np.ones(len(tokenizer.encode(answer)) + 1, dtype=np.float32)
    if prompt.startswith("J: "):  # the marks alone
        marks = [len(tokenizer.encode(answer[:i])) for i, character in enumerate(answer) if character in "+-"]
        weights[:] = 0
        weights[marks] = DECISIVE_WEIGHT
    elif prompt.startswith("P: "):  # the best move, which repeats the first
        weights[-1 - len(tokenizer.encode(answer.partition("B: ")[2])) : -1] = DECISIVE_WEIGHT
    elif prompt.startswith("A: "):
        unchanged = [a == b for a, b in zip(prompt[3:74], answer[:71])]  # 71 tokens: 64 squares, 7 slashes
        weights[:71][unchanged] = UNCHANGED_WEIGHT
        weights[list(decisive(prompt, answer))] = DECISIVE_WEIGHT
        weights *= ENVIRONMENT_WEIGHT
    return weights


def decisive(prompt, answer):
    """The few tokens of an environment's answer that a rule decides: the squares of the move, which tell whether it was
    legal, and the clock of the 50-move rule, which at weight 1 stayed wrong after a quarter of legal moves."""
    move, fields = prompt.split("+")[1], answer.split("+")[0].split(" ")
    squares = [place_on_board(chess.parse_square(name)) for name in (move[:2], move[2:4])]
    clock = len(tokenizer.encode(" ".join(fields[:4]) + " "))
    return *squares, *range(clock, clock + len(fields[4]))


def go_on(prompt, answer):
    """(place, tokens with which a legal move that was not listed before goes on) at each token of a text's moves.
    A text shows one of thirty legal moves; the loss on the sum of all that is not legal says the rule itself."""
    if prompt.startswith("J: "):
        return
    board = chess.Board(positions.contract_board(prompt[3:].partition("+")[0].strip()))
    legal = [tokenizer.encode(move.uci()) for move in board.legal_moves]
    if prompt.startswith("A: "):
        before, listed = prompt.partition("+")[0] + "+", prompt.split("+")[1]
    else:
        before, listed = prompt + "M: " * answer.startswith("M: "), answer.removeprefix("M: ").partition(" E:")[0]
    place = len(tokenizer.encode(before)) - 1  # a token is predicted at the one before it
    for move in map(tokenizer.encode, listed.split(" ")):
        for k in range(len(move)):
            if tokens := [other[k] for other in legal if other[:k] == move[:k] and len(other) > k]:
                yield place + k, tokens
        legal = [other for other in legal if other != move]
        place += len(move) + 1


def start_worker(number):
    """The main process decides when to stop; a worker ends with it, also when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def new_model():
    if args.init:
        return GPT.load(args.init)
    tokenizer = TOKENIZERS[args.tokenizer]() if args.tokenizer in TOKENIZERS else Tokenizer.load(args.tokenizer)
    shape = tokenizer.vocab_size, args.positions, args.width, args.layers, args.heads
    model = GPT(GPTConfig(*shape, eos_token_id=tokenizer.eos, extra={"chess_format": args.format}))
    model.tokenizer = tokenizer
    if args.format in FIXED_PLACES:
        name_squares(model, args.format)
    return model


@torch.no_grad()
def name_squares(model, text_format):
    """A square's place in the prompt, and where the environment's answer predicts it, starts as its name's tokens: to
    find a move's square is one dot product. From random places a small model takes thousands of steps to learn it."""
    for board in (len("P: "), rewards.WIDTH[text_format]["A: "] - 1):  # -1: a token is predicted from the one before
        for square in chess.SQUARES:
            place = board + place_on_board(square)
            model.wpe.weight[place] += model.wte.weight[model.tokenizer.encode(chess.SQUARE_NAMES[square])].sum(0)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose updates are made orthogonal by five Newton-Schulz steps (Jordan et al., 2024).
    torch.optim.Muon's are always in bf16, which takes 15 of 18 seconds a step on a CPU without units for it."""

    def __init__(self, matrices, lr, dtype, momentum=0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(momentum, group["momentum"]).to(self.dtype))
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def orthogonal(x):
    """The nearest matrix with singular values of about 1."""
    x = x / (x.norm() + 1e-7)
    wide = x if x.shape[0] <= x.shape[1] else x.mT
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.mT


def schedule(step):
    """Factor of the learning rates: it rises, is held, and falls to zero over the last --decay of --steps."""
    left = 1.0 if args.hold else (args.steps - step) / (args.decay * args.steps)
    return min(1.0, (step + 1) / WARMUP, left)


def hidden(model, tokens):  # (R, S, C)
    S, device = tokens.shape[1], tokens.device
    return model.trunk(tokens, torch.arange(S, device=device), causal_bias(S, device))[0]


def evaluate(model, questions):
    """{"policy legal T=0": mean, ...} of held-out questions, greedy and at temperature 1."""
    model, skill = model.cast(model.dtype), {}
    for kind, names in SKILL.items():
        for temperature in (0, 1):
            answers = sample_and_grade(model, [q for q in questions if q.kind == kind], temperature, rows=256)
            means = {name: sum(grade.metrics[name] for _, grade in answers) / len(answers) for name in names}
            skill |= {f"{kind} {name} T={temperature}": round(mean, 4) for name, mean in means.items()}
    return skill


def main():
    global args, tokenizer, text_format, n_positions, labelled, rare  # read by draw_texts, in the workers too
    args = arguments()
    torch.manual_seed(args.seed)
    model = new_model()
    tokenizer, n_positions, text_format = model.tokenizer, model.config.n_positions, rewards.chess_format(model.config)
    labelled, held_out = positions.split([p for source in args.data for p in positions.load(source) if p.moves])
    if not labelled or not held_out:
        refuse("the data has no labelled positions to train on and to hold out; label some with python -m tools.label.")
    rare, rng = rare_kinds(labelled), random.Random(0)
    chosen = rng.sample(held_out, min(args.eval_positions, len(held_out)))
    questions = [rewards.policy_question(p, text_format) for p in chosen]
    questions += [rewards.environment_question(p, rng, text_format) for p in chosen]
    out, device, state, step, elapsed = Path(args.out), hardware.choose(args.device), {}, 0, 0.0
    state_file, model = out / "trainer.pt", model.to(device)
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    try:
        if state_file.exists():  # to the CPU, where AdamW's step counters stay: on CUDA each costs a wait at every step
            state = torch.load(state_file, map_location="cpu", weights_only=True)
        dtype = state["dtype"] if state else str(hardware.fastest_dtype(device))[6:]  # measured once for a run
        model.use(getattr(torch, dtype if args.dtype == "auto" else args.dtype))
        adam = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0)
        optimizers = Muon(matrices, args.lr_matrix, model.dtype), adam
        if state:
            model.load_state_dict(state["model"] if state["config"] == str(model.config) else {})  # {} is refused
            for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            step, elapsed = state["step"], state["elapsed"]
            tqdm.write(f"resumed {out} at step {step}, after {elapsed / 60:.0f} minutes of training")
    except (RuntimeError, ValueError, KeyError, OSError, EOFError, pickle.UnpicklingError):
        refuse(f"{state_file} is damaged or of another model; delete it, or name another folder.")
    forward = torch.compile(hidden, dynamic=True) if hardware.compiles("auto", device) else hidden

    def save():
        model.save(out, torch.bfloat16 if args.half else torch.float32)
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "dtype": dtype}
        torch.save(state | {"config": str(model.config), "step": step, "elapsed": elapsed}, out / "trainer.pt.tmp")
        os.replace(out / "trainer.pt.tmp", state_file)
        if not stop:  # the curve of skill against texts
            skill = {"step": step, "texts": step * args.rows, "seconds": round(elapsed), **evaluate(model, questions)}
            shown = (f"{name} {value:.1%}" for name, value in skill.items() if " legal" in name or "next" in name)
            tqdm.write(f"step {step}  " + "  ".join(shown))
            with open(out / "skill.jsonl", "a") as log:
                log.write(json.dumps(skill) + "\n")

    stop = checkpoint.catch_signals()
    bar, last = tqdm(total=args.steps, initial=step, unit="step", smoothing=0.05), time.time()
    workers = {"num_workers": args.workers, "worker_init_fn": start_worker, "collate_fn": dict}
    workers["multiprocessing_context"] = "fork" if args.workers else None  # they have this process's globals
    for batch in DataLoader(Batches(), None, sampler=range(step, args.steps), **workers):
        rate, losses = schedule(step), {}
        normalizer = float(sum(weights.sum() for _, _, _, weights, *_ in batch.values()))
        for optimizer, lr in zip(optimizers, (args.lr_matrix, args.lr)):
            optimizer.param_groups[0]["lr"] = lr * rate
        for task, arrays in batch.items():
            arrays = (torch.from_numpy(x).to(device, non_blocking=True) for x in arrays)
            tokens, places, targets, weights, moves, allowed = arrays
            logits = model.head(forward(model, tokens).flatten(0, 1).index_select(0, places))  # none where no loss is
            logits = logits.float().log_softmax(-1)  # (K, V)
            loss = F.nll_loss(logits, targets, reduction="none")
            illegal = -logits[moves].masked_fill(~allowed, -torch.inf).logsumexp(-1)  # (M,)
            (((loss * weights).sum() + LEGAL_WEIGHT * illegal.sum()) / normalizer).backward()
            losses[task] = (loss.detach() * weights).sum() / weights.sum()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            for optimizer in optimizers:
                optimizer.step()
        else:
            tqdm.write(f"step {step + 1}: the gradient is not finite, so the weights stay as they are")
        model.zero_grad(set_to_none=True)
        step += 1
        elapsed, last = elapsed + time.time() - last, time.time()
        if step % 10 == 0:
            bar.set_postfix({name: f"{loss.item():.3f}" for name, loss in losses.items()}, refresh=False)
        bar.update()
        if step % args.eval_every == 0 or step == args.steps or stop:
            save()
            last = time.time()  # that was not training time
        if stop:
            sys.exit(f"stopped at step {step}; the same command goes on from there.")


if __name__ == "__main__":
    main()
