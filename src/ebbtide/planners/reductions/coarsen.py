"""Coarsening: a program whose ops stand for several consecutive ops, and the way back for its schedules.

Definitions:
1. A *group* is a run of consecutive ops on one side of the boundary. Its coarse op runs its members in order. It
   reads what they read of others, and makes its *outer* buffers: outputs, mutations and what other groups read. It
   may run again if all members may, and draws or reads mutated inputs if one does.
2. Its workspace is the most that its members take beyond its inputs and outer buffers, in a first run or in a rerun,
   each buffer that only they read being freed after its last read. Generator states are added up.
3. *Lifting* replaces every run of a coarse op by runs of its members and frees each buffer as early as the order
   allows. It takes as many seconds and at no point more bytes: the coarse op holds its inputs and outer buffers for
   its whole length, the members only from the first run to the last read.

:func:`by_layer` makes any groups; the optimum may be lost, because a coarse op keeps or repeats all of it, and holds
its inputs to its end. :func:`fuse` makes only groups that keep it:
4. *Kept* outputs of an op are its outputs and mutations of the program; *free* ones are read and not kept; others
   are *unread*. Ops ``a`` and ``b = a + 1`` on one side of the boundary are fused if free outputs of ``a`` are read
   by ``b`` only, those of ``b`` take no more bytes, and clause 5 or 6 holds. If ``b`` has free outputs, so that it
   may be worth running again, then ``a`` has no kept outputs and neither draws random numbers.
5. *Late*: ``a`` reads nothing that ``b`` does not read, besides kept buffers, tangents and empty ones; its workspace
   and unread outputs take no more than workspace and outputs of ``b``; and if ``b`` may be run again, ``a`` reads
   mutated inputs only if ``b`` does.
6. *Early*: ``b`` reads nothing but what ``a`` makes or reads, besides kept buffers, tangents and empty ones; its
   workspace and outputs take no more than workspace and unread outputs of ``a``; its kept and free outputs take no
   more than the free ones of ``a``.

Proof that fusing keeps the optimum of schedules with first runs in captured order. Take an optimal one; drop reruns
that nobody reads. (i) If one run of ``a`` serves several runs of ``b``, leave the last one out, hold the free outputs
of ``b`` from the run before it instead of those of ``a``, which are no smaller (kept outputs are there anyway), and so
on for the others. So each run of ``b``
has a run of ``a`` of its own; one that serves none is a first run, and takes the place of the first that does.
(ii) Clause 5: put the run of ``a`` right before that of ``b``. In between, its outputs are gone. What it reads is
there, because ``b`` reads it or it stays; while it runs it takes no more than ``b`` takes right after it, with its
free outputs held. (iii) Clause 6: put the run of ``b`` right after that of ``a``. In between its outputs are held
instead of the free ones of ``a``; while it runs it takes no more than ``a`` took right before it. (iv) Now the two
always run as one. Where clause 5 holds, all inputs of the pair are held for its whole length in any case and its
peak is that of ``b``; where clause 6 holds, its peak is that of ``a``, which holds all inputs. So the coarse op's
bytes are exact, and the coarse schedule has the same overhead within the same budget. What a fused pair is, is
decided from the pair alone, so many pairs are fused at once, and again until there are none.

The proof moves runs between stages: in the class of reruns once a stage and ascending, the two stages of a pair
become one, and the optimum of that class may rise.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from ebbtide.planners.base import PROGRAM_ORDER, Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.reductions.base import Reduced
from ebbtide.planners.registry import Planner
from ebbtide.planners.search.greedy import assert_within
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Offload, Reload, Schedule

__all__ = ["Coarse", "by_layer", "fuse", "layers", "planned_coarse"]


@dataclass(frozen=True)
class Coarse:
    """A coarse program and the way back.

    Attributes:
        program: whose ops are groups.
        members: per op of it, the ops of ``fine`` that it stands for, in order.
        fine: the program that was coarsened.
        keeps_optimum: whether the least overhead at every budget is that of ``fine``.
    """

    program: Program
    members: tuple[tuple[int, ...], ...]
    fine: Program
    keeps_optimum: bool

    def reduce(self, problem: Problem) -> Reduced[Schedule]:
        """The problem of the coarse program within the same bytes; seeds of the fine one cannot be grouped."""
        return Reduced(replace(problem, program=self.program, seeds=()), self.lift)

    def lift(self, schedule: Schedule) -> Schedule:
        """The schedule of the fine program for one of the coarse program (definition 3).

        Raises:
            ValueError: if the schedule moves buffers.
        """
        if any(isinstance(action, Offload | Reload) for action in schedule.actions):
            raise ValueError("a coarse schedule that moves buffers cannot be lifted")
        order: list[int | None] = []
        for op in schedule.computes:
            order.extend([None] if op is None else self.members[op])
        return Schedule.from_computes(self.fine, order)


def by_layer(program: Program, groups: Sequence[Hashable]) -> Coarse:
    """Consecutive ops with equal labels as one, split at the boundary; does not keep the optimum.

    Args:
        program: any.
        groups: a label per op, such as :func:`layers` gives.

    Raises:
        ValueError: if there is not one label per op.
    """
    if len(groups) != len(program.ops):
        raise ValueError(f"there is not one label per op ({len(groups)} for {len(program.ops)}); give one label per op")
    found: list[list[int]] = []
    for o, label in enumerate(groups):
        if found and o != program.boundary and groups[o - 1] == label:
            found[-1].append(o)
        else:
            found.append([o])
    return Coarse(_coarse(program, found), tuple(map(tuple, found)), program, keeps_optimum=False)


def layers(program: Program, depth: int | None = None) -> list[str]:
    """A label per op: its module path cut to ``depth`` names; an op without a module stands alone."""
    return [".".join(op.module.split(".")[:depth]) if op.module else f"op {o}" for o, op in enumerate(program.ops)]


def fuse(program: Program) -> Coarse:
    """Fuse pairs of ops until no rule applies; keeps the optimum (definitions 4 to 6)."""
    members = [[o] for o in range(len(program.ops))]
    coarse = program
    while pairs := _pairs(coarse):
        merged: list[list[int]] = []
        for o, own in enumerate(members):
            if o - 1 in pairs:
                merged[-1].extend(own)
            else:
                merged.append(list(own))
        members = merged
        coarse = _coarse(program, members)
    return Coarse(coarse, tuple(map(tuple, members)), program, keeps_optimum=True)


def planned_coarse(planner: Planner, problem: Problem, reduction: Coarse) -> Answer:
    """Let a planner plan the coarse program, and lift its schedule; seeds of the fine program are not used.

    Its bound holds for the fine program only where the reduction keeps the optimum of the bound's own class;
    elsewhere the class says that ops are grouped.
    """
    if (kept := keep_all(problem)).status is Status.OPTIMAL:
        return kept
    reduced = reduction.reduce(problem)
    answer = planner(reduced.problem)
    notes = answer.notes | {"coarse ops": str(len(reduction.program.ops))}
    bound_class = answer.bound_class
    if bound_class and not (reduction.keeps_optimum and bound_class == PROGRAM_ORDER):
        bound_class += ", ops: grouped"
    if answer.schedule is None:
        return replace(answer, bound_class=bound_class, notes=notes)
    schedule = reduced.lift(answer.schedule)
    assert_within(problem, schedule)
    return replace(answer, schedule=schedule, bound_class=bound_class, notes=notes)


# -- which pairs --------------------------------------------------------------------------------------------


def _pairs(program: Program) -> set[int]:
    """First ops of pairs to be fused, no op in two of them."""
    found: set[int] = set()
    for a in range(len(program.ops) - 1):
        if a - 1 not in found and a + 1 != program.boundary and _one(program, a, a + 1):
            found.add(a)
    return found


def _one(program: Program, a: int, b: int) -> bool:
    """Whether definition 4 fuses ``a`` and ``b``."""
    first, second = program.ops[a], program.ops[b]
    kept = program.pinned.union(program.mutations)
    free = [x for x in first.outputs if x not in kept and program.readers[x]]
    if any(program.readers[x] != (b,) for x in free):
        return False
    free_bytes, later_bytes = _bytes(program, free), _bytes(program, _free(program, b))
    again = later_bytes > 0
    if later_bytes > free_bytes or (again and (first.random or second.random or kept.intersection(first.outputs))):
        return False
    alone = first.workspace_bytes + _bytes(program, _unread(program, a))
    made = program.made_by_rerun(b) if again else second.outputs
    late = (
        _within(program, first.inputs, second.inputs)
        and alone <= second.workspace_bytes + _bytes(program, made)
        and (not again or not first.reads_mutated or second.reads_mutated)
    )
    early = (
        _within(program, second.inputs, (*first.inputs, *first.outputs))
        and second.workspace_bytes + _bytes(program, second.outputs) <= alone
        and _bytes(program, set(second.outputs).difference(_unread(program, b))) <= free_bytes
    )
    return late or early


def _free(program: Program, o: int) -> list[int]:
    return [x for x in program.ops[o].outputs if program.readers[x] and x not in program.pinned]


def _unread(program: Program, o: int) -> list[int]:
    kept = program.pinned.union(program.mutations)
    return [x for x in program.ops[o].outputs if not program.readers[x] and x not in kept]


def _bytes(program: Program, buffers: Iterable[int]) -> int:
    return sum(program.buffers[x].bytes for x in buffers)


def _within(program: Program, reads: Iterable[int], others: Iterable[int]) -> bool:
    """Whether all ``reads`` are among ``others``, pinned or empty."""
    there = set(others)
    return all(x in there or x in program.pinned or not program.buffers[x].bytes for x in reads)


# -- the coarse program -------------------------------------------------------------------------------------


def _coarse(program: Program, groups: Sequence[Sequence[int]]) -> Program:
    """The program whose ops are ``groups``, which cover all ops in order and do not cross the boundary."""
    outer = [_outer(program, group) for group in groups]
    buffers = sorted({*program.tangents, *(x for each in outer for x in each)})
    place = {x: index for index, x in enumerate(buffers)}
    owner = {x: index for index, each in enumerate(outer) for x in each}

    def placed(which: Iterable[int]) -> tuple[int, ...]:
        return tuple(place[x] for x in which)

    ops = [_op(program, group, made) for group, made in zip(groups, outer, strict=True)]
    return replace(
        program,
        ops=tuple(replace(op, inputs=placed(op.inputs), outputs=placed(op.outputs), until=()) for op in ops),
        buffers=tuple(Buffer(program.buffers[x].name, program.buffers[x].bytes, owner.get(x)) for x in buffers),
        boundary=sum(group[0] < program.boundary for group in groups),
        forward_outputs=placed(program.forward_outputs),
        gradients=placed(program.gradients),
        mutations=placed(program.mutations),
    )


def _outer(program: Program, group: Sequence[int]) -> list[int]:
    """The outer buffers of a group (definition 1), those that only first runs make last; at least one buffer."""
    made = [x for o in group for x in program.ops[o].outputs]
    if len(group) == 1:
        return made
    kept, members = program.pinned.union(program.mutations), set(group)
    once = {x for o in group for x in program.ops[o].outputs if x not in program.made_by_rerun(o)}
    found = [x for x in made if x in kept or not members.issuperset(program.readers[x])]
    return sorted(found, key=lambda x: (x in once, x)) or made[-1:]


def _op(program: Program, group: Sequence[int], outer: Sequence[int]) -> Op:
    """The coarse op of a group, its buffers still those of ``program``."""
    ops = [program.ops[o] for o in group]
    if len(ops) == 1:
        return ops[0]
    own = {x for op in ops for x in op.outputs}
    again = {x for o in group for x in program.made_by_rerun(o)}
    remade = [x for x in outer if x in again]
    first = _peak(program, group, set(outer)) - _bytes(program, outer)
    held = program.pinned.union(program.mutations)
    # One of which nobody would read anything is never worth running again: what that takes must not cost its first run.
    worth = any(x not in program.pinned and not set(group).issuperset(program.readers[x]) for x in remade)
    rerun = _peak(program, group, set(outer).difference(held), rerun=True) - _bytes(program, remade) if worth else 0
    return Op(
        name=f"{ops[0].name} .. {ops[-1].name}",
        target="group",
        inputs=tuple(sorted({x for op in ops for x in op.inputs}.difference(own))),
        outputs=tuple(outer),
        workspace_bytes=max(first, rerun, 0),
        seconds=sum(op.seconds for op in ops),
        state_bytes=sum(op.state_bytes for op in ops),
        rerunnable=(worth or not remade) and all(op.rerunnable for op in ops),
        reads_mutated=any(op.reads_mutated for op in ops),
        once=len(outer) - len(remade),
        source=ops[0].source,
        module=ops[0].module if all(op.module == ops[0].module for op in ops) else "",
    )


def _peak(program: Program, group: Sequence[int], stays: set[int], *, rerun: bool = False) -> int:
    """The most bytes that the members take beyond the group's inputs, with ``stays`` held to its end."""
    last = {
        x: max((r for r in program.readers[x] if r <= group[-1]), default=-1)
        for x in _coarse_ops(program, group, rerun)
    }
    held = program.pinned.union(program.mutations) if rerun else frozenset[int]()
    live = peak = 0
    for o in group:
        made = program.made_by_rerun(o) if rerun else program.ops[o].outputs
        peak = max(peak, live + program.ops[o].workspace_bytes + _bytes(program, made))
        live += _bytes(program, (x for x in made if x in stays or (last[x] > o and x not in held)))
        live -= _bytes(program, (x for x in program.ops[o].inputs if last.get(x) == o and x not in stays | held))
    return peak


def _coarse_ops(program: Program, group: Sequence[int], rerun: bool) -> list[int]:
    return [x for o in group for x in (program.made_by_rerun(o) if rerun else program.ops[o].outputs)]
