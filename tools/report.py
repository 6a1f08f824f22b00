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
from itertools import accumulate, groupby
from pathlib import Path
from string import Template
from typing import NamedTuple

import chess
import chess.svg

import rewards
import tasks
from data import DataError

CARDS = 100  # positions on the page: the worst and the best, when there are more
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
FIELDS = "to move", "castling", "en passant", "half-moves", "move", "reward", "terminated", "truncated"

# How good a move is: its colour on the board (the same in both themes), its mark and its meaning in the text.
QUALITIES = {
    "best": ("#15803d", "★", "the engine's best"),
    "five": ("#2563eb", "●", "in the engine's five"),
    "legal": ("#d97706", "○", "legal"),
    "illegal": ("#dc2626", "✕", "illegal"),
}
BOARD = {"square light": "#efe9dd", "square dark": "#bfb29c", "margin": "#00000000", "coord": "#8a8f99"}


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
# Curves


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


# ---------------------------------------------------------------------------------------------------------------------
# What was run, how it went, what was learnt


def table(head, rows, css=""):
    """Cells are HTML; a row is its name and its cells, and a row without cells is a heading."""
    head = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        if cells else f'<tr><th class="heading" colspan="9">{name}</th></tr>'
        for name, *cells in rows
    )  # fmt: skip
    return f'<div class="scroll"><table class="{css}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def span(css, text):
    return f'<span class="{css}">{escape(text)}</span>'


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
# Boards


def board_svg(board, turn, told, arrows=(), wrong=()):
    """python-chess's board without its pieces, squares and coordinates: those are in the page once, for all boards."""
    fill = dict.fromkeys(wrong, "#dc262699")
    svg = chess.svg.board(board, orientation=turn, arrows=arrows, fill=fill, colors=BOARD)
    own = re.sub(
        r'<svg .*?>|<desc>.*?</desc>|<defs>.*?</defs>|<g .*?</g>|<rect [^>]*(class="square|stroke-width)[^>]*>'
        r'|xlink:href="[^"]*" ', "", svg, flags=re.DOTALL,
    )  # fmt: skip
    label = escape(f"{told} {board.board_fen()}")
    return f'<svg class="board" viewBox="0 0 390 390" role="img" aria-label="{label}"><use href="#board-{turn}"/>{own}'


def shared_parts():
    page = "".join(chess.svg.PIECES.values())
    for turn in chess.COLORS:
        empty = re.sub("</?svg.*?>|<defs.*?/>", "", chess.svg.board(None, orientation=turn, colors=BOARD))
        page += f'<g id="board-{turn}">{empty}</g>'
    return page


def quality(uci, sample):
    if uci not in rewards.legal_moves(sample["prompt"]):
        return "illegal"
    five = dict(sorted(sample["labels"] or (), key=lambda move: -move[1])[:5])
    return "legal" if uci not in five else "best" if five[uci] == max(five.values()) else "five"


def arrow(uci, colour):
    return chess.svg.Arrow(chess.parse_square(uci[:2]), chess.parse_square(uci[2:4]), color=colour)


def figure(picture, title, told, samples=()):
    if samples:
        title = f"{title}</b> · reward {statistics.fmean(s['reward'] for s in samples):.2f}<b>"
        told += "<br>cut off at its limit" * any(s["parts"].get("runaway") for s in samples)
    said = "".join(f"<pre>{escape(s['completion'].strip())}</pre>" for s in samples)
    return f"<figure>{picture}<figcaption><b>{title}</b><br>{told}</figcaption>{said}</figure>"


def policy_figure(title, samples):
    """The position with the moves of all its completions: those played in full colour, the other candidates faint."""
    board, sample = chess.Board(tasks.contract(samples[0]["prompt"][3:].strip())), samples[0]
    answers = [answer for s in samples if (answer := rewards.read_policy(s["completion"])[1])]
    played = {answer[2]: quality(answer[2], sample) for answer in answers}
    listed = {uci: quality(uci, sample) for answer in answers for uci in answer[0] if uci not in played}
    arrows = [arrow(uci, QUALITIES[good][0] + "58") for uci, good in listed.items()]
    arrows += [arrow(uci, QUALITIES[good][0] + "e8") for uci, good in played.items()]
    told = "".join(
        f"plays {span(good, f'{QUALITIES[good][1]} {uci}')} {QUALITIES[good][2]}<br>" for uci, good in played.items()
    ) + " ".join(span(good, f"{QUALITIES[good][1]} {uci}") for uci, good in listed.items())  # fmt: skip
    label = f"{title}: {', '.join(f'{uci} is {QUALITIES[good][2]}' for uci, good in played.items())}."
    return figure(board_svg(board, board.turn, label, arrows), title, told or "no move that can be read", samples)


