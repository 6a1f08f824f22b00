"""The outcome of a run in a few sentences: they end train.py's output, begin the report and are on the model's card."""

import json
import math
import shlex
import textwrap
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from nanorook.statistics import beyond_chance, gain, interval, is_share, known
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
    titles = [*skill]
    title = titles[-1]
    first, last = skill[titles[0]], skill[title]  # the same one where there is only one evaluation
    kinds = list(dict.fromkeys(kind for row in rows for kind in kinds_of(row)))  # a small step may lack a kind
    gains = {name: gain(first[name][2], last[name][2]) for name in last if name in first and first is not last}
    changed = {name: gains[name][0] for name in beyond_chance(gains)}
    shares = [name for name in changed if more_is_better(name, first, last)]
    rose, fell = ([name for name in shares if sign * changed[name] > 0] for sign in (1, -1))
    unpaid = [kind for kind in kinds if max(row.get(f"{kind}/reward_max", -math.inf) for row in rows) <= 0]
    asked, before = (
        sum(len(figure[2]) for name, figure in skills.items() if name.endswith(" reward T=0"))
        for skills in (last, first)
    )
    questions = f"{asked} held-out questions" + f" ({before} before the run)" * (asked != before)

    control = settings.get("CONTROL", "none") != "none"  # a control that learns something is not good news
    state = "yellow" if control or not rose or any(" reward " in name for name in fell) else "green"
    if unpaid == kinds:
        state, headline = "red", f"No answer got a reward in {len(rows)} steps: {why_unpaid(rows, kinds)}."
    elif rose:
        headline = f"Improved on {questions}: {in_words(rose, first, last, gains, names)}."
        headline += " This is a control, whose rewards carry no information, so the reward did not cause it." * control
    elif len(skill) == 1:
        before, after = (fmean(row["reward"] for row in part) for part in (rows[:WINDOW], rows[-WINDOW:]))
        headline = ("The model was evaluated only before the run; in training the reward went from "
                    f"{before:.2f} to {after:.2f}.")  # fmt: skip
    else:
        reason = why_nothing(rows, kinds, first, settings, gains)
        headline = f"Nothing improved on {questions}: {reason}."
    lines = [headline]
    if found := collapse(rows, skill, kinds):
        kind, peak, when, end = found
        state = "red"
        collapsed = (f"The {kind} reward collapsed: it was {peak:.2f} {when} and is {end:.2f} at the end. Lower LR "
                     f"from {settings['LR']:g} to {settings['LR'] / 10:g}, or raise KL_COEF "
                     f"(now {settings['KL_COEF']:g}).")  # fmt: skip
        lines = [collapsed, headline] if rose else [collapsed]
    if fell:
        lines.append(f"Got worse: {in_words(fell, first, last, gains, names)}.")
    elif gains:
        lines.append("Nothing got significantly worse.")
    if others := [name for name in changed if name not in shares]:
        lines.append(f"Also changed: {in_words(others, first, last, gains, names)}.")
    if unpaid and unpaid != kinds:
        lines.append(f"No answer to {' or '.join(unpaid)} questions got a reward: {why_unpaid(rows, unpaid)}.")
    if right := already_right(first, kinds):
        lines.append(f"The most likely answers to {' and '.join(right)} questions were right before the run, so greedy "
                     "answers had nothing to gain there; only sampled ones could improve.")  # fmt: skip
    answers = sum(round(row["tokens"] / max(row["length"], 1e-9)) for row in rows)
    spent = timedelta(seconds=round(sum(sum(row["seconds"].values()) for row in rows)))
    steps, evaluated = f"{rows[-1]['step']}", ""
    if title != "after":
        steps += f" of {settings.get('STEPS', '?')}"
        evaluated = f"; last evaluated {when_asked(title)}"
    lines.append(f"Cost: {steps} steps, {answers:,} answers, {spent} excluding evaluations{evaluated}.")
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


def in_words(chosen, first, last, gains, names, most=3):
    """The changes of the chosen figures, greedy and sampled ones of a measure together: those that the task names
    first, then the largest."""
    ranks = {measure: rank for rank, measure in enumerate(names)}
    ordered = sorted(chosen, key=lambda name: -abs(gains[name][0]))
    ordered.sort(key=lambda name: ranks.get(measure_and_way(name)[0], len(ranks)))
    seen, by_measure = {measure_and_way(name) for name in chosen}, {}
    for name in ordered:
        measure, way = measure_and_way(name)
        if way != "pass@1" or (measure, "sampled") not in seen:  # otherwise it is the sampled answers once more
            by_measure.setdefault(measure, []).append(f"{way} {change(name, first, last, gains)}")
    items = [f"{names.get(measure, measure)}, {', '.join(texts)}" for measure, texts in by_measure.items()]
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def change(name, first, last, gains):
    """A figure before and after: "20.3 → 31.7 % (+11.3 ± 2.3)"."""
    in_percent = more_is_better(name, first, last) and " reward " not in name
    scale, unit = (100, " %") if in_percent else (1, "")
    before, after, mean, half = (scale * x for x in (first[name][0], last[name][0], *gains[name][:2]))
    digits = 1 if in_percent or abs(mean) >= 10 else 2
    return f"{before:.{digits}f} → {after:.{digits}f}{unit} ({mean:+.{digits}f} ± {half:.{digits}f})"


