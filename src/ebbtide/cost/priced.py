"""Calls that are never run alone, because they change what is the user's: what they cost is among their arguments."""

from __future__ import annotations

from typing import Any

__all__ = ["Priced"]


class Priced:
    """A target whose last two arguments are bytes: what a call takes while it runs, and what it reads and writes."""

    has_side_effect = True

    @staticmethod
    def workspace_bytes(args: tuple[Any, ...]) -> int:
        """What a call with ``args`` takes while it runs."""
        return int(args[-2])

    @staticmethod
    def traffic_bytes(args: tuple[Any, ...]) -> int:
        """What it reads and writes."""
        return int(args[-1])
