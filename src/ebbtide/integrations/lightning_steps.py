"""The losses of a ``LightningModule`` as training calls that Ebbtide plans.

1. A *loss method* computes a loss that a backward follows: ``training_step``, or in manual optimization those that it
   calls. All of a module are calls of one inner module, :class:`Losses`, which is fitted; an :class:`Entry` on the
   LightningModule itself stands where each method was, so whoever calls it comes to the plan.
2. What a captured step cannot hold is *kept for later*: while a loss method runs, ``self.log``, ``self.log_dict`` and
   the methods of metrics make a list of what they were asked, with copies of the tensors. The list is an output of the
   step, and is worked off in its order when the forward has returned, before the backward. So names and numbers are
   those of this very call: what a step was captured with, torch guards.
3. What a metric returns is a :class:`Later` until then. It can be logged and returned, and nothing else.
4. The number of the batch is an attribute, not an argument: a step that does not compute with it serves all batches
   for which it goes the same way (``capture.numbers``).
5. Where the trainer leaves the backward out, as for the epoch in which averaged weights (SWA) get the statistics of
   their batch norms, there is nothing to train: the method runs without gradients, and nothing is kept for a backward.
6. Batches that the trainer has fetched ahead are resident in a step; they are held where Ebbtide counts them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric, MetricCollection

from ebbtide.errors import CaptureError, UsageError
from ebbtide.optimizer.state.combined import CombinedOptimizers
from ebbtide.torch_seams.trees import tree_map

__all__ = ["TRAINING_STEP", "Entry", "Later", "Losses", "losses_of", "optimizer_of"]

TRAINING_STEP = "training_step"
_NUMBER = "self.batch_idx"
_WITHOUT_NUMBER = (
    "do not compute with batch_idx in training_step, whose every value is a step of its own then: choose by it what is "
    "logged, or do what is for some batches alone in on_train_batch_end, which gets batch_idx too"
)
_OF_METRICS = ("forward", "update", "compute", "reset")


class Later:
    """What a metric will have returned once the step's forward has (definition 3)."""

    def __init__(self, place: int) -> None:
        self.place = place

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(
            "training_step uses what a metric returned: inside of a planned step a metric is updated once its forward "
            "is done, so its value can be logged (self.log) and returned, and nothing else. Compute with it in "
            "on_train_batch_end, or use the function of torchmetrics.functional, which becomes part of the step",
            argument="training_step",
        )

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __float__ = __int__ = __iter__ = __len__ = __getitem__ = __str__ = __format__ = _refuse  # type: ignore[assignment]


