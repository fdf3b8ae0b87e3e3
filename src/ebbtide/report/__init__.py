"""Renderers: one per output, each from a data record to the stream that it is given."""
