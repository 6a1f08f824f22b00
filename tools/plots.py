"""Curves as SVG: a run's metrics, each a figure that is drawn, told in words, and read by the page's script."""

import json
import math
import statistics
from html import escape
from itertools import accumulate

import rewards

POINTS = 400  # of a curve: longer runs are averaged over neighbouring steps
LEFT, RIGHT, TOP, BOTTOM = 42, 352, 8, 150  # of a plot in its own units, 360 wide

# title, what to know, the metrics, the setting drawn as a limit. A task's letter is all that its completions earned.
EARNED = "what completions were paid for on average, before the runaway penalty"
PANELS = (
    ("Reward", "mean of the batch, and its best completion", ("reward", "reward_max"), None),
    ("Policy reward by part", EARNED, "P", None),
    ("Environment reward by part", EARNED, "A", None),
    ("Policy", "share of completions", [f"P/{x}" for x in "structure legal top5 best candidates_legal".split()], None),
    ("Environment", "share of completions",
     [f"A/{x}" for x in "structure next_state reward_match terminated_match truncated_match".split()], None),
    ("KL to the reference", "nats a token", ("kl",), None),
    ("Gradient norm", "before clipping; the dashed line is the clip", ("grad_norm",), "MAX_GRAD_NORM"),
    ("Entropy", "nats a token", ("entropy",), None),
    ("Clipped tokens", "share whose ratio left the clip range", ("clip_low", "clip_high"), None),
    ("Zero-variance groups", "share of groups with one reward only", ("frac_zero_std",), None),
    ("Completion length", "tokens", ("length",), None),
    ("Cut off", "share of completions that hit their limit", ("runaway",), None),
    ("Speed", "completion tokens a second", ("tokens_per_second",), None),
    ("Time of a step", "seconds", ("seconds/rollout", "seconds/update"), None),
    ("Sampling against training", "mean difference of logprobs, nats", ("logprob_gap",), None),
)  # fmt: skip

WEIGHTS = {"P": rewards.POLICY, "A": rewards.ENVIRONMENT}


def short(value):
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value:,.0f}"


def points_of(rows, name):
    """[(step, value), ...] where the run has this metric. Thinning keeps visible what is not finite."""
    points = [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]
    n = math.ceil(len(points) / POINTS) or 1
    chunks = [points[i : i + n] for i in range(0, len(points), n)]
    return [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]


