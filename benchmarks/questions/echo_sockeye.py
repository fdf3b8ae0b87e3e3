"""Echo's translation models at the peaks that its authors measured (E1, E2), and its sweeps (E3).

1. Theirs are the figures of the authors' data (version 4 of the paper: a hand-written kernel for the attention), of a
   TITAN Xp with 12 GB, in MB. The models are those of ``harness/sockeye.py`` with Adam's states resident; steps have
   the full lengths, where theirs are buckets of all lengths up to them, so that samples a second compare within a
   column of ours only. In the sweep of H embeddings, states and attention all have it.
2. PyTorch keeps one large tensor of the attention per step, where their framework kept two; ``tbd two tensors`` has a
   layer norm before the tanh, which keeps two as well.
3. *Default* is ``auto``: alone; with the host's memory, at the whole link and at half. E1's figures count as reached at
   an overhead of :data:`MOST_OVERHEAD`, or as forbidden if the bound of the same class of plans is above that. Those of
   E2 and of the sweeps count at any overhead, which stands beside its bound.
4. Twice the batch: samples a second over keep-all's at the first batch. No plan is faster than keep-all at the same
   batch with memory without limit, since each op runs at least once: where that stays below :data:`FASTER`, no plan
   reaches it at these costs. Of sweeps and of twice the batch ``echo`` and
   the smallest peak are not asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.step.machine import machine_named
from harness.batched import ABOVE, Planned
from harness.footprint import MB, Footprint, Smallest
from harness.record import Check, Row, holds
from harness.sockeye import BATCHES, sockeye

TITLE = "Translation models at Echo's peaks (E1, E2), and sweeps of layers and widths (E3); titanxp-12gb by roofline"
MACHINE = "titanxp-12gb"
MOST_OVERHEAD = 0.03
FASTER = 1.28  # samples a second at twice the batch, over the base's
LINKS: dict[str, float | None] = {"auto": None, "auto, host 100 %": 1.0, "auto, host 50 %": 0.5}

LIMITED = ("tbd", "tbd two tensors")  # E1
LINKS_OF_SWEEPS = ("auto", "auto, host 100 %")


@dataclass(frozen=True)
class _Theirs:
    """MB without and with Echo, and samples a second where published; ``double`` is at twice the batch."""

    base: float
    echo: float
    base_rate: float | None = None
    echo_rate: float | None = None
    double: tuple[float, float] | None = None
    others: Mapping[str, tuple[float, float]] | None = None


@dataclass(frozen=True)
class _Subject:
    model: str
    theirs: _Theirs
    changes: Mapping[str, int]


_TBD = _Theirs(9117, 4375, 947.7, 984.0, (7749, 1215.6), {"theirs, cuDNN": (9763, 1027.0)})
_LAYERS = {1: (7930, 3080), 3: (10720, 5780), 4: (12380, 7210), 5: (13510, 8050)}
SWEEP_POINT = ("tbd 2 layers, H 512", _Theirs(9300, 4340))  # of both sweeps: tbd itself
_WIDTHS = {256: (5360, 2890), 1024: (18330, 7660)}
SUBJECTS: dict[str, _Subject] = {
    "tbd": _Subject("tbd", _TBD, {}),
    "tbd two tensors": _Subject("tbd", _TBD, {"normalised": True}),
    "groundhog": _Subject("groundhog", _Theirs(4531, 2613, 499.9, 552.8), {}),
    "best": _Subject("best", _Theirs(9911, 4107, 129.1, 139.6), {}),
    **{f"tbd {n} layers": _Subject("tbd", _Theirs(*mb), {"layers": n}) for n, mb in _LAYERS.items()},
    **{
        f"tbd H {h}": _Subject("tbd", _Theirs(*mb), {"width": h, "attention": h, "embedding": h})
        for h, mb in _WIDTHS.items()
    },
}
SMALLER: dict[str, int] = {"length": 8, "source_length": 8}  # of a smoke test
CASES = tuple(SUBJECTS)
QUICK = ("tbd",)


def rows(name: str, quick: bool) -> Iterator[Row]:
    subject = SUBJECTS[name]
    case = _Case(name, subject, SMALLER if quick else {})
    if quick:
        yield from case.at_once(None, 0.9 * case.step.unplanned_bytes / MB)
        return
    yield from case.published()
    if name.startswith("tbd "):
        yield from case.at_once(None, subject.theirs.echo, LINKS_OF_SWEEPS, echo=False)
        return
    yield from case.at_once(None, subject.theirs.echo)
    yield from case.smallest()
    if subject.theirs.double is not None:
        yield from case.sweep_point(*SWEEP_POINT)
        yield from case.doubled(subject.theirs.double[0])


class _Case:
    def __init__(self, name: str, subject: _Subject, changes: Mapping[str, int]) -> None:
        self.name, self.subject, self.changes = name, subject, {**subject.changes, **changes}
        self.batch = BATCHES[subject.model]
        self.step = self._captured(self.batch)

    def _captured(self, batch: int) -> Footprint:
        make = lambda: sockeye(self.subject.model, batch, **self.changes)  # noqa: E731
        return Footprint(make, machine_named(MACHINE), adam=True)

    def _row(self, method: str, columns: Mapping[str, Any], checks: tuple[Check, ...] = (), batch: int = 0) -> Row:
        shown = {
            "case": self.name,
            "method": method,
            "batch": batch or self.batch,
            "peak_mb": None,
            "base_over_peak": None,
        }
        return Row("sockeye", {**shown, **columns}, checks)

    def published(self) -> Iterator[Row]:
        theirs = self.subject.theirs
        known = {"theirs, base": (theirs.base, theirs.base_rate), "theirs, Echo": (theirs.echo, theirs.echo_rate)}
        for method, (peak, rate) in {**known, **(theirs.others or {})}.items():
            yield self._row(method, {"peak_mb": peak, "base_over_peak": theirs.base / peak, "samples_a_second": rate})
        if theirs.double is not None:
            peak, rate = theirs.double
            columns = {"peak_mb": peak, "base_over_peak": theirs.base / peak, "samples_a_second": rate}
            yield self._row("theirs, Echo", columns, batch=2 * self.batch)

    def _columns(self, step: Footprint, batch: int, peak: float, overhead: float) -> dict[str, Any]:
        seconds = step.program.seconds * (1 + overhead)
        return {
            "peak_mb": peak / MB,
            "base_over_peak": step.unplanned_bytes / peak,
            "above_resident": (step.unplanned_bytes - step.step.resident_bytes) / (peak - step.step.resident_bytes),
            "overhead_percent": 100 * overhead,
            "samples_a_second": batch / seconds,
        }

    def _keep_all(self, step: Footprint, batch: int) -> Row:
        floor, where = step.floor()
        columns = {
            **self._columns(step, batch, step.unplanned_bytes, 0.0),
            "ops": len(step.program.ops),
            "resident_mb": step.step.resident_bytes / MB,
            "floor_mb": floor / MB,
            "floor_at": where,
            "capture_cpu_seconds": step.capture_cpu_seconds,
        }
        return self._row("keep-all", columns, batch=batch)

    def _planned(self, step: Footprint, batch: int, method: str, budget: float, found: Planned) -> Row:
        columns: dict[str, Any] = {"budget_mb": budget, "status": found.answer.status.name}
        if found.overhead is not None:
            columns |= self._columns(step, batch, found.peak_bytes, found.overhead)
        if found.answer.bound is not None:
            columns["bound_percent"] = 100 * found.answer.bound
        columns["plan_cpu_seconds"] = found.cpu_seconds
        return self._row(method, columns, batch=batch)

    def at_once(
        self,
        step: Footprint | None,
        budget: float,
        methods: Sequence[str] = tuple(LINKS),
        *,
        batch: int = 0,
        echo: bool = True,
    ) -> Iterator[Row]:
        """Keep-all, Echo if wanted, and the default at a budget in MB (definition 3)."""
        step, batch = step or self.step, batch or self.batch
        yield self._keep_all(step, batch)
        if echo:
            peak, overhead = min(step.echo())
            yield self._row("echo, least peak", self._columns(step, batch, peak, overhead), batch=batch)
            theirs = step.echo_within(int(budget * MB))
            columns = {"status": "INFEASIBLE"} if theirs is None else self._columns(step, batch, *theirs)
            yield self._row("echo", {**columns, "budget_mb": budget}, batch=batch)
        for method in methods:
            found = step.plan(int(budget * MB), link=LINKS[method])
            row = self._planned(step, batch, method, budget, found)
            limit = MOST_OVERHEAD if self.name in LIMITED else float("inf")
            yield Row(row.question, row.columns, (_reached(budget, found, limit),))

    def smallest(self) -> Iterator[Row]:
        """The smallest peaks at the limit."""
        yield self._smallest("echo", self.step.smallest_of_echo(MOST_OVERHEAD))
        yield self._smallest("auto", self.step.smallest(MOST_OVERHEAD))

    def _smallest(self, method: str, found: Smallest) -> Row:
        columns = {
            **self._columns(self.step, self.batch, found.peak_bytes, found.overhead),
            "no_less_mb": found.no_less_bytes / MB,
            "plan_cpu_seconds": found.cpu_seconds,
        }
        return self._row(f"{method}, smallest at {MOST_OVERHEAD:.0%}", columns)

    def sweep_point(self, name: str, theirs: _Theirs) -> Iterator[Row]:
        """This model as a point of a sweep, where theirs was measured apart."""
        point = copy.copy(self)
        point.name, point.subject = name, _Subject(self.subject.model, theirs, {})
        yield from point.published()
        yield from point.at_once(None, theirs.echo, LINKS_OF_SWEEPS, echo=False)

    def doubled(self, budget: float) -> Iterator[Row]:
        """Definition 4."""
        batch = 2 * self.batch
        step = self._captured(batch)
        rate = self.batch / self.step.program.seconds
        most = batch / step.program.seconds / rate
        for row in self.at_once(step, budget, batch=batch, echo=False):
            faster = row.columns.get("samples_a_second")
            if faster is not None:
                columns = {**row.columns, "over_base_rate": faster / rate, "no_plan_above": most}
                reached = faster / rate >= FASTER or most < FASTER
                checks = (*row.checks, holds(f"{FASTER} x the base's rate, or no plan can", reached))
                row = Row(row.question, columns, checks if row.columns["method"] in LINKS else ())
            yield row


def _reached(budget: float, found: Planned, limit: float) -> Check:
    """Definition 3."""
    reached = found.overhead is not None and found.overhead <= limit + ABOVE
    forbidden = found.answer.bound is not None and found.answer.bound > limit
    within = "" if limit == float("inf") else f" at {limit:.0%}, or forbidden by a bound"
    return holds(f"{budget:g} MB{within}", reached or forbidden)
