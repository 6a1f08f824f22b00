"""The page OUT_DIR/report.html, which needs no network; tools.report writes it at any time, and for several runs.

It shows held-out skill with the training curves, the states of all steps, answers and settings, for any task and even
for a run that was killed. What a model wrote is escaped, and the page allows no scripts.
"""

import json
import math
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

from nanorook.run import write as write_whole
from nanorook.settings import fail
from nanorook.statistics import with_interval
from nanorook.tables import skill_rows
from nanorook.task import TAKEN, Question, as_sum, kinds_of, load_task
from nanorook.verdict import objects, read, verdict

SHOWN = 3  # samples of each kind with the lowest reward, and as many with the highest


class Run(NamedTuple):
    folder: Path
    name: str
    rows: list  # of metrics.jsonl
    samples: list  # of samples.jsonl
    settings: dict
    about: dict  # run.json
    skill: dict  # {title: {figure: [mean, half-width, values of the questions]}}
    curves: dict  # {metric or "kind/metric": {"training": [(step, value, 0), ...], "T=0": [(step, mean, half-width)]}}


def read_run(folder, name):
    rows = [row for row in read(folder / "metrics.jsonl") if "step" in row]
    if not rows:
        fail(f"{folder}/metrics.jsonl contains no step; give the OUT_DIR of a run that has made one.")
    curves = {}
    for row in rows:
        for metric, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):  # the state of a step tells where it is not
                curves.setdefault(metric, {"training": []})["training"].append((row["step"], value, 0))
    settings, about, skill = objects(folder, "settings", "run", "skill")
    ends = {"before": 0, "after": rows[-1]["step"]}
    for title, figures in skill.items():
        step = ends[title] if title in ends else int(title.removeprefix("step "))
        for figure, (mean, half, _) in figures.items():
            kind, metric, how = figure.split(" ")
            curves.setdefault(f"{kind}/{metric}", {}).setdefault(how, []).append((step, mean, half))
    return Run(folder, name, rows, read(folder / "samples.jsonl"), settings, about, skill, curves)


def head(run):
    """The verdict, whose first line begins with a state."""
    first, *others = verdict(run.folder)
    _, state, first = first.split(None, 2)
    lines = [f'<i class="{escape(state)}"></i>{escape(first)}', *map(escape, others)]
    return "".join(f'<p class="verdict">{line}</p>' for line in lines)


def states(run):
    """A strip with the state of each step, and a list of the advice with the steps that gave it."""
    strip, items, advice = "", "", {}
    for row in run.rows:
        state = row.get("state", "green")
        strip += f'<i class="{escape(state)}"></i>'
        advice.setdefault((state, row.get("advice", "")), []).append(row["step"])
    for (state, text), steps in advice.items():
        when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        items += f'<li><i class="{escape(state)}"></i>{escape(text or state)} <span class="soft">{when}</span></li>'
    return f'<div class="strip">{strip}</div><ul class="advice">{items}</ul>'


def skill_table(run):
    """The first evaluation, the last one, and the gain, as tools.evaluate prints them."""
    if not run.skill:
        return ""
    titles = [*run.skill]
    columns = {title: run.skill[title] for title in (titles[0], titles[-1])}
    heading, *rows = skill_rows(columns, run.about.get("names", {}))
    page = "<thead><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in heading) + "</tr></thead>"
    for name, *cells in rows:
        page += f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return f'<div class="scroll"><table>{page}</table></div>'


def settings(runs):
    """How each run was started, which settings were changed when it was resumed, and all its settings at the end, with
    the values of each run where they differ."""
    tables, page = [], ""
    for run in runs:
        about = {name: value for name, value in run.about.items() if isinstance(value, str | int)}
        changes = run.about.get("changes", [])
        told = [f"{name} from {was} to {now} after step {step}" for step, name, was, now in changes]
        changed = {"changed": "; ".join(told)} if told else {}
        tables.append(about | changed | run.about.get("versions", {}) | run.settings)
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [str(table.get(name, "–")) for table in tables]
        differ = len({*values}) > 1
        told = " | ".join(values) if differ else values[0]
        page += f'<div class="{"differs" * differ}"><dt>{escape(name)}</dt><dd>{escape(told)}</dd></div>'
    return page


# ---- Curves ------------------------------------------------------------------------------------------------

