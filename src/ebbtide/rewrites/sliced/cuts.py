"""Where the values of a reference graph are cut when it runs on slices, so that no sum is taken apart.

Each value of a slice is *whole*, or it is *cut*: it is the elements of one slice of the axis, the same for all.

1. What is given is cut along a dimension as long as the axis; or spread over the dimensions that the axis stands for,
   each as long or 1 (``sliced.axes``).
2. The result of an op that makes each number of those in its place is cut as what it reads that the graph has made,
   which has its shape. What else it reads is cut there too, or the same for all slices.
3. That of a product is cut along a dimension along which the table says so of all that it reads.
4. A view that keeps the order of elements and all dimensions of the rank but the first is cut as what it is a view of;
   one that swaps the last two dimensions, along the other one of these.
5. Results are put together along their cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ebbtide.capture.claims import RewriteError
from ebbtide.rewrites.sliced.axes import (
    SPREAD,
    Axis,
    Cut,
    can_be_cut,
    is_elementwise,
    is_product,
    operand_cut,
    swapped_cut,
)
from ebbtide.rewrites.views import swaps
from ebbtide.torch_seams.graphs import arguments_of

__all__ = ["cuts_of"]


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise RewriteError(f"a graph cannot run in slices: {why}")


def cuts_of(graph: fx.Graph, axis: Axis, inputs: Sequence[Cut]) -> dict[fx.Node, Cut]:
    """The cuts of the nodes of a reference graph, whose inputs have these.

    Raises:
        RewriteError: if there are none.
    """
    given = graph.find_nodes(op="placeholder")
    _require(len(given) == len(inputs), "it has other inputs")
    cuts: dict[fx.Node, Cut] = dict(zip(given, inputs, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            cuts[node] = _cut_of(node, axis, cuts)
    for each in arguments_of(graph.output_node())[0]:
        value, cut = each.meta["val"], cuts[each]
        whole = each.op == "call_function" and value.dim() == axis.rank and value.is_contiguous()
        _require(whole and isinstance(cut, int) and value.shape[cut] == axis.length, f"{each} is laid out otherwise")
    return cuts


def _cut_of(node: fx.Node, axis: Axis, cuts: dict[fx.Node, Cut]) -> int:
    if is_product(node):
        return _product_cut(node, axis, cuts)
    if (swapped := swaps(node, axis.rank)) is None:
        return _cut_in_place(node, axis, cuts)
    (source,) = node.all_input_nodes
    cut = cuts[source]
    _require(source.op == "call_function" and isinstance(cut, int), f"{node} is a view of what is given")
    assert isinstance(cut, int)
    return swapped_cut(cut, axis.rank) if swapped else cut


def _product_cut(node: fx.Node, axis: Axis, cuts: dict[fx.Node, Cut]) -> int:
    """Along which dimension the result of a product is cut (definition 3)."""
    operands = {position: each for position, each in enumerate(arguments_of(node)) if isinstance(each, fx.Node)}
    value = node.meta["val"]
    for cut in range(value.dim()):
        if all(cuts[each] == operand_cut(node, position, cut, axis.rank) for position, each in operands.items()):
            for each in operands.values():
                _require_long(each, axis, cuts)
            _require(value.shape[cut] == axis.length, f"{node} has another length")
            return cut
    raise RewriteError(f"{node} would sum over slices, or reads slices of different axes")


def _cut_in_place(node: fx.Node, axis: Axis, cuts: dict[fx.Node, Cut]) -> int:
    """Along which dimension the result of what keeps places is cut (definition 2)."""
    rank, value = axis.rank, node.meta["val"]
    own = [each for each in node.all_input_nodes if each.op == "call_function"]
    cut = cuts[own[0]] if own else None
    _require(isinstance(cut, int), f"{node} reads nothing of the slice")
    assert isinstance(cut, int)
    _require(can_be_cut(node, cut, rank), f"{node} mixes what is cut")
    _require(value.is_contiguous(), f"{node} is laid out otherwise")
    for position, each in enumerate(arguments_of(node)):
        if each in own:
            theirs = each.meta["val"]
            alike = theirs.shape[1 - rank :] == value.shape[1 - rank :] and theirs.numel() == value.numel()
            alike = alike and theirs.is_contiguous() and cuts[each] == cut
            _require(alike, f"{node} reads what has another layout, or slices of different axes")
        elif isinstance(each, fx.Node):
            alike = is_elementwise(node) and cuts[each] == operand_cut(node, position, cut, rank)
            _require(alike, f"{node} reads other slices")
            _require_long(each, axis, cuts)
            _require_apart(each, node, axis, cuts)
    return cut


def _require_long(node: fx.Node, axis: Axis, cuts: dict[fx.Node, Cut]) -> None:
    """That what is given is as long as the axis where it is cut along one dimension (definition 1)."""
    cut = cuts[node]
    if node.op == "placeholder" and isinstance(cut, int):
        _require(node.meta["val"].shape[cut] == axis.length, f"{node} is cut along another axis than the rest")


def _require_apart(given: fx.Node, node: fx.Node, axis: Axis, cuts: dict[fx.Node, Cut]) -> None:
    """That slices of what is given are those of what ``node`` makes of it (definition 1)."""
    value, shape, kept = node.meta["val"], given.meta["val"].shape, axis.rank - 1
    leading = value.shape[:-kept]
    if cuts[given] == SPREAD:
        pairs = zip(reversed(shape[:-kept]), reversed(leading), strict=False)
        alike = tuple(leading) == axis.leading and all(mine in (1, length) for mine, length in pairs)
        _require(alike and axis.dim == 0, f"{given} is spread over other dimensions")
    else:
        own = shape[: max(len(shape) - kept, 0)]
        _require(value.dim() == axis.rank or all(each == 1 for each in own), f"{given} is other numbers for each slice")
