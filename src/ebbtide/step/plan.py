"""The record of a plan: a schedule with its status, its bound and where it comes from. Immutable; a JSON file.

What users hold is :class:`ebbtide.Plan` (``report/plan.py``): this record, and what can be written and drawn of it.

A plan file holds the program as well, so that it can be read, judged and explained without the model. Reading
one executes nothing: the schedule is checked for legality and simulated anew, and the recorded peak must agree.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeGuard

from ebbtide.errors import PlanFileError, PlanMismatch, UsageError
from ebbtide.files import write_json
from ebbtide.step.legality import check
from ebbtide.step.machine import Machine
from ebbtide.step.program import Program
from ebbtide.step.provenance import Provenance
from ebbtide.step.rewrite import Rewritten
from ebbtide.step.schedule import Boundary, Offload, Schedule
from ebbtide.step.simulate import Timeline, simulate
from ebbtide.step.status import Status
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.version import __version__

__all__ = ["SCHEMA", "PlanRecord", "path_of"]

SCHEMA = "ebbtide-plan/1"
_LARGEST_FILE_BYTES = 2**30  # a 50,000-op plan takes about 30 MiB; anything near this is no plan of ours


@dataclass(frozen=True, repr=False)
class PlanRecord:
    """What to run, what it will take, and how good it is.

    Attributes:
        program: what is planned.
        schedule: what to run.
        status: how planning ended.
        case: name of what was captured.
        planner: name of the planner.
        budget_bytes: bytes of the step's peak that it must stay within.
        resident_bytes: bytes that are resident at a step's start, optimizer state that is still to come among them.
        reserve_bytes: bytes kept free inside the budget for what the proof of the first step remembers.
        floor_bytes: a proven lower bound on budgets of schedules with PyTorch's op order and boundary: on their
            peak, and the reserve.
        floor_op: index of the op that pins the floor.
        smallest_bytes: the least budget for which a schedule was found, the reserve included.
        bound: proven lower bound on the predicted overhead at this budget, or ``None``.
        bound_class: the class of schedules for which ``bound`` holds, and that it holds with these costs.
        plan_seconds: what planning took, capture and costs not included.
        provenance: device, threads, torch build, costs, effort, seed and the like.
        machine: planned for, with its links to slower memory; ``None`` is the device at hand, where nothing moves.
        tiers: that buffers were allowed to be moved to, by name.
        rewritten: how ``program`` comes from the captured one; ``None`` where it is that. Budgets in percent, overhead
            and bound are of the captured step all the same.
        resident_parts: what is resident by kind, where that is known: weights, optimizer state and so on.
        smallest_is_searched: whether ``smallest_bytes`` was looked for; else it is what this schedule needs.
    """

    program: Program
    schedule: Schedule
    status: Status
    case: str
    planner: str
    budget_bytes: int
    resident_bytes: int
    reserve_bytes: int
    floor_bytes: int
    floor_op: int
    smallest_bytes: int
    bound: float | None
    bound_class: str
    plan_seconds: float
    provenance: Provenance = field(default_factory=Provenance)
    machine: Machine | None = None
    tiers: tuple[str, ...] = ()
    rewritten: Rewritten | None = None
    resident_parts: Mapping[str, int] = field(default_factory=dict[str, int])
    smallest_is_searched: bool = True

    @cached_property
    def timeline(self) -> Timeline:
        """Bytes and seconds of every action."""
        return simulate(self.program, self.schedule, self.machine)

    @cached_property
    def baseline(self) -> Timeline:
        """The timeline of ``program`` unplanned."""
        return simulate(self.program, unplanned_schedule(self.program))

    @property
    def predicted_peak_bytes(self) -> int:
        """Peak of the planned step, resident part included."""
        return self.resident_bytes + self.timeline.above_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the unplanned step, resident part included."""
        above = self.baseline.above_bytes if self.rewritten is None else self.rewritten.above_bytes
        return self.resident_bytes + above

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the planned step's ops."""
        return self.timeline.seconds

    @property
    def baseline_seconds(self) -> float:
        """Predicted seconds of the unplanned step's ops."""
        return self.baseline.seconds if self.rewritten is None else self.rewritten.seconds

    @property
    def boundary_bytes(self) -> int:
        """What the forward leaves behind, bytes above the step's start: all that crosses the boundary, and outputs."""
        after = int(self.timeline.live_bytes[self.schedule.actions.index(Boundary())])
        return after - self.program.late_bytes

    @property
    def overhead(self) -> float:
        """Planned over unplanned seconds, minus one."""
        return self.step_seconds / self.baseline_seconds - 1 if self.baseline_seconds else 0.0

    @property
    def gap(self) -> float | None:
        """Overhead minus bound, within the bound's class; ``None`` without a bound."""
        return None if self.bound is None else self.overhead - self.bound

    # -- identity -------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Identity of what is run, of what computes it and of the bytes that were asked for; no costs, no provenance.

        Equal plans have equal fingerprints. Plans that differ in costs or origin alone may share one.
        """
        sizes = (self.budget_bytes, self.resident_bytes, self.reserve_bytes)
        digest = hashlib.sha256(repr((self.program.fingerprint, self.case, self.planner, *sizes)).encode())
        for column in self.schedule.columns:
            digest.update(column.tobytes())
        digest.update(repr([each.tier for each in self.schedule.actions if isinstance(each, Offload)]).encode())
        return digest.hexdigest()[:32]

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    # -- files ----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """The plan's numbers as plain data, keys as the attributes."""
        return {
            "case": self.case,
            "planner": self.planner,
            "status": self.status.name,
            "budget_bytes": self.budget_bytes,
            "resident_bytes": self.resident_bytes,
            "reserve_bytes": self.reserve_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "floor_bytes": self.floor_bytes,
            "smallest_bytes": self.smallest_bytes,
            "step_seconds": self.step_seconds,
            "baseline_seconds": self.baseline_seconds,
            "overhead": self.overhead,
            "bound": self.bound,
            "bound_class": self.bound_class,
            "gap": self.gap,
            "plan_seconds": self.plan_seconds,
            "ops": len(self.program.ops),
            "provenance": self.provenance.as_dict(),
        }

    def to_json(self) -> dict[str, Any]:
        """The whole plan as plain data."""
        return {
            "schema": SCHEMA,
            "written_by": f"ebbtide {__version__}",
            **self.summary(),
            "floor_op": self.floor_op,
            "machine": None if self.machine is None else self.machine.to_json(),
            "tiers": list(self.tiers),
            **({} if self.rewritten is None else {"rewritten": self.rewritten.to_json()}),
            **({"resident_parts": dict(self.resident_parts)} if self.resident_parts else {}),
            **({} if self.smallest_is_searched else {"smallest_is_searched": False}),
            "program": self.program.to_json(),
            "schedule": self.schedule.to_json(),
        }

    def save(self, path: str | Path) -> Path:
        """Write the plan to ``path`` as JSON, atomically.

        Raises:
            UsageError: for what is not a path.
            OSError: if the file cannot be written.
        """
        path = path_of(path, "Plan.save")
        write_json(path, self.to_json())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan that :meth:`save` wrote; the file may be compressed by ``xz``.

        Raises:
            UsageError: for what is not a path.
            PlanFileError: if the file is missing, truncated, damaged, or holds an illegal schedule.
            PlanMismatch: if it has another schema.
        """
        path = path_of(path, "Plan.load")
        try:
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                raise PlanFileError(f"{path} is larger than any plan; nothing was read", path=path)
            data = json.loads(_text_of(path))
        except OSError as error:
            raise PlanFileError(
                f"{path} cannot be read ({error.strerror or error}); give the path of a plan file", path=path
            ) from error
        except (ValueError, RecursionError, lzma.LZMAError, EOFError) as error:
            raise PlanFileError(
                f"{path} is not a whole plan file ({error}): it ends early, or something else has written to it; "
                f"{_MAKE_ANEW}",
                path=path,
            ) from error
        if not _is_object(data) or "schema" not in data:
            raise PlanFileError(
                f"{path} is not a plan file; make one with Plan.save or `ebbtide plan --out`", path=path
            )
        if data["schema"] != SCHEMA:
            writer = data.get("written_by", "another program or version")
            raise PlanMismatch(
                f"{path} was written by {writer} in schema {data['schema']!r}; ebbtide {__version__} reads {SCHEMA!r}: "
                f"{_MAKE_ANEW}",
                differences=[f"schema: plan {data['schema']!r}, here {SCHEMA!r}"],
            )
        return cls._from_json(data, str(path))

    @classmethod
    def _from_json(cls, data: dict[str, Any], path: str) -> Self:
        try:
            plan = cls(
                program=Program.from_json(data["program"]),
                schedule=Schedule.from_json(data["schedule"]),
                status=Status[data["status"]],
                case=str(data["case"]),
                planner=str(data["planner"]),
                budget_bytes=int(data["budget_bytes"]),
                resident_bytes=int(data["resident_bytes"]),
                reserve_bytes=int(data["reserve_bytes"]),
                floor_bytes=int(data["floor_bytes"]),
                floor_op=int(data["floor_op"]),
                smallest_bytes=int(data["smallest_bytes"]),
                bound=None if data["bound"] is None else float(data["bound"]),
                bound_class=str(data["bound_class"]),
                plan_seconds=float(data["plan_seconds"]),
                provenance=Provenance.from_dict(data["provenance"]),
                machine=None if data["machine"] is None else Machine.from_json(data["machine"]),
                tiers=tuple(map(str, data["tiers"])),
                rewritten=None if data.get("rewritten") is None else Rewritten.from_json(data["rewritten"]),
                resident_parts={str(kind): int(size) for kind, size in data.get("resident_parts", {}).items()},
                smallest_is_searched=bool(data.get("smallest_is_searched", True)),
            )
            violations = check(plan.program, plan.schedule, links=None if plan.machine is None else plan.machine.links)
            recorded = int(data["predicted_peak_bytes"])
            predicted = recorded if violations else plan.predicted_peak_bytes
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            raise PlanFileError(f"{path} is damaged ({what}); {_MAKE_ANEW}", path=path) from error
        if violations:
            raise PlanFileError(f"{path} holds an illegal schedule ({violations[0]}); {_MAKE_ANEW}", path=path)
        if recorded != predicted:
            raise PlanFileError(
                f"{path} says a peak of {recorded} bytes, its schedule takes {predicted}; {_MAKE_ANEW}", path=path
            )
        return plan


_XZ = b"\xfd7zXZ\x00"
_MAKE_ANEW = "make it anew with `ebbtide plan CASE --budget B --out plan.json` or Plan.save"


def _text_of(path: Path) -> str:
    """What the file says, where it is compressed by ``xz`` too, as those of ``docs/plans`` are."""
    content = path.read_bytes()
    if content.startswith(_XZ):
        unpacking = lzma.LZMADecompressor()
        content = unpacking.decompress(content, max_length=_LARGEST_FILE_BYTES)
        if not unpacking.eof:
            raise EOFError("the compressed data ends early, or holds more than any plan")
    return content.decode("utf-8")


def path_of(value: object, caller: str) -> Path:
    """``value`` as the path of a file.

    Raises:
        UsageError: naming ``caller``, for what is not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"{caller} takes the path of a file, not {type(value).__name__}", argument="path", value=value)
    return Path(value)  # pyright: ignore[reportUnknownArgumentType]


def _is_object(data: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(data, dict)
