"""Attention by products and a softmax, in slices of entries."""
