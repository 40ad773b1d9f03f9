"""What becomes of runs: agents, evaluations, films, lists and comparisons."""
