"""Random chains: steps of unequal sizes and costs, of which the backward reads some, with gradients that pile up."""

from __future__ import annotations

import random

from ebbtide.step.program import Buffer, Op, Program

__all__ = ["mlp_chain", "random_chain", "unit_chain"]


def unit_chain(stages: int) -> Program:
    """``stages`` and one more forward ops of one byte and one second, and a backward op for each of the first."""
    ops: list[Op] = []
    for k in range(2 * stages + 1):
        inputs = {k - 1} if k <= stages else {k - 1, 2 * stages - k}
        ops.append(Op(str(k), "unit", tuple(sorted(i for i in inputs if i >= 0)), (k,), seconds=1.0))
    buffers = tuple(Buffer(str(k), 1, k) for k in range(len(ops)))
    return Program("unit chain", tuple(ops), buffers, stages + 1, gradients=(len(ops) - 1,))


def random_chain(seed: int, most_layers: int = 3) -> Program:
    """A chain whose layers make one or two states, with backward ops for the flow and for gradients, in any order."""
    rng = random.Random(seed)
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def op(inputs: list[int], *, rerunnable: bool = True, extra: int = 0) -> int:
        made = tuple(range(len(buffers), len(buffers) + 1 + extra))
        buffers.extend(Buffer(str(b), rng.randint(1, 3), len(ops)) for b in made)
        workspace = rng.choice([0, 0, 0, 1])
        seconds = float(rng.randint(1, 5))
        ops.append(
            Op(
                str(len(ops)),
                "test",
                tuple(sorted(set(inputs))),
                made,
                workspace_bytes=workspace,
                seconds=seconds,
                rerunnable=rerunnable,
            )
        )
        return made[0]

    state: list[int] = []
    layers: list[tuple[list[int], int]] = []
    for _ in range(rng.randint(2, most_layers)):
        below = state
        for _ in range(rng.randint(1, 2)):
            extra = int(rng.random() < 0.15)
            state = [op(state, rerunnable=rng.random() < 0.95, extra=extra)]
        layers.append((below, state[0]))
    boundary = len(ops)
    flow: list[int] = []
    if rng.random() < 0.5:
        buffers.append(Buffer("tangent", rng.randint(1, 2), None))
        flow = [len(buffers) - 1]
    gradients: list[int] = []
    for below, own in reversed(layers):
        asks = [("flow", [own]), ("gradient", below)]
        if rng.random() < 0.5:
            asks.reverse()
        if rng.random() < 0.3:
            asks = [("flow", [own, *below])]
        arriving = flow
        for kind, states in asks:
            made = op([*arriving, *states])
            if kind == "flow":
                flow = [made]
            else:
                gradients.append(made)
    gradients.append(flow[0])
    late = boundary if rng.random() < 0.8 else 0
    if buffers and any(b.producer is None for b in buffers):
        late = boundary
    return Program("random chain", tuple(ops), tuple(buffers), late, gradients=tuple(sorted(set(gradients))))


def mlp_chain(layers: int) -> Program:
    """Three forward ops a layer, as of a linear, a GELU and a dropout: the backward reads the first and the last.

    Its three backward ops a layer pass the flow down, and make a gradient that takes an eighth of a state.
    """
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def op(name: str, inputs: list[int], size: int) -> int:
        buffers.append(Buffer(name, size, len(ops)))
        ops.append(Op(name, name, tuple(sorted(inputs)), (len(buffers) - 1,), seconds=1.0))
        return len(buffers) - 1

    last: list[int] = []
    layer: list[tuple[list[int], int]] = []
    for _ in range(layers):
        linear = op("linear", last, 8)
        layer.append((last, linear))
        last = [op("dropout", [op("gelu", [linear], 8)], 8)]
    boundary = len(ops)
    flow = op("loss_backward", last, 8)
    gradients: list[int] = []
    for below, linear in reversed(layer):
        flow = op("gelu_backward", [flow, linear], 8)
        arrived = flow
        flow = op("flow", [arrived], 8)
        gradients.append(op("weight", [arrived, *below], 1))
    return Program("mlp", tuple(ops), tuple(buffers), boundary, gradients=(*gradients, flow))
