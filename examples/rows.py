"""The rows of a file that DATA names, such as questions with their reference answers: JSON lines, or .csv, and both
perhaps with .gz."""

import csv
import gzip
import json
import zlib
from pathlib import Path

from nanorook.settings import fail


def read_rows(file):
    """A dict for each row."""
    file, rows = Path(file), []
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as lines:
            is_csv = file.name.lower().removesuffix(".gz").endswith(".csv")
            found = csv.DictReader(lines) if is_csv else map(json.loads, filter(str.strip, lines))
            for row in found:
                rows.append(row)
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, RecursionError) as error:
        fail(f"{file} cannot be read after row {len(rows)}: {type(error).__name__}: {error}")
    if not all(isinstance(row, dict) for row in rows):
        fail(f"{file}: each line has to be a JSON object.")
    return rows
