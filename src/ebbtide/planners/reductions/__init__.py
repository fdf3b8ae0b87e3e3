"""Smaller problems in place of large ones, each with the way back."""
