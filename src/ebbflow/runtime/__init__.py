"""What runs: planned steps, random replay, fingerprints."""
