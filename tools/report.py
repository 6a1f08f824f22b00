"""A run as one page that needs no network: python -m tools.report OUT_DIR [OTHER] writes OUT_DIR/report.html.

It shows the states, skill, curves and samples of any task's run, even of one that was killed; with OTHER, two runs side
by side, in OUT_DIR/report-beside-OTHER.html. What a model wrote is escaped, and the page allows no script at all.
"""

import argparse
import json
import math
import re
import statistics
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

import chess.svg

from nanorook.settings import fail
from nanorook.statistics import gain, interval, known, with_interval
from nanorook.task import as_sum
from rook.positions import contract_board


class Run(NamedTuple):
    label: str  # "A " or "B " before what is shown of one of two runs
    name: str
    rows: list  # of metrics.jsonl
    samples: list  # of samples.jsonl
    settings: dict
    about: dict  # run.json
    skill: dict


def read(path):
    """The objects in a file, one in each line of a .jsonl, without those that a killed run has cut off."""
    text, found = path.read_text(errors="replace") if path.is_file() else "", []
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        try:
            found.append(dict(json.loads(part)))
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def read_run(folder, label):
    folder = Path(folder)
    rows = [row for row in read(folder / "metrics.jsonl") if "step" in row]
    if not rows:
        fail(f"{folder}/metrics.jsonl holds no step; give the OUT_DIR of a run that has made one.")
    for row in rows:
        row |= {f"{name} seconds": value for name, value in row.pop("seconds", {}).items()}
    files = [(read(folder / f"{name}.json") or [{}])[0] for name in ("settings", "run", "skill")]
    return Run(label, str(folder), rows, read(folder / "samples.jsonl"), *files)


def head(run):
    tokens = sum(row.get("tokens", 0) for row in run.rows)
    minutes = sum(value for row in run.rows for name, value in row.items() if name.endswith(" seconds")) / 60
    facts = [f"{run.label}{run.name}", f"{run.rows[-1]['step']} steps", f"{tokens:,} completion tokens"]
    about = {name: value for name, value in run.about.items() if name not in ("versions", "questions")}
    about |= run.about.get("versions", {})
    facts += [f"{minutes:.1f} min of steps", *(f"{name} {value}" for name, value in about.items())]
    return f'<p class="soft">{escape(" · ".join(facts))}</p>'


def states(run):
    """A strip with the state of each step, and each advice with the steps that gave it."""
    strip, items, advice = "", "", {}
    for state, (*group,) in groupby(run.rows, lambda row: row.get("state", "green")):
        strip += f'<i class="{escape(state)}" style="flex:{len(group)}"></i>'
        for row in group:
            advice.setdefault((state, row.get("advice", "")), []).append(row["step"])
    for (state, text), steps in advice.items():
        when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        items += f'<li><i class="{escape(state)}"></i>{escape(text or state)} <span class="soft">{when}</span></li>'
    return f'{run.label}<div class="strip">{strip}</div><ul class="advice">{items}</ul>'


def skill_table(runs):
    """A mean is marked where its difference from the first, question by question, is larger than its interval."""
    columns, body = [(run, title) for run in runs for title in run.skill], ""
    for name in dict.fromkeys(name for run, title in columns for name in run.skill[title]):
        body += f"<tr><th>{escape(name)}</th>"
        for run, title in columns:
            values = run.skill[title].get(name, [])
            change, half = gain(next(iter(run.skill.values())).get(name, values), values) if values else (0, 0)
            css, mark = ("", "") if abs(change) <= half else ("up", "▲ ") if change > 0 else ("down", "▼ ")
            figure = mark + with_interval(*interval(known(values))) if values else "–"
            body += f'<td class="{css}">{figure}</td>'
        body += "</tr>"
    head = "".join(f"<th>{escape(run.label + title)}</th>" for run, title in columns)
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def settings(runs):
    """All settings; those that differ between two runs are marked."""
    page = ""
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = dict.fromkeys(str(run.settings.get(name, "–")) for run in runs)
        page += f'<div class="values{len(values)}"><dt>{escape(name)}</dt><dd>{escape(" | ".join(values))}</dd></div>'
    return page


