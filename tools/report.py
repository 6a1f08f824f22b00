"""A run as one page that needs no network: python -m tools.report OUT_DIR [OTHER] writes OUT_DIR/report.html.

It shows the states, curves, skill and samples of any task's run, even of one that was killed; with OTHER, two runs side
by side. The page's frame is report.html. What a model wrote is escaped, and the page allows no script at all.
"""

import argparse
import json
import math
import statistics
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

import chess
import chess.svg

from nanorook.positions import contract_board
from nanorook.settings import refuse
from rewards import parse_environment, parse_policy


class Run(NamedTuple):
    label: str  # "A " or "B " before what is shown of one of two runs
    name: str
    rows: list  # of metrics.jsonl
    settings: dict
    about: dict  # run.json
    skill: dict
    stages: list  # [(title, {question: sample}), ...], before training and after it
    notes: list  # what the reader should know is missing


# ---------------------------------------------------------------------------------------------------------------------
# Reading a run, which may have been killed at any moment


def read_lines(path, notes):
    """The objects with a step in a file of JSON lines; what cannot be read is left out, and noted."""
    rows = []
    if not path.is_file():
        notes.append(f"{path.name} is missing, as after a run that was stopped early.")
        return rows
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            row["step"] += 0
            rows.append(row)
        except (ValueError, KeyError, TypeError, RecursionError):
            notes.append(f"{path.name} has a line that cannot be read, which is left out: {line[:40]!r}")
    return rows


def read_json(path, notes):
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing, as after a run that was stopped early.")
    except (ValueError, TypeError):
        notes.append(f"{path.name} cannot be read and is left out.")
    return {}


def read_run(folder, label):
    folder, notes = Path(folder), []
    rows = {row["step"]: row for row in read_lines(folder / "metrics.jsonl", notes)}
    if not rows:
        refuse(f"{folder}/metrics.jsonl holds no step; give the OUT_DIR of a run that has made one.")
    for row in rows.values():
        row |= {f"{name} seconds": value for name, value in row.pop("seconds", {}).items()}
    stages = {}
    for sample in read_lines(folder / "samples.jsonl", notes):
        stage, number = stages.setdefault(sample["step"], {}), 0
        while (sample["kind"], sample["prompt"], number) in stage:  # some tasks ask the same twice
            number += 1
        stage[sample["kind"], sample["prompt"], number] = sample
    stages = [(f"step {step}" if step else "before", stages[step]) for step in sorted(stages)]
    files = [read_json(folder / f"{name}.json", notes) for name in ("settings", "run", "skill")]
    return Run(label, str(folder), list(rows.values()), *files, stages[:1] + stages[1:][-1:], notes)


# ---------------------------------------------------------------------------------------------------------------------
# What was run and how it went


def span(css, text):
    return f'<span class="{css}">{escape(text)}</span>'


def table(head, rows):
    """Cells are HTML; a row is its name and its cells, and a row without cells is a heading."""
    body = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        if cells else f'<tr><th class="heading" colspan="99">{name}</th></tr>'
        for name, *cells in rows
    )  # fmt: skip
    head = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def head(run):
    tokens = sum(row.get("tokens", 0) for row in run.rows)
    minutes = sum(value for row in run.rows for name, value in row.items() if name.endswith(" seconds")) / 60
    facts = [f"{run.label}is {run.name}"] if run.label else []
    facts += [f"{run.rows[-1]['step']} steps", f"{tokens:,} completion tokens", f"{minutes:.1f} min of steps"]
    facts += [str(value) for name, value in run.about.items() if name not in ("command", "versions")]
    facts += [f"{name} {version}" for name, version in run.about.get("versions", {}).items()]
    command = f"<br><code>{escape(str(run.about.get('command', '')))}</code>"
    notes = "".join(f'<p class="note">{escape(run.label + note)}</p>' for note in run.notes)
    return f'<p class="soft">{escape(" · ".join(facts))}{command}</p>{notes}'


def settings(runs):
    """All settings, those that differ between two runs first."""
    same, differ = "", ""
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = list(dict.fromkeys(str(run.settings.get(name, "–")) for run in runs))
        css = "differs" if len(values) > 1 else ""
        item = f'<div><dt>{escape(name)}</dt><dd class="{css}">{escape(" | ".join(values))}</dd></div>'
        same, differ = (same, differ + item) if css else (same + item, differ)
    return differ + same


