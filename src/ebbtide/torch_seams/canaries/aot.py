"""The canaries of ``aot``: what AOTAutograd is relied on for, by captures of a few ops."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx

from ebbtide.torch_seams import aot, autograd, dispatcher, dynamo, graphs
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__ = ["Split", "compiled", "settings"]

_aten = torch.ops.aten


class Split:
    """A partitioner in miniature: the forward saves its inputs and an empty tensor, the backward runs the joint graph.

    Attributes:
        joint: the last joint graph.
        outputs: the count of its forward outputs.
        saved: what the last backward was given, by shape.
    """

    joint: fx.GraphModule
    outputs: int
    saved: list[tuple[int, ...]]
    _sizes: list[Any]

    def partition(self, joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Stubs: nothing saved, one gradient per primal."""
        self.joint, self.outputs = joint, outputs
        forward, backward = fx.Graph(), fx.Graph()
        values: dict[fx.Node, Any] = {}
        primals = [n for n in joint.graph.find_nodes(op="placeholder") if not aot.is_tangent(n)]
        tangents = [n for n in joint.graph.find_nodes(op="placeholder") if aot.is_tangent(n)]
        (returned,) = joint.graph.find_nodes(op="output")[0].args
        for node in primals:
            values[node] = forward.node_copy(node, values.__getitem__)
        copied = next(iter(values.values()))
        forward.output(tuple(_stub(forward, copied, each) for each in returned[:outputs]))
        late = [backward.node_copy(node, values.__getitem__) for node in tangents]
        backward.output(tuple(each and _stub(backward, late[0], each) for each in returned[outputs:]))
        return fx.GraphModule(joint, forward), fx.GraphModule(joint, backward)

    def forward_callable(self, _: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Ignores the stub."""

        def run(args: list[Any]) -> tuple[Any, ...]:
            with torch.no_grad():
                tangents = [_zeros(n) for n in self.joint.graph.find_nodes(op="placeholder") if aot.is_tangent(n)]
                outputs = fx.Interpreter(self.joint).run(*args, *tangents, enable_io_processing=False)[: self.outputs]
            self._sizes = [each for each in args if not isinstance(each, Tensor)]
            saved = [each for each in args if isinstance(each, Tensor)]
            args.clear()
            return (*outputs, torch.empty((0, 7)), *saved)

        return aot.boxed(run)

    def backward_callable(self, _: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Ignores the stub."""

        def run(args: list[Any]) -> tuple[Any, ...]:
            ticket, *rest = args
            args.clear()
            self.saved = [tuple(ticket.shape), *(tuple(each.shape) for each in rest)]
            with torch.no_grad():
                return tuple(fx.Interpreter(self.joint).run(*self._sizes, *rest, enable_io_processing=False))[
                    self.outputs :
                ]

        return aot.boxed(run)


def _stub(graph: fx.Graph, source: Any, like: fx.Node) -> fx.Node:
    node = graph.call_function(_aten.clone.default, (source,))
    node.meta["val"] = like.meta["val"]
    return node


def _zeros(tangent: fx.Node) -> Tensor:
    """A gradient for ``tangent``, of one number where its sizes are symbols."""
    shape = tangent.meta["val"].shape
    return torch.zeros(shape if all(isinstance(size, int) for size in shape) else ())


def compiled(function: Callable[..., Any], split: Split, *, symbols: bool = False) -> Callable[..., Any]:
    """A step of ``function`` whose graphs ``split`` makes."""

    def no_inference(graph: fx.GraphModule) -> Any:
        raise RuntimeError("a step that takes gradients is compiled as one that does not")

    backend = aot.two_graph_backend(
        partition=split.partition,
        forward_callable=split.forward_callable,
        backward_callable=split.backward_callable,
        inference_callable=no_inference,
    )
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=None if symbols else False)


