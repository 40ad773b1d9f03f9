"""The mathematics of reinforcement learning: pure functions, one trajectory at a time."""
