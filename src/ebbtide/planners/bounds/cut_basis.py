"""The optimal basis of a linear cut relaxation, and how the relaxation of a larger program begins with it.

A basis says of every column and row of a linear program whether it is basic or at which bound. Where one program stands
for another (``proxy``), each column and row of the large relaxation takes what its counterpart has in the small one.
Blocks being alike, that is optimal but for a few rows at the seams, and the simplex method ends after some tens of
iterations where it took half as many as there are rows. A basis proves nothing: the solver goes on from it to the same
optimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.planners.reductions.repeats import IsomorphicOps
from ebbtide.planners.solvers.highs import Basis

__all__ = ["CutBasis", "Names", "Start"]


@dataclass(frozen=True)
class Names:
    """Which columns and rows a relaxation with one cut has.

    Attributes:
        keep: per buffer that may be kept, its column.
        rerun: per op that may be rerun, its column.
        row: per row, by reader and buffer, its index; -1 stands for the first runs, and twice for the bytes.
    """

    keep: Mapping[int, int]
    rerun: Mapping[int, int]
    row: Mapping[tuple[int, int], int]


@dataclass(frozen=True)
class CutBasis:
    """That of a relaxation with one cut.

    Attributes:
        cut: its stage.
        names: its columns and rows.
        basis: of them.
    """

    cut: int
    names: Names
    basis: Basis


@dataclass(frozen=True)
class Start:
    """The basis of a program that stands for a large one, and who stands for whom."""

    small: CutBasis
    isomorphic: IsomorphicOps

    def carried(self, cut: int, names: Names) -> Basis | None:
        """A basis for the large program's relaxation; ``None`` if it has another cut.

        A column without a counterpart is at its lower bound, a row without one is loose. HiGHS mends a singular basis.
        """
        op, buffer, theirs, basis = self.isomorphic.op, self.isomorphic.buffer, self.small.names, self.small.basis
        if op[cut] != self.small.cut:
            return None
        columns: list[Any] = [None] * (len(names.keep) + len(names.rerun))
        for b, index in names.keep.items():
            if (counterpart := theirs.keep.get(buffer[b])) is not None:
                columns[index] = basis.columns[counterpart]
        for i, index in names.rerun.items():
            if (counterpart := theirs.rerun.get(op[i])) is not None:
                columns[index] = basis.columns[counterpart]
        rows: list[Any] = [None] * len(names.row)
        for (i, b), index in names.row.items():
            counterpart = theirs.row.get((op[i] if i >= 0 else i, buffer[b] if b >= 0 else b))
            if counterpart is not None:
                rows[index] = basis.rows[counterpart]
        return Basis(columns, rows)
