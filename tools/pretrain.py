"""Supervised training: from labelled positions to a model that speaks both tasks (made weights/tiny).

A third task, all legal moves of a position, needs no labels and teaches the rules much faster than five candidates do;
it starts as most of the mix and fades. Matrices are trained with Muon (Jordan et al., 2024), the rest with AdamW.
A batch is a pure function of the seed and the step, so a killed run resumes with the batches it would have seen.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from collections import deque
from dataclasses import asdict
from itertools import count
from pathlib import Path

import chess
import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import data
import tasks
from engine import CANDIDATES, MATE
from machine import fastest_dtype, prepare
from model import GPT, GPTConfig
from skill import ask, skill
from tokenizer import LoadError, Tokenizer

BUCKET = 32  # sequences are padded to a multiple of this, so that compiled code meets few shapes


def arguments():
    p = argparse.ArgumentParser("python -m tools.pretrain", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    p.add_argument("out", help="the model folder to write; run the same command again to resume")
    p.add_argument("--data", nargs="+", default=["builtin"], help="labelled positions, as data.py reads them")
    p.add_argument("--init", help="start from this model instead of random weights")
    p.add_argument("--tokenizer", default="bytes", help="'bytes', 'gpt2', or a folder with tokenizer files")
    p.add_argument("--format", default="expanded", choices=["expanded", "rookworld"], help="how chess is written")
    p.add_argument("--layers", type=int, default=6, help="12 for GPT-2 124M")
    p.add_argument("--width", type=int, default=256, help="768 for GPT-2 124M")
    p.add_argument("--heads", type=int, default=8, help="12 for GPT-2 124M")
    p.add_argument("--positions", type=int, default=384, help="the longest text; 1024 for GPT-2 124M")
    p.add_argument("--steps", type=int, help="how long to train, in steps")
    p.add_argument("--minutes", type=float, help="how long to train, in minutes; the schedule follows the clock")
    p.add_argument("--rows", type=int, default=30, help="texts in a step")
    p.add_argument("--lr-matrix", type=float, default=0.01, help="Muon's learning rate")
    p.add_argument("--lr", type=float, default=0.0005, help="AdamW's learning rate")
    p.add_argument("--eval-every", type=int, default=250, help="steps between saves with a line of skill")
    p.add_argument("--eval-positions", type=int, default=64, help="held-out positions for that line")
    p.add_argument("--workers", type=int, default=0, help="processes that make batches; 0 makes them in this one")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the faster one")
    p.add_argument("--half", action="store_true", help="write the weights in bf16, half the size")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    if a.rows < 5:
        p.error("--rows has to be at least 5, so that each task has some.")
    if a.format == "expanded" and a.positions < 256 and not a.init:
        p.error("--positions has to be at least 256 for expanded texts to fit.")
    if (a.steps is None) == (a.minutes is None):
        p.error("say how long to train, with either --steps or --minutes.")
    return a


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def policy_text(position, rng, chess_format):
    moves = rng.sample(position.moves, len(position.moves))
    prompt = tasks.policy_prompt(position.fen, chess_format)
    return prompt, tasks.policy_completion(position.fen, moves, chess_format)


def environment_text(position, rng, chess_format):
    sample = tasks.environment_sample(position, rng, chess_format)
    return sample.prompt, tasks.environment_completion(*sample.labels, chess_format)


def legal_text(position, rng, chess_format):
    moves = [m.uci() for m in chess.Board(position.fen).legal_moves]
    prompt = tasks.write_prompt("L: ", tasks.write_fen(position.fen, chess_format), chess_format)
    return prompt, " ".join(rng.sample(moves, min(19, len(moves))))  # so many that the text fits into 192 bytes


def rare_kinds(positions):
    """Boards that rules are about and games seldom show, a list for each kind; a fifth of the texts are of them."""
    rights = {"e1g1": "K", "e1c1": "Q", "e8g8": "k", "e8c8": "q"}
    kinds = [
        [p for p in positions if p.moves and p.moves[0][1] == MATE - 1],
        [p for p in positions if any(rights.get(uci, "?") in p.fen.split(" ")[2] for uci, _ in p.moves)],  # castlings
        [p for p in positions if any(len(uci) == 5 for uci, _ in p.moves)],  # promotions
        [p for p in positions if p.fen.split(" ")[3] != "-"],  # en passant
        [p for p in positions if 0 < len(p.moves) < CANDIDATES],  # checks, and the last kings and pawns
    ]
    return [kind for kind in kinds if kind]


def make_batch(step, progress):
    """One step's tokens: for each task inputs and targets (R, S); targets are -1 outside the completions.

    Arrays, as a tensor comes from another process as an open file, which is fetched by a thread that may outlive us.
    """
    rng = random.Random(f"{args.seed}/{step}")
    legal = round(args.rows * (0.68 - 0.56 * min(1, progress / 0.7)))
    environment = round((args.rows - legal) * 0.4)
    batch = []
    for task, rows in (
        (policy_text, args.rows - legal - environment),
        (environment_text, environment),
        (legal_text, legal),
    ):
        texts = []
        while len(texts) < rows:
            position = rng.choice(rng.choice(rare) if rare and rng.random() < 0.2 else positions)
            if task is policy_text and not position.moves:
                continue
            texts.append(task(tasks.mirror(position) if rng.random() < 0.5 else position, rng, config.chess_format))
        batch.append(tokenize(texts))
    return batch


def tokenize(texts):
    prompts = [tokenizer.encode(prompt) for prompt, _ in texts]
    completions = [tokenizer.encode(completion) + [tokenizer.eos] for _, completion in texts]
    longest = max(len(p) + len(c) for p, c in zip(prompts, completions)) - 1
    S = min(config.n_positions, -(-longest // BUCKET) * BUCKET)
    inputs, targets = np.zeros((len(texts), S), dtype=np.int64), np.full((len(texts), S), -1)
    for i, (p, c) in enumerate(zip(prompts, completions)):
        ids = (p + c)[: S + 1]
        inputs[i, : len(ids) - 1] = ids[:-1]
        targets[i, len(p) - 1 : len(ids) - 1] = ids[len(p) :]
    return inputs, targets


def batches(pool, first, progress):
    """The batches from step `first` on, made ahead by the pool's processes where there is one."""
    pending = deque()
    for step in count(first):
        if pool is None:
            yield make_batch(step, progress(step))
        else:
            pending.append(pool.apply_async(make_batch, (step, progress(step))))
            if len(pending) > 4 * args.workers:
                yield pending.popleft().get()


