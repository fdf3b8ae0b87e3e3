"""Other programs for the same step, with the same bits: which of them is planned.

1. Where the captured program fits as it is, it is planned, and that is all.
2. Else the *free* ones, which take no time, are held against it: all are ranked by what a quick plan takes, and the
   first that can be planned in earnest is. If that adds no time, it is the plan.
3. The others are ranked likewise, by estimated costs. One that takes more unplanned than the best plan so far cannot
   win, and one whose floor is above the budget cannot fit. Of those that differ in the sizes of their slices alone, the
   last has the least floor; from there on they are made as long as they fit and take no more time than the one before,
   since each is a copy of a whole graph.
4. The best of them, with the free rewrites of what they leave, get their costs measured, and what they take for
   granted, and are planned in earnest: the best of each form first, since where the estimates of one form are wrong
   they are so for slices of any size. The plan of least predicted time wins.
5. All this is done with the *first* alternatives. The *further* ones are looked at, likewise, where these have given no
   plan, or a dear one: making and pricing them takes long before the first step, 40 CPU seconds for some hundred ops.
6. Plans of the same model at other shapes are *hints*: where one of a budget no tighter than this has rewritten
   something, alternatives of its forms are looked at before the others, which are not made where those give a plan of
   about as little overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ebbtide.errors import BudgetError
from ebbtide.planners.base import Problem
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.hybrid.floor import floor_with_tiers
from ebbtide.planners.registry import planner_named
from ebbtide.planners.search.smallest import note_alike
from ebbtide.report.plan import Plan
from ebbtide.step.machine import Link
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite, Rewritten
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_bytes

__all__ = [
    "Alternative",
    "Alternatives",
    "Costed",
    "Hints",
    "best_of",
    "lowest_of_each_kind",
    "plan_by",
    "sliced_alike",
]

_ENOUGH = 1e-3
"""Overhead of a plan of the captured program that leaves nothing to win."""
_DEAR = 0.5
"""Overhead from which on the further alternatives are looked at where there is a plan."""
_ABOUT = 0.02
"""How far a budget, as a share, or an overhead may be from another for definition 6."""
_AS_LITTLE = 1.1
"""Of another shape's overhead, what counts as about as little: costs measured twice differ by as much."""
_AS_LITTLE_QUICKLY = 1.5
"""The same where what is found quickly will do: looking at all alternatives takes as long as some dozen steps."""
_SIZES = frozenset({"rows", "columns"})
"""Settings of a rewrite that are sizes of its slices: the more of them there are, the less memory they take."""
_MOST_HINTS = 2
"""Rewrites of other shapes' plans that are tried as they are."""
_MOST_TRIED = 3
"""Alternatives that are planned in earnest and fit."""
_AS_GOOD = 0.01
"""Of the least budget that is known to work, what another program has to take off it by its floor to be asked."""
_MOST_REFUSED = 2
"""Alternatives of the least floors that are asked for the smallest budget, where none fits."""


@dataclass(frozen=True)
class Costed:
    """An alternative in earnest.

    Attributes:
        rewrites: from the captured program to it.
        program: it, with costs as good as the captured program's.
    """

    rewrites: tuple[Rewrite, ...]
    program: Program


@dataclass(frozen=True)
class Alternative:
    """One of them.

    Attributes:
        rewrites: from the captured program to it.
        make: gives it with estimated costs.
        costed: gives it in earnest, less what it can do without and does not hold; ``None`` where something that it
            takes for granted does not hold, or nobody knows.
        free: whether nothing in it takes time.
        refined: the same with free rewrites of what it leaves; empty where there are none.
        why_not: says why ``costed`` would give ``None``; empty where it would not.
        unknown: says what of it, free rewrites included, nobody knows and there is no room to find out.
    """

    rewrites: tuple[Rewrite, ...]
    make: Callable[[], Program] = field(repr=False)
    costed: Callable[[], Costed | None] = field(repr=False)
    free: bool = False
    refined: Callable[[], Sequence[Alternative]] = field(default=tuple, repr=False)
    why_not: Callable[[], str] = field(default=str, repr=False)
    unknown: Callable[[], str] = field(default=str, repr=False)

    @cached_property
    def estimated(self) -> Program:
        """What ``make`` gives."""
        return self.make()

    @property
    def forms(self) -> _Forms:
        """Its forms in their places, without the sizes of their slices and free rewrites besides."""
        return _forms_of(self.rewrites)


