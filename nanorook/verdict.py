"""The outcome of a run in a few sentences, with which train.py's output ends and the report begins."""

import json
import math
import shlex
import textwrap
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from nanorook.statistics import beyond_chance, gain, interval, is_share
from nanorook.tables import measure_and_way
from nanorook.task import kinds_of

WINDOW = 10  # training steps whose mean reward is compared


def read(path):
    """The objects in a file, one in each line of a .jsonl, without lines that a killed run has cut short."""
    text, found = path.read_text(errors="replace") if path.is_file() else "", []
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        try:
            found.append(dict(json.loads(part)))
        except (ValueError, TypeError, RecursionError):
            continue
    return found


def objects(out, *names):
    """The object in each of a run's files NAME.json, empty where it is missing or damaged."""
    return ((read(out / f"{name}.json") or [{}])[0] for name in names)


def verdict(out):
    """About five lines on the run in this folder, of which the first begins with "● " and a state: red if it
    collapsed or no answer got one, green if something improved and no reward fell (unless the run is a control), and
    yellow otherwise."""
    out = Path(out)
    settings, skill, about = objects(out, "settings", "skill", "run")
    names = about.get("names", {})
    rows = [row for row in read(out / "metrics.jsonl") if "seconds" in row]
    if not rows or not skill:
        return ["● yellow  The run has not made a step yet."]
    titles = [*skill]  # one or several
    first, last = skill[titles[0]], skill[titles[-1]]
    kinds = list(dict.fromkeys(kind for row in rows for kind in kinds_of(row)))  # a small step may lack a kind
    gains = {name: gain(first[name][2], last[name][2]) for name in last if name in first and len(skill) > 1}
    changed = [name for name in beyond_chance(gains) if more_is_better(name, first, last)]
    rose = [name for name in changed if gains[name][0] > 0]
    fell = [name for name in changed if gains[name][0] < 0]
    unpaid = [kind for kind in kinds if max(row.get(f"{kind}/reward_max", -math.inf) for row in rows) <= 0]
    asked = sum(len(figure[2]) for name, figure in first.items() if name.endswith(" reward T=0"))

    control = settings.get("CONTROL", "none") != "none"  # a control that learns something is not good news
    state = "yellow" if control or not rose or any(" reward " in name for name in fell) else "green"
    if unpaid == kinds:
        state, headline = "red", f"No answer got a reward in {len(rows)} steps: {why_unpaid(rows, kinds)}."
    elif rose:
        headline = f"Improved on {asked} held-out questions: {in_words(rose, first, last, gains, names)}."
        headline += " This is a control, whose rewards carry no information, so the reward did not cause it." * control
    elif len(skill) == 1:
        (before, _), (after, _) = training_rewards(rows)
        headline = ("The model was evaluated only before the run; in training the reward went from "
                    f"{before:.2f} to {after:.2f}.")  # fmt: skip
    else:
        reason = why_nothing(rows, kinds, first, settings, gains)
        headline = f"Nothing improved on {asked} held-out questions: {reason}."
    lines = [headline]
    if found := collapse(skill, kinds):
        kind, peak, when, end = found
        state, lower = "red", f"Lower LR from {settings['LR']:g} to {settings['LR'] / 10:g}"
        sentence = (f"The {kind} reward collapsed: it was {peak:.2f} {when} and is {end:.2f} at the end. "
                    f"{lower}, or raise KL_COEF (now {settings['KL_COEF']:g}).")  # fmt: skip
        lines = [sentence, headline] if rose else [sentence]
    if fell:
        lines.append(f"Got worse: {in_words(fell, first, last, gains, names)}.")
    elif gains:
        lines.append("Nothing got significantly worse.")
    if unpaid and unpaid != kinds:
        lines.append(f"No answer to {' or '.join(unpaid)} questions got a reward: {why_unpaid(rows, unpaid)}.")
    answers = sum(round(row["tokens"] / max(row["length"], 1e-9)) for row in rows)
    spent = timedelta(seconds=round(sum(sum(row["seconds"].values()) for row in rows)))
    steps, asked = f"{rows[-1]['step']}", ""
    if titles[-1] != "after":
        steps += f" of {settings.get('STEPS', '?')}"
        asked = f"; last evaluated {when_asked(titles[-1])}"
    lines.append(f"Cost: {steps} steps, {answers:,} answers, {spent} excluding evaluations{asked}.")
    folder = shlex.quote(str(out))
    lines.append(f"Next: {folder}/report.html has the curves and answers; python -m tools.evaluate {folder} prints "
                 f"all metrics; python -m tools.ask {folder}/model shows answers to your questions.")  # fmt: skip
    return [f"● {state}  {lines[0]}", *lines[1:]]