# ---------------------------------------------------------------------------------------------------------------------
# Training


def start():
    """The model to train: random, or that of --init."""
    if args.init:
        return GPT.load(args.init)
    named = {"bytes": Tokenizer.of_bytes, "gpt2": Tokenizer.gpt2}
    tokenizer = named[args.tokenizer]() if args.tokenizer in named else Tokenizer.load(args.tokenizer)
    model = GPT(
        GPTConfig(
            vocab_size=tokenizer.vocab_size,
            n_positions=args.positions,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=args.heads,
            eos_token_id=tokenizer.eos,
            chess_format=args.format,
        )
    )
    model.tokenizer = tokenizer
    if args.format == "expanded" and args.tokenizer == "bytes":
        name_squares(model)
    return model


@torch.no_grad()
def name_squares(model):
    """A square's place in the prompt, and in the environment's answer, starts as the sum of its name's two letters.

    To find a move's square, or a square's old content, is then one dot product. From random places it takes a small
    model thousands of steps to learn where e2 is.
    """
    for board in (len("P: "), tasks.WIDTH["A: "]):
        for rank in range(8):
            for file in range(8):
                place = board + 9 * rank + file  # 9: a slash ends each rank
                model.wpe.weight[place] += model.wte.weight[ord("a") + file] + model.wte.weight[ord("8") - rank]


def make_optimizers(model):
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    if not hasattr(torch.optim, "Muon"):  # torch before 2.9
        return [torch.optim.AdamW(matrices + others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0)]
    return [
        torch.optim.Muon(matrices, lr=args.lr_matrix, weight_decay=0),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0),
    ]


