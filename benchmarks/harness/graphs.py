"""The published graphs, where somebody has them: ``--graphs DIR``, passed on to child processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ebbtide.step.graph_file import program_from_graph
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_bytes

__all__ = ["ABSENT", "published", "take_graphs_option", "unplanned_bytes"]

_VARIABLE = "EBBTIDE_GRAPHS"
ABSENT = "skipped: pass --graphs DIR with the files of github.com/haoming-codes/moccasin, folder data"


def take_graphs_option() -> None:
    """Take ``--graphs DIR`` off the command line."""
    if "--graphs" not in sys.argv:
        return
    at = sys.argv.index("--graphs")
    if at + 1 >= len(sys.argv) or not Path(sys.argv[at + 1]).is_dir():
        sys.exit("--graphs needs a directory")
    os.environ[_VARIABLE] = str(Path(sys.argv[at + 1]).resolve())
    del sys.argv[at : at + 2]


def published(name: str) -> Program | None:
    """The published graph ``name``, or ``None`` where it is absent."""
    path = Path(os.environ.get(_VARIABLE, "")) / f"{name}.json"
    if _VARIABLE not in os.environ or not path.is_file():
        return None
    return program_from_graph(json.loads(path.read_text(encoding="utf-8")), name=name)
