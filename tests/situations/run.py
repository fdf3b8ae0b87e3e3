"""One run of a situation, by eager or fitted: what it fits, what its steps take, what it leaves to compare.

1. A *step* is what :meth:`Run.step` is open for: from the call of the model to the return of ``.backward()``. Its peak
   is the counter's, above what was alive before the run began, less what :meth:`Run.step` is told to leave out.
2. What is *seen* is kept as NumPy copies, which the counter does not count: values, strides and types of outputs,
   gradients, parameters, buffers, states of optimizers and generators.
3. Calls with gradients are counted by a hook in eager's run; planned ones by the engine's own forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import os
import random
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

import ebbtide
from ebbtide.step.schedule import Offload
from situations.oracle import counter

__all__ = ["Counts", "Run", "Seen", "differences"]

ModelT = TypeVar("ModelT", bound=nn.Module)
Seen = dict[str, Any]


@dataclasses.dataclass
class Counts:
    """Of the process, by patches that are put in once."""

    captures: int = 0
    planned: int = 0
    called: int = 0


COUNTS = Counts()
MOVING = "EBBTIDE_PROMISES_MOVING"
"""Names a directory in the environment, to whose disk tensors may move, and on which any tensor pays."""
EFFORT = "EBBTIDE_PROMISES_EFFORT"
"""Says in the environment how many moves a search for a plan takes, and one for the smallest budget."""


SWAPS = "EBBTIDE_PROMISES_SWAPS"
"""In the environment: plans give way to others at the next call (``situations.swaps``)."""


def watch_engine() -> None:
    """Count captures and planned forwards from now on."""
    import ebbtide.engine.compiled as compiled
    from ebbtide.transfers import links

    if MOVING in os.environ:
        measured = links._Measured(4e10, 4e10, 1e-6, 0.0)  # a disk that is worth it, whatever this one does
        links._measure, links._LEAST_BYTES = lambda _: measured, 64

    if EFFORT in os.environ:
        from ebbtide.planners.search import smallest

        inspect.unwrap(ebbtide.Options.__init__).__kwdefaults__["effort"] = int(os.environ[EFFORT])
        smallest.FIRST_EFFORT = int(os.environ[EFFORT])

    if SWAPS in os.environ:
        from situations.swaps import swap_plans

        swap_plans()

    partition, forward = compiled.Capture.partition, compiled.run_forward

    def counted_partition(*args: Any, **kwargs: Any) -> Any:
        COUNTS.captures += 1  # a joint graph: tries that end before one (``capture.branches``) leave nothing
        return partition(*args, **kwargs)

    def counted_forward(args: list[Any]) -> Any:
        results = forward(args)
        COUNTS.planned += 1
        return results

    compiled.Capture.partition = counted_partition
    compiled.run_forward = counted_forward


class _CountCalls:
    """A forward pre-hook that counts the calls with gradients of the module that it was made for."""

    def __init__(self, module: nn.Module) -> None:
        self._of = id(module)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if id(module) == self._of and torch.is_grad_enabled():
            COUNTS.called += 1


class Run:
    """Definition 1.

    Args:
        budget: bytes for every fitted model; ``None`` in eager's run.
    """

    def __init__(self, budget: int | None = None, *, eager: bool) -> None:
        self.eager = eager
        self.fits = 0
        self.peaks: list[int] = []
        self.budgets: list[int] = []
        self.unforeseen = 0
        self.moves = 0
        self.seen: Seen = {}
        self.wrong: list[str] = []
        self.facts: dict[str, Any] = {}
        self._budget = budget
        self._models: list[weakref.ref[nn.Module]] = []
        self._zero = counter().bytes
        self._own = False

    # -- what a situation calls ---------------------------------------------------------------------------------

    def fit(self, model: ModelT, budget: str | int | float | None = None, **options: Any) -> ModelT:
        """``model``, fitted within ``budget`` (default: the situation's; a float is a share of that) unless eager."""
        self.fits += 1
        if self.eager:
            if not isinstance(model, torch.jit.ScriptModule):
                model.register_forward_pre_hook(_CountCalls(model))
            return model
        own = isinstance(budget, str)
        self._own |= own
        if isinstance(budget, float):
            budget = int(budget * (self._budget or 0))
        self._models.append(weakref.ref(model))
        if directory := os.environ.get(MOVING):
            options.setdefault("tiers", f"disk:{directory}")
        return ebbtide.fit(
            model, budget if budget is not None else (self._budget or "75%"), options=ebbtide.Options(**options)
        )

    def callbacks(self, model: nn.Module, **options: Any) -> list[Any]:
        """Of Hugging Face's ``Trainer``, that fit ``model`` when it trains; none for eager."""
        self.fits += 1
        if self.eager:
            model.register_forward_pre_hook(_CountCalls(model))
            return []
        from ebbtide.integrations.hf import MemoryBudget

        self._models.append(weakref.ref(model))
        return [MemoryBudget(self._budget if self._budget is not None else "75%", options=ebbtide.Options(**options))]

    def lightning(self, losses: Sequence[str] = (), **options: Any) -> list[Any]:
        """Callbacks of Lightning's ``Trainer``; none for eager. Calls of loss methods are counted by the situation."""
        self.fits += 1
        if self.eager:
            return []
        from ebbtide.integrations.lightning import MemoryBudget

        if directory := os.environ.get(MOVING):
            options.setdefault("tiers", f"disk:{directory}")
        budget = self._budget if self._budget is not None else "75%"
        return [MemoryBudget(budget, losses=losses, options=ebbtide.Options(**options))]

    @contextlib.contextmanager
    def step(self, beside: Sequence[nn.Module] = (), bytes_beside: int = 0) -> Iterator[None]:
        """One step; ``beside`` are modules whose parameters, buffers and gradients are not of its budget."""
        gc.collect()
        counter().reset()
        start = counter().bytes
        yield
        peak = counter().peak_bytes - self._zero - bytes_beside
        above = counter().peak_bytes - start
        for module in beside:
            tensors = [*module.parameters(), *module.buffers()]
            peak -= sum(t.nbytes + (t.grad.nbytes if t.grad is not None else 0) for t in tensors)
        self.peaks.append(peak)
        if not self.eager:
            self.budgets.append(self._budget_now())
            self.moves = max(self.moves, *map(_moves, self._plans()), 0)
            predicted = max((plan.timeline.above_bytes for plan in self._plans()), default=above)
            self.unforeseen = max(self.unforeseen, above - predicted)

    def train(
        self,
        model: nn.Module,
        step: Callable[[Any, int], Any],
        steps: int = 4,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        keep: bool = False,
        zero: bool = True,
        budget: Any = None,
        tell: bool = True,
        **options: Any,
    ) -> nn.Module:
        """The usual loop: fit, then ``steps`` times zero, ``step(model, i)``, step the optimizer, and see.

        Args:
            model: to fit.
            step: forward and backward; what it returns is seen.
            steps: how many.
            optimizer: makes one of the parameters.
            keep: whether what ``step`` returned stays alive through the next one.
            zero: whether gradients are zeroed before each step.
            budget: of :meth:`fit`.
            tell: whether ``fit`` is told of the optimizer.
            **options: of ``fit``.
        """
        made = optimizer(model.parameters()) if optimizer is not None else None
        if made is not None and tell:
            options["optimizer"] = made
        self.fit(model, budget, **options)
        inputs = self.inputs
        out: Any = None
        for i in range(steps):
            if zero:
                model.zero_grad()
            if not keep:
                out = None
            inputs.clear()
            with self.step():
                out = step(model, i)
                if made is not None:
                    made.step()
            self.see(f"step {i}", out)
            self.see_model(model, f"step {i}")
            if made is not None:
                self.see(f"state {i}", made.state_dict()["state"])
        del out
        return model

    inputs: list[Any] = []  # noqa: RUF012

    def x(self, i: int, *shape: int) -> torch.Tensor:
        """Batch ``i``: normal numbers from a generator of its own."""
        return torch.randn(*(shape or (1024, 64)), generator=torch.Generator().manual_seed(100 + i))

    def tokens(self, i: int, *shape: int, most: int = 50) -> torch.Tensor:
        """Batch ``i`` of integers."""
        return torch.randint(most, shape or (8, 16), generator=torch.Generator().manual_seed(100 + i))

    def warm(self) -> None:
        """Load compiler and planner by a model of other sizes, and be as before."""
        model = ebbtide.fit(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)), "1GiB")
        for _ in range(3):
            model(torch.randn(12, 24)).square().mean().backward()
        COUNTS.captures = COUNTS.planned = 0
        seed_all()

    def see(self, name: str, value: Any) -> None:
        """Keep ``value`` to compare."""
        self.seen[name] = _copy(value)

    def see_model(self, model: nn.Module, name: str = "end") -> None:
        """Keep parameters, gradients, buffers and the states of generators."""
        for key, parameter in model.named_parameters():
            self.see(f"{name} {key}", parameter.data)
            self.see(f"{name} {key}.grad", parameter.grad)
        for key, buffer in model.named_buffers():
            self.see(f"{name} {key}", buffer)
        self.see(f"{name} random state", torch.get_rng_state())
        self.see(f"{name} python's random state", hash(random.getstate()))
        self.see(f"{name} numpy's random state", hash(np.random.get_state()[1].tobytes()))

    def expect(self, what: str, holds: bool) -> None:
        """Something that must hold beside the bits."""
        if not holds:
            self.wrong.append(what)

    def unplanned(self) -> str:
        """What ``ebbtide.calls_of`` says of calls that were not planned, with the reasons."""
        found: dict[str, int] = {}
        for held in self._models:
            model = held()
            with contextlib.suppress(ebbtide.errors.UsageError, TypeError):  # unfitted since then, or gone
                for reason, count in ebbtide.calls_of(model).unplanned.items():  # type: ignore[arg-type]
                    found[reason] = found.get(reason, 0) + count
        return ", ".join(f"{count} x {reason.partition(':')[0]}" for reason, count in found.items())

    def _plans(self) -> list[ebbtide.Plan]:
        found: list[ebbtide.Plan] = []
        for model in (held() for held in self._models):
            if model is not None:
                with contextlib.suppress(ebbtide.errors.UsageError):  # unfitted since then
                    found += [plan] if (plan := ebbtide.plan_of(model)) is not None else []
        return found

    def _budget_now(self) -> int:
        if self._own or self._budget is None:
            return max((plan.budget_bytes for plan in self._plans()), default=0)
        return self._budget


