"""Random programs against exhaustive search: exact planners equal it, others never beat it or their budget."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ebbtide.planners import planner_names
from ebbtide.planners.bounds.cut_bound import cut_bound
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.step.program import Buffer, Op, Program
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Row, at_least, at_most
from questions.published import FREE_ORDER

TITLE = "Random programs of at most 10 ops against exhaustive search"
PROGRAMS, BATCH = 500, 50
CASES = tuple(f"{first}-{first + BATCH - 1}" for first in range(0, PROGRAMS, BATCH))
QUICK = CASES[:1]
EXACT = ("checkmate", "checkmate_free")  # retention is held against the same oracle in tests/planners
TOLERANCE = 3e-6
CHILD = ("retention",)  # starts a process per plan; held against the same oracle in tests/planners


def drawn(seed: int, least: int = 3, most: int = 10) -> Program:
    """A program of that many ops: several outputs, workspaces, random and single-run ops, pins, tangents."""
    rng = random.Random(seed)
    count = rng.randint(least, most)
    boundary = rng.randint(1, count)
    buffers: list[Buffer] = []
    ops: list[Op] = []
    made: list[int] = []
    tangent = rng.random() < 0.3
    if tangent:
        buffers.append(Buffer("tangent", rng.randint(0, 3), None))
    for index in range(count):
        readable = made + ([0] if tangent and index >= boundary else [])
        inputs = set(rng.sample(readable, min(len(readable), rng.randint(1, 3)))) if readable else set()
        outputs = tuple(range(len(buffers), len(buffers) + rng.choice((1, 1, 1, 2))))
        buffers.extend(Buffer(f"b{b}", rng.randint(0, 9), index) for b in outputs)
        made.extend(outputs)
        trait = rng.choice(("", "", "", "", "random", "once"))
        ops.append(
            Op(
                f"op{index}",
                "test",
                tuple(sorted(inputs)),
                outputs,
                workspace_bytes=rng.choice((0, 0, 3)),
                seconds=rng.randint(1, 5) * 1e-3,
                state_bytes=2 if trait == "random" else 0,
                rerunnable=trait != "once",
            )
        )
    return Program("random", tuple(ops), tuple(buffers), boundary, gradients=tuple(rng.sample(made, 1)))


def rows(case: str, quick: bool) -> Iterator[Row]:
    from oracle.brute_force import optimal_overhead  # tests/ is on the path of a benchmark's children

    first, last = (int(part) for part in case.split("-"))
    asked = constrained = infeasible = 0
    equal = dict.fromkeys(EXACT, 0)
    illegal = dict.fromkeys(planner_names(), 0)
    beaten = dict.fromkeys(planner_names(), 0)
    bounds_wrong = 0
    for seed in range(first, last + 1):
        program = drawn(seed)
        peak, (floor, _) = unplanned_bytes(program), floor_bytes(program)
        budget = int(floor + random.Random(-seed).random() * (peak - floor))
        best = optimal_overhead(program, budget, ascending=True)
        anything = optimal_overhead(program, budget)
        asked += 1
        infeasible += best is None
        constrained += bool(best)
        cut = cut_bound(program, budget)
        bounds_wrong += anything is not None and (cut.infeasible or cut.bound > anything + TOLERANCE)
        for name in planner_names():
            if name in CHILD:
                continue
            planned = plan_with(name, program, budget, effort=100)
            illegal[name] += not planned.legal
            if name in EXACT:
                equal[name] += (planned.overhead is None) == (best is None) and (
                    best is None or abs(planned.overhead - best) <= TOLERANCE
                )
            orders = {"order: program": best, "order: free": anything}
            limit = orders.get(planned.answer.bound_class.partition(",")[0], 0.0)
            bounds_wrong += bool(
                planned.answer.bound and limit is not None and planned.answer.bound > limit + TOLERANCE
            )
            if planned.overhead is not None and name not in FREE_ORDER:
                beaten[name] += anything is None or planned.overhead < anything - 1e-9
    checks = [at_least(f"{name} equal to the optimum", equal[name], asked) for name in EXACT]
    checks += [
        at_most("illegal or over budget", sum(illegal.values()), 0),
        at_most("plans better than the optimum", sum(beaten.values()), 0),
        at_most("bounds above the optimum", bounds_wrong, 0),
    ]
    yield Row(
        "oracle",
        {
            "case": f"seeds {case}",
            "programs": asked,
            "with_reruns": constrained,
            "infeasible": infeasible,
            **{f"{name}_equal": count for name, count in equal.items()},
            "planners_checked": len(illegal) - len(CHILD),
        },
        tuple(checks),
    )
