"""A few ops as one call that makes their results in slices, along an axis that no sum goes over."""
