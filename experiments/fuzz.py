"""Input broken on purpose: completions through `grade`, files through every loader.

    python -m experiments.fuzz --count 20000                # files for each loader; answers: five times as many a task
    python -m experiments.fuzz --only FEN PGN --seed 7      # some targets, other chance
    python -m experiments.fuzz --replay fuzz-failure/PGN    # an input that was kept, again

Whatever comes in is accepted, or refused by its documented error, within a second and with the memory flat. Three
quarters of the cases are real inputs, mutated; case n depends on seed, target and n alone. The others are made by
hypothesis. The first input that breaks the rule is kept, and the program exits with 1.
"""

import argparse
import contextlib
import gc
import gzip
import hashlib
import io
import itertools
import json
import math
import random
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path

import chess.pgn
import hypothesis
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import checkpoint
import data
import tasks
from experiments.broken import ANY_JSON, gzipped, json_like, lines, mutate, pickles_like, said, tensors_like
from model import GPT, GPTConfig
from rewards import MALFORMED, grade
from skill import answers, sample_and_grade
from tokenizer import LoadError, Tokenizer

REFUSALS = LoadError, data.DataError, checkpoint.CheckpointError
SECONDS = 1.0  # for one case
GROWTH = 48  # MB that may be in use after a target's cases, beyond what is after a tenth of them
ROOM = 1 << 30  # bytes that one case may ask for


class Failure(Exception):
    """What a case did, and where its input is kept."""


class Stuck(BaseException):
    """After ten times SECONDS; no handler of a loader's takes it for an error of its own."""


# ---------------------------------------------------------------------------------------------------------------------
# Targets: (name, real inputs, what hypothesis makes, function of an input that says whether it was accepted)


def targets(folder):
    with gzip.open(data.BUILTIN, "rt") as file:
        positions = [data.read_position(line.strip()) for line in itertools.islice(file, 50)]
    yield from completions(positions)
    yield from position_files(positions[:12], folder)
    yield from model_folders(folder / "model")
    yield from checkpoints(folder / "out")


def completions(positions):
    """Ideal answers in both formats, and what the embedded model says; to be graded for any prompt of their task."""
    model = GPT.load(Path(__file__).parent.parent / "weights/tiny")
    samples, texts = {"P": [], "A": []}, []
    for chess_format in ("rookworld", "expanded"):
        rng = random.Random(0)
        for p in positions:
            samples["P"].append(tasks.policy_sample(p, chess_format))
            samples["A"].append(tasks.environment_sample(p, rng, chess_format))
            texts.append(tasks.policy_completion(p.fen, p.moves, chess_format))
            texts.append(tasks.environment_completion(*samples["A"][-1].labels, chess_format))
    for task in "PA":
        texts += answers(model, samples[task][-16:], 1.0, torch.Generator().manual_seed(0))[0]
    texts = [text.encode() for text in texts]

    def accept(content, samples):
        chance = zlib.crc32(content)
        sample, labelled, truncated = samples[chance % len(samples)], chance & 256, bool(chance & 512)
        labels = sample.labels if labelled else () if sample.prompt[0] == "P" else None
        warmup, multiplier = (1.0, 0.3) if chance & 1024 else ((chance >> 12 & 7) / 7, (chance >> 16 & 7) / 7)
        text = content.decode("utf-8", "surrogateescape" if chance & 2048 else "replace")
        g = grade(sample.prompt, text, labels, truncated, warmup=warmup, runaway_multiplier=multiplier)
        assert MALFORMED <= g.reward <= 1 and all(type(v) is float and math.isfinite(v) for v in g.parts.values()), g
        earned = sum(value for name, value in g.parts.items() if name.startswith("earned/"))
        assert abs(g.reward - earned * (multiplier if truncated and earned > 0 else 1)) < 1e-6, g
        return g.parts["structure"] == 1

    for task in "PA":
        yield f"grade {task}", texts, said(texts[:9]), lambda content, task=task: accept(content, samples[task])


