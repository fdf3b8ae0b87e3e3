"""Generated code calls functions of torch's where these are the captured operator, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.torch_seams.direct_calls import boxed_callable, eager_function

aten = torch.ops.aten


def _node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of ``target``; tensors among the arguments are placeholders."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"input_{len(graph.nodes)}")
        node.meta["val"] = value.to("meta")
        return node

    node = graph.call_function(target, tuple(map(placed, args)), kwargs)
    graph.output((node,))
    return node


def _module(node: fx.Node) -> fx.GraphModule:
    return fx.GraphModule(torch.nn.Module(), node.graph)


class _Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, repr((args, kwargs))))
        return func(*args, **(kwargs or {}))


SQUARE, OTHER, IMAGE = torch.arange(4.0).view(2, 2), torch.ones(2, 2), torch.ones(1, 1, 4, 4)
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = [
    (aten.mm.default, (SQUARE, OTHER), {}, torch.mm),
    (aten.t.default, (SQUARE,), {}, torch.t),
    (aten.add.Tensor, (SQUARE, OTHER), {"alpha": 2}, torch.add),
    (aten.sum.dim_IntList, (SQUARE, [0], True), {}, torch.sum),
    (aten.view.default, (SQUARE, [4]), {}, torch.Tensor.view),
    (aten.gelu.default, (SQUARE,), {"approximate": "tanh"}, torch._C._nn.gelu),
    (aten.pow.Tensor_Scalar, (SQUARE, 2), {}, torch.pow),
    # torch.mul of a number is another overload, of which the number is a tensor.
    (aten.mul.Scalar, (SQUARE, 2.0), {}, None),
    # A default device concerns the function, and not the operator, which was captured with its device.
    (aten.full.default, ([2], 1.0), {}, None),
    # Eager's function of that name takes other arguments.
    (aten.gelu_backward.default, (SQUARE, OTHER), {}, None),
    (aten.convolution.default, (IMAGE, IMAGE, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}, torch.convolution),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "function"), CALLS, ids=lambda each: str(each)[:20])
def test_a_function_is_the_operator_or_is_not_called(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any] | None
) -> None:
    node = _node(target, *args, **kwargs)
    assert eager_function(node) == function
    run = boxed_callable(_module(node))
    given = [each for each in args if isinstance(each, torch.Tensor)]
    with torch.no_grad():
        with _Dispatched() as direct:
            (result,) = run(list(given))
        with _Dispatched() as captured:
            wanted = target(*args, **kwargs)
    assert direct.seen == captured.seen
    assert torch.equal(result, wanted)
    assert result.stride() == wanted.stride()


def test_what_the_trace_has_no_value_of_is_called_as_it_was_captured() -> None:
    node = _node(aten.mm.default, SQUARE, OTHER)
    for each in node.all_input_nodes:
        del each.meta["val"]
    assert eager_function(node) is None
    assert torch.equal(boxed_callable(_module(node))([SQUARE, OTHER])[0], SQUARE @ OTHER)


@pytest.mark.parametrize("call", [(aten.rand.default, [4]), (aten.bernoulli.p, torch.ones(4), 0.5)])
def test_looking_for_a_function_draws_no_number(call: tuple[Any, ...]) -> None:
    node = _node(*call)
    for each in node.all_input_nodes:
        each.meta["val"] = torch.ones(4)  # as of a constant, which the trace has itself
    state = torch.get_rng_state()
    boxed_callable(_module(node))
    assert torch.equal(torch.get_rng_state(), state)


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.mm else result


def test_a_mode_that_was_traced_is_not_asked_again() -> None:
    run = boxed_callable(_module(_node(aten.mm.default, SQUARE, OTHER)))
    with _Doubling():
        assert not torch.equal(torch.mm(SQUARE, OTHER), SQUARE @ OTHER)
        (result,) = run([SQUARE, OTHER])
    assert torch.equal(result, SQUARE @ OTHER)


def test_an_operator_of_somebody_elses_may_open_a_mode() -> None:
    devices: list[torch.device] = []

    @torch.library.custom_op("direct_calls_test::made", mutates_args=())
    def made(value: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            devices.append(torch.empty(1).device)
        return value.clone()

    node = _node(torch.ops.direct_calls_test.made.default, SQUARE)
    boxed_callable(_module(node))([SQUARE])
    assert devices == [torch.device("meta")]
