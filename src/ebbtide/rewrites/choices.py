"""All rewrites of a captured step, as alternatives to its program, and the step with the ones that were chosen.

Rules compose: an alternative is one candidate of each of some rules (``rewrites.rule``). How many there are is the sum
of the rules' candidates and no product: those of free rules are tried alone, and with the best ones of the others; of
the others, the last candidates of later rules, which lower most, come with the last one of each kind of an earlier
rule, each and all of them.

Some rules are *further* ones: candidates of theirs are looked at only where those of the others do not do
(``planning.alternatives``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import starmap

from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured
from ebbtide.cost.attach import is_measured, with_measured_costs
from ebbtide.errors import CaptureError
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planning.alternatives import Alternative, Alternatives, Costed, sliced_alike
from ebbtide.rewrites.facts import Fact, measured
from ebbtide.rewrites.replaced import Replaced
from ebbtide.rewrites.rule import Estimate, Rule
from ebbtide.rewrites.rules import RULES
from ebbtide.step.program import Op, Program
from ebbtide.step.rewrite import Rewrite

__all__ = [
    "UNKNOWN",
    "Choice",
    "Finish",
    "alternatives_of",
    "apply_held",
    "apply_proven",
    "choice_of",
    "itself",
    "left_of",
    "may_be_rewritten",
    "measure_ahead",
]

UNKNOWN = "no room here to find out whether that has the bits of the whole; ebbtide calibrate CASE finds out ahead"
"""Why a rewrite is not used of which something is not known."""
NOT_HERE = "not the bits of the whole here"
"""Why one is not used of which something does not hold."""

Finish = Callable[[Captured], Captured]
"""What is done to a step after its rewrites (``inside``)."""


def itself(captured: Captured) -> Captured:
    """Nothing is done."""
    return captured


def apply_proven(captured: Captured, rewrites: Sequence[Rewrite]) -> tuple[Captured, list[Replaced]]:
    """``captured`` with all of ``rewrites`` in it, and what their ops stand for; each rule proves its part.

    Raises:
        RewriteError: if it is not.
    """
    choice = Choice(captured, tuple(rewrites))
    replaced = [one for each in choice.stages for one in each.rule.prove(each.before, each.after)]
    return choice.captured, replaced


def apply_held(captured: Captured, rewrites: Sequence[Rewrite], device: str) -> Captured:
    """``captured`` with all of ``rewrites`` in it, whose facts are known to hold on ``device`` there too.

    Raises:
        RewriteError: if they are not, or the step has not what they replace.
    """
    choice = Choice(captured, tuple(rewrites))
    try:
        if missing := choice.not_held(device):
            raise RewriteError(missing)
        return apply_proven(captured, rewrites)[0]
    except LookupError as error:
        raise RewriteError(f"the step is another one: {error}") from error


@dataclass(frozen=True)
class _Stage:
    """One rule's part of a choice."""

    rule: Rule
    before: Captured
    rewrites: tuple[Rewrite, ...]

    @cached_property
    def after(self) -> Captured:
        return self.rule.rewritten(self.before, self.rewrites)


