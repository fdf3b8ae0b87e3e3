"""A joint graph with symbolic sizes, written out at given ones: the graph that a capture at those sizes would give.

1. Every node that is a number becomes a constant; every other node is the same call on the same nodes.
2. Fake values are computed anew, node by node from the inputs, so that shapes, strides and storages are those of the
   given sizes and nothing of the symbolic ones is left.
3. Each has to be what its symbolic value says at these sizes: shape, strides and dtype. What torch chose while it
   traced the symbols is then what it would have chosen here. Strides that kernels give otherwise than torch describes
   (``layouts``) show here as well.
4. A call of torch's own is asked for its results once: where another layer makes it with arguments of the same form,
   its results have the same form. That is a tenth of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ebbtide.cost.call import extent_of
from ebbtide.errors import CaptureError
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.dispatcher import OpOverload, schema_of
from ebbtide.torch_seams.fake_tensors import FakeTensorMode, described
from ebbtide.torch_seams.graphs import expression_of, uncompiled_module
from ebbtide.torch_seams.known_branches import Condition
from ebbtide.torch_seams.storages import storage_key

if TYPE_CHECKING:
    import sympy

__all__ = ["NotAtTheseSizes", "at_sizes", "size_inputs"]


class NotAtTheseSizes(CaptureError):
    """The symbolic graph does not say what happens at these sizes; a capture of its own does."""


def size_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders that are numbers, in order."""
    return [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.SymInt)]


def at_sizes(joint: fx.GraphModule, sizes: Mapping[str, int], conditions: Iterable[Condition] = ()) -> fx.GraphModule:
    """``joint`` written out.

    Args:
        joint: from AOTAutograd, with symbolic sizes; left as it is.
        sizes: per placeholder that is a number, its value.
        conditions: of branches that were taken.

    Raises:
        NotAtTheseSizes: if a size follows from something else than ``sizes``, an op refuses them, or a branch would go
            the other way.
    """
    values = _values(joint.graph, sizes)
    if not all(each.holds(values) for each in conditions):
        raise NotAtTheseSizes("a branch of the model goes another way at these sizes")
    writer = _Writer(joint, values)
    for node in joint.graph.nodes:
        writer.write(node)
    writer.graph.lint()
    return uncompiled_module(joint, writer.graph)


def _values(graph: fx.Graph, sizes: Mapping[str, int]) -> dict[Any, sympy.Integer]:
    """Per symbol its value."""
    import sympy  # imported where used: it takes longer than the rest of Ebbtide

    found: dict[Any, sympy.Integer] = {}
    for node in size_inputs(graph):
        symbol: Any = expression_of(node.meta["val"])
        if not symbol.is_Symbol or found.setdefault(symbol, sympy.Integer(sizes[node.name])) != sizes[node.name]:
            raise NotAtTheseSizes(f"the size {node.name} of the captured step is {symbol}")
    return found


@dataclass(frozen=True)
class _Results:
    """What a call gave.

    Attributes:
        values: its results: one, or several in a list or a tuple.
        views: per result, which of the arguments' tensors it is a view of, if it is.
    """

    values: Any
    views: tuple[int | None, ...]

    @staticmethod
    def of(value: Any, tensors: list[torch.Tensor]) -> _Results | None:
        """Those of a call with these ``tensors`` among its arguments; ``None`` where their form does not say all."""
        given: dict[int, int] = {}
        for position, tensor in enumerate(tensors):
            given.setdefault(storage_key(tensor), position)
        made: set[int] = set()
        views: list[int | None] = []
        for each in pytree.tree_leaves(value):
            if each is None:
                views.append(None)
                continue
            if not isinstance(each, torch.Tensor) or each.is_conj() or each.is_neg():
                return None
            view, key = given.get(storage_key(each)), storage_key(each)
            reached = extent_of(each.shape, each.stride()) * each.dtype.itemsize
            if view is None and (key in made or each.storage_offset() or each.untyped_storage().nbytes() != reached):
                return None
            made.add(key)
            views.append(view)
        return _Results(value, tuple(views))

    def again(self, mode: FakeTensorMode, tensors: list[torch.Tensor]) -> Any:
        """The same of another call."""
        views = iter(self.views)

        def one(like: torch.Tensor | None) -> torch.Tensor | None:
            view = next(views)
            return None if like is None else described(mode, like, None if view is None else tensors[view])

        return pytree.tree_map(one, self.values)