LEFT, RIGHT, TOP, BOTTOM = 42, 352, 8, 130  # of a plot in its own units, 360 wide
PANELS = (  # title, what it shows, metrics
    ("KL to the reference", "nats a token", ["kl"]),
    ("Entropy", "nats a token", ["entropy"]),
    ("Gradient norm", "before it is clipped to the dashed line", ["grad_norm"]),
    ("Clipped tokens", "share whose ratio left the clip range", ["clip_low", "clip_high"]),
    ("Zero-variance groups", "share of groups with one reward only", ["frac_zero_std"]),
    ("Completion length", "tokens", ["length"]),
    ("Cut off", "share of completions that hit their limit", ["hit_limit"]),
    ("Learning rate", "lowered when the run goes back to a good state", ["lr"]),
    ("Sampling against training", "mean difference of logprobs, nats", ["logprob_gap"]),
    ("Speed", "completion tokens a second", ["tokens_per_second"]),
    ("Time of a step", "seconds", ["sampling seconds", "grading seconds", "update seconds"]),
)


def panels(rows):
    """PANELS, and before them those of each kind of question, made from the metrics KIND/NAME and KIND/earned/PIECE."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = list(dict.fromkeys(name.split("/")[0] for name in names if "/" in name))
    means = [f"{kind}/reward" for kind in kinds]
    yield "Reward", "mean and best of all, mean of each kind", ["reward", "reward_max", *means[len(means) == 1 :]]
    for kind in kinds:
        earned = [name for name in names if name.startswith(f"{kind}/earned/")]
        others = [name for name in names if name.startswith(f"{kind}/") and name not in (*earned, *means)]
        large = [name for name in others if any(value > 1 for _, value in points_of(rows, name))]
        yield f"{kind}: pieces of the reward", "what they pay on average", earned
        yield f"{kind}: metrics", "shares of answers, or figures up to 1", [n for n in others if n not in large]
        yield f"{kind}: other metrics", "means over answers", large
    yield from PANELS


def points_of(rows, name):
    """[(step, value), ...] where the rows have this metric."""
    return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]


def smooth(points):
    """Means over the neighbouring points, 20 at most on each side."""
    n = min(20, len(points) // 20)
    windows = [[v for _, v in points[max(0, i - n) : i + n + 1] if math.isfinite(v)] for i in range(len(points))]
    return [(step, statistics.fmean(w) if w else math.nan) for (step, _), w in zip(points, windows)]


def short(value):
    return f"{value:.3g}" if abs(value) < 1000 or not abs(value) < 1e6 else f"{value:,.0f}"


def plot(title, about, curves, first, last, limit=None):
    """A figure of curves, [(name, CSS class, points), ...], on a logarithmic axis where one value dwarfs the others."""
    values = [0, limit or 0] + [value for *_, points in curves for _, value in points if math.isfinite(value)]
    positive = [value for value in values if value > 0]
    low, high = min(values), max(values) if any(values) else 1
    if log := low == 0 and any(values) and high > 100 * statistics.median(positive):
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(high))

    def x(step):
        return LEFT + (RIGHT - LEFT) * (step - first) / max(1, last - first)

    def y(value):
        value = (math.log10(value) if value > 0 else low) if log else value
        return BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    def path(points):
        """Gaps where a value is not finite; h0 makes a dot of a point by itself."""
        runs = [list(run) for finite, run in groupby(points, lambda p: math.isfinite(p[1])) if finite]
        return "".join("M" + "L".join(f"{x(s):.1f} {y(v):.1f}" for s, v in run) + "h0" for run in runs)

    svg, legend = "", ""
    for mark in (low, (low + high) / 2, high):
        mark = 10**mark if log else mark
        svg += f'<path class="axis" d="M{LEFT} {y(mark):.1f}H{RIGHT}"/>'
        svg += f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{short(mark)}</text>'
    for name, css, points in curves:
        broken = "".join(f"M{x(step):.1f} {TOP}V{BOTTOM}" for step, value in points if not math.isfinite(value))
        svg += f'<path class="raw {css}" d="{path(points)}"/>' if len(curves) < 5 else ""
        svg += f'<path class="line {css}" d="{path(smooth(points))}"><title>{escape(name)}</title></path>'
        svg += f'<path class="broken" d="{broken}"/>' if broken else ""
        legend += f'<li><i class="{css}"></i>{escape(name)} <b>{short(points[0][1])} → {short(points[-1][1])}</b></li>'
    svg += f'<path class="limit" d="M{LEFT} {y(limit):.1f}H{RIGHT}"/>' if limit else ""
    svg += f'<text x="{LEFT}" y="{BOTTOM + 16}">step {first}</text>'
    svg += f'<text x="{RIGHT}" y="{BOTTOM + 16}" text-anchor="end">{last}</text>'
    return (
        f'<figure class="plot"><h3>{escape(title)}</h3><figcaption>{escape(about)}</figcaption>'
        f'<svg viewBox="0 0 360 {BOTTOM + 22}">{svg}</svg><ul class="legend">{legend}</ul></figure>'
    )


def plots(runs):
    first, last, page = min(run.rows[0]["step"] for run in runs), max(run.rows[-1]["step"] for run in runs), ""
    for title, about, metrics in panels([row for run in runs for row in run.rows]):
        at = 0 if title == "Reward" else -1  # the part of a metric's name that is shown
        curves = [
            (run.label + name.split("/")[at], f"c{i % 12}" + " dashed" * (run.label == "B "), points)
            for i, name in enumerate(metrics) for run in runs if (points := points_of(run.rows, name))
        ]  # fmt: skip
        limit = runs[0].settings.get("MAX_GRAD_NORM") if metrics == ["grad_norm"] else None
        page += plot(title, about, curves, first, last, limit) if curves else ""
    return page


def cards(runs):
    """Each question with its answers at the first and the last evaluation, those with the lowest last reward first."""
    questions, most, page = {}, {}, ""
    for run in runs:
        steps = {sample["step"] for sample in run.samples}
        for sample in run.samples:
            if sample["step"] in (min(steps), max(steps)):
                title = run.label + (f"step {sample['step']}" if sample["step"] else "before")
                questions.setdefault((sample["kind"], sample["prompt"]), {})[title] = sample
                for pieces in judged(sample).values():
                    key = sample["kind"], next(iter(pieces))
                    most[key] = max(most.get(key, 0), sum(pieces.values()))
    order = sorted(questions, key=lambda question: (question[0], [*questions[question].values()][-1]["reward"]))
    for kind, group in groupby(order, lambda question: question[0]):
        group = [card(questions[question], most) for question in group]
        page += f"<h3>{escape(kind)}: {len(group)} questions, lowest reward first</h3>"
        page += f'<div class="cards">{"".join(group)}</div>'
    return page


def card(answers, most):
    sample, figures = next(iter(answers.values())), ""
    for title, one in answers.items():
        figures += f"<figure><figcaption>{escape(title)}</figcaption>{board(one)}<pre>{marked(one, most)}</pre>"
        figures += f'<p class="soft"><b>{one["reward"]:.4g}</b> = {escape(as_sum(one["pieces"]) or "0")}</p></figure>'
    truth = escape(f"truth: {json.dumps(sample['truth'], ensure_ascii=False)}")
    prompt = escape(sample["prompt"].strip())
    return f'<article class="card"><pre>{prompt}</pre><p class="soft">{truth}</p><div>{figures}</div></article>'


def judged(sample):
    """{(start, end): {piece: value}}: what is paid for a part of the answer, by pieces that judge it first of all."""
    parts = {}
    for name, value, *places in sample["pieces"]:
        if places:
            parts.setdefault(tuple(places[0]), {})[name] = value
    return parts


def marked(sample, most):
    """The answer, each part coloured by what it earned of the most that any answer shown here earns for it."""
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


BEST, FIVE, LEGAL, ILLEGAL = "#15803d", "#2563eb", "#d97706", "#dc2626"  # report.html explains them
UCI = re.compile("[a-h][1-8][a-h][1-8][qrbn]?")


def board(sample):
    """A chess answer on a board: the moves after `P: FEN`, the next position after `A: FEN+move+...`; else nothing."""
    try:
        fen, *asked = sample["prompt"][3:].removesuffix("M: ").strip().split("+")
        shown, wrong = chess.Board(contract_board(fen)), {}
        colours, turn = {move.uci(): LEGAL for move in shown.legal_moves}, shown.turn
        if sample["prompt"].startswith("P: "):
            truth = {"five": {}} | sample["truth"]
            best = [move for move, value in truth["five"].items() if value == max(truth["five"].values())]
            colours |= dict.fromkeys([*truth["five"], *truth.get("top5", ()), *truth.get("check", ())], FIVE)
            colours |= dict.fromkeys([*best, *truth.get("best", ()), *truth.get("mate", ())], BEST)
            listed, _, best = sample["completion"].partition("B:")
            if sample["prompt"].endswith("M: "):  # which asks for one move
                listed, best = "", listed
            moves = dict.fromkeys(UCI.findall(listed), "59") | dict.fromkeys(UCI.findall(best)[:1], "")  # opacity
        else:
            moves = {asked[0]: ""}
            shown = chess.BaseBoard(contract_board(sample["completion"].split("+")[0]).split(" ")[0])
            true = chess.BaseBoard(sample["truth"][0].split(" ")[0])
            wrong = {at: ILLEGAL + "99" for at in chess.SQUARES if shown.piece_at(at) != true.piece_at(at)}
        ends = {move: (chess.parse_square(move[:2]), chess.parse_square(move[2:4])) for move in moves}
    except (ValueError, TypeError, LookupError, AttributeError):  # another task, or an answer that holds no board
        return ""
    arrows = [chess.svg.Arrow(*ends[move], color=colours.get(move, ILLEGAL) + moves[move]) for move in moves]
    colors = {"square light": "#efe9dd", "square dark": "#bfb29c"}
    svg = chess.svg.board(shown, orientation=turn, arrows=arrows, fill=wrong, coordinates=False, colors=colors)
    return f'<div class="board">{svg}</div>'


def write(folder, other=None):
    """Writes the page of one run, or of two side by side, into `folder`; returns its path."""
    runs = [read_run(folder, "")] if not other else [read_run(folder, "A "), read_run(other, "B ")]
    page = Template(Path(__file__).with_suffix(".html").read_text()).substitute(  # in one pass: what is put in stays
        title=escape(" beside ".join(run.name for run in runs)), head="".join(map(head, runs)), settings=settings(runs),
        open="open" if other else "", states="".join(map(states, runs)), skill=skill_table(runs), plots=plots(runs),
        samples=cards(runs),
    )  # fmt: skip
    path = Path(folder, f"report-beside-{Path(other).resolve().name}.html" if other else "report.html")
    path.write_text(page, errors="replace")  # a completion may hold half a surrogate pair
    return path


def main():
    p = argparse.ArgumentParser("python -m tools.report", description=__doc__)
    p.add_argument("folder", help="the OUT_DIR of a run; the page is written into it")
    p.add_argument("other", nargs="?", help="the OUT_DIR of another run, shown beside it")
    print(write(**vars(p.parse_args())))


if __name__ == "__main__":
    main()
