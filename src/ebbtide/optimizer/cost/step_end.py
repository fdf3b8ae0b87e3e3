"""What the step of an optimizer that was told of takes while it runs, where its state stays in place.

1. At ``optimizer.step()`` weights, state and gradients are there, outputs that live still, and what the step takes
   besides (``cost.step_bytes``): all parameters at once, or, with the optimizer in the backward, one by one those of
   which no backward has applied the gradient (``in_step.optimizer_in_backward``). No plan of the model's step lowers
   that, so a budget has to have room for it.
2. It is looked at again where what it depends on has changed: groups, frozen parameters, options, of numbers only
   whether they are 0. Where that is between a call and ``optimizer.step()``, the step is refused before it has changed
   anything (:meth:`OptimizerStepCost.refuse_changes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ebbtide.errors import UsageError
from ebbtide.optimizer.cost.step_bytes import step_bytes
from ebbtide.optimizer.state.options import settings_of
from ebbtide.planning.step_end import INSIDE, NOTHING_AFTER, SCALARS_BYTES, StepEnd
from ebbtide.step.provenance import NOT_KNOWN
from ebbtide.torch_seams.data_parallel import world_size
from ebbtide.torch_seams.optimizers import parameters_stepped_by
from ebbtide.units import format_bytes

__all__ = ["OptimizerStepCost", "end_of", "taken_in_words"]


_ON_CARD = 128
"""The allocator hands out 512 bytes for one of 4."""


_UNSPLIT = 200
"""One in so many bytes, for blocks that the allocator hands out larger than asked for (``engine.reserve``)."""
_GENERATORS_BYTES = 3 * 5056
"""States of the CPU's generator, which the proof of a first step may still have when the optimizer steps."""


def end_of(optimizer: torch.optim.Optimizer, taken_bytes: int | None, *, one_by_one: bool = False) -> StepEnd:
    """What an optimizer's step needs that takes ``taken_bytes`` (definition 1); nothing where that is not known."""
    if not taken_bytes:
        return NOTHING_AFTER
    slack, inside = scalars_bytes(optimizer) + _GENERATORS_BYTES, not (one_by_one or world_size() > 1)
    if _is_on_card(optimizer):
        slack += taken_bytes // _UNSPLIT
    return StepEnd(
        taken_bytes + slack,
        what=f"the tensors that {type(optimizer).__name__} makes while it steps",
        remedies=remedies_for(optimizer, "take an optimizer that makes fewer (SGD)", inside=inside),
        slack_bytes=slack,
    )


def remedies_for(optimizer: torch.optim.Optimizer, another: str, *, inside: bool) -> tuple[str, ...]:
    """What may be done about what the step of ``optimizer`` takes, one or more.

    Args:
        optimizer: whose step it is.
        another: the advice to take another one, which is no advice for SGD.
        inside: whether it may step in the backward instead.
    """
    found: list[str] = []
    for group in optimizer.param_groups:
        on_card = any(each.is_cuda for each in group["params"])
        if group.get("foreach") or ("foreach" in group and group["foreach"] is None and on_card):
            found.append("make it with foreach=False")
        if "fused" in group and not group["fused"]:
            found.append("make it with fused=True and without foreach")
    found += [f"have it step in the backward ({INSIDE})"] * inside
    found += [another] * (not isinstance(optimizer, torch.optim.SGD))
    return tuple(dict.fromkeys(found)) or ("train fewer weights",)


def scalars_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Room for a few scalars, losses that the loop keeps."""
    return _ON_CARD * SCALARS_BYTES if _is_on_card(optimizer) else SCALARS_BYTES


def _is_on_card(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.is_cuda for each in parameters_stepped_by(optimizer))


def taken_in_words(taken_bytes: int | None) -> str:
    """What a step takes, for people."""
    return NOT_KNOWN if taken_bytes is None else format_bytes(taken_bytes)


class OptimizerStepCost:
    """What the step of one optimizer takes, looked at again where that may have changed (definition 2).

    Args:
        optimizer: that steps weights of a fitted model.
        one_by_one: whether its parameters are stepped one after the other.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, one_by_one: bool = False) -> None:
        self.optimizer = optimizer
        self.one_by_one = one_by_one
        self._last: tuple[object, int | None] = (None, 0)

    def taken_bytes(self, trained: bytes) -> int | None:
        """What it takes while it runs; ``None`` if that cannot be found out.

        Args:
            trained: which parameters take gradients, in any form.
        """
        key = trained, self.options(), settings_of(vars(self.optimizer))
        if self._last[0] != key:
            self._last = (key, self._foreseen_bytes())
        return self._last[1]

    def options(self) -> object:
        """What of its groups it depends on (definition 2)."""
        groups = self.optimizer.param_groups
        return [(id(each), len(each["params"])) for each in groups], settings_of(*groups)

    def end(self, trained: bytes) -> StepEnd:
        """What a budget needs at its step (definition 1); ``trained`` as above."""
        return end_of(self.optimizer, self.taken_bytes(trained), one_by_one=self.one_by_one)

    def refuse_changes(self, options: object) -> None:
        """Refuse to step by other ``options`` than those that a call was planned with.

        Raises:
            UsageError: if there are gradients to step by. Nothing has been stepped.
        """
        if self.options() != options and any(each.grad is not None for each in parameters_stepped_by(self.optimizer)):
            raise UsageError(
                f"groups or options of {type(self.optimizer).__name__} that decide what its step takes (foreach, "
                "momentum, amsgrad, ...) were changed between the forward and optimizer.step(), and this step's budget "
                "was planned without. The step has changed nothing: change them back, and again after it or before a "
                "forward",
                argument="optimizer",
                value=self.optimizer,
            )

    def _foreseen_bytes(self) -> int | None:
        if not self.one_by_one:
            return step_bytes(self.optimizer)
        kinds: dict[object, list[dict[str, Any]]] = {}
        for group in self.optimizer.param_groups:
            for each in group["params"]:
                kinds.setdefault((id(group), each.shape, each.stride(), each.dtype), [{**group, "params": [each]}])
        return _most([step_bytes(self.optimizer, None, groups) for groups in kinds.values()])


def _most(sizes: Sequence[int | None]) -> int | None:
    found = [each for each in sizes if each is not None]
    return max(found, default=0) if len(found) == len(sizes) else None
