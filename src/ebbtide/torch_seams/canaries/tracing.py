"""The canaries of ``tracing``, ``leaves``, ``reentrant`` and ``carried``: what becomes of user code in a capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ebbtide.torch_seams import carried, dynamo, fake_tensors, tracing
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


def _traced(function: Callable[..., Any], *args: Any) -> tuple[list[object], Any]:
    """What ``function`` calls in its one graph, and what that gives."""
    targets: list[object] = []

    def backend(graph: fx.GraphModule, _: object) -> Any:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    step = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    try:
        return targets, step(*args)
    finally:
        dynamo.forget_compiled(step)


def _refused(function: Callable[..., Any], *args: Any) -> str:
    """Why ``function`` is no graph."""
    try:
        _traced(function, *args)
    except dynamo.capture_error_type() as error:
        return str(error)
    raise RuntimeError(f"{function.__name__} was traced")


@canary
def numbers_of_python_are_not_drawn_in_traces() -> None:
    """A draw that Dynamo would repeat, of ``random`` or of a generator of its kind, ends the capture with our words."""
    own = random.Random(0)

    def of_the_module(x: Tensor) -> Tensor:
        return x * random.randint(1, 3)

    def of_a_generator(x: Tensor) -> Tensor:
        return x * own.random()

    state = random.getstate()
    with tracing.corrected_tracing():
        for function in (of_the_module, of_a_generator):
            expect(tracing.PYTHON_DRAWS in _refused(function, torch.ones(2)), f"{function.__name__} is told otherwise")
    expect(random.getstate() == state, "a number was drawn from the user's generator")


@canary
def gradients_of_results_may_be_asked_for() -> None:
    """``requires_grad_()`` on a result is traced; such a result itself is no output of a graph."""

    def inside(x: Tensor) -> Tensor:
        return (x * 2).requires_grad_() + 1

    def returned(x: Tensor) -> Tensor:
        return (x * 2).requires_grad_()

    with tracing.corrected_tracing():
        _, result = _traced(inside, torch.ones(2))
        _refused(returned, torch.ones(2))
    expect(result.tolist() == [3.0, 3.0], f"it gives {result}")


@canary
def comparisons_with_draws_are_decided() -> None:
    """A drawn number compared with one outside of its range makes no branch of a graph; one inside is refused."""

    def layerdrop(rate: float) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            return x if torch.rand([]) < rate else x * 2

        return forward

    with tracing.corrected_tracing():
        for rate, expected in ((0.0, 2.0), (1.0, 1.0)):
            _, result = _traced(layerdrop(rate), torch.ones(1))
            expect(result.tolist() == [expected], f"at a rate of {rate} it gives {result}")
        _refused(layerdrop(0.5), torch.ones(1))


@canary
def sequences_of_checkpoints_are_their_loop() -> None:
    """``checkpoint_sequential`` is traced into one graph, with the gradient of the plain sequence."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2))

    def forward(x: Tensor) -> Tensor:
        return checkpoint_sequential(layers, 2, x, use_reentrant=False).sum()

    x = torch.ones(1, 2, requires_grad=True)
    with tracing.corrected_tracing():
        _, result = _traced(forward, x)
    torch.testing.assert_close(torch.autograd.grad(result, x), torch.autograd.grad(layers(x).sum(), x))


@canary
def reentrant_checkpoints_over_data_cut_the_graph() -> None:
    """What such a checkpoint returns takes no gradient; what another one returns does."""
    layer = torch.nn.Linear(2, 2)
    for reentrant in (True, False):

        def forward(x: Tensor, reentrant: bool = reentrant) -> Tensor:
            return checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

        with tracing.corrected_tracing():
            _, result = _traced(forward, torch.ones(1, 2))
        expect(result.requires_grad is not reentrant, f"use_reentrant={reentrant} takes a gradient wrongly")


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x


@canary
def freed_graphs_below_what_a_model_keeps_are_cut_off() -> None:
    """A tensor whose graph is freed goes into the next step without it, and one whose graph lives goes with it."""
    x = torch.ones(2, requires_grad=True)
    kept = _Passing.apply(x).view(2)
    graph = fx.Graph()
    graph.placeholder("kept").meta["example_value"] = kept
    given = carried.cut_off_freed(lambda tensor: tensor, graph)
    expect(given(kept) is kept, "a graph that lives is cut off")
    kept.sum().backward()
    cut = given(kept)
    expect(cut is not kept and cut.requires_grad and cut.data_ptr() == kept.data_ptr(), "a freed graph stays")


@canary
def functions_of_torch_can_be_traced_otherwise() -> None:
    """Where a condition on its arguments holds, Python of ours is inlined for a function of torch's; else it stays."""

    def instead(value: Tensor) -> Tensor:
        return value + 40

    def of_rows(value: Tensor) -> bool:
        return value.dim() == 2

    with tracing.traced_by_dynamo_as(torch.nn.functional.relu, instead, when=of_rows):
        _, rows = _traced(torch.nn.functional.relu, torch.zeros(1, 1))
        _, line = _traced(torch.nn.functional.relu, torch.zeros(1))
    _, after = _traced(torch.nn.functional.relu, torch.zeros(1, 1))
    expect(rows.item() == 40 and line.item() == after.item() == 0, f"relu gives {rows}, {line} and {after}")


class _Own(Exception):
    def __init__(self, rows: int) -> None:
        super().__init__(f"{rows} rows")


@canary
def uncaught_exceptions_are_told() -> None:
    """What the traced code raises and nobody catches is told with its arguments; so is what a kernel refuses."""

    def of_python(x: Tensor) -> Tensor:
        raise ValueError("rows", x.shape[0])

    def of_the_user(x: Tensor) -> Tensor:
        raise _Own(x.shape[0])

    def of_a_key(x: Tensor) -> Tensor:
        return x * {"a": 1.0}["b"]

    def of_a_kernel(x: Tensor) -> Tensor:
        return x.gather(0, x)

    for function, expected in (
        (of_python, "ValueError('rows', 2)"),
        (of_the_user, "_Own('2 rows')"),
        (of_a_key, "KeyError('b')"),
        (of_a_kernel, "RuntimeError('gather(): Expected dtype"),
    ):
        try:
            with tracing.corrected_tracing(), fake_tensors.quiet_log():
                _traced(function, torch.ones(2))
        except dynamo.capture_error_type() as error:
            found = repr(dynamo.raised_by_the_model(error))
            expect(found.startswith(expected), f"{expected!r} is told as {found!r}")
        else:
            raise RuntimeError(f"{function.__name__} was traced")
