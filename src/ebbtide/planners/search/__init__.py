"""The incremental simulator and the searches on it."""
