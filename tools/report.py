"""Runs as one page that needs no network: python -m tools.report OUT_DIR ... writes OUT_DIR/report.html.

A run writes its own page when it ends; this program writes it at any time, also for a run that was killed. Several runs
are shown side by side, without their answers, in report-with-OTHERS.html in the first one's folder.
"""

import argparse

from nanorook import report
from nanorook.settings import fail


def main():
    p = argparse.ArgumentParser("python -m tools.report", description=__doc__)
    p.add_argument("folder", nargs="+", help="the OUT_DIR of each run; the page is written into the first one")
    folders = p.parse_args().folder
    try:
        print(report.write(*folders))
    except OSError as error:
        fail(f"the page cannot be written: {error}.")


if __name__ == "__main__":
    main()
