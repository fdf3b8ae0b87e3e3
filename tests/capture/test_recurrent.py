"""Unrolled recurrent calls are the calls that they replace, bit for bit where eager runs ATen's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from ebbtide.capture.rules.recurrent import packed_sequence_refusal, unroll_recurrent

# torch.backends.mkldnn.flags says so on any CPU build.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")

STEPS, BATCH, FEATURES, WIDTH = 5, 3, 6, 10

KINDS: dict[str, tuple[Callable[..., Any], Callable[..., nn.RNNBase]]] = {
    "lstm": (torch.lstm, nn.LSTM),
    "gru": (torch.gru, nn.GRU),
    "tanh": (torch.rnn_tanh, nn.RNN),
    "relu": (torch.rnn_relu, lambda *args, **kwargs: nn.RNN(*args, **kwargs, nonlinearity="relu")),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "no bias": {"num_layers": 2, "bias": False},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "batch first": {"num_layers": 2, "batch_first": True},
    "dropout": {"num_layers": 3, "dropout": 0.3},
    "all but bias": {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5, "bias": False},
}


@dataclass
class Call:
    """A recurrent function with its arguments, as the module passes them."""

    function: Callable[..., Any]
    module: nn.RNNBase
    inputs: torch.Tensor
    states: tuple[torch.Tensor, ...]
    train: bool = True

    @property
    def arguments(self) -> tuple[Any, ...]:
        m = self.module
        hx = self.states if self.function is torch.lstm else self.states[0]
        modes = (m.bias, m.num_layers, m.dropout, self.train, m.bidirectional, m.batch_first)
        return (self.inputs, hx, list(m.parameters()), *modes)

    def run(self, function: Callable[..., Any]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Outputs, and gradients of inputs, states and parameters; the random state is the last output."""
        torch.manual_seed(3)
        outputs = function(*self.arguments)
        loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outputs)
        gradients = torch.autograd.grad(loss, [self.inputs, *self.states, *self.module.parameters()])  # type: ignore[arg-type]
        return (*outputs, torch.get_rng_state()), gradients


def call_of(kind: str, *, dtype: torch.dtype = torch.float32, train: bool = True, **options: Any) -> Call:
    function, module = KINDS[kind]
    built = module(FEATURES, WIDTH, **options, dtype=dtype)
    shape = (BATCH, STEPS) if built.batch_first else (STEPS, BATCH)
    count = built.num_layers * (1 + built.bidirectional)
    widths = (built.proj_size or WIDTH, WIDTH) if kind == "lstm" else (WIDTH,)
    states = tuple(torch.randn(count, BATCH, width, dtype=dtype, requires_grad=True) for width in widths)
    return Call(function, built, torch.randn(*shape, FEATURES, dtype=dtype, requires_grad=True), states, train)


def unrolled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as a graph of one call, the way that Dynamo writes it, after :func:`unroll_recurrent`."""

    def run(*arguments: Any) -> Any:
        graph = fx.Graph()
        leaves, spec = pytree.tree_flatten(arguments)
        nodes = [graph.placeholder(f"x{i}") if isinstance(x, torch.Tensor) else x for i, x in enumerate(leaves)]
        graph.output(graph.call_function(function, tuple(pytree.tree_unflatten(nodes, spec))))
        module = fx.GraphModule({}, graph)
        unroll_recurrent(module)
        assert not list(graph.find_nodes(op="call_function", target=function))
        return module(*(x for x in leaves if isinstance(x, torch.Tensor)))

    return run


def assert_bit_equal(call: Call) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        expected, expected_gradients = call.run(call.function)
        outputs, gradients = call.run(unrolled(call.function))
    assert [o.stride() for o in outputs] == [o.stride() for o in expected]
    for ours, theirs in zip((*outputs, *gradients), (*expected, *expected_gradients), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_random_state_are_eagers(kind: str, variant: str, dtype: torch.dtype) -> None:
    assert_bit_equal(call_of(kind, dtype=dtype, **VARIANTS[variant]))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}])
def test_projection(options: dict[str, Any]) -> None:
    assert_bit_equal(call_of("lstm", proj_size=4, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_no_dropout_outside_training(kind: str) -> None:
    assert_bit_equal(call_of(kind, train=False, num_layers=2, dropout=0.5))


@pytest.mark.parametrize("batch_first", [False, True])
def test_one_dnn_draws_the_same_dropout_and_rounds_otherwise(batch_first: bool) -> None:
    call = call_of("lstm", num_layers=3, dropout=0.5, bidirectional=True, batch_first=batch_first)
    expected, expected_gradients = call.run(torch.lstm)
    outputs, gradients = call.run(unrolled(torch.lstm))
    for ours, theirs in zip((*outputs, *gradients), (*expected, *expected_gradients), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_no_steps_are_refused_as_in_eager() -> None:
    call = call_of("gru")
    call.inputs = call.inputs[:0]
    for function in (torch.gru, unrolled(torch.gru)):
        with pytest.raises(RuntimeError, match=r"non-empty|larger than 0"):
            call.run(function)


@pytest.mark.parametrize("one_dnn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_the_types_that_eager_gives(kind: str, one_dnn: bool) -> None:
    call = call_of(kind, num_layers=2)
    with torch.backends.mkldnn.flags(enabled=one_dnn), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            expected = call.function(*call.arguments)
        except RuntimeError as error:
            if "could not create a primitive" not in str(error):
                raise
            pytest.skip("eager has no such kernel on this processor: oneDNN's bfloat16 LSTM needs AVX-512")
        outputs = unrolled(call.function)(*call.arguments)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_calls_in_subgraphs_are_unrolled_too() -> None:
    inner = fx.symbolic_trace(lambda x, hx, w: torch.gru(x, hx, [w], False, 1, 0.0, True, False, False))
    outer = fx.GraphModule({}, fx.Graph())
    outer.add_submodule("inner", inner)
    unroll_recurrent(outer)
    assert not list(inner.graph.find_nodes(op="call_function", target=torch.gru))


def test_packed_sequences_are_told_from_other_failures() -> None:
    packed = pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)])
    for call, reason in ((((), {"x": [packed]}), ""), ((), "should not trace `pack_padded_sequence`")):
        found = packed_sequence_refusal(call, reason)
        assert found is not None
        assert "padded tensor" in found[1]
    assert packed_sequence_refusal((torch.zeros(1), {"x": (1, "a")}), "should not trace `print`") is None
