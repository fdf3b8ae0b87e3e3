"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, unrolled cell by cell, so that the planner sees the gates.

Dynamo writes a recurrent module as one call of ``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or
``torch.rnn_relu``, if ``allow_rnn`` lets it. Left alone, AOTAutograd unrolls that call with PyTorch's own Python
decomposition, which draws no dropout between layers; so before AOTAutograd sees it, the call is pointed at a function
of plain ops. Nothing is registered and nothing patched: users' own ``torch.compile`` is not touched.

Definitions, after the CPU code of aten/src/ATen/native/RNN.cpp: the same ops in the same order, hence the same bits.
1. A direction of a layer projects the whole sequence at once, then runs its cell step by step and stacks the
   outputs. The second direction takes the steps from last to first; its output is put beside the first's.
2. A layer's output except the last's is dropped out as one tensor, steps x batch x features; time comes first in it
   also where the caller is batch-first.
3. A cell's first hidden tensor is its output.
4. The parameters of a direction are w_ih and w_hh, then b_ih and b_hh if there are biases, then w_hr if an LSTM
   projects its output; it does if its hidden state and its cell state differ in width.
5. Autocast casts the parameters once for all steps, and where eager calls oneDNN or cuDNN, all that goes in.

Where eager calls these, results agree within rounding, not in every bit: oneDNN for ``nn.LSTM`` on CPU in float32 and
bfloat16, unless it projects; cuDNN on CUDA, which also draws its dropout in a way of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.utils.rnn import PackedSequence

from ebbtide.torch_seams import trees as pytree
from ebbtide.user_objects import is_a

__all__ = ["packed_sequence_refusal", "unroll_recurrent"]

_States = tuple[Tensor, ...]


class _Weights(NamedTuple):
    """The parameters of one direction of one layer (definition 4)."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


_Cell = Callable[[Tensor, _States, _Weights], _States]


def _lstm_cell(projected: Tensor, states: _States, weights: _Weights) -> _States:
    hidden, cell = states
    gates = F.linear(hidden, weights.w_hh, weights.b_hh) + projected
    into, forget, candidate, out = gates.chunk(4, 1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(candidate)
    hidden = torch.sigmoid(out) * torch.tanh(cell)
    return hidden if weights.w_hr is None else torch.matmul(hidden, weights.w_hr.t()), cell


def _gru_cell(projected: Tensor, states: _States, weights: _Weights) -> _States:
    (hidden,) = states
    width = hidden.shape[1]
    gates_x, new_x = projected.split([2 * width, width], 1)
    gates_h, new_h = F.linear(hidden, weights.w_hh, weights.b_hh).split([2 * width, width], 1)
    # One sum for both gates: the sigmoids then read rows that are apart, as in ATen, whose kernels treat the last few
    # numbers of a row otherwise than the rest (seen in float64: a sum of its own for each gate changes bits).
    reset, update = (gates_h + gates_x).chunk(2, 1)
    new = torch.tanh(new_x + new_h * torch.sigmoid(reset))
    return ((hidden - new) * torch.sigmoid(update) + new,)


def _tanh_cell(projected: Tensor, states: _States, weights: _Weights) -> _States:
    return (torch.tanh(F.linear(states[0], weights.w_hh, weights.b_hh) + projected),)


def _relu_cell(projected: Tensor, states: _States, weights: _Weights) -> _States:
    return (torch.relu(F.linear(states[0], weights.w_hh, weights.b_hh) + projected),)


def _direction(
    cell: _Cell, inputs: Tensor, states: _States, weights: _Weights, *, from_last: bool
) -> tuple[Tensor, _States]:
    """Run one direction of a layer (definition 1).

    Stacked outputs, steps x batch x features, and the states after the last step taken.
    """
    projected = F.linear(inputs, weights.w_ih, weights.b_ih).unbind(0)
    outputs: list[Tensor] = []
    for step in reversed(projected) if from_last else projected:
        states = cell(step, states, weights)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if from_last else outputs), states


def _unrolled(cell: _Cell) -> Callable[..., _States]:
    """What replaces the torch function with this cell; its arguments and results, by the same names."""

    def unrolled(
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> _States:
        initial = [hx] if isinstance(hx, Tensor) else list(hx)
        projects = len(initial) == 2 and initial[0].shape[2] != initial[1].shape[2]
        outputs = input.transpose(0, 1) if batch_first else input
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
            params = [parameter.to(dtype) for parameter in params]
            if device == "cuda" or (len(initial) == 2 and not projects and _has_one_dnn()):
                outputs, *initial = (tensor.to(dtype) for tensor in (outputs, *initial))
        weights = iter(_grouped(params, has_biases, projects))
        states = zip(*(state.unbind(0) for state in initial), strict=True)
        final: list[_States] = []
        for layer in range(num_layers):
            directions: list[Tensor] = []
            for from_last in (False, True)[: 1 + bidirectional]:
                output, last = _direction(cell, outputs, next(states), next(weights), from_last=from_last)
                directions.append(output)
                final.append(last)
            outputs = torch.cat(directions, -1) if bidirectional else directions[0]
            if train and dropout != 0 and layer < num_layers - 1:
                outputs = F.dropout(outputs, dropout)
        if batch_first:
            outputs = outputs.transpose(0, 1)
        return (outputs, *(torch.stack(state) for state in zip(*final, strict=True)))

    return unrolled


def _has_one_dnn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _grouped(params: Sequence[Tensor], has_biases: bool, projects: bool) -> list[_Weights]:
    """Weights in groups (definition 4), layer by layer and in each direction by direction."""
    size = 2 + 2 * has_biases + projects
    groups: list[_Weights] = []
    for start in range(0, len(params), size):
        w_ih, w_hh, *rest = params[start : start + size]
        b_ih, b_hh = rest[:2] if has_biases else (None, None)
        groups.append(_Weights(w_ih, w_hh, b_ih, b_hh, rest[-1] if projects else None))
    return groups


_UNROLLED = {
    torch.lstm: _unrolled(_lstm_cell),
    torch.gru: _unrolled(_gru_cell),
    torch.rnn_tanh: _unrolled(_tanh_cell),
    torch.rnn_relu: _unrolled(_relu_cell),
}


def unroll_recurrent(graph: fx.GraphModule) -> None:
    """Point every recurrent call of Dynamo's ``graph``, also in its subgraphs, at its unrolling.

    Args:
        graph: as Dynamo hands it to a backend; changed in place.
    """
    for part in graph.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and node.target in _UNROLLED:
                    node.target = _UNROLLED[node.target]
            part.recompile()


def packed_sequence_refusal(arguments: object, error_text: str) -> tuple[str, str] | None:
    """Why a capture failed that met a packed sequence, and what to do; ``None`` if it met none.

    Args:
        arguments: of the call, in any containers.
        error_text: what Dynamo said.
    """
    leaves = pytree.tree_leaves(arguments, is_leaf=lambda value: is_a(value, PackedSequence))
    packs_inside = "pack_padded_sequence" in error_text or "pad_packed_sequence" in error_text
    if not packs_inside and not any(is_a(leaf, PackedSequence) for leaf in leaves):
        return None
    return (
        "A PackedSequence has as many rows in each step as its data says, and plans are of fixed sizes.",
        "Give the recurrent module the padded tensor, mask the padding in the loss, and take last states from the "
        "outputs at lengths - 1, up to where they are the same (of two directions, the first one's)",
    )
