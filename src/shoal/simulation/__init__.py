"""Foresees what a plan would do: costs, an analytic estimate, and simulation of events; no JAX."""
