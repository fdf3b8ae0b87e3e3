"""Which calls of one model share a symbolic capture: those that differ in nothing but sizes of their tensors.

1. Calls of one *kind* have the same arguments, modes and threads but for the sizes of contiguous tensors.
2. The first :data:`OWN_CAPTURES` of a kind are captures of one shape, as long as first dimensions alone differ: whoever
   has one length and a shorter last batch pays for no symbolic one, which takes as long as two and a half, and repays
   that over two more (docs/adr/0010). Lengths come in many: the second is symbolic. A shape whose calls go several ways
   counts once for each (``torch_seams.input_branches``), and for each way beyond the first there is one less, but one
   at least.
3. The dimensions in which those differ become symbols. A later shape that differs in others, or in which one of
   them is 0 or 1 (which torch takes as numbers), has a capture of its own.
4. Calls that go another way than a symbolic capture have another, of :data:`MOST_SHARED` at the most.
5. A kind whose symbolic captures did not serve :data:`MOST_FAILURES` of its shapes gets none any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ebbtide.engine.compiled import Call, Capture
from ebbtide.engine.key import part_of, structure_of, with_sizes
from ebbtide.torch_seams.storages import has_layout
from ebbtide.torch_seams.trees import tree_flatten
from ebbtide.user_objects import is_a

__all__ = ["Kinds"]

OWN_CAPTURES = 2
MOST_FAILURES = 2
MOST_SHARED = 4

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class _Kind:
    seen: list[Shapes] = field(default_factory=list[Shapes])
    shared: list[Capture] = field(default_factory=list[Capture])
    changing: tuple[tuple[int, ...], ...] = ()
    failures: int = 0


class Kinds:
    """The kinds of calls of one fitted model."""

    def __init__(self) -> None:
        self._kinds: dict[object, _Kind] = {}

    def capture_for(
        self,
        rest: object,
        call: Call,
        capture: Callable[[str, tuple[tuple[int, ...], ...]], Capture],
        *,
        branches: int = 1,
        another_way: bool = False,
    ) -> Capture | None:
        """The symbolic capture for a call that was not captured yet; ``None`` if it is to have its own.

        Args:
            rest: what its step depends on besides its arguments.
            call: that is to be captured.
            capture: from a device and the dimensions that are symbols to a new capture.
            branches: that calls of the model have gone.
            another_way: whether its shape was captured, in another way through the model.
        """
        leaves, spec = tree_flatten((call.args, call.kwargs))
        tensors = [leaf for leaf in leaves if is_a(leaf, torch.Tensor)]
        if not all(has_layout(each) and each.is_contiguous() for each in tensors):
            return None
        kind = self._kinds.setdefault((rest, structure_of(spec), tuple(_part_of(leaf) for leaf in leaves)), _Kind())
        shapes = tuple(tuple(each.shape) for each in tensors)
        if kind.failures >= MOST_FAILURES:
            return None
        if not kind.shared:
            if another_way or shapes not in kind.seen:
                kind.seen.append(shapes)
            changing = _changing(kind.seen)
            own = OWN_CAPTURES if all(set(dimensions) <= {0} for dimensions in changing) else 1
            if len(kind.seen) <= max(own + 1 - branches, 1) or len(set(kind.seen)) < 2:
                return None
            kind.changing = changing
        if not _serves(kind, shapes):
            return None
        alike = next((each for each in kind.shared if each.other_answer(call) is None), None)
        if alike is None and len(kind.shared) < MOST_SHARED:
            alike = capture(tensors[0].device.type, kind.changing)
            kind.shared.append(alike)
        return alike

    def failed(self, shared: Capture) -> None:
        """``shared`` did not serve a call (definition 5)."""
        for kind in self._kinds.values():
            if shared in kind.shared:
                kind.failures += 1
                if kind.failures >= MOST_FAILURES:
                    kind.shared.clear()
                elif not shared.is_made:
                    kind.shared.remove(shared)


def _part_of(leaf: object) -> object:
    """The key of an argument but for the sizes of a tensor; those inside of other objects stay what they are."""
    return _without_sizes(leaf) if is_a(leaf, torch.Tensor) else part_of(leaf, with_sizes)


def _without_sizes(tensor: torch.Tensor) -> object:
    return (tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad)


def _changing(seen: Sequence[Shapes]) -> tuple[tuple[int, ...], ...]:
    """Per tensor, the dimensions in which the shapes differ."""
    return tuple(
        tuple(d for d in range(len(of_one[0])) if len({shape[d] for shape in of_one}) > 1)
        for of_one in zip(*seen, strict=True)
    )


def _serves(kind: _Kind, shapes: Shapes) -> bool:
    """Whether a shared capture serves these shapes (definition 3)."""
    first = kind.seen[0]
    return all(
        (size > 1) if d in dimensions else (size == known)
        for shape, was, dimensions in zip(shapes, first, kind.changing, strict=True)
        for d, (size, known) in enumerate(zip(shape, was, strict=True))
    )
