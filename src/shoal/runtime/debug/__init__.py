"""Checking and explaining runs: reference, verify, blame, record and replay."""
