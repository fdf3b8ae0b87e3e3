"""Training situations, each run by eager and under a budget in a process of its own; ``promises.py`` judges them."""