def collapse(rows, skill, kinds):
    """(kind, its highest mean reward, when, the last) if less than half is left of a reward that was once earned,
    beyond chance; None if no kind has lost so much."""
    for kind in kinds:
        parts = [rows[i : i + WINDOW] for i in range(0, len(rows) - WINDOW + 1, WINDOW)]
        trained = [(f"around step {part[-1]['step']}", [row.get(f"{kind}/reward") for row in part]) for part in parts]
        asked = [(when_asked(title), values)
                 for title, skills in skill.items() for name, (_, _, values) in skills.items()
                 if name.startswith(f"{kind} reward T=") and not name.endswith("T=0")]  # fmt: skip
        for seen in trained, asked:  # each by itself, as held-out questions may always have earned less
            seen = [(when, *interval(known(values))) for when, values in seen if known(values)]
            when, peak, half = max(seen, key=lambda item: item[1] - item[2], default=("", 0, 0))
            _, end, end_half = [("", 0, 0), *seen][-1]
            if peak - half > 0 and end + end_half < (peak - half) / 2:
                return kind, peak, when, end
    return None


def already_right(first, kinds):
    return [kind for kind in kinds if first.get(f"{kind} reward T=0", (0,))[0] > 0.95]


def why_unpaid(rows, kinds):
    """The likely reason why answers to these kinds of questions earn nothing."""
    cut, form = (fmean([row[f"{k}/{name}"] for row in rows for k in kinds if f"{k}/{name}" in row] or [1 - bad])
                 for name, bad in (("hit_limit", 1), ("structure", 0)))  # fmt: skip
    if cut > 0.5:
        return f"{cut:.0%} of them were cut off, so raise MAX_NEW_TOKENS, or the task's LIMITS"
    if form < 0.5:
        return f"only {form:.0%} of them were well-formed, so teach the start model the form first"
    return "the questions are too hard, or the task's grade caps the reward; tools.ask shows single rewards"


def why_nothing(rows, kinds, first, settings, gains):
    """The likely reason why no held-out figure rose."""
    alike = fmean(row["frac_zero_std"] for row in rows)
    half = max((half for name, (_, half, _) in gains.items() if " reward " in name), default=math.inf)
    ends = [[row["reward"] for row in part] for part in (rows[:WINDOW], rows[-WINDOW:])]
    (before, _), (after, _) = map(interval, ends)
    halves = sum(interval(part)[1] for part in ends)
    skipped = sum(row["skipped"] > 0 for row in rows)
    for applies, reason in (
        (settings.get("CONTROL", "none") != "none", "the rewards carried no information, as CONTROL requests"),
        (skipped > len(rows) / 2, f"{skipped} of {len(rows)} updates were skipped, so lower LR"),
        (max(row.get("reward_std", 1) for row in rows) < 1e-6 and after < 0.95,
         f"every answer got the same reward ({after:.3g}), so remove the cap if the task's grade has one, or give "
         "partial credit"),
        (already_right(first, kinds) == kinds, "the start model's most likely answers are right already"),
        (alike > 0.8, f"in {alike:.0%} of the groups all answers got the same reward, so raise TEMPERATURE or "
                      "GROUP_SIZE, or let grade give partial credit"),
        (after - before > halves, f"the reward rose from {before:.2f} to {after:.2f} on training questions only, so "
                                  "train on more of them, or raise EVAL_POSITIONS"),
        (before - after > halves, "the reward fell in training, so lower LR or raise KL_COEF"),
    ):  # fmt: skip
        if applies:
            return reason
    seen = "" if half == math.inf else f"a gain in reward of less than {half:.2g} would go unnoticed"
    return f"{seen or 'too few questions were evaluated'}; raise STEPS, LR or EVAL_POSITIONS"


def card(out, lines):
    """README.md of the trained model, with its verdict."""
    settings, about = objects(out, "settings", "run")
    what = "".join(f"- {line}\n" for line in lines[:-1])  # the last one is about folders of this machine
    return f"""---
library_name: transformers
tags: [grpo, nanorook]
---
# A model trained with GRPO

Trained by nanorook (commit {about.get("commit")}) on {about.get("machine")}, {about.get("started")}.

- Task: {settings.get("TASK")}
- Data: {settings.get("DATA")}
- Start model: {settings.get("MODEL") or "the task's own"}
- Command: `{about.get("command")}`

## Verdict

{what}
## Use

    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("PATH OF THIS FOLDER")

From nanorook's folder, `TASK={settings.get("TASK")} python -m tools.ask PATH "a question"` asks it, and grades the
answers if the task has a function `question`.
"""
