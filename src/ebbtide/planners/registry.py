"""Planners by name: the library's own, and those that other installed packages bring.

1. A planner registers itself under its name with :func:`planner`, in a module that is imported when that name is first
   asked for: most need numba, some a solver.
2. :data:`HOMES` has the modules of the library's own. Any other package brings planners by entry points of the group
   :data:`GROUP`: per name the module. They are looked up only for a name that is none of the library's own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ebbtide.errors import UsageError
from ebbtide.names import PUBLISHED_PLANNERS, brought, did_you_mean, how_to_install_published
from ebbtide.planners.base import Answer, Problem
from ebbtide.planners.settings import base_name, has_settings, settings_from

__all__ = [
    "GROUP",
    "HOMES",
    "Planner",
    "finds_smallest",
    "missing_package",
    "moves_buffers",
    "needs_tiers",
    "planner",
    "planner_named",
    "planner_names",
    "require_planner",
    "require_tiers",
]

Planner = Callable[[Problem], Answer]

GROUP = "ebbtide.planners"
HOMES = {
    "auto": "ebbtide.planners.auto",
    "auto_free": "ebbtide.planners.auto_free",
    "greedy": "ebbtide.planners.search.greedy",
    "keep_all": "ebbtide.planners.keep_all",
    "least_memory": "ebbtide.planners.search.smallest",
}
"""Per planner of the library its module."""

_REGISTRY: dict[str, Planner] = {}
_SETTINGS: dict[str, type[Any]] = {}
_NEEDS: dict[str, str] = {}  # per planner that needs one: a package that is not of the core install
_FIND_SMALLEST: set[str] = set()
_MOVE: set[str] = set()
_NEED_TIERS: set[str] = set()


def planner(
    name: str,
    *,
    module: str = "",
    finds_smallest: bool = False,
    moves: bool = False,
    needs_tiers: bool = False,
    settings: type[Any] | None = None,
) -> Callable[[Planner], Planner]:
    """Register a planner.

    Args:
        name: what ``planner=`` calls it.
        module: one that it imports and that may not be installed.
        finds_smallest: whether it looks for the schedule of least memory itself where the budget is deep; others
            are given that schedule as a seed.
        moves: whether it moves buffers to the problem's tiers; others only recompute.
        needs_tiers: whether its plans are about moving: entry points refuse it where there is no tier.
        settings: a dataclass of what may follow its name (``planners/settings.py``).
    """

    def register(function: Planner) -> Planner:
        assert name not in _REGISTRY, f"two planners are named {name}"
        _REGISTRY[name] = function
        if module:
            _NEEDS[name] = module
        if finds_smallest:
            _FIND_SMALLEST.add(name)
        if moves:
            _MOVE.add(name)
        if needs_tiers:
            _NEED_TIERS.add(name)
        if settings is not None:
            _SETTINGS[name] = settings
        return function

    return register


def planner_names() -> list[str]:
    """Names that ``planner=`` knows."""
    return sorted({*HOMES, *brought(GROUP), *_REGISTRY})


def finds_smallest(name: str) -> bool:
    """Whether planner ``name`` needs no seed to find a plan at the smallest workable budget."""
    return _loaded(name) in _FIND_SMALLEST


def moves_buffers(name: str) -> bool:
    """Whether planner ``name`` moves buffers to the tiers that it is given."""
    return _loaded(name) in _MOVE


def needs_tiers(name: str) -> bool:
    """Whether planner ``name`` is of no use without a tier to move buffers to. None of the library's own is."""
    return base_name(name) not in HOMES and _loaded(name) in _NEED_TIERS


def missing_package(name: str) -> str:
    """How to install what planner ``name`` needs and is not there; empty if nothing is missing."""
    name = _loaded(name)
    module = _NEEDS.get(name, "")
    if not module or importlib.util.find_spec(module) is not None:
        return ""
    return f"planner {name!r} needs {module}, which is not installed: pip install {module}"


def require_planner(name: object) -> None:
    """Refuse a name that no planner has, and settings that it does not take; imports none that is given no settings.

    Raises:
        UsageError: listing the names there are, or the settings.
    """
    base = base_name(name) if isinstance(name, str) else ""
    if not isinstance(name, str) or (base not in HOMES and base not in _REGISTRY and base not in brought(GROUP)):
        known = planner_names()
        if base in PUBLISHED_PLANNERS:
            why = f"is one of the published planners, which are not installed: {how_to_install_published()}"
        else:
            near = did_you_mean(base, (*known, *PUBLISHED_PLANNERS)) if isinstance(name, str) else ""
            why = f"does not exist{near or ';'} accepted: {', '.join(known)}"
        raise UsageError(f"planner {name!r} {why}", argument="planner", value=name, accepted=known)
    if has_settings(name):
        settings_from(name, _SETTINGS.get(_loaded(name)))


def require_tiers(name: str, tiers: Sequence[object], machine: object, links: Sequence[str] | None) -> None:
    """Refuse a planner that moves buffers where there is no tier to move them to.

    Args:
        name: of a planner.
        tiers: that are given.
        machine: its name; ``None`` for the one at hand.
        links: the tiers to which that one has links, if known.

    Raises:
        UsageError: naming the machine, and what it has links to.
    """
    if tiers or not needs_tiers(name):
        return
    what = "this machine" if machine is None else f"machine {machine!r}"
    if links:
        said = f"{what} has a link to {' and '.join(links)}: give tiers={links[0]!r}"
    elif links is None:
        said = f"none is given for {what}: give tiers='disk' where the model is on CPU, tiers='host' for a card"
    else:
        said = f"{what} has no link"
    raise UsageError(
        f"planner {name!r} moves buffers and needs a tier to move them to; {said}, or use planner='auto'",
        argument="tiers",
        value=None,
        accepted=tuple(links or ()),
    )


def planner_named(name: str) -> Planner:
    """The planner ``name``, with the settings that follow its name.

    Raises:
        UsageError: if there is none, listing those there are, or if a package that it needs is not installed, or for
            settings that it does not take.
    """
    require_planner(name)
    if missing := missing_package(name):
        raise UsageError(missing, argument="planner", value=name)
    function = _REGISTRY[base_name(name)]
    if not has_settings(name):
        return function
    settings = settings_from(name, _SETTINGS.get(base_name(name)))
    return lambda problem: function(replace(problem, settings=settings))


def _loaded(name: str) -> str:
    """The planner's name alone, once its module is imported."""
    name = base_name(name)
    if name not in _REGISTRY and (home := HOMES.get(name) or brought(GROUP).get(name, "")):
        importlib.import_module(home)
    return name
