"""What the op of a rewrite does that its schema does not say: declared where the op is, asked for wherever it matters.

Ops are named as in ``Op.target``, ``"namespace.name.overload"``; those of rewrites are in one namespace.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NAMESPACE", "OpTraits", "declare_op", "is_rewrite_op", "traits_of_op"]

NAMESPACE = "ebbtide_rewrites"
"""Of the ops of rewrites."""


@dataclass(frozen=True)
class OpTraits:
    """One op's.

    Attributes:
        writes: arguments that it writes over, which nobody else reads. Autograd is not told: it would refuse a second
            backward. Where the graph is retained, the op writes over copies.
        small: arguments of which all that is large is made, so that large numbers made up for them would leave next to
            nothing of a softmax: kernels take up to ten times as long for numbers below the least normal one.
        may_take_more: whether some runs need more workspace than a run of it alone is measured to.
    """

    writes: frozenset[str] = frozenset()
    small: frozenset[str] = frozenset()
    may_take_more: bool = False


_NONE = OpTraits()
_declared: dict[str, OpTraits] = {}


def declare_op(name: str, traits: OpTraits) -> str:
    """Say what the op of this ``name`` in :data:`NAMESPACE` does; returns its target."""
    target = f"{NAMESPACE}.{name}.default"
    _declared[target] = traits
    return target


def is_rewrite_op(target: str) -> bool:
    """Whether a rewrite has brought an op that calls ``target``."""
    return target.startswith(f"{NAMESPACE}.")


def traits_of_op(target: str) -> OpTraits:
    """What has been declared; nothing for an op of which nobody said anything."""
    return _declared.get(target, _NONE)