def in_lines(sentences):
    """A verdict for a terminal, without breaking paths and commands, which are to be copied."""
    whole = dict(break_on_hyphens=False, break_long_words=False)
    return "\n".join(textwrap.fill(sentence, 110, subsequent_indent="  ", **whole) for sentence in sentences)


def when_asked(title):
    return "before the run" if title == "before" else f"at {title}"


def more_is_better(name, *skills):
    """Whether more of a figure is better: of a reward, or of a metric that is a share."""
    return " reward " in name or all(is_share(name, skill[name][2]) for skill in skills)


def in_words(figures, first, last, gains, names, most=3):
    """The changes of these figures, greedy and sampled ones of a measure together: those that the task names first,
    then the largest."""
    ranks = {measure: rank for rank, measure in enumerate(names)}
    ordered = sorted(figures, key=lambda name: -abs(gains[name][0]))
    ordered.sort(key=lambda name: ranks.get(measure_and_way(name)[0], len(ranks)))
    by_measure = {}
    for name in ordered:
        measure, way = measure_and_way(name)
        if way != "pass@1":  # which are the sampled answers once more
            by_measure.setdefault(measure, []).append(f"{way} {change(name, first, last, gains)}")
    items = [f"{names.get(measure, measure)}, {', '.join(texts)}" for measure, texts in by_measure.items()]
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def change(name, first, last, gains):
    """A figure before and after: "20.3 → 31.7 % (+11.3 ± 2.3)"."""
    is_share = " reward " not in name
    scale, unit = (100, " %") if is_share else (1, "")
    before, after, mean, half = (scale * x for x in (first[name][0], last[name][0], *gains[name][:2]))
    digits = 1 if is_share or abs(mean) >= 10 else 2
    return f"{before:.{digits}f} → {after:.{digits}f}{unit} ({mean:+.{digits}f} ± {half:.{digits}f})"


def collapse(skill, kinds):
    """(kind, its highest mean reward in an evaluation, when, the last one) if less than half is left of a reward that
    sampled answers once earned, beyond chance; None if no kind has lost so much."""
    for kind in kinds:
        seen = []
        for title, figures in skill.items():
            sampled = [name for name in figures if name.startswith(f"{kind} reward T=") and not name.endswith("T=0")]
            seen += [(when_asked(title), *figures[name][:2]) for name in sampled]
        when, peak, half = max(seen, key=lambda item: item[1] - item[2], default=("", 0, 0))
        if peak - half > 0 and seen[-1][1] + seen[-1][2] < (peak - half) / 2:
            return kind, peak, when, seen[-1][1]
    return None


def training_rewards(rows):
    """The means over the first and over the last steps, with their intervals."""
    return [interval([row["reward"] for row in part]) for part in (rows[:WINDOW], rows[-WINDOW:])]


def why_unpaid(rows, kinds):
    """The likely reason why answers to these kinds of questions earn nothing."""

    def mean(name, default):
        values = [row[f"{kind}/{name}"] for row in rows for kind in kinds if f"{kind}/{name}" in row]
        return fmean(values or [default])

    if mean("hit_limit", 0) > 0.5:
        return f"{mean('hit_limit', 0):.0%} of them were cut off, so raise MAX_NEW_TOKENS, or the task's LIMITS"
    if mean("structure", 1) < 0.5:
        return f"only {mean('structure', 1):.0%} of them were well-formed, so teach the start model the form first"
    return "the questions are too hard, or the task's grade caps the reward; tools.ask shows single rewards"


def why_nothing(rows, kinds, first, settings, gains):
    """The likely reason why no held-out figure rose."""
    if settings.get("CONTROL", "none") != "none":
        return "the rewards carried no information, as CONTROL requests"
    (before, before_half), (after, after_half) = training_rewards(rows)
    if max(row.get("reward_std", 1) for row in rows) < 1e-6 and after < 0.95:
        return f"every answer got the same reward ({after:.3g}), so check grade for a cap"
    if all(first.get(f"{kind} reward T=0", (0,))[0] > 0.95 for kind in kinds):
        return "the start model's most likely answers are right already"
    alike = fmean(row["frac_zero_std"] for row in rows)
    if alike > 0.8:
        return (f"in {alike:.0%} of the groups all answers got the same reward, so raise TEMPERATURE or GROUP_SIZE, or "
                "let grade give partial credit")  # fmt: skip
    if after - before > before_half + after_half:
        return (f"the reward rose from {before:.2f} to {after:.2f} on training questions only, so train on more of "
                "them, or raise EVAL_POSITIONS")  # fmt: skip
    half = max((half for name, (_, half, _) in gains.items() if " reward " in name), default=math.inf)
    return f"a gain in reward of less than {half:.2g} would go unnoticed; raise STEPS, LR or EVAL_POSITIONS"