@dataclass(frozen=True)
class Choice:
    """One candidate of each of some rules.

    Attributes:
        source: the step as captured.
        rewrites: in the order in which rules are applied.
        known: the stages of the first rules, where they are at hand.
        finish: gives the step that runs for the one with the rewrites in it.
    """

    source: Captured
    rewrites: tuple[Rewrite, ...]
    known: tuple[_Stage, ...] = ()
    finish: Finish = field(default=itself, compare=False)

    @cached_property
    def stages(self) -> tuple[_Stage, ...]:
        """What each rule does, one after the other."""
        stages = [*self.known]
        done = {each.rule.name for each in stages}
        for rule in RULES:
            own = tuple(each for each in self.rewrites if each.rule == rule.name)
            if own and rule.name not in done:
                stages.append(_Stage(rule, stages[-1].after if stages else self.source, own))
        if sum(len(each.rewrites) for each in stages) != len(self.rewrites):
            names = sorted({each.rule for each in self.rewrites} - {rule.name for rule in RULES})
            raise LookupError(f"no rule of these names is known here: {', '.join(names)}")
        return tuple(stages)

    @property
    def rewritten(self) -> Captured:
        """The step with the rewrites in it."""
        return self.stages[-1].after if self.stages else self.source

    @cached_property
    def captured(self) -> Captured:
        """The step with the rewrites in it, finished."""
        return self.finish(self.rewritten)

    def with_rewrites(self, rule: Rule, rewrites: Sequence[Rewrite]) -> Choice:
        """It with a candidate of one rule more, which comes after all of these."""
        return Choice(self.source, (*self.rewrites, *rewrites), self.stages, self.finish)

    def _missing(self, device: str) -> Iterator[tuple[Fact, bool | None]]:
        """The first fact of each rewrite that does not hold on ``device``, or of which nobody knows.

        Raises:
            LookupError: if the step has not what the rewrites replace.
        """
        found = (_missing(stage, each, device) for stage in self.stages for each in stage.rewrites)
        return (each for each in found if each is not None)

    def not_held(self, device: str) -> str:
        """The first fact that does not hold on ``device``, or of which nobody knows; empty if all hold."""
        return next((fact.says for fact, _ in self._missing(device)), "")

    def why_not(self, device: str) -> str:
        """Why no plan on ``device`` may use it, in words; empty where one may."""
        return "" if self.holding(device) else next(starmap(_why, self._missing(device)), "")

    def unknown(self, device: str) -> str:
        """A fact of it of which nobody knows on ``device``, in words; empty if there is none."""
        return next((_why(fact, held) for fact, held in self._missing(device) if held is None), "")

    def holding(self, device: str) -> Choice | None:
        """It, of rewrites whose facts hold.

        Of free rules, others are left out; of the rest, what the rule has instead takes their place. ``None`` where
        there is nothing.
        """
        known: list[_Stage] = []
        for stage in self.stages:
            before = known[-1].after if known else self.source
            at = stage if before is stage.before else _Stage(stage.rule, before, stage.rewrites)
            kept = tuple(filter(None, (_fitting(at, each, device) for each in at.rewrites)))
            if kept == at.rewrites:
                known.append(at)
            elif len(kept) < len(at.rewrites) and not at.rule.free:
                return None
            elif kept:
                known.append(_Stage(at.rule, before, kept))
        if not known:
            return None
        rewrites = tuple(each for stage in known for each in stage.rewrites)
        return Choice(self.source, rewrites, tuple(known), self.finish)

    def estimated(self, program: Program, alike: Choice | None = None) -> Program:
        """The program with the costs of ``program``, as captured, where an op is in both, else estimated ones.

        Args:
            program: as captured, with costs.
            alike: a choice of the same ops and buffers, whose graph is at hand: no other is written then.
        """
        alike = alike or self
        priced, _ = self._estimates(program, alike)
        return priced(alike.captured.program)

    def _estimates(self, program: Program, alike: Choice) -> tuple[Callable[[Program], Program], dict[str, Estimate]]:
        """What puts the costs of :meth:`estimated` on a program, and what was estimated by the names of ops."""
        known = {op.signature: (op.seconds, op.workspace_bytes) for op in program.ops}
        own: dict[str, Estimate] = {}

        def priced(ours: Program) -> Program:
            estimates = {name: (each.seconds, each.workspace_bytes) for name, each in own.items()}
            costs = [estimates.get(op.name) or known.get(op.signature) or (0.0, 0) for op in ours.ops]
            return ours.with_costs([each for each, _ in costs], [each for _, each in costs])

        for stage in alike.stages:
            rewrites = tuple(each for each in self.rewrites if each.rule == stage.rule.name)
            own |= stage.rule.estimates(stage.before, rewrites, priced(stage.before.program), stage.after)
        return priced, own

    def costed(self, device: str, program: Program) -> Costed | None:
        """With costs as measured on ``device``; ``None`` if not all facts are known to hold there.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            program: as captured and finished, with costs, from which those of ops are estimated that had no room to be
                measured.
        """
        holding = self.holding(device)
        return None if holding is None else holding._measured(device, program)

    def _measured(self, device: str, program: Program) -> Costed | None:
        try:
            measured = with_measured_costs(self.captured.program, self.captured.calls, device)
        except CaptureError:  # a profiler runs, ours or somebody's: what is new cannot be measured now
            return None
        _, estimates = self._estimates(program, self)

        def priced(op: Op, *, known: bool) -> Op:
            if (estimate := estimates.get(op.name)) is None:
                return op
            if not known:
                return replace(op, workspace_bytes=estimate.workspace_bytes, seconds=estimate.seconds)
            needs = estimate.workspace_bytes if estimate.at_least else 0
            return replace(op, workspace_bytes=max(op.workspace_bytes, needs))

        calls = (is_measured(call, device) for call in self.captured.calls)
        ops = tuple(priced(op, known=known) for op, known in zip(measured.ops, calls, strict=True))
        return Costed(self.rewrites, replace(measured, ops=ops))

    def assumed(self, program: Program) -> Costed:
        """With estimated costs, for a machine that is not at hand."""
        return Costed(self.rewrites, self.estimated(program))


