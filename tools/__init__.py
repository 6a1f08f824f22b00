"""Programs beside training, run as python -m tools.NAME."""
