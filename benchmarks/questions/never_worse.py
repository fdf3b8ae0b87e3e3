"""Every published planner and baseline at five budgets: the default plan is never slower than any of them.

1. Costs are by roofline for :data:`MACHINE`; overheads are *predicted*, waits for transfers included. ``auto`` and the
   planners that move have the host tier, all others only recompute.
2. The budget at ``f`` is ``1.02 * floor + f * (unplanned - 1.02 * floor)`` above the step's start, where floor is that
   of plans that only recompute.
3. ``checkmate_lp`` has :data:`LIMIT_SECONDS`; where it found nothing within them the row says ``TIME_LIMIT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ebbtide import Case, Program
from ebbtide.planners.base import Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.registry import moves_buffers, planner_named
from ebbtide.step.machine import machine_named
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo.gpt import gpt2_small
from ebbtide.zoo.hf import hf_bert
from ebbtide.zoo.llama import llama_small
from ebbtide.zoo.resnet import resnet50
from ebbtide.zoo.unet import unet
from ebbtide_published.zoo.dcgan import dcgan
from ebbtide_published.zoo.deepspeech import deepspeech2
from ebbtide_published.zoo.densenet import densenet121
from ebbtide_published.zoo.inception import inception_v3
from ebbtide_published.zoo.lstm_lm import lstm_lm
from ebbtide_published.zoo.mobilenet import mobilenet
from ebbtide_published.zoo.nmt import nmt
from ebbtide_published.zoo.segnet import segnet
from ebbtide_published.zoo.transformer import transformer_base
from ebbtide_published.zoo.vgg import vgg16
from harness.batched import captured, planned_above
from harness.record import Row, at_most, holds

TITLE = "Predicted overhead of the default plan, of every published planner and of every baseline; v100-16gb"
MODELS: dict[str, Callable[[], Case]] = {
    "vgg16": lambda: vgg16(64, image=224),
    "resnet50": lambda: resnet50(64, image=224),
    "mobilenet": lambda: mobilenet(64, image=224),
    "unet": lambda: unet(8, image=256),
    "segnet": lambda: segnet(8, image=256),
    "dcgan": lambda: dcgan(128),
    "gpt2_small": lambda: gpt2_small(8),
    "llama_small": lambda: llama_small(64),
    "lstm_lm": lambda: lstm_lm(64, length=12),
    "nmt": lambda: nmt(64, length=8),
    "deepspeech2": lambda: deepspeech2(16, frames=100),
    "transformer_base": lambda: transformer_base(64),
    "bert": lambda: hf_bert(16, length=512, width=768, heads=12),
    "inception_v3": lambda: inception_v3(32),
    "densenet121": lambda: densenet121(16, image=224),
}
CASES = tuple(MODELS)
QUICK = ("vgg16",)
MACHINE = "v100-16gb"
SHARES = (0.8, 0.6, 0.4, 0.2, 0.05)
PUBLISHED = ("echo", "swap", "tflms", "libra", "libra:overlap=true", "capuchin", "checkmate_lp")
BASELINES = (
    "keep_all",
    "chen_sqrt",
    "chen_greedy",
    "ap_sqrt",
    "ap_greedy",
    "linearized_sqrt",
    "linearized_greedy",
    "revolve",
    "per_block",
    "min_cut",
)
EFFORT = 5_000
LIMIT_SECONDS = 10.0
TOLERANCE = 1e-6


def rows(case: str, quick: bool) -> Iterator[Row]:
    program = captured(MODELS[case], machine_named(MACHINE)).program
    floor, unplanned = 1.02 * floor_bytes(program)[0], unplanned_bytes(program)
    warm = Problem(program, unplanned - 1, machine=machine_named(MACHINE), tiers=("host",), effort=100)
    planner_named("auto")(warm)  # what is compiled at first use takes seconds
    for share in SHARES[1:2] if quick else SHARES:
        yield _row(case, program, share, int(floor + share * (unplanned - floor)))


def _row(case: str, program: Program, share: float, budget: int) -> Row:
    machine = machine_named(MACHINE)
    columns: dict[str, object] = {"case": case, "ops": len(program.ops), "f": share, "budget_bytes": budget}
    overheads: dict[str, float] = {}
    checks = []
    for name in ("auto", *PUBLISHED, *BASELINES):
        found = planned_above(
            program,
            budget,
            name,
            machine,
            tiers=("host",) if moves_buffers(name) else (),
            effort=EFFORT,
            limit_seconds=LIMIT_SECONDS if name == "checkmate_lp" else None,
        )
        status = found.answer.status.name
        columns[name] = status if found.overhead is None else found.overhead
        if name == "auto":
            columns |= {"bound": found.answer.bound, "auto_cpu_seconds": found.cpu_seconds}
        if found.answer.schedule is not None and found.overhead is None:
            checks.append(holds(f"{name} is legal and within the budget", False))
        elif found.overhead is not None:
            overheads[name] = found.overhead
    ours = overheads.pop("auto", None)
    best = min(overheads, key=lambda name: overheads[name], default="")
    checks.append(holds("found wherever any is", ours is not None or not overheads))
    if ours is not None and best:
        columns["best_other"] = best
        checks.append(at_most(f"auto, against {best}", ours, overheads[best] + TOLERANCE))
    return Row("never_worse", columns, tuple(checks))
