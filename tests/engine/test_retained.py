"""Room for backwards that retain their graph: what planners, who know nothing of it, are asked for."""

from __future__ import annotations

from dataclasses import replace

import ebbtide
from ebbtide.engine.retained import Retained, plan_retained, retained_above_bytes
from ebbtide.report.plan import Plan
from ebbtide.zoo import mlp_chain

AGAIN = Retained(again=True)


def needs(plan: Plan) -> int:
    return plan.resident_bytes + retained_above_bytes(plan.program, plan.schedule, plan.timeline, AGAIN)


def test_a_plan_that_leaves_much_free_does_not_come_again_and_again() -> None:
    case = mlp_chain(layers=6)
    loose = ebbtide.plan(case.model, case.args, budget="100%", options=ebbtide.Options(effort=50))
    tight = ebbtide.plan(case.model, case.args, budget=loose.smallest_bytes, options=ebbtide.Options(effort=50))
    budget = needs(loose) - 1
    assert needs(tight) <= budget
    asked: list[int] = []

    def make(aside: int) -> Plan:
        asked.append(aside)
        fits = loose.predicted_peak_bytes + loose.reserve_bytes + aside <= budget
        return replace(loose if fits else tight, budget_bytes=budget, reserve_bytes=loose.reserve_bytes + aside)

    found = plan_retained(replace(loose, budget_bytes=budget), make, AGAIN)
    assert found is not None
    assert needs(found) <= budget
    assert len(asked) == 1


def test_what_user_code_takes_while_the_graph_is_there_counts() -> None:
    case = mlp_chain(layers=6)
    plan = ebbtide.plan(case.model, case.args, budget="100%", options=ebbtide.Options(effort=50))

    def above(after_bytes: int | None) -> int:
        retained = Retained(after_bytes=after_bytes)
        return retained_above_bytes(plan.program, plan.schedule, plan.timeline, retained)

    assert above(0) == above(None)
    assert above(2**40) - above(2**39) == 2**39
    at_the_end = above(2**40) - 2**40
    crossing = plan.boundary_bytes
    gradients = sum(plan.program.buffers[each].bytes for each in set(plan.program.gradients))
    assert at_the_end >= gradients + crossing - sum(plan.program.buffers[b].bytes for b in plan.program.forward_outputs)
