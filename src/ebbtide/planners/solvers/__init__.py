"""Solvers, each wrapped once."""