def states(run):
    strip, advice = "", {}
    for state, group in groupby(run.rows, lambda row: escape(row.get("state", "green"))):
        steps = [row["step"] for row in group]
        strip += f'<i class="{state}" style="flex:{len(steps)}" title="{state}: {steps[0]} to {steps[-1]}"></i>'
    for row in run.rows:
        if row.get("advice"):
            advice.setdefault(f"{row['state']}: {row['advice']}", []).append(row["step"])
    found = [row.get("state", "green") for row in run.rows]
    told = ", ".join(f"{found.count(state)} {state}" for state in dict.fromkeys(found))
    items = ""
    for text, steps in advice.items():
        when = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        items += f'<li><i class="{escape(text.split(":")[0])}"></i>{escape(text)} {span("soft", when)}</li>'
    return (
        f'<p class="soft">{escape(run.label + told)} of {len(found)} steps</p>'
        f'<div class="strip" role="img" aria-label="{escape(told)} steps">{strip}</div><ul class="advice">{items}</ul>'
    )


def skill_table(runs):
    """All stages. A mean is marked where it is further from its run's first one than both intervals allow for."""

    def kind_and_temperature(name):
        return name.split(" ")[0], name.split("T=")[-1]

    columns = []
    for run in runs:
        columns += [(run.label + title, figures, [*run.skill.values()][0]) for title, figures in run.skill.items()]
    names, rows = dict.fromkeys(name for _, figures, _ in columns for name in figures), []
    for (kind, temperature), group in groupby(sorted(names, key=kind_and_temperature), kind_and_temperature):
        rows.append((escape(f"{kind}, {'greedy' if temperature == '0' else f'temperature {temperature}'}"),))
        for name in group:
            cells = []
            for _, figures, first in columns:
                mean, half = figures.get(name, (math.nan, 0))
                change, error = mean - first.get(name, (mean, 0))[0], math.hypot(half, first.get(name, (0, 0))[1])
                css, mark = ("", "") if not abs(change) > error else ("up", "▲ ") if change > 0 else ("down", "▼ ")
                cells.append(span(css, f"{mark}{mean:.3f} ± {half:.3f}") if math.isfinite(mean) else "–")
            rows.append((escape(" ".join(name.split(" ")[1:-1])), *cells))
    return table(("", *(escape(title) for title, *_ in columns)), rows) if rows else ""


# ---------------------------------------------------------------------------------------------------------------------
# Curves as SVG

POINTS = 100  # of a curve: longer runs are averaged over neighbouring steps
LEFT, RIGHT, TOP, BOTTOM = 42, 352, 8, 150  # of a plot in its own units, 360 wide

# Title, what it shows, {metric: its name in the plot}, the setting that is drawn as a limit
PANELS = (
    ("KL to the reference", "nats a token", {"kl": "KL"}, None),
    ("Gradient norm", "before clipping; the dashed line is the clip", {"grad_norm": "norm"}, "MAX_GRAD_NORM"),
    ("Entropy", "nats a token", {"entropy": "entropy"}, None),
    ("Clipped tokens", "share whose ratio left the clip range", {"clip_low": "below", "clip_high": "above"}, None),
    ("Zero-variance groups", "share of groups with one reward only", {"frac_zero_std": "frac_zero_std"}, None),
    ("Completion length", "tokens", {"length": "length"}, None),
    ("Cut off", "share of completions that hit their limit", {"hit_limit": "hit_limit"}, None),
    ("Learning rate", "lowered when the run goes back to a good state", {"lr": "lr"}, None),
    ("Speed", "completion tokens a second", {"tokens_per_second": "tokens a second"}, None),
    ("Time of a step", "seconds", {"rollout seconds": "rollout", "update seconds": "update"}, None),
    ("Sampling against training", "mean difference of logprobs, nats", {"logprob_gap": "gap"}, None),
)  # fmt: skip


def all_panels(runs):
    """PANELS, and before them those of each kind of question, made from the metrics KIND/NAME and KIND/earned/PIECE."""
    rows = [row for run in runs for row in run.rows]
    names = list(dict.fromkeys(name for row in rows for name in row if "/" in name))
    kinds = list(dict.fromkeys(name.split("/")[0] for name in names))
    means = {"reward": "all", "reward_max": "best answer"} | {f"{kind}/reward": kind for kind in kinds}
    yield "Reward", "mean of the batch, of each kind of question, and its best answer", means, None
    for kind in kinds:
        shares, others, earned = {}, {}, {}
        for name in names:
            label = name.removeprefix(f"{kind}/")
            if label == name or label == "reward":
                continue
            is_share = all(not math.isfinite(value) or 0 <= value <= 1 for _, value in points_of(rows, name))
            group = earned if label.startswith("earned/") else shares if is_share else others
            group[name] = label.removeprefix("earned/")
        yield f"{kind}: pieces of the reward", "what answers were paid for on average", earned, None
        yield f"{kind}: metrics", "shares of answers, or figures from 0 to 1", shares, None
        yield f"{kind}: other metrics", "means over answers", others, None
    yield from PANELS


