"""The page OUT_DIR/report.html, which needs no network; tools.report writes it at any time, and for several runs.

It shows held-out skill with the training curves, the states of all steps, answers and settings, for any task and even
for a run that was killed. What a model wrote is escaped, and the page allows no scripts.
"""

import json
import math
import os
import statistics
from html import escape
from itertools import groupby, product
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from nanorook import task as task_file
from nanorook.settings import fail
from nanorook.statistics import beyond_chance, gain, with_interval
from nanorook.task import TAKEN, Question, as_sum
from nanorook.verdict import objects, read, verdict

SHOWN = 3  # samples of each kind with the lowest reward, and as many with the highest


class Run(NamedTuple):
    folder: Path
    name: str  # the folder's, with as much of its path as distinguishes it from the page's other runs
    rows: list  # of metrics.jsonl
    samples: list  # of samples.jsonl
    settings: dict
    about: dict  # run.json
    skill: dict  # {title: {figure: [mean, half-width, values of the questions]}}
    show: Any  # the task's function
    curves: dict  # {"kind/metric": [(step, value), ...], "kind/metric T=0": [(step, mean, half-width), ...]}


def read_run(folder, name):
    folder, curves = Path(folder), {}
    rows = [row for row in read(folder / "metrics.jsonl") if "step" in row]
    if not rows:
        fail(f"{folder}/metrics.jsonl contains no step; give the OUT_DIR of a run that has made one.")
    for row in rows:
        for metric, value in (row | row.get("seconds", {})).items():
            if isinstance(value, int | float):
                curves.setdefault(metric, []).append((row["step"], float(value)))
    settings, about, skill = objects(folder, "settings", "run", "skill")
    for title, figures in skill.items():
        step = rows[-1]["step"] if title == "after" else 0 if title == "before" else int(title.removeprefix("step "))
        for figure, (mean, half, _) in figures.items():
            curves.setdefault(figure.replace(" ", "/", 1), []).append((step, mean, half))
    samples = read(folder / "samples.jsonl")
    return Run(folder, name, rows, samples, settings, about, skill, load_show(settings.get("TASK")), curves)


def load_show(file):
    """The task's `show`, or a function that shows nothing if the task has none or is not on this machine."""
    try:
        return task_file.load_task(file).show
    except (SystemExit, Exception):
        return lambda question, text: ""


def head(run, title):
    """The verdict, whose first line begins with a state."""
    first, *others = verdict(run.folder)
    _, state, first = first.split(None, 2)
    for line in (first, *others):
        lead, colon, rest = escape(line).partition(": ")
        dot = f'<i class="{escape(state)}"></i>' * (line is first)
        title += f'<p class="verdict">{dot}' + (f"<b>{lead}:</b> {rest}" if colon else lead) + "</p>"
    return title


def states(run, title):
    """A strip with the state of each step, and a list of the advice with the steps that gave it."""
    strip, items, advice = "", "", {}
    for state, (*group,) in groupby(run.rows, lambda row: row.get("state", "green")):
        strip += f'<i class="{escape(state)}" style="flex:{len(group)}"></i>'
        for row in group:
            advice.setdefault((state, row.get("advice", "")), []).append(row["step"])
    for (state, text), steps in advice.items():
        when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        items += f'<li><i class="{escape(state)}"></i>{escape(text or state)} <span class="soft">{when}</span></li>'
    return f'{title}<div class="strip">{strip}</div><ul class="advice">{items}</ul>'


def settings(runs):
    """How each run was started, which settings were changed when it was resumed, and all its settings at the end, with
    the values of each run where they differ."""
    tables, page = [], ""
    for run in runs:
        about = {name: value for name, value in run.about.items() if name not in ("versions", "questions", "changes")}
        if changes := run.about.get("changes"):
            told = [f"{name} from {was} to {value} after step {step}" for step, name, was, value in changes]
            about["changed"] = "; ".join(told)
        tables.append(about | run.about.get("versions", {}) | run.settings)
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [str(table.get(name, "–")) for table in tables]
        css, told = ("differs", " | ".join(values)) if len({*values}) > 1 else ("", values[0])
        page += f'<div class="{css}"><dt>{escape(name)}</dt><dd>{escape(told)}</dd></div>'
    return page


