"""Libra: what it recomputes and what it swaps, on steps where both are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.planners import Answer, Problem, Status, planner_named
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes, unplanned_schedule
from layered import SIZE, layered, linked, offloaded, reloads, reruns, sound
from random_moves import random_links
from strategies import chain, examples, programs


def blocks(ends: Sequence[int], count: int = 6) -> Program:
    """A layered step whose forward ops are in blocks that end before each of ``ends``."""
    program = layered(count)
    module = [f"net.layers.{sum(op >= end for end in ends)}" for op in range(count)] + [""] * count
    ops = tuple(replace(op, module=path) for op, path in zip(program.ops, module, strict=True))
    return replace(program, ops=ops)


def asked(program: Program, budget: int, text: str = "", rate: float = 1.0) -> Answer:
    problem = Problem(program, budget, machine=linked(rate), tiers=("host",))
    return sound(problem, planner_named(f"libra{text}")(problem))


def test_a_chain_that_fits_is_recomputed() -> None:
    """Buffers 0, 1 and 2 are to leave. They are made again together before op 9: 302 bytes with two gradients."""
    answer = asked(blocks([4]), 302)
    assert offloaded(answer.schedule) == set[int]()
    assert reruns(answer.schedule) == [0, 1, 2]


def test_a_chain_that_makes_a_new_peak_is_swapped() -> None:
    answer = asked(blocks([4]), 301)
    assert offloaded(answer.schedule) == {0, 1, 2}
    assert reruns(answer.schedule) == []


def test_outputs_of_blocks_are_swapped_and_cut_the_chain() -> None:
    """Of the blocks (0, 1), (2, 3) and (4, 5), 1 is an output: 2 is made from it alone, and 0 by itself later."""
    answer = asked(blocks([2, 4]), 301)
    assert offloaded(answer.schedule) == {1}
    assert reruns(answer.schedule) == [2, 0]
    assert reloads(answer.schedule) == [(1, 2)], "for the rerun of op 2, before op 9 needs what that makes"


def test_what_the_reference_peak_reads_is_swapped() -> None:
    """Within 200 bytes all leave; all swapped, op 1 is the first at which 200 are live: 0 and 1 are swapped."""
    program = blocks([4])
    assert offloaded(asked(program, 200).schedule) >= {0, 1, 3}, "3 is an output of a block"


@pytest.mark.parametrize(("budget", "gone"), [(600, 1), (500, 2), (401, 2), (400, 3)])
def test_candidates_leave_in_captured_order_until_the_sizes_meet_the_budget(budget: int, gone: int) -> None:
    """The unplanned peak is 601; with the whole chain in one block all that leaves is recomputed."""
    answer = asked(blocks([4]), budget)
    assert answer.notes["chosen"] == f"{gone} of 6 candidates leave, 0 of them swapped"
    assert reruns(answer.schedule) == list(range(gone))


def test_synchronous_swaps_block_computing_both_ways() -> None:
    program = blocks([2, 4])
    answer = asked(program, 301, rate=2.0)
    assert answer.schedule is not None
    timeline = simulate(program, answer.schedule, linked(2.0))
    assert timeline.transfer_seconds == timeline.waited_seconds == 1.0
    assert timeline.seconds == program.seconds + 1.0 + 2.0, "two transfers of half a second, two reruns of a second"
    beside = asked(program, 301, ":overlap=true", rate=2.0)
    assert beside.schedule is not None
    assert offloaded(beside.schedule) == {1}
    assert simulate(program, beside.schedule, linked(2.0)).seconds == program.seconds + 2.0


def test_what_does_not_fit_with_all_swapped_has_no_plan() -> None:
    answer = asked(blocks([4]), 199)
    assert (answer.status, answer.schedule) == (Status.INFEASIBLE, None)
    assert "do not fit" in answer.notes["chosen"]


def test_what_fits_is_kept_and_without_a_tier_there_is_no_plan() -> None:
    program = layered(4)
    assert asked(program, unplanned_bytes(program)).schedule == unplanned_schedule(program)
    answer = planner_named("libra")(Problem(program, 3 * SIZE))
    assert (answer.status, answer.schedule) == (Status.INFEASIBLE, None)
    assert "no tier" in answer.notes["chosen"]


def test_without_recompute_first_all_that_leaves_is_swapped() -> None:
    answer = asked(blocks([4]), 302, ":recompute_first=false")
    assert (offloaded(answer.schedule), reruns(answer.schedule)) == ({0, 1, 2}, [])


def test_without_new_peaks_the_first_is_swapped() -> None:
    """The chain 0, 1, 2 makes a peak of 302 bytes. With 0 swapped it still does; with 1 too, 2 is made from 1 alone."""
    answer = asked(blocks([4]), 301, ":new_peaks=false")
    assert (offloaded(answer.schedule), reruns(answer.schedule)) == ({0, 1}, [2])


def test_without_refinement_a_new_peak_gives_the_reference() -> None:
    answer = asked(blocks([4]), 301, ":new_peaks=false,refinement=false")
    assert (offloaded(answer.schedule), reruns(answer.schedule)) == ({0, 1, 2}, [])


def test_without_the_reference_sizes_say_what_leaves_at_first() -> None:
    program = blocks([4])
    assert asked(program, 302, ":all_swapped=false").schedule == asked(program, 302).schedule
    assert offloaded(asked(program, 200, ":all_swapped=false").schedule), "more leave where all swapped do not fit"


@pytest.mark.parametrize("step", ["all_swapped", "recompute_first", "new_peaks", "refinement"])
@settings(max_examples=examples(30))
@given(program=programs(max_ops=14), seed=st.integers(0, 10**6), share=st.floats(0.3, 1.1))
def test_without_a_step_every_answer_is_legal_too(step: str, program: Program, seed: int, share: float) -> None:
    links = random_links(random.Random(seed))
    machine = replace(linked(1.0), links=links)
    problem = Problem(program, int(share * unplanned_bytes(program)), machine=machine, tiers=tuple(links))
    sound(problem, planner_named(f"libra:{step}=false,overlap=true")(problem))


@settings(max_examples=examples(60))
@given(program=programs(max_ops=14), seed=st.integers(0, 10**6), share=st.floats(0.3, 1.1))
def test_overlap_fits_wherever_blocking_does(program: Program, seed: int, share: float) -> None:
    links = random_links(random.Random(seed))
    machine = replace(linked(1.0), links=links)
    problem = Problem(program, int(share * unplanned_bytes(program)), machine=machine, tiers=tuple(links))
    blocking, beside = (planner_named(f"libra{text}")(problem) for text in ("", ":overlap=true"))
    assert (blocking.schedule is None) == (beside.schedule is None)


@pytest.mark.parametrize("text", ["", ":overlap=true"])
def test_on_a_chain_budgets_are_met_down_to_a_few_layers(text: str) -> None:
    program = chain(12)
    for share in (0.8, 0.6, 0.4):
        budget = int(share * unplanned_bytes(program))
        problem = Problem(program, budget, machine=linked(10.0), tiers=("host",))
        assert sound(problem, planner_named(f"libra{text}")(problem)).schedule is not None


@settings(max_examples=examples(80))
@given(program=programs(max_ops=14), seed=st.integers(0, 10**6), share=st.floats(0.3, 1.1), overlap=st.booleans())
def test_every_answer_is_legal_within_its_budget_and_the_same_again(
    program: Program, seed: int, share: float, overlap: bool
) -> None:
    links = random_links(random.Random(seed))
    machine = replace(linked(1.0), links=links)
    problem = Problem(program, int(share * unplanned_bytes(program)), machine=machine, tiers=tuple(links))
    name = f"libra:overlap={str(overlap).lower()}"
    answer = sound(problem, planner_named(name)(problem))
    assert answer == planner_named(name)(problem)
