"""A step in pieces as one program with its gaps, and a plan of it whose schedule can be cut back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.pieces import piece_of
from ebbtide.engine.traced_pieces import Order, RanPiece
from ebbtide.errors import BudgetError
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.asked import Asked
from ebbtide.planning.pieces import schedule_at_home
from ebbtide.planning.pipeline import make_plan
from ebbtide.planning.refusals import budget_error
from ebbtide.planning.step_end import SCALARS_BYTES
from ebbtide.report.plan import Plan
from ebbtide.step.pieces import Input, Occurrence, Output, Piece, Stitched, stitch
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.units import Budget

__all__ = ["GAP", "plan_at_home", "stitched_order"]

GAP = "ebbtide.gap"
"""Target of what runs between two pieces."""


def stitched_order(name: str, order: Order) -> tuple[Stitched, list[int]]:
    """The step as one program, and the numbers of its occurrences among those of gaps; -1 for what is silent."""
    occurrences: list[Occurrence] = []
    numbers: list[int] = []
    pieces: dict[tuple[int, tuple[int, ...]], Piece] = {}
    gaps: dict[int, int] = {}
    for index, each in enumerate(order.occurrences):
        if index in order.silent:
            numbers.append(-1)
            continue
        if (gap := _gap(order, index, numbers)) is not None:
            gaps[index] = len(occurrences)
            occurrences.append(gap)
        captured = replace(each.piece.captured, program=each.piece.program)
        through = sorted(each.through)
        given = [None if source is None or source[0] in order.silent else source for source in each.sources]
        direct = {position for position, source in enumerate(given) if source is not None}
        shared = {position: source for position, source in each.shared.items() if source[0] not in order.silent}
        positions = sorted(direct.union(through, shared))
        key = (id(each.piece), tuple(positions))
        piece = pieces.setdefault(key, piece_of(captured, positions))
        sources: list[tuple[int, int] | None] = []
        for position in positions:
            if position in each.through:
                sources.append((gaps[index], through.index(position)))
            elif position in shared:
                first, there = shared[position]
                sources.append((gaps[first], sorted(order.occurrences[first].through).index(there)))
            elif (source := given[position]) is not None:
                sources.append((numbers[source[0]], source[1]))
        numbers.append(len(occurrences))
        occurrences.append(Occurrence(piece, tuple(sources), _weights(captured, piece, positions)))
    stitched = stitch(name, occurrences)
    window, program = order.forward_gap(len(numbers)), stitched.program
    held = window.left_bytes - sum(each.bytes for each in program.buffers if each.producer is None)
    program = replace(program, between_bytes=max(window.own_peak_bytes, 0), held_bytes=held)
    return replace(stitched, program=program), numbers


def plan_at_home(stitched: Stitched, asked: Asked, least: Schedule) -> Plan:
    """A plan whose reruns are at home; ``least`` is one that is, to be run where none of the planner's fits.

    Raises:
        BudgetError: if there is none within the budget, with the smallest that has one.
    """
    program, held = stitched.program, asked.held_bytes
    limit = asked.budget_bytes(program)
    made: list[Plan] = []

    def answer(above_bytes: int) -> Schedule | None:
        budget = Budget(bytes=max(above_bytes, 0) + held)
        try:
            plan = make_plan(
                program,
                budget,
                resident_bytes=asked.resident_bytes,
                reserve_bytes=asked.reserve_bytes,
                options=asked.options,
            )
        except BudgetError as error:
            smallest.append(error.smallest_bytes)
            return None
        made.append(plan)
        return plan.schedule

    def at_home(above_bytes: int) -> Schedule | None:
        found = schedule_at_home(stitched, above_bytes, answer)
        return least if found is None and needed <= above_bytes else found

    needed, smallest = simulate(program, least).above_bytes, list[int]()
    home = at_home(limit - held)
    if home is None:
        named = max(smallest[0] if smallest else 0, limit + 1)
        if at_home(named - held) is None:
            named = held + needed
        floor, op = floor_bytes(program)
        raise budget_error(
            asked,
            program,
            floor=(held + floor, op),
            smallest=named,
            unplanned=asked.resident_bytes + unplanned_bytes(program),
            interrupted=False,
        )
    if not made:
        answer(needed)
    return replace(made[-1], schedule=home, budget_bytes=limit)


def _gap(order: Order, index: int, numbers: Sequence[int]) -> Occurrence | None:
    """The code before an occurrence as a piece of one op each way; ``None`` where it takes nothing."""
    through = order.occurrences[index].through
    before, back = order.forward_gap(index), order.backward_gap(index).own_peak_bytes
    peak = before.own_peak_bytes
    died = order.occurrences[index].died
    if not through and not died and max(peak, back) <= SCALARS_BYTES:
        return None
    given = [through[position] for position in sorted(through)]
    rest = max(before.own_left_bytes - sum(given), 0)
    taken: list[tuple[int, int, int]] = []
    for giver in (each for each in order.trains if each < index):
        each = order.occurrences[giver]
        for output, bytes_ in enumerate(_tangents_of(each)):
            reached = bytes_ and output not in each.used and _next_gap(order, giver) == index
            if reached or (giver, output) in died:
                taken.append((giver, output, bytes_))
    sizes = [bytes_ for _, _, bytes_ in taken if bytes_]
    buffers = [Buffer(f"gap{index}.given{i}", size, 0) for i, size in enumerate((*given, rest))]
    tangents = tuple(range(len(buffers), len(buffers) + len(given)))
    buffers += [Buffer(f"gap{index}.tangent{i}", size, None) for i, size in enumerate(given)]
    gradients = tuple(range(len(buffers), len(buffers) + len(sizes)))
    buffers += [Buffer(f"gap{index}.gradient{i}", size, 1) for i, size in enumerate((*sizes, 0))]
    kept = tuple(range(len(given) + 1))
    forward, backward = max(peak - sum(given) - rest, 0), max(back - sum(sizes), 0)
    ops = (
        Op(f"gap{index}", GAP, (), kept, workspace_bytes=forward, rerunnable=False),
        Op(
            f"gap{index}.backward",
            GAP,
            (len(given), *tangents),
            (*gradients, len(buffers) - 1),
            workspace_bytes=backward,
            rerunnable=False,
        ),
    )
    program = Program(f"gap{index}", ops, tuple(buffers), 1, forward_outputs=kept, gradients=gradients)
    given_back = iter(gradients)
    piece = Piece(
        program,
        tuple(Input((0,), next(given_back) if bytes_ else None) for _, _, bytes_ in taken),
        tuple(Output(given, tangent) for given, tangent in enumerate(tangents)),
    )
    return Occurrence(piece, tuple((numbers[giver], output) for giver, output, _ in taken))


def _weights(captured: Captured, piece: Piece, given: Sequence[int]) -> tuple[str, ...]:
    """Names of the parameters whose gradients a piece's ``weights`` are."""
    names: dict[int, str] = {}
    for position, node in enumerate(captured.outputs[captured.forward_output_count :]):
        buffer = captured.buffer_of.get(node) if isinstance(node, fx.Node) else None
        if buffer is not None and position not in given:
            names.setdefault(buffer, captured.parameters[position] or f"{id(captured)}.{position}")
    return tuple(names.get(each, "") for each in piece.weights)


def _tangents_of(occurrence: RanPiece) -> list[int]:
    """Per output the bytes of its gradient; 0 for one that takes none."""
    piece = piece_of(occurrence.piece.captured, ())
    buffers = piece.program.buffers
    return [0 if each.tangent is None else buffers[each.tangent].bytes for each in piece.outputs]


def _next_gap(order: Order, giver: int) -> int:
    """The occurrence before which the gap is that takes what ``giver`` gives to none; -1 if there is none."""
    after = (index for index in order.trains if index > giver)
    return next((index for index in after if order.occurrences[index].through), -1)
