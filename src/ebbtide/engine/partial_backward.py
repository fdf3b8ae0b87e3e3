"""Backwards that some of a step's gradients are asked of: ``torch.autograd.grad(loss, last_layer, retain_graph=True)``.

Autograd knows which of the nodes behind a step's it will come to. Where that is not all of them, as for the adaptive
weights of VQGAN, ops that only the others' gradients need are left out of the generated backward. What is left runs in
the same order, so that it takes no more than the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.lower.lowering import lower
from ebbtide.step.schedule import Schedule
from ebbtide.torch_seams.autograd import will_run
from ebbtide.torch_seams.direct_calls import boxed_callable

__all__ = ["PartialBackwards"]


@dataclass(frozen=True, eq=False)
class PartialBackwards:
    """The backwards of one step's code for some of its gradients.

    Attributes:
        captured: the step.
        schedule: of the code, without moves.
        tensors: positions of the primals that go in as tensors.
    """

    captured: Captured
    schedule: Schedule
    tensors: Sequence[int]
    _known: dict[frozenset[int], Callable[[list[Any]], Any]] = field(default_factory=dict, repr=False)

    def of(self, node: Any) -> Callable[[list[Any]], Any] | None:
        """The backward for what is asked of the autograd node of a step, which runs; ``None`` for the whole."""
        if len(node.next_functions) != len(self.tensors):
            return None  # not the graph that is known
        behind = zip(self.tensors, node.next_functions, strict=True)
        left_out = frozenset(i for i, (below, _) in behind if below is not None and not will_run(below))
        if not left_out:
            return None
        if left_out not in self._known:
            self._known[left_out] = _without(lower(self.captured, self.schedule).backward, left_out)
        return self._known[left_out]


def _without(backward: fx.GraphModule, left_out: frozenset[int]) -> Callable[[list[Any]], Any]:
    """``backward`` with ``None`` at these places, and without what nothing else needs."""
    output = backward.graph.output_node()
    gradients: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    output.args = (tuple(None if i in left_out else each for i, each in enumerate(gradients)),)
    backward.graph.eliminate_dead_code()
    return boxed_callable(backward)