def read_board(fen):
    """The pieces of any text that should start with a board, as far as they stand on one."""
    board = chess.BaseBoard.empty()
    for rank, row in enumerate(fen.split(" ")[0].split("/")[:8]):
        row = re.sub("[1-8]", lambda digit: "." * int(digit[0]), row)
        for file, letter in enumerate(row[:8]):
            if letter in "pnbrqkPNBRQK":
                board.set_piece_at(chess.square(file, 7 - rank), chess.Piece.from_symbol(letter))
    return board


def environment_figures(prompt, known):
    """What was asked, what is true, and the model's next boards with the squares marked that are wrong."""
    fen, move, *_ = prompt[3:].split("+")
    board, (true_fen, *_, illegal) = chess.Board(tasks.contract(fen)), truth(known[0][1][0])
    true = read_board(true_fen)
    asked = [arrow(move, QUALITIES["illegal" if illegal else "best"][0] + "e8")]
    told = f"{move} is {'illegal' if illegal else 'legal'}"
    page = figure(board_svg(board, board.turn, f"Asked: {told}.", asked), "asked", told)
    page += figure(board_svg(true, board.turn, "The true next board."), "truth", "what the rules say")
    for title, sample in ((title, sample) for title, samples in known for sample in samples):
        answer = rewards.read_environment(sample["completion"])
        said = read_board(answer[0]) if answer else chess.BaseBoard.empty()
        wrong = [square for square in chess.SQUARES if said.piece_at(square) != true.piece_at(square)]
        told = f"{len(wrong)} wrong squares" if wrong else "every square is right"
        told = told if answer else "an answer that cannot be read"
        page += figure(board_svg(said, board.turn, f"{title}: {told}.", (), wrong), title, told, [sample])
    return page


def truth(sample):
    return sample["labels"] or rewards.truth(sample["prompt"])


def field_rows(known):
    """Everything but the board, as said and as it should be."""
    answers = [truth(known[0][1][0]), *(rewards.read_environment(samples[0]["completion"]) for _, samples in known)]
    texts = [
        [*(answer[0].split(" ")[1:] + ["–"] * 5)[:5], *(f"{float(value):g}" for value in answer[1:])] if answer
        else ["–"] * len(FIELDS)
        for answer in answers
    ]  # fmt: skip
    for name, true, *said in zip(FIELDS, *texts):
        marks = [span("best", f"{s[:9]} ✓") if s == true else span("illegal", f"{s[:9]} ✕") for s in said]
        yield f"{name} {span('soft', f'is {true}')}", *marks


def part_rows(task, known):
    """What was paid, each with what it could have been, and the parts of a grade that pay nothing themselves."""
    weights = WEIGHTS[task]
    names = dict.fromkeys(name for _, samples in known for sample in samples for name in sample["parts"])
    yield "reward in all", *(f"{statistics.fmean(s['reward'] for s in samples):.3f}" for _, samples in known)
    for name in sorted(names, key=lambda name: "earned/" not in name):
        plain = name.removeprefix("earned/")
        if plain == name and name in weights:
            continue  # what it earned says the same
        cells = []
        for _, samples in known:
            values = [sample["parts"][name] for sample in samples if name in sample["parts"]]
            mean = statistics.fmean(values) if values else None
            share = mean / weights[plain] if values and plain in weights else 0
            text = "–" if mean is None else f"{mean:.2f}"
            cells.append(f'<i class="paid" style="--share:{max(0, min(1, share)):.0%}">{text}</i>')
        most = f" {span('soft', f'of {weights[plain]:g}')}" if plain != name and plain in weights else ""
        yield escape(plain.replace("_", " ")) + most, *cells


def card(prompt, stages):
    """A position: what was asked, what was said at each stage, what that was paid."""
    known = [(escape(title), asked[prompt]) for title, asked in stages if prompt in asked]
    means = [statistics.fmean(sample["reward"] for sample in samples) for _, samples in known]
    board = chess.Board(tasks.contract(prompt[3:].strip().split("+")[0]))
    if prompt[0] == "P":
        boards, rows = "".join(policy_figure(*stage) for stage in known), []
    else:
        boards, rows = environment_figures(prompt, known), [("fields",), *field_rows(known), ("paid for",)]
    return (
        f'<article class="card" data-task="{prompt[0]}" data-reward="{means[-1]}" data-gain="{means[-1] - means[0]}">'
        f"<h3>{'White' if board.turn else 'Black'} to move <code>{escape(board.fen())}</code></h3>"
        f'<div class="boards">{boards}</div>'
        f"{table(('', *(title for title, _ in known)), [*rows, *part_rows(prompt[0], known)])}</article>"
    )


def cards(runs):
    stages = [(run.label + title, asked) for run in runs for title, asked in run.stages]
    last = {prompt: samples for _, asked in stages for prompt, samples in asked.items()}
    order = sorted(last, key=lambda prompt: statistics.fmean(sample["reward"] for sample in last[prompt]))
    if len(order) > CARDS:
        order = order[: CARDS // 2] + order[-CARDS // 2 :]
    return "".join(card(prompt, stages) for prompt in order)


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
