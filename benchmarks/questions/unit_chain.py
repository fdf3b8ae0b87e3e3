"""The 17-node unit chain of Checkmate's Appendix A at every budget: the published tool refuses all below 16."""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide.step.program import Buffer, Op, Program
from harness.planned import plan_with
from harness.record import Row, holds

TITLE = "Unit chain of 17 nodes: every budget from 4 to 17, solved and proven"
NODES = 17
CASES = ("17",)
QUICK = CASES


def unit_chain(nodes: int) -> Program:
    """Unit ops in a row; each of the second half also reads its mirror image in the first."""
    half = nodes // 2
    ops = [Op("0", "unit", (), (0,), seconds=1.0)]
    for k in range(1, nodes):
        inputs = {k - 1} if k <= half else {k - 1, nodes - 1 - k}
        ops.append(Op(str(k), "unit", tuple(sorted(inputs)), (k,), seconds=1.0))
    return Program(
        "unit chain", tuple(ops), tuple(Buffer(str(k), 1, k) for k in range(nodes)), 0, gradients=(nodes - 1,)
    )


def rows(case: str, quick: bool) -> Iterator[Row]:
    from oracle.brute_force import optimal_overhead  # tests/ is on the path of a benchmark's children

    program = unit_chain(int(case))
    for budget in range(4, int(case) + 1):
        planned = plan_with("checkmate", program, budget, effort=500)
        best = optimal_overhead(program, budget, ascending=True) if budget <= 5 else None
        checks = [holds("solved and proven", planned.proven and planned.legal)]
        if best is not None and planned.overhead is not None:
            checks.append(holds("equal to exhaustive search", abs(planned.overhead - best) < 1e-6))
        yield Row(
            "unit_chain",
            {
                "case": case,
                "budget": budget,
                "status": planned.answer.status.name,
                "cost": None if planned.overhead is None else round((1 + planned.overhead) * program.seconds),
                "peak": planned.peak_bytes,
                "cpu_seconds": planned.cpu_seconds,
            },
            tuple(checks),
        )
