"""Supervised training: from labelled positions to a model that knows both tasks.

python -m tools.chess_pretrain out/mine --data builtin positions.txt.gz       on a CPU, a million texts in ten hours
python -m tools.chess_pretrain out/mine --steps 10000 --rows 1024 --workers 14           on a GPU, with 16 CPU cores

What the texts are: tools/chess_texts.py. The same command resumes a run that was stopped or killed. After each save the
folder is a model; tools.evaluate and tools.chess_benchmark say what it can do by then.
"""

import argparse
import json
import math
import os
import random
import sys
from functools import partial
from pathlib import Path

import chess
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

import architectures
import rewards
from model import GPT, GPTConfig, causal_attention
from nanorook import hardware
from nanorook.run import catch_signals, read_tensors, write_tensors
from nanorook.settings import fail, number
from nanorook.tokenizer import Tokenizer
from rook import positions
from tools import chess_texts as texts
from tools.chess_label import start_worker

LEGAL_WEIGHT = 4.0  # the weight of the loss on probability that leads to no legal move, see texts.legal_tokens()
WARMUP = 100  # steps over which the learning rates rise
TOKENIZERS = {
    "squares": partial(Tokenizer.of_bytes, chess.SQUARE_NAMES),  # a move is two tokens
    "expanded": Tokenizer.of_bytes,
    "rookworld": Tokenizer.gpt2,
}
SHAPE = {"format": "squares", "layers": 6, "width": 256, "heads": 8, "positions": 320}  # of a new model
LONGEST = 288  # positions that a text may need


def arguments():
    p = argparse.ArgumentParser("python -m tools.chess_pretrain", description=__doc__.split("\n")[0])
    p.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    count, rate, absent = number(int, 1), number(float, 0, 1), argparse.SUPPRESS
    p.add_argument("out", type=Path, help="the model folder to write; run the same command again to resume")
    p.add_argument("--data", nargs="+", default=["builtin"], help="labelled positions, as rook/positions.py reads them")
    p.add_argument("--init", help="start from this model, with its format and sizes")
    p.add_argument("--format", choices=TOKENIZERS, default=absent, help="of the texts, see rewards.py (squares)")
    p.add_argument("--layers", type=count, default=absent, help="of a new model (6; GPT-2 124M has 12)")
    p.add_argument("--width", type=count, default=absent, help="of a new model (256; GPT-2 124M has 768)")
    p.add_argument("--heads", type=count, default=absent, help="of a new model (8; GPT-2 124M has 12)")
    tokens = "most tokens of a text, of a new model (320; GPT-2 124M has 1024)"
    p.add_argument("--positions", type=number(int, LONGEST), default=absent, help=tokens)
    p.add_argument("--steps", type=count, default=32000, help="number of steps, from the beginning of the run")
    p.add_argument("--decay", type=rate, default=0.3, help="the last share of steps, over which the rates fall to zero")
    p.add_argument("--rows", type=number(int, 8), default=32, help="number of texts in a step; 1024 suits a GPU")
    p.add_argument("--lr-matrix", type=rate, default=0.01, help="Muon's learning rate")
    p.add_argument("--lr", type=rate, default=0.0005, help="AdamW's learning rate")
    p.add_argument("--save-every", type=count, default=250, help="steps between saves")
    p.add_argument("--workers", type=number(int, 0), default=0, help="processes that make texts; 0: the main one does")
    p.add_argument("--half", action="store_true", help="write the weights in bf16, half the size")
    p.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help="of initial weights and random texts")
    args = p.parse_args()
    given = [name for name in SHAPE if name in args]
    if args.init and given:
        p.error(f"--init has a shape and a format of its own; leave out --{given[0]}.")
    args = argparse.Namespace(**{**SHAPE, **vars(args)})
    if args.width % args.heads:
        p.error(f"--width {args.width} has to be a multiple of --heads {args.heads}.")
    return args


def new_model(args):
    tokenizer = TOKENIZERS[args.format]()
    shape = tokenizer.vocab_size, args.positions, args.width, args.layers, args.heads
    model = GPT(GPTConfig(*shape, eos_token_id=tokenizer.eos, extra={"chess_format": args.format}))
    model.tokenizer = tokenizer
    if args.format in rewards.WIDTH:
        # The embeddings of a square's place in the prompt, and of the place where the environment's answer predicts it
        # (from the token before), have that of its name added. Finding a move's square is then one dot product; from
        # random embeddings a small model takes thousands of steps to learn it.
        for board in (len("P: "), rewards.WIDTH[args.format]["A: "] - 1):
            for square in chess.SQUARES:
                name = model.wte.weight[tokenizer.encode(chess.SQUARE_NAMES[square])].sum(0)
                model.wpe.weight.data[board + texts.place_on_board(square)] += name.detach()
    return model


