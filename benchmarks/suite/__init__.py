"""The parts of ``benchmarks/public_suite.py``: models of public libraries, and how each of them is judged."""
