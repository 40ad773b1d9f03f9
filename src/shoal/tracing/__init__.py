"""Python to graph: stages, traces, and which values have a row for every environment."""
