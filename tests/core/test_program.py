"""What is a program, what is refused, its analyses and its JSON form."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ebbtide.step.program import Buffer, Op, Program


def tiny(**changes: Any) -> Program:
    """x = f(); y = g(x); loss = h(y) | tangent t; dy = H(t, y); dx = G(dy, x)."""
    ops = (
        Op("f", "f", (), (0,), seconds=1.0),
        Op("g", "g", (0,), (1,), seconds=2.0, state_bytes=16),
        Op("h", "h", (1,), (2,), seconds=3.0),
        Op("H", "H", (1, 3), (4,), seconds=4.0),
        Op("G", "G", (0, 4), (5,), seconds=5.0, workspace_bytes=7),
    )
    names = [("x", 0), ("y", 1), ("loss", 2), ("t", None), ("dy", 3), ("dx", 4)]
    fields: dict[str, Any] = {
        "name": "tiny",
        "ops": ops,
        "buffers": tuple(Buffer(name, 8, producer) for name, producer in names),
        "boundary": 3,
        "forward_outputs": (2,),
        "gradients": (5,),
        "resident_bytes": 100,
        "context": {"device": "cpu"},
    }
    return Program(**(fields | changes))


def changed_op(index: int, **changes: Any) -> tuple[Op, ...]:
    ops = list(tiny().ops)
    ops[index] = dataclasses.replace(ops[index], **changes)
    return tuple(ops)


def changed_buffer(index: int, **changes: Any) -> tuple[Buffer, ...]:
    buffers = list(tiny().buffers)
    buffers[index] = dataclasses.replace(buffers[index], **changes)
    return tuple(buffers)


def test_analyses() -> None:
    program = tiny()
    assert program.readers == ((1, 4), (2, 3), (), (3,), (4,), ())
    assert program.tangents == (3,)
    assert program.pinned == {2, 3, 5}
    assert program.after_boundary == (False, False, False, True, True)
    assert program.seconds == 15.0
    assert [op.random for op in program.ops] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boundary": 6}, "boundary 6"),
        ({"boundary": 4}, "reads a tangent before the boundary"),
        ({"ops": changed_op(0, outputs=())}, "creates no buffer"),
        ({"ops": changed_op(0, inputs=(1,))}, "reads buffer 1 before it exists"),
        ({"ops": changed_op(1, outputs=(0,))}, "does not create buffer 0 once"),
        ({"ops": changed_op(1, outputs=(99,))}, "does not create buffer 99 once"),
        ({"ops": changed_op(2, seconds=-1.0)}, "cost that is negative"),
        ({"ops": changed_op(2, seconds=float("nan"))}, "cost that is negative"),
        ({"ops": changed_op(2, seconds=1e308)}, "too large to be added up"),
        ({"ops": changed_op(2, workspace_bytes=-1)}, "cost that is negative"),
        ({"buffers": changed_buffer(0, bytes=-8)}, "has -8 bytes"),
        ({"buffers": (*tiny().buffers, Buffer("z", 8, 4))}, "does not create it"),
        ({"forward_outputs": (4,)}, "forward output 4"),
        ({"gradients": (9,)}, "gradient 9"),
    ],
)
def test_what_is_no_program_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny(**changes)


def test_json_gives_the_same_program_back() -> None:
    program = tiny()
    again = Program.from_json(json.loads(program.json_text()))
    assert again == program
    assert again.fingerprint == program.fingerprint


def test_costs_are_no_part_of_the_identity() -> None:
    program = tiny()
    dearer = program.with_costs([2 * op.seconds for op in program.ops], [op.workspace_bytes for op in program.ops])
    assert dearer.seconds == 2 * program.seconds
    assert dearer.fingerprint == program.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": changed_op(0, target="other")},
        {"ops": changed_op(2, views=("t",))},
        {"ops": changed_op(1, state_bytes=0)},
        {"ops": changed_op(0, rerunnable=False)},
        {"ops": changed_op(0, reads_mutated=True)},
        {"buffers": changed_buffer(0, bytes=16)},
        {"gradients": (4, 5)},
        {"forward_outputs": (1, 2)},
    ],
)
def test_what_is_computed_is_the_identity(changes: dict[str, Any]) -> None:
    assert tiny(**changes).fingerprint != tiny().fingerprint


def test_costs_need_one_number_per_op() -> None:
    with pytest.raises(ValueError, match="zip"):
        tiny().with_costs([1.0], [0])


def test_the_text_form() -> None:
    assert str(tiny()) == "\n".join(
        [
            "program tiny: 5 ops, 6 buffers, boundary 3",
            "  0: b0[8] = f()",
            "  1: b1[8] = g(b0)",
            "  2: b2[8] = h(b1)",
            "  -- boundary --",
            "  3: b4[8] = H(b1, b3)",
            "  4: b5[8] = G(b0, b4)",
        ]
    )
    assert str(dataclasses.replace(tiny().ops[0], source="net.py:3")) == "f (f) at net.py:3"
