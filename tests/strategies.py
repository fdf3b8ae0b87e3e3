"""Random programs for property tests: small, and with everything that a capture can bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from ebbtide.step.program import Buffer, Op, Program

__all__ = ["chain", "examples", "programs", "reruns"]


def examples(count: int) -> int:
    """``count`` examples for a property by night, at least five of them else: a third by day, a tenth in a hurry."""
    divisor = {"nightly": 1, "quick": 10}.get(settings.get_current_profile_name(), 3)
    return max(min(5, count), count // divisor)


GIVEN_BACK = (0, 3, -4, -20)
"""Bytes that user code holds, or gives back of what was resident (gradients of earlier steps)."""


@st.composite
def programs(
    draw: st.DrawFn, max_ops: int = 12, max_tangents: int = 2, held_bytes: Sequence[int] = (0, 0, 3)
) -> Program:
    """A program with multi-output, random, single-run and mutated-input ops, workspaces, pins and tangents."""
    count = draw(st.integers(1, max_ops))
    boundary = draw(st.integers(0, count))
    small = st.integers(0, 9)
    buffers: list[Buffer] = []
    ops: list[Op] = []
    for index in range(draw(st.integers(0, max_tangents))):
        buffers.append(Buffer(f"tangent{index}", draw(small), None))
    tangents = list(range(len(buffers)))
    made: list[int] = []
    for index in range(count):
        readable = made if index < boundary else made + tangents
        inputs = draw(st.sets(st.sampled_from(readable[-6:]), max_size=3)) if readable else set[int]()
        outputs = tuple(range(len(buffers), len(buffers) + draw(st.sampled_from([1, 1, 1, 2, 3]))))
        buffers.extend(Buffer(f"b{b}", draw(small), index) for b in outputs)
        made.extend(outputs)
        trait = draw(st.sampled_from(["", "", "", "", "random", "once", "mutated"]))
        ops.append(
            Op(
                name=f"op{index}",
                target="test",
                inputs=tuple(sorted(inputs)),
                outputs=outputs,
                workspace_bytes=draw(st.sampled_from([0, 0, 3])),
                seconds=draw(st.integers(1, 5)) * 1e-3,
                state_bytes=2 if trait == "random" else 0,
                rerunnable=trait != "once",
                reads_mutated=trait == "mutated" and index < boundary,
            )
        )
    forward = [b for b in made if (buffers[b].producer or 0) < boundary]
    unread = set(forward) - {b for op in ops for b in op.inputs}
    mutations = draw(st.sets(st.sampled_from(sorted(unread)), max_size=2)) if unread else set[int]()
    for index, op in enumerate(ops):
        if len(op.outputs) > 1 and op.outputs[-1] in mutations and draw(st.booleans()):
            ops[index] = replace(op, repeat="test again", once=1, reads_mutated=False)
    forward, made = ([b for b in of if b not in mutations] for of in (forward, made))
    some = lambda of: tuple(sorted(draw(st.sets(st.sampled_from(of), max_size=2)))) if of else ()  # noqa: E731
    return Program(
        name="random",
        ops=tuple(ops),
        buffers=tuple(buffers),
        boundary=boundary,
        forward_outputs=some(forward),
        gradients=some(made),
        mutations=tuple(sorted(mutations)),
        between_bytes=draw(st.sampled_from([0, 0, 12, 25])),
        held_bytes=draw(st.sampled_from(held_bytes)),
    )


@st.composite
def reruns(draw: st.DrawFn, program: Program, max_size: int = 8) -> list[tuple[int, int]]:
    """Places for reruns; some may not be allowed."""
    count = len(program.ops)
    if count < 2:
        return []
    pairs = st.integers(0, count - 2).flatmap(lambda o: st.tuples(st.just(o), st.integers(o + 1, count - 1)))
    return draw(st.lists(pairs, max_size=max_size))


def chain(layers: int, activation_bytes: int = 8, gradient_bytes: int = 1) -> Program:
    """A chain of (linear, gelu) with its backward and parameter gradients."""
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def op(name: str, inputs: list[int], size: int, seconds: float) -> int:
        buffers.append(Buffer(name, size, len(ops)))
        ops.append(Op(name, name, tuple(sorted(inputs)), (len(buffers) - 1,), seconds=seconds))
        return len(buffers) - 1

    outputs: list[tuple[int, int]] = []
    last: list[int] = []
    for layer in range(layers):
        linear = op(f"linear{layer}", last, activation_bytes, 4e-3)
        last = [op(f"gelu{layer}", [linear], activation_bytes, 1e-3)]
        outputs.append((linear, last[0]))
    boundary = len(ops)
    buffers.append(Buffer("tangent", activation_bytes, None))
    flow = len(buffers) - 1
    gradients: list[int] = []
    for layer in range(layers - 1, -1, -1):
        flow = op(f"gelu_backward{layer}", [flow, outputs[layer][0]], activation_bytes, 2e-3)
        below = [outputs[layer - 1][1]] if layer else []
        gradients.append(op(f"weight{layer}", [flow, *below], gradient_bytes, 4e-3))
        if layer:
            flow = op(f"flow{layer}", [flow], activation_bytes, 4e-3)
    return Program("chain", tuple(ops), tuple(buffers), boundary, gradients=tuple(gradients))
