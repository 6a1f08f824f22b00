"""Supporting code for the five files at the root, for any task."""