TRAINING = {  # metric: its title, and the unit
    "reward": ("Reward", "mean over a step's answers"),
    "frac_zero_std": ("Groups with equal rewards", "share"),
    "hit_limit": ("Cut off", "share of completions"),
    "length": ("Completion length", "tokens"),
    "kl": ("KL to the reference", "nats per token"),
    "entropy": ("Entropy", "nats per token"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "clip_low": ("Clipped below", "share of tokens whose gradient the clip changes"),
    "clip_high": ("Clipped above", "share of tokens whose gradient the clip changes"),
    "logprob_gap": ("Sampling and training", "nats, mean difference of logprobs"),
    "lr": ("Learning rate", "of AdamW"),
    "tokens_per_second": ("Speed", "completion tokens per second"),
}


def skill_plots(runs):
    """For each kind of question the reward, its pieces and the metrics, in training and held out."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    called = {name: text for run in runs for name, text in run.about.get("names", {}).items()}
    page = ""
    for kind in kinds_of(names):
        plots = ""
        for name in names:
            first, _, metric = name.partition("/")
            if first == kind and metric not in TAKEN[1:]:
                title = called.get(f"{kind} {metric}", metric.replace("earned/", "reward for "))
                plots += plot(runs, name, title)
        page += f'<h3>{escape(kind)}</h3><div class="plots">{plots}</div>'
    return page


def training_plots(runs):
    return "".join(plot(runs, metric, *told) for metric, told in TRAINING.items())


LEFT, RIGHT, TOP, BOTTOM = 42, 292, 8, 124  # of a plot in its own units, 300 wide


def lines_of(runs, metric):
    """[(name, CSS classes, points), ...]: one run gets a colour for each of its lines; several runs get one each."""
    lines = []
    for i, run in enumerate(runs):
        for j, (how, points) in enumerate(run.curves.get(metric, {}).items()):
            css = f"c{(i if len(runs) > 1 else j) % 8}"
            if how == "training" and "/" in metric:  # beside held-out skill
                css += " thin"
            elif how not in ("training", "T=0"):
                css += " dashed"
            lines.append(("greedy" if how == "T=0" else how, css, points))
    return lines


def plot(runs, metric, title, unit=""):
    """A figure of a metric, whose axis begins at 0 or below."""
    last = max(run.rows[-1]["step"] for run in runs)
    curves = lines_of(runs, metric)
    if not curves:
        return ""
    points = [point for *_, points in curves for point in points]
    low = min(0, *(value for _, value, _ in points))
    high = max([0, *(value + half for _, value, half in points if half < math.inf)])
    if max(value for _, value, _ in points) <= 1:  # perhaps a share, of which an interval may reach too far
        high = min(1, high)
    if high == low:  # all values are 0
        high = 1

    def x(step):
        return LEFT + (RIGHT - LEFT) * step / last

    def y(value):
        return BOTTOM - (BOTTOM - TOP) * min(1, max(0, (value - low) / (high - low)))

    def path(css, points):
        """h0 makes a dot of a single point."""
        d = "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value, _ in points)
        return f'<path class="{css}" d="M{d}h0"/>'

    svg = ""
    for mark in sorted({low, 0, high}):
        svg += f'<path class="axis" d="M{LEFT} {y(mark):.1f}H{RIGHT}"/>'
        svg += f'<text class="tick" x="{LEFT - 6}" y="{y(mark) + 4:.1f}">{tick(mark)}</text>'
    for step in sorted({0, last // 2, last}):
        svg += f'<text x="{x(step):.1f}" y="{BOTTOM + 16}">{"step " * (not step)}{step}</text>'
    for how, css, points in curves:
        svg += path(f"line {css}", points)
        if how != "training":
            band = [(step, mean - half, 0) for step, mean, half in points]
            svg += path(f"band {css}", band + [(step, mean + half, 0) for step, mean, half in points[::-1]])
            for step, mean, half in points:
                svg += f'<circle class="{css}" cx="{x(step):.1f}" cy="{y(mean):.1f}" r="2.5">'
                svg += f"<title>step {step}: {with_interval(mean, half)}</title></circle>"
    named = legend(curves) if len(runs) == 1 and len(curves) > 1 else ""
    svg = f'<svg viewBox="0 0 300 146" role="img" aria-label="{escape(title)}">{svg}</svg>{named}'
    return f'<figure class="plot"><h4>{escape(title)}</h4><figcaption>{escape(unit)}</figcaption>{svg}</figure>'


def tick(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def legend(lines):
    """The legend of lines, [(name, CSS classes, ...), ...]."""
    items = "".join(f'<li><i class="{css}"></i>{escape(name)}</li>' for name, css, *_ in lines)
    return f'<ul class="legend">{items}</ul>'


# ---- Samples -----------------------------------------------------------------------------------------------


def cards(run):
    """The questions of each kind whose last answer has the lowest or the highest reward, each with its answers in the
    first and the last evaluation."""
    if not run.samples:
        return ""
    ends = run.samples[0]["step"], run.samples[-1]["step"]
    questions = {}
    for sample in run.samples:
        if sample["step"] in ends:
            questions.setdefault((sample["kind"], sample["prompt"]), []).append(sample)
    show = load_show(run.settings.get("TASK"))
    page = f'<p class="soft">{escape(show.__doc__ or "")}</p>'
    order = sorted(questions.values(), key=lambda answers: (answers[0]["kind"], answers[-1]["reward"]))
    for kind, (*group,) in groupby(order, lambda answers: answers[0]["kind"]):
        chosen = group if len(group) <= 2 * SHOWN else group[:SHOWN] + group[-SHOWN:]
        page += f"<h3>{escape(kind)}</h3>"
        page += f'<p class="soft">{len(chosen)} of {len(group)} questions, the lowest reward first</p>'
        page += '<div class="cards">' + "".join(card(answers, show) for answers in chosen) + "</div>"
    return page


def load_show(file):
    """The task's `show`, or a function that shows nothing if the task has none or is not on this machine."""
    try:
        return load_task(file).show
    except (SystemExit, Exception):
        return lambda question, text: ""


def card(answers, show):
    """A question with its answers."""
    figures = ""
    for sample in answers:
        when = f"step {sample['step']}" if sample["step"] else "before"
        figures += f"<figure><figcaption>{when}</figcaption>{shown(sample, show)}<pre>{marked(sample)}</pre>"
        total = as_sum(sample["pieces"]) or "0"
        figures += f'<p class="soft"><b>{sample["reward"]:.4g}</b> = {escape(total)}</p></figure>'
    truth, prompt = json.dumps(answers[0]["truth"], ensure_ascii=False), escape(answers[0]["prompt"].strip())
    is_open = " open" * (len(truth) < 100)
    return (
        f'<article class="card"><pre>{prompt}</pre><details{is_open}><summary>reference answer</summary>'
        f"<pre>{escape(truth)}</pre></details><div>{figures}</div></article>"
    )


def shown(sample, show):
    """What the run's task shows next to an answer, as HTML."""
    question = Question(**{name: sample[name] for name in Question._fields if name in sample})
    text = str(show(question, sample["completion"]))
    text = text if text.startswith("<") or not text else f"<pre>{escape(text)}</pre>"
    return f'<div class="shown">{text}</div>' if text else ""


def marked(sample):
    """The answer, each part coloured by whether the pieces that judge it have earned anything."""
    text, page = sample["completion"], ""
    judging = [(name, value, *span) for name, value, *spans in sample["pieces"] for span in spans]
    cuts = sorted({0, len(text), *(cut for *_, start, end in judging for cut in (start, end))})
    for start, end in zip(cuts, cuts[1:]):
        part = escape(text[start:end])
        pieces = [(name, value) for name, value, first, last in judging if first <= start and end <= last]
        if pieces:
            css = "earned" if sum(value for _, value in pieces) > 0 else "missed"
            told = escape("\n".join(f"{name} {value:.3f}" for name, value in pieces))
            part = f'<mark class="{css}" title="{told}">{part}</mark>'
        page += part
    return page


def write(*folders):
    """Writes the page of one run, or of several, into the first one's folder; returns its path. Answers are on the page
    of a single run alone."""
    paths = [Path(folder).resolve() for folder in folders]
    names = map(str, folders) if len(paths) > 1 else [paths[0].name]
    runs = [read_run(path, name) for path, name in zip(paths, names)]
    named = [(run.name, f"c{i % 8}") for i, run in enumerate(runs)] if len(runs) > 1 else []
    titles = [legend([line]) for line in named] or [""]

    def each(part):
        return "".join(title + part(run) for title, run in zip(titles, runs))

    page = Template(Path(__file__).with_suffix(".html").read_text()).substitute(  # in one pass: inserted text stays
        title=escape(" and ".join(run.name for run in runs)), head=each(head), runs=legend(named),
        skill=skill_plots(runs), table=each(skill_table), states=each(states), plots=training_plots(runs),
        samples="" if named else cards(runs[0]), settings=settings(runs),
    )  # fmt: skip
    # tools.sweep calls all its runs seed-N, so those in another folder are named with it
    beside = paths[0].parent
    others = [path.name if path.parent == beside else f"{path.parent.name}-{path.name}" for path in paths[1:]]
    others = "-".join(others)[:200]
    path = paths[0] / (f"report-with-{others}.html" if others else "report.html")
    write_whole(path, page.encode(errors="replace").decode())  # a completion may hold half a surrogate pair
    return path
