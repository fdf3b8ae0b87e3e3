"""Where ops are tried out: in what is free of the budget, on memory that is resident anyway where that is little.

1. The *profiling budget* of a thread is what its first call may take besides what is resident. Outside of a fitted
   model's call there is no limit. Of a budget that is a share it is not known before the capture: all borrow what they
   can then.
2. An op that takes a small part of that gets inputs of its own. Another one *borrows*: its inputs, the largest
   first, lie in the memory of resident tensors of the same type, which a kernel only reads. With as many borrowed as
   can be, what it takes besides is no more than it takes in the step itself, so a budget under which there is any
   plan is kept; where there is none, the refusal has to name what the op takes, so it is tried out all the same.
   Where another program may have a plan (*strict*), it is not tried out, unless the budget was refused: what a
   refusal names has to hold when it is asked for, so ops are tried out in what the named budget leaves (*refused*).
3. Integers may be indices, for which only zeros are safe, and a custom op may write to what it says that it reads:
   neither borrows. Where there is no room for what does not borrow, it lies in files on a CPU (``cost.mapped``);
   elsewhere the op is not tried out (:class:`NotProfiled`).
4. What is made up is the same for all tensors of one shape and type, so what an op of a rewrite guesses is right where
   it is tried out, as it is in nearly every step. Hence single numbers never borrow: what they would find differs, and
   they take next to nothing. Nor does what an op says to write over, or to want small (``step.op_traits``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ebbtide.cost.call import Call, TensorSpec
from ebbtide.cost.mapped import mapped
from ebbtide.step.op_traits import NAMESPACE, traits_of_op
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.dispatcher import OpOverload, schema_of

__all__ = ["NotProfiled", "ProfilingBudget", "arguments_for", "free_bytes", "may_take", "profiling_within"]

SMALL_PART = 16
"""Of the profiling budget, what inputs and outputs may take by definition 2; workspace is not known before a run."""
_SINGLE_BYTES = 512
"""What counts as single numbers for definition 4: the least that a card's allocator takes for anything."""
_DRAWN = 65_521
"""Numbers of an input that are drawn: a prime, so that rows are not all the same."""
_PIVOTS = ("pivots", "LU_pivots")
"""What schemas call the rows that a factorisation has swapped, counted from one: ones permute nothing."""
_TRUSTED = ("aten", "prims", "mkldnn", "quantized", "ebbtide_cuda", NAMESPACE)
"""Namespaces whose schemas, and what is declared besides, are right about what is written to."""


class NotProfiled(Exception):
    """An op cannot be tried out within the profiling budget (definition 3)."""


@dataclass(frozen=True)
class ProfilingBudget:
    """What finding out about ops may take (definition 1).

    Attributes:
        free_bytes: of the budget, 0 where nothing is; ``None`` if it is not known yet.
        lenders: tensors that are resident.
        strict: by definition 2.
        refused_bytes: of the budget that a refusal names, by definition 2; 0 where none was refused.
        untried: what each op takes that it had no room for, bytes.
        unknown_facts: what each fact about ops takes to find out that it had no room for (:func:`may_take`).
    """

    free_bytes: float | None = float("inf")
    lenders: Sequence[torch.Tensor] = field(default=(), repr=False)
    strict: bool = False
    refused_bytes: float = 0
    untried: list[float] = field(default_factory=list[float], repr=False, compare=False)
    unknown_facts: list[float] = field(default_factory=list[float], repr=False, compare=False)

    @property
    def knows_all(self) -> bool:
        """Whether there was room for all that it was used for."""
        return not self.untried and not self.unknown_facts

    def holds(self, needs_bytes: float) -> bool:
        """Whether an op that takes so much may be tried out, for all that is known."""
        return self.free_bytes is None or needs_bytes <= max(self.free_bytes, self.refused_bytes)


class _Current(threading.local):
    budget = ProfilingBudget()


_current = _Current()


@contextmanager
def profiling_within(budget: ProfilingBudget) -> Iterator[ProfilingBudget]:
    """While open, this thread tries ops out in ``budget``, which it gives."""
    before, _current.budget = _current.budget, budget
    try:
        yield budget
    finally:
        _current.budget = before


def arguments_for(call: Call) -> tuple[Sequence[Any], dict[str, Any]]:
    """Synthetic arguments of ``call``: floats are uniform or somebody's, integers zero, booleans true, pivots one.

    Raises:
        NotProfiled: by definition 3.
    """
    budget = _current.budget
    specs = [each for each in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(each, TensorSpec)]
    needs = sum(map(_bytes, (*specs, *call.outputs)))
    borrowed: dict[int, torch.Tensor] = {}
    in_files = set[int]()
    if budget.free_bytes is None or needs > budget.free_bytes / SMALL_PART:
        lent = _arguments_that_borrow(call)
        able = [position for position, spec in enumerate(specs) if position in lent and _may_borrow(spec)]
        borrowed = _borrowed(specs, able, budget.lenders)
        needs -= sum(_bytes(specs[position]) for position in borrowed)
        unable = sum(_bytes(spec) for position, spec in enumerate(specs) if position not in able)
        if not budget.holds(needs):
            in_files = {p for p, spec in enumerate(specs) if spec.device == "cpu" and p not in borrowed}
            needs, unable = needs - sum(_bytes(specs[p]) for p in in_files), 0 if in_files else unable
        if not budget.holds(needs) and (budget.strict or budget.holds(needs - unable)):
            budget.untried.append(needs)
            raise NotProfiled(f"{call.signature} takes {needs} bytes, {budget.free_bytes} are free")
    try:
        made = iter([_tensor(spec, borrowed.get(p), p in in_files) for p, spec in enumerate(specs)])
    except OSError as error:
        budget.untried.append(needs)
        raise NotProfiled(f"{call.signature}: no file for its operands ({error})") from error

    def fill(value: object) -> object:
        return next(made) if isinstance(value, TensorSpec) else value

    args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs), is_leaf=lambda v: isinstance(v, TensorSpec))
    if isinstance(call.target, OpOverload):
        for argument, value in zip(schema_of(call.target).arguments, args, strict=False):
            if argument.name in _PIVOTS:
                value.fill_(1)
            elif argument.name in traits_of_op(str(call.target)).small:
                value.mul_(1 / max(value.shape[-1], 1))
    return args, kwargs


