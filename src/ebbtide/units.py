"""Bytes: parsing what people write and printing what they can read. Sizes are ``int`` bytes everywhere else.

1. A number of bytes that is *needed* (a peak, a floor, the smallest budget) is printed rounded up, and so is its share
   of another one: whoever asks for what was printed gets at least what is needed.
2. A number of bytes that is *allowed* (a budget, a machine's memory, what is left of it) is printed rounded down.
3. What is parsed is rounded down to whole bytes: a budget is never more than what was written. As needs are whole
   bytes, a text that names at least a need is parsed to at least it.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ebbtide.errors import UsageError

__all__ = [
    "KIB",
    "MIB",
    "Budget",
    "format_allowed",
    "format_bytes",
    "format_count",
    "format_gap",
    "format_percent",
    "format_rows",
    "format_seconds",
    "format_share",
    "parse_bytes",
]

KIB = 2**10
MIB = 2**20

# IEC and SI multiples (IEC 80000-13); a bare letter would be ambiguous and is refused.
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_FORMS = ('"12GiB"', '"800MiB"', '"8GB"', '"123456B"', 'or "60%" of the unplanned peak')
_SMALL = 1000  # no step takes so few bytes: a percent sign or a unit is missing
_MOST = 10  # times the unplanned peak: more is a slip of the pen
_LOST_IN_A_SHARE = Fraction(1, 1000)  # of a byte: a float has 16 digits, which lose less of any peak below 10 TiB
_MET, _SHOWN = 1e-6, 5e-5  # solvers' tolerance (``planners.search.greedy.PROVEN``); what two digits of a percent show
_QUANTITY = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")


def _refusal(what: str, value: object) -> UsageError:
    forms = _FORMS if isinstance(value, str) else ("an int (bytes)", *_FORMS)
    return UsageError(f"{what}; accepted: {', '.join(forms)}", argument="budget", value=value, accepted=forms)


def _quantity(value: object) -> tuple[Fraction, str]:
    """The number and the unit of a text, the number positive; the unit of an ``int`` is ``"b"``.

    Raises:
        UsageError: saying what is wrong with this value.
    """
    wrong = ""
    if isinstance(value, int | numbers.Integral) and not isinstance(value, bool):
        number, unit = Fraction(int(value)), "b"
    elif isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None:
            plan = " (of a plan's file: ebbtide.Plan.load(path))" if value.endswith(".json") else ""
            raise _refusal(f"{value!r} is not a number with a unit{plan}", value)
        number, unit = Fraction(match[1]), match[2].lower()
        if unit != "%" and unit not in _UNITS:
            wrong = _wrong_unit(value, match[1], match[2])
    else:
        raise _refusal(f"{value!r} is neither a whole number of bytes nor a text{_meant_by(value)}", value)
    if number <= 0:
        raise _refusal(f"{value!r} is not more than zero", value)
    if wrong:
        raise _refusal(wrong, value)
    return number, unit


def _wrong_unit(text: str, number: str, unit: str) -> str:
    """Why ``unit`` is refused, and what was probably meant."""
    if not unit:
        meant = f"write '{number}B' if bytes are meant"
        if float(number) <= _SMALL:
            meant = f"write '{_percent(number)}%' for a share of the unplanned peak, '{number}GiB' for bytes"
        return f"{text!r} has no unit: {meant}"
    why = f"{text!r}: {unit} is no unit here"
    if unit.lower() == "percent":
        return f"{why}: write '{number}%' for a share of the unplanned peak"
    power = "kmgtp".find(unit.lower()) + 1
    if not power or len(unit) > 1:
        return why
    times = "" if power == 1 else f"**{power}"
    letter = unit.upper()
    return (
        f"{why}: write '{number}{letter}iB' for {number} times 1024{times} bytes, "
        f"'{number}{letter}B' for {number} times 1000{times}"
    )


def _percent(number: str) -> str:
    """The percent sign's form of a share that is given without it: below 1 it is a fraction."""
    return f"{100 * float(number):g}" if float(number) < 1 else number


