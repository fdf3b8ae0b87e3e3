"""What PyTorch keeps of Echo's translation model between forward and backward, by op and module.

A buffer is *stored* if the forward makes it and the backward reads it. One step of the additive attention keeps one
buffer of ``batch x source length x size``, the tanh's output; with a layer norm before the tanh also the norm's input.
``units`` counts a group's bytes in such buffers for every target token (2.62 GB for ``tbd``), as the authors' profile
has two of them: ``query_plus_input`` and the tanh, 5.23 GB of 9.08.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from ebbtide.step.machine import machine_named
from ebbtide.step.program import Program
from harness.footprint import MB, Footprint
from harness.record import Row
from harness.sockeye import BATCHES, CONFIGS, sockeye

TITLE = "What is stored for the backward, the largest groups (titanxp-12gb)"
MACHINE = "titanxp-12gb"
SHOWN = 14
SMALLER = {"length": 8, "source_length": 8}
CASES = ("tbd",)
QUICK = CASES


def rows(name: str, quick: bool) -> Iterator[Row]:
    changes = SMALLER if quick else {}
    step = Footprint(lambda: sockeye(name, **changes), machine_named(MACHINE))
    config, length = CONFIGS[name], changes.get("length", CONFIGS[name].length)
    unit = BATCHES[name] * length * length * (config.attention or config.width) * 4
    groups = stored(step.program)
    total = sum(size for size, _ in groups.values())
    largest = sorted(groups.items(), key=lambda each: -each[1][0])
    shown = [(*key, size, number) for key, (size, number) in largest[:SHOWN]]
    rest = [group for _, group in largest[SHOWN:]]
    shown.append(("others", "", sum(size for size, _ in rest), sum(number for _, number in rest)))
    shown.append(("all", "", total, sum(number for _, number in groups.values())))
    for op, module, size, number in shown:
        columns = {
            "case": name,
            "made_by": op,
            "module": module,
            "buffers": number,
            "mb": size / MB,
            "share": size / total,
            "units": size / unit,
        }
        yield Row("stored", columns)


def stored(program: Program) -> dict[tuple[str, str], tuple[int, int]]:
    """By the op that makes them and its module, numbers of layers as ``*``: bytes and number of stored buffers."""
    found: dict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for op in program.ops[: program.boundary]:
        for b in op.outputs:
            if b in program.pinned or any(r >= program.boundary for r in program.readers[b]):
                key = (op.target.removeprefix("aten."), re.sub(r"\b\d+\b", "*", op.module))
                size, number = found[key]
                found[key] = (size + program.buffers[b].bytes, number + 1)
    return found
