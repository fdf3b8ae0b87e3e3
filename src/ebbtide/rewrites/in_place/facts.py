"""That an op gives the same bits when it writes over an operand: tried on normal numbers, once per kind of call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ebbtide.cost.call import Call, TensorSpec
from ebbtide.rewrites.facts import Fact, made_up, same_bits
from ebbtide.rewrites.in_place.forms import overwriting_form
from ebbtide.torch_seams import trees as pytree

__all__ = ["overwriting_fact"]

_ENOUGH_ELEMENTS = (2**20, 2**18, 2**16)
"""Elements of a result, for a fact on fewer rows: times what a thread takes at a time (2**15, GRAIN_SIZE of ATen), as
many as there is room for. In the step an op that writes over its operand takes half of what trying it whole does.
"""


def overwriting_fact(call: Call, operand: int) -> Fact:
    """About ``call``, whose tensor argument number ``operand`` is written over."""
    found: Fact | None = None
    for elements in reversed(_ENOUGH_ELEMENTS):
        if (few := _fewer_rows(call, elements)) is not None:
            found = _fact(few, operand, found)
    return _fact(call, operand, found)


def _fact(call: Call, operand: int, smaller: Fact | None) -> Fact:
    name = str(call.target).removeprefix("aten.").removesuffix(".default")
    return Fact(
        f"operand {operand} of {call.signature} written over",
        f"{name} over its operand {operand}",
        sum(_bytes(each) for each in _specs(call)) + 2 * _bytes(call.outputs[0]),
        lambda: _holds(call, operand),
        smaller,
        2 * _bytes(call.outputs[0]),
    )


def _specs(call: Call) -> list[TensorSpec]:
    return [each for each in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(each, TensorSpec)]


def _bytes(spec: TensorSpec) -> int:
    return spec.extent * spec.dtype.itemsize


def _fewer_rows(call: Call, elements: int) -> Call | None:
    """The call on its first rows alone, of a result of ``elements``, where its rows do not depend on each other.

    ``None`` where the whole result has no more.
    """
    (out,) = call.outputs
    rows = out.shape[0] if out.shape else 1
    wanted = -(-elements * rows // max(out.numel, 1))
    along_rows = "softmax" in str(call.target) and any(each in (0, -len(out.shape)) for each in call.args[1:3])
    if wanted >= rows or along_rows:
        return None

    def cut(value: object) -> object:
        if isinstance(value, TensorSpec) and len(value.shape) == len(out.shape) and value.shape[0] == rows:
            return replace(value, shape=(wanted, *value.shape[1:]))
        return value

    args, kwargs = pytree.tree_map(cut, (call.args, call.kwargs), is_leaf=lambda v: isinstance(v, TensorSpec))
    return Call(call.target, args, kwargs, (cut(out),), f"{wanted} rows of {call.signature}")  # type: ignore[arg-type]


def _holds(call: Call, operand: int) -> bool:
    form = overwriting_form(call.target)
    assert form is not None
    tensors = iter([made_up(spec, seed) for seed, spec in enumerate(_specs(call))])

    def fill(value: object) -> object:
        return next(tensors) if isinstance(value, TensorSpec) else value

    args: tuple[Any, ...]
    args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs), is_leaf=lambda v: isinstance(v, TensorSpec))
    whole = call.target(*args, **kwargs)
    over = [each for each in args if isinstance(each, Tensor)][operand]
    written = form[0](*args, **{**kwargs, form[1]: over})
    return written.data_ptr() == over.data_ptr() and written.stride() == whole.stride() and same_bits(written, whole)
