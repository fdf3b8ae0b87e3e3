"""Losses of linear heads, in slices of rows or columns."""