def _why(fact: Fact, held: bool | None) -> str:
    return f"{fact.says}: {UNKNOWN if held is None else NOT_HERE}"


def _missing(stage: _Stage, rewrite: Rewrite, device: str) -> tuple[Fact, bool | None] | None:
    """The first fact of ``rewrite`` that does not hold, or of which nobody knows; ``None`` if all hold."""
    for fact in stage.rule.facts(stage.before, rewrite):
        if not (held := measured([fact], device)[fact.signature]):
            return fact, held
    return None


def _fitting(stage: _Stage, rewrite: Rewrite, device: str) -> Rewrite | None:
    """``rewrite``, or the first that the rule has instead, of which all facts hold; ``None`` if there is none."""
    for each in _with_others(stage, rewrite):
        found = _missing(stage, each, device)
        if found is None:
            return each
        if found[1] is None:  # nobody knows, and others would take no less to find out
            return None
    return None


def _with_others(stage: _Stage, rewrite: Rewrite) -> Iterator[Rewrite]:
    yield rewrite
    yield from stage.rule.instead(stage.before, rewrite)


def choice_of(captured: Captured, rewrites: Sequence[Rewrite], finish: Finish = itself) -> Choice:
    """The choice that ``rewrites`` are; ``finish`` is done to the step then.

    Raises:
        LookupError: if the step has not what they replace.
    """
    choice = Choice(captured, tuple(rewrites), finish=finish)
    for stage in choice.stages:
        for each in stage.rewrites:
            stage.rule.facts(stage.before, each)
    return choice


def alternatives_of(
    captured: Captured,
    program: Program,
    device: str | None,
    *,
    rules: Collection[str],
    first: Collection[str] | None = None,
    retained: bool = False,
    finish: Finish = itself,
) -> Alternatives:
    """Alternatives, whose costs and facts are measured before they are planned in earnest.

    Args:
        captured: the step.
        program: its program with costs, finished.
        device: ``"cpu"`` or ``"cuda"``; ``None`` for a machine that is not at hand, where costs are estimates and facts
            are assumed.
        rules: names of those that are used.
        first: of these, those that are no further ones; all if ``None``.
        retained: whether its backwards retain their graph: then nothing that they keep may be written over.
        finish: done to the step after its rewrites.
    """
    candidates = _Candidates(captured, finish)
    estimates: dict[tuple[Rewrite, ...], Callable[[], Program]] = {}
    writing = {(rule.name, form) for rule in RULES for form in rule.writes}

    def made(choice: Choice, rules: Collection[str]) -> Alternative:
        estimated = estimates.setdefault(
            choice.rewrites, cache(lambda: choice.estimated(program, candidates.alike(choice)))
        )
        free = [stage.rule.free for stage in choice.stages]
        refined = tuple if any(free) else partial(with_free_ones, choice, rules)
        if device is None:
            costed = partial(choice.assumed, program)
            return Alternative(choice.rewrites, estimated, costed, free=all(free), refined=refined)
        return Alternative(
            choice.rewrites,
            estimated,
            partial(choice.costed, device, program),
            free=all(free),
            refined=refined,
            why_not=partial(choice.why_not, device),
            unknown=partial(choice.unknown, device),
        )

    def with_free_ones(choice: Choice, rules: Collection[str]) -> list[Alternative]:
        return [made(each, rules) for each in candidates.with_free_candidates(choice, rules)]

    def by(rules: Collection[str]) -> Iterator[Alternative]:
        """Free candidates first; then every one of each other rule, to be had with the free ones of what it leaves."""
        for choice in candidates.choices(rules):
            if not (retained and any((each.rule, each.form) in writing for each in choice.rewrites)):
                yield made(choice, rules)

    def named(rewrites: tuple[Rewrite, ...]) -> Alternative | None:
        try:
            choice = choice_of(captured, rewrites, finish)
        except (LookupError, RewriteError):
            return None
        allowed = all(each.rule in rules and not (retained and (each.rule, each.form) in writing) for each in rewrites)
        return made(choice, rules) if allowed else None

    among = repr((sorted(rules), sorted(rules if first is None else first), device, retained))
    if first is None or set(first) == set(rules):
        return Alternatives(lambda: by(rules), named=named, among=among)
    return Alternatives(lambda: by(first), lambda: by(rules), named, among)


