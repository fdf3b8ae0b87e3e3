"""The least peak that is found depends on bytes, whatever seconds the ops were measured to take."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.smallest import ENOUGH, smallest_schedule
from ebbtide.step.legality import check
from strategies import chain


@pytest.mark.parametrize("count", [12, 24])
def test_a_chains_floor_is_reached_whatever_its_ops_take(count: int) -> None:
    program = chain(count)
    floor, _ = floor_bytes(program)
    for seed in range(20):
        draw = random.Random(seed)
        priced = replace(program, ops=tuple(replace(op, seconds=draw.lognormvariate(0, 1)) for op in program.ops))
        found, schedule = smallest_schedule(priced)
        assert found <= ENOUGH * floor
        assert not check(priced, schedule, found)
