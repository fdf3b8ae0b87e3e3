"""A plan's timeline in formats of other tools, one renderer per format."""