_Forms = frozenset[tuple[str, str, str]]


def _forms_of(rewrites: Iterable[Rewrite]) -> frozenset[tuple[str, str, str]]:
    """Their forms in their places, without the sizes of their slices."""
    return frozenset((one.rule, one.at, one.form) for one in rewrites)


@dataclass(frozen=True)
class Hints:
    """What other shapes' plans say about which alternatives to try (definition 6).

    Attributes:
        rewrites: of plans of the same model at other shapes.
        most_overhead: above which all alternatives are looked at after all.
    """

    rewrites: tuple[tuple[Rewrite, ...], ...] = ()
    most_overhead: float = -1.0

    @staticmethod
    def of(plans: Iterable[Plan], program: Program, above_budget_bytes: int, *, quick: bool = False) -> Hints:
        """What ``plans`` tell of a plan of ``program`` within a budget; ``quick`` where one found quickly will do."""
        share = above_budget_bytes / max(unplanned_bytes(program), 1)
        alike = [
            plan for plan in plans if plan.rewritten is not None and _share_of(plan, plan.rewritten) >= share - _ABOUT
        ]
        if not alike:
            return Hints()
        least = min(plan.overhead for plan in alike)
        rewrites = tuple(plan.rewritten.rewrites for plan in alike if plan.rewritten is not None)
        return Hints(rewrites, least * (_AS_LITTLE_QUICKLY if quick else _AS_LITTLE) + _ABOUT)

    @property
    def latest(self) -> list[tuple[Rewrite, ...]]:
        """The rewrites of the last plans, without those that are the same."""
        return list(dict.fromkeys(reversed(self.rewrites)))[:_MOST_HINTS]

    def has(self, each: Alternative) -> bool:
        """Whether one of the plans has rewritten what ``each`` does, free rewrites besides."""
        return any(each.forms and each.forms <= _forms_of(rewrites) for rewrites in self.rewrites)


