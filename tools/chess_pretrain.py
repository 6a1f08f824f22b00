"""Supervised training: from labelled positions to a model that knows both tasks.

python -m tools.chess_pretrain out/mine --data builtin positions.txt.gz       on a CPU, a million texts in ten hours
python -m tools.chess_pretrain out/mine --steps 10000 --rows 1024 --workers 14           on a GPU, with 16 CPU cores

What the texts are: tools/chess_texts.py. The same command resumes a run that was stopped or killed.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chess
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

import architectures
import rewards
import train
from model import GPT, GPTConfig, causal_attention
from nanorook import hardware
from nanorook.run import catch_signals, read_tensors, write_tensors
from nanorook.settings import fail, number
from nanorook.tokenizer import Tokenizer
from rook import positions
from tools import chess_texts as texts
from tools.chess_label import lock, start_worker

# A token of RookWorld's texts is pieces, a number, a letter of a square or a header, or a sign; or it is the space.
TEXT_TOKEN = re.compile(r" ?([pnbrqkPNBRQK]+|[0-9]+|[a-hwMEBPAL]|[-/+:.])| ")
LEGAL_WEIGHT = 4.0  # the weight of the loss on probability that leads to no legal move, see texts.legal_tokens()
PLACES_LAYER = 2  # the layers after which a token of RookWorld's boards should know its squares, see places_loss()
WARMUP = 100  # steps over which the learning rates rise
TOKENIZERS = {
    "squares": partial(Tokenizer.of_bytes, chess.SQUARE_NAMES),  # a move is two tokens
    "expanded": Tokenizer.of_bytes,
    "rookworld": Tokenizer.gpt2,
}
SHAPE = "format", "tokenizer", "layers", "width", "heads", "positions"  # what --init decides
POSITIONS = 288  # which the longest texts may need
SKILL = "policy legal", "policy candidates_legal", "policy top5", "policy best", "environment next_state"


def task_and_rows(text):
    task, _, rows = text.partition("=")
    return task, number(int, 1)(rows)


def arguments():
    usage, style = "python -m tools.chess_pretrain OUT [--NAME VALUE ...]", argparse.ArgumentDefaultsHelpFormatter
    p = argparse.ArgumentParser("python -m tools.chess_pretrain", usage, formatter_class=style)
    count, rate, length = number(int, 1), number(float, 0, 1), number(int, POSITIONS)
    p.add_argument("out", type=Path, help="the model folder to write; run the same command again to resume")
    p.add_argument("--data", nargs="+", default=["builtin"], help="labelled positions, as rook/positions.py reads them")
    p.add_argument("--init", help="start from this model, with its format and sizes")
    p.add_argument("--format", default="squares", choices=TOKENIZERS, help="format of the texts, see rewards.py")
    p.add_argument("--tokenizer", help="a folder with tokenizer files, for --format rookworld instead of GPT-2's")
    p.add_argument("--layers", type=count, default=6, help="12 for GPT-2 124M")
    p.add_argument("--width", type=count, default=256, help="768 for GPT-2 124M")
    p.add_argument("--heads", type=count, default=8, help="12 for GPT-2 124M")
    p.add_argument("--positions", type=length, default=320, help="most tokens in a text; 1024 for GPT-2 124M")
    p.add_argument("--steps", type=count, default=32000, help="number of steps, from the beginning of the run")
    p.add_argument("--decay", type=rate, default=0.3, help="the last share of steps, over which the rates fall to zero")
    p.add_argument("--legal-steps", type=count, default=texts.LEGAL_STEPS, help="steps until L: texts have faded")
    p.add_argument("--rows", type=number(int, 8), default=32, help="number of texts in a step; 1024 suits a GPU")
    p.add_argument("--mix", nargs="+", type=task_and_rows, metavar="TASK=ROWS", help="a step's texts of each task")
    p.add_argument("--lr-matrix", type=rate, default=0.01, help="Muon's learning rate")
    p.add_argument("--lr", type=rate, default=0.0005, help="AdamW's learning rate")
    p.add_argument("--eval-every", type=count, default=250, help="steps between saves, each with an evaluation")
    p.add_argument("--eval-positions", type=count, default=64, help="held-out positions in an evaluation")
    p.add_argument("--workers", type=number(int, 0), default=0, help="processes that make texts; 0: the main one does")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="auto: the faster one")
    p.add_argument("--half", action="store_true", help="write the weights in bf16, half the size")
    p.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help="of initial weights and random texts")
    p.add_argument("--device", default="auto", help="cpu, cuda, ...; auto: cuda if there is one")
    a = p.parse_args()
    if a.init:
        p.set_defaults(**dict.fromkeys(SHAPE))  # None, so that what is given can be told from a default
        given = vars(p.parse_args())
        for name in SHAPE:
            if given[name] is not None:
                p.error(f"--init has a shape and a format of its own; leave out --{name}.")
    if a.width % a.heads:
        p.error(f"--width {a.width} has to be a multiple of --heads {a.heads}.")
    if a.tokenizer and a.format != "rookworld":
        p.error(f"--format {a.format} has a tokenizer of its own; leave out --tokenizer.")
    return a


def new_model(args):
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else TOKENIZERS[args.format]()
    shape = tokenizer.vocab_size, args.positions, args.width, args.layers, args.heads
    model = GPT(GPTConfig(*shape, eos_token_id=tokenizer.eos, extra={"chess_format": args.format}))
    model.tokenizer = tokenizer
    if args.format not in rewards.WIDTH:
        unused = unused_tokens(model)
        model.wte.weight.data[unused] = model.wte.weight.data[unused][:1]
    else:
        # The embeddings of a square's place in the prompt, and of the place where the environment's answer predicts it
        # (from the token before), have that of its name added. Finding a move's square is then one dot product; from
        # random embeddings a small model takes thousands of steps to learn it.
        for board in (len("P: "), rewards.WIDTH[args.format]["A: "] - 1):
            for square in chess.SQUARES:
                name = model.wte.weight[tokenizer.encode(chess.SQUARE_NAMES[square])].sum(0)
                model.wpe.weight.data[board + texts.place_on_board(square)] += name.detach()
    return model


def unused_tokens(model):
    """(V,) True for the tokens that no text uses, which are all but 1,836 of GPT-2's 50,257."""
    strings = {i: token.decode("latin-1") for i, token in model.tokenizer.token_bytes.items()}
    used = [bool(TEXT_TOKEN.fullmatch(strings.get(i, ""))) for i in range(model.config.vocab_size)]
    used[model.tokenizer.eos] = True
    return ~torch.tensor(used)