def _copied(value: Any) -> Any:
    """A copy of ``value`` as it is now: what the step writes to a tensor later is not to be seen."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class Losses(torch.nn.Module):
    """The loss methods of ``module``, as training calls of one module (definition 1).

    Args:
        module: whose methods they are.
        names: of the methods.
    """

    def __init__(self, module: LightningModule, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.batch_idx: Any = 0
        self.trains = True
        self.ahead: list[Any] = []
        self._methods = {name: getattr(module, name) for name in names}
        self._kept: list[Any] = []
        self._stand_ins = _stand_ins(module, self._kept)
        self._entries = {name: Entry(self, name) for name in names}

    def forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the method of this name returns, and what is kept for later."""
        if name == TRAINING_STEP and len(args) > 1:
            args = (args[0], self.batch_idx, *args[2:])
        outputs = self._methods[name](*args, **kwargs)
        kept = list(self._kept)
        self._kept.clear()
        if outputs is None:  # skipped; without any op there would be no graph to tell that nothing is to be trained
            kept.append((None, "_skipped", (torch.zeros(()),), {}))
        return outputs, kept

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the method, planned if gradients are on and a backward follows (definition 5)."""
        if not torch.is_grad_enabled() or not self.trains:
            with torch.no_grad():
                return self._methods[name](*args, **kwargs)
        if name == TRAINING_STEP and len(args) > 1:
            self.batch_idx = args[1]
            args = (args[0], None, *args[2:])
        self.training = self.module.training
        with self.keeping():
            try:
                outputs, kept = self(name, args, kwargs)
            except CaptureError as error:
                if _NUMBER not in (error.reason or ""):
                    raise
                raise CaptureError(error.reason, remedy=_WITHOUT_NUMBER, source=error.source) from error
        return self._work_off(outputs, kept)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep for later what is logged and given to metrics (definition 2); methods are as they were written."""
        self._kept.clear()
        own = self.module.__dict__
        entries = {name: own.pop(name) for name in self._entries if isinstance(own.get(name), Entry)}
        had = [(each.__dict__, name, each.__dict__.get(name)) for each, name, _ in self._stand_ins]
        for each, name, stand_in in self._stand_ins:
            each.__dict__[name] = stand_in
        try:
            yield
        finally:
            for place, name, before in had:
                if before is None:
                    del place[name]
                else:
                    place[name] = before
            own.update(entries)

    def install(self) -> None:
        """Put the entries where the methods were."""
        self.module.__dict__.update(self._entries)

    def remove(self) -> None:
        """Put back the methods."""
        for name in self._entries:
            self.module.__dict__.pop(name, None)
            if not isinstance(self._methods[name], types.MethodType):  # put on the module itself by somebody else
                self.module.__dict__[name] = self._methods[name]

    def _work_off(self, outputs: Any, kept: list[Any]) -> Any:
        """Do what was put off (definition 2): log, and update metrics; what the method returned, with their values."""
        results: list[Any] = []

        def there(value: Any) -> Any:
            return results[value.place] if isinstance(value, Later) else value

        for owner, name, args, kwargs in kept:
            if name == "_skipped":
                continue
            args, kwargs = tree_map(there, (args, kwargs))
            results.append(getattr(self.module if owner is None else owner, name)(*args, **kwargs))
        return tree_map(there, outputs) if kept else outputs


def _stand_ins(module: LightningModule, kept: list[Any]) -> list[tuple[torch.nn.Module, str, Callable[..., Any]]]:
    """Whose method is replaced, its name, and what takes its place."""
    found: list[tuple[torch.nn.Module, str, Callable[..., Any]]] = [
        (module, name, _keeper(None, name, kept)) for name in ("log", "log_dict")
    ]
    for each in module.modules():
        if isinstance(each, Metric | MetricCollection):
            found += [(each, name, _keeper(each, name, kept)) for name in _OF_METRICS]
    return found


def _keeper(owner: torch.nn.Module | None, name: str, kept: list[Any]) -> Callable[..., Any]:
    def keep(*args: Any, **kwargs: Any) -> Later:
        place = len(kept)
        kept.append((owner, name, tree_map(_copied, args), tree_map(_copied, kwargs)))
        return Later(place)

    return keep


class Entry:
    """What stands on the LightningModule in place of a loss method; copies and pickles have the method.

    Args:
        losses: whose method it is.
        name: of the method.
    """

    def __init__(self, losses: Losses, name: str) -> None:
        self._losses, self._name = losses, name
        self.__wrapped__ = losses._methods[name]  # Lightning reads the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the method."""
        return self._losses.run(self._name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._losses.module)]  # which is being copied
        return types.MethodType(getattr(type(copied), self._name), copied)

    def __reduce__(self) -> Any:
        return getattr, (self._losses.module, self._name)


def losses_of(module: LightningModule, names: Sequence[str]) -> Losses:
    """Under the module's own name, by which plans and errors call it."""
    kind = type(type(module).__name__, (Losses,), {"__module__": Losses.__module__, "__doc__": Losses.__doc__})
    return kind(module, names)


def optimizer_of(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Whose state counts; Lightning has one without parameters where a module configures none."""
    real = [each for each in optimizers if any(group.get("params") for group in each.param_groups)]
    return None if not real else real[0] if len(real) == 1 else CombinedOptimizers(real)