def _meant_by(value: object) -> str:
    if not isinstance(value, float) or not 0 < value < float("inf"):
        return ""
    if value <= 1:
        return f"; write '{100 * value:g}%' for a share of the unplanned peak"
    return f"; write {int(value)} for bytes" if value.is_integer() else ""


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"12GiB"``, ``"8GB"``, ``"123456B"`` or a positive ``int``, rounded down.

    Raises:
        UsageError: for anything else, listing the accepted forms.
    """
    number, unit = _quantity(text)
    if unit == "%":
        raise _refusal(f"{text!r} is a share, not a number of bytes", text)
    count = int(number * _UNITS[unit])
    if not count:
        raise _refusal(f"{text!r} is less than one byte", text)
    return count


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of a step's peak allocated memory, or a share of the same step's unplanned peak.

    Exactly one of the two is set; the resident part counts in both.

    Attributes:
        bytes: 1 or more, or ``None``.
        share: of the unplanned peak, a fraction in (0, 1000 %], or ``None``.
    """

    bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bytes, str) or isinstance(self.share, str):  # which no annotation keeps anybody from
            raise _refusal("a text is read by ebbtide.Budget.parse", self.bytes or self.share)
        if (self.bytes is None) == (self.share is None):
            raise _refusal("a budget is either bytes or a share", (self.bytes, self.share))
        if self.bytes is not None and self.bytes <= 0:
            raise _refusal(f"a budget of {self.bytes} bytes is not positive", self.bytes)
        if self.share is not None and not 0 < self.share <= _MOST:
            raise _refusal(f"a budget of {self.share:.0%} is not in (0 %, 1000 %]", self.share)

    @staticmethod
    def parse(value: str | int | Budget) -> Budget:
        """The budget that ``value`` says.

        Raises:
            UsageError: if it says none, listing the accepted forms.
        """
        if isinstance(value, Budget):
            return value
        number, unit = _quantity(value)
        if unit != "%":
            return Budget(bytes=parse_bytes(value))
        if number > 100 * _MOST:
            raise _refusal(f"{value!r} is more than {100 * _MOST} % of the unplanned peak", value)
        return Budget(share=float(number / 100))

    def resolve(self, unplanned_peak_bytes: int) -> int:
        """This budget in bytes, for a step whose unplanned peak is ``unplanned_peak_bytes``; rounded down.

        A share is the decimal number that its shortest text says, so ``"79.13%"`` is 7913 in 10000 exactly, and bytes
        over bytes give the bytes back.
        """
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return math.floor(Fraction(repr(float(self.share))) * unplanned_peak_bytes + _LOST_IN_A_SHARE)

    def __str__(self) -> str:
        return f"{self.bytes}B" if self.bytes is not None else f"{(self.share or 0) * 100:g}%"


def format_bytes(count: int) -> str:
    """``count`` needed bytes for people, rounded up: ``"512 B"``, ``"1.50 KiB"``, ``"12.00 GiB"`` (definition 1)."""
    return _format(count, math.ceil)


def format_allowed(count: int) -> str:
    """``count`` allowed bytes for people, rounded down (definition 2)."""
    return _format(count, math.floor)


def _format(count: int, whole: Callable[[Fraction], int]) -> str:
    if abs(count) < KIB:
        return f"{count} B"
    unit = 1
    for name in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        unit *= 1024
        hundredths = whole(Fraction(100 * count, unit))
        if abs(hundredths) < 102400 or name == "PiB":
            break
    sign, digits = "-" if hundredths < 0 else "", abs(hundredths)
    return f"{sign}{digits // 100}.{digits % 100:02} {name}"


def format_share(part: int, whole: int) -> str:
    """``part`` needed bytes as a share of ``whole``, rounded up to two digits: ``"79.13 %"`` (definition 1)."""
    hundredths = -(-10_000 * part // whole) if whole else 0
    return f"{hundredths // 100}.{hundredths % 100:02} %"


def format_count(count: int, what: str) -> str:
    """``count`` of ``what``, a noun whose plural ends in s: ``"1 buffer"``, ``"3 buffers"``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_rows(rows: Sequence[tuple[str, str, int, str]]) -> str:
    """Rows of a name, bytes for people, the same bytes and a remark, in columns."""
    name, words, exact = (max(len(str(row[column])) for row in rows) for column in range(3))
    return "\n".join(
        f"  {row[0]:{name}}  {row[1]:>{words}}  {row[2]:>{exact}} bytes  {row[3]}".rstrip() for row in rows
    )


def format_percent(share: float) -> str:
    """``share`` as a percentage with two digits: ``0.0325`` is ``"3.25 %"``."""
    return f"{share * 100:.2f} %"


def format_gap(gap: float) -> str:
    """How far a plan is from its bound: ``"0.00 %"`` only where the two meet, as far as a solver can tell."""
    return "<0.01 %" if _MET < gap < _SHOWN else format_percent(max(gap, 0.0))


def format_seconds(seconds: float) -> str:
    """``seconds`` for people: ``"830 us"``, ``"12.4 ms"``, ``"3.21 s"``."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
