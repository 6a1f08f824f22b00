"""What run.sh has measured so far, as Markdown: python experiments/gpu/summary.py OUT writes OUT/summary.md.

Torch is not imported: it runs after every stage.
"""

import json
import os
import statistics
import sys
from pathlib import Path

MODELS = {"tiny": "the embedded shape", "gpt2": "GPT-2 124M"}
SHOWN = {
    "policy": ("structure", "legal move", "best move", "top-5 move", "candidates: legal", "mate in one"),
    "environment": ("next state", "reward", "terminated", "truncated"),
    "self-play": ("half-moves before an illegal one", "illegal moves"),
}
PLAIN = {"half-moves before an illegal one"}  # the others are shares


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def rows(path):
    """The whole lines of a file of JSON lines; a killed program may have left half of one."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cell(name, value):
    if value is None:
        return ""
    scale, unit = (1, "") if name in PLAIN else (100, " %")
    return " ± ".join(f"{scale * v:.1f}" for v in value if v is not None) + unit


def skill_table(out, name):
    """Before and after GRPO; the paired comparison has both."""
    measured = read(out / f"after-{name}.json") or read(out / f"before-{name}.json")
    if not measured:
        return []
    models, change = list(measured["models"].values()), measured["difference"]
    titles = [f"{when}, {t}" for t in models[0] for when in ("before", "after")[: len(models)]]
    lines = [f"| held-out positions | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for section, figure in ((section, figure) for section, figures in SHOWN.items() for figure in figures):
        cells = []
        for t in models[0]:
            cells += [cell(figure, model[t].get(section, {}).get(figure)) for model in models]
            mean, half = (change and change[t].get(section, {}).get(figure)) or (0, 0)
            if half is not None and abs(mean) > half:  # one value has no interval
                cells[-1] += " *"
        if any(cells):
            lines.append(f"| {section}: {figure} | {' | '.join(cells)} |")
    return [*lines, "", "\\* the change is more than noise.", ""]


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
            f"reward {reward[0]:.3f} in the first ten steps, {reward[1]:.3f} in the last."
        )
    return [*lines, ""] if lines else []


def main(out):
    lines = ["# Half an hour of one GPU", ""]
    made = [read(out / f"grpo-{name}" / "run.json") for name in MODELS]
    if any(made):
        run = made[-1] or made[0]
        lines += [f"{run['machine']}, {run['dtype']}, torch {run['versions']['torch']}, {run['started']}.", ""]
    for name, title in MODELS.items():
        found = training(out, name) + skill_table(out, name)
        lines += [f"## {title}", "", *found] if found else []
    for title, w in ((read(out / "bench.json") or {}).get("workloads") or {}).items():
        lines += [f"## {title} {w['what']}", ""]
        said = "- {seconds:.3f} s, {tokens_per_second:,.0f} tokens a second, {peak_memory_gb:.1f} GB"
        lines += [said.format(**w), *(f"- {who} takes {ratio:.2f} times as long" for who, ratio in w["ratios"].items())]
        lines.append("")
    lines += ["## Stages", ""]
    for done in sorted(out.glob("*.done"), key=os.path.getmtime):
        used = out / f"{done.stem}.used"
        lines.append(f"- {done.stem}: {done.read_text().strip()}, {used.read_text().strip() if used.exists() else 0} s")
    temporary = out / "summary.md.tmp"
    temporary.write_text("\n".join(lines) + "\n")
    os.replace(temporary, out / "summary.md")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
