"""Echo's own acceptance tests on captured modules: MXNet's pull request 18228, ``test_memory_opt.py``.

1. ``two-layers`` (``test_rnn_cell``): tanh of the sum of two layers is kept. ``broadcast`` (``test_mlp_attn``): a
   matrix added to each of five vectors, with a tanh behind each, is made again in all of them. ``two-tanhs``
   (``test_fc``): of two tanhs before a layer the first is kept, the second made again, and the layer is not run again.
2. ``resnet152`` (``test_resnet152``): less than 0.6 of the bytes that the step takes without. Theirs is the
   pre-activation form at 32 images of 224 x 224 (``harness/preactivation.py``); the zoo's, torchvision's, is beside
   it. Of each cap on chains (``echo_regions``, definition 4) the stash, which is what crosses the boundary, and the
   peak above the step's start are shown, as shares of the unplanned step's; and the peak with what is resident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from ebbtide import Case, Program
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.search.interval_state import IntervalState
from ebbtide.planners.search.reruns_from_kept import reruns_for_residents
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo import resnet152
from ebbtide_published.planners.echo import charged, decided, residents_of, stash_bytes
from harness.planned import plan_with
from harness.preactivation import preactivation_resnet152
from harness.record import Row, at_most, holds

TITLE = "Echo's own acceptance tests (E5), on captured modules; v100-16gb by roofline"
MACHINE = "v100-16gb"
MOST_OF_PEAK = 0.6  # of test_resnet152
WIDTH, STEPS = 256, 5
CAPS = (0, 1, 2, 4, 8, 16, None)


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.x(x) + self.y(y))).sum()


class _Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.y = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STEPS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shared = self.x(x)
        outputs = [self.head(torch.tanh(shared + layer(each))) for layer, each in zip(self.y, y.split(1), strict=True)]
        return torch.stack(outputs).sum()


class _TwoTanhs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(torch.tanh(self.x(x)))).sum()


def _two_layers() -> Case:
    return Case(_TwoLayers(), (torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)))


def _broadcast() -> Case:
    return Case(_Broadcast(), (torch.randn(STEPS, WIDTH), torch.randn(STEPS, WIDTH)))


def _two_tanhs() -> Case:
    return Case(_TwoTanhs(), (torch.randn(WIDTH, WIDTH),))


EXACT: dict[str, tuple[Callable[[], Case], dict[str, int]]] = {
    "two-layers": (_two_layers, {}),
    "broadcast": (_broadcast, {"aten.add.Tensor": STEPS, "aten.tanh.default": STEPS}),
    "two-tanhs": (_two_tanhs, {"aten.tanh.default": 1}),
}
"""Per graph, what is made again."""
NETWORKS: dict[str, Callable[[], Case]] = {
    "resnet152-preactivation": preactivation_resnet152,
    "resnet152": partial(resnet152, 32, image=224),
}
CASES = (*EXACT, *NETWORKS)
QUICK = tuple(EXACT)


def rows(name: str, quick: bool) -> Iterator[Row]:
    case = (EXACT[name][0] if name in EXACT else NETWORKS[name])()
    program = capture_ahead(case.model, case.args, case.kwargs, name=name, options=Options(machine=MACHINE)).program
    if name in EXACT:
        yield _exact(name, program, EXACT[name][1])
    else:
        yield from _network(name, program)


def _exact(name: str, program: Program, expected: dict[str, int]) -> Row:
    """What is made again and what runs again, by target."""
    again = decided(program)
    reruns = reruns_for_residents(program, residents_of(program, again))
    runs = Counter(program.ops[op].target for op, _ in reruns)
    checks = [
        holds("what is made again is what Echo's test says", Counter(program.ops[o].target for o in again) == expected),
        holds("and it alone runs again, once each", runs == expected),
    ]
    if name == "two-tanhs":
        first, second = (o for o, op in enumerate(program.ops) if op.target == "aten.tanh.default")
        (rerun,) = reruns
        reads = {
            program.ops[r].target for b in program.ops[second].outputs for r in program.readers[b] if r >= rerun[1]
        }
        checks.append(holds("it is the second, not the first", {second} == again and first not in again))
        checks.append(holds("the layer's gradient reads it", "aten.mm.default" in reads))
    columns = {"case": name, "ops": len(program.ops), "runs_again": ", ".join(f"{n} {t}" for t, n in runs.items())}
    return Row("decisions", columns, tuple(checks))


def _network(name: str, program: Program) -> Iterator[Row]:
    """Stash and peak at each cap, and what the planner answers at 0.6 of the peak."""
    peak, stash = unplanned_bytes(program), stash_bytes(program, ())
    state = IntervalState(program)
    for cap in CAPS:
        again = decided(program, cap)
        state.load(reruns_for_residents(program, residents_of(program, again)))
        heavy = sum("convolution" in program.ops[op].target for op, _ in state.reruns)
        columns = {
            "case": name,
            "ops": len(program.ops),
            "cap": "none" if cap is None else cap,
            "run_again": len(charged(program, again)),
            "stash_bytes": stash_bytes(program, again),
            "of_stash": stash_bytes(program, again) / stash,
            "peak_bytes": state.peak_bytes,
            "of_peak": state.peak_bytes / peak,
            "of_all": (state.peak_bytes + program.resident_bytes) / (peak + program.resident_bytes),
            "overhead_percent": 100 * state.overhead,
        }
        yield Row("decisions", columns, (holds("no convolution runs again", not heavy),))
    planned = plan_with("echo", program, int(MOST_OF_PEAK * peak))
    columns = {
        "case": name,
        "ops": len(program.ops),
        "cap": f"planner at {MOST_OF_PEAK}: {planned.answer.notes.get('setting')}",
        "peak_bytes": planned.peak_bytes,
        "of_peak": None if planned.peak_bytes is None else planned.peak_bytes / peak,
        "overhead_percent": None if planned.overhead is None else 100 * planned.overhead,
    }
    share = float("inf") if planned.peak_bytes is None else planned.peak_bytes / peak
    yield Row(
        "decisions", columns, (at_most("of the unplanned peak", share, MOST_OF_PEAK), holds("legal", planned.legal))
    )
