"""How near to optimal default plans are, in program order: the distance to the proven bound, down to the floor.

Programs are captured at usual sizes and costed by roofline for one catalogue machine, so that they are the same
everywhere. Budgets are shares of the unplanned peak above the step's start, and multiples of the floor; targets by
region are those of the issue "A default planner that is near-optimal in seconds". Beside each case what people do:
per-block checkpointing, and the default plan at its peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from ebbtide import Case, Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.smallest import smallest_schedule
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.zoo import GPTConfig, gpt, hf_bert, hf_llama, hf_t5, mlp_chain, resnet50, unet
from ebbtide_published.planners.per_block import blocks_of
from ebbtide_published.zoo.densenet import densenet121
from ebbtide_published.zoo.lstm_lm import lstm_lm
from ebbtide_published.zoo.mobilenet import mobilenet
from ebbtide_published.zoo.nmt import nmt
from ebbtide_published.zoo.vgg import vgg16
from harness.graphs import unplanned_bytes
from harness.planned import plan_with
from harness.record import Row, at_most, holds

TITLE = "Gap to the proven bound in points of step time (auto, program order, v100-16gb by roofline)"
MACHINE = "v100-16gb"
MODELS: dict[str, tuple[str, Callable[[], Case]]] = {
    "gpt-4L-d512": (
        "transformer",
        partial(gpt, 8, GPTConfig(vocabulary=8192, length=512, layers=4, width=512, heads=8, dropout=0.1)),
    ),
    "gpt-12L-d768": (
        "transformer",
        partial(gpt, 8, GPTConfig(vocabulary=32000, length=1024, layers=12, width=768, heads=12, dropout=0.1)),
    ),
    "llama-8L-d512": ("transformer", partial(hf_llama, 4, vocabulary=8000, length=512, layers=8, width=512, heads=8)),
    "bert-8L-d512": ("transformer", partial(hf_bert, 8, vocabulary=8000, length=256, layers=8, width=512, heads=8)),
    "t5-4L-d512": ("transformer", partial(hf_t5, 8, vocabulary=8000, length=128, layers=4, width=512, heads=8)),
    "resnet50-b32": ("convolution", partial(resnet50, 32)),
    "unet-b2": ("convolution", partial(unet, 2)),
    "vgg16-b32": ("convolution", partial(vgg16, 32)),
    "densenet121-b8": ("convolution", partial(densenet121, 8)),
    "mobilenet-b32": ("convolution", partial(mobilenet, 32)),
    "lstm_lm-d512": ("recurrent", partial(lstm_lm, 32, vocabulary=5000, length=30, width=512)),
    "nmt-d256": ("recurrent", partial(nmt, 32, vocabulary=5000, length=20, width=256)),
    "mlp_chain-64": ("chain", partial(mlp_chain, 512, layers=64, width=64)),
}
CASES = tuple(MODELS)
QUICK = ("gpt-4L-d512",)
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
FLOORS = (1.3, 1.15)  # times the floor
REACHED = {"transformer": (1.05, 0.50), "recurrent": (1.3, None)}  # times the floor, and the most overhead there
WIDE_SHARE, WIDE_FLOOR, DEEP_FLOOR = 0.5, 1.5, 1.3
MOST_POINTS = {"transformer": 0.10, "convolution": 0.10, "chain": 0.10, "recurrent": 0.40}
MOST_POINTS_BELOW, MOST_DEEP_SHARE = 0.5, 0.15
MOST_OF_PRACTICE = {"transformer": 0.45}  # of per-block checkpointing's overhead, at its peak; elsewhere:
MOST_OF_PRACTICE_ELSEWHERE = 0.60


def rows(name: str, quick: bool) -> Iterator[Row]:
    kind, build = MODELS[name]
    case = build()
    program = capture_ahead(case.model, case.args, case.kwargs, name=name, options=Options(machine=MACHINE)).program
    plan_with("auto", program, unplanned_bytes(program) * 9 // 10)  # numba compiles, HiGHS loads
    peak, (floor, _) = unplanned_bytes(program), floor_bytes(program)
    begin = time.process_time()
    smallest, schedule = smallest_schedule(program)
    seconds = time.process_time() - begin
    yield _smallest(name, program, schedule, seconds)
    if kind in REACHED:
        yield _reached(name, kind, program, schedule)
    budgets = {f"{share:.0%} of the peak": int(share * peak) for share in (SHARES[:2] if quick else SHARES)}
    budgets |= {
        f"{times} x floor": int(times * floor)
        for times in FLOORS
        if times * floor < SHARES[-1] * peak and times != REACHED.get(kind, (0,))[0]
    }
    for label, budget in budgets.items():
        if budget >= smallest:
            yield _row(name, kind, label, budget, program, schedule)
    yield from _practice(name, kind, program, schedule)


def _smallest(name: str, program: Program, schedule: Schedule, seconds: float) -> Row:
    """The least peak that is found, whatever its time."""
    timeline = simulate(program, schedule)
    return Row(
        "gap",
        {
            "case": name,
            "ops": len(program.ops),
            "budget": "smallest",
            "of_peak": timeline.above_bytes / unplanned_bytes(program),
            "of_floor": timeline.above_bytes / floor_bytes(program)[0],
            "overhead_percent": 100 * (timeline.seconds / program.seconds - 1.0),
            "cpu_seconds": seconds,
        },
    )


def _reached(name: str, kind: str, program: Program, smallest: Schedule) -> Row:
    """The default plan at a budget near the floor, or at the smallest where that is higher."""
    floor, (times, most) = floor_bytes(program)[0], REACHED[kind]
    least = simulate(program, smallest).above_bytes
    row = _row(name, kind, f"{times} x floor", max(int(times * floor), least), program, smallest)
    checks = [*row.checks, at_most("lowest reachable, of the floor", least / floor, times)]
    if most is not None:
        checks.append(at_most("overhead there", row.columns["overhead_percent"] / 100, most))
    return Row(row.question, row.columns, tuple(checks))


def _row(name: str, kind: str, label: str, budget: int, program: Program, smallest: Schedule) -> Row:
    planned = plan_with("auto", program, budget, seeds=(smallest,))
    overhead, bound = planned.overhead or 0.0, planned.answer.bound or 0.0
    of_peak, of_floor = budget / unplanned_bytes(program), budget / floor_bytes(program)[0]
    points = 100 * (overhead - bound)
    checks = [holds("legal and within budget", planned.legal and planned.overhead is not None)]
    if of_peak >= WIDE_SHARE and of_floor >= WIDE_FLOOR:
        checks.append(at_most("gap in points", points, MOST_POINTS[kind]))
    elif of_floor < DEEP_FLOOR:
        checks.append(at_most("gap over overhead", (overhead - bound) / max(overhead, 1e-9), MOST_DEEP_SHARE))
    elif of_peak >= 0.4:
        checks.append(at_most("gap in points", points, MOST_POINTS_BELOW))
    return Row(
        "gap",
        {
            "case": name,
            "ops": len(program.ops),
            "budget": label,
            "of_peak": of_peak,
            "of_floor": of_floor,
            "overhead_percent": 100 * overhead,
            "bound_percent": 100 * bound,
            "gap_points": points,
            "status": planned.answer.status.name,
            "cuts": planned.answer.notes.get("cuts"),
            "cpu_seconds": planned.cpu_seconds,
        },
        tuple(checks),
    )


def checkpointed(program: Program) -> Schedule:
    """Every block under ``torch.utils.checkpoint`` as PyTorch runs it: when the backward first reads something of a
    block, the block runs again up to the last buffer that the backward needs, and all of it stays until it is read."""
    block = blocks_of(program)
    wanted: dict[int, list[int]] = {}  # per block, its ops that the backward reads
    first: dict[int, int] = {}  # per block, the backward's first op that reads it
    for op in range(program.boundary, len(program.ops)):
        for b in program.ops[op].inputs:
            producer = program.buffers[b].producer
            if (
                producer is not None
                and producer < program.boundary
                and block[producer] >= 0
                and b not in program.pinned
            ):
                wanted.setdefault(block[producer], []).append(producer)
                first.setdefault(block[producer], op)
    state = IntervalState(program)
    state.load(
        (op, first[number])
        for op, number in enumerate(block)
        if number in wanted and op <= max(wanted[number]) and program.ops[op].rerunnable
    )
    return state.to_schedule()


def _practice(name: str, kind: str, program: Program, smallest: Schedule) -> Iterator[Row]:
    """Every block checkpointed, and the default plan at the peak of that."""
    practice = simulate(program, checkpointed(program))
    theirs, peak = practice.seconds / program.seconds - 1.0, practice.above_bytes
    if peak >= unplanned_bytes(program) or theirs <= 0:
        return  # nothing to checkpoint, or nothing gained by it
    ours = plan_with("auto", program, peak, seeds=(smallest,))
    assert ours.overhead is not None
    most = MOST_OF_PRACTICE.get(kind, MOST_OF_PRACTICE_ELSEWHERE)
    yield Row(
        "gap",
        {
            "case": name,
            "ops": len(program.ops),
            "budget": "per-block checkpointing's peak",
            "of_peak": peak / unplanned_bytes(program),
            "of_floor": peak / floor_bytes(program)[0],
            "overhead_percent": 100 * ours.overhead,
            "bound_percent": 100 * (ours.answer.bound or 0.0),
            "gap_points": 100 * (ours.overhead - (ours.answer.bound or 0.0)),
            "status": ours.answer.status.name,
            "per_block_percent": 100 * theirs,
            "cpu_seconds": ours.cpu_seconds,
        },
        (at_most("of per-block's overhead", ours.overhead / theirs, most),),
    )
