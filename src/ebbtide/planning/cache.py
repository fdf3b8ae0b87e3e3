"""Plans on disk: what was found for a program at a budget is found again, and starts the search for its neighbours.

Definitions:
1. The *structure* of a program is what its ops call and which buffers they read and make, without sizes and costs.
   Programs of one structure (another batch, another sequence length) take each other's schedules as start points.
2. An *entry* is one answer, in a file named by structure and by a digest of all that the answer depends on: program,
   costs, budget, planner, effort, seed and this package's version. It holds what was digested, and is not trusted
   where that differs; its schedule is judged anew by whoever takes it. It may say that none was found.
3. A *choice* says by which rewrites the best plan of a captured program came about, so that no other is looked at.
4. A *least* is the schedule of the least peak that was found for a program, whatever budget was asked for.
5. Entries are JSON, written atomically; beyond :data:`MOST_BYTES` those that were used longest ago go.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ebbtide.files import cache_directory, keep, read_record
from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.step.program import Program
from ebbtide.step.provenance import Provenance
from ebbtide.step.rewrite import Rewrite
from ebbtide.step.schedule import Schedule

__all__ = ["MOST_BYTES", "CachedAnswer", "PlanCache", "plans_directory", "share_of", "structure_of"]

MOST_BYTES = 256 * 2**20
NEAR = 2  # start points taken from each side of a budget
_SCHEMA = "ebbtide-plans/4"
_CHOICES_SCHEMA, _CHOICE = "ebbtide-choices/1", "choice-"
_LEAST_SCHEMA, _LEAST = "ebbtide-least/1", "least-"
_KEPT = (Status.OPTIMAL, Status.FEASIBLE, Status.INFEASIBLE)  # what a clock or an interrupt ended is not worth keeping


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An entry.

    Attributes:
        answer: as the planner gave it.
        smallest_above_bytes: the least peak above the start for which a schedule was found; ``None`` if nobody looked.
    """

    answer: Answer
    smallest_above_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        schedule = self.answer.schedule
        return {
            "status": self.answer.status.name,
            "bound": self.answer.bound,
            "bound_class": self.answer.bound_class,
            "notes": self.answer.notes,
            "smallest_above_bytes": self.smallest_above_bytes,
            "schedule": None if schedule is None else schedule.to_json(),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> CachedAnswer:
        """What :meth:`to_json` wrote; where that is damaged, this raises what comes of it."""
        notes = {str(k): str(v) for k, v in data["notes"].items()}
        if Provenance.from_dict(notes).notes != notes:
            raise ValueError("a planner's notes say what is not the planner's to say")
        answer = Answer(
            Status[data["status"]],
            None if data["schedule"] is None else Schedule.from_json(data["schedule"]),
            bound=None if data["bound"] is None else _finite(data["bound"]),
            bound_class=str(data["bound_class"]),
            notes=notes,
        )
        smallest = None if data["smallest_above_bytes"] is None else int(data["smallest_above_bytes"])
        is_refusal = answer.status is Status.INFEASIBLE
        negative = min(smallest or 0, answer.bound or 0.0) < 0
        if answer.status not in _KEPT or negative or is_refusal is not (answer.schedule is None):
            raise ValueError("no such answer is kept")
        return CachedAnswer(answer, smallest)


class PlanCache:
    """Answers of planners on disk.

    Args:
        directory: :func:`plans_directory` if ``None``.
        most_bytes: what all entries together may take.
    """

    def __init__(self, directory: Path | None = None, *, most_bytes: int = MOST_BYTES) -> None:
        self._directory = directory or plans_directory()
        self._most_bytes = most_bytes

    def load(self, planner: str, problem: Problem) -> CachedAnswer | None:
        """The answer that ``planner`` gave to this very problem, or ``None``. What is damaged counts as absent."""
        key = _key(planner, problem)
        path = self._path(problem.program, key)
        found = read_record(path, _SCHEMA, lambda data: CachedAnswer.from_json(data) if data["key"] == key else None)
        if found is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return found

    def near(self, problem: Problem) -> list[Schedule]:
        """Schedules of programs of the same structure, those of the nearest budgets first as shares of the step."""
        share = share_of(problem.program, problem.above_budget_bytes)
        found: list[tuple[float, str, Schedule]] = []
        for path in self._entries(f"{structure_of(problem.program)}-*.json"):
            entry = read_record(path, _SCHEMA, _share_and_schedule)
            if entry is not None:
                found.append((entry[0] - share, path.name, entry[1]))
        below = sorted((each for each in found if each[0] <= 0), key=lambda each: (-each[0], each[1]))
        above = sorted((each for each in found if each[0] > 0), key=lambda each: each[:2])
        return [schedule for _, _, schedule in (*below[:NEAR], *above[:NEAR])]

    def store(self, planner: str, problem: Problem, cached: CachedAnswer) -> None:
        """Keep an answer that nothing has cut short; a cache that cannot be written is left alone."""
        if cached.answer.status not in _KEPT:
            return
        key = _key(planner, problem)
        data = {
            "schema": _SCHEMA,
            "key": key,
            "share": share_of(problem.program, problem.above_budget_bytes),
            **cached.to_json(),
        }
        path = self._path(problem.program, key)
        keep(path, self._directory / ".lock", lambda: data, self._make_room)

    def chosen(self, planner: str, problem: Problem, among: str) -> tuple[Rewrite, ...] | None:
        """The rewrites of the best plan that was found for a captured program; ``None`` if none is known.

        Args:
            planner: its name.
            problem: for the captured program.
            among: which alternatives there were.
        """
        key = {**_key(planner, problem), "among": among}
        found = read_record(
            self._path(problem.program, key, _CHOICE),
            _CHOICES_SCHEMA,
            lambda data: tuple(map(Rewrite.from_json, data["rewrites"])) if data["key"] == key else None,
        )
        return found

    def choose(self, planner: str, problem: Problem, among: str, rewrites: Sequence[Rewrite]) -> None:
        """Keep which rewrites gave the best plan of a captured program; as for :meth:`chosen`."""
        key = {**_key(planner, problem), "among": among}
        data = {"schema": _CHOICES_SCHEMA, "key": key, "rewrites": [each.to_json() for each in rewrites]}
        path = self._path(problem.program, key, _CHOICE)
        keep(path, self._directory / ".lock", lambda: data, self._make_room)

    def least(self, problem: Problem) -> Schedule | None:
        """The schedule of the least peak found for a program, whatever the budget; ``None`` if there is none."""
        key = _key_of_least(problem)
        return read_record(
            self._path(problem.program, key, _LEAST),
            _LEAST_SCHEMA,
            lambda data: Schedule.from_json(data["schedule"]) if data["key"] == key else None,
        )

    def keep_least(self, problem: Problem, schedule: Schedule) -> None:
        """Keep that one."""
        key = _key_of_least(problem)
        data = {"schema": _LEAST_SCHEMA, "key": key, "schedule": schedule.to_json()}
        keep(self._path(problem.program, key, _LEAST), self._directory / ".lock", lambda: data, self._make_room)

    def _make_room(self) -> None:
        """Remove the plans that were used longest ago (definition 5)."""
        known = [(path, path.stat()) for path in self._entries("*.json")]
        total = sum(stat.st_size for _, stat in known)
        for path, stat in sorted(known, key=lambda each: (each[1].st_mtime, each[0].name)):
            if total <= self._most_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size

    def _entries(self, pattern: str) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from sorted(self._directory.glob(pattern))

    def _path(self, program: Program, key: dict[str, str], kind: str = "") -> Path:
        return self._directory / f"{kind}{structure_of(program)}-{_digest(key)}.json"


def plans_directory() -> Path:
    """Where plans are kept: below the user's cache directory."""
    return cache_directory() / "plans"


def _share_and_schedule(data: dict[str, Any]) -> tuple[float, Schedule]:
    return _finite(data["share"]), Schedule.from_json(data["schedule"])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:24]