class Alternatives(Iterable[Alternative]):
    """Those of one program, made when they are first looked at: where the program fits as it is, nobody does.

    Args:
        make: the first ones (definition 5).
        make_further: the further ones.
        named: the one of given rewrites, if there is such a one.
        among: says which there are.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Alternative]] = tuple,
        make_further: Callable[[], Iterable[Alternative]] = tuple,
        named: Callable[[tuple[Rewrite, ...]], Alternative | None] = lambda _: None,
        among: str = "",
    ) -> None:
        self._make, self._make_further = make, make_further
        self.named, self.among = named, among
        self.all_known = True  # no alternative was left out since nobody knows whether its facts hold

    @cached_property
    def first(self) -> list[Alternative]:
        """Alternatives that are tried first (definition 5)."""
        return list(self._make())

    @cached_property
    def further(self) -> list[Alternative]:
        """Alternatives that are tried if the first do not do (definition 5)."""
        return list(self._make_further())

    def __iter__(self) -> Iterator[Alternative]:
        """The further ones are not made before they are asked for."""
        yield from self.first
        yield from self.further


def plan_by(
    program: Program,
    alternatives: Alternatives,
    rewrites: tuple[Rewrite, ...],
    plan_one: Callable[[Program, Rewritten | None], Plan],
) -> Plan | None:
    """The plan by ``rewrites``, which are known to have given the best; ``None`` where there is none.

    Args:
        program: as captured, with costs.
        alternatives: of it.
        rewrites: none are the captured program.
        plan_one: plans one program; raises ``BudgetError``.
    """
    captured = Alternative((), lambda: program, lambda: Costed((), program), free=True)
    each = alternatives.named(rewrites) if rewrites else captured
    tries = _Tries(program, plan_one)
    return tries.best if each is not None and tries.plan(each) else None


def best_of(
    program: Program,
    alternatives: Alternatives,
    above_budget_bytes: int,
    plan_one: Callable[[Program, Rewritten | None], Plan],
    interrupted: Callable[[], bool] = lambda: False,
    links: Mapping[str, Link] | None = None,
    hints: Hints | None = None,
) -> Plan:
    """The best plan of any of the programs.

    Args:
        program: as captured, with costs.
        alternatives: of it.
        above_budget_bytes: what a plan may take above the step's start.
        plan_one: plans one program; raises ``BudgetError``.
        interrupted: whether a plan that is at hand is to do.
        links: to the tiers that plans may move buffers to.
        hints: what plans of the same model at other shapes tell.

    Raises:
        BudgetError: if none fits; it tells the least budget of all of them.
    """
    tries = _Tries(program, plan_one, above_budget_bytes, links)
    captured = Alternative((), lambda: program, lambda: Costed((), program), free=True)
    search = _Search(program, above_budget_bytes, links, interrupted, tries, hints or Hints())
    search.consider(lambda: alternatives.first, captured)
    if tries.best is None or (tries.best.overhead > _DEAR and not interrupted()):
        search.consider(lambda: alternatives.further, None)
    if tries.best is None:
        _try_the_smallest([captured, *alternatives], tries)
    alternatives.all_known = tries.all_known
    if tries.best is not None:
        return tries.best
    if captured.rewrites not in tries.tried:
        tries.plan(captured)
    least = tries.least_refusal()
    try:
        raise least
    finally:
        del least  # its traceback holds this frame, and those around it hold the arguments of a call


def _share_of(plan: Plan, rewritten: Rewritten) -> float:
    """What a plan may take above the step's start, of what the captured step takes unplanned."""
    return (plan.budget_bytes - plan.resident_bytes - plan.reserve_bytes) / max(rewritten.above_bytes, 1)


@dataclass(frozen=True)
class _Search:
    """The search among alternatives (definitions 1 to 4); the arguments are those of :func:`best_of`."""

    program: Program
    above_budget_bytes: int
    links: Mapping[str, Link] | None
    interrupted: Callable[[], bool]
    tries: _Tries
    hints: Hints

    def consider(self, alternatives: Callable[[], Sequence[Alternative]], captured: Alternative | None) -> None:
        """At alternatives, and at the captured program beside them unless that has been tried.

        Args:
            alternatives: gives them; not called where nobody has to look.
            captured: the captured program.
        """
        if captured is not None and unplanned_bytes(self.program) <= self.above_budget_bytes:
            free = [captured]
        else:
            free = [*(each for each in alternatives() if each.free), *([] if captured is None else [captured])]
        for each in free if len(free) == 1 else self._ranked(free):
            if self.tries.plan(each):
                break
        if not self._is_enough():
            others = [each for each in alternatives() if not each.free]
            self._look_at_others([each for each in others if self.hints.has(each)])
            if not self._is_as_hinted():
                self._look_at_others(others)

    def _look_at_others(self, others: Sequence[Alternative]) -> None:
        tried = 0
        for each in _of_each_form(self._ranked([*_worth_a_rank(others, self.above_budget_bytes, self.links)])):
            if self.tries.best is not None and each.estimated.seconds >= self.tries.best.step_seconds:
                continue
            tried += any(map(self.tries.plan, self._with_free(each)))
            if tried == _MOST_TRIED or (self.tries.best is not None and self.interrupted()):
                break

    def _is_enough(self) -> bool:
        best = self.tries.best
        return best is not None and (best.overhead <= _ENOUGH or self.interrupted())

    def _is_as_hinted(self) -> bool:
        best = self.tries.best
        return best is not None and best.overhead <= self.hints.most_overhead

    def _with_free(self, each: Alternative) -> Sequence[Alternative]:
        """``each`` with free rewrites besides, the best first; as it is where there are none."""
        refined = each.refined()
        return self._ranked(refined) if refined else [each]

    def _ranked(self, alternatives: Sequence[Alternative]) -> list[Alternative]:
        return _ranked(self.program, alternatives, self.above_budget_bytes, self.links)