def share_unused_row(model):
    """(V,) the row of each token in the embedding. If the rows of all unused tokens are equal, as in a new model, they
    share the last row from now on: on a CPU a softmax over all of GPT-2's tokens would take longer than the layers."""
    weight, unused = model.wte.weight.detach(), unused_tokens(model).to(model.wte.weight.device)
    if not unused.any() or not (weight[unused] == weight[unused][0]).all():
        return torch.arange(len(weight), device=weight.device)
    model.wte = torch.nn.Embedding.from_pretrained(torch.cat([weight[~unused], weight[unused][:1]]), freeze=False)
    return ((~unused).cumsum(0) - 1).masked_fill(unused, len(model.wte.weight) - 1)


def with_rows(model, rows, config=None):
    """The same model with these rows of its embedding, to be saved or sampled from."""
    with torch.device("meta"):
        other = GPT(config or model.config)
    trained = model.state_dict()  # with the probe, which is no part of a model
    state = {name: trained[name] for name in other.state_dict()}
    other.load_state_dict(state | {"wte.weight": state["wte.weight"][rows]}, assign=True)
    other.tokenizer = model.tokenizer
    return other.set_compute_dtype(model.dtype)


def log_probabilities(model, states, counts):
    """(K, V) for states (K, C), where each row of the embedding stands for `counts` (V,) equal tokens."""
    return (model.head(states).float() + counts.log()).log_softmax(-1)


def hidden(model, tokens):  # (R, S) -> (R, S, C)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return model.trunk(tokens, positions, causal_attention)


def squares_of_rows(model, row_of):
    """(V,) how many squares a token of a board stands for; 0 for all others."""
    squares = torch.zeros(int(row_of.max()) + 1, dtype=torch.long)
    for i, token in model.tokenizer.token_bytes.items():
        if pieces := re.fullmatch(r" ?([pnbrqkPNBRQK]+|[1-8]+)", token.decode("latin-1")):
            squares[row_of[i]] = len(positions.expand_board(pieces[1]))
    return squares.to(row_of.device)


def squares_of_tokens(tokens, squares):
    """(R, S, 64), in the order of a FEN: True for the squares that a token of a text's board stands for."""
    count = squares[tokens]  # (R, S)
    count[:, :2] = 0  # the header
    end, square = count.cumsum(1)[..., None], torch.arange(64, device=tokens.device)
    return (end - count[..., None] <= square) & (square < end)  # what follows the board begins at 64


def places_loss(probe, early, tokens, squares):
    """The loss of a linear probe that reads from the first layers, early (R, S, C), which squares a token stands for.

    Where a square is in one of RookWorld's texts depends on everything before it. A small model learns to count in a
    few hundred steps if this is asked of it; if not, it has hardly begun after 5,000, and guesses what is frequent."""
    truth = squares_of_tokens(tokens, squares)
    board = truth.any(-1)
    logits = probe(F.layer_norm(early[board].float(), early.shape[-1:]))  # (K, 64)
    return F.binary_cross_entropy_with_logits(logits, truth[board].float(), reduction="sum") / board.sum()


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