class _Writer:
    def __init__(self, joint: fx.GraphModule, values: dict[Any, sympy.Integer]) -> None:
        self.graph = fx.Graph()
        self._joint = joint
        self._values = values
        self._mode = FakeTensorMode()
        self._written: dict[fx.Node, Any] = {}
        self._storages: dict[int, tuple[tuple[object, ...], torch.Tensor]] = {}
        self._results: dict[object, _Results] = {}
        self._sizes: dict[Any, int] = {}

    def write(self, node: fx.Node) -> None:
        match node.op:
            case "placeholder":
                self._copy(node, self._input(node.meta.get("val")))
            case "get_attr":
                constant = getattr(self._joint, str(node.target))
                fake = self._mode.from_tensor(constant) if isinstance(constant, torch.Tensor) else constant
                self._copy(node, fake)
                self._written[node].meta["val"] = fake
            case "output":
                self._copy(node, None)
            case "call_function":
                self._call(node)
            case _:
                raise NotAtTheseSizes(f"the captured step holds {node.op} {node.target}")

    def _copy(self, node: fx.Node, value: Any) -> None:
        copied = self.graph.node_copy(node, self._written.__getitem__)
        copied.meta = dict(node.meta)
        if "val" in node.meta:
            copied.meta["val"] = value
        self._written[node] = copied
        if isinstance(value, int):
            self._written[node] = value

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._number(value)
        key = storage_key(value)
        shape, stride = ([self._number(each) for each in of] for of in (value.shape, value.stride()))
        form = (tuple(shape), tuple(stride), value.storage_offset(), value.dtype)
        with self._mode:
            if key not in self._storages:
                made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
                self._storages[key] = form, made
                return made
            if self._storages[key][0] == form:  # one tensor, an input for each of its uses
                return self._storages[key][1].detach()
        raise NotAtTheseSizes("two inputs of the step share memory")

    def _call(self, node: fx.Node) -> None:
        if isinstance(node.meta.get("val"), int | torch.SymInt):
            self._written[node] = self._number(node.meta["val"])
            return
        if "val" not in node.meta or not callable(node.target):
            raise NotAtTheseSizes(f"the captured step holds {node.target}, whose value is not known")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._fake)
        try:
            value = self._value(node.target, args, kwargs)
        except Exception as error:
            if raised_by_a_handler(error):
                raise
            raise NotAtTheseSizes(f"{node.target} refuses these sizes: {error}") from error
        self._compare(node, value)
        self._copy(node, value)

    def _value(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``target`` gives for these (definition 4)."""
        tensors: list[torch.Tensor] = []
        key = (target, _form_of((args, kwargs), tensors)) if _is_told_by_forms(target) else None
        known = self._results.get(key)
        if known is not None:
            return known.again(self._mode, tensors)
        with self._mode, torch.no_grad():
            value = target(*args, **kwargs)
        if key is not None and (found := _Results.of(value, tensors)) is not None:
            self._results[key] = found
        return value

    def _compare(self, node: fx.Node, value: Any) -> None:
        """Hold a node's sizes against those of a call (definition 3)."""
        symbolic, here = pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves(value)
        described = [self._form(each) for each in symbolic]
        if described != [self._form(each) for each in here]:
            raise NotAtTheseSizes(f"{node.target} gives {value} at these sizes, {described} was traced")

    def _form(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._number(value)
        shape, stride = ([self._number(each) for each in of] for of in (value.shape, value.stride()))
        # The stride of a dimension of one element, or of no elements at all, says nothing.
        stride = [step for size, step in zip(shape, stride, strict=True) if size > 1] if 0 not in shape else []
        return (shape, stride, value.dtype, value.device.type)

    def _fake(self, node: fx.Node) -> Any:
        written = self._written[node]
        return written.meta["val"] if isinstance(written, fx.Node) else written

    def _number(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt):
            return value
        expression = expression_of(value)
        if expression not in self._sizes:
            exact: Any = expression.xreplace(self._values)
            if not exact.is_Integer:
                raise NotAtTheseSizes(f"a size of the captured step is {exact}")
            self._sizes[expression] = int(exact)
        return self._sizes[expression]


def _is_told_by_forms(target: object) -> bool:
    """Whether the form of a call's results follows from that of its arguments alone."""
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    return not schema_of(target).is_mutable


def _form_of(value: Any, tensors: list[torch.Tensor]) -> object:
    """The form of an argument: what may decide about a call's results but values; ``tensors`` gets those in it."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key = storage_key(value)
        first = next(i for i, each in enumerate(tensors) if storage_key(each) == key)
        lazy = value.is_conj() or value.is_neg()
        place = (value.storage_offset(), value.untyped_storage().nbytes(), first)
        return (value.shape, value.stride(), value.dtype, value.device, lazy, *place)
    if isinstance(value, list | tuple):
        return (type(value), *(_form_of(each, tensors) for each in value))
    if isinstance(value, dict):
        return (dict, *((name, _form_of(each, tensors)) for name, each in value.items()))
    return (type(value), repr(value))