def smooth(points):
    """Means over the last steps, ten at most."""
    n = min(10, len(points) // 5) or 1
    windows = [[v for _, v in points[max(0, i - n + 1) : i + 1] if math.isfinite(v)] for i in range(len(points))]
    return [(step, statistics.fmean(w) if math.isfinite(v) else v) for (step, v), w in zip(points, windows)]


def ticks(low, high):
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(m for m in (5, 2, 1) if (high - low) / (step * m) >= 2)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def across(step, first, last):
    return LEFT + (RIGHT - LEFT) * (step - first) / max(1, last - first)


def path(points, x, y):
    """An SVG path with a gap at what is not finite, and a dot for a point by itself."""
    d, pen = "", "M{:.1f} {:.1f}h0"
    for step, value in points:
        d += pen.format(x(step), y(value)) if math.isfinite(value) else ""
        pen = "L{:.1f} {:.1f}" if math.isfinite(value) else "M{:.1f} {:.1f}h0"
    return d


def plot(title, about, curves, first, last, limit=None, stacked=False):
    """A figure of curves, [(name, colour, class, points), ...]. Stacked ones become areas, each on those before it."""
    lines = [smooth(points) for *_, points in curves]
    if stacked:
        lines = list(accumulate(lines, lambda below, line: [(s, a + b) for (s, a), (_, b) in zip(below, line)]))
    shown = [v for points in (lines if stacked else [c[-1] for c in curves]) for _, v in points if math.isfinite(v)]
    shown += [limit] if limit else []
    low, high = min(shown, default=0), max(shown, default=1)
    log = low > 0 and high > 100 * statistics.median(shown)  # an explosion would press all the rest to the ground
    if log:
        marks = [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        low, high, marks = marks[0], marks[-1], marks[:: math.ceil(len(marks) / 5)]
    else:
        low, high = min(0, low), max(0, high) or 1
        marks = ticks(low, high)

    def x(step):
        return across(step, first, last)

    def y(value):
        return BOTTOM - (BOTTOM - TOP) * (math.log(value / low, high / low) if log else (value - low) / (high - low))

    svg = '<use href="#bands"/>'
    for mark in marks:
        svg += f'<path class="axis" d="M{LEFT} {y(mark):.1f}H{RIGHT}"/>'
        svg += f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{short(mark)}</text>'
    for (_, colour, css, points), line in reversed(list(zip(curves, lines))):  # areas hide what lies behind them
        style = f'style="--c:var(--c{colour})"'
        if stacked:
            corners = path([p for p in line if math.isfinite(p[1])], x, y)
            svg += f'<path class="area" {style} d="{corners}V{y(0):.1f}H{x(line[0][0]):.1f}Z"/>'
        else:
            svg += f'<path class="raw" {style} d="{path(points, x, y)}"/>'
            svg += f'<path class="line {css}" {style} d="{path(line, x, y)}"/>'
        lost = "".join(f"M{x(s) - 4:.1f} {BOTTOM - 8}l8 8m0-8l-8 8" for s, v in points if not math.isfinite(v))
        svg += f'<path class="lost" d="{lost}"/>'
    if limit:
        svg += f'<path class="axis limit" d="M{LEFT} {y(limit):.1f}H{RIGHT}"/>'
    svg += f'<path class="cursor" d="M0 {TOP}V{BOTTOM}"/><text x="{LEFT}" y="{BOTTOM + 16}">step {first}</text>'
    svg += f'<text x="{RIGHT}" y="{BOTTOM + 16}" text-anchor="end">{last}</text>'

    told, legend, data = [], "", []
    for name, colour, css, points in curves:
        values = [v for _, v in points]
        finite = [v for v in values if math.isfinite(v)] or [math.nan]
        told.append(f"{name} from {short(values[0])} to {short(values[-1])}, "
                    f"between {short(min(finite))} and {short(max(finite))}")  # fmt: skip
        legend += f'<li style="--c:var(--c{colour})"><i class="{css}"></i>{escape(name)}<b>{short(values[-1])}</b></li>'
        data.append([[s for s, _ in points], [float(f"{v:.4g}") if math.isfinite(v) else None for v in values]])
    told = f"{title}, steps {first} to {last}: {'; '.join(told)}{f'; clip at {short(limit)}' if limit else ''}."
    return (
        f'<figure class="plot" tabindex="0" data-curves="{escape(json.dumps(data))}" '
        f'data-first="{first}" data-last="{last}" data-left="{LEFT}" data-right="{RIGHT}"><h3>{title}</h3>'
        f'<figcaption>{escape(about)} <span class="step"></span></figcaption>'
        f'<svg viewBox="0 0 360 {BOTTOM + 22}" role="img" aria-label="{escape(told)}">{svg}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def all_curves(runs):
    first, last = min(run.rows[0]["step"] for run in runs), max(run.rows[-1]["step"] for run in runs)
    figures = ""
    for title, about, metrics, setting in PANELS:
        stacked = isinstance(metrics, str)
        names = [f"{metrics}/earned/{name}" for name in ["malformed", *WEIGHTS[metrics]]] if stacked else metrics
        limit, both = runs[0].settings.get(setting), []
        for run in runs:
            curves = [
                (name.split("/")[-1], (i - stacked) % 12, "dashed" * (run.label == "B "), points)
                for i, name in enumerate(names)
                if (points := points_of(run.rows, name))
            ]
            if stacked and curves:  # areas of two runs would hide each other
                figures += plot(f"{title} {run.label}".strip(), about, curves, first, last, stacked=True)
            elif curves:
                both += [(run.label + name, *rest) for name, *rest in curves]
        if both:
            figures += plot(title, about, both, first, last, limit)
    return figures
