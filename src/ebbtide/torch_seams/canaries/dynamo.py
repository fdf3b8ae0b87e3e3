"""The canaries of ``dynamo`` and ``numpy_numbers``: what is traced into one graph, and that it can be forgotten."""

from __future__ import annotations

import logging
import operator
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ebbtide.torch_seams import dispatcher, dynamo, graphs, leaves
from ebbtide.torch_seams.canaries.aot import Split, compiled, settings
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def marked_sizes_become_symbols() -> None:
    """A marked size is an input of the joint graph that knows its symbol and its value; the marks can be taken off."""
    split, weight, data = Split(), torch.ones(3, requires_grad=True), torch.ones(5, 3)
    with settings(), dynamo.sizes_as_symbols([data], [[0]]):
        step = compiled(lambda x: (x * weight).sum(), split, symbols=True)
        output = step(data)
    sizes = [n.meta["val"] for n in split.joint.graph.find_nodes(op="placeholder")]
    sizes = [value for value in sizes if isinstance(value, torch.SymInt)]
    expect(len(sizes) == 1, f"{len(sizes)} sizes are symbols")
    expect(graphs.hint_of(sizes[0]) == 5, "a symbol has another value")
    expect(getattr(graphs.expression_of(sizes[0]), "is_Symbol", False), "a size is no symbol")
    expect(set(vars(data)) == set(), f"marks stay on a tensor: {list(vars(data))}")
    torch.testing.assert_close(torch.autograd.grad(output, weight)[0], torch.full((3,), 5.0))
    dynamo.forget_compiled(step)