def position_files(positions, folder):
    rng = random.Random(1)
    asked = [tasks.environment_sample(p, rng, "rookworld") for p in positions]
    policy = [f"P: {p.fen:90}" + tasks.policy_completion(p.fen, p.moves, "expanded") for p in positions]
    world = [s.prompt + tasks.environment_completion(*s.labels, "rookworld") for s in asked]
    own = [data.write_position(p) for p in positions]
    epds = [f'{p.fen.rsplit(" ", 2)[0]} bm {p.moves[0][0]}; id "{i}";' for i, p in enumerate(positions)]
    tag = r'\[(FEN|SetUp|Variant|Result) "[^"]{0,60}"\]'
    san = r"(\d+\.+ ?)?([KQRBN]?[a-h]?x?[a-h][1-8][+#]?|O-O|[({);}$*])( .{0,8}){0,4}"
    kinds = {
        "own lines": (own, [data.OURS]),
        "own lines trusted": (own, [data.OURS]),  # as those after the first five thousand
        "RookWorld": ([*policy[:6], *world[:6]], [data.POLICY, data.ENVIRONMENT]),
        "FEN": ([p.fen for p in positions], [data.FEN_OR_EPD]),
        "EPD": (epds, [data.FEN_OR_EPD]),
        "PGN": ([pgn(random.Random(n)) for n in range(3)], [tag, san]),
    }

    def accept(content, name, proven):
        (folder / name).write_bytes(content)
        data.PROVEN = proven
        with contextlib.redirect_stderr(io.StringIO()):  # the sentence about what was left out
            found = data.load(folder / name)
        for position in found[: proven and 20]:  # what is proven can be asked about
            tasks.policy_sample(position, "expanded")
            tasks.environment_sample(position, random.Random(0), "expanded")
        return True

    everything = []
    for name, (rows, grammar) in kinds.items():
        wholes = ["\n".join(rows[:n]).encode() for n in (1, 3, len(rows))]
        everything += wholes
        file, proven = ("games.pgn" if name == "PGN" else "positions.txt"), (0 if "trusted" in name else data.PROVEN)
        yield name, wholes, lines(*grammar), lambda content, file=file, proven=proven: accept(content, file, proven)
    zips = [*map(gzip.compress, everything)]
    yield "gzip", zips, gzipped(everything), lambda content: accept(content, "positions.gz", 5000)


def pgn(rng):
    board = chess.Board()
    for _ in range(20):
        if not board.is_game_over():
            board.push(rng.choice(list(board.legal_moves)))
    game = chess.pgn.Game.from_board(board)
    game.next().comment, game.next().nags = "a {comment ; ) of theirs", {1, 140}
    game.next().add_variation(chess.Move.null())
    return str(game) + "\n"


