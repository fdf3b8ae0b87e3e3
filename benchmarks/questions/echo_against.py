"""``echo`` and others at the peaks that ``echo`` reaches: the default plan is never slower.

The budgets are the peaks of Echo's plan without chasing states and of its plan of least peak (``echo_regions``,
definition 4). Solvers have a limit in seconds; on programs of thousands of ops a row without a plan says what they did
within it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide import Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.reruns_from_kept import reruns_for_residents
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide_published.planners.echo import decided, residents_of
from harness.planned import plan_with
from harness.record import Row, at_most, holds
from questions.gap import MACHINE, MODELS

TITLE = "Overhead in percent at the peaks that echo reaches; v100-16gb by roofline"
CASES = (
    "gpt-4L-d512",
    "resnet50-b32",
    "unet-b2",
    "vgg16-b32",
    "densenet121-b8",
    "mobilenet-b32",
    "lstm_lm-d512",
    "nmt-d256",
)
QUICK = ("gpt-4L-d512",)
CAPS = (0, 1, 2, 4, 8, 16, 32, None)
OTHERS = ("min_cut", "per_block", "checkmate_lp")
LIMIT_SECONDS = 20.0
TOLERANCE = 1e-6


def rows(name: str, quick: bool) -> Iterator[Row]:
    _, build = MODELS[name]
    case = build()
    program = capture_ahead(case.model, case.args, case.kwargs, name=name, options=Options(machine=MACHINE)).program
    peaks = _peaks(program)
    for label, budget in {"states kept": peaks[0], "least peak": min(peaks)}.items():
        if budget < unplanned_bytes(program):
            yield _row(name, label, program, budget)


def _peaks(program: Program) -> list[int]:
    """The peak of Echo's plan at each cap."""
    state = IntervalState(program)
    found: list[int] = []
    for cap in CAPS:
        state.load(reruns_for_residents(program, residents_of(program, decided(program, cap))))
        found.append(state.peak_bytes)
    return found


def _row(name: str, label: str, program: Program, budget: int) -> Row:
    theirs, ours = plan_with("echo", program, budget), plan_with("auto", program, budget)
    assert theirs.overhead is not None
    columns = {
        "case": name,
        "ops": len(program.ops),
        "budget": label,
        "of_peak": budget / unplanned_bytes(program),
        "echo": 100 * theirs.overhead,
        "auto": None if ours.overhead is None else 100 * ours.overhead,
        "auto_bound": 100 * (ours.answer.bound or 0.0),
    }
    for other in OTHERS:
        planned = plan_with(other, program, budget, limit_seconds=LIMIT_SECONDS)
        columns[other] = planned.answer.status.name if planned.overhead is None else 100 * planned.overhead
    columns |= {"echo_cpu_seconds": theirs.cpu_seconds, "auto_cpu_seconds": ours.cpu_seconds}
    overhead = float("inf") if ours.overhead is None else ours.overhead
    most = theirs.overhead + TOLERANCE
    return Row(
        "against", columns, (at_most("auto over echo", overhead, most), holds("legal", theirs.legal and ours.legal))
    )
