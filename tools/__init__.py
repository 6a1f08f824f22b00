"""Programs beside training, run as python -m tools.NAME. Ctrl-C ends them without a traceback, and so does a reader of
their output that has gone, as in `| head`."""

import atexit
import os
import sys


def show(kind, error, traceback):
    if kind not in (KeyboardInterrupt, BrokenPipeError):
        sys.__excepthook__(kind, error, traceback)


@atexit.register
def flush():
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # Python would try once more, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


sys.excepthook = show
