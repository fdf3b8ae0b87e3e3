"""M4: the largest batch of translation with additive attention over 50 to 400 time steps on 12 GB (table 2b).

The table has no limit on time, but its operator is faster than what it replaces. Hence two more rows a case:
1. ``speed``: predicted samples a second of the default at its largest batch, against keep-all's at *its* largest;
2. ``half``: the default, and what only recomputes, at keep-all's batch and half of keep-all's peak.

PyTorch stores one tensor of batch x steps x steps x width, TensorFlow 1.2 probably three: a width is fitted per row.
``echo`` recomputes as their operator does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ebbtide._api.estimate import AheadStep
from ebbtide_published.zoo.nmt import nmt
from harness.batched import Batched, unplanned_peak
from harness.record import Row, at_least
from questions.swap_cells import (
    DEFAULT,
    Method,
    batch_rows,
    batched_of,
    floor_of,
    methods,
    plan_columns,
    verdict,
)
from questions.swap_sizes import CARD, MB, TABLES, Published

TITLE = "M4: batch of additive attention on a Tesla M40 of 12 GB, by roofline (Meng et al. 2017, table 2b)"
CASES = tuple(TABLES["m4"])
QUICK = ("50 steps",)
SMALL = Published(partial(nmt, length=8, width=2048), "8 steps, width 2048: a smoke test", 4500, 7000)


def rows(case: str, quick: bool) -> Iterator[Row]:
    cell = SMALL if quick else TABLES["m4"][case]
    against = methods("echo")[:1] if quick else methods("echo")
    batched = batched_of(cell)
    seen: dict[str, Row] = {}
    for row in batch_rows("m4", case, cell, batched, against, None):
        seen[row.columns["method"]] = row
        yield row
    yield _speed(case, seen["keep_all"], seen[DEFAULT.label])
    yield from _halves(case, cell, batched, against)


def _speed(case: str, kept: Row, default: Row) -> Row:
    """Row 1."""
    theirs = kept.columns["samples_per_second_there"]
    columns = {"case": case, "method": "speed", "size": default.columns["size"], "ops": default.columns["ops"]}
    checks = []
    for what, key in (("the target", "samples_per_second"), ("10 %", "samples_per_second_there")):
        if (ours := default.columns[key]) is not None:
            columns[key] = ours
            checks.append(at_least(f"samples/s at the batch of {what}, of keep-all's at its own", ours / theirs, 1.0))
    return Row("m4", columns, tuple(checks))


def _halves(case: str, cell: Published, batched: Batched, against: tuple[Method, ...]) -> Iterator[Row]:
    """Rows 2."""
    batch = batched.unplanned(CARD.memory_bytes, cell.without or 1)
    step = batched.at(batch)
    for method in against:
        if method.link == 1.0 and method.planner in ("auto", "echo"):
            yield _half(case, step, batch, method)


def _half(case: str, step: AheadStep, batch: int, method: Method) -> Row:
    budget = unplanned_peak(step) // 2
    floor = floor_of(step, method)
    found = method.plan(step, budget)
    columns = {
        "case": case,
        "method": f"half: {method.label}",
        "ops": len(step.program.ops),
        "target_batch": batch,
        "at_target": f"{budget / MB:.0f} MB: {verdict(found, floor, budget, None)}",
        **plan_columns(found, batch),
        "floor_mb": floor / MB,
        "plan_cpu_seconds": found.cpu_seconds,
    }
    return Row("m4", columns)
