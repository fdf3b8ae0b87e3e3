"""What a plan that moves buffers decides, in the terms of stages, and the schedule that follows.

Definitions (a *stage* ``t`` ends with the first run of op ``t``, as in ``search.interval_kernels``):
1. A *rerun* ``(op, t)`` runs an op again in stage ``t``, before the first run of op ``t``; reruns of one stage run
   ascending by op.
2. A *load* ``(b, t)`` issues the way back of buffer ``b`` at the beginning of stage ``t``, before its reruns; those of
   one stage are issued ascending by the stage in which they are read first, then by buffer.
3. A buffer that is loaded anywhere is offloaded to its tier right after the run that first makes it; offloads of one
   run are issued in output order.
4. A *hold* ``(b, t)`` keeps ``b`` until the first run of op ``t`` has ended, so that its copy has time to be written.
5. Everything else follows: each buffer is freed right after its last use before it comes again
   (``Schedule.from_steps``). Loads that nobody reads are left out, and so are offloads that serve none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ebbtide.planners.search.interval_state import reruns_of
from ebbtide.step.program import Program
from ebbtide.step.schedule import Boundary, Compute, Hold, Offload, Reload, Schedule

__all__ = ["Choice", "choice_of", "schedule_of"]


@dataclass(frozen=True)
class Choice:
    """Reruns, loads and holds of a plan, and the tiers that buffers go to (definitions 1 to 4).

    Attributes:
        reruns: as ``(op, stage)``.
        loads: as ``(buffer, stage)``.
        holds: as ``(buffer, stage)``.
        tiers: per buffer that is loaded, the tier it is in.
    """

    reruns: frozenset[tuple[int, int]] = frozenset()
    loads: frozenset[tuple[int, int]] = frozenset()
    holds: frozenset[tuple[int, int]] = frozenset()
    tiers: Mapping[int, str] = field(default_factory=dict[int, str])


def schedule_of(program: Program, choice: Choice) -> Schedule:
    """The schedule of ``choice`` (definition 5). Legal if its reruns are and every load follows the first run."""
    stages = len(program.ops)
    reruns, loads, holds = (_by_stage(each, stages) for each in (choice.reruns, choice.loads, choice.holds))
    steps: list[Compute | Boundary | Offload | Reload | Hold] = []
    loaded = {b for b, _ in choice.loads}
    for t in range(stages):
        if t == program.boundary:
            steps.append(Boundary())
        steps += [Reload(b) for b in sorted(loads[t], key=lambda b: (_read_first(program, reruns, b, t), b))]
        steps += [Compute(op) for op in sorted(reruns[t])]
        steps.append(Compute(t))
        steps += [Offload(b, choice.tiers[b]) for b in program.ops[t].outputs if b in loaded]
        steps += [Hold(b) for b in sorted(holds[t])]
    if program.boundary == stages:
        steps.append(Boundary())
    return Schedule.from_steps(program, _needed(program, steps))


def choice_of(program: Program, schedule: Schedule) -> Choice | None:
    """The choice that a schedule makes, as near as stages come to it; ``None`` if first runs are not as captured.

    Offloads that come later than right after the first run, and holds, are those of definitions 3 and 4 as far as
    these can express them.
    """
    reruns = reruns_of(program, schedule)
    if reruns is None:
        return None
    loads: set[tuple[int, int]] = set()
    tiers: dict[int, str] = {}
    stage = 0
    for action in schedule.actions:
        match action:
            case Compute(op):
                stage += op == stage
            case Offload(buffer, tier):
                tiers[buffer] = tier
            case Reload(buffer) if stage < len(program.ops):
                loads.add((buffer, stage))
            case _:
                pass
    return Choice(frozenset(reruns), frozenset(loads), frozenset(), {b: tiers[b] for b, _ in loads})


def _by_stage(pairs: Iterable[tuple[int, int]], stages: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(stages)]
    for what, stage in pairs:
        found[stage].append(what)
    return found


def _read_first(program: Program, reruns: list[list[int]], buffer: int, stage: int) -> int:
    """The first stage from ``stage`` on in which ``buffer`` is read."""
    for t in range(stage, len(reruns)):
        if any(buffer in program.ops[op].inputs for op in (*reruns[t], t)):
            return t
    return len(reruns)


def _needed(
    program: Program, steps: list[Compute | Boundary | Offload | Reload | Hold]
) -> list[Compute | Boundary | Offload | Reload | Hold]:
    """``steps`` without loads that nobody reads, and without offloads that serve none."""
    wanted = [False] * len(program.buffers)
    read: list[bool] = [False] * len(steps)
    for index in range(len(steps) - 1, -1, -1):
        match steps[index]:
            case Compute(op):
                for b in program.ops[op].outputs:
                    wanted[b] = False
                for b in program.ops[op].inputs:
                    wanted[b] = True
            case Reload(buffer):
                read[index], wanted[buffer] = wanted[buffer], False
            case _:
                pass
    served = {step.buffer for index, step in enumerate(steps) if isinstance(step, Reload) and read[index]}
    return [
        step
        for index, step in enumerate(steps)
        if (not isinstance(step, Reload) or read[index]) and (not isinstance(step, Offload) or step.buffer in served)
    ]
