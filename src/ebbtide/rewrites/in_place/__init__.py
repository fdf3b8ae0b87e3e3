"""Elementwise ops that write over what dies."""
