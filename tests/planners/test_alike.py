"""Searches for the least peak that start where that of a program of the same step has ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners.reductions.carried import carried
from ebbtide.planners.search import smallest
from ebbtide.planners.search.interval_state import IntervalState, reruns_of
from ebbtide.planners.search.smallest import forget_smallest, note_alike, smallest_of
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from strategies import examples, programs

EFFORT = 60


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    forget_smallest()
    yield
    forget_smallest()


def named(program: Program, *, but: int | None = None) -> Program:
    """With a name of its own for every op, as captured programs have; that of one op is another."""
    names = [f"op{i}" if i != but else "rewritten" for i in range(len(program.ops))]
    return replace(program, ops=tuple(replace(op, name=name) for op, name in zip(program.ops, names, strict=True)))


@given(program=programs(max_ops=14), data=st.data())
@settings(max_examples=examples(60))
def test_what_starts_at_a_known_schedule_is_legal_and_no_higher_for_the_same_bytes(
    program: Program, data: st.DataObject
) -> None:
    forget_smallest()
    first = named(program)
    known, _ = smallest_of(first, EFFORT)
    slower = replace(first, ops=tuple(replace(op, seconds=2.5 * op.seconds + 1) for op in first.ops))
    other_name = named(program, but=data.draw(st.integers(0, len(program.ops) - 1)))
    changed = replace(other_name, ops=tuple(replace(op, seconds=op.seconds + 1) for op in other_name.ops))
    for other in (slower, changed):
        note_alike(other, [first])
        found, schedule = smallest_of(other, EFFORT)
        assert not check(other, schedule, found)
        assert simulate(other, schedule).above_bytes == found
        if other is slower:
            assert found <= known


@given(program=programs(max_ops=14), data=st.data())
@settings(max_examples=examples(60))
def test_reruns_are_carried_by_name(program: Program, data: st.DataObject) -> None:
    program = named(program)
    _, schedule = smallest_of(program, EFFORT)
    reruns = reruns_of(program, schedule)
    assert reruns is not None
    assert sorted(carried(program, reruns, program)) == sorted(reruns)
    but = data.draw(st.integers(0, len(program.ops) - 1))
    others = named(program, but=but)
    found = carried(program, reruns, others)
    assert all(op != but for op, _ in found)
    assert {pair for pair in reruns if but not in pair} <= set(found)
    IntervalState(others).load(found)


def test_three_descents_take_the_place_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.step.program import Buffer, Op

    length = 12
    ops = [Op(f"f{i}", "f", inputs=(i - 1,) if i else (), outputs=(i,), seconds=1.0) for i in range(length)]
    ops += [
        Op(f"b{i}", "b", inputs=(i, length + length - 2 - i) if i < length - 1 else (i,), outputs=(2 * length - 1 - i,))
        for i in range(length - 1, -1, -1)
    ]
    sizes = [100] * length + [10] * length
    buffers = [Buffer(f"t{i}", size, i) for i, size in enumerate(sizes)]
    program = Program(
        name="chain", ops=tuple(ops), buffers=tuple(buffers), boundary=length, gradients=(2 * length - 1,)
    )
    began: list[int] = []
    honest = smallest._descended

    def counted(*args: object, start: object = (), **kwargs: object) -> object:
        began.append(len([*start]))  # type: ignore[misc]
        return honest(*args, start=start, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(smallest, "_descended", counted)
    monkeypatch.setattr(smallest, "ENOUGH", 0.0)
    smallest_of(program, EFFORT)
    assert began == [0] * 4
    again = replace(program, name="again", ops=tuple(replace(op, seconds=3.0) for op in ops))
    note_alike(again, [program])
    began.clear()
    smallest_of(again, EFFORT)
    assert len(began) == 3
    assert all(began)
