"""Seconds of a call from those of the same call at another size: a new batch or length is not timed anew.

1. Calls are *alike* if they differ in nothing but sizes and strides, and all of these that differ do so by one factor
   or a power of it: a batch of 6 in the place of 8, in every tensor that it is a size of. What is broadcast in one is
   so in the other.
2. Seconds go with the roofline from one to the other, if the factor is no more than :data:`_MOST`. Of several calls
   that are alike, the one of the nearest size is taken.
3. Bytes do not: a kernel may choose another algorithm, so what a call takes is measured all the same.
"""

from __future__ import annotations

from fractions import Fraction

from ebbtide.cost.call import Call, TensorSpec
from ebbtide.cost.roofline import roofline_seconds
from ebbtide.step.machine import machine_named

__all__ = ["Timed"]

_MOST = 2
_POWERS = 3
"""A length in the strides of scores per head and sample is there three times."""
_KEPT = 8
"""Calls of one form, those seen last: lengths of a dataset come back."""


class Timed:
    """Calls of this process whose seconds were measured."""

    def __init__(self) -> None:
        self._by_form: dict[object, dict[str, tuple[Call, tuple[int, ...], float]]] = {}

    def note(self, call: Call, seconds: float) -> None:
        """``call`` takes so many ``seconds``, as measured."""
        form, sizes = _parts(call)
        known = self._by_form.setdefault(form, {})
        known.pop(call.signature, None)
        known[call.signature] = (call, sizes, seconds)
        if len(known) > _KEPT:
            del known[next(iter(known))]

    def seconds_of(self, call: Call) -> float | None:
        """What ``call`` takes, by a call that is alike; ``None`` if there is none."""
        form, sizes = _parts(call)
        found: list[tuple[Fraction, Call, float]] = []
        for known, known_sizes, seconds in self._by_form.get(form, {}).values():
            factor = _factor(known_sizes, sizes)
            if factor is not None and _away(factor) <= _MOST:
                found.append((_away(factor), known, seconds))
        if not found:
            return None
        _, nearest, seconds = min(found, key=lambda each: each[0])
        here = machine_named("cpu")
        return seconds * roofline_seconds(call, here) / roofline_seconds(nearest, here)


def _parts(call: Call) -> tuple[object, tuple[int, ...]]:
    """What two calls that are alike have in common, and the numbers in which they may differ."""
    sizes: list[int] = []

    def form(value: object, *, listed: bool = False) -> object:
        if isinstance(value, TensorSpec):
            sizes.extend((*value.shape, *value.stride))
            return (len(value.shape), value.dtype, value.device, value.lazy)
        if isinstance(value, list | tuple):
            return (list, *(form(each, listed=True) for each in value))
        if listed and isinstance(value, int) and not isinstance(value, bool):
            sizes.append(value)
            return int
        return (type(value), repr(value))

    named = sorted(call.kwargs.items())
    forms = (form(call.args), tuple((name, form(value)) for name, value in named), form(call.outputs))
    return (call.target, len(sizes), *forms), tuple(sizes)


def _factor(known: tuple[int, ...], sizes: tuple[int, ...]) -> Fraction | None:
    """By what those of ``sizes`` that differ from ``known`` do; ``None`` if there is no such factor."""
    pairs = {(one, other) for one, other in zip(known, sizes, strict=True) if one != other}
    if any(min(pair) <= 1 for pair in pairs):
        return None
    factors = {Fraction(other, one) for one, other in pairs}
    factor = min(factors, key=_away, default=Fraction(1))
    return factor if factors <= {factor**power for power in range(1, _POWERS + 1)} else None


def _away(factor: Fraction) -> Fraction:
    return max(factor, 1 / factor)
