"""What the updates of a backward have used, and whether it is the same when ``optimizer.step()`` ends.

Eager reads weights, options and state of an optimizer in ``optimizer.step()``. Updates inside of the step have read
them in the backward, and what somebody changes in between comes too late for them. So changes raise: of options, whose
values were noted, and of weights and state, where version counters tell, or where another tensor stands in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ebbtide.errors import UpdateError
from ebbtide.optimizer.in_step.gradient_guard import GradientGuard
from ebbtide.optimizer.in_step.updates import names_of
from ebbtide.optimizer.state.options import value_of, values_of
from ebbtide.torch_seams.storages import version_of

__all__ = ["UpdateAudit"]


class UpdateAudit:
    """What the updates of one model have used.

    Args:
        optimizer: whose updates they are.
        guard: knows what has been updated.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, guard: GradientGuard) -> None:
        self._optimizer = optimizer
        self._guard = guard
        self._options: list[dict[str, Any]] = []
        self._weights: dict[int, object] = {}
        self._state: dict[int, object] = {}

    def note_options(self) -> None:
        """Updates begin."""
        self._options = self._options_now()

    def note_tensors(self) -> None:
        """Updates have been made: what they wrote is what there is to be."""
        self._weights = {id(each): version_of(each) for each in self._guard.parameters}
        self._state = {id(each): self._state_of(each) for each in self._guard.parameters}

    def refuse_changes(self) -> None:
        """``optimizer.step()`` begins.

        Raises:
            UpdateError: saying what has changed.
        """
        now = self._options_now()
        if now != self._options:
            pairs = list(zip(self._options, now, strict=True)) if len(now) == len(self._options) else []
            changed = sorted({key for a, b in pairs for key in {*a, *b} if a.get(key) != b.get(key)}) or ["groups"]
            raise self._refusal(f"{', '.join(changed)} of the optimizer", "options (as schedulers do)")
        self.refuse_other_weights()
        if names := self._changed(self._state, self._state_of):
            raise self._refusal(f"the optimizer's state of {names}", "state (load_state_dict, state.clear())")

    def refuse_other_weights(self) -> None:
        """``optimizer.step()`` begins, or has ended with all hooks that came before ours.

        Raises:
            UpdateError: naming those that somebody has written to. They may be stepped after that.
        """
        if names := self._changed(self._weights, version_of):
            self._weights = {}
            raise self._refusal(names, "weights (decay, clamping, load_state_dict)")

    def _refusal(self, what: str, kind: str) -> UpdateError:
        return UpdateError(
            f'{what} changed between loss.backward() and the end of optimizer.step(), and step="inside" has updated in '
            f"the backward by what was there: eager changes first and updates then. Change {kind} before the forward, "
            "or after optimizer.step()",
            updated=self._guard.names,
        )

    def _changed(self, versions: Mapping[int, object], now: Callable[[torch.Tensor], object]) -> str:
        """Names of the parameters of which something is known and is another thing ``now``."""
        pairs = zip(self._guard.names, self._guard.parameters, strict=True)
        changed = [name for name, each in pairs if id(each) in versions and versions[id(each)] != now(each)]
        return names_of(changed) if changed else ""

    def _options_now(self) -> list[dict[str, Any]]:
        groups = [{"params": [id(each) for each in group["params"]]} for group in self._optimizer.param_groups]
        return [values | own for values, own in zip(values_of(self._optimizer), [*groups, {}], strict=True)]

    def _state_of(self, parameter: torch.Tensor) -> object:
        """Who asks for state that there is none of makes it empty."""
        return value_of(self._optimizer.state.get(parameter) or {})
