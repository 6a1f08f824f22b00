"""A whole GRPO step here and in TRL's GRPOTrainer: the same weights, prompts, group, lengths and learning rate.

    python -m experiments.speed.trl_step [--workload W3|W4] [--runs 5] [--json OUT]

Both sides sample, decode, grade with rewards.grade, and make one update; nothing ends early. Each of TRL's steps is
followed by one of ours in each dtype, in one process and in two, and a ratio is the median of such pairs. The first two
pairs warm up.
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import median

import torch
import transformers
import trl
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import parallel
import rewards
import train
from machine import prepare
from monitor import describe
from tools import bench, replace
from tools.team import Team

FUSED = {"activation_function": "gelu_pytorch_tanh"}  # GPT-2's gelu_new is written out as many small operations
PLAIN, BF16 = dict(bf16=False, gradient_checkpointing=False), FUSED | {"dtype": "bfloat16"}
SPLIT = PLAIN | {"gradient_accumulation_steps": 4}
SETTINGS = {  # model_init_kwargs, what GRPOConfig gets beyond what the work itself asks for, processes
    "default": ({}, {}, 1),  # fp32 weights, bf16 autocast, gradient checkpointing
    "float32": (FUSED, PLAIN, 1),
    "bfloat16 autocast": (FUSED, PLAIN | {"bf16": True}, 1),
    "bfloat16 weights": (BF16, PLAIN, 1),
    "bfloat16 weights, 4 microbatches": (BF16, SPLIT, 1),
}
if bench.PROCESSES > 1:
    SETTINGS |= {
        f"{setting}, {bench.PROCESSES} processes": (*SETTINGS[setting][:2], bench.PROCESSES)
        for setting in ("default", "bfloat16 weights, 4 microbatches")
    }


class OnCall(TrainerCallback):
    """Makes a step whenever it is asked for one, and answers with its seconds."""

    def __init__(self, pipe):
        self.pipe = pipe

    def on_train_begin(self, *args, model, **kwargs):
        model.generation_config.eos_token_id = None  # the trainer has just taken it from the tokenizer

    def on_step_begin(self, *args, **kwargs):
        self.pipe.recv()
        self.start = bench.clock()

    def on_step_end(self, *args, **kwargs):
        self.pipe.send({"step": bench.clock() - self.start})


def train_with_trl(pipe, workload, folder, setting):
    """One of the processes of a trainer."""
    prepare()
    be_quiet()
    w = bench.WORKLOADS[workload]
    trainer(w, folder, bench.build(w, bench.positions())[1], *SETTINGS[setting][:2], OnCall(pipe)).train()


def be_quiet():
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    disable_progress_bars()


def trainer(w, folder, samples, init, options, callback):
    labels, new = {sample.prompt: sample.labels for sample in samples}, w.new

    def reward(prompts, completions, completion_ids, **kwargs):
        assert all(len(ids) == new for ids in completion_ids)
        for prompt, text in zip(prompts, completions):
            rewards.grade(prompt, text, labels[prompt], True)
        return torch.rand(len(prompts)).tolist()  # as in bench: random text earns the same everywhere

    options = {"gradient_accumulation_steps": 1, **options}
    config = GRPOConfig(
        output_dir=f"{folder}/out", use_cpu=train.DEVICE == "cpu", seed=0, model_init_kwargs=dict(init),
        per_device_train_batch_size=w.prompts * w.group // options["gradient_accumulation_steps"] // parallel.WORLD,
        num_generations=w.group, max_completion_length=w.new, temperature=train.TEMPERATURE, max_steps=1_000_000,
        beta=w.kl, loss_type=train.LOSS, scale_rewards=train.SCALE_REWARDS, epsilon=train.CLIP_RANGE,
        epsilon_high=train.CLIP_RANGE_HIGH, learning_rate=train.LR, lr_scheduler_type="constant", adam_beta2=0.95,
        max_grad_norm=train.MAX_GRAD_NORM, report_to="none", save_strategy="no", logging_strategy="no",
        disable_tqdm=True, ddp_find_unused_parameters=False, **options,
    )  # fmt: skip
    dataset = Dataset.from_dict({"prompt": [sample.prompt for sample in samples]})
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model")
    result = GRPOTrainer(f"{folder}/model", reward, config, dataset, processing_class=tokenizer, callbacks=[callback])
    result.remove_callback(PrinterCallback)
    result.generation_config.eos_token_id = result.generation_kwargs["eos_token_id"] = None  # nothing ends early
    result.eos_token_ids = [-1]
    return result


def show(name, row):
    print(f"{name}: {row['seconds']:.2f} s ({min(row['all_seconds']):.2f} to {max(row['all_seconds']):.2f})")
    for which, ours in row["ours"].items():
        print(f"    {which} here: {ours['seconds']:.2f} s, {ours['times_as_fast']:.2f} times as fast", flush=True)


def main():
    p = argparse.ArgumentParser("python -m experiments.speed.trl_step", description=__doc__.split("\n")[0])
    p.add_argument("--workload", default="W3", choices=["W3", "W4"], help="see tools/bench.py")
    p.add_argument("--runs", type=int, default=5, help="pairs for each setting, of which a number is the median")
    p.add_argument("--json", metavar="OUT", help="also write the numbers to this file")
    a = p.parse_args()
    if a.workload not in bench.WORKLOADS:
        sys.exit(f"error: {a.workload} is for machines without a GPU; on this one give --workload W4.")
    if a.json and not Path(a.json).absolute().parent.is_dir():
        sys.exit(f"error: {a.json} cannot be written: its folder does not exist.")
    prepare()
    be_quiet()
    w, found = bench.WORKLOADS[a.workload], bench.positions()
    run, model, _ = bench.start(w, found)
    ours, _ = bench.contestants(w, run)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    machine = describe("python -m experiments.speed.trl_step", train.DEVICE, "see settings")
    machine |= {"versions": versions, "threads": torch.get_num_threads()}
    result = {"machine": machine, "workload": a.workload, "what": w.what, "runs": a.runs, "settings": {}}
    print(f"{machine['machine']}, {machine['threads']} threads, {versions}")
    print(f"{a.workload} {w.what}: {w.prompts} x {w.group} rows, {w.new} new tokens, {a.runs} pairs each")
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model")
        for name, (init, options, processes) in SETTINGS.items():
            theirs, seen = Team(processes, train_with_trl, a.workload, folder, name), []
            for i in range(a.runs + bench.WARM_UP):
                seconds = {"trl": theirs.ask(i)["step"]}
                seen.append(seconds | {row: sum(once(i).values()) for row, (_, once) in ours.items()})
            theirs.dismiss()
            seen = seen[bench.WARM_UP :]
            row = {"model_init_kwargs": init, "config": options, "all_seconds": [s["trl"] for s in seen], "ours": {}}
            row |= {"processes": processes, "seconds": median(row["all_seconds"])}
            for which in ours:
                times = [s[which] for s in seen]
                ratio = median(s["trl"] / s[which] for s in seen)
                row["ours"][which] = {"seconds": median(times), "all_seconds": times, "times_as_fast": ratio}
            result["settings"][name] = row
            show(f"TRL, {name}", row)
    fastest = min(SETTINGS, key=lambda name: result["settings"][name]["seconds"])
    result["best"] = fastest
    print(f"TRL's best setting: {fastest}")
    if a.json:
        replace(a.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
