"""By what gradients are clipped before an optimizer in the step applies them: the arguments of ``clip_grad_norm_``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import cast

from ebbtide.errors import UsageError

__all__ = ["Clipping", "clipping_of"]


@dataclass(frozen=True)
class Clipping:
    """What ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` takes, for ``max_norm`` of :func:`ebbtide.fit`.

    Attributes:
        max_norm: that all gradients together may have.
        norm_type: of the norm; ``inf`` is the largest element.
        error_if_nonfinite: whether a norm that is infinite or no number raises, before anything is updated.
        foreach: whether gradients are taken together, as torch's kernels for lists do; ``None`` is torch's choice.
    """

    max_norm: float
    norm_type: float = 2.0
    error_if_nonfinite: bool = False
    foreach: bool | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_norm", self.max_norm), ("norm_type", self.norm_type)):
            if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value) or value < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise _refusal(name, value, "a number, 0 or more")
            object.__setattr__(self, name, float(value))
        for name, value in (("error_if_nonfinite", self.error_if_nonfinite), ("foreach", self.foreach)):
            if not isinstance(value, bool) and not (name == "foreach" and value is None):
                raise _refusal(name, value, "True or False" + (" or None" if name == "foreach" else ""))


def clipping_of(max_norm: object) -> Clipping | None:
    """What ``max_norm`` means: a number is the largest norm, with torch's defaults; ``None`` clips nothing.

    Raises:
        UsageError: for what is neither.
    """
    if max_norm is None or isinstance(max_norm, Clipping):
        return max_norm
    if isinstance(max_norm, bool) or not isinstance(max_norm, Real):
        raise _refusal("max_norm", max_norm, "a number, an ebbtide.Clipping, or None, which clips nothing")
    return Clipping(cast("float", max_norm))


def _refusal(argument: str, value: object, accepted: str) -> UsageError:
    return UsageError(
        f"{argument}={value!r} is not accepted; {argument} takes {accepted}", argument=argument, value=value
    )
