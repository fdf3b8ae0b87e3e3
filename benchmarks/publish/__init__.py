"""Pages and plots made of the result files, and of nothing else: ``python -m publish``."""
