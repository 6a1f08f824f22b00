"""A run as one page: python -m tools.report OUT_DIR [OTHER] writes OUT_DIR/report.html, a file that needs no network.

It shows states, curves, skill and boards; with OTHER two runs side by side. The page's frame is report.html, plots are
SVG written here, boards are python-chess's. What a model wrote is escaped, and the page allows no script but its own.
"""

import argparse
import base64
import hashlib
import json
import math
import os
import re
import statistics
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

from data import DataError
from tools.boards import QUALITIES, cards, shared_parts, span, table
from tools.plots import BOTTOM, LEFT, RIGHT, TOP, across, all_curves


class Run(NamedTuple):
    name: str
    label: str  # "A " or "B " before what is shown of one of two runs
    rows: list  # of metrics.jsonl
    settings: dict
    about: dict  # run.json
    skill: list  # [(title, figures), ...], before training and after it
    stages: list  # [(title, {prompt: [sample, ...]}), ...], before training and after it
    notes: list  # what the reader should know is missing


# ---------------------------------------------------------------------------------------------------------------------
# Reading a run, which may have been killed at any moment


def read_lines(path, notes):
    """The objects of a file of JSON lines. A last line that was cut by a kill is left out, and said."""
    rows, lines = [], path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            if number < len(lines) or not rows:
                raise DataError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}.")
            notes.append(f"The last line of {path.name} was cut in the middle and is left out.")
    return rows


def read_json(path, notes):
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        notes.append(f"{path.name} is missing, as after a run that was stopped early.")
    except ValueError:
        notes.append(f"{path.name} is damaged and left out.")
    return {}


def read_run(folder, label):
    folder, notes = Path(folder), []
    if not (folder / "metrics.jsonl").is_file():
        what = "holds no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise DataError(f"{folder} {what}; give the OUT_DIR of a run.")
    rows = {row["step"]: row for row in read_lines(folder / "metrics.jsonl", notes) if "step" in row}
    if not rows:
        raise DataError(f"{folder}/metrics.jsonl holds no step yet; let the run make one first.")
    for row in rows.values():
        row |= {f"seconds/{name}": value for name, value in row.pop("seconds", {}).items()}
    settings, about, skill = (read_json(folder / f"{name}.json", notes) for name in ("settings", "run", "skill"))
    stages = {}
    if (folder / "samples.jsonl").is_file():
        for sample in read_lines(folder / "samples.jsonl", notes):
            stages.setdefault(sample["step"], {}).setdefault(sample["prompt"], []).append(sample)
    else:
        notes.append("samples.jsonl is missing, so there are no boards.")
    stages = [(f"step {step}" if step else "before", stages[step]) for step in sorted(stages)]
    return Run(str(folder), label, list(rows.values()), settings, about, ends(list(skill.items())), ends(stages), notes)


def ends(items):
    """The first and the last, which may be one."""
    return items[:1] + items[1:][-1:]


# ---------------------------------------------------------------------------------------------------------------------
# What was run, how it went, what was learnt


def head(runs):
    page = ""
    for run in runs:
        about = {"run": run.label and f"{run.label}is {run.name}", "steps": f"{run.rows[-1]['step']} steps"} | run.about
        about["versions"] = " ".join(f"{name} {version}" for name, version in run.about.get("versions", {}).items())
        facts = [str(value) for name, value in about.items() if value and name != "command"]
        page += f'<p class="soft">{escape(" · ".join(facts))}'
        page += f"<br><code>{escape(run.about.get('command', ''))}</code></p>"
        page += "".join(f'<p class="note">{escape(run.label + note)}</p>' for note in run.notes)
    return page


def tiles(runs):
    def reward(run):
        values = [row["reward"] for row in run.rows if math.isfinite(row.get("reward", math.nan))] or [math.nan]
        return f"{statistics.fmean(values[:10]):.3f} → {statistics.fmean(values[-10:]):.3f}"

    def skill(name):
        return lambda run: " → ".join(f"{figures[name][0]:.1%}" for _, figures in run.skill if name in figures)

    def minutes(run):
        return f"{sum(v for row in run.rows for k, v in row.items() if k.startswith('seconds/')) / 60:.1f} min"

    page = ""
    for label, tell in (
        ("reward, first and last ten steps", reward),
        ("legal moves, greedy, held out", skill("policy legal T=0")),
        ("exact next state, greedy, held out", skill("environment next_state T=0")),
        ("completion tokens", lambda run: f"{sum(row.get('tokens', 0) for row in run.rows) / 1e6:.2f} M"),
        ("sampling and updates", minutes),
    ):
        values = "".join(f"<b>{tell(run) or '–'}</b>" for run in runs)
        page += f'<div class="tile">{values}<span>{label}</span></div>'
    return page


def settings(runs):
    """All settings, those that differ between two runs first."""
    items = []
    for name in runs[0].settings:
        values = list(dict.fromkeys(str(run.settings.get(name, "–")) for run in runs))
        items.append((len(values) < 2, f"<div><dt>{escape(name)}</dt><dd>{escape(' | '.join(values))}</dd></div>"))
    differ = "".join(item.replace("<dd>", '<dd class="differs">') for same, item in items if not same)
    return differ + "".join(item for same, item in items if same)


