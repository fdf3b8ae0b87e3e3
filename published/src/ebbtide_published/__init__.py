"""Planners of papers and the papers' models: Ebbtide finds both by entry points, and needs neither."""
