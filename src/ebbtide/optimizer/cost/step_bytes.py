"""What an optimizer's step takes while it runs, above parameters, gradients and state; found out without that memory.

1. A stand-in of the optimizer steps on fake tensors; a number that it asks them for is 1, and then 0. What a step holds
   at its peak is counted as storages come and go; of the first one without the state that it leaves, which is counted
   elsewhere.
2. Steps differ: a first one makes what later ones reuse, others come after a warm-up (RAdam's sixth) or once in a while
   (Shampoo's). A stand-in with one parameter of each kind, the largest, takes :data:`STEPS` steps to tell which is the
   largest, :data:`TORCHS_STEPS` if its class is torch's own, and all parameters step up to that one.
3. A kernel may take memory of its own besides its results. On the device at hand every op is run once, alone, on memory
   that is resident anyway as far as can be (``cost.profiling_budget``), but for those that take none: arithmetic of
   single elements in one type, on lists of tensors too, copies and fills. Of several types, a kernel casts some first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ebbtide.cost.call import call_with
from ebbtide.cost.profile import workspace_alone
from ebbtide.cost.profiling_budget import ProfilingBudget, profiling_within
from ebbtide.measurement.resident import as_stepping
from ebbtide.optimizer.state.options import options_of, values_of
from ebbtide.optimizer.state.stand_ins import stand_in_of, tried_out
from ebbtide.signals import raised_by_a_handler, signals_wait
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.dispatcher import OpOverload, is_pointwise, schema_of
from ebbtide.torch_seams.fake_tensors import (
    fakes_are_counted,
    fakes_are_stepped_as_parameters,
    numbers_are,
    quiet_log,
    sizes_only,
    without_modes,
)
from ebbtide.torch_seams.optimizers import is_torchs_own
from ebbtide.torch_seams.storages import parts_of

__all__ = ["STEPS", "TORCHS_STEPS", "step_bytes"]

STEPS = 32
"""Steps that the stand-in takes (definition 2): what an optimizer does less often is not seen."""
TORCHS_STEPS = 8
"""Likewise, of one whose class is torch's own: none takes more at a later step than at its first eight."""

_Group = dict[str, Any]


def step_bytes(
    optimizer: torch.optim.Optimizer, device: str | None = None, groups: Sequence[_Group] | None = None
) -> int | None:
    """Bytes that a step of ``optimizer`` takes at its peak; ``None`` if that cannot be found out.

    Steps on fake tensors cannot be taken by optimizers with kernels of their own, nor those that want a closure.

    Args:
        optimizer: of real, fake or meta parameters.
        device: type of the one to step on, where some optimizers take other ways; that of the parameters if ``None``.
        groups: of parameters that it steps on; its own if ``None``.
    """
    optimizer = as_stepping(optimizer)
    groups = optimizer.param_groups if groups is None else groups
    key = _key(optimizer, groups, device)
    if key not in _known:
        found = _found_out(optimizer, groups, device)
        if key is None:
            return found
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = found
    return _known[key]


_known: dict[object, int | None] = {}
_MOST_KNOWN = 256


def _key(optimizer: torch.optim.Optimizer, groups: Sequence[_Group], device: str | None) -> object | None:
    """All that a step of one of torch's own depends on; ``None`` for others, and where options are no plain values."""
    options = tuple((name, value) for group in groups for name, value in group.items() if name != "params")
    if not is_torchs_own(optimizer) or not _is_plain(options):
        return None
    kinds = tuple(tuple(map(_key_of, group["params"])) for group in groups)
    return type(optimizer), device, repr(options), kinds


def _is_plain(value: object) -> bool:
    """Whether it is a number, text or ``None`` of a built-in class itself, or a tuple of such."""
    kind = type(value)
    return any(kind is each for each in _PLAIN) or (kind is tuple and all(map(_is_plain, cast("tuple[object]", value))))


_PLAIN = (int, float, bool, str, type(None))


def _key_of(parameter: torch.Tensor) -> object:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device, parameter.requires_grad


def _found_out(optimizer: torch.optim.Optimizer, groups: Sequence[_Group], device: str | None) -> int | None:
    stepped = [each for group in groups for each in group["params"]]
    lenders = [part for each in stepped for part in parts_of(each)]
    kernels = _Kernels(any(device not in (None, each.device.type) for each in stepped))
    found: list[int] = []
    with (
        signals_wait(),
        without_modes(),
        quiet_log(),
        profiling_within(ProfilingBudget(0, lenders)),
        tried_out(optimizer),
    ):
        for answer in (1, 0):  # a step that asks its own state, as ASGD does whether to average, may go either way
            try:
                with sizes_only(), numbers_are(answer), fakes_are_stepped_as_parameters():
                    found.append(_largest(optimizer, groups, device, kernels.workspace_bytes))
            except Exception as error:  # any optimizer of the user's may raise anything here
                if raised_by_a_handler(error):
                    raise
    return max(found, default=None)


