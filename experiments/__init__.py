"""Experiments with their recorded figures, one for each claim; run as python -m experiments.NAME."""

import tools  # noqa: F401, for how its programs end
