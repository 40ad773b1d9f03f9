"""Runs in their folders: training, resuming, and the agents that come of them."""
