"""Fake tensors: shapes, strides and dtypes without memory (``torch._subclasses.fake_tensor``).

Relied on: a mode describes every op's results without running it; with ``allow_non_fake_inputs`` real tensors may be
among the arguments; a description is cached by the class, for all modes and threads.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ebbtide.torch_seams.patches import Attribute, Patch, patched, wrapped
from ebbtide.torch_seams.storages import buffer_table, parameter_table
from ebbtide.torch_seams.trees import tree_leaves

__all__ = [
    "DATA_DEPENDENT",
    "LIMITS",
    "FakeTensor",
    "FakeTensorMode",
    "conversions_replace",
    "described",
    "described_by",
    "fake_device",
    "fakes_are_counted",
    "fakes_are_stepped_as_parameters",
    "forget_descriptions",
    "has_symbolic_sizes",
    "initialisation_reads_no_values",
    "kernel_choices",
    "mode_of",
    "numbers_are",
    "quiet_log",
    "sizes_only",
    "unremembered",
    "without_modes",
]

DATA_DEPENDENT: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where a value or a size depends on data."""
LIMITS: tuple[type[Exception], ...] = (UnsupportedFakeTensorException, *DATA_DEPENDENT)
"""What fake tensors raise where real ones would not."""

Dispatch = Callable[[FakeTensorMode, Any, Any, Any, Any], Any]
"""From a mode, an op, types, arguments and keyword arguments to the op's fake result, or ``NotImplemented``."""


def fake_device(tensor: FakeTensor) -> torch.device:
    """The device that a fake tensor stands for. ``device`` says ``meta`` while a description is made."""
    return tensor.fake_device


def mode_of(tensor: FakeTensor) -> FakeTensorMode:
    """The mode that made a fake tensor; two modes' tensors do not go into one op."""
    return tensor.fake_mode


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Whether a size or a stride of the tensor is a symbol."""
    return tensor._has_symbolic_sizes_strides


def described(mode: FakeTensorMode, like: torch.Tensor, storage_of: torch.Tensor | None) -> FakeTensor:
    """A fake tensor of ``mode`` with sizes, strides and type of ``like``, made without asking for an op's description.

    Args:
        mode: whose it is to be.
        like: a fake tensor.
        storage_of: a fake tensor whose memory it is a view of, from where ``like`` begins; ``None`` for memory of its
            own, without a byte more than it reaches.
    """
    if storage_of is None:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    else:
        made = torch.empty(0, dtype=like.dtype, device="meta")
        made.set_(storage_of.untyped_storage(), like.storage_offset(), like.shape, like.stride())  # type: ignore[call-overload]
    return FakeTensor(mode, made, like.device)


def sizes_only() -> FakeTensorMode:
    """A mode that never runs a kernel on real stand-ins of fake tensors, as torch does for unknown ops."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def without_modes() -> AbstractContextManager[object]:
    """While open, ops run as if no mode (fake tensors, tracing, the user's own) were active on this thread."""
    return _disable_current_modes()


class numbers_are(TorchDispatchMode):
    """While open, a number that is asked of a fake tensor and that nobody knows is ``answer``, in the tensor's type.

    An op in place that has no description and gives nothing back (``_fused_sgd_``) does nothing.
    """

    def __init__(self, answer: int) -> None:
        super().__init__()
        self._answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Ask torch first: a fake tensor of one element may know its value."""
        try:
            return func(*args, **(kwargs or {}))
        except UnsupportedOperatorException:
            if func._schema.returns:
                raise
            return None
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
            return kind(self._answer)


class fakes_are_counted(TorchDispatchMode):
    """While open, counts bytes of the storages of fake tensors that ops make, for as long as these live.

    Args:
        besides: from an op, its arguments, keyword arguments and results to the bytes that it takes while it runs
            besides its results.

    Attributes:
        peak_bytes: at the most.
        live_bytes: now.
    """

    def __init__(self, besides: Callable[[Any, Any, Any, Any], int] = lambda *_: 0) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.live_bytes = 0
        self._besides = besides
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count what is new among the results."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, FakeTensor):
                self._known.add(each.untyped_storage())
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, FakeTensor) and (storage := each.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self._besides(func, args, kwargs or {}, results))
        return results

    def _gone(self, size: int) -> None:
        self.live_bytes -= size


def fakes_are_stepped_as_parameters() -> Patch:
    """While open, optimizers choose their implementation for fake parameters as for real ones of the same device.

    They ask for the very class of a parameter, and take one tensor at a time where it is any other.
    """
    kinds = optimizers._foreach_supported_types
    return patched(Attribute(optimizers, "_foreach_supported_types"), [*kinds, FakeTensor])


class _Converted(threading.local):
    """What one conversion has made so far, by what it was made of; both are kept alive until it ends."""

    def __init__(self) -> None:
        self.replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None


_converted = _Converted()


def initialisation_reads_no_values() -> Patch:
    """While open, ``nn.init.trunc_normal_`` leaves fake tensors as they are, as it leaves those on ``meta``.

    It draws again until every number is within its limits, and so asks for values.
    """

    def drawn(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda tensor, *args, **kwargs: (
            tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)
        )

    return wrapped(Attribute(torch.nn.init, "_no_grad_trunc_normal_"), drawn, this_thread=True)


def conversions_replace() -> Patch:
    """While open, ``module.to(dtype)``, ``half()`` and their like give modules of fake tensors new parameters.

    Torch swaps the contents of the old ones and the new (``Module._apply``), which it refuses for fake tensors: their
    mode refers to them weakly. Parameters that are one before are one afterwards.
    """
    return wrapped(Attribute(torch.nn.Module, "_apply"), _by_replacing, this_thread=True)


def _by_replacing(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    def apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        outermost = _converted.replaced is None
        if _converted.replaced is None:
            _converted.replaced = {}
        try:
            if recurse:
                for child in module.children():
                    child._apply(fn)
            if not any(isinstance(each, FakeTensor) for each in module.parameters(recurse=False)):
                return original(module, fn, recurse=False)
            _replace_own(module, fn, _converted.replaced)
            return module
        finally:
            if outermost:
                _converted.replaced = None

    return apply


def _replace_own(
    module: torch.nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    replaced: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Lay what ``fn`` makes of parameters and buffers in their places."""
    for table in (parameter_table(module), buffer_table(module)):
        for name, tensor in table.items():
            if tensor is None:
                continue
            if id(tensor) not in replaced:
                with torch.no_grad():
                    new = fn(tensor)
                if isinstance(tensor, torch.nn.Parameter) and new is not tensor:
                    new = torch.nn.Parameter(new, tensor.requires_grad)
                replaced[id(tensor)] = (tensor, new)
            table[name] = replaced[id(tensor)][1]  # type: ignore[assignment]


