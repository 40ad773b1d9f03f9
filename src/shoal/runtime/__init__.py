"""Plan to numbers: programs, channels, workers, and the check against the fused program."""
