"""The figures behind the tables of the documentation, as tools.sweep records them, and what writes these tables."""
