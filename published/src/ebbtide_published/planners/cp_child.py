"""Retention intervals as a constraint program, and the process that solves it (Moccasin, Bartan et al., ICML 2023).

This file is run by its path, imports nothing of Ebbtide, and OR-Tools only where it solves: OR-Tools and highspy
cannot be loaded in one process, and neither torch nor numba is needed here. What the numbers of a request mean is
decided by ``published.moccasin``.

Definitions (``n`` ops; an *event* is the time at which one op runs in one stage, ``interval_kernels`` definition 1):
1. Op ``o`` in stage ``t`` runs at the event ``(n + 1) * t + o + 1`` and takes one unit of time; in a stage, events
   ascend by op and the first run is last. The boundary is the event ``(n + 1) * boundary``, before its stage's runs;
   the end is ``(n + 1) * n + 1``.
2. Op ``o`` has up to ``copies`` *runs*: the first is in stage ``o``, further ones are optional, in later stages, one
   per stage, in order: run ``i + 1`` only if run ``i``.
3. A *choice buffer* has an interval per run of its producer: from that event until an end that is chosen, at least
   the run itself and at most the next run. All other bytes are functions of the runs.
4. Every run reads each choice buffer from exactly one run of its producer: one that is present, earlier, and whose
   interval holds the whole of the reading event.
5. At any time the intervals, and what an op takes only while it runs, are within the capacity: one cumulative
   constraint. Generator state has an interval from the op's first run to its last, if it has more than one.
6. The least cost of all runs beyond the first is sought.

A schedule in this class that frees each buffer at its last read before it is made again is a solution with the same
bytes at every event, and the schedule of a solution has no more bytes than the solution says. So the optimum is
exact in the class.

Requests are JSON, one per line, until the input ends; each is answered by lines ``{"incumbent": ..., "cost": ...}``,
``{"bound": ...}``, and one last ``{"status": ..., "bound": ...}``. When the input ends the process ends at once.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["boundary_event", "end_event", "event"]

Line = dict[str, Any]


def event(n: int, op: int, stage: int) -> int:
    """The time at which ``op`` runs in ``stage`` (definition 1)."""
    return (n + 1) * stage + op + 1


def boundary_event(n: int, boundary: int) -> int:
    """The time of the boundary."""
    return (n + 1) * boundary


def end_event(n: int) -> int:
    """The time after all events."""
    return (n + 1) * n + 1


class _Model:
    """The constraint program of one request, a method per clause.

    A request has ``capacity``; per op ``ops``: ``cost``, ``copies`` (at most its stages), ``last`` (the last stage),
    ``first_bytes`` and ``rerun_bytes`` (taken only while it runs), ``state_bytes`` and ``reads`` (choice buffers);
    per choice buffer ``buffers``: ``producer`` and ``bytes``; ``fixed`` intervals as start, end, bytes; the start
    plan's ``reruns`` as op and stage, or ``None``; and CP-SAT's ``parameters`` by name.
    """

    def __init__(self, request: Line) -> None:
        from ortools.sat.python import cp_model

        self.request = request
        self.ops: list[Line] = request["ops"]
        self.n = len(self.ops)
        self.model: Any = cp_model.CpModel()
        self.hint: dict[int, int] = {}  # variable's index -> value
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self.stage: list[list[Any]] = []  # per op and run, a constant for the first
        self.present: list[list[Any]] = []
        self.ends: list[list[Any]] = [[] for _ in request["buffers"]]
        reruns: list[tuple[int, int]] = request["reruns"] or []
        self.hinted: list[list[int]] = [[o] for o in range(self.n)]  # per op, the stages of the start plan's runs
        for op, stage in reruns:
            self.hinted[op].append(stage)
        for start, end, size in request["fixed"]:
            self._occupy(self.model.new_fixed_size_interval_var(start, end - start, ""), size)
        for o in range(self.n):
            self._runs(o)
        for b in range(len(self.ends)):
            self._retention(b)
        reads_at = self._reads_at()
        for o in range(self.n):
            for i in range(len(self.stage[o])):
                for b in self.ops[o]["reads"]:
                    self._read(o, i, b)
        for b in range(len(self.ends)):
            self._hint_ends(b, reads_at[b])
        self.model.add_cumulative(self.intervals, self.demands, request["capacity"])
        cost = [(p, row["cost"]) for row, lits in zip(self.ops, self.present, strict=True) for p in lits[1:]]
        self.model.minimize(sum(p * c for p, c in cost))
        if request["reruns"] is not None:
            for variable, value in self.hint.items():
                self.model.add_hint(self.model.get_int_var_from_proto_index(variable), value)

    def _occupy(self, interval: Any, size: int) -> None:
        """Take ``size`` bytes of the capacity during an interval (clause 5)."""
        if size:
            self.intervals.append(interval)
            self.demands.append(size)

    def _at(self, o: int, i: int) -> Any:
        """The event of a run."""
        return (self.n + 1) * self.stage[o][i] + o + 1

    def _was(self, o: int, i: int) -> int:
        """The stage of a run in the start plan; its least if it has no such run."""
        return self.hinted[o][i] if i < len(self.hinted[o]) else o + i

    def _bool(self, value: bool) -> Any:
        variable = self.model.new_bool_var("")
        self.hint[variable.index] = int(value)
        return variable

    def _int(self, low: int, high: int, value: int) -> Any:
        variable = self.model.new_int_var(low, high, "")
        self.hint[variable.index] = value
        return variable

    def _runs(self, o: int) -> None:
        """Add the runs of an op, and what each takes only while it lasts (clause 2)."""
        row, model = self.ops[o], self.model
        stages: list[Any] = [o]
        present: list[Any] = [True]
        self.stage.append(stages)
        self.present.append(present)
        self._occupy(model.new_fixed_size_interval_var(event(self.n, o, o), 1, ""), row["first_bytes"])
        for i in range(1, row["copies"]):
            runs = self._bool(i < len(self.hinted[o]))
            stage = self._int(o + i, row["last"], self._was(o, i))
            model.add(stage == o + i).only_enforce_if(~runs)
            if i > 1:
                model.add_implication(runs, present[-1])
                model.add(stage > stages[-1]).only_enforce_if(runs)
            stages.append(stage)
            present.append(runs)
            lasting = model.new_optional_fixed_size_interval_var(self._at(o, i), 1, runs, "")
            self._occupy(lasting, row["rerun_bytes"])
        if row["state_bytes"] and len(stages) > 1:
            self._state(o)

    def _state(self, o: int) -> None:
        """Generator state of an op that runs more than once."""
        first, low, high = event(self.n, o, o), event(self.n, o, o + 1) + 1, event(self.n, o, self.ops[o]["last"]) + 1
        was = event(self.n, o, self.hinted[o][-1]) + 1 if len(self.hinted[o]) > 1 else low
        end = self._int(low, high, was)
        length = self._int(low - first, high - first, was - first)
        for i in range(1, len(self.stage[o])):
            self.model.add(end >= self._at(o, i) + 1).only_enforce_if(self.present[o][i])
        held = self.model.new_optional_interval_var(first, length, end, self.present[o][1], "")
        self._occupy(held, self.ops[o]["state_bytes"])

    def _retention(self, b: int) -> None:
        """Add the intervals of a choice buffer (clause 3); ends are hinted later, when all reads are known."""
        o, size = self.request["buffers"][b]["producer"], self.request["buffers"][b]["bytes"]
        model, horizon = self.model, end_event(self.n)
        for i in range(len(self.stage[o])):
            least = event(self.n, o, o + i) + 1
            end = self._int(least, horizon, least)
            length = self._int(1, horizon, 1)
            self.ends[b].append((end, length))
            start, runs = self._at(o, i), self.present[o][i]
            self._occupy(model.new_optional_interval_var(start, length, end, runs, ""), size)
            if i:
                previous, _ = self.ends[b][i - 1]
                model.add(previous <= self._at(o, i)).only_enforce_if(runs)
                model.add(end == least).only_enforce_if(~runs)
                model.add(length == 1).only_enforce_if(~runs)

    def _reads_at(self) -> list[list[int]]:
        """Events at which the start plan reads each choice buffer."""
        found: list[list[int]] = [[] for _ in self.ends]
        for o, row in enumerate(self.ops):
            reads: list[int] = row["reads"]
            for b in reads:
                found[b].extend(event(self.n, o, t) for t in self.hinted[o])
        return found

    def _read(self, k: int, j: int, b: int) -> None:
        """Let run ``j`` of op ``k`` read each choice buffer from one run of its producer (clause 4)."""
        model, runs = self.model, self.present[k][j]
        o: int = self.request["buffers"][b]["producer"]
        after = self._at(k, j) + 1
        if len(self.stage[o]) == 1:
            model.add(self.ends[b][0][0] >= after).only_enforce_if(runs)
            return
        hinted = j < len(self.hinted[k])
        made = [t for t in self.hinted[o] if t <= self._was(k, j)]
        chosen: list[Any] = []
        latest = k if j == 0 else self.ops[k]["last"]
        for i in range(len(self.stage[o])):
            if o + i > latest:
                break
            serves = self._bool(hinted and i == len(made) - 1)
            chosen.append(serves)
            model.add(self.ends[b][i][0] >= after).only_enforce_if(serves)
            if i:
                model.add_implication(serves, self.present[o][i])
                model.add(self.stage[o][i] <= self.stage[k][j]).only_enforce_if(serves)
        model.add(sum(chosen) == runs)

    def _hint_ends(self, b: int, reads: list[int]) -> None:
        """The ends that the start plan gives: the last read before the next run."""
        o: int = self.request["buffers"][b]["producer"]
        starts = [event(self.n, o, t) for t in self.hinted[o]]
        for i, (end, length) in enumerate(self.ends[b]):
            if i >= len(starts):
                continue
            limit = starts[i + 1] if i + 1 < len(starts) else end_event(self.n)
            value = max((at + 1 for at in reads if starts[i] < at < limit), default=starts[i] + 1)
            self.hint[end.index], self.hint[length.index] = value, value - starts[i]

    def reruns(self, value: Callable[[Any], int]) -> list[tuple[int, int]]:
        """The reruns of a solution as op and stage."""
        return [
            (o, value(self.stage[o][i]))
            for o in range(self.n)
            for i in range(1, len(self.stage[o]))
            if value(self.present[o][i])
        ]


def _solve(request: Line, tell: Callable[[Line], None]) -> Line:
    """Solve one request, tell what is found on the way; the last line."""
    from ortools.sat.python import cp_model

    model = _Model(request)

    class Told(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            tell({"incumbent": model.reruns(self.value), "cost": round(self.objective_value)})

    solver = cp_model.CpSolver()
    parameters: Any = solver.parameters
    parameters.num_workers = 1  # workers that race find other plans on each run; taking turns, they were slower
    parameters.catch_sigint_signal = False
    for name, value in request["parameters"].items():
        setattr(parameters, name, value)
    solver.best_bound_callback = lambda bound: tell({"bound": bound})
    status = solver.solve(model.model, Told())
    return {"status": solver.status_name(status), "bound": solver.best_objective_bound}


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    lock = threading.Lock()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    def tell(line: Line) -> None:
        with lock:
            print(json.dumps(line), flush=True)

    threading.Thread(target=read, daemon=True).start()
    while True:
        tell(_solve(json.loads(lines.get()), tell))


if __name__ == "__main__":
    _main()
