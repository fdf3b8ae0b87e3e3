"""The rules of rewrites: the one module that names them."""

from __future__ import annotations

from ebbtide.rewrites.gradient_recompute import GradientRecomputeRule
from ebbtide.rewrites.heads.rule import HeadRule
from ebbtide.rewrites.in_place.rule import InPlaceRule
from ebbtide.rewrites.rule import Rule
from ebbtide.rewrites.sliced.rule import ATTENTION, FEED_FORWARD

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (HeadRule(), FEED_FORWARD, ATTENTION, GradientRecomputeRule(), InPlaceRule())
"""In the order in which they are applied: free ones come last, after all that looks for what was captured."""
