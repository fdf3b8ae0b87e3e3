"""The arguments that several commands take, written once: the same word means the same everywhere.

Nothing here imports torch: whoever asks for help or mistypes an option does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import beginning, help_of
from ebbtide.errors import UsageError
from ebbtide.names import zoo_names
from ebbtide.tiers import TIERS

__all__ = [
    "AsJson",
    "CaseName",
    "Image",
    "Layers",
    "Length",
    "PlanFile",
    "ReportFile",
    "Size",
    "Tiers",
    "sizes_of_zoo",
]


def _case_names() -> Iterable[str]:
    return [f"zoo:{name}" for name in zoo_names()]


CaseName = Annotated[
    str, typer.Argument(help="zoo:NAME, FILE.py:function or graph.json", autocompletion=beginning(_case_names))
]
Tiers = Annotated[str | None, typer.Option(help=help_of("tiers"), autocompletion=beginning(lambda: TIERS))]
Size = Annotated[int | None, typer.Option(help="passed to the case: batch, length or layers")]
Layers = Annotated[int | None, typer.Option(min=1, help="of a zoo: model that has them to choose")]
Length = Annotated[int | None, typer.Option(min=1, help="of the sequences of a zoo: model that has it to choose")]
Image = Annotated[int | None, typer.Option(min=1, help="height and width in pixels, of a zoo: model of images")]
PlanFile = Annotated[str, typer.Argument(help="a plan that was saved: plan.json")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="write a report to this file: page.html")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def sizes_of_zoo(case: str, **sizes: int | None) -> dict[str, int]:
    """Those ``sizes`` of a ``zoo:`` case that were given.

    Raises:
        UsageError: if the case is none of the zoo's.
    """
    given = {name: size for name, size in sizes.items() if size is not None}
    if given and not case.startswith("zoo:"):
        options = " and ".join(f"--{name}" for name in given)
        raise UsageError(
            f"{options} {'is' if len(given) == 1 else 'are'} for zoo:NAME; {case} has sizes of its own"
            + ("" if case.endswith(".json") else ", of which its function takes one: --size"),
            argument=f"--{next(iter(given))}",
            value=next(iter(given.values())),
        )
    return given