@canary
def dynamo_says_what_is_wrong() -> None:
    """Breaks, and what a backend raises, are errors of one type; the latter is inside. Autocast is told by its call."""
    seen: list[object] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        seen.extend(dispatcher.enters_autocast(node) for node in graph.graph.nodes)
        raise LookupError("a backend's own")

    def narrow(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    for function, inner in ((narrow, LookupError), (broken, None)):
        step = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        try:
            step(torch.ones(2, 2))
        except dynamo.capture_error_type() as error:
            found: BaseException | None = error
            while found is not None and inner is not None and not isinstance(found, inner):
                found = dynamo.inner_exception(found) or found.__cause__
            expect(found is not None, f"{inner} is not inside of {error!r}")
        else:
            raise RuntimeError(f"{function.__name__} was compiled")
        dynamo.forget_compiled(step)
    expect("cpu" in seen, f"autocast was not seen among {seen}")


@canary
def numpy_is_known_in_a_graph() -> None:
    """What Dynamo takes in NumPy's place is told by its name: functions, methods, operators, attributes."""
    seen: list[str | None] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        seen.extend(dynamo.numpy_call(node) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def step(x: Tensor) -> Tensor:
        values = x.numpy()
        return torch.from_numpy(np.exp(values) - values.mean(axis=0) + values.T)

    compiled_step = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    compiled_step(torch.ones(2, 2))
    found = {each for each in seen if each is not None}
    expect({"exp", "mean", "sub", "T"} <= found, f"NumPy's calls are {sorted(found)}")
    dynamo.forget_compiled(compiled_step)


@canary
def compiled_code_can_be_forgotten() -> None:
    """After ``forget_compiled`` nothing of a capture is left: the next call captures again."""
    from torch._dynamo.eval_frame import cached_backends

    captures: list[int] = []
    kept = len(cached_backends), len(weakref.finalize._registry)  # type: ignore[attr-defined]

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        captures.append(1)
        return graph.forward

    step = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True, dynamic=False)
    for _ in range(2):
        step(torch.ones(2))
    expect(len(captures) == 1, f"two equal calls are captured {len(captures)} times")
    dynamo.forget_compiled(step)
    step(torch.ones(2))
    expect(len(captures) == 2, "a forgotten function is not captured again")
    dynamo.forget_compiled(step, backend)
    left = len(cached_backends), len(weakref.finalize._registry)  # type: ignore[attr-defined]
    more = any(now > before for now, before in zip(left, kept, strict=True))  # others' finalizers may run meanwhile
    expect(not more, f"backends and finalizers are left of a forgotten function: {left} after {kept}")


@canary
def recurrent_modules_are_one_call() -> None:
    """Dynamo writes a recurrent module as one call of ``torch.lstm`` if it is let, and its states have their shapes."""
    seen: list[object] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    module, weight = torch.nn.LSTM(2, 3, bidirectional=True), torch.ones(4, 5, 2, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        states = module(x * weight)[1]
        rows, columns = states[0].shape[1:]
        return torch.cat(states, -1) + torch.zeros(rows, 2 * columns)

    with settings():
        step = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
        result = step(torch.ones(4, 5, 2))
    expect(torch.lstm in seen, f"an LSTM is {seen}")
    expect(result.shape == (2, 5, 6), f"states are {tuple(result.shape)}")
    dynamo.forget_compiled(step)


@canary
def names_are_texts_and_assignments_calls() -> None:
    """Names of torch's classes have the methods of texts; ``requires_grad`` is assigned where that changes nothing."""
    from torch._dynamo.variables import builtin

    weight = torch.nn.Parameter(torch.ones(2))

    def forward(x: Tensor) -> Tensor:
        return x * weight if type(weight).__module__.startswith("torch.") else x

    def assigned(x: Tensor) -> Tensor:
        made = torch.eye(2)
        made.requires_grad = False
        return x @ made

    for function in (forward, assigned) if hasattr(builtin, "SetAttrBuiltinVariable") else (forward,):
        with settings(), leaves.leaves_traced():
            step = torch.compile(function, backend=lambda graph, _: graph.forward, fullgraph=True, dynamic=False)
            expect(bool(step(torch.ones(2)).eq(1).all()), f"{function.__name__} is another value")
        dynamo.forget_compiled(step)


@canary
def captures_log_no_error() -> None:
    """A capture that succeeds writes no error to torch's log, that of its metrics among it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo")
    log.addHandler(handler)
    try:
        with settings():
            step = torch.compile(lambda x: x + 1, backend=lambda graph, _: graph.forward, fullgraph=True, dynamic=False)
            step(torch.ones(2))
    finally:
        log.removeHandler(handler)
    expect(not records, f"it logs {[each.getMessage() for each in records]}")
    dynamo.forget_compiled(step)


@canary
def data_dependent_guards_have_a_type() -> None:
    """Asking a size that only data could tell raises the type that is told apart from the user's own errors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        found = torch.empty(3).nonzero()
        try:
            bool(found.shape[0] == 2)
        except graphs.data_dependent_guard_type():
            return
    raise RuntimeError("a size that depends on data was told")


@canary
def numbers_of_numpy_are_constants() -> None:
    """A number of NumPy's has its own type to the code, a guard of its value, and is Python's to an op."""
    seen: list[object] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        seen.extend(node.args[1] for node in graph.graph.find_nodes(op="call_function", target=operator.mul))
        return graph

    def scaled(x: Tensor, by: Any) -> Any:
        assert by.dtype == np.float32
        return x * (by * 2), torch.tensor(np.sqrt(2)), np.sqrt(by)

    with dynamo.one_graph_settings():
        step = torch.compile(scaled, backend=backend, fullgraph=True, dynamic=False)
        for number in (0.5, 0.25, 0.5):
            found, made, root = step(torch.ones(()), np.float32(number))
            expect(found.dtype == torch.float32, f"it computes in {found.dtype}")
            expect(made.dtype == torch.float64, f"it makes a tensor of {made.dtype}")
            expect(type(root) is np.float32, f"a root is a {type(root)}")
    expect(seen == [1.0, 0.5], f"captured for {seen}")
    dynamo.forget_compiled(step)