def _moves(plan: ebbtide.Plan) -> int:
    """How many buffers leave in a step."""
    return sum(isinstance(each, Offload) for each in plan.schedule.actions)


def seed_all(seed: int = 0) -> None:
    """The state that both runs begin in."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _copy(value: Any) -> Any:
    """Definition 2: plain Python and NumPy, nothing of torch."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_sparse:
            return "sparse", _copy(value._indices()), _copy(value._values())
        kind, strides = str(value.dtype), tuple(value.stride())
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.view(torch.int16)
        array = value.resolve_conj().resolve_neg().numpy()
        return "tensor", kind, strides, np.array(array, copy=True, order="K")
    if isinstance(value, Mapping):
        return {str(key): _copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _copy(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__


def differences(ours: Seen, theirs: Seen, most: int = 3) -> list[str]:
    """What differs, the first few in words; empty if all bits are equal."""
    found: list[str] = []
    for name in theirs:
        if name not in ours:
            found.append(f"{name} is missing")
        else:
            found.extend(_differences(name, ours[name], theirs[name]))
    found.extend(f"{name} is extra" for name in ours if name not in theirs)
    return [*found[:most], *([f"and {len(found) - most} more"] if len(found) > most else [])]


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and theirs[0] == ours[0] == "tensor":
        yield from _tensors(name, ours, theirs)
    elif isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        for key in theirs:
            yield from _differences(f"{name}.{key}", ours[key], theirs[key])
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{name}[{index}]", one, other)
    elif ours != theirs and not (ours != ours and theirs != theirs):
        yield f"{name}: {_short(ours)} for {_short(theirs)}"


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a {value[0]}"
    return re.sub(r"\s+", " ", str(value))[:60]


def _tensors(name: str, ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> Iterator[str]:
    _, kind, strides, array = ours
    _, true_kind, true_strides, true_array = theirs
    if (kind, array.shape) != (true_kind, true_array.shape):
        yield f"{name}: {kind}{array.shape} for {true_kind}{true_array.shape}"
    elif array.tobytes() != true_array.tobytes():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if array.dtype == bool:
                size = float((array != true_array).sum())
            else:
                size = float(np.max(np.abs(array.astype(complex) - true_array.astype(complex)), initial=0.0))
        yield f"{name}: other bits, by up to {size:.2g}"
    elif strides != true_strides and array.size > 1:
        yield f"{name}: strides {strides} for {true_strides}"