def may_be_rewritten(captured: Captured, rules: Collection[str]) -> bool:
    """Whether the budget may be below what any plan as captured needs, by rules of these names."""
    used = [rule for rule in RULES if rule.name in rules]
    if any(next(rule.candidates(captured), ()) for rule in used if not rule.free):
        return True
    free = [rule for rule in used if rule.free]
    return bool(free) and any(rule.may_lower(captured, floor_bytes(captured.program)[1]) for rule in free)


def left_of(captured: Captured, rules: Collection[str]) -> list[tuple[str, str]]:
    """Where something looks as if it could be rewritten by rules of these names, and why it is left."""
    return [(each.source, each.why) for rule in RULES if rule.name in rules for each in rule.skipped(captured)]


def measure_ahead(captured: Captured, device: str, rules: Collection[str]) -> Iterator[tuple[str, bool | None]]:
    """All facts that rewrites of ``captured`` rest on, in words, and whether they hold; those are kept for later."""
    seen: set[str] = set()
    costly = [rule.name for rule in RULES if rule.name in rules and not rule.free]  # the others take little to find out

    def of(stage: _Stage, rewrite: Rewrite) -> Iterator[tuple[str, bool | None]]:
        """Facts of ``rewrite``, and of what stands for it, up to the first that decides whether it is used."""
        for each in _with_others(stage, rewrite):
            held: bool | None = True
            for fact in stage.rule.facts(stage.before, each):
                held = measured([fact], device)[fact.signature]
                if fact.signature not in seen:
                    seen.add(fact.signature)
                    yield f"{each.where or each.at}: {fact.says}", held
                if not held:
                    break
            if held is not False:
                return

    for choice in _Candidates(captured, itself).choices(costly):
        for stage in choice.stages:
            for each in stage.rewrites:
                yield from of(stage, each)


class _Candidates:
    """All choices of one step; each is made once, however often it is asked for.

    Args:
        captured: the step.
        finish: of each choice.
    """

    def __init__(self, captured: Captured, finish: Finish) -> None:
        self._nothing = Choice(captured, (), finish=finish)
        self._choices: dict[tuple[Rewrite, ...], Choice] = {}
        self._shapes: dict[object, Choice] = {}
        self._combinations: dict[tuple[str, tuple[Rewrite, ...]], list[tuple[Rewrite, ...]]] = {}

    def choices(self, rules: Collection[str]) -> Iterator[Choice]:
        """Free candidates first, alone; then every one of each other rule, alone and with what comes later."""
        yield from self.with_free_candidates(self._nothing, rules)
        others = [rule for rule in RULES if rule.name in rules and not rule.free]
        for index, rule in enumerate(others):
            candidates = self._of(rule, self._nothing)
            last = {sliced_alike(candidate): candidate for candidate in candidates}
            for candidate in candidates:
                choice = self._with(self._nothing, rule, candidate)
                yield choice
                if last[sliced_alike(candidate)] == candidate:
                    yield from self._with_later(choice, others[index + 1 :])

    def alike(self, choice: Choice) -> Choice:
        """The first choice that was asked for with the same ops and buffers (``Rule.shape``)."""
        rules = {rule.name: rule for rule in RULES}
        shape = tuple((each.rule, rules[each.rule].shape(choice.source, each)) for each in choice.rewrites)
        return self._shapes.setdefault(shape, choice)

    def with_free_candidates(self, choice: Choice, rules: Collection[str]) -> Iterator[Choice]:
        """``choice`` with each candidate of each free rule."""
        for rule in RULES:
            if rule.free and rule.name in rules:
                for candidate in self._of(rule, choice):
                    yield self._with(choice, rule, candidate)

    def _with_later(self, choice: Choice, later: Sequence[Rule]) -> Iterator[Choice]:
        """``choice`` with the last candidate of each of ``later``, and of all of them together."""
        together, count = choice, 0
        for rule in later:
            if candidates := self._of(rule, choice):
                yield self._with(choice, rule, candidates[-1])
            if candidates := self._of(rule, together):
                together, count = self._with(together, rule, candidates[-1]), count + 1
        if count > 1:
            yield together

    def _of(self, rule: Rule, choice: Choice) -> list[tuple[Rewrite, ...]]:
        key = rule.name, choice.rewrites
        if key not in self._combinations:
            self._combinations[key] = list(rule.candidates(choice.rewritten))
        return self._combinations[key]

    def _with(self, choice: Choice, rule: Rule, candidate: tuple[Rewrite, ...]) -> Choice:
        made = choice.with_rewrites(rule, candidate)
        return self._choices.setdefault(made.rewrites, made)
