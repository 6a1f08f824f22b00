"""Programs that go with training, run as python -m tools.NAME."""

import os
import sys


def show(kind, error, traceback):
    """Prints nothing if the user has ended the program, by Ctrl-C or as in `| head`."""
    if kind is BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python writes as it exits
    elif kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = show