def main():
    global args, config, tokenizer, positions, rare  # read by make_batch, in the pool's processes too
    args = arguments()
    torch.manual_seed(args.seed)
    prepare()
    model = start()
    config, tokenizer = model.config, model.tokenizer
    positions, held_out = data.split([p for source in args.data for p in data.load(source)])
    rare = rare_kinds(positions)
    tests = ask(held_out, args.eval_positions, config.chess_format)
    if not any(p.moves for p in positions):
        sys.exit("error: the data has no labelled position to train on; label it with python -m tools.label.")
    pool = multiprocessing.get_context("fork").Pool(args.workers, ignore_sigint) if args.workers else None

    model.to(args.device)
    optimizers = make_optimizers(model)
    dtype = fastest_dtype(args.device) if args.dtype == "auto" else getattr(torch, args.dtype)
    model.use(dtype)
    trunk = torch.compile(model.trunk) if args.device == "cuda" else model.trunk
    out = Path(args.out)
    state_file = out / "trainer.pt"
    step, elapsed = 0, 0.0
    if state_file.exists():
        try:
            state = torch.load(state_file, map_location=args.device, weights_only=True)
            if state["config"] != asdict(config):
                raise ValueError("another shape")
            model.load_state_dict(state["model"])
            for optimizer, saved in zip(optimizers, state["optimizers"]):
                optimizer.load_state_dict(saved)
            step, elapsed = state["step"], state["elapsed"]
        except (RuntimeError, ValueError, KeyError, OSError, EOFError, pickle.UnpicklingError):
            sys.exit(f"error: {state_file} is damaged or of another model; delete it, or name another folder.")
        tqdm.write(f"resumed {out} at step {step}, after {elapsed / 60:.0f} minutes of training")

    def progress(at):
        """From 0 to 1, at a step: by the clock, or by the step alone."""
        return at / args.steps if args.steps else elapsed / 60 / args.minutes

    def save():
        model.save(out, torch.bfloat16 if args.half else torch.float32)
        state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        state |= {"config": asdict(config), "step": step, "elapsed": elapsed}
        torch.save(state, out / "trainer.pt.tmp")
        os.replace(out / "trainer.pt.tmp", state_file)

    stop = []
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: stop.append(number))
    total = args.steps if args.steps else round(args.minutes * 60)
    bar = tqdm(total=total, initial=round(progress(step) * total), unit="step" if args.steps else "s", smoothing=0.05)
    last = time.time()
    for batch in batches(pool, step, progress):
        if progress(step) >= 1 or stop:
            break
        decay = min(1, (step + 1) / 100) * min(1, (1 - progress(step)) / 0.45)  # warm up, hold, then down to zero
        for optimizer, lr in zip(optimizers, (args.lr_matrix, args.lr) if len(optimizers) == 2 else (args.lr,)):
            for group in optimizer.param_groups:
                group["lr"] = lr * decay
        targets_in_step = sum(int((targets >= 0).sum()) for _, targets in batch)
        losses = []
        for inputs, targets in batch:
            inputs, targets = (torch.from_numpy(x).to(args.device) for x in (inputs, targets))
            kept = targets >= 0
            logits = model.head(trunk(inputs)[0][kept])  # no logits where no loss is
            loss = F.cross_entropy(logits.float(), targets[kept], reduction="sum")
            (loss / targets_in_step).backward()
            losses.append(loss.detach() / kept.sum())
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            for optimizer in optimizers:
                optimizer.step()
        else:
            tqdm.write(f"step {step + 1}: the gradient is not finite, so the weights stay as they are")
        model.zero_grad(set_to_none=True)
        step += 1
        now = time.time()
        elapsed, last = elapsed + now - last, now
        bar.n = round(progress(step) * total)
        if step % 10 == 0:
            names = ("policy", "environment", "legal")
            bar.set_postfix({n: f"{loss.item():.3f}" for n, loss in zip(names, losses)}, refresh=False)
        bar.update(0)
        if step % args.eval_every == 0:
            save()
            report(model, tests, dtype, out, step, elapsed)
            last = time.time()  # skill is not training time
    bar.close()
    save()
    if pool:  # what is pending is made and forgotten: to end processes in the middle of it may hang or crash
        pool.close()
        pool.join()
    if stop:
        sys.exit(f"stopped at step {step}; the same command goes on from there.")
    if step % args.eval_every:
        report(model, tests, dtype, out, step, elapsed)


def report(model, tests, dtype, out, step, elapsed):
    """One line of held-out skill, on the screen and in skill.jsonl."""
    values = {name: round(mean, 4) for name, (mean, _) in skill(model.cast(dtype), tests)[0].items()}
    shown = (
        "policy structure T=1",
        "policy legal T=0",
        "policy legal T=1",
        "policy best T=0",
        "environment next_state T=0",
    )
    tqdm.write(f"step {step}  " + "  ".join(f"{name} {values[name]:.1%}" for name in shown if name in values))
    with open(out / "skill.jsonl", "a") as log:
        log.write(json.dumps({"step": step, "seconds": round(elapsed), **values}) + "\n")


def ignore_sigint():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    try:
        main()
    except (LoadError, data.DataError) as error:
        sys.exit(f"error: {error}")