# ---- Skill and curves --------------------------------------------------------------------------------------


def skill_table(runs):
    """The first run's first evaluation and each run's last one, followed by the gain of a single run, or by how much
    each of several runs differs from the first one."""
    ends = [(run, [*run.skill][-1]) for run in runs if run.skill]
    starts = [(run, [*run.skill][0]) for run, _ in ends[:1] if len(run.skill) > 1]
    base, columns = ends[:1] if len(ends) > 1 else starts, []  # [(heading, {figure: (CSS class, text)}), ...]
    for run, title in starts + ends:
        figures = {name: ("", with_interval(*figure[:2])) for name, figure in run.skill[title].items()}
        columns.append((f"{run.name}, {title}" if len(runs) > 1 else title, figures))
    for (first, begin), (run, end) in product(base, ends[len(ends) > 1 :]):
        before, after = first.skill[begin], run.skill[end]
        gains = {name: difference(name, first, before, run, after) for name in after if name in before}
        certain = beyond_chance(gains)
        changes = {name: (("up" if mean > 0 else "down") * (name in certain), with_interval(mean, half, "+.3f"))
                   for name, (mean, half, _) in gains.items()}  # fmt: skip
        columns.append((f"{run.name} − {first.name}" if len(runs) > 1 else "gain", changes))
    names, called = dict.fromkeys(name for _, cells in columns for name in cells), names_in(runs)
    order = list(dict.fromkeys(name.rpartition(" ")[0] for name in names))
    page = "<thead><tr><th></th>" + "".join(f"<th>{escape(heading)}</th>" for heading, _ in columns) + "</tr></thead>"
    for name in sorted(names, key=lambda name: order.index(name.rpartition(" ")[0])):
        what, _, how = name.rpartition(" ")
        page += f"<tr><th>{escape(called.get(what, what))} <small>{escape(manner(how))}</small></th>"
        for css, text in (cells.get(name, ("", "")) for _, cells in columns):
            page += f'<td class="{css}">{text.replace("-", "−")}</td>'
    return f"<table>{page}</table>" if ends else ""


def names_in(runs):
    """{"kind metric": its name for people}, as the runs' task gives them."""
    return {name: called for run in runs for name, called in run.about.get("names", {}).items()}


def difference(name, first, before, other, after):
    """How much a figure differs between two evaluations, as gain() returns it: question by question if both asked the
    same ones."""
    asked, also = (run.about.get("questions", {}).get(name.split(" ")[0]) for run in (first, other))
    return gain(before[name][2], after[name][2], paired=first is other or asked and asked == also)


def manner(how):
    """How questions were answered, in the words of the legends."""
    return {"": "training", "T=0": "greedy"}.get(how, how.replace("=", " = "))


PANELS = (  # title, unit, {metric: what its line is called}; some metrics have a line for each kind of question, too
    ("Reward", "mean over a step's answers", {"reward": "all"}),
    ("Best reward", "highest of a step's answers", {"reward_max": "all"}),
    ("Groups without a signal", "share with equal rewards", {"frac_zero_std": "all"}),
    ("Cut off", "share of completions", {"hit_limit": "all"}),
    ("Completion length", "tokens", {"length": ""}),
    ("KL to the reference", "nats per token", {"kl": ""}),
    ("Entropy", "nats per token", {"entropy": ""}),
    ("Gradient norm", "before clipping", {"grad_norm": ""}),
    ("Clipped tokens", "share whose gradient the clip changes", {"clip_low": "below", "clip_high": "above"}),
    ("Sampling and training", "nats, mean difference of logprobs", {"logprob_gap": ""}),
    ("Learning rate", "of AdamW", {"lr": ""}),
    ("Time of a step", "seconds", {"sampling": "sampling", "grading": "grading", "update": "update"}),
    ("Speed", "completion tokens per second", {"tokens_per_second": ""}),
)


def skill_panels(names, kind, called):
    """The reward and the metrics of a kind of question, in training and held out; `called` has names for people."""
    for metric in dict.fromkeys(name.partition(" ")[0] for name in names if name.startswith(f"{kind}/")):
        _, short, *piece = metric.split("/")
        if not piece and short not in TAKEN[1:]:
            lines = [name for name in names if name.partition(" ")[0] == metric]
            yield called.get(f"{kind} {short}", short), "", {name: manner(name.partition(" ")[2]) for name in lines}


