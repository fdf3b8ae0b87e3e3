"""``ebbtide max-batch``: the largest batch, number of layers or length that fits a budget, by prediction.

With ``--json`` one object: ``case, vary, batch, unplanned_batch, budget_bytes, overhead_limit, captured, failed`` and,
under ``plan``, the plan's summary; ``batch`` is the number of what was varied. Where not even 1 fits, exit code 2 and
the least budget for it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ebbtide._api.auto_budget import AUTO, budget_from
from ebbtide.cli.arguments import AsJson, Verbose, check_sizes
from ebbtide.cli.cases import blame, check_case, is_graph, is_sized, load_case, model_of, refuse_to_offload_nothing
from ebbtide.cli.imports import import_large
from ebbtide.cli.interruption import KeepBest
from ebbtide.cli.options import Sizes, with_options
from ebbtide.cli.output import write_json
from ebbtide.errors import UsageError
from ebbtide.options import Options, no_optimizer
from ebbtide.report.text.terminal import on_terminal
from ebbtide.units import format_allowed, format_percent

if TYPE_CHECKING:
    from ebbtide._api.max_batch import Vary

__all__ = ["max_batch"]

_LARGEST = {"batch": "largest batch", "layers": "most layers", "length": "greatest length"}
_FITS = {True: "fits", False: "does not fit"}
_LARGER = {"batch": "a larger batch", "layers": "more layers", "length": "a greater length"}


@with_options()
def max_batch(
    *,
    case: Annotated[str, typer.Argument(help="zoo:NAME, hf:PATH or FILE.py:function; the function takes the batch")],
    vary: Annotated[
        str | None,
        typer.Option(
            help="what of zoo:NAME or hf:PATH is to be as large as fits: batch, layers or length; default: batch"
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="of zoo:NAME or hf:PATH where something else is varied: its batch")
    ] = None,
    sizes: Sizes,
    overhead: Annotated[str, typer.Option(help="the most added time: one-forward, 30%, 0.3 or any")] = "100%",
    budget: Annotated[str, typer.Option(help="peak allowed: 12GiB, 800MiB, 8GB, or auto: what the machine has")] = AUTO,
    options: Options,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Find the largest batch whose training step fits a budget, without running it or running out.

    With --vary layers or --vary length the most layers, or the longest sequence, of zoo:NAME or hf:PATH.

    Ctrl-C takes the plans that are left as they are at hand, and gives the largest batch of these; a second one aborts.
    """
    if is_graph(case):
        raise UsageError(f"{case} has a fixed batch; name zoo:NAME, hf:PATH or FILE.py:function, which takes the batch")
    limit = _limit(overhead)
    parsed = budget_from(budget, machine=options.target)
    check_case(case)
    check_sizes(case, sizes)
    word, sized = _varied(case, vary, size)
    if word in sizes:
        raise UsageError(
            f"--{word} is what is to be found; leave it out, or --vary something else", argument=f"--{word}"
        )

    import_large("numpy", "torch")
    import ebbtide
    from ebbtide.case import Case
    from ebbtide.report.text.plan import write_plan
    from ebbtide.report.text.progress import ProgressDisplay
    from ebbtide.report.text.verdict import verdict_of

    def make(batch: int) -> Case:
        loaded = load_case(case, size if sized else batch, sizes={**sizes, sized: batch} if sized else sizes)
        assert isinstance(loaded, Case)
        if options.offload_optimizer and options.for_case(loaded).optimizer in (None, no_optimizer):
            refuse_to_offload_nothing(case)
        return loaded

    with ProgressDisplay(sys.stderr) as display, KeepBest(display, None) as keeper, blame(case):
        found = ebbtide.max_batch(
            make,
            budget=parsed,
            vary=word,
            overhead=limit,
            options=replace(options, interrupt=keeper.interrupt, progress=keeper.tell),
        )
    if keeper.interrupt.interrupted:
        print(f"stopped by Ctrl-C: a longer search may find {_LARGER[word]}", file=sys.stderr)
    if as_json:
        write_json(
            {
                "case": case,
                "vary": found.vary,
                "batch": found.batch,
                "unplanned_batch": found.unplanned_batch,
                "budget_bytes": parsed.bytes,
                "overhead_limit": found.overhead_limit,
                "captured": [list(each) for each in found.captured],
                "failed": [list(each) for each in found.failed],
                "plan": found.plan.summary(),
            }
        )
        return
    allowed = (
        "" if found.overhead_limit is None else f" at an overhead of at most {format_percent(found.overhead_limit)}"
    )
    within = format_allowed(parsed.bytes or 0)
    lines = [
        f"{_LARGEST[word]} of {case} within {within}{allowed}: {found.batch}, unplanned {found.unplanned_batch}",
        f"  tried      {', '.join(f'{size} {_FITS[fits]}' for size, fits in found.captured)}",
        *(f"  not made   {failed}: {why}" for failed, why in found.failed),
        *verdict_of(found.plan)[:2],  # what comes next is said already
    ]
    stream = on_terminal(sys.stdout)
    print("\n".join(lines), file=stream)
    if verbose:
        write_plan(found.plan, stream)


def _varied(case: str, vary: str | None, size: int | None) -> tuple[Vary, str]:
    """What is varied, and its name among the sizes of ``load_case``; empty for the one that it takes first.

    Raises:
        UsageError: for what the case does not take.
    """
    if vary is not None and vary not in _LARGEST:
        raise UsageError(
            f"--vary {vary} is none of {', '.join(_LARGEST)}", argument="--vary", value=vary, accepted=tuple(_LARGEST)
        )
    if not is_sized(case):
        if vary is not None or size is not None:
            raise UsageError(
                f"--vary and --size are for zoo:NAME and hf:PATH; {case} is called with what is varied, "
                "whatever it takes it for",
                argument="--vary",
                value=vary,
            )
        return "batch", ""
    from ebbtide.zoo import parameters_of

    taken = tuple(each for each in parameters_of(model_of(case)) if each in _LARGEST)
    word = vary or taken[0]
    if word not in taken:
        raise UsageError(
            f"{case} has no {word} to vary; it takes: {', '.join(taken)}", argument="--vary", value=vary, accepted=taken
        )
    if word == taken[0] and size is not None:
        raise UsageError(
            f"--size {size} is the {word} of {case}, which is to be found; leave it out, or --vary something else",
            argument="--size",
            value=size,
        )
    return cast("Vary", word), "" if word == taken[0] else word


def _limit(text: str) -> float | Literal["one-forward"] | None:
    """The limit on the overhead that ``text`` says."""
    if text in ("any", "one-forward"):
        return None if text == "any" else "one-forward"
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise UsageError(f"--overhead {text!r} is not a limit; accepted: one-forward, 30%, 0.3 or any") from None
    if text.endswith("%"):
        return number / 100
    if number > 1:
        raise UsageError(f"--overhead {text} is a fraction of {number:.0%}; write {text}% if that is meant, or 0.3")
    return number
