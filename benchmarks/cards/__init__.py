"""What ``gpu.py`` measures on a card, written so that the same code runs at toy size on CPU."""
