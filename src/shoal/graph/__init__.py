"""The graph of a loop: plain data, its rules, and its print."""