@contextmanager
def quiet_log() -> Iterator[None]:
    """While open, what goes wrong on fake tensors is not logged: it is raised as well."""
    import logging

    with ExitStack() as stack:
        for name in ("torch._subclasses.fake_tensor", "torch._dynamo.utils"):
            stack.enter_context(patched(Attribute(logging.getLogger(name), "disabled"), True))
        yield


_describing: Counter[int] = Counter()  # per thread, how many described_by are open
_MOST_REMEMBERED = 4_000
"""Descriptions of one set of corrections, some KB each; a large model's step needs several hundred."""
_MOST_SETS = 16
"""Sets of corrections, with threads and choices of kernels, of which descriptions are kept."""


class _OfThread(threading.local):
    """What is open on one thread: the names of its corrections, and how often :func:`unremembered` is."""

    def __init__(self) -> None:
        self.corrections: tuple[Hashable | None, ...] = ()
        self.unremembered = 0


_here = _OfThread()
_remembered: dict[Hashable, dict[Any, Any]] = {}


@contextmanager
def described_by(correct: Callable[[Dispatch], Dispatch], name: Hashable | None = None) -> Iterator[None]:
    """While open, fake results of this thread are what ``correct`` makes of torch's own descriptions.

    The class's cache of descriptions belongs to all threads and does not know of corrections. So another takes its
    place, and only a thread that has it to itself uses it. Dynamo and AOTAutograd trace forward and backward on the
    thread that calls (``set_multithreading_enabled(False)`` in ``aot_autograd.py``).

    Args:
        correct: from torch's own dispatch, to be called with the same arguments, to the corrected one.
        name: of the correction, where equal names mean equal descriptions of equal calls, whatever else is patched
            beside it. Descriptions are then kept until one of the same corrections, in the same order, opens again.
    """

    def only_if_alone(cached: Dispatch) -> Dispatch:
        def look_up(mode: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            if _here.unremembered or any(thread != threading.get_ident() for thread in list(_describing)):
                return mode._dispatch_impl(func, types, args, kwargs)
            return cached(mode, func, types, args, kwargs)

        return look_up

    thread, before = threading.get_ident(), _here.corrections
    _here.corrections = (*before, name)
    descriptions = _known_descriptions(_here.corrections)
    _forget_graphs(FakeTensorMode.cache)
    _describing[thread] += 1
    try:
        with (
            wrapped(Attribute(FakeTensorMode, "_cached_dispatch_impl"), only_if_alone),
            wrapped(Attribute(FakeTensorMode, "_dispatch_impl"), correct, this_thread=True),
            patched(Attribute(FakeTensorMode, "cache"), descriptions),
        ):
            yield
    finally:
        _here.corrections = before
        _describing[thread] -= 1
        if not _describing[thread]:
            del _describing[thread]
        if len(descriptions) > _MOST_REMEMBERED:
            descriptions.clear()
        _forget_graphs(descriptions)


def forget_descriptions() -> None:
    """Describe anew what fake tensors have been described as so far."""
    for each in _remembered.values():
        each.clear()


@contextmanager
def unremembered() -> Iterator[None]:
    """While open, what fake tensors are described as on this thread is neither looked up nor kept for later."""
    _here.unremembered += 1
    try:
        yield
    finally:
        _here.unremembered -= 1


def kernel_choices() -> tuple[object, ...]:
    """Settings of torch by which ops choose their kernels, and with these how results lie in memory."""
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )


def _known_descriptions(corrections: tuple[Hashable | None, ...]) -> dict[Any, Any]:
    """Those that were made under the same corrections, threads and choices of kernels: layouts depend on all three."""
    if None in corrections:
        return {}
    choices = kernel_choices()
    if len(_remembered) >= _MOST_SETS and (corrections, choices) not in _remembered:
        _remembered.clear()
    return _remembered.setdefault((corrections, choices), {})


def _forget_graphs(descriptions: dict[Any, Any]) -> None:
    """Keep those of plain ops only.

    An operator of higher order is looked up by where its graph lies in memory. When that graph goes, torch forgets
    the description in the cache that the class has then, which may be another.
    """
    for key in [key for key in list(descriptions) if not isinstance(key.key[0], torch._ops.OpOverload)]:
        descriptions.pop(key, None)
