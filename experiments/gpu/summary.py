"""What run.sh has measured so far, as Markdown: python experiments/gpu/summary.py OUT writes OUT/summary.md.

Torch is not imported, since this runs after every stage.
"""

import json
import os
import re
import statistics
import sys
from pathlib import Path

STEPS = ["| task | machine | start | tokens in a step | first step | later steps | peak memory |", "| --- " * 7 + "|"]
MODELS = {"tiny": "the embedded shape", "gpt2": "GPT-2 124M", "gsm8k": "GSM8K", "ocaml": "OCaml"}


def rows(path):
    """The whole lines of a file of JSON lines; a killed program may have left half of one."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def skill_table(out, name):
    """What rook.benchmark has printed last, after GRPO or before it. A stage that was stopped began its log again."""
    logs = [out / f"{when}-{name}.log" for when in ("after", "before")]
    text = next((log.read_text() for log in logs if log.exists() and "\n| held-out" in log.read_text()), "")
    heading, _, lines = text.rpartition("\n| held-out")
    return [heading.strip().splitlines()[-1], "", f"| held-out{lines}"] if lines else []


def training(out, name):
    """One sentence each about pretraining and GRPO."""
    lines, seen, steps = [], rows(out / name / "skill.jsonl"), rows(out / f"grpo-{name}" / "metrics.jsonl")
    if seen:
        lines.append(f"Pretraining: {seen[-1]['step']} steps in {seen[-1]['seconds'] / 60:.1f} minutes.")
    if steps:
        late = steps[len(steps) // 2 :]  # the first steps compile
        seconds = statistics.median(sum(m["seconds"].values()) for m in late)
        speed = statistics.median(m["tokens_per_second"] for m in late)
        reward = [statistics.mean(m["reward"] for m in part) for part in (steps[:10], steps[-10:])]
        lines.append(
            f"GRPO: {len(steps)} steps, {seconds:.2f} s a step, {speed:,.0f} tokens a second, "
            f"reward {reward[0]:.3f} in the first ten steps, {reward[1]:.3f} in the last ten."
        )
    return [*lines, ""] if lines else []


def steps_table(out):
    """The last lines of experiments.large, and which GPUs nobody has made these steps on."""
    rows = [(log.read_text().splitlines() or [""])[-1] for log in sorted(out.glob("steps-*.log"))]
    rows = [row for row in rows if row.startswith("|")]
    sizes = [int(size) for size in re.findall(r", (\d+) GB \|", "".join(rows))]
    for size in (24, 80):
        if not any(0.9 * size < found < 1.1 * size for found in sizes):
            rows.append(f"| the default and mates | a GPU of {size} GB |" + " not measured |" * 5)
    return [*STEPS, *rows, ""]


def main(out):
    lines = ["# Half an hour on one GPU", ""]
    for run in [json.loads(path.read_text()) for path in sorted(out.glob("grpo-*/run.json"))][:1]:
        lines += [f"{run['machine']}, {run['dtype']}, torch {run['versions']['torch']}, {run['started']}.", ""]
    for name, title in MODELS.items():
        found = training(out, name) + skill_table(out, name)
        lines += [f"## {title}", "", *found] if found else []
    lines += ["## Steps of a GPT-2 of 124M parameters in RookWorld's format", "", *steps_table(out)]
    if (out / "bench.log").exists():
        lines += ["## Speed", "", "```", (out / "bench.log").read_text().strip(), "```", ""]
    lines += ["## Stages", ""]
    for done in sorted(out.glob("*.done"), key=os.path.getmtime):
        used = out / f"{done.stem}.used"
        lines.append(f"- {done.stem}: {done.read_text().strip()}, {used.read_text().strip() if used.exists() else 0} s")
    temporary = out / "summary.md.tmp"
    temporary.write_text("\n".join(lines) + "\n")
    os.replace(temporary, out / "summary.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
