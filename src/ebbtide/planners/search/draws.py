"""Random numbers of compiled searches, from a state that lies in their memory."""

from __future__ import annotations

from ebbtide.planners.search.jit import Words, inner
from ebbtide.planners.search.layout import H_RANDOM

__all__ = ["draw", "random_state"]


def random_state(seed: int) -> int:
    """The word ``H_RANDOM`` for a seed.

    Xorshift needs a state other than 0; a large odd multiplier spreads small seeds (Knuth's golden ratio).
    """
    return ((seed + 1) * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF) | 1


@inner
def draw(m: Words) -> float:
    """Draw a number in [0, 1): xorshift64 (Marsaglia 2003), so that plans are reproducible everywhere."""
    x = m[H_RANDOM]
    x ^= x << 13
    x ^= (x >> 7) & 0x01FFFFFFFFFFFFFF
    x ^= x << 17
    m[H_RANDOM] = x
    return ((x >> 11) & 0x1FFFFFFFFFFFFF) / 9007199254740992.0
