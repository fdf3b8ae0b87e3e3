"""Renderers to text: each takes a data record and the stream that it writes to."""