def training_panels(names, kinds):
    for title, unit, lines in PANELS:
        each = {f"{kind}/{metric}": kind for metric in lines for kind in kinds}
        yield title, unit, lines | {name: kind for name, kind in each.items() if len(kinds) > 1 and name in names}
    for kind in kinds:
        start, unit = f"{kind}/earned/", "mean of each over a step's answers"
        yield f"Pieces of the {kind} reward", unit, {n: n.removeprefix(start) for n in names if n.startswith(start)}


def one_by_one(panels):
    """The panels split into one for each metric."""
    return ((f"{title}: {line}" if len(lines) > 1 else title, unit, {name: line})
            for title, unit, lines in panels for name, line in lines.items())  # fmt: skip


def plots(runs, panels):
    """One run gets a colour for each line of a panel; several runs get one each."""
    page, several, last = "", len(runs) > 1, max(run.rows[-1]["step"] for run in runs)
    for title, unit, lines in panels:
        held_out, curves = [name for name in lines if " " in name], []
        for i, run in enumerate(runs):
            for j, name in enumerate(lines):
                css = f"c{(i if several else j) % 8}" + " thin" * (bool(held_out) and name not in held_out)
                css += " dashed" * (name in held_out[1:] or j > 7)
                curves += [(lines[name], css, run.curves[name])] if name in run.curves else []
        page += plot(title, unit, curves, last, named=not several and len(curves) > 1) if curves else ""
    return f'<div class="plots">{page}</div>'


def legend(lines):
    """The legend of lines, [(name, CSS classes, ...), ...]."""
    items = "".join(f'<li><i class="{css}"></i>{escape(name)}</li>' for name, css, *_ in lines)
    return f'<ul class="legend">{items}</ul>'


LEFT, RIGHT, TOP, BOTTOM = 42, 292, 8, 124  # of a plot in its own units, 300 wide


def plot(title, unit, curves, last, named=False):
    """A figure of curves, [(name, CSS classes, points), ...]. Points with a half-width become dots on a band; others
    are also drawn smoothed."""
    points = [point for *_, points in curves for point in points]
    ends = [value + sign * half for _, value, *halves in points for half in halves for sign in (-1, 1)]
    log, marks = axis([value for _, value, *_ in points if math.isfinite(value)] or [0], filter(math.isfinite, ends))
    low, high = (math.log10(mark) if log else mark for mark, _ in (marks[0], marks[-1]))

    def x(step):
        return LEFT + (RIGHT - LEFT) * step / last

    def y(value):
        value = (math.log10(value) if value > 0 else low) if log else value
        return max(TOP, min(BOTTOM, BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)))

    def path(css, points):
        """Leaves gaps where a value is not finite; h0 makes a dot of a single point."""
        parts = [list(part) for finite, part in groupby(points, lambda point: math.isfinite(point[1])) if finite]
        d = "".join("M" + "L".join(f"{x(s):.1f} {y(v):.1f}" for s, v, *_ in part) + "h0" for part in parts)
        return f'<path class="{css}" d="{d}"/>'

    svg = ""
    for mark, text in marks:
        svg += f'<path class="axis" d="M{LEFT} {y(mark):.1f}H{RIGHT}"/>'
        svg += f'<text class="tick" x="{LEFT - 6}" y="{y(mark) + 4:.1f}">{text}</text>'
    for step, text in ticks(0, last, 5):
        if step % 1 == 0 and step <= last:
            svg += f'<text x="{x(step):.1f}" y="{BOTTOM + 16}">{"step " * (not step)}{text}</text>'
    held_out = [(css, points) for _, css, points in curves if len(points[0]) == 3]
    for css, points in held_out:
        band = [(step, value - half) for step, value, half in points]
        svg += path(f"band {css}", band + [(step, value + half) for step, value, half in points[::-1]])
    for _, css, points in curves:
        svg += path(f"raw {css}", points) if len(points[0]) == 2 and len(curves) < 5 else ""
        svg += path(f"line {css}", points if len(points[0]) == 3 else smooth(points))
        for step, value, *half in points:
            if not math.isfinite(value):
                svg += f'<path class="broken" d="M{x(step):.1f} {TOP}V{BOTTOM}"/>'
            elif half:
                svg += f'<circle class="{css}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5">'
                svg += f"<title>step {step}: {with_interval(value, *half)}</title></circle>"
    svg = f'<svg viewBox="0 0 300 146" role="img" aria-label="{escape(title)}">{svg}</svg>{legend(curves) * named}'
    return f'<figure class="plot"><h4>{escape(title)}</h4><figcaption>{escape(unit)}</figcaption>{svg}</figure>'