def _largest(
    optimizer: torch.optim.Optimizer, groups: Sequence[_Group], device: str | None, workspace: Callable[..., int]
) -> int:
    kinds = [{**group, "params": list(_of_each_kind(group["params"]))} for group in groups]
    steps = _counted.setdefault(optimizer, {})
    key = repr((device, values_of(optimizer, kinds), [list(map(_kind, group["params"])) for group in kinds]))
    if key not in steps:
        tried = range(TORCHS_STEPS if is_torchs_own(optimizer) else STEPS)
        taken = list(_step_peaks(optimizer, kinds, device, tried, lambda *_: 0))
        steps[key] = tuple(sorted({0, 1, max(tried, key=lambda step: (taken[step], -step))}))
    return max(_step_peaks(optimizer, groups, device, steps[key], workspace))


_counted: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[object, tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""The steps of definition 2 that are looked at, by what they depend on."""


def _kind(parameter: torch.nn.Parameter) -> object:
    """What of a parameter it depends on which steps take more than others: not how large it is."""
    return parameter.dtype, parameter.ndim, parameter.requires_grad, parameter.numel() > 1


def _of_each_kind(parameters: Iterable[torch.nn.Parameter]) -> Iterable[torch.nn.Parameter]:
    """The largest of each type, number of dimensions and place, with and without a gradient (definition 2)."""
    largest: dict[tuple[object, ...], torch.nn.Parameter] = {}
    for each in parameters:
        kind = (each.dtype, each.ndim, each.device, each.requires_grad)
        if kind not in largest or largest[kind].numel() < each.numel():
            largest[kind] = each
    return largest.values()


def _step_peaks(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[_Group],
    device: str | None,
    counted: Sequence[int],
    workspace: Callable[..., int],
) -> Iterator[int]:
    """Bytes that each of the steps ``counted``, ascending from 0, takes at its peak (definition 1)."""
    copies = [{**options_of(group), "params": list(_stand_ins(group["params"], device))} for group in groups]
    trial = stand_in_of(optimizer, copies)
    for step in range(counted[-1] + 1):
        if step not in counted:
            trial.step()
            continue
        with fakes_are_counted(workspace) as taken:
            trial.step()
        yield taken.peak_bytes - (0 if step else taken.live_bytes)


def _stand_ins(parameters: list[torch.nn.Parameter], device: str | None) -> Iterator[torch.nn.Parameter]:
    for each in parameters:
        stand_in = torch.nn.Parameter(torch.zeros(each.shape, dtype=each.dtype, device=device or each.device))
        if each.requires_grad:
            stand_in.grad = torch.zeros_like(stand_in)
        yield stand_in


_LISTS = ("_foreach_", "_fused_")
_COPIES = frozenset("clone _to_copy copy_ fill_ zero_ detach lift_fresh_copy".split())
_FILLS = ("empty", "zeros", "ones", "full", "new_")


def _takes_nothing(op: OpOverload) -> bool:
    """Whether an op takes no memory besides its results (definition 3)."""
    name = schema_of(op).name.rpartition("::")[2]
    if is_pointwise(op) or op.is_view or name.startswith(_LISTS) or name in _COPIES:
        return True
    return name.startswith(_FILLS) or name.endswith("_like")


def _casts(op: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether it is arithmetic of several types; numbers in tensors (steps, rates) take no type."""
    return is_pointwise(op) and len({each.dtype for each in tensors if each.ndim}) > 1


class _Kernels:
    """What kernels take besides their results (definition 3), each call measured once.

    Args:
        elsewhere: whether the step is to run on a device whose kernels cannot be asked.
    """

    def __init__(self, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._bytes_of: dict[str, int] = {}

    def workspace_bytes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: object) -> int:
        """What ``func`` takes besides its results."""
        if self._elsewhere or not isinstance(func, OpOverload):
            return 0
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if _takes_nothing(func) and not _casts(func, tensors):
            return 0
        if not tensors or any(each.device.type == "meta" for each in tensors):
            return 0
        call = call_with(func, args, kwargs, pytree.tree_leaves(results))
        if call.signature not in self._bytes_of:
            self._bytes_of[call.signature] = workspace_alone(call, tensors[0].device.type)
        return self._bytes_of[call.signature]