def evaluate(model, questions):
    """{"policy legal T=0": mean, ...} of held-out questions, greedy and at temperature 1."""
    figures, _ = train.evaluate(model, questions)
    return {name: round(mean, 4) for name, (mean, *_) in figures.items() if name.rpartition(" ")[0] in SKILL}


def open_folder(out):
    """Locks the folder, and refuses one with a model that another program has made."""
    if out.is_file():
        fail(f"{out} is a file; name a folder to write to.")
    out.mkdir(parents=True, exist_ok=True)
    lock(os.open(out / ".lock", os.O_CREAT | os.O_WRONLY), out)  # it stays open until this process ends
    foreign = [file for name in ("config.json", "*.safetensors", "*.bin") for file in out.glob(name)]
    if foreign and not (out / "trainer.pt").exists():
        fail(f"{out} holds a model that this program has not made; name another folder to write to.")


def save(out, model, dtype, state):
    """Replaces the files after all new ones are written, within `out`, as it may be a disk of its own."""
    unfinished = out / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
    model.save(unfinished / "model", dtype)
    write_tensors(unfinished / "trainer.pt", state)
    # trainer.pt comes first: a folder that has a model but no trainer.pt is refused as another program's
    for file in (unfinished / "trainer.pt", *(unfinished / "model").iterdir()):
        os.replace(file, out / file.name)
    shutil.rmtree(unfinished)


def load_state(file, described):
    """What a run needs to resume; {} at its beginning."""
    if not file.exists():
        return {}
    try:  # to the CPU, where AdamW's step counters stay: on CUDA each would be a GPU sync at every step
        state = read_tensors(file)
        if state["config"] == described:
            return state
    except Exception:  # a damaged pickle may raise anything
        pass
    fail(f"{file} is damaged or belongs to another model; name another folder.")