def _of_each_form(ranked: Sequence[Alternative]) -> list[Alternative]:
    """Those first of which none before them has the same forms in the same places; then the second of each."""
    seen: dict[_Forms, int] = {}
    rounds: list[tuple[int, int, Alternative]] = []
    for position, each in enumerate(ranked):
        form = each.forms
        seen[form] = seen.get(form, -1) + 1
        rounds.append((seen[form], position, each))
    return [each for _, _, each in sorted(rounds, key=lambda entry: entry[:2])]


def sliced_alike(rewrites: Iterable[Rewrite]) -> object:
    """What rewrites have in common that differ in the sizes of their slices alone."""
    return frozenset(
        (one.rule, one.at, one.form, *(each for each in one.settings if each[0] not in _SIZES)) for one in rewrites
    )


def _by_kind(alternatives: Iterable[Alternative]) -> list[list[Alternative]]:
    """Those that are sliced alike together; the last of each has the least floor."""
    found: dict[object, list[Alternative]] = {}
    for each in alternatives:
        found.setdefault(sliced_alike(each.rewrites), []).append(each)
    return [*found.values()]


def lowest_of_each_kind(alternatives: Iterable[Alternative]) -> list[Alternative]:
    """Of those that are sliced alike, the one of the least floor."""
    return [alike[-1] for alike in _by_kind(alternatives)]


def _worth_a_rank(
    alternatives: Iterable[Alternative], above_budget_bytes: int, links: Mapping[str, Link] | None
) -> Iterator[Alternative]:
    """Those of definition 3; in the place of one that does not fit, itself with free rewrites besides."""
    for alike in _by_kind(alternatives):
        least = float("inf")
        for each in reversed(alike):
            ones = [each] if _floor(each.estimated, links) <= above_budget_bytes else each.refined()
            fitting = [one for one in ones if _floor(one.estimated, links) <= above_budget_bytes]
            if not fitting or _rounded(each.estimated.seconds) > least:
                break
            least = _rounded(each.estimated.seconds)
            yield from fitting


class _Tries:
    """Plans in earnest, and what refused to be one.

    Args:
        program: as captured, with costs.
        plan_one: as for :func:`best_of`.
        above_budget_bytes: likewise. Programs whose floor is above are planned only to say what they need.
        links: likewise.
    """

    def __init__(
        self,
        program: Program,
        plan_one: Callable[[Program, Rewritten | None], Plan],
        above_budget_bytes: float = float("inf"),
        links: Mapping[str, Link] | None = None,
    ) -> None:
        self.program = program
        self._above_budget_bytes, self._links = above_budget_bytes, links
        self._beyond: list[tuple[int, int, Program, Rewritten | None]] = []  # floor, and a number that tells them apart
        self.best: Plan | None = None
        self._refusals: list[BudgetError] = []
        self.tried: set[tuple[Rewrite, ...]] = set()
        self.all_known = True
        self._plan_one = plan_one
        self._programs: list[Program] = []
        self._captured = (program.seconds, unplanned_bytes(program))

    def plan(self, each: Alternative) -> bool:
        """Whether there is a plan of it; the best one so far is kept."""
        if (costed := each.costed()) is None:
            self.all_known = self.all_known and not each.unknown()
            return False
        if costed.rewrites in self.tried:
            return False
        self.tried.add(costed.rewrites)
        rewritten = Rewritten(costed.rewrites, *self._captured) if costed.rewrites else None
        candidate = _surrounded(costed.program, self.program)
        note_alike(candidate, self._programs)
        self._programs.append(candidate)
        if (floor := _floor(candidate, self._links)) > self._above_budget_bytes:
            self._beyond.append((floor, len(self._beyond), candidate, rewritten))
            return False
        return self._plan(candidate, rewritten)

    @property
    def count_refused(self) -> int:
        """How many have no plan."""
        return len(self._refusals) + len(self._beyond)

    def least_refusal(self) -> BudgetError:
        """Of all refusals, the one that names the least budget; a program whose floor is not much less is not asked."""
        for floor, _, candidate, rewritten in sorted(self._beyond, key=lambda each: each[:2]):
            known = min((each.smallest_bytes or 0 for each in self._refusals), default=None)
            budget = next((each.budget_bytes or 0 for each in self._refusals), 0)
            if known is None or budget + floor - self._above_budget_bytes < (1.0 - _AS_GOOD) * known:
                self._plan(candidate, rewritten)
        refusals, self._refusals = self._refusals, []
        return min(refusals, key=lambda each: each.smallest_bytes or 0)

    def _plan(self, candidate: Program, rewritten: Rewritten | None) -> bool:
        try:
            plan = self._plan_one(candidate, rewritten)
        except BudgetError as error:
            self._refusals.append(error.with_traceback(None))  # whose frames hold this object
            return False
        if self.best is None or plan.step_seconds < self.best.step_seconds:
            self.best = plan
        return True


