"""Models, budgets, cards and links: a plan that may move and recompute is never slower than one that may do either.

A row is a model on a card: :data:`SHARES` budgets, as in ``hybrid_plan``, with the link of the catalogue and with one
of half its rates. One setting of the planner for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide import Case
from ebbtide._api.estimate import capture_ahead
from ebbtide.options import Options
from ebbtide.planners.base import Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.portfolio import moves_alone
from ebbtide.planners.registry import planner_named
from ebbtide.step.legality import check
from ebbtide.step.machine import machine_named
from ebbtide.step.simulate import overhead_of
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo.hf import hf_bert, hf_t5
from ebbtide.zoo.llama import LlamaSizes, llama
from ebbtide.zoo.resnet import resnet50
from ebbtide.zoo.unet import unet
from ebbtide_published.zoo.densenet import densenet121
from ebbtide_published.zoo.fcn import fcn8
from ebbtide_published.zoo.lstm_lm import lstm_lm
from ebbtide_published.zoo.mobilenet import mobilenet
from ebbtide_published.zoo.nmt import nmt
from ebbtide_published.zoo.segnet import segnet
from ebbtide_published.zoo.vgg import vgg16
from harness.batched import with_link
from harness.record import Row, at_most, holds

TITLE = "Twelve models, five budgets, three cards, links whole and halved: both against either alone"
LLAMA = LlamaSizes(vocabulary=32000, layers=8, width=1024, hidden=2816, heads=16)
MODELS: dict[str, Callable[[], Case]] = {
    "vgg16": lambda: vgg16(64, image=224),
    "resnet50": lambda: resnet50(32, image=224),
    "mobilenet": lambda: mobilenet(64, image=224),
    "densenet121": lambda: densenet121(16, image=224),
    "unet": lambda: unet(8, image=256),
    "segnet": lambda: segnet(8, image=256),
    "fcn8": lambda: fcn8(8, image=256),
    "bert": lambda: hf_bert(16, length=512, width=768, heads=12),
    "t5": lambda: hf_t5(16, length=256, width=512),
    "llama": lambda: llama(
        8, length=1024, sizes=LlamaSizes(vocabulary=32000, layers=8, width=1024, hidden=2816, heads=16)
    ),
    "lstm_lm": lambda: lstm_lm(64, length=12),
    "nmt": lambda: nmt(64, length=8),
}
MACHINES = ("v100-16gb", "a100-80gb", "h100-80gb")
CASES = tuple(f"{model} {machine}" for model in MODELS for machine in MACHINES)
QUICK = ("vgg16 a100-80gb",)
SHARES = (0.8, 0.6, 0.4, 0.2, 0.05)
LINKS = (1.0, 0.5)
EFFORT = 5000


def rows(case: str, quick: bool) -> Iterator[Row]:
    model, name = case.split()
    card = machine_named(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = MODELS[model]()
    program = capture_ahead(made.model, made.args, made.kwargs, name=model, options=Options(machine=card)).program
    floor, unplanned = 1.02 * floor_bytes(program)[0], unplanned_bytes(program)
    plan = planner_named("auto")
    plan(Problem(program, unplanned - 1, machine=card, tiers=("host",), effort=100))  # compiles
    for share in SHARES[:1] if quick else SHARES:
        budget = int(floor + share * (unplanned - floor))
        begin = time.process_time()
        alone = plan(Problem(program, budget, machine=card, effort=EFFORT)).schedule
        alone_seconds = time.process_time() - begin
        for rate in LINKS:
            machine = with_link(card, rate)
            both = Problem(program, budget, machine=machine, tiers=("host",), effort=EFFORT)
            begin = time.process_time()
            answer = plan(both)
            seconds = time.process_time() - begin
            moved = moves_alone(both)
            schedules = {"recompute": alone, "move": moved, "hybrid": answer.schedule}
            overheads = {
                what: None if each is None else overhead_of(program, each, machine) for what, each in schedules.items()
            }
            hybrid = overheads["hybrid"]
            found = [each for what, each in overheads.items() if what != "hybrid" and each is not None]
            least = min(found, default=None)
            checks = [holds("found wherever either is", hybrid is not None or least is None)]
            if hybrid is not None and answer.schedule is not None:
                checks += [
                    holds("legal and within the budget", not check(program, answer.schedule, budget, machine.links)),
                    at_most("hybrid, against the better of both", hybrid, (1e9 if least is None else least) + 1e-9),
                ]
            yield Row(
                "grid",
                {
                    "case": case,
                    "ops": len(program.ops),
                    "f": share,
                    "link": rate,
                    "recompute_overhead": overheads["recompute"],
                    "move_overhead": overheads["move"],
                    "hybrid_overhead": hybrid,
                    "hybrid_bound": answer.bound,
                    "recompute_cpu_seconds": alone_seconds,
                    "hybrid_cpu_seconds": seconds,
                },
                tuple(checks),
            )
