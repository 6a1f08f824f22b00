"""Speed: seconds of a rollout and of a whole step, which is compared with TRL.

python -m tools.bench [W1 ... W9] [--runs 3] [--only nanorook] [--dtype float32]

Weights are random and nothing ends early, so every run does the same work. In each round nanorook and TRL take turns,
and a ratio is the median of the rounds' ratios: a machine whose speed changes favours neither. If other
programs share the CPU, a process's seconds of CPU time say more than the clock; with OMP_NUM_THREADS=1 they contain no
time of threads that only wait.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import resource
import string
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import train
from architectures import class_of
from model import GPT, GPTConfig
from nanorook import hardware
from nanorook.monitor import describe
from nanorook.settings import number
from nanorook.task import Question
from nanorook.tokenizer import Tokenizer
from rollout import Answer, detokenize, generate

SMALL, GPT2 = GPTConfig(257, 384, 256, 6, 8, eos_token_id=256), GPTConfig()
SMOLLM2 = dict(model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152)
SMOLLM2 |= dict(num_attention_heads=9, num_key_value_heads=3, rope_theta=1e5, architectures=["LlamaForCausalLM"])
QWEN = dict(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, vocab_size=151936)
QWEN |= dict(num_attention_heads=14, num_key_value_heads=2, rope_theta=1e6, architectures=["Qwen2ForCausalLM"])


class Workload(NamedTuple):
    what: str
    config: GPTConfig | dict  # or the entries of config.json for another architecture
    prompts: int  # B
    group: int  # G
    new: int  # T
    kl: float | None = None  # KL_COEF of a whole step, above 0 with a reference; None is a rollout alone
    tokens: int = 60  # of a prompt, ten more or fewer


def workloads(device):
    cuda = device.type == "cuda"
    return {
        "W1": Workload("rollout, 6 layers x 256", SMALL, 32, 8, 72),
        "W2": Workload("rollout, GPT-2 124M", GPT2, 64 if cuda else 4, 8, 64),
        "W3": Workload("whole step, 6 layers x 256", SMALL, 16, 8, 72, 0.0),
        "W4": Workload("whole step with reference, GPT-2 124M", GPT2, 64 if cuda else 2, 8, 64, train.KL_COEF),
        "W5": Workload("rollout, SmolLM2-135M", SMOLLM2, 16, 16, 64),
        "W6": Workload("whole step, SmolLM2-135M", SMOLLM2, 16, 16, 64, 0.0),
        "W7": Workload("whole step of GSM8K's sizes, Qwen2.5-0.5B", QWEN, 16 if cuda else 2, 8, 300, 0.0, 150),
        "W8": Workload("whole step of RookWorld-LM-124M's sizes", GPT2, 8, 8, 40, train.KL_COEF),
        "W9": Workload("whole step of RookWorld-LM-124M's sizes, mates alone", GPT2, 8, 8, 6, 0.03),
    }


def peak_memory(device):
    """In GB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def reset_peak(device):
    """What earlier workloads have used no longer counts."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif (file := Path("/proc/self/clear_refs")).exists():
        file.write_text("5")


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def timed(who, seconds, device):
    """Puts into `seconds` what its body takes, by the clock and in this process's CPU time; prints the name first."""
    print(f"  {who:40}", end="", flush=True)
    start = clock(device), time.process_time()
    yield
    seconds[who] = clock(device) - start[0], time.process_time() - start[1]
    print("{:9.3f} s,{:9.3f} s of CPU".format(*seconds[who]), flush=True)


# ---- nanorook ----------------------------------------------------------------------------------------------


def random_prompts(count, tokens):
    """Texts of about `tokens` bytes, each of which is a token; the same at every call."""
    rng = random.Random(0)
    return ["".join(rng.choices(string.ascii_letters, k=rng.randint(tokens - 10, tokens + 10))) for _ in range(count)]


def random_model(config):
    if isinstance(config, GPTConfig):
        return GPT(config)
    with tempfile.TemporaryDirectory() as folder:
        config = config | dict(max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=True)
        Path(folder, "config.json").write_text(json.dumps(config))
        kind = class_of(Path(folder))
        model = kind(kind.read_config(Path(folder)))
    for name, p in model.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(p)
    return model


