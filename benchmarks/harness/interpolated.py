"""Steps between two captures of a model, which cost no capture of their own.

Sizes of a step are affine in its batch where its ops are the same at every batch, and its seconds nearly so. So are the
programs of its alternatives, of which the coarsest slices of a form are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ebbtide._api.estimate import AheadStep
from ebbtide.planning.alternatives import Alternative, Alternatives, Costed
from ebbtide.step.program import Program

__all__ = ["interpolated"]


def interpolated(
    small: AheadStep, large: AheadStep, batches: tuple[int, int] = (2, 4)
) -> Callable[[int], AheadStep] | None:
    """The step at any batch from those at two ``batches``; ``None`` if their ops differ."""
    (low, high) = batches
    program_at = _programs(small.program, large.program, batches)
    if program_at is None:
        return None
    others = _alternatives(small.alternatives or (), large.alternatives or (), batches)
    first = {_kinds(each) for each in (small.alternatives.first if small.alternatives else ())}

    def at(batch: int) -> AheadStep:
        resident = round(_between(small.resident_bytes, large.resident_bytes, (batch - low) / (high - low)))
        found = [
            replace(each, make=partial(_itself, made), costed=partial(Costed, each.rewrites, made), refined=tuple)
            for each, other_at in others
            for made in (other_at(batch),)
        ]
        alternatives = Alternatives(
            lambda: (each for each in found if _kinds(each) in first),
            lambda: (each for each in found if _kinds(each) not in first),
        )
        return replace(
            small, program=program_at(batch), resident_bytes=resident, resident={}, alternatives=alternatives
        )

    return at


def _itself(program: Program) -> Program:
    return program


def _between(a: float, b: float, share: float) -> float:
    return max(a + (b - a) * share, 0)


def _programs(one: Program, other: Program, batches: tuple[int, int]) -> Callable[[int], Program] | None:
    """The program at any batch from those at two; ``None`` if their ops differ."""
    low, high = batches
    same = len(one.ops) == len(other.ops) and len(one.buffers) == len(other.buffers)
    same = same and (one.boundary, one.forward_outputs, one.gradients) == (
        other.boundary,
        other.forward_outputs,
        other.gradients,
    )
    if not same or any(
        (a.target, a.inputs, a.outputs) != (b.target, b.inputs, b.outputs)
        for a, b in zip(one.ops, other.ops, strict=True)
    ):
        return None

    def at(batch: int) -> Program:
        share = (batch - low) / (high - low)
        buffers = tuple(
            replace(a, bytes=round(_between(a.bytes, b.bytes, share)))
            for a, b in zip(one.buffers, other.buffers, strict=True)
        )
        ops = tuple(
            replace(
                a,
                seconds=_between(a.seconds, b.seconds, share),
                workspace_bytes=round(_between(a.workspace_bytes, b.workspace_bytes, share)),
            )
            for a, b in zip(one.ops, other.ops, strict=True)
        )
        return replace(one, ops=ops, buffers=buffers)

    return at


def _alternatives(
    small: Iterable[Alternative], large: Iterable[Alternative], batches: tuple[int, int]
) -> list[tuple[Alternative, Callable[[int], Program]]]:
    """Those of both batches that rewrite alike, and their programs at any batch, with estimated costs."""
    found: list[tuple[Alternative, Callable[[int], Program]]] = []
    alike = {_kinds(each): each for each in reversed([*large])}
    for each in {_kinds(each): each for each in reversed([*small])}.values():
        other = alike.get(_kinds(each))
        at = None if other is None else _programs(each.estimated, other.estimated, batches)
        if at is not None:
            found.append((each, at))
    return found


def _kinds(alternative: Alternative) -> tuple[object, ...]:
    """What is the same of an alternative at another batch: where and how it rewrites, not the sizes of its slices."""
    return tuple((each.at, each.rule, each.form, dict(each.settings).get("percent")) for each in alternative.rewrites)