def points_of(rows, name):
    """[(step, value), ...] where the rows have this metric. Thinning keeps visible what is not finite."""
    points = [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]
    n = math.ceil(len(points) / POINTS) or 1
    chunks = [points[i : i + n] for i in range(0, len(points), n)]
    return [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]


def smooth(points):
    """Means over the last points, ten at most."""
    n = min(10, len(points) // 5) or 1
    windows = [[v for _, v in points[max(0, i - n + 1) : i + 1] if math.isfinite(v)] for i in range(len(points))]
    return [(step, statistics.fmean(w) if math.isfinite(v) else v) for (step, v), w in zip(points, windows)]


def short(value):
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value:,.0f}"


def axis(values):
    """(lowest mark, highest mark, the marks, whether the axis is logarithmic)"""
    low, high = min(values, default=0), max(values, default=1)
    if low > 0 and high > 100 * statistics.median(values):  # an explosion would press all the rest to the ground
        powers = [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        return powers[0], powers[-1], powers[:: math.ceil(len(powers) / 5)], True
    low, high = min(0, low), max(0, high)
    high = high if high > low else low + 1
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step *= next(m for m in (5, 2, 1) if (high - low) / (step * m) >= 2)
    return low, high, [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)], False


def plot(title, about, curves, first, last, limit=None):
    """A figure of curves, [(name, CSS class, points), ...]. Pointing at a step shows its values."""
    finite = [value for *_, points in curves for _, value in points if math.isfinite(value)]
    low, high, marks, log = axis(finite + [limit] * bool(limit))

    def x(step):
        return LEFT + (RIGHT - LEFT) * (step - first) / max(1, last - first)

    def y(value):
        return BOTTOM - (BOTTOM - TOP) * (math.log(value / low, high / low) if log else (value - low) / (high - low))

    def path(points):
        d, pen = "", "M{:.1f} {:.1f}h0"  # with a gap at what is not finite, and a dot for a point by itself
        for step, value in points:
            d += pen.format(x(step), y(value)) if math.isfinite(value) else ""
            pen = "L{:.1f} {:.1f}" if math.isfinite(value) else "M{:.1f} {:.1f}h0"
        return d

    svg, legend = "", ""
    for mark in marks:
        svg += f'<path class="axis" d="M{LEFT} {y(mark):.1f}H{RIGHT}"/>'
        svg += f'<text x="{LEFT - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{short(mark)}</text>'
    for name, css, points in curves:
        line = smooth(points)
        svg += f'<path class="raw {css}" d="{path(points)}"/>' if len(curves) < 5 else ""
        lost = "".join(f"M{x(s) - 4:.1f} {BOTTOM - 8}l8 8m0-8l-8 8" for s, v in points if not math.isfinite(v))
        svg += f'<path class="line {css}" d="{path(line)}"/><path class="lost" d="{lost}"/>'
        start = statistics.fmean(v for _, v in points[: min(10, len(points) // 5) or 1])
        legend += f'<li><i class="{css}"></i>{escape(name)} <b>{short(start)} → {short(line[-1][1])}</b></li>'
    if limit:
        svg += f'<path class="axis limit" d="M{LEFT} {y(limit):.1f}H{RIGHT}"/>'
    values = [(name, dict(points)) for name, _, points in curves]
    steps = sorted({step for _, points in values for step in points})
    for step, edge in zip(steps, [*steps[1:], last + 1]):
        told = [f"step {step}", *(f"{name} {short(points[step])}" for name, points in values if step in points)]
        svg += f'<rect x="{x(step) - 1:.1f}" y="{TOP}" width="{x(edge) - x(step):.1f}" height="{BOTTOM - TOP}">'
        svg += f"<title>{escape(chr(10).join(told))}</title></rect>"
    svg += f'<text x="{LEFT}" y="{BOTTOM + 16}">step {first}</text>'
    svg += f'<text x="{RIGHT}" y="{BOTTOM + 16}" text-anchor="end">{last}</text>'
    return (
        f'<figure class="plot"><h3>{escape(title)}</h3><figcaption>{escape(about)}</figcaption>'
        f'<svg viewBox="0 0 360 {BOTTOM + 22}" role="img" aria-label="{escape(title)}">{svg}</svg>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def all_plots(runs):
    first, last = min(run.rows[0]["step"] for run in runs), max(run.rows[-1]["step"] for run in runs)
    figures = ""
    for title, about, metrics, setting in all_panels(runs):
        curves = [
            (run.label + label, f"c{i % 12}" + " dashed" * (run.label == "B "), points)
            for i, (name, label) in enumerate(metrics.items())
            for run in runs
            if (points := points_of(run.rows, name))
        ]
        figures += plot(title, about, curves, first, last, runs[0].settings.get(setting)) if curves else ""
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def judged(sample):
    """{(start, end): [(name, value), ...]}, what the pieces of a reward pay for each part of the answer."""
    parts = {}
    for name, value, place in sample["pieces"]:
        if place:
            parts.setdefault(tuple(place), []).append((name, value))
    return parts


def paid(pieces):
    return sum(value for _, value in pieces)


def marked(sample, most):
    """The answer, each part coloured by what it earned of the most that any answer shown here earns for it."""
    text, parts = sample["completion"], judged(sample)
    cuts = sorted({0, len(text), *(min(len(text), cut) for place in parts for cut in place)})
    page = ""
    for start, end in zip(cuts, cuts[1:]):
        places = [place for place in parts if place[0] <= start and end <= place[1]]
        part = escape(text[start:end])
        if places:
            pieces = parts[min(places, key=lambda place: place[1] - place[0])]  # the innermost says most about it
            share = paid(pieces) / (most[sample["kind"], pieces[0][0]] or 1)
            told = "\n".join(f"{name} {value:.3f}" for place in places for name, value in parts[place])
            part = f'<mark style="--share:{max(0, min(1, share)):.0%}" title="{escape(told)}">{part}</mark>'
        page += part
    return f"<pre>{page}</pre>"


def piece_table(stages):
    """What each piece paid; "candidates 3" is one of several of that name."""
    sums = []
    for _, sample in stages:
        sums.append({"reward": sample["reward"]})
        for name, value, _ in sample["pieces"]:
            sums[-1][f"· {name.split(' ')[0]}"] = sums[-1].get(f"· {name.split(' ')[0]}", 0) + value
    names = dict.fromkeys(name for paid in sums for name in paid)
    rows = [(escape(name), *(f"{paid[name]:.3f}" if name in paid else "–" for paid in sums)) for name in names]
    return table(("", *(escape(title) for title, _ in stages)), rows)


def card(stages, most):
    """A question, and the answers to it at each stage, [(title, sample), ...]."""
    sample = stages[0][1]
    question, answers = pictures([sample for _, sample in stages])
    figures = f"<figure>{question}<figcaption>asked</figcaption></figure>" if question else ""
    for (title, one), picture in zip(stages, answers):
        told = f"<b>{escape(title)}</b> · reward {one['reward']:.3f}"
        figures += f"<figure>{picture}<figcaption>{told}</figcaption>{marked(one, most)}</figure>"
    truth = f"truth: {json.dumps(sample['truth'], ensure_ascii=False)}"
    return (
        f'<article class="card"><pre class="prompt">{escape(sample["prompt"].strip())}</pre>'
        f'<p class="truth">{escape(truth)}</p><div class="answers">{figures}{piece_table(stages)}</div></article>'
    )


def cards(runs):
    """Questions of each kind, those with the lowest last reward first."""
    questions, most, page = {}, {}, ""
    for run in runs:
        for title, stage in run.stages:
            for question, sample in stage.items():
                questions.setdefault(question, []).append((run.label + title, sample))
                for pieces in judged(sample).values():
                    key = sample["kind"], pieces[0][0]
                    most[key] = max(most.get(key, 0), paid(pieces))
    order = sorted(questions, key=lambda question: (question[0], questions[question][-1][1]["reward"]))
    for kind, group in groupby(order, lambda question: question[0]):
        group = list(group)
        page += f"<details open><summary>{escape(kind)}: {len(group)} questions, lowest reward first</summary>"
        page += "".join(card(questions[question], most) for question in group) + "</details>"
    return page


# ---------------------------------------------------------------------------------------------------------------------
# Chess boards


def pictures(samples):
    """(a picture of the question, one for each answer), all of them "" where the question is not about chess."""
    fen, *asked = samples[0]["prompt"][3:].strip().split("+")
    try:
        board = chess.Board(contract_board(fen))
    except ValueError:
        board = None
    if board is None or samples[0]["kind"] not in ("policy", "environment"):
        return "", [""] * len(samples)
    if samples[0]["kind"] == "policy":
        return "", [draw(board, board.turn, policy_arrows(board, sample)) for sample in samples]
    true, illegal = pieces_of(samples[0]["truth"][0]), samples[0]["truth"][3]
    answers = []
    for sample in samples:
        fields = parse_environment(sample["completion"])
        said = pieces_of(fields[0][0]) if fields else {}
        wrong = [square for square in chess.SQUARES if said.get(square) != true.get(square)]
        answers.append(draw(said, board.turn, (), wrong))
    return draw(board, board.turn, [(asked[0], "illegal" if illegal else "best")]), answers


def policy_arrows(board, sample):
    """The moves of an answer and how good each is; the one that is played comes last, as it is drawn on top."""
    _, answer = parse_policy(sample["completion"])
    if not answer:
        return []
    legal, five = {move.uci() for move in board.legal_moves}, dict(sample["truth"][:5])

    def quality(uci):
        if uci not in five:
            return "legal" if uci in legal else "illegal"
        return "best" if five[uci] == max(five.values()) else "five"

    moves, _, (best, _), _ = answer
    return [(uci, f"{quality(uci)} faint") for uci, _ in moves if uci != best] + [(best, quality(best))]


def pieces_of(fen):
    """{square: piece} of any text that should start with a board, as far as its pieces stand on one."""
    pieces = {}
    for rank, row in enumerate(fen.split(" ")[0].split("/")[:8]):
        row = "".join("." * int(letter) if letter in "12345678" else letter for letter in row)
        for file, letter in enumerate(row[:8]):
            if letter in "pnbrqkPNBRQK":
                pieces[chess.square(file, 7 - rank)] = chess.Piece.from_symbol(letter)
    return pieces


def draw(board, turn, arrows=(), wrong=()):
    """A board, or {square: piece}, seen by the side to move. Squares and shapes of pieces are in the page once."""

    def corner(square):
        column, row = chess.square_file(square), 7 - chess.square_rank(square)
        return (45 * column, 45 * row) if turn else (315 - 45 * column, 315 - 45 * row)

    pieces = board.piece_map() if isinstance(board, chess.Board) else board
    svg = '<use href="#squares"/>'
    for square in wrong:
        svg += '<rect class="wrong" x="{}" y="{}" width="45" height="45"/>'.format(*corner(square))
    for square, piece in pieces.items():
        name = f"{chess.COLOR_NAMES[piece.color]}-{chess.piece_name(piece.piece_type)}"
        svg += '<use href="#{}" x="{}" y="{}"/>'.format(name, *corner(square))
    for uci, css in arrows:
        (x0, y0), (x1, y1) = (corner(chess.parse_square(square)) for square in (uci[:2], uci[2:4]))
        svg += f'<g class="arrow {css}"><path d="M{x0 + 22.5} {y0 + 22.5}L{x1 + 22.5} {y1 + 22.5}"/>'
        svg += f'<circle cx="{x1 + 22.5}" cy="{y1 + 22.5}" r="9"/><title>{escape(uci)}</title></g>'
    return f'<svg class="board" viewBox="0 0 360 360" role="img" aria-label="a chess board">{svg}</svg>'


def shapes():
    dark = "".join(f"M{45 * (i % 8)} {45 * (i // 8)}h45v45h-45z" for i in range(64) if (i % 8 + i // 8) % 2)
    squares = f'<g id="squares"><path class="light" d="M0 0h360v360H0z"/><path class="dark" d="{dark}"/></g>'
    return squares + "".join(chess.svg.PIECES.values())


# ---------------------------------------------------------------------------------------------------------------------


def write(folder, other=None):
    """Writes folder/report.html, of one run or of two side by side, and returns its path."""
    runs = [read_run(folder, "")] if other is None else [read_run(folder, "A "), read_run(other, "B ")]
    samples = cards(runs)
    template = Template(Path(__file__).with_suffix(".html").read_text())
    page = template.substitute(  # in one pass: what is put in is not looked at again
        title=escape(" beside ".join(run.name for run in runs)), head="".join(map(head, runs)), settings=settings(runs),
        open="open" if other else "", states="".join(map(states, runs)), plots=all_plots(runs), skill=skill_table(runs),
        samples=samples, shapes=shapes() if 'class="board"' in samples else "",
    )  # fmt: skip
    path = Path(folder, "report.html")
    path.write_text(page, errors="replace")  # a completion may hold half a surrogate pair
    return path


def main():
    p = argparse.ArgumentParser("python -m tools.report", description=__doc__)
    p.add_argument("folder", help="the OUT_DIR of a run; report.html is written into it")
    p.add_argument("other", nargs="?", help="the OUT_DIR of another run, shown beside it")
    a = p.parse_args()
    print(write(a.folder, a.other))


if __name__ == "__main__":
    main()