def smooth(points):
    """Means over neighbouring points, at most 20 on each side."""
    n = min(20, len(points) // 20)
    windows = [[v for _, v in points[max(0, i - n) : i + n + 1] if math.isfinite(v)] for i in range(len(points))]
    return [(step, statistics.fmean(w) if w else math.nan) for (step, _), w in zip(points, windows)]


def axis(values, ends):
    """(whether it is logarithmic, its ticks), fitted to values and the ends of their intervals, but not to noise. A
    logarithmic axis shows all where one value dwarfs the others; one of shares stays between 0 and 1."""
    low, high, positive = min(values), max(values), [value for value in values if value > 0]
    if low >= 0 and positive and high > 100 * statistics.median(positive):
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(high))
        return True, [(10.0**exponent, f"1e{exponent:.0f}") for exponent, _ in ticks(low, high, 3) if exponent % 1 == 0]
    least, most = 0 if low >= 0 else -math.inf, 1 if low >= 0 and high <= 1 else math.inf
    low, high = min(seen := [low, high, *ends]), max(seen)
    room = max(0, max(abs(low), abs(high)) / 20 - (high - low)) / 2 or (low == high) / 2
    return False, ticks(max(least, low - room), min(most, high + room), 4)


def ticks(low, high, count):
    """[(value, text), ...]: about `count` steps of 1, 2 or 5 times a power of ten, which reach from `low` to `high`."""
    wanted = (high - low) / count
    power = math.floor(math.log10(wanted))
    step = min((factor * 10.0**power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / wanted)))
    form = f",.{max(0, -math.floor(math.log10(step) + 1e-6))}f" if 1e-5 < step < 1e6 else ".3g"
    marks = (i * step for i in range(math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6) + 1))
    return [(mark, f"{mark:{form}}".replace("e-0", "e-") if mark else "0") for mark in marks]


# ---- Samples -----------------------------------------------------------------------------------------------


def cards(runs):
    """Each question once with its answers: those of the first and the last evaluation, or each of several runs' last.
    Those of each kind whose last answer has the lowest or the highest reward are shown."""
    questions, most, page = {}, {}, ""
    for run in runs:
        steps = [sample["step"] for sample in run.samples]
        for sample in run.samples:
            if sample["step"] == max(steps) or len(runs) == 1 and sample["step"] == min(steps):
                when = f"step {sample['step']}" if sample["step"] else "before"
                title = f"{run.name}, {when}" if len(runs) > 1 else when
                answers = questions.setdefault((sample["kind"], sample["prompt"]), {})
                answers.setdefault(sample["completion"], ([], run, sample))[0].append(title)
                for pieces in judged(sample).values():
                    key = sample["kind"], next(iter(pieces))
                    most[key] = max(most.get(key, 0), sum(pieces.values()))
    order = sorted(questions, key=lambda question: (question[0], [*questions[question].values()][-1][2]["reward"]))
    for kind, (*group,) in groupby(order, lambda question: question[0]):
        some = [card(questions[question], most) for question in dict.fromkeys(group[:SHOWN] + group[-SHOWN:])]
        page += f"<h3>{escape(kind)}</h3>"
        page += f'<p class="soft">{len(some)} of {len(group)} questions, the lowest reward first</p>'
        page += f'<div class="cards">{"".join(some)}</div>'
    return page


