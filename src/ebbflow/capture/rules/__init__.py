"""What capture does to keep eager's meaning, one rule a module."""
