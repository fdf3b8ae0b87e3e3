"""The default planner against every other of its class, at equal effort: on no random program is one of them better.

Per seed a program of one of three kinds (random, as for ``oracle``; a chain of unequal steps, as for ``reach``; a step
whose backward mirrors a random forward) of 5 to 300 ops, mostly small, at two budgets. Exact planners are
asked on up to 40 ops, with a limit in seconds. A planner that is better by more than :data:`TOLERANCE` is a loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ebbtide.planners import planner_names
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.step.program import Buffer, Op, Program
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Row, at_least, at_most
from questions.oracle import drawn
from questions.published import FREE_ORDER
from questions.reach import chain

TITLE = "auto against every planner of its class at equal effort, random programs of 5 to 300 ops, two budgets each"
PROGRAMS, BATCH = 1000, 50
CASES = tuple(f"{first}-{first + BATCH - 1}" for first in range(0, PROGRAMS, BATCH))
QUICK = CASES[:1]
FEWEST_OPS, MOST_OPS, EXACT_OPS = 5, 300, 40
EXACT = ("checkmate", "checkmate_free", "checkmate_lp", "checkmate_lp_pure", "retention")
EXACT_SECONDS = 1.0
EFFORT = 1_000
TOLERANCE = 1e-6  # of the unplanned step, as for a proven plan
SHARES = ((0.05, 0.5), (0.5, 0.95))  # of the way from the smallest found to the unplanned: one budget of each range
QUICK_PROGRAMS = 5


def mirrored(seed: int, ops: int) -> Program:
    """A forward whose ops read some of the last few results, and a backward that visits them in reverse."""
    rng = random.Random(seed)
    forward = max(round(ops / 2.3), 2)
    buffers: list[Buffer] = []
    steps: list[Op] = []

    def op(inputs: set[int], size: int) -> int:
        buffers.append(Buffer(f"b{len(buffers)}", size, len(steps)))
        steps.append(
            Op(
                f"op{len(steps)}",
                "test",
                tuple(sorted(inputs)),
                (len(buffers) - 1,),
                workspace_bytes=rng.choice((0, 0, 0, 2)),
                seconds=rng.randint(1, 9) * 1e-3,
                rerunnable=rng.random() > 0.05,
            )
        )
        return len(buffers) - 1

    read: list[set[int]] = []
    for index in range(forward):
        near = range(max(index - 6, 0), index)
        read.append({index - 1, *rng.sample(near, min(len(near), rng.choice((0, 0, 1))))} if index else set())
        op(read[-1], rng.randint(1, 12))
    flow, gradients = None, list[int]()
    for index in range(forward - 1, -1, -1):
        flow = op({*(() if flow is None else (flow,)), *(read[index] or {0}), index}, buffers[index].bytes)
        if rng.random() < 0.3 and len(steps) + index < ops:
            gradients.append(op({flow}, rng.randint(0, 2)))
    return Program("mirrored", tuple(steps), tuple(buffers), forward, gradients=tuple(gradients or [flow]))


def program_of(seed: int) -> Program:
    """The program of a seed."""
    count = round(FEWEST_OPS * (MOST_OPS / FEWEST_OPS) ** random.Random(seed).random() ** 2)
    if seed % 3 == 0:
        return drawn(seed, least=count, most=count)
    return chain(max(count // 2, 3), seed) if seed % 3 == 1 else mirrored(seed, count)


def budgets_of(program: Program, seed: int) -> list[int]:
    """Its budgets, bytes above the step's start."""
    rng, peak = random.Random(-seed), unplanned_bytes(program)
    smallest, _ = smallest_of(program)
    return [int(smallest + rng.uniform(*share) * (peak - smallest)) for share in SHARES]


def rivals(ops: int) -> list[str]:
    """Planners of the class of ``auto`` that are asked about a program of that many ops."""
    left_out = {"auto", "auto_free", "keep_all", *FREE_ORDER, *(EXACT if ops > EXACT_OPS else ())}
    return [name for name in planner_names() if name not in left_out]


def rows(case: str, quick: bool) -> Iterator[Row]:
    first, last = (int(part) for part in case.split("-"))
    problems = optimal = unsolved = 0
    asked: set[str] = set()
    lost: list[str] = []
    seconds = others = 0.0
    for seed in range(first, (first + QUICK_PROGRAMS - 1 if quick else last) + 1):
        program = program_of(seed)
        for budget in budgets_of(program, seed):
            ours = plan_with("auto", program, budget, effort=EFFORT)
            problems += 1
            optimal += ours.proven
            seconds += ours.seconds
            best = float("inf") if ours.overhead is None else ours.overhead
            unsolved += ours.overhead is None
            for name in [] if ours.proven else rivals(len(program.ops)):
                limit = EXACT_SECONDS if name in EXACT else None
                theirs = plan_with(name, program, budget, effort=EFFORT, limit_seconds=limit)
                asked.add(name)
                others += theirs.seconds
                if theirs.overhead is not None and theirs.overhead < best - TOLERANCE:
                    lost.append(f"{name} on {seed} at {budget}: {theirs.overhead:.4%} against {best:.4%}")
    yield Row(
        "best",
        {
            "case": f"seeds {case}",
            "problems": problems,
            "proven_optimal": optimal,
            "without_a_plan": unsolved,
            "rivals": len(asked),
            "auto_seconds": seconds,
            "rivals_seconds": others,
            "lost": "; ".join(lost),
        },
        (at_least("problems", problems, len(SHARES)), at_most("problems where another is better", len(lost), 0)),
    )
