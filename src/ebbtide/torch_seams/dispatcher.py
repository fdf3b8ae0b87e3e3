"""Operators as the dispatcher knows them: ``torch._ops.OpOverload``, dispatch keys, kernels written in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import _meta_registrations, fx
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket
from torch._prims_common import get_computation_dtype, suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop, sdpa_flop

from ebbtide.torch_seams.patches import Attribute, Item, Patch, wrapped

__all__ = [
    "Draws",
    "OpOverload",
    "composite",
    "cudnn_reserve_bytes",
    "device_hint_is",
    "enters_autocast",
    "flop_registry",
    "get_computation_dtype",
    "is_composite",
    "is_pointwise",
    "python_kernels",
    "register_flop_formula",
    "schema_of",
    "sdpa_backward_flop",
    "sdpa_flop",
    "suggest_memory_format",
    "traced_as",
    "traced_as_compiled",
    "traced_with_derivative",
]

_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_AUTOGRAD = DispatchKey.Autograd
_KEYS = (_AUTOGRAD, _COMPOSITE)
_aten = torch.ops.aten
_UNTAGGED_POINTWISE = frozenset(
    {
        _aten.elu_backward.default,
        _aten.hardshrink_backward.default,
        _aten.hardsigmoid_backward.default,
        _aten.hardswish.default,
        _aten.hardswish_backward.default,
        _aten.hardtanh_backward.default,
        _aten.leaky_relu_backward.default,
        _aten.mish_backward.default,
        _aten.softplus_backward.default,
        _aten.softshrink_backward.default,
    }
)
"""Elementwise ops that torch has not tagged so."""


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """An operator's schema: the names, types, defaults and aliases of its arguments, and whether it writes to one."""
    return op._schema


def is_pointwise(op: OpOverload) -> bool:
    """Whether each element of its results depends on the elements at the same place alone."""
    return torch.Tag.pointwise in op.tags or op in _UNTAGGED_POINTWISE


def is_composite(op: OpOverload) -> bool:
    """Whether the operator is made of others, which autograd sees in its place."""
    return op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def composite(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the C++ kernel that makes a composite operator of others, whatever kernels in Python there are."""
    return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def traced_as(op: OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While open, what this thread traces for the composite operator ``op`` is another kernel.

    A trace asks ``op.py_kernels`` for a kernel by dispatch key and keeps the answer in ``op._dispatch_cache``.

    Args:
        op: such as ``torch.ops.aten.dropout.default``.
        make: from what would be traced otherwise to the kernel; both take the operator's arguments.
    """

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        return composite(op, *args, **kwargs)

    first, second = (wrapped(Item(op.py_kernels, key), make, this_thread=True, default=otherwise) for key in _KEYS)
    try:
        with first, second:
            op._dispatch_cache.clear()
            yield
    finally:
        op._dispatch_cache.clear()


@contextmanager
def traced_as_compiled(op: OpOverload, unless: Callable[..., bool] | None = None) -> Iterator[None]:
    """While open, this thread traces ``op`` by its compiled kernel, whatever torch has for it in Python.

    Torch writes some operators in Python for its traces: composite ones (``CompositeImplicitAutograd``) and ones that
    have a kernel and a derivative of their own (``Autograd``), which are then recorded as several others.

    Args:
        op: such as ``torch.ops.aten.hardshrink.default``.
        unless: says of a call's arguments that the kernel in Python is to stay in force; never if it is ``None``.
    """
    import torch._refs  # the last to register such kernels; a trace imports it as well

    made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _COMPOSITE)

    def make(in_python: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if unless is not None and unless(*args, **kwargs):
                return in_python(*args, **kwargs)
            return op._op_dk(_COMPOSITE if made_of_others else _AUTOGRAD, *args, **kwargs)

        return kernel

    def undecomposed(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: NotImplemented

    try:
        with ExitStack() as stack:
            for key in _KEYS:
                if key in op.py_kernels:
                    # At the composite key a mode asks whether the operator is to be decomposed after all.
                    kernel = undecomposed if key == _COMPOSITE and not made_of_others else make
                    stack.enter_context(wrapped(Item(op.py_kernels, key), kernel, this_thread=True))
            op._dispatch_cache.clear()
            yield
    finally:
        op._dispatch_cache.clear()


@contextmanager
def traced_with_derivative(op: OpOverload, kernel: Callable[..., Any]) -> Iterator[None]:
    """While open, this thread traces ``op``, which has a derivative of its own, as what ``kernel`` calls.

    Args:
        op: such as ``torch.ops.aten.cudnn_batch_norm.default``.
        kernel: takes the operator's arguments and gives its results.
    """

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(_AUTOGRAD, *args, **kwargs)

    try:
        with wrapped(Item(op.py_kernels, _AUTOGRAD), lambda _: kernel, this_thread=True, default=compiled):
            op._dispatch_cache.clear()
            yield
    finally:
        op._dispatch_cache.clear()


def cudnn_reserve_bytes(input: torch.Tensor) -> int:
    """What cuDNN keeps of a batch norm in training for its backward, bytes; 0 where there is no cuDNN to ask."""
    ask = getattr(torch._C, "_get_cudnn_batch_norm_reserve_space_size", None)
    return 0 if ask is None or input.device.type != "cuda" else int(ask(input, True))


def python_kernels() -> frozenset[str]:
    """The operators of ``torch.ops.aten`` for which torch has kernels in Python that a trace of a step would take."""
    import torch._refs  # it registers some of them

    packets = [each for each in vars(torch.ops.aten).values() if isinstance(each, OpOverloadPacket)]
    ops = [each for packet in packets for each in vars(packet).values() if isinstance(each, OpOverload)]
    return frozenset(op.__name__ for op in ops if any(key in op.py_kernels for key in _KEYS))


def device_hint_is(device: str) -> Patch:
    """While open, torch's descriptions that ask for a tensor's device are told this device type, on this thread.

    ``torch._meta_registrations.device_hint`` is what embedding bags, padding, transforms, linear algebra and
    convolution's memory format ask.
    """

    def make(_: Callable[..., str]) -> Callable[..., str]:
        return lambda _tensor: device

    return wrapped(Attribute(_meta_registrations, "device_hint"), make, this_thread=True)


def enters_autocast(node: fx.Node) -> str | None:
    """The device type for which a node of Dynamo's graph turns on autocast; ``None`` if it does nothing of the kind.

    Dynamo writes ``with torch.autocast(device)`` as a call of ``torch.amp.autocast_mode._enter_autocast``.
    """
    return str(node.args[0]) if node.target is torch.amp.autocast_mode._enter_autocast else None


class Draws(TorchDispatchMode):
    """While open, sees whether this thread draws random numbers; others may draw of the same generators meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operator."""
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
