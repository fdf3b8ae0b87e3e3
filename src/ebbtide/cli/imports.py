"""Large packages, imported where Ctrl-C waits until that is done: the middle of an import is no place to be cut off.

NumPy turns what interrupts its import into an error of its own, and torch's C++ may swallow it.
"""

from __future__ import annotations

from importlib import import_module

from ebbtide.signals import signals_wait

__all__ = ["import_large"]


def import_large(*names: str) -> None:
    """Import packages by name; a second Ctrl-C does not wait."""
    with signals_wait("packages are being imported; Ctrl-C is handled when that is done"):
        for name in names:
            import_module(name)
