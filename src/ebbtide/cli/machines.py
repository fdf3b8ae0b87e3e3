"""``ebbtide machines``: the catalogue, for which plans can be made, and one machine's figures with their sources.

With ``--json`` one object: ``machines``, a list of what a plan file says of a machine, or of one ``NAME`` that alone.
Beside it stand ``usable_bytes`` and ``measured_on``, ``null`` where they are not known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any, TextIO

import typer

from ebbtide.cli.arguments import AsJson
from ebbtide.cli.options import beginning
from ebbtide.cli.output import write_json
from ebbtide.step.machine import Link, Machine, catalogue, is_elsewhere, machine_named, measured_on
from ebbtide.units import format_allowed, format_bytes, format_percent, format_seconds

__all__ = ["machines"]

_COLUMNS = ("machine", "usable", "float32", "bfloat16", "memory", "host")
_UNITS = """\
usable is what a step can take of the memory; float32 and bfloat16 are dense TFLOPS,
bfloat16 as fast as float32 where there is none; memory and host are GB/s, each way"""


def machines(
    name: Annotated[
        str | None,
        typer.Argument(help="one machine: its figures and their sources", autocompletion=beginning(catalogue)),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the machines that --machine takes, or one machine's figures, each with its source.

    The last line is the machine at hand: ebbtide calibrate measures it.
    """
    if name is not None:
        machine = machine_named(name)
        if as_json:
            write_json(_data(machine))
        else:
            _write_one(machine, sys.stdout)
        return
    every = [machine_named(each) for each in catalogue()]
    if as_json:
        write_json({"machines": [_data(each) for each in every]})
    else:
        _write_all(every, sys.stdout)


def _data(machine: Machine) -> dict[str, Any]:
    day = None if is_elsewhere(machine) else measured_on()
    known = {"usable_bytes": machine.usable_bytes or None, "measured_on": None if day is None else day.isoformat()}
    return {**machine.to_json(), **known}


def _write_all(every: list[Machine], stream: TextIO) -> None:
    lines = [_COLUMNS, *(_cells(each) for each in every if is_elsewhere(each))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        print("  ".join(cells).rstrip(), file=stream)
    print(_UNITS, file=stream)
    for here in every:
        if not is_elsewhere(here):
            rates = f"{_arithmetic(here)}, {_giga(here.bytes_per_second)} of the memory"
            print(f"{here.name}: {rates}; {_when_measured()}", file=stream)


def _cells(machine: Machine) -> tuple[str, ...]:
    host = machine.links.get("host")
    return (
        machine.name,
        format_allowed(machine.usable_bytes),
        _tera(machine.flops["float32"]),
        _tera(machine.flops["bfloat16"]) if "bfloat16" in machine.flops else "",
        f"{machine.bytes_per_second / 1e9:g}",
        "" if host is None else f"{host.out_bytes_per_second / 1e9:g}",
    )


def _write_one(machine: Machine, stream: TextIO) -> None:
    print(machine.name if is_elsewhere(machine) else f"{machine.name}: {_when_measured()}", file=stream)
    rows = list(_figures(machine))
    names, figures = (max(len(row[column]) for row in rows) for column in range(2))
    for name, figure, source in rows:
        print(f"  {name:<{names}}  {figure:<{figures}}  {source}".rstrip(), file=stream)


def _figures(machine: Machine) -> Iterator[tuple[str, str, str]]:
    """A row for every number of the catalogue: what it is, the number and where it is from."""
    told = machine.sources
    if machine.capability:
        yield "capability", machine.capability, told["capability"]
    yield "memory", format_allowed(machine.memory_bytes) if machine.memory_bytes else "", told["memory_bytes"]
    if machine.context_bytes:
        yield "context", format_bytes(machine.context_bytes), told["context_bytes"]
    if machine.fragmentation:
        yield "fragments", format_percent(machine.fragmentation), told["fragmentation"]
    if machine.memory_bytes:
        yield "usable", format_allowed(machine.usable_bytes), "of the memory, without context and fragments"
    yield "arithmetic", _arithmetic(machine), told["flops"]
    yield "bandwidth", _giga(machine.bytes_per_second), told["bytes_per_second"]
    yield "least op", format_seconds(machine.launch_seconds), told["launch_seconds"]
    yield "block", format_bytes(machine.granularity_bytes), told["granularity_bytes"]
    for tier, link in machine.links.items():
        yield tier, _both_ways(link), told[f"links.{tier}.bytes_per_second"]
        yield "", f"{format_seconds(link.latency_seconds)} a copy", told[f"links.{tier}.latency_seconds"]
        yield "", f"holds {format_allowed(link.capacity_bytes)}", told[f"links.{tier}.capacity_bytes"]


def _arithmetic(machine: Machine) -> str:
    dtypes: dict[str, list[str]] = {}
    for dtype, rate in machine.flops.items():
        dtypes.setdefault(_tera(rate), []).append(dtype)
    return ", ".join(f"{rate} TFLOPS in {' and '.join(names)}" for rate, names in dtypes.items())


def _both_ways(link: Link) -> str:
    out, back = _giga(link.out_bytes_per_second), _giga(link.in_bytes_per_second)
    return f"{out} each way" if out == back else f"{out} out, {back} back"


def _when_measured() -> str:
    day = measured_on()
    return "the default, until ebbtide calibrate measures it" if day is None else f"measured here on {day.isoformat()}"


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.4g}"


def _giga(rate: float) -> str:
    return f"{rate / 1e9:.4g} GB/s"
