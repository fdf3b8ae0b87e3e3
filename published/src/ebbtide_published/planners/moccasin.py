"""Retention intervals in constraint programming: an exact planner for small programs (Moccasin, Bartan et al. 2023).

Every op may run up to ``copies`` times, its buffers are held for an interval after each run, and one cumulative
constraint says that the intervals fit the budget. The model and its definitions are in ``cp_child``, which OR-Tools
solves in a process of its own (decision 0004 and the one named "CP-SAT in a child process"); this file says what
bytes and costs it is given:
1. A *choice buffer* has bytes, is read, and is neither an output nor a mutation. Only choice buffers are dropped
   and made again.
2. Outputs are held from their first run to the end, mutations from theirs to the boundary, what is late (tangents
   and what user code holds) from the boundary to the end; user code's excess lasts for the boundary.
3. An op takes, only while it runs: its workspace; outputs that nobody reads; in a rerun also its generator state and
   those of its outputs that are there already.
4. An op runs again only where it may, and no later than the last stage in which a run can read what it makes.
5. Bytes are divided by their greatest common divisor, the capacity rounded down. Costs are integers as in
   ``interval_state``.

The start point, a greedy plan of small effort, is given as a complete hint: CP-SAT ignores one that leaves a variable
out. An op that it runs more than ``copies`` times may run as often as there, so the bound holds for ``copies`` runs
and the plan may be cheaper than all of those.
"""

from __future__ import annotations

import json
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide.planners.base import PROGRAM_ORDER, Answer, Interrupt, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner, planner_named
from ebbtide.planners.search.greedy import Incumbent, checked, seeds_of, start_from
from ebbtide.planners.search.interval_state import COST_RESOLUTION
from ebbtide.planners.search.reruns_from_kept import last_rerun_stage
from ebbtide.step.program import Program
from ebbtide_published.planners import cp_child as _cp_child

__all__ = ["Solver", "request_of", "retention", "retention_plan"]

BOUND_CLASS = f"{PROGRAM_ORDER}, reruns: once a stage, ascending"
COPIES = 2  # as in the paper's figures; a third never paid where both were proven (Checkmate graphs, 50 to 85 %)
START_EFFORT = 2_000  # moves of the start point
LIMIT_PER_MOVE = 1e-4  # of CP-SAT's deterministic time, of which one was 10 to 20 s on the Checkmate graphs
POLL_SECONDS = 0.1  # between looks at the interrupt

Line = dict[str, Any]


@planner("retention", module="ortools")
def retention(problem: Problem) -> Answer:
    """Retention intervals with two runs per op."""
    return retention_plan(problem, copies=COPIES)


def retention_plan(problem: Problem, *, copies: int) -> Answer:
    """The best plan with at most ``copies`` runs per op that the effort finds, with its bound.

    Raises:
        UsageError: if OR-Tools is not installed.
    """
    planner_named("retention")
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    found = _start(problem)
    request = request_of(problem.program, problem.above_budget_bytes, copies=copies, reruns=found.reruns)
    limit = problem.effort * LIMIT_PER_MOVE
    request["parameters"] = {"max_deterministic_time": limit, "random_seed": problem.seed}
    with Solver() as solver:
        said = _listen(found, request, solver.solve(request, problem.interrupt))
    notes = {"copies": str(copies), "solver": said}
    return checked(problem, found, notes, f"{BOUND_CLASS}, copies: {copies}")