def structure_of(program: Program) -> str:
    """The digest of a program's structure (definition 1)."""
    ops = [(op.target, op.inputs, op.outputs, op.once) for op in program.ops]
    ends = (program.boundary, program.forward_outputs, program.gradients, program.mutations, len(program.buffers))
    return _digest((ops, ends))


def share_of(program: Program, above_budget_bytes: int) -> float:
    """The budget as a share of all that the step makes: comparable between programs of one structure."""
    return above_budget_bytes / max(sum(buffer.bytes for buffer in program.buffers), 1)


def _key(planner: str, problem: Problem) -> dict[str, str]:
    """All that an answer depends on (definition 2)."""
    program = problem.program
    costs = [(op.seconds, op.workspace_bytes) for op in program.ops]
    return {
        "version": _version(),
        "program": program.fingerprint,
        "costs": _digest((costs, program.between_bytes, program.held_bytes)),
        "above_budget_bytes": str(problem.above_budget_bytes),
        "planner": planner,
        "machine": "" if problem.machine is None else repr(problem.machine),
        "tiers": repr(problem.tiers),
        "effort": str(problem.effort),
        "seed": str(problem.seed),
    }


def _key_of_least(problem: Problem) -> dict[str, str]:
    """All that the least peak depends on: not what is asked for."""
    return _key("", replace(problem, above_budget_bytes=0, effort=0, seed=0))


def _version() -> str:
    """This package's; a tree that is not installed has none."""
    try:
        return metadata.version("ebbtide")
    except metadata.PackageNotFoundError:
        return "source"
