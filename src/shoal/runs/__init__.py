"""Runs in their folders: training, records, checkpoints, resuming, loading."""
