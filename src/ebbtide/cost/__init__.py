"""Seconds and workspace per op."""
