"""What a run leaves in its folder: records, status, checkpoints, saved plans."""
