"""Tables for a terminal and for Markdown, and the table of two or more evaluations of the same questions."""

import math

from nanorook.statistics import gain, with_interval


def table(rows, markdown=False):
    """Rows of texts, the heading first, as columns of equal width; all but the first column stand to the right."""
    widths = [max(3, *map(len, column)) for column in zip(*rows)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def skill_rows(columns):
    """The rows of {title: {figure: (mean, half-width, values of the questions)}}, and of several columns the gain from
    the first to the last, with a star where it is more than noise: its interval leaves out zero."""
    rows, several = [["held-out skill", *columns, *["gain"] * (len(columns) > 1)]], len(columns) > 1
    for name in dict.fromkeys(name for skill in columns.values() for name in skill):
        figures = [skill.get(name) for skill in columns.values()]
        row = [name, *(with_interval(*figure[:2]) if figure else "" for figure in figures)]
        if several:
            row.append(gain_cell(figures[0], figures[-1]))
        rows.append(row)
    return rows


def gain_cell(first, last):
    if not first or not last:
        return ""
    mean, half = change(first, last)
    return with_interval(mean, half, "+.3f") + (" *" if abs(mean) > half else "  ")


def change(first, last):
    """The gain from one figure to another and the half-width of its interval, question by question if both have values:
    those of runs of an earlier version have none. One value alone has no interval."""
    if len(first) == len(last) == 3 and first[1] + last[1] < math.inf:
        return gain(first[2], last[2])
    return last[0] - first[0], math.hypot(first[1], last[1])