def card(answers, most):
    (*_, sample), figures = next(iter(answers.values())), ""
    for titles, run, one in answers.values():
        figures += f"<figure><figcaption>{escape(' and '.join(titles))}</figcaption>{shown(run, one)}"
        figures += f'<pre>{marked(one, most)}</pre><p class="soft"><b>{one["reward"]:.4g}</b> = '
        figures += f"{escape(as_sum(one['pieces']) or '0')}</p></figure>"
    truth, prompt = json.dumps(sample["truth"], ensure_ascii=False), escape(sample["prompt"].strip())
    return (
        f'<article class="card"><pre>{prompt}</pre><details{" open" * (len(truth) < 100)}><summary>truth</summary>'
        f"<pre>{escape(truth)}</pre></details><div>{figures}</div></article>"
    )


def shown(run, sample):
    """What the run's task shows next to an answer, as HTML."""
    question = Question(**{name: sample[name] for name in Question._fields if name in sample})
    try:
        text = str(run.show(question, sample["completion"]))
    except Exception as error:  # whatever the task's own code raises
        fail(f"show of the task {run.settings.get('TASK')} failed for {sample['completion']!r:.60}: "
             f"{type(error).__name__} {error}.")  # fmt: skip
    text = text if text.startswith("<") else f"<pre>{escape(text)}</pre>"
    return f'<div class="shown">{text}</div>' if text != "<pre></pre>" else ""


def judged(sample):
    """{(start, end): {piece: value}}: what is paid by the pieces whose first span is this part of the answer."""
    parts = {}
    for name, value, *places in sample["pieces"]:
        if places:
            parts.setdefault(tuple(places[0]), {})[name] = value
    return parts


def marked(sample, most):
    """The answer, each part coloured by its share of `most`, the most that any answer earned for such a part."""
    text, parts, page = sample["completion"], judged(sample), ""
    cuts = sorted({0, len(text), *(min(len(text), cut) for place in parts for cut in place)})
    for start, end in zip(cuts, cuts[1:]):
        part = escape(text[start:end])
        places = [place for place in parts if place[0] <= start and end <= place[1]]
        if places:
            pieces = parts[min(places, key=lambda place: place[1] - place[0])]  # the innermost says most about it
            share = sum(pieces.values()) / (most[sample["kind"], next(iter(pieces))] or 1)
            told = escape("\n".join(f"{name} {value:.3f}" for place in places for name, value in parts[place].items()))
            part = f'<mark style="--share:{max(0, min(1, share)):.0%}" title="{told}">{part}</mark>'
        page += part
    return page


def write(*folders):
    """Writes the page of one run, or of several, into the first one's folder; returns its path."""
    paths = [Path(folder).resolve() for folder in folders]
    shared = os.path.commonpath([path.parent for path in paths])
    runs = [read_run(folder, os.path.relpath(path, shared)) for folder, path in zip(folders, paths)]
    names = dict.fromkeys(name for run in runs for name in run.curves)
    kinds = dict.fromkeys(name.split("/")[0] for name in names if "/" in name)
    named = [(run.name, f"c{i % 8}") for i, run in enumerate(runs)] if len(runs) > 1 else []
    titles = [legend([run]) for run in named] or [""]
    called = names_in(runs)
    of_kinds = {kind: plots(runs, skill_panels(names, kind, called)) for kind in kinds}
    skill = "".join(f"<h3>{escape(kind)}</h3>{panels}" for kind, panels in of_kinds.items())
    panels = training_panels(names, kinds)
    page = Template(Path(__file__).with_suffix(".html").read_text()).substitute(  # in one pass: inserted text stays
        title=escape(" and ".join(run.name for run in runs)), head="".join(map(head, runs, titles)), skill=skill,
        table=skill_table(runs), states="".join(map(states, runs, titles)), samples=cards(runs),
        settings=settings(runs),
        plots=plots(runs, panels if len(runs) == 1 else one_by_one(panels)), runs=legend(named),
        legend=escape(" ".join({run.show.__doc__ or "": 0 for run in runs})),
    )  # fmt: skip
    others = "-".join(path.name for path in paths[1:])[:200]
    path = paths[0] / (f"report-with-{others}.html" if others else "report.html")
    part = path.with_name(f".{path.name}")
    part.write_text(page, errors="replace")  # a completion may hold half a surrogate pair
    os.replace(part, path)
    return path