def _start(problem: Problem) -> Incumbent:
    """A plan of small effort to start from, if one is found."""
    found = Incumbent(replace(problem, effort=min(problem.effort, START_EFFORT)))
    found.tell("start point")
    for reruns in ([], *seeds_of(problem)):
        start_from(found, reruns)
    if found.reruns is None:
        found.descend(found.problem.effort // 2, problem.seed)
    found.anneal(found.problem.effort, problem.seed)
    return found


def _listen(found: Incumbent, request: Line, lines: Iterator[Line]) -> str:
    """Keep what the solver finds and proves; how it ended, in our words."""
    extra_runs = sum(row["copies"] - 1 for row in request["ops"])
    rounding = extra_runs * COST_RESOLUTION / 2
    for line in lines:
        if "incumbent" in line:
            found.state.load([(o, t) for o, t in line["incumbent"]])
            fits = found.offer()
            assert fits, f"the solver's plan takes {found.state.peak_bytes} bytes"
        if line.get("bound") is not None:
            bound = max(line["bound"], 0.0) / max(found.state.base_cost, 1) - rounding
            found.bound = max(found.bound or 0.0, bound)
        found.tell("retention intervals")
        if "status" in line:
            status: str = line["status"]
            return _WORDS.get(status, status)
    return _WORDS["interrupted"]


_WORDS = {
    "OPTIMAL": "proved the plan optimal in its class",
    "FEASIBLE": "reached its limit before a proof",
    "UNKNOWN": "reached its limit with no plan better than the start point",
    "INFEASIBLE": "proved that no plan in the class fits",
    "MODEL_INVALID": "refused the model (numbers too large); the plan is the start point",
    "interrupted": "was interrupted; the plan is the best until then",
}


class Solver:
    """The child process with CP-SAT. A context manager: leaving it ends the process."""

    def __enter__(self) -> Solver:
        # By its path: "-m" would import ebbtide first, and with it torch. "-P": this folder is no place for imports.
        command = [sys.executable, "-P", str(Path(_cp_child.__file__))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with _ignoring_broken_pipe():
            self._process.stdin.close()
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def solve(self, request: Line, interrupt: Interrupt) -> Iterator[Line]:
        """The lines that answer a request (``cp_child``), until the last or the interrupt.

        If the process dies, the last line's status says so.
        """
        assert self._process.stdin is not None
        with _ignoring_broken_pipe():
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        while not interrupt:
            try:
                text = self._lines.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if text is None:
                code = self._process.wait()
                yield {"status": f"died (exit code {code}); the plan is the best until then", "bound": None}
                return
            line: Line = json.loads(text)
            yield line
            if "status" in line:
                return


@contextmanager
def _ignoring_broken_pipe() -> Generator[None]:
    """A child that has died is noticed where its lines end."""
    try:
        yield
    except BrokenPipeError:
        pass


def request_of(program: Program, budget: int, *, copies: int, reruns: list[tuple[int, int]] | None = None) -> Line:
    """The data of the constraint program, without ``parameters``.

    Args:
        program: with costs.
        budget: bytes above the start.
        copies: how often an op may run, at least once.
        reruns: of a plan to start from, as op and stage.
    """
    last = _last_useful(program)
    place = {b: index for index, b in enumerate(_choices(program))}
    held = program.pinned.union(program.mutations)
    remade = [set(program.made_by_rerun(o)) - place.keys() for o in range(len(program.ops))]
    useful = None if reruns is None else [(o, t) for o, t in reruns if t <= last[o]]
    runs = [1] * len(program.ops)
    for o, _ in useful or ():
        runs[o] += 1
    unit = max(program.seconds, 1e-30) * COST_RESOLUTION
    request: Line = {
        "capacity": budget + _given_back(program),
        "ops": [
            {
                "cost": max(round(op.seconds / unit), 1),
                "copies": min(max(copies, runs[o]), last[o] - o + 1),
                "last": last[o],
                "state_bytes": op.state_bytes,
                "reads": [place[b] for b in op.inputs if b in place],
                "first_bytes": op.workspace_bytes + _bytes(program, set(op.outputs).difference(held, place)),
                "rerun_bytes": op.workspace_bytes + op.state_bytes + _bytes(program, remade[o]),
            }
            for o, op in enumerate(program.ops)
        ],
        "buffers": [{"producer": program.buffers[b].producer, "bytes": program.buffers[b].bytes} for b in place],
        "fixed": _fixed(program),
        "reruns": useful,
    }
    return _scaled(request)


def _choices(program: Program) -> list[int]:
    """Choice buffers (definition 1)."""
    held = program.pinned.union(program.mutations)
    return [b for b, buffer in enumerate(program.buffers) if buffer.bytes and program.readers[b] and b not in held]


def _last_useful(program: Program) -> list[int]:
    """Per op, the last stage in which it may run again to any use (definition 4); the op itself if there is none."""
    choices = set(_choices(program))
    last = list(range(len(program.ops)))
    for o in range(len(last) - 1, -1, -1):
        readers = [r for b in program.ops[o].outputs if b in choices for r in program.readers[b]]
        last[o] = min(last_rerun_stage(program, o), max((last[r] for r in readers), default=o))
    return last


def _bytes(program: Program, buffers: Iterable[int]) -> int:
    return sum(program.buffers[b].bytes for b in buffers)


def _given_back(program: Program) -> int:
    """By how much less is there after the boundary than before, apart from what ops have made."""
    return max(-program.late_bytes, 0)


def _fixed(program: Program) -> list[tuple[int, int, int]]:
    """Intervals that no choice changes (definition 2), as start, end and bytes."""
    n = len(program.ops)
    boundary, end = _cp_child.boundary_event(n, program.boundary), _cp_child.end_event(n)
    found = [
        (boundary, end, max(program.late_bytes, 0)),
        (0, boundary, _given_back(program)),  # a capacity that is so much larger has no room for it until then
        (boundary, boundary + 1, program.between_excess_bytes),
    ]
    for b in sorted(program.pinned.union(program.mutations)):
        o = program.buffers[b].producer
        if o is not None:
            until = boundary if b in program.mutations else end
            found.append((_cp_child.event(n, o, o), until, program.buffers[b].bytes))
    return [each for each in found if each[2]]


def _scaled(request: Line) -> Line:
    """A request with bytes and costs as the solver takes them (definition 5)."""
    keys = ("first_bytes", "rerun_bytes", "state_bytes")
    sizes = [row[key] for row in request["ops"] for key in keys]
    sizes += [row["bytes"] for row in request["buffers"]] + [size for _, _, size in request["fixed"]]
    unit = math.gcd(*sizes) or 1
    return request | {
        "capacity": request["capacity"] // unit,
        "ops": [row | {key: row[key] // unit for key in keys} for row in request["ops"]],
        "buffers": [row | {"bytes": row["bytes"] // unit} for row in request["buffers"]],
        "fixed": [(start, end, size // unit) for start, end, size in request["fixed"]],
    }