def hidden(model, tokens):  # (R, S) -> (R, S, C)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return model.trunk(tokens, positions, causal_attention)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose updates are made orthogonal by five Newton-Schulz steps (Jordan et al., 2024). Those of
    torch.optim.Muon are always in bf16, and take 15 of 18 seconds of a step on a CPU without units for it."""

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


def schedule(step, steps, decay):
    """The factor of the learning rates: it rises, is held, and falls to zero over the last share `decay` of steps."""
    left = (steps - step) / (decay * steps) if decay else 1.0
    return min(1.0, (step + 1) / WARMUP, left)


def main():
    args = arguments()
    trainer = args.out / "trainer.pt"  # what a run needs to resume
    if (args.out / "config.json").exists() and not trainer.exists():
        fail(f"{args.out} holds a model that this program has not made; name another folder to write to.")
    if args.out.is_file():
        fail(f"{args.out} is a file; name a folder.")
    args.out.mkdir(parents=True, exist_ok=True)
    device, dtype = hardware.prepare()
    torch.manual_seed(args.seed)
    model = (architectures.load_merged(args.init) if args.init else new_model(args)).to(device)
    text_format, n_positions = rewards.chess_format(model.config), model.config.n_positions
    if n_positions < LONGEST:
        fail(f"--init: {args.init} has {n_positions} positions, but a text may need {LONGEST}; name another model.")
    loaded = (p for source in args.data for p in positions.load(source) if p.moves and positions.is_sound(p))
    labelled, _ = positions.split(loaded)
    if not labelled:
        fail("the data has no labelled positions to train on; label some with tools.chess_label.")
    rare = texts.rare_kinds(labelled)

    config = json.dumps(model.write_config(), sort_keys=True)
    state = read_tensors(trainer) if trainer.exists() else None
    if state:
        if state.get("config") != config:
            fail(f"{trainer} belongs to another model; name another folder.")
        dtype = getattr(torch, state["dtype"])  # the faster one, measured once for a run
    model.set_compute_dtype(dtype)
    matrices = [p for name, p in model.named_parameters() if name.startswith("h.") and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("h.") and p.ndim == 2)]
    adam = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0)
    optimizers = [Muon(matrices, args.lr_matrix, dtype), adam]
    weights_dtype = torch.bfloat16 if args.half else torch.float32
    step = 0
    if state:
        step = state["step"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        model.save(args.out, weights_dtype)  # the run may have been killed after trainer.pt
        if step > args.steps:
            fail(f"{args.out} holds {step} steps; raise --steps.")
        tqdm.write(f"resumed {args.out} at step {step}")
    forward = torch.compile(hidden, dynamic=True) if hardware.compiles("auto", device) else hidden

    def make_batch(step):
        """The same for the same seed and step, in whatever process."""
        task_rows = texts.task_rows(step, args.rows, text_format, beginner=not args.init)
        drawn = texts.draw(random.Random(f"{args.seed}/{step}"), task_rows, labelled, rare, text_format)
        return {task: texts.tokenize(some, model.tokenizer, text_format) for task, some in drawn.items()}

    workers = {"num_workers": args.workers, "worker_init_fn": start_worker, "collate_fn": make_batch}
    workers["multiprocessing_context"] = "fork" if args.workers else None  # they have this process's positions
    batches = DataLoader(range(args.steps), batch_size=None, sampler=range(step, args.steps), **workers)
    bar = tqdm(batches, total=args.steps, initial=step, unit="step", smoothing=0.05)
    stop = catch_signals()
    for batch in bar:
        rate, losses = schedule(step, args.steps, args.decay), {}
        for optimizer, lr in zip(optimizers, (args.lr_matrix, args.lr)):
            optimizer.param_groups[0]["lr"] = lr * rate
        total = float(sum(weights.sum() for _, _, _, weights, *_ in batch.values()))
        for task, arrays in batch.items():
            tokens, places, targets, weights, moves, allowed = (torch.from_numpy(x).to(device) for x in arrays)
            states = forward(model, tokens).flatten(0, 1).index_select(0, places)  # (K, C): where there are targets
            logprobs = model.head(states).float().log_softmax(-1)  # (K, V)
            loss = (F.nll_loss(logprobs, targets, reduction="none") * weights).sum()
            known = logprobs[moves, : allowed.shape[1]]  # some models have more embeddings than tokens
            illegal = -known.masked_fill(~allowed, -torch.inf).logsumexp(-1).sum()
            losses[task] = loss.detach() / weights.sum()
            ((loss + LEGAL_WEIGHT * illegal) / total).backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            for optimizer in optimizers:
                optimizer.step()
        else:
            tqdm.write(f"step {step + 1}: the gradient is not finite, so the weights stay as they are")
        model.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            bar.set_postfix({name: f"{loss.item():.3f}" for name, loss in losses.items()}, refresh=False)
        if step % args.save_every == 0 or step == args.steps or stop:
            state = {"step": step, "config": config, "dtype": str(dtype)[6:]}
            state |= {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
            write_tensors(args.out / ".trainer.pt", state)
            os.replace(args.out / ".trainer.pt", trainer)
            model.save(args.out, weights_dtype)
        if stop:
            sys.exit(f"stopped at step {step}; the same command resumes from there.")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(f"a file could not be read or written ({error}); the same command resumes from the last save.")
