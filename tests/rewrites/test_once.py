"""What rewrites find out of one object is found out once, and of an equal one again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ebbtide.rewrites.once import once


@dataclass(frozen=True)
class _Step:
    ops: tuple[int, ...]


asked: list[_Step] = []


@once
def _total(step: _Step) -> list[int]:
    asked.append(step)
    return [sum(step.ops)]


@once
def _least(step: _Step) -> int:
    return min(step.ops)


def test_it_is_kept_in_the_object_and_in_no_copy_of_it() -> None:
    asked.clear()
    step = _Step((1, 2, 3))
    assert _total(step) is _total(step)
    assert (_total(step), _least(step)) == ([6], 1)
    other = replace(step, ops=(1, 2, 4))
    assert (_total(other), _least(other)) == ([7], 1)
    same = _Step((1, 2, 3))
    assert same == step
    assert _total(same) is not _total(step)
    assert len(asked) == 3
