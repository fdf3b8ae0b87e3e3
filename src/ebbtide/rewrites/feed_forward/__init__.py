"""Feed-forward layers, in slices of rows or columns."""
