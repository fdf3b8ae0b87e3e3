"""Bytes: parsing what people write and printing what they can read. Sizes are ``int`` bytes everywhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from ebbflow.errors import UsageError

__all__ = ["KIB", "MIB", "Budget", "format_bytes", "format_percent", "format_seconds", "parse_bytes"]

KIB = 2**10
MIB = 2**20

# IEC and SI multiples (IEC 80000-13); a bare letter would be ambiguous and is refused.
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_FORMS = ("an int (bytes)", '"12GiB"', '"800MiB"', '"8GB"', '"123456B"', 'or "60%" of the unplanned peak')
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+|%)\s*")


def _refusal(what: str, value: object) -> UsageError:
    return UsageError(f"{what}; accepted: {', '.join(_FORMS)}", argument="budget", value=value, accepted=_FORMS)


def parse_bytes(text: str | int) -> int:
    """Bytes of ``"12GiB"``, ``"8GB"``, ``"123456B"`` or a positive ``int``, rounded down.

    Raises:
        UsageError: for anything else, listing the accepted forms.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text > 0:
            return text
        raise _refusal(f"{text!r} is not a positive number of bytes", text)
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise _refusal(f"{text!r} is not a number of bytes", text)
    value = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise _refusal(f"{text!r} is less than one byte", text)
    return value


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of a step's peak allocated memory, or a share of the same step's unplanned peak.

    Exactly one of the two is set. ``share`` is a fraction in (0, 1000 %]; the resident part counts in both.
    """

    bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.share is None):
            raise _refusal("a budget is either bytes or a share", (self.bytes, self.share))
        if self.bytes is not None and self.bytes <= 0:
            raise _refusal(f"a budget of {self.bytes} bytes is not positive", self.bytes)
        if self.share is not None and not 0 < self.share <= 10:
            raise _refusal(f"a budget of {self.share:.0%} is not in (0 %, 1000 %]", self.share)

    @staticmethod
    def parse(value: str | int | Budget) -> Budget:
        """The budget that ``value`` says.

        Raises:
            UsageError: if it says none, listing the accepted forms.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2] == "%":
            return Budget(share=float(match[1]) / 100)
        return Budget(bytes=parse_bytes(value))

    def resolve(self, unplanned_peak_bytes: int) -> int:
        """This budget in bytes, for a step whose unplanned peak is ``unplanned_peak_bytes``; rounded down."""
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return int(Fraction(self.share).limit_denominator(10**6) * unplanned_peak_bytes)

    def __str__(self) -> str:
        return f"{self.bytes}B" if self.bytes is not None else f"{(self.share or 0) * 100:g}%"


def format_bytes(count: int) -> str:
    """``count`` bytes for people: ``"512 B"``, ``"1.50 KiB"``, ``"12.00 GiB"``."""
    if abs(count) < KIB:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if abs(size) < 1024:
            return f"{size:.2f} {unit}"
    return f"{size:.2f} PiB"


def format_percent(share: float) -> str:
    """``share`` as a percentage with two digits: ``0.0325`` is ``"3.25 %"``."""
    return f"{share * 100:.2f} %"


def format_seconds(seconds: float) -> str:
    """``seconds`` for people: ``"830 us"``, ``"12.4 ms"``, ``"3.21 s"``."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
