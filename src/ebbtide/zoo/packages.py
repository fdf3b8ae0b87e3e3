"""Packages that only some models of the zoo need."""

from __future__ import annotations

from importlib.util import find_spec

from ebbtide.errors import UsageError

__all__ = ["require_package"]


def require_package(package: str, asked: str) -> None:
    """Refuse ``asked``, as its user wrote it, where ``package`` is not installed.

    Raises:
        UsageError: saying how to install it.
    """
    if find_spec(package) is None:
        raise UsageError(f"{asked} needs {package}, which is not installed; pip install {package}")
