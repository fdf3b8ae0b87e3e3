"""Data records behind reports: found in programs and plans, nothing printed."""
