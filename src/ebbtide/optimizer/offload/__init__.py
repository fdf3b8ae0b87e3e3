"""State that is on a slower tier from before the forward until the optimizer steps."""
