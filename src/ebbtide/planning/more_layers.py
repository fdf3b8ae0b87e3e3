"""Alternatives for the step of a model with many layers, from those of the same model with few (``step.layers``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ebbtide.planning.alternatives import Alternative, Alternatives, Costed
from ebbtide.step.layers import Layers, grown, grown_program
from ebbtide.step.program import Program
from ebbtide.step.rewrite import Rewrite

__all__ = ["grown_alternatives"]

_FIELD, _PART = "\x1f", "\x1e"


def grown_alternatives(
    few: Alternatives, more: Alternatives, layers: Layers, program: Program, whole: Callable[[], Alternatives]
) -> Alternatives:
    """Those of the step of all layers.

    Args:
        few: of the step with ``layers.few`` layers.
        more: of that with ``layers.more``.
        layers: how many there are.
        program: of all layers, as captured.
        whole: gives the alternatives of the step captured as a whole: asked where ``few`` and ``more`` do not go on as
            they began.
    """
    growth = _Growth(layers, program, cache(whole))
    return Alternatives(
        lambda: growth.of(few.first, more.first, lambda all_: all_.first),
        lambda: growth.of(few.further, more.further, lambda all_: all_.further),
        lambda rewrites: growth.whole().named(rewrites),
        more.among,
    )


@dataclass(frozen=True)
class _Growth:
    layers: Layers
    program: Program
    whole: Callable[[], Alternatives]

    def of(
        self,
        few: Sequence[Alternative],
        more: Sequence[Alternative],
        instead: Callable[[Alternatives], Sequence[Alternative]],
    ) -> Sequence[Alternative]:
        """One of each pair."""
        found = [self._one(mine, theirs) for mine, theirs in zip(few, more, strict=False)]
        if len(few) != len(more) or None in found:
            return instead(self.whole())
        return [each for each in found if each is not None]

    def _one(self, few: Alternative, more: Alternative) -> Alternative | None:
        rewrites = _grown_rewrites(few.rewrites, more.rewrites, self.layers)
        if rewrites is None:
            return None

        def instead() -> Alternative:
            """Of the step captured as a whole; the captured program, which is no plan of these, where it has none."""
            nothing = Alternative(rewrites, lambda: self.program, lambda: None)
            return self.whole().named(rewrites) or nothing

        def estimated() -> Program:
            return grown_program(few.estimated, more.estimated, self.layers) or instead().estimated

        def costed() -> Costed | None:
            ours, theirs = few.costed(), more.costed()
            if ours is None or theirs is None:
                return None
            found = grown_program(ours.program, theirs.program, self.layers)
            return instead().costed() if found is None else Costed(rewrites, found)

        def refined() -> Sequence[Alternative]:
            return self.of(few.refined(), more.refined(), lambda _: instead().refined())

        return replace(few, rewrites=rewrites, make=estimated, costed=costed, refined=refined)


def _grown_rewrites(few: Sequence[Rewrite], more: Sequence[Rewrite], layers: Layers) -> tuple[Rewrite, ...] | None:
    rows = grown([*map(_row, few)], [*map(_row, more)], layers)
    return None if rows is None else tuple(map(_rewrite, rows))


def _row(rewrite: Rewrite) -> tuple[str, tuple[str, ...]]:
    """Its text, with the values of its settings, of which the number of places grows; and their names."""
    values = (str(value) for _, value in rewrite.settings)
    text = _PART.join(
        map(_FIELD.join, ((rewrite.rule, rewrite.at, rewrite.where, rewrite.form), values, rewrite.facts))
    )
    return text, tuple(name for name, _ in rewrite.settings)


def _rewrite(row: tuple[str, tuple[str, ...]]) -> Rewrite:
    text, names = row
    told, values, facts = text.split(_PART)
    rule, at, where, form = told.split(_FIELD)
    settings = tuple(zip(names, map(int, values.split(_FIELD)), strict=True)) if names else ()
    return Rewrite(rule, at, where, form, settings, tuple(facts.split(_FIELD)) if facts else ())
