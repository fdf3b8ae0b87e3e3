"""Proven lower bounds, on peaks and on overheads."""
