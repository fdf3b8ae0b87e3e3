"""Planners as their authors describe them."""
