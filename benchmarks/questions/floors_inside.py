"""The optimizer in the step: are gradients gone from what is resident, with the bits of the loop outside?

Each model trains twenty steps three times from one seed: in eager, fitted with the optimizer outside, and fitted with
``step="inside"``, each whole step with ``optimizer.step()`` in it. Bits are held against the fitted loop outside: of
recurrent layers eager's are others (``known_failures``). Peaks are the allocator's own record of the last step;
gradients are what the weights that are trained take. The smallest budgets are those that are planned for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ebbtide
from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.measurement.resident import resident_bytes
from ebbtide.optimizer.in_step.updates import PREFIX
from ebbtide_published.zoo.small import SMALL
from harness.record import Check, Row, at_most, holds

TITLE = "The optimizer in the step: twenty steps against the loop outside"
STEPS = 20
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
CASES = (
    "gpt",
    "gpt2_small",
    "hf_bert",
    "hf_gpt2",
    "hf_llama",
    "hf_t5",
    "llama",
    "llama_70b_lora",
    "lstm_lm",
    "mlp_chain",
    "mobilenet",
    "nmt",
    "resnet50",
    "transformer_base",
    "unet",
    "vgg16",
)
QUICK = ("gpt",)
_RESERVE = 64 * 2**10
"""Of plans: what the proven step remembers."""


def _trained(case: ebbtide.Case, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], int]:
    """Losses, weights, state and random state after the steps, and the peak of the last one."""
    torch.manual_seed(1)
    found: list[torch.Tensor] = []
    peak = 0
    for number in range(STEPS):
        recorder = AllocationRecorder()
        start = resident_bytes([case.model, optimizer, case.args, dict(case.kwargs)])
        if number == STEPS - 1:
            recorder.start()
        loss = case.model(*case.args, **case.kwargs)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == STEPS - 1:
            peak = start + peak_above(recorder.stop())
        found.append(loss.detach().clone())
    state = optimizer.state_dict()["state"]
    kept = [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
    return [*found, *case.model.state_dict().values(), *kept, torch.get_rng_state()], peak


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def rows(name: str, quick: bool) -> Iterator[Row]:
    """One per optimizer."""
    torch.set_num_threads(1)
    for kind, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        case = SMALL[name]()
        twin, plain = (ebbtide.Case(copy.deepcopy(case.model), case.args, case.kwargs) for _ in range(2))
        as_eager, eager = _trained(plain, make(plain.model.parameters()))
        outside = make(twin.model.parameters())
        ebbtide.fit(twin.model, "100%", optimizer=outside, progress=None)
        expected, _ = _trained(twin, outside)
        smallest: dict[str, int] = {}
        for step in ("outside", "inside"):
            plan = ebbtide.plan(
                case.model,
                case.args,
                case.kwargs,
                budget="100%",
                options=ebbtide.Options(
                    optimizer=lambda model: make(model.parameters()),  # noqa: B023 - called at once
                    step=step,  # type: ignore[arg-type]
                    progress=None,
                ),
            )
            smallest[step] = plan.smallest_bytes
        optimizer = make(case.model.parameters())
        budget = smallest["inside"] + _RESERVE
        ebbtide.fit(case.model, budget, optimizer=optimizer, step="inside", progress=None)
        found, inside = _trained(case, optimizer)
        running = ebbtide.plan_of(case.model)
        assert running is not None
        updates = sum(op.target.startswith(PREFIX) for op in running.program.ops)
        trained = sum(each.requires_grad for each in case.model.parameters())
        checks: tuple[Check, ...] = (
            holds("the bits of the loop outside", _same(found, expected)),
            holds("no gradient is left at the step's end", not running.program.gradients and updates == trained),
            at_most("measured peak over the budget", inside / budget, 1.0),
        )
        yield Row(
            "inside",
            {
                "case": name,
                "optimizer": kind,
                "updates": updates,
                "eagers_bits": _same(found, as_eager),
                "gradient_bytes": sum(each.nbytes for each in case.model.parameters() if each.requires_grad),
                "eager_bytes": eager,
                "smallest_outside_bytes": smallest["outside"],
                "smallest_inside_bytes": smallest["inside"],
                "budget_bytes": budget,
                "measured_bytes": inside,
                "overhead": running.overhead,
            },
            checks,
        )
        ebbtide.unfit(case.model)
        if quick:
            return
