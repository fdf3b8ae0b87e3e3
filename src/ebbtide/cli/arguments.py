"""The arguments that several commands take, written once: the same word means the same everywhere.

Nothing here imports torch: whoever asks for help or mistypes an option does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.cases import is_graph, is_sized
from ebbtide.cli.configurations import PREFIX
from ebbtide.cli.options import Sizes, beginning, help_of
from ebbtide.errors import UsageError
from ebbtide.names import DTYPES, did_you_mean, zoo_names
from ebbtide.tiers import TIERS

__all__ = ["AsJson", "CaseName", "PlanFile", "ReportFile", "Size", "Tiers", "Verbose", "check_sizes"]


def _case_names() -> Iterable[str]:
    return [*(f"zoo:{name}" for name in zoo_names()), PREFIX]


CaseName = Annotated[
    str, typer.Argument(help="zoo:NAME, hf:PATH, FILE.py:function or graph.json", autocompletion=beginning(_case_names))
]
Tiers = Annotated[str | None, typer.Option(help=help_of("tiers"), autocompletion=beginning(lambda: TIERS))]
Size = Annotated[int | None, typer.Option(help="passed to the case: batch, length or layers")]
PlanFile = Annotated[str, typer.Argument(help="a plan that was saved: plan.json")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="write a report to this file: page.html")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="print all numbers of the plan too")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def check_sizes(case: str, sizes: Sizes) -> None:
    """Refuse sizes of a case that has none by name, and what is none.

    Raises:
        UsageError: saying what would work.
    """
    if not sizes:
        return
    option, value = next(iter(sizes.items()))
    if not is_sized(case):
        options = " and ".join(f"--{name}" for name in sizes)
        raise UsageError(
            f"{options} {'is' if len(sizes) == 1 else 'are'} for zoo:NAME and hf:PATH; {case} has sizes of its own"
            + ("" if is_graph(case) else ", of which its function takes one: --size"),
            argument=f"--{option}",
            value=value,
        )
    if sizes.get("dtype", DTYPES[0]) not in DTYPES:
        raise UsageError(
            f"--dtype {sizes['dtype']} is none of {', '.join(DTYPES)}{did_you_mean(str(sizes['dtype']), DTYPES)}",
            argument="--dtype",
            value=sizes["dtype"],
            accepted=DTYPES,
        )
