"""Captures whose sizes are symbols."""