def model_folders(folder):
    """A GPT-2 of one layer in every form that is read; one file of it is broken. What is accepted also has to run."""
    torch.manual_seed(0)
    ranks = {bytes([b]): b for b in range(256)}
    for merge in (b"e2", b"e4", b"e2e4", b"  ", b"M:", b"+0"):
        ranks[merge] = len(ranks)
    model = GPT(GPTConfig(len(ranks) + 1, 256, 16, 1, 2, eos_token_id=len(ranks), chess_format="expanded"))
    model.tokenizer = Tokenizer(ranks, len(ranks))
    prompt = [tasks.Sample(tasks.policy_prompt(chess.STARTING_FEN, "expanded"), ())]

    def accept(content, file):
        file.write_bytes(content)
        sample_and_grade(GPT.load(file.parent), prompt, 1, 2, 1.0)
        return True

    def target(name, strategy, without=(), **files):
        """`name` is broken in a folder without some of the usual files, and with others."""
        model.save(folder / name)
        for other in without:
            (folder / name / other).unlink()
        for other, content in files.items():
            (folder / name / other).write_bytes(content)
        file = folder / name / name
        return name, [file.read_bytes()], strategy(file.read_bytes()), lambda content: accept(content, file)

    yield target("config.json", json_like)
    yield target("model.safetensors", tensors_like)
    yield target("tokenizer.json", json_like)

    bpe = json.loads(model.tokenizer.files["tokenizer.json"])["model"]
    merges = "\n".join(["#version: 0.2", *map(" ".join, bpe["merges"])]).encode()
    files = {"vocab.json": json.dumps(bpe["vocab"]).encode(), "merges.txt": merges}
    yield target("vocab.json", json_like, ["tokenizer.json"], **files)
    yield target("merges.txt", lambda _: lines(r"\S{1,3} \S{1,3}", r"[a-h] [1-8]"), ["tokenizer.json"], **files)

    weights = load_file(folder / "config.json" / "model.safetensors")
    torch.save(weights, folder / "bin")
    yield target(
        "pytorch_model.bin", pickles_like, ["model.safetensors"], **{"pytorch_model.bin": (folder / "bin").read_bytes()}
    )
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    files = {"model.safetensors.index.json": json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}).encode()}
    for shard in {*shards.values()}:
        save_file({name: w for name, w in weights.items() if shards[name] == shard}, folder / "shard")
        files[shard] = (folder / "shard").read_bytes()
    yield target("model.safetensors.index.json", json_like, ["model.safetensors"], **files)
    # No loader reads this one: whatever it holds, the model loads.
    yield target("generation_config.json", json_like, **{"generation_config.json": b'{"eos_token_id": 262}'})


def checkpoints(out):
    """The newer of two is broken, so the older one is taken, with a word. `sealed` has its checksums made again."""
    out.mkdir()
    torch.manual_seed(0)
    model = GPT(GPTConfig(40, 16, 8, 1, 2, eos_token_id=39))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    trainer = {"optimizer": optimizer.state_dict(), "settings": {"SEED": 0}, "best": (0.5, 1), "good": (1, 2.5)}
    for step in (1, 2):
        checkpoint.save(out, model, {**trainer, "step": step, "kl_coef": 0.02, "skill": {}}, 5)
    folder = out / "step-000002"
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}

    def accept(content, name, sealed=False):
        for file, old in whole.items():
            (folder / file).write_bytes(old)
        (folder / name).write_bytes(content)
        if sealed:
            sums = {**json.loads(whole["sums.json"]), name: hashlib.sha256(content).hexdigest()}
            (folder / "sums.json").write_text(json.dumps(sums))
        heard = []
        taken, state = checkpoint.load(out, heard.append)
        assert (taken == folder) == (not heard) and (sealed or state["step"] == 2 - len(heard)), (taken, heard)
        return not heard

    pt, sums = whole["trainer.pt"], whole["sums.json"]
    yield "trainer.pt", [pt], pickles_like(pt), lambda content: accept(content, "trainer.pt")
    yield "trainer.pt sealed", [pt], pickles_like(pt), lambda content: accept(content, "trainer.pt", sealed=True)
    yield "sums.json", [sums], json_like(sums), lambda content: accept(content, "sums.json")

    def rewound(content):
        (out / "metrics.jsonl").write_bytes(content)
        return [row["step"] for row in checkpoint.rewind(out / "metrics.jsonl", 3)] == [1, 2, 3]

    metrics = b"".join(json.dumps({"step": n, "reward": 0.5}).encode() + b"\n" for n in range(1, 6))
    rows = st.lists(ANY_JSON | st.fixed_dictionaries({"step": ANY_JSON}), max_size=4)
    yield "metrics.jsonl", [metrics], rows.map(lambda rows: "\n".join(map(json.dumps, rows)).encode()), rewound


# ---------------------------------------------------------------------------------------------------------------------
# The run


