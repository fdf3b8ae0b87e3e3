"""What one op is called with: tensors as shape, stride, dtype; every other argument by value.

A :class:`Call` is the key of a cost and enough to run the op alone on synthetic inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.torch_seams import trees as pytree

__all__ = ["Call", "TensorSpec", "call_of", "call_with", "extent_of", "same_strides"]


def extent_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor of these sizes and strides reaches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two tensors of ``shape`` with these strides put every element in the same place."""
    if 0 in shape:
        return True
    return all(a == b for size, a, b in zip(shape, one, other, strict=True) if size != 1)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument without its values.

    Attributes:
        shape: sizes.
        stride: strides, in elements.
        dtype: element type.
        device: device type, ``"cpu"`` or ``"cuda"``.
        lazy: ``"conj"``, ``"neg"`` or both, where the values are to be conjugated or negated when they are read;
            a kernel that cannot do so copies the tensor first.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    lazy: str = ""

    @property
    def extent(self) -> int:
        """Elements from the first to the last that the tensor reaches."""
        return extent_of(self.shape, self.stride)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}:{list(self.stride)}{self.lazy}"


@dataclass(frozen=True)
class Call:
    """One op with its arguments; tensors are :class:`TensorSpec`, nested lists and tuples are kept.

    Attributes:
        target: the ATen overload.
        args: positional arguments.
        kwargs: keyword arguments.
        outputs: the tensors it returns, in order.
        signature: target and arguments as text: the key of its cost besides device, threads and build.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec, ...]
    signature: str


def _spec(value: object) -> object:
    if isinstance(value, torch.Tensor):
        lazy = "conj" * value.is_conj() + "neg" * value.is_neg()
        return TensorSpec(tuple(value.shape), tuple(value.stride()), value.dtype, value.device.type, lazy)
    return value


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v) for v in value)}]"
    return str(value)


def call_with(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[object],
) -> Call:
    """The call of ``target`` with these arguments, tensors (real or fake) among them, that returns ``outputs``."""
    specs = pytree.tree_map(_spec, (tuple(args), dict(kwargs)))
    produced = tuple(_spec(v) for v in outputs if isinstance(v, torch.Tensor))
    text = f"{target}({_text(specs[0])}, {_text(sorted(specs[1].items()))})"
    return Call(target, *specs, produced, text)  # type: ignore[arg-type]


def call_of(node: fx.Node) -> Call:
    """The call that ``node`` makes, by the fake values in ``meta["val"]`` of its inputs."""

    def value(n: fx.Node) -> Any:
        return n.meta["val"]

    produced = node.meta["val"]
    produced = produced if isinstance(produced, list | tuple) else (produced,)
    assert callable(node.target)
    return call_with(node.target, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value), produced)
