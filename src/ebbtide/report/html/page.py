"""A plan as one HTML page that needs nothing else: no network, no server, no other file.

The page is its template with the style, the scripts and the data put in. The data are JSON in which no ``<`` is left,
so that no name can end the element that holds them; what Python writes itself is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from io import StringIO
from pathlib import Path
from typing import TextIO

from ebbtide.files import write_text
from ebbtide.report.records.page import Page
from ebbtide.report.text.plan import facts_of, origins_of
from ebbtide.step.provenance import Provenance
from ebbtide.units import format_allowed
from ebbtide.version import __version__

__all__ = ["save_page", "write_page"]

_SCRIPTS = ("numbers.js", "model.js", "chart.js", "table.js", "parts.js", "start.js")
_PLACE = re.compile(r"@@([A-Z]+)@@")


def write_page(page: Page, stream: TextIO) -> None:
    """Write ``page`` to ``stream``."""
    plan = page.plan
    planned_for = plan.machine.name if plan.machine is not None else plan.provenance.machine
    machine = f", for {planned_for}" if planned_for else ""
    measured = "" if page.measured else " Nothing on this page was measured in a run: peaks and times are predicted."
    parts = {
        "TITLE": escape(plan.case),
        "LEAD": escape(f"Plan by {plan.planner}{machine}: {plan.status.value}.{measured}"),
        "STYLE": _asset("page.css"),
        "SCRIPT": '"use strict";\n' + "\n".join(map(_asset, _SCRIPTS)),
        "DATA": _embedded(page.to_json()),
        "FACTS": _definitions(facts_of(plan)),
        "ORIGINS": _definitions(_origins(plan.provenance)),
        "FOOTER": escape(f"Written by Ebbtide {__version__}. This file is the whole report; it loads nothing."),
    }
    stream.write(_PLACE.sub(lambda findings: parts[findings[1]], _asset("page.html")))


def save_page(page: Page, path: Path) -> None:
    """Write ``page`` to a file, whole or not at all.

    Raises:
        OSError: if the file cannot be written.
    """
    stream = StringIO()
    write_page(page, stream)
    write_text(path, stream.getvalue())


def _asset(name: str) -> str:
    return (files("ebbtide.report.html") / "page" / name).read_text(encoding="utf-8")


def _embedded(data: object) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _origins(source: Provenance) -> list[tuple[str, str]]:
    """All that is known of where a plan comes from, sizes in words."""
    known = dict([*source.items(), *origins_of(source)])
    for name, size in (("memory_bytes", source.memory_bytes), ("usable_bytes", source.usable_bytes)):
        if size is not None:
            known[name] = f"{format_allowed(size)} ({size} bytes)"
    return [(name.removesuffix("_bytes"), text) for name, text in known.items()]


def _definitions(facts: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