def judge(name, content, accept, keep):
    """(accepted, seconds) of one case; Failure, with the input kept, if it breaks the rule."""

    def stuck(*_):
        raise Stuck

    signal.signal(signal.SIGALRM, stuck)
    try:
        for _ in range(3):  # a machine may be slow once; a slow loader is slow every time
            signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
            start = clock()
            try:
                accepted = accept(content)
            except Stuck:
                pass
            except REFUSALS as error:
                accepted = False
                assert str(error).strip(), "refused without a word"
            finally:
                seconds = clock() - start
                signal.setitimer(signal.ITIMER_REAL, 0)
            if seconds < SECONDS:
                return accepted, seconds
        raise TimeoutError(f"{seconds:.1f} s")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in a library of Rust is no Exception
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / name.replace(" ", "-")
        path.write_bytes(content)
        raise Failure(f"{name}: {type(error).__name__}: {str(error)[:300]}; the input is kept in {path}") from error


def clock():
    """Seconds, without those in which other work on the machine kept this process from its core."""
    return time.perf_counter() - int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def fuzz(name, wholes, strategy, accept, count, seed, keep):
    """One target's row of the table."""
    row = dict(target=name, cases=0, accepted=0, refused=0, slowest=0.0)

    def case(content):
        accepted, seconds = judge(name, content, accept, keep)
        row["cases"] += 1
        row["accepted" if accepted else "refused"] += 1
        row["slowest"] = max(row["slowest"], seconds)

    if not any([judge(name, content, accept, keep)[0] for content in wholes]):
        raise Failure(f"{name}: every real input is refused")
    mutated = count - count // 4
    for n in range(mutated):
        if n == mutated // 10:
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
        rng = random.Random(f"{seed}/{name}/{n}")
        try:
            case(mutate(rng.choice(wholes), wholes, rng))
        except Failure as failure:
            raise Failure(f"{failure} (seed {seed}, case {n})") from failure

    row |= {"growth": memory("VmRSS") - before, "peak": memory("VmHWM") - before}
    if row["growth"] > GROWTH:
        raise Failure(f"{name}: memory grew by {row['growth']:.0f} MB in {row['cases']} cases (seed {seed})")

    # Hypothesis comes last: it remembers all that it has made, so with it the memory is not flat.
    generate = hypothesis.settings(
        max_examples=count // 4,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.seed(seed)(generate(hypothesis.given(strategy)(case)))()
    return row


def memory(what):
    """MB that this process uses (VmRSS), or has used at most (VmHWM)."""
    gc.collect()
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="files for each loader; five times as many answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="some targets, by their names in the table")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-failure"), help="folder for an input that breaks the rule"
    )
    parser.add_argument("--replay", type=Path, help="an input that was kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's, about pickles
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        known = {name: target for name, *target in targets(Path(folder))}
        wanted = [options.replay.name.replace("-", " ")] if options.replay else options.only or list(known)
        if unknown := [name for name in wanted if name not in known]:
            sys.exit(f"error: there is no target {unknown[0]}; the targets are {', '.join(known)}.")
        try:
            if options.replay:
                accepted, seconds = judge(wanted[0], options.replay.read_bytes(), known[wanted[0]][2], options.keep)
                print(f"{wanted[0]}: {'accepted' if accepted else 'refused'} in {1000 * seconds:.1f} ms")
                return
            print("| target | cases | accepted | refused | slowest (ms) | memory after (MB) | at most (MB) |")
            print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
            for name in wanted:
                count = options.count * (5 if name.startswith("grade") else 1)
                r = fuzz(name, *known[name], max(count, 20), options.seed, options.keep)
                print(f"| {name} | {r['cases']} | {r['accepted']} | {r['refused']} | {1000 * r['slowest']:.0f} | "
                      f"{r['growth']:+.1f} | {r['peak']:+.1f} |", flush=True)  # fmt: skip
        except Failure as failure:
            sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