def _bytes(spec: TensorSpec) -> int:
    return spec.extent * spec.dtype.itemsize


def _arguments_that_borrow(call: Call) -> set[int]:
    """Positions among the tensors of ``call`` (definition 3)."""
    target = call.target
    if getattr(target, "borrows", False):
        return set(range(len(call.args)))
    if not isinstance(target, OpOverload) or target.namespace not in _TRUSTED or schema_of(target).is_mutable:
        return set()
    names = [each.name for each in schema_of(target).arguments]
    traits = traits_of_op(str(target))
    found: set[int] = set()
    position = 0
    for index, value in enumerate((*call.args, call.kwargs)):
        for each in pytree.tree_leaves(value):
            if isinstance(each, TensorSpec):
                name = names[index] if index < len(names) else ""
                if name not in traits.writes | traits.small:
                    found.add(position)
                position += 1
    return found


def _may_borrow(spec: TensorSpec) -> bool:
    """Whether an input may lie in a lender's memory (definitions 3 and 4)."""
    return (spec.dtype.is_floating_point or spec.dtype.is_complex) and _bytes(spec) > _SINGLE_BYTES


def _borrowed(
    specs: Sequence[TensorSpec], able: Sequence[int], lenders: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    """By position, the tensor in whose memory an input lies; each lends once as long as there are others."""
    sizes = [(each.untyped_storage().nbytes(), index, each) for index, each in enumerate(lenders)]
    unused = sorted(sizes, key=lambda each: each[:2])
    used: list[tuple[int, int, torch.Tensor]] = []
    found: dict[int, torch.Tensor] = {}
    for position in sorted(able, key=lambda each: -_bytes(specs[each])):
        spec = specs[position]
        fitting = (each for each in (*unused, *used) if each[0] >= _bytes(spec) and _lends(each[2], spec))
        if (lender := next(fitting, None)) is None:
            continue
        found[position] = lender[2]
        if lender in unused:
            unused.remove(lender)
            used.append(lender)
    return found


def _lends(lender: torch.Tensor, spec: TensorSpec) -> bool:
    return (lender.dtype, lender.device.type, lender.layout) == (spec.dtype, spec.device, torch.strided)


def _tensor(spec: TensorSpec, lender: torch.Tensor | None, in_file: bool) -> torch.Tensor:
    if lender is not None:
        tensor = torch.empty(0, dtype=spec.dtype, device=lender.device)
        tensor = tensor.set_(lender.untyped_storage(), 0, spec.shape, spec.stride)
    else:
        vector = mapped if in_file else functools.partial(torch.empty, device=spec.device)
        tensor = _filled(vector(spec.extent, dtype=spec.dtype)).as_strided(spec.shape, spec.stride)
    if "conj" in spec.lazy:
        tensor = tensor.conj()
    return torch.ops.aten._neg_view.default(tensor) if "neg" in spec.lazy else tensor


def _filled(vector: torch.Tensor) -> torch.Tensor:
    """``vector`` with numbers in it: :data:`_DRAWN` of them again and again, since copies take a tenth of draws."""
    _draw(vector[:_DRAWN])
    done = _DRAWN
    while done < vector.numel():
        vector[done : 2 * done].copy_(vector[: min(done, vector.numel() - done)])
        done *= 2
    return vector


def _draw(vector: torch.Tensor) -> torch.Tensor:
    drawing = torch.Generator(vector.device)  # of our own, which starts as every one does: other threads draw meanwhile
    if vector.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return vector.uniform_(generator=drawing)
    if vector.dtype in (torch.complex64, torch.complex128):
        torch.view_as_real(vector).uniform_(generator=drawing)
        return vector
    if vector.dtype.is_floating_point or vector.dtype.is_complex:
        return vector.copy_(torch.rand(vector.numel(), device=vector.device, generator=drawing))
    return vector.fill_(vector.dtype is torch.bool)


def may_take(needs_bytes: float, *, matters: bool = True) -> bool:
    """Whether this thread may take so much to find something out; if not, and it ``matters``, it is noted."""
    budget = _current.budget
    found = budget.holds(needs_bytes)
    if not found and matters:
        budget.unknown_facts.append(needs_bytes)
    return found


def free_bytes() -> float:
    """What this thread may take, in bytes; infinity where there is no limit, or none is known yet."""
    free = _current.budget.free_bytes
    return float("inf") if free is None else free