def settings() -> ExitStack:
    """Those under which steps are captured."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    stack.enter_context(aot.joint_graph_settings())
    stack.enter_context(dynamo.one_graph_settings())
    return stack


@canary
def joint_graphs_are_ours_to_split() -> None:
    """The partitioner gets forward and backward as one graph, with fake values, lines and modules; any two graphs run.

    The forward may save more than its stub says, an empty tensor among it, and the backward gets all of it; it returns
    one gradient per input. Messages are left out of the graph. ``retain_graph`` works.
    """
    split, layer = Split(), torch.nn.Linear(3, 3, bias=False)
    log = logging.getLogger("ebbtide.canary")

    def forward(x: Tensor) -> Tensor:
        warnings.warn("left out", stacklevel=1)
        log.warning("left out")
        return layer(x).sin().sum()

    with settings():
        step = compiled(forward, split)
        output = step(torch.ones(2, 3))
    weight = layer.weight
    torch.testing.assert_close(output, (torch.ones(2, 3) @ weight.t()).sin().sum())
    expected = torch.autograd.grad((torch.ones(2, 3) @ weight.t()).sin().sum(), weight)
    for again in (True, False):
        torch.testing.assert_close(torch.autograd.grad(output, weight, retain_graph=again), expected)
    expect(split.outputs == 1, f"one output is counted as {split.outputs}")
    expect(split.saved[0] == (0, 7) and len(split.saved) == 4, f"the backward was given {split.saved}")
    nodes = [n for n in split.joint.graph.nodes if n.op == "call_function"]
    expect(all("val" in n.meta for n in nodes), "a node has no fake value")
    first = next(n for n in nodes if n.target is _aten.mm.default)
    expect(__file__ in graphs.stack_trace_of(first), "a node does not tell its line")
    expect(graphs.module_stack_of(first), "a node does not tell its module")
    places = [n for n in split.joint.graph.nodes if n.op == "placeholder"]
    expect([aot.is_tangent(n) for n in places] == [False, False, True], f"placeholders are {places}")
    expect(autograd.is_function_node(output.grad_fn), "a step's node is no Function's")
    dynamo.forget_compiled(step)


@canary
def composites_are_traced_by_our_kernels() -> None:
    """A kernel put into ``py_kernels`` is what is traced for a composite op, and its own backward with it.

    An input that the step changes is written to, and the joint graph tells which it is.
    """
    split, weight, counter = Split(), torch.ones(3, requires_grad=True), torch.zeros(2)

    def make(otherwise: Callable[..., Any]) -> Callable[..., Any]:
        return lambda input, p, train: input.mul(p)

    with settings(), dispatcher.traced_as(_aten.dropout.default, make):
        step = compiled(lambda c: (torch.nn.functional.dropout(weight, 0.5).sum(), c.add_(1))[0], split)
        output = step(counter)
    targets = {n.target for n in split.joint.graph.nodes}
    expect(_aten.native_dropout.default not in targets, "a dropout is traced by torch's kernel")
    expect(output.item() == 1.5, f"the kernel gives {output.item()}")
    expect(counter.tolist() == [1, 1], "an input that the step changes is not written to")
    (mutated,) = aot.mutated_inputs(split.joint.graph, split.outputs).values()
    places = [n for n in split.joint.graph.find_nodes(op="placeholder") if aot.description_of(n) == mutated]
    expect([tuple(n.meta["val"].shape) for n in places] == [(2,)], f"the changed input is told as {places}")
    dynamo.forget_compiled(step)


@canary
def operators_are_traced_by_their_compiled_kernels() -> None:
    """With Python's kernels out of force an operator is one call in the joint graph, and so is its backward.

    Composite ones are taken apart as in eager; Dynamo leaves ``addcdiv`` and its kin whole.
    """
    split, weight = Split(), torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        y = torch.nn.functional.hardshrink(torch.nn.functional.interpolate(x * weight, scale_factor=2, mode="bilinear"))
        return torch.addcdiv(y, y, y + 3, value=0.5).addcdiv_(y, y + 3, value=0.5).sum()

    before = {op: dict(op.py_kernels) for op in (_aten.upsample_bilinear2d.vec, _aten.hardshrink.default)}
    with settings(), ExitStack() as stack:
        for op in (_aten.upsample_bilinear2d.vec, _aten.upsample_bilinear2d.default, _aten.hardshrink.default):
            stack.enter_context(dispatcher.traced_as_compiled(op))
        step = compiled(forward, split)
        step(torch.ones(1, 1, 4, 4))
    calls = [n.target for n in split.joint.graph.nodes]
    for target in (_aten.upsample_bilinear2d.vec, _aten.upsample_bilinear2d.default):
        expect(calls.count(target) == (target is not _aten.upsample_bilinear2d.vec), f"{target} is traced as {calls}")
    expect(_aten.upsample_bilinear2d_backward.default in calls, f"a backward is traced as {calls}")
    expect(_aten.hardshrink_backward.default in calls, f"a backward is traced as {calls}")
    expect(calls.count(_aten.addcdiv.default) == 2, f"addcdiv is traced as {calls}")
    expect(all(op.py_kernels == kernels for op, kernels in before.items()), "a kernel in Python was not put back")
    dynamo.forget_compiled(step)


@canary
def autocast_casts_a_leaf_once() -> None:
    """A float32 leaf that is used often in an autocast block is cast once in the joint graph; data at every use."""
    split, weight = Split(), torch.ones(2, 2, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ((x @ weight) @ weight + x @ weight).float().sum()

    with settings():
        step = compiled(forward, split)
        step(torch.ones(2, 2))
    casts = [n.args[0] for n in split.joint.graph.nodes if n.target is _aten._to_copy.default]
    counts = sorted(casts.count(n) for n in split.joint.graph.find_nodes(op="placeholder") if n in casts)
    expect(counts == [1, 2], f"a leaf and an input are cast {counts} times")
    dynamo.forget_compiled(step)


@canary
def gradients_arrive_as_they_lie() -> None:
    """A backward gets gradients of outputs in the layout that they have, and a graph can be traced for that layout."""
    split, weight = Split(), torch.ones(4, 6, requires_grad=True)
    arrived: list[tuple[int, ...]] = []
    graphs: list[aot.DynamoGraph] = []

    def backward_callable(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        run = split.backward_callable(graph)

        def noting(args: list[Any]) -> Any:
            arrived.append(args[-1].stride())
            args[-1] = args[-1].contiguous()  # as the graph that runs was traced
            return run(args)

        return aot.boxed(noting)

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(aot.DynamoGraph(graph))
        split_in_two = aot.two_graph_backend(
            partition=split.partition,
            forward_callable=split.forward_callable,
            backward_callable=backward_callable,
            inference_callable=split.forward_callable,
        )
        return split_in_two(graph, inputs)

    step = torch.compile(lambda x: (x * weight).reshape(2, 2, 6) * 2.0, backend=backend, fullgraph=True)
    laid_out = (12, 1, 2)
    with settings():
        step(torch.ones(4, 6)).transpose(1, 2).reshape(2, -1).square().sum().backward()
        joint, outputs = graphs[0].joint([lambda each: each.new_empty_strided(each.shape, laid_out)])
    expect(arrived == [laid_out], f"a gradient arrives with strides {arrived}")
    (tangent,) = (n for n in joint.graph.find_nodes(op="placeholder") if aot.is_tangent(n))
    expect(tangent.meta["val"].stride() == laid_out, f"a gradient is traced with {tangent.meta['val'].stride()}")
    calls = [n.target for n in joint.graph.nodes]
    expect(outputs == split.outputs, f"a graph that is traced again has {outputs} outputs")
    expect(_aten.clone.default in calls, f"a graph that is traced for a layout has {calls}")
    dynamo.forget_compiled(step)


@canary
def triton_ops_stay_whole() -> None:
    """An op of ``torch.library.triton_op`` is one call in the joint graph, and so is its backward."""

    def sine(x: Tensor) -> Tensor:
        return x.sin()

    whole: Any = torch.library.triton_op("ebbtide_canary::whole", mutates_args=())(sine)
    whole.register_autograd(lambda _, gradient: whole(gradient))
    split, weight = Split(), torch.ones(2, requires_grad=True)
    with settings():
        step = compiled(lambda x: whole(x * weight).sum(), split)
        step(torch.ones(2))
    calls = [n.target for n in split.joint.graph.nodes]
    expect(calls.count(torch.ops.ebbtide_canary.whole.default) == 2, f"a Triton op is traced as {calls}")
    dynamo.forget_compiled(step)
