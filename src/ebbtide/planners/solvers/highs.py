"""A linear or mixed-integer program as sparse arrays, built block by block, and HiGHS as it is used here.

The one place that knows HiGHS. One thread, interruptible, no output. HiGHS' tolerances are absolute, so callers
scale: costs to percent of the step, bytes to the bytes that are left for choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.planners.base import Interrupt

__all__ = ["ROOM", "Basis", "Model", "Solved", "solve"]

ROOM = 1e-6
"""By how much a bound's row of bytes, scaled to 1, is wider: HiGHS' feasibility tolerance in integer programs. With a
thousandth of that, branch and bound cut off a plan that filled its budget to the byte, and the bound was above it."""

Terms = Iterable[tuple[int, float]]


@dataclass
class Model:
    """Columns with bounds, rows in named blocks.

    Attributes:
        cost: per column, its coefficient in the objective, which is minimised.
        integer: columns that have to be integral.
        blocks: per block of rows, its name and how many rows it has.
    """

    cost: list[float] = field(default_factory=list[float])
    lower: list[float] = field(default_factory=list[float])
    upper: list[float] = field(default_factory=list[float])
    integer: set[int] = field(default_factory=set[int])
    blocks: dict[str, int] = field(default_factory=dict[str, int])
    _start: list[int] = field(default_factory=lambda: [0])
    _column: list[int] = field(default_factory=list[int])
    _value: list[float] = field(default_factory=list[float])
    _row_lower: list[float] = field(default_factory=list[float])
    _row_upper: list[float] = field(default_factory=list[float])

    def column(self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, *, integer: bool = False) -> int:
        """A new column; its index."""
        index = len(self.cost)
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        if integer:
            self.integer.add(index)
        return index

    def row(self, block: str, terms: Terms, lower: float = -math.inf, upper: float = math.inf) -> None:
        """A new row ``lower <= sum of terms <= upper``; a column may appear in several terms."""
        merged: dict[int, float] = {}
        for column, value in terms:
            merged[column] = merged.get(column, 0.0) + value
        self.sparse_row(block, merged.keys(), merged.values(), lower, upper)

    def sparse_row(
        self,
        block: str,
        columns: Collection[int],
        values: Iterable[float],
        lower: float = -math.inf,
        upper: float = math.inf,
    ) -> None:
        """A new row; each column appears once."""
        self.blocks[block] = self.blocks.get(block, 0) + 1
        self._column.extend(columns)
        self._value.extend(values)
        self._start.append(len(self._column))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self._row_lower)

    @property
    def entries(self) -> int:
        """How many coefficients there are in all rows."""
        return len(self._value)

    def for_highs(self, highspy: Any, *, relaxed: bool) -> Any:
        """The model as HiGHS takes it; without integrality if ``relaxed``."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self._row_lower)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.array(self.lower), np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array(self._row_lower), np.array(self._row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._start, np.int32)
        lp.a_matrix_.index_ = np.array(self._column, np.int32)
        lp.a_matrix_.value_ = np.array(self._value)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[column in self.integer] for column in range(len(self.cost))]
        return lp


@dataclass(frozen=True)
class Basis:
    """Which columns and rows are basic, and at which bound the others are.

    Attributes:
        columns: HiGHS' status of each; ``None`` stands for that in the basis of all slacks, the lower bound.
        rows: HiGHS' status of each; ``None`` likewise, basic.
    """

    columns: Sequence[Any]
    rows: Sequence[Any]

    def for_highs(self, highspy: Any) -> Any:
        """The basis as HiGHS takes it; a singular one is mended there."""
        lower, basic = highspy.HighsBasisStatus.kLower, highspy.HighsBasisStatus.kBasic
        found = highspy.HighsBasis()
        found.col_status = [lower if status is None else status for status in self.columns]
        found.row_status = [basic if status is None else status for status in self.rows]
        found.valid = found.alien = True
        return found


@dataclass(frozen=True)
class Solved:
    """The answer of the solver.

    Attributes:
        status: in HiGHS' words.
        infeasible: whether it proved that there is no solution.
        optimal: whether it proved that its solution is one.
        bound: proven lower bound on the objective; ``-inf`` if none is known.
        values: per column, of the best solution; ``None`` if it found none.
        checks: how often branch and bound has asked whether to go on.
        basis: the last one, of a linear program.
    """

    status: str
    infeasible: bool
    optimal: bool
    bound: float
    values: NDArray[np.float64] | None
    checks: int = 0
    basis: Basis | None = None


def solve(
    model: Model,
    interrupt: Interrupt,
    *,
    relaxed: bool = False,
    start: Mapping[int, float] | None = None,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[float, float], None] | None = None,
    most_checks: float = math.inf,
    enough: float = math.inf,
    basis: Basis | None = None,
    wants_basis: bool = False,
) -> Solved:
    """The least objective of ``model``.

    Args:
        model: any.
        interrupt: when to stop with the best so far.
        relaxed: without integrality.
        start: values of some columns of a solution to begin with.
        options: of HiGHS.
        tell: called with the objective of the best solution and the bound as they change.
        most_checks: how often branch and bound may ask whether to go on (after every node, round of cutting planes and
            dive): a limit that is the same on every machine.
        enough: a bound above it is not looked for.
        basis: of a linear program, with which the simplex method begins; one that is refused changes nothing.
        wants_basis: whether the answer is to have the last basis.
    """
    import highspy  # imported where used: a native library of some megabytes

    solver = highspy.Highs()
    solver.silent()
    # Presolve looks at the clock but not at callbacks.
    limit = {"time_limit": interrupt.seconds_left} if math.isfinite(interrupt.seconds_left) else {}
    for name, value in {"threads": 1, **limit, **(options or {})}.items():
        solver.setOptionValue(name, value)

    def stop(event: Any) -> None:
        if interrupt:
            event.interrupt()

    def report(event: Any) -> None:
        if tell is not None:
            tell(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)

    checks = 0

    def stop_tree(event: Any) -> None:
        nonlocal checks
        checks += 1
        if interrupt or checks > most_checks or event.data_out.mip_dual_bound > enough:
            event.interrupt()

    solver.cbMipInterrupt.subscribe(stop_tree)
    for signal in (solver.cbSimplexInterrupt, solver.cbIpmInterrupt):
        signal.subscribe(stop)
    for signal in (solver.cbMipImprovingSolution, solver.cbMipLogging) if tell is not None else ():
        signal.subscribe(report)
    solver.passModel(model.for_highs(highspy, relaxed=relaxed))
    if start:
        columns = np.array(list(start), np.int32)
        solver.setSolution(len(columns), columns, np.array(list(start.values())))
    if basis is not None:
        solver.setBasis(basis.for_highs(highspy))
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    optimal = status == highspy.HighsModelStatus.kOptimal
    if relaxed or not model.integer:
        bound = info.objective_function_value if optimal else -math.inf
    else:
        bound = info.mip_dual_bound
    known = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return Solved(
        status=solver.modelStatusToString(status),
        infeasible=status == highspy.HighsModelStatus.kInfeasible,
        optimal=optimal,
        bound=bound if math.isfinite(bound) else -math.inf,
        values=np.asarray(solver.getSolution().col_value) if known else None,
        checks=checks,
        basis=_basis_of(solver) if wants_basis else None,
    )


def _basis_of(solver: Any) -> Basis:
    found = solver.getBasis()
    return Basis(list(found.col_status), list(found.row_status))
