"""Renderers to HTML: each takes a data record and gives markup that needs nothing else."""
