"""How planned steps run: from a call of a fitted model to its two graphs, in order."""