def spans(rows):
    """[(state, first step, last step), ...]"""
    groups = [(state, list(group)) for state, group in groupby(rows, lambda row: row.get("state", "green"))]
    return [(escape(state), group[0]["step"], group[-1]["step"]) for state, group in groups]


def states(run):
    strip = "".join(
        f'<i class="{state}" style="flex:{end - start + 1}" title="{state}: {start} to {end}"></i>'
        for state, start, end in spans(run.rows)
    )
    counts, advice = {}, {}
    for row in run.rows:
        state = row.get("state", "green")
        counts[state] = counts.get(state, 0) + 1
        if row.get("advice"):
            advice.setdefault((state, row["advice"]), []).append(row["step"])
    told = escape(", ".join(f"{count} {state}" for state, count in counts.items()))
    items = ""
    for (state, text), steps in advice.items():
        when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        items += f"<li>{span('dot ' + state, '')}{escape(f'{state}: {text}')} {span('soft', when)}</li>"
    return (
        f'<p class="soft">{run.label}{told} of {len(run.rows)} steps</p>'
        f'<div class="strip" role="img" aria-label="{told} steps">{strip}</div><ul class="advice">{items}</ul>'
    )


def bands(rows):
    """Where a run was yellow or red, behind every plot."""
    page, first, last = "", rows[0]["step"], rows[-1]["step"]
    for state, start, end in spans(rows):
        if state != "green":
            x0, x1 = max(LEFT, across(start - 0.5, first, last)), min(RIGHT, across(end + 0.5, first, last))
            page += f'<path class="{state}" d="M{x0:.1f} {TOP}H{x1:.1f}V{BOTTOM}H{x0:.1f}Z"/>'
    return page


def skill_table(runs):
    columns = [(escape(run.label + title), figures) for run in runs for title, figures in run.skill]
    if not columns:
        return ""
    old, new = (columns[1] if len(columns) == 4 else columns[0]), columns[-1]
    rows, task = [], None
    for name in new[1]:
        if task != (task := re.sub(" .* T=", ", temperature ", name)):
            rows.append((escape(task.replace("temperature 0", "greedy")),))
        cells = ["{:.3f} ± {:.3f}".format(*figures[name]) if name in figures else "–" for _, figures in columns]
        if old is not new and name in old[1]:
            (a, half_a), (b, half_b) = old[1][name], new[1][name]
            better = (b > a) != bool(re.search("mae|loss|invalid|illegal", name))
            css = ("better" if better else "worse") if abs(b - a) > math.hypot(half_a, half_b) else ""
            cells += [span(css, f"{b - a:+.3f}"), ranges((a, half_a), (b, half_b))]
        rows.append((escape(name.split(" ", 1)[-1].rsplit(" ", 1)[0]), *cells))
    extra = (f"{new[0]} − {old[0]}", "from 0 to 1") if old is not new else ()
    return table(("", *(title for title, _ in columns), *extra), rows, "skill")


def ranges(*figures):
    """Intervals as lines over the range from 0 to 1, the later one below."""
    marks = '<path class="axis" d="M0 8.5H100"/>'
    for (mean, half), colour, y in zip(figures, ("soft", "c0"), (5, 12)):
        low, high = (100 * min(1, max(0, value)) for value in (mean - half, mean + half))
        marks += f'<path stroke="var(--{colour})" d="M{low:.1f} {y}H{high:.1f}"/>'
    in_range = all(0 <= mean <= 1 for mean, _ in figures)
    return f'<svg viewBox="-4 0 108 17" preserveAspectRatio="none" aria-hidden="true">{marks}</svg>' if in_range else ""


# ---------------------------------------------------------------------------------------------------------------------


def write(folder, other=None):
    """Writes folder/report.html, of one run or of two side by side, and returns its path."""
    runs = [read_run(folder, "")] if other is None else [read_run(folder, "A "), read_run(other, "B ")]
    template = Path(__file__).with_suffix(".html").read_text()
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    page = Template(template).substitute(  # in one pass: what is put in is not looked at again
        title=escape(" beside ".join(run.name for run in runs)), open="open" if other else "",
        hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        defs=f'{shared_parts()}<g id="bands" class="bands">{bands(runs[0].rows) if len(runs) == 1 else ""}</g>',
        head=head(runs), tiles=tiles(runs), settings=settings(runs), states="".join(map(states, runs)),
        curves=all_curves(runs), skill=skill_table(runs), cards=cards(runs),
        legend=" ".join(span(good, f"{mark} {meaning}") for good, (_, mark, meaning) in QUALITIES.items()),
    )  # fmt: skip
    path = Path(folder, "report.html")
    temporary = path.with_suffix(".html.partial")
    temporary.write_bytes(page.encode("utf-8", "replace"))  # a completion may hold half a surrogate pair
    os.replace(temporary, path)
    return path


def main():
    p = argparse.ArgumentParser("python -m tools.report", description=__doc__)
    p.add_argument("folder", help="the OUT_DIR of a run; report.html is written into it")
    p.add_argument("other", nargs="?", help="the OUT_DIR of another run, shown beside it")
    a = p.parse_args()
    try:
        print(write(a.folder, a.other))
    except DataError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
