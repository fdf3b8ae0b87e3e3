"""What rules share that make a part of a step in slices."""
