"""Chains: programs, or parts of them, whose ops each read what the one before made."""
