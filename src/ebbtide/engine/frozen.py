"""What a backward says of a loss that takes no gradient, after a call of a fitted model with nothing to train.

Torch's own words are of a tensor, and name no model. From such a call on the next backward is looked at as it begins:
one of which no root takes a gradient raises in any case, so that nothing is refused that eager would run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbtide.errors import CaptureError
from ebbtide.torch_seams.autograd import BackwardWatch

__all__ = ["watch_frozen"]


class _FrozenCalls:
    """The last such call, while no backward has come since."""

    def __init__(self) -> None:
        self.name = ""
        self.watch = BackwardWatch(begins=self._look)

    def _look(self, roots: Sequence[Any], _: Sequence[Any]) -> None:
        """A backward begins at ``roots``.

        Raises:
            CaptureError: if none of them takes a gradient.
        """
        self.watch.close()
        if all(getattr(each, "requires_grad", True) is False for each in roots):
            raise CaptureError(
                f"the loss takes no gradient, and no parameter or argument of the fitted {self.name} did when it was "
                "called",
                remedy="unfreeze what is to be trained before the call (model.requires_grad_(True)); a model that only "
                "computes needs no backward, and runs under torch.no_grad()",
            )


_calls = _FrozenCalls()


def watch_frozen(name: str) -> None:
    """Note a call of a model of class ``name`` that has nothing to train."""
    _calls.name = name
    if not _calls.watch.is_open:
        _calls.watch.open()
