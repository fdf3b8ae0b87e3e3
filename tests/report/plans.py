"""Plans to look at: recomputed, moved, and of any number of ops. None needs torch or a search."""

from __future__ import annotations

from dataclasses import replace

from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.report.plan import Plan
from ebbtide.step.machine import Link, Machine
from ebbtide.step.program import Program
from ebbtide.step.provenance import Provenance
from ebbtide.step.schedule import Boundary, Compute, Offload, Reload, Schedule
from ebbtide.step.status import Status
from strategies import chain

__all__ = ["LINKED", "hybrid", "plan_of", "recomputed"]

LINKED = Machine(
    name="linked",
    device="cuda",
    memory_bytes=2**34,
    flops={"float32": 1e12},
    bytes_per_second=1e11,
    launch_seconds=1e-6,
    granularity_bytes=1,
    links={"host": Link("host", 2**34, 1e10, 1e10, latency_seconds=1e-5)},
)
_MIB = 2**20


def plan_of(program: Program, schedule: Schedule, *, machine: Machine | None = None) -> Plan:
    """A plan of ``schedule``, whose budget is a little above its peak."""
    above, op = floor_bytes(program)
    plan = Plan(
        program=program,
        schedule=schedule,
        status=Status.FEASIBLE,
        case=program.name,
        planner="hand",
        budget_bytes=0,
        resident_bytes=100 * _MIB,
        reserve_bytes=0,
        floor_bytes=100 * _MIB + above,
        floor_op=op,
        smallest_bytes=101 * _MIB + above,
        bound=0.01,
        bound_class="order: program, boundary: captured, tiers: none, costs: given",
        plan_seconds=0.5,
        provenance=Provenance(device="cpu", torch="x", memory_bytes=2**34),
        machine=machine,
        tiers=() if machine is None else tuple(machine.links),
    )
    return replace(plan, budget_bytes=plan.predicted_peak_bytes + _MIB)


def _named(layers: int) -> Program:
    program = chain(layers, 4 * _MIB, _MIB)
    ops = [
        replace(op, module=f"blocks.{index % layers}", source=f"model.py:{10 + index % 7}")
        for index, op in enumerate(program.ops)
    ]
    return replace(program, ops=tuple(ops))


def recomputed(layers: int) -> Plan:
    """Every other ``gelu`` is dropped and runs again before its reader in the backward."""
    program = _named(layers)
    gelus = [2 * layer + 1 for layer in range(0, layers - 1, 2)]
    again = {program.readers[program.ops[gelu].outputs[0]][-1]: gelu for gelu in gelus}
    order: list[int | None] = []
    for op in range(len(program.ops)):
        order += [None] if op == program.boundary else []
        order += [again[op]] if op in again else []
        order.append(op)
    return plan_of(program, Schedule.from_computes(program, order))


def hybrid(layers: int) -> Plan:
    """Every other ``linear`` goes to the host and comes back before its reader in the backward."""
    program = _named(layers)
    steps: list[Compute | Boundary | Offload | Reload] = []
    leaving = {2 * layer: program.ops[2 * layer].outputs[0] for layer in range(0, layers - 1, 2)}
    coming = {program.readers[b][-1]: b for b in leaving.values()}
    for op in range(len(program.ops)):
        steps += [Boundary()] if op == program.boundary else []
        steps += [Reload(coming[op])] if op in coming else []
        steps.append(Compute(op))
        steps += [Offload(leaving[op - 1], "host")] if op - 1 in leaving else []
    return plan_of(program, Schedule.from_steps(program, steps), machine=LINKED)
