"""What the five files at the root stand on."""
