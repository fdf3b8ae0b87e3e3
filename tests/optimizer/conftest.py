"""Searches are short here: how good plans are is tested with the planners."""

from __future__ import annotations

from short_searches import short_searches

_short_searches = short_searches(1_000)
