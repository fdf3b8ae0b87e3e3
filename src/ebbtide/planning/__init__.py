"""From a program and a budget to a plan: the pipeline, the frontier, and plans that are kept and shared."""