def prepare(w, prompts, device, dtype):
    """A model of random weights, and a function that makes a rollout with it, or a step as train.py does."""
    torch.manual_seed(0)
    model = random_model(w.config).to(device).set_compute_dtype(dtype)
    rng = torch.Generator().manual_seed(0)
    model.tokenizer = Tokenizer.of_bytes()
    model.config.eos_token_id, model.tokenizer.ends = -1, (-1,)  # which never comes
    reference = train.make_reference(model) if w.kl else None
    optimizers = train.make_optimizers(model)
    most = 0
    if w.kl is not None:  # planned once, as in train.py: what PyTorch keeps later no longer looks free
        keys = max(len(model.tokenizer.encode(prompt)) for prompt in prompts) + w.new
        model.recompute = hardware.must_recompute(model, w.group * w.new, keys)
        most = hardware.microbatch_tokens(model, keys)

    def run():
        ids = [model.tokenizer.encode(prompt) for prompt in prompts]
        noise = torch.rand(len(ids) * w.group, w.new, generator=rng)
        rollout = generate(model.inference_copy(dtype), ids, w.group, [w.new] * len(ids), noise=noise)
        if w.kl is not None:
            question = Question(next(iter(train.task.LIMITS)), "", ())
            for row in rollout.completions.tolist():
                text, ends = detokenize(model.tokenizer, row)  # as for a verifier, whose own time does not count
                rollout.answers.append(Answer(question, text, ends, True))
            rollout.advantages = torch.randn(rollout.completions.shape, generator=rng).to(device)
            train.update(model, reference, optimizers, [rollout], most)

    return model, run


# ---- TRL -----------------------------------------------------------------------------------------------------

PLAIN = {"bf16": False, "gradient_checkpointing": False}
SCALE_OF_TRL = {"std": "group"}  # where its word is another one
TRL = {  # arguments of the model, and of GRPOConfig besides those of the workload
    "TRL, default": ({}, {}),  # fp32 weights, bf16 autocast, gradient checkpointing
    "TRL, float32": ({"dtype": "float32"}, PLAIN),
    "TRL, bfloat16": ({"dtype": "bfloat16"}, PLAIN),
    "TRL, bfloat16, 4 microbatches": ({"dtype": "bfloat16"}, PLAIN | {"gradient_accumulation_steps": 4}),
    "TRL, bfloat16, 16 microbatches": ({"dtype": "bfloat16"}, PLAIN | {"gradient_accumulation_steps": 16}),
}


