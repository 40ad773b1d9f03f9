"""Chooses how a loop is distributed: measures its parts, estimates plans, and says why."""