def main():
    args = arguments()
    open_folder(args.out)
    hardware.flush_denormals()
    device = hardware.choose_device(args.device)
    torch.manual_seed(args.seed)
    model = (architectures.load(args.init) if args.init else new_model(args)).to(device)
    if type(model) is not GPT:
        fail(f"--init: {args.init} is not a GPT-2, which is all that this program can train; name another model.")
    tokenizer, n_positions, text_format = model.tokenizer, model.config.n_positions, rewards.chess_format(model.config)
    if tokenizer.beginning:
        fail("the tokenizer puts a token before each text, which this program does not; take GPT-2's tokenizer.")
    if n_positions < POSITIONS:
        fail(f"--init: {args.init} has {n_positions} positions, but a text may need {POSITIONS}; name another model.")
    labelled = [p for source in args.data for p in positions.load(source) if p.moves and positions.is_sound(p)]
    labelled, held_out = positions.split(labelled)
    if not labelled or not held_out:
        fail("the data has no labelled positions to train on, or none to hold out; label some with tools.chess_label.")
    mix, taught = dict(args.mix or ()), texts.TASKS.keys() - {"moves" if text_format in rewards.WIDTH else "judge"}
    if unknown := mix.keys() - taught:
        fail(f"--mix: {min(unknown)!r} is not a task of the format {text_format}; take {', '.join(sorted(taught))}.")
    rows_of_a_step = sum(mix.values()) or args.rows
    rare, rng = texts.rare_kinds(labelled), random.Random(0)
    chosen = rng.sample(held_out, min(args.eval_positions, len(held_out)))
    questions = [rewards.policy_question(p, text_format) for p in chosen]
    questions += [rewards.environment_question(p, rng, text_format) for p in chosen]

    row_of = share_unused_row(model)
    counts, rows = row_of.bincount(), row_of.tolist()
    encoder = SimpleNamespace(vocab_size=len(counts), eos=rows[tokenizer.eos])  # from texts to rows of the embedding
    encoder.encode = lambda text: [rows[token] for token in tokenizer.encode(text)]
    if reads_places := text_format not in rewards.WIDTH:
        squares, early = squares_of_rows(model, row_of), {}
        model.places = torch.nn.Linear(model.config.n_embd, 64).to(device)
        layer = model.h[min(PLACES_LAYER, len(model.h)) - 1]
        layer.register_forward_hook(lambda block, inputs, output: early.update(output=output))
    described = f"{model.config}{model.places if reads_places else ''}"
    state = load_state(args.out / "trainer.pt", described)
    dtype = state.get("dtype", args.dtype) if args.dtype == "auto" else args.dtype  # auto is measured once for a run
    model.set_compute_dtype(hardware.fastest_dtype(device) if dtype == "auto" else getattr(torch, dtype))
    others = {name: p for name, p in model.named_parameters() if not (name.startswith("h.") and p.ndim == 2)}
    matrices = [p for name, p in model.named_parameters() if name not in others]
    adam = torch.optim.AdamW(others.values(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0)
    optimizers = [Muon(matrices, args.lr_matrix, model.dtype), adam]
    weights_dtype = torch.bfloat16 if args.half else torch.float32
    step, seconds = state.get("step", 0), state.get("elapsed", 0.0)
    seen = state.get("texts", step * rows_of_a_step)  # steps before this one may have had other numbers of rows
    skill_file = args.out / "skill.jsonl"

    def log_skill(whole):
        skill = {"step": step, "texts": seen, "seconds": round(seconds), **evaluate(whole, questions)}
        shown = (f"{name} {value:.1%}" for name, value in skill.items() if " legal" in name or "next" in name)
        tqdm.write(f"step {step}  " + "  ".join(shown))
        with open(skill_file, "a") as log:
            log.write(json.dumps(skill) + "\n")

    if step > args.steps:
        fail(f"{args.out} holds {step} steps of training, and --steps {args.steps} is below that; raise it.")
    if state:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        # The run may have been killed between two files of a save, or in the evaluation that follows it.
        save(args.out, whole := with_rows(model, row_of), weights_dtype, state)
        tqdm.write(f"resumed {args.out} at step {step}, after {seconds / 60:.0f} minutes of training")
        logged = skill_file.read_text().splitlines() if skill_file.exists() else []
        if (step % args.eval_every == 0 or step == args.steps) and step not in [json.loads(x)["step"] for x in logged]:
            log_skill(whole)
    forward = torch.compile(hidden, dynamic=True) if hardware.compiles("auto", device) else hidden

    def make_batch(step):
        """The same for the same seed and step, in whatever process."""
        task_rows = mix or texts.task_rows(step, args.rows, text_format, not args.init, args.legal_steps)
        drawn = texts.draw(random.Random(f"{args.seed}/{step}"), task_rows, labelled, rare, text_format)
        return texts.batches(drawn, encoder, n_positions, text_format)

    workers = {"num_workers": args.workers, "worker_init_fn": start_worker, "collate_fn": make_batch}
    workers["multiprocessing_context"] = "fork" if args.workers else None  # they have this process's positions
    batches = DataLoader(range(args.steps), batch_size=None, sampler=range(step, args.steps), **workers)
    bar = tqdm(batches, total=args.steps, initial=step, unit="step", smoothing=0.05)
    stop, last = catch_signals(), time.time()
    for batch in bar:
        rate, losses = schedule(step, args.steps, args.decay), {}
        for optimizer, lr in zip(optimizers, (args.lr_matrix, args.lr)):
            optimizer.param_groups[0]["lr"] = lr * rate
        total = float(sum(weights.sum() for _, (_, _, _, weights, *_) in batch))
        for task, arrays in batch:
            arrays = (torch.from_numpy(x).to(device, non_blocking=True) for x in arrays)
            tokens, places, targets, weights, moves, allowed = arrays
            states = forward(model, tokens).flatten(0, 1).index_select(0, places)  # (K, C): where there are targets
            logprobs = log_probabilities(model, states, counts)  # (K, V)
            loss = (F.nll_loss(logprobs, targets, reduction="none") * weights).sum()
            illegal = -logprobs[moves].masked_fill(~allowed, -torch.inf).logsumexp(-1).sum()
            losses[task] = loss.detach() / weights.sum()
            loss = (loss + LEGAL_WEIGHT * illegal) / total
            if reads_places:
                losses["places"] = places_loss(model.places, early.pop("output"), tokens, squares)
                loss = loss + losses["places"] * len(tokens) / rows_of_a_step
            loss.backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            for optimizer in optimizers:
                optimizer.step()
        else:
            tqdm.write(f"step {step + 1}: the gradient is not finite, so the weights stay as they are")
        model.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + rows_of_a_step
        seconds, last = seconds + time.time() - last, time.time()
        if step % 10 == 0:
            bar.set_postfix({name: f"{loss.item():.3f}" for name, loss in losses.items()}, refresh=False)
        if step % args.eval_every and step < args.steps and not stop:
            continue
        state = {"step": step, "texts": seen, "elapsed": seconds, "config": described, "dtype": str(model.dtype)[6:]}
        state |= {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        whole = with_rows(model, row_of)
        save(args.out, whole, weights_dtype, state)
        if stop:
            sys.exit(f"stopped at step {step}; the same command resumes from there.")
        log_skill(whole)
        last = time.time()  # that was not training time


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before the first step
        sys.exit(130)
    except OSError as error:
        fail(f"a file could not be read or written ({error}); the same command resumes from the last save.")
