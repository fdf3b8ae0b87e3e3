"""What an optimizer step takes while it runs, and what a budget needs for that."""
