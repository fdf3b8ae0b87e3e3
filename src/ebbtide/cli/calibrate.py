"""``ebbtide calibrate``: what this machine can do, measured and kept for later plans."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from ebbtide.cli.arguments import AsJson, Size, Tiers
from ebbtide.cli.imports import import_large
from ebbtide.cli.options import several_tiers
from ebbtide.cli.output import write_json
from ebbtide.cli.steps import captured_step, check_request
from ebbtide.options import Options
from ebbtide.tiers import parse_tiers
from ebbtide.units import format_bytes, format_percent, format_seconds

__all__ = ["calibrate"]


def calibrate(
    case: Annotated[
        str | None,
        typer.Argument(help="zoo:NAME, hf:PATH or FILE.py:function: find out what its rewrites rest on"),
    ] = None,
    size: Size = None,
    tiers: Tiers = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's arithmetic, memory, disks and a card's link to the host, and keep it for later plans.

    Takes well under two minutes. Costs of ops are measured anyway when a step is planned; this is for what has to be
    estimated, and for the links to slower memory: without --tiers the disk, and where there is a card the host.

    With a CASE, find out instead whether slices of its loss have the bits of the whole here, which takes the memory of
    all logits once: where a budget leaves no room for that, a first call cannot, and what is not known is not used.
    """
    if case is not None:
        _of_case(case, size, as_json)
        return
    if tiers is not None:
        parse_tiers(several_tiers(tiers))  # a wrong name is told at once

    import_large("numpy", "torch")
    import torch

    from ebbtide.cost import calibrate as costs
    from ebbtide.report.text.progress import ProgressDisplay

    usual = "host,disk" if torch.cuda.is_available() else "disk"
    named = parse_tiers(several_tiers(usual if tiers is None else tiers))

    with ProgressDisplay(sys.stderr) as display:
        found = costs.calibrate(named, lambda what: display.stage(f"measuring {what}"))
    machine = found.machine
    if as_json:
        links = {
            name: {**asdict(link), "together": found.together_bytes_per_second[name]}
            for name, link in machine.links.items()
        }
        if found.card_link is not None:
            links["host"] = {**asdict(found.card_link), "source": found.card_source}
        write_json({**machine.to_json(), "links": links, "path": found.path, "disturbed": found.disturbed})
        raise typer.Exit(1 if found.disturbed else 0)
    rates = ", ".join(f"{rate / 1e9:.1f} in {dtype}" for dtype, rate in machine.flops.items())
    print("this machine")
    print(f"  arithmetic {rates}, 10^9 per second")
    print(f"  memory     {format_bytes(int(machine.bytes_per_second))} per second")
    print(f"  least op   {format_seconds(machine.launch_seconds)}")
    for name, link in machine.links.items():
        out, back, both = (
            format_bytes(int(rate))
            for rate in (link.out_bytes_per_second, link.in_bytes_per_second, found.together_bytes_per_second[name])
        )
        print(f"  {name:<10} {out} out, {back} back, {both} both ways at once, per second, through the page cache")
        print(
            f"  {'':<10} {format_seconds(link.latency_seconds)} for each transfer besides; computing loses "
            f"{format_percent(link.compute_share)} of a transfer's time"
        )
    if (link := found.card_link) is not None:
        out, back = (format_bytes(int(rate)) for rate in (link.out_bytes_per_second, link.in_bytes_per_second))
        print(f"  {'host':<10} {out} out, {back} back per second, {_ways(link.duplex)}; {found.card_source}")
        print(
            f"  {'':<10} {format_seconds(link.latency_seconds)} for each transfer besides; computing loses "
            f"{format_percent(link.compute_share)} of a transfer's time"
        )
    if found.disturbed:
        what = ", ".join(found.disturbed)
        print(f"  not kept: other work has disturbed this ({what}); again on an idle machine", file=sys.stderr)
        raise typer.Exit(1)
    if found.path:
        print(f"  kept in    {found.path}")
    else:
        print("  not kept: the cache directory cannot be written", file=sys.stderr)


def _ways(duplex: bool) -> str:
    return "both ways at once" if duplex else "one way at a time"


def _of_case(case: str, size: int | None, as_json: bool) -> None:
    """Facts about the kernels that rewrites of one step rest on."""
    check_request(case, size, Options())

    from ebbtide.report.text.progress import ProgressDisplay

    with ProgressDisplay(sys.stderr) as display:
        step, _ = captured_step(case, size, Options(progress=display), display)
        found: list[tuple[str, bool | None]] = []
        for says, holds in step.measure_facts():
            display.stage(f"found out: {says}")
            found.append((says, holds))
    if as_json:
        write_json({"case": case, "facts": [{"fact": says, "holds": holds} for says, holds in found]})
        return
    print(f"{case}: {len(found)} facts about the kernels here, kept for later plans")
    for says, holds in found:
        print(f"  {'as the whole' if holds else 'OTHER BITS':<12}  {says}")