def trl_rounds(w, prompts, folder, device, runs, turn, who):
    """Rounds with TRL's GRPOTrainer in one of its settings, which makes the steps in its own loop, after one that does
    not count. Both start with the weights in `folder`."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rounds, running = [], contextlib.ExitStack()

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, model, **kwargs):
            model.generation_config.eos_token_id = None  # the trainer has just taken it from the tokenizer

        def on_step_begin(self, *args, **kwargs):
            rounds.append(turn())
            running.enter_context(timed(who, rounds[-1], device))

        def on_step_end(self, *args, **kwargs):
            running.close()

    def reward(prompts, completions, completion_ids, **kwargs):
        assert all(len(ids) == w.new for ids in completion_ids)
        return torch.rand(len(prompts)).tolist()  # as in prepare()

    model, options = TRL[who]
    if model and isinstance(w.config, GPTConfig):  # transformers' own GELU for GPT-2 is many small operations
        model = model | {"activation_function": "gelu_pytorch_tanh"}
    config = GRPOConfig(
        output_dir=f"{folder}/out", use_cpu=device.type == "cpu", seed=0, model_init_kwargs=dict(model),
        per_device_train_batch_size=w.prompts * w.group // options.get("gradient_accumulation_steps", 1),
        num_generations=w.group, max_completion_length=w.new, temperature=train.TEMPERATURE, max_steps=runs + 1,
        beta=w.kl, loss_type=train.LOSS, scale_rewards=SCALE_OF_TRL.get(train.SCALE_REWARDS, train.SCALE_REWARDS),
        epsilon=train.CLIP_RANGE,
        epsilon_high=train.CLIP_RANGE_HIGH, learning_rate=train.LR, lr_scheduler_type="constant", adam_beta2=0.95,
        max_grad_norm=train.MAX_GRAD_NORM, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = GRPOTrainer(str(folder), reward, config, dataset, callbacks=[Clock()])
    trainer.remove_callback(PrinterCallback)
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = None
    trainer.eos_token_ids = [-1]
    trainer.train()
    return rounds[1:]


# ---- Measurements ------------------------------------------------------------------------------------------


def measure(w, device, dtype, runs, only):
    """Rounds of nanorook, and of TRL in the settings whose names contain `only`."""
    reset_peak(device)
    prompts = random_prompts(w.prompts, w.tokens)
    model, run = prepare(w, prompts, device, dtype)
    settings = [who for who in TRL if only in who and w.kl is not None]
    if settings and not importlib.util.find_spec("trl"):
        print("  TRL is not installed, so nothing is compared")
        settings = []

    def turn():
        """{who: seconds} of a round, without TRL."""
        seconds = {}
        with timed("nanorook", seconds, device):
            run()
        return seconds

    turn()
    print(f"  peak memory of nanorook {peak_memory(device):.1f} GB")
    if not settings:
        return [turn() for _ in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        return [seconds for who in settings for seconds in trl_rounds(w, prompts, folder, device, runs, turn, who)]


def summary(rounds, w):
    """In words, the medians of the seconds and of the rounds' ratios, each by the clock and in CPU time."""
    seconds, cpu_seconds = (median(taken["nanorook"][i] for taken in rounds) for i in (0, 1))
    tokens = w.prompts * w.group * w.new / seconds  # a second
    lines = [f"  median {seconds:.3f} s, {cpu_seconds:.3f} s of CPU, {tokens:,.0f} tokens/s"]
    for who in dict.fromkeys(who for taken in rounds for who in taken if who != "nanorook"):
        both = [taken for taken in rounds if who in taken]
        ratio, cpu_ratio = (median(taken[who][i] / taken["nanorook"][i] for taken in both) for i in (0, 1))
        lines.append(f"  {who} takes {ratio:.2f} times as long, {cpu_ratio:.2f} times the CPU time")
    return "\n".join(lines)


def main():
    # Before transformers is imported: the screen is to show only what is measured
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    warnings.simplefilter("ignore")
    device = hardware.choose_device()
    all_workloads = workloads(device)
    p = argparse.ArgumentParser("python -m tools.bench", description=__doc__.split("\n")[0])
    p.add_argument("what", nargs="*", choices=[[], *all_workloads], metavar="WORKLOAD",
                   help=f"{', '.join(all_workloads)}; default: those that suit the machine")  # fmt: skip
    p.add_argument("--runs", type=number(int, 1), default=3, help="number of rounds; figures are their medians")
    p.add_argument("--only", default="", metavar="NAME",
                   help="compare only with settings of TRL whose names contain this; nanorook: with none")  # fmt: skip
    p.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="auto: the faster one")
    a = p.parse_args()
    if a.only != "nanorook" and not any(a.only in who for who in TRL):
        p.error(f"--only {a.only}: no setting has this name; there are {', '.join(TRL)}.")
    device, dtype = hardware.prepare(dtype=a.dtype)
    machine = describe("python -m tools.bench", device, dtype)
    print(f"{machine['machine']}, {torch.get_num_threads()} threads, {machine['dtype']}", flush=True)
    for title in a.what or (["W2", "W4"] if device.type == "cuda" else ["W1", "W3"]):
        w = all_workloads[title]
        print(f"\n{title} {w.what}: {w.prompts} x {w.group} rows, {w.new} new tokens, {a.runs} rounds", flush=True)
        print(summary(measure(w, device, dtype, a.runs, a.only), w), flush=True)


if __name__ == "__main__":
    main()
