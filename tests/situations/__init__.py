"""Training situations: each is run by eager and under a budget in a process of its own, and judged."""
