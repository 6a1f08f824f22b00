"""Claims with their figures, run as python -m experiments.NAME."""

import tools  # noqa: F401, for how its programs end
