"""Tables for a terminal and for Markdown, and the rows of one that compares evaluations of the same questions."""

from nanorook.statistics import beyond_chance, gain, with_interval


def table(rows, markdown=False):
    """Rows of texts, the heading first, as columns of equal width; all but the first column are right-aligned."""
    widths = [max(3, *map(len, column)) for column in zip(*rows)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure_and_way(name):
    """("mates mate", "greedy") for the figure "mates mate T=0": what is measured, and in which answers."""
    is_exact = name.endswith(" exact")
    measure, _, temperature = name.removesuffix(" exact").partition(" T=")
    if temperature:
        return measure, "greedy" if temperature == "0" else "sampled"
    measure, _, tries = measure.partition(" pass@")
    ways = [f"pass@{tries}"] * bool(tries) + ["exact"] * is_exact
    return measure, ", ".join(ways)


def row_name(name, names):
    """A figure's name for people: "mates found, greedy", where the task's NAMES are {"mates mate": "mates found"}."""
    measure, way = measure_and_way(name)
    return ", ".join(part for part in (names.get(measure, measure), way) if part)


def skill_rows(columns, names):
    """The rows of {title: {figure: (mean, half-width, values of the questions)}}, with the task's NAMES; with several
    columns, also the gain from the first to the last, with a star if it is significant among all rows."""
    skills, several = [*columns.values()], len(columns) > 1
    first, last = skills[0], skills[-1]
    gains = {name: gain(first[name][2], last[name][2]) for name in last if name in first} if several else {}
    significant = beyond_chance(gains)
    rows = [["held-out", *columns, *["gain  "] * several]]
    for name in dict.fromkeys(name for skill in skills for name in skill):
        cells = [with_interval(*skill[name][:2]) if name in skill else "" for skill in skills]
        rows.append([row_name(name, names), *cells])
        if name in gains:
            mean, half, _ = gains[name]
            rows[-1].append(with_interval(mean, half, "+.3f") + (" *" if name in significant else "  "))
        rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    return rows
