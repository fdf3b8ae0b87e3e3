"""What a report of a plan shows, as plain data: the record behind the HTML page.

Columns, not rows: a plan of 10,000 ops has to open at once. Texts that repeat (modules, lines, targets) are kept once,
and named by their place in ``texts``. All bytes are exact, all seconds have seven digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.planners.bounds.floor_parts import floor_parts
from ebbtide.report.records.copies import copies_of
from ebbtide.report.records.course import Course, planned_course, unplanned_course
from ebbtide.report.records.decisions import Decision, Why, decisions_of, why_of
from ebbtide.report.records.points import Measured, Point, points_of
from ebbtide.report.records.resident import resident_of
from ebbtide.step.plan import PlanRecord
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Offload, Reload
from ebbtide.version import __version__

__all__ = ["Page", "page_of"]

SCHEMA = "ebbtide-page/1"
_KINDS = {Compute: "c", Boundary: "b", Offload: "o", Reload: "r"}
_NO_OP = -1


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        plan: shown in detail.
        points: the frontier.
        measured: of runs; empty where there are none.
    """

    plan: PlanRecord
    points: tuple[Point, ...]
    measured: tuple[Measured, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything that the page's script draws."""
        plan = self.plan
        texts = _Texts()
        columns = {"ops": _ops(plan.program, texts), "buffers": _buffers(plan, texts)}
        planned = planned_course(plan)
        return {
            "schema": SCHEMA,
            "version": __version__,
            "case": plan.case,
            "planner": plan.planner,
            "status": plan.status.name,
            "status_text": plan.status.value,
            "bytes": _sizes(plan),
            "resident_parts": [[kind, size] for kind, size in resident_of(plan).items()],
            "seconds": {"planned": _short(plan.step_seconds), "unplanned": _short(plan.baseline_seconds)},
            "overhead": plan.overhead,
            "bound": plan.bound,
            "bound_class": plan.bound_class,
            "gap": plan.gap,
            "tiers": list(plan.tiers),
            "rewrites": [str(each) for each in plan.rewritten.rewrites] if plan.rewritten else [],
            "boundary": plan.program.boundary,
            **columns,
            "decisions": [each.value for each in Decision],
            "whys": [each.value for each in Why],
            "planned": _course(planned),
            "unplanned": _course(unplanned_course(plan)),
            "floor": _floor(plan),
            "points": [dataclasses.asdict(each) for each in self.points],
            "measured": [dataclasses.asdict(each) for each in self.measured],
            "texts": texts.texts,
        }


def page_of(
    plan: PlanRecord,
    others: Sequence[PlanRecord] = (),
    *,
    measured: Sequence[Measured] = (),
    runs: Sequence[tuple[PlanRecord, Measured]] = (),
) -> Page:
    """The page of ``plan``.

    Args:
        plan: shown in detail.
        others: plans of the same step that the frontier shows too.
        measured: what runs of the step took.
        runs: likewise, of ``plan`` and ``others``, each with its plan.
    """
    of_this = [each for ran, each in runs if ran is plan]
    return Page(plan, points_of(plan, others, runs), (*of_this, *measured))


class _Texts:
    """Texts, each once."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._place.setdefault(text, len(self._place))

    @property
    def texts(self) -> list[str]:
        return list(self._place)


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _sizes(plan: PlanRecord) -> dict[str, int]:
    return {
        "budget": plan.budget_bytes,
        "resident": plan.resident_bytes,
        "reserve": plan.reserve_bytes,
        "peak": plan.predicted_peak_bytes,
        "unplanned": plan.baseline_peak_bytes,
        "floor": plan.floor_bytes,
        "smallest": plan.smallest_bytes,
        "boundary": plan.boundary_bytes,
    }


def _ops(program: Program, texts: _Texts) -> dict[str, list[Any]]:
    ops = program.ops
    return {
        "name": [texts(op.name) for op in ops],
        "target": [texts(op.target) for op in ops],
        "module": [texts(op.module) for op in ops],
        "source": [texts(op.source) for op in ops],
        "seconds": [_short(op.seconds) for op in ops],
        "state": [op.state_bytes for op in ops],
        "inputs": [list(op.inputs) for op in ops],
    }


def _buffers(plan: PlanRecord, texts: _Texts) -> dict[str, list[Any]]:
    program = plan.program
    copies = copies_of(program, plan.schedule)
    decided = decisions_of(program, plan.schedule, copies, rewritten=plan.rewritten is not None)
    place = {each: index for index, each in enumerate(Decision)}
    why = {each: index for index, each in enumerate(Why)}
    gradients = frozenset(program.gradients)
    return {
        "name": [texts(buffer.name) for buffer in program.buffers],
        "bytes": [buffer.bytes for buffer in program.buffers],
        "op": [_NO_OP if buffer.producer is None else buffer.producer for buffer in program.buffers],
        "decision": [place[each] for each in decided],
        "why": [[why[each] for each in why_of(program, b)] for b in range(len(program.buffers))],
        "gradient": sorted(gradients),
    }


def _course(course: Course) -> dict[str, Any]:
    """Moments and stays in columns; lanes by name, each once."""
    lanes = list(dict.fromkeys(["compute", *(each.lane for each in course.moments)]))
    of = {lane: index for index, lane in enumerate(lanes)}
    moments, stays = course.moments, course.stays
    return {
        "kind": "".join(_KINDS[type(each.action)] for each in moments),
        "target": [_target(each.action) for each in moments],
        "again": [i for i, each in enumerate(moments) if each.again],
        "bytes": [each.bytes for each in moments],
        "begin": [_short(each.begin_seconds) for each in moments],
        "end": [_short(each.end_seconds) for each in moments],
        "wait": [[i, _short(each.wait_seconds)] for i, each in enumerate(moments) if each.wait_seconds > 0],
        "lane": [of[each.lane] for each in moments] if len(lanes) > 1 else [],
        "lanes": lanes,
        "stay_buffer": [each.buffer for each in stays],
        "stay_first": [each.first for each in stays],
        "stay_last": [each.last for each in stays],
        "later": [i for i, each in enumerate(stays) if each.later],
        "reloaded": [i for i, each in enumerate(stays) if each.reloaded],
    }


def _target(action: Compute | Offload | Reload | Boundary) -> int:
    match action:
        case Compute(op):
            return op
        case Offload(buffer, _) | Reload(buffer):
            return buffer
        case Boundary():
            return _NO_OP


def _floor(plan: PlanRecord) -> dict[str, Any]:
    """What pins the floor; without parts where it is that of another class than of schedules that move nothing."""
    program = plan.program
    parts: list[list[Any]] = []
    moment = "op" if plan.floor_op < len(program.ops) else "end"
    found = floor_parts(program)
    above = plan.floor_bytes - plan.resident_bytes - plan.reserve_bytes
    if (found.bytes, found.op) == (above, plan.floor_op):
        moment = found.moment
        parts = [[each.part.value, each.bytes, _largest(program, each.buffers)] for each in found.parts]
    return {"op": plan.floor_op, "above": above, "moment": moment, "parts": parts}


def _largest(program: Program, buffers: Iterable[int], count: int = 5) -> list[int]:
    return sorted(buffers, key=lambda b: (-program.buffers[b].bytes, b))[:count]