def _try_the_smallest(alternatives: Sequence[Alternative], tries: _Tries) -> None:
    """A plan of one of the least floors after all, for these are estimates; or let them say what they would need."""
    refused = tries.count_refused
    lowest = lowest_of_each_kind(alternatives)
    refined = [one for each in lowest for one in each.refined()]
    for each in _by_floor([*lowest, *refined]):
        if each.why_not():  # what is not known to hold here refuses nothing
            continue
        if tries.count_refused - refused >= _MOST_REFUSED or tries.plan(each):
            return


def _by_floor(alternatives: Iterable[Alternative]) -> list[Alternative]:
    return sorted(alternatives, key=lambda each: floor_bytes(each.estimated)[0])


def _surrounded(candidate: Program, program: Program) -> Program:
    """``candidate`` with what user code takes around the graphs of ``program``."""
    return replace(candidate, between_bytes=program.between_bytes, held_bytes=program.held_bytes)


def _floor(program: Program, links: Mapping[str, Link] | None) -> int:
    return (floor_with_tiers(program, links) if links else floor_bytes(program))[0]


def _rounded(seconds: float) -> float:
    """Sums in another order differ in their last digits."""
    return float(f"{seconds:.9g}")


def _ranked(
    program: Program,
    alternatives: Sequence[Alternative],
    above_budget_bytes: int,
    links: Mapping[str, Link] | None = None,
) -> list[Alternative]:
    """Rank alternatives (definition 3), the best first; one that fits only by moving buffers by its time unplanned."""
    greedy = planner_named("greedy")
    ranked: list[tuple[float, int, Alternative]] = []
    best = float("inf")
    # Of what takes the same, that of the least floor comes first.
    candidates = [
        (_rounded(each.estimated.seconds), _floor(each.estimated, links), index)
        for index, each in enumerate(alternatives)
    ]
    for position, (unplanned, floor, index) in enumerate(sorted(candidates)):
        each = alternatives[index]
        candidate = _surrounded(each.estimated, program)
        if unplanned >= best and len(ranked) >= _MOST_TRIED:
            break
        if floor > above_budget_bytes:
            continue
        answer = greedy(Problem(program=candidate, above_budget_bytes=above_budget_bytes, effort=1, seed=0))
        if answer.schedule is None:
            ranked.append((float("inf"), position, each))
            continue
        seconds = simulate(candidate, answer.schedule).seconds
        best = min(best, seconds)
        ranked.append((seconds, position, each))
    return [each for _, _, each in sorted(ranked, key=lambda entry: entry[:2])]
