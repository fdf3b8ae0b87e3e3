"""Errors as they travel from the rank that raises one to the others."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ebbtide import errors
from ebbtide.errors import BudgetError, EbbtideError, RankError

__all__ = ["Failure"]


@dataclass(frozen=True)
class Failure:
    """What one rank has failed of.

    Attributes:
        rank: which.
        kind: the class of its error.
        text: of the error, with its notes.
        facts: those of the error's attributes that are plain values.
    """

    rank: int
    kind: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def of(rank: int, error: BaseException) -> Failure:
        """That ``rank`` raises ``error``."""
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        facts: dict[str, Any] = {}
        for name, value in vars(error).items() if isinstance(error, EbbtideError) else ():
            if name.startswith("_"):
                continue
            with contextlib.suppress(TypeError, ValueError):
                facts[name] = json.loads(json.dumps(value))
        return Failure(rank, type(error).__name__, text, facts)

    @property
    def smallest_bytes(self) -> int:
        """The least budget that is workable on that rank, where one was refused; 0 of anything else."""
        return int(self.facts.get("smallest_bytes") or 0) if self.kind == BudgetError.__name__ else 0

    def error(self, *, smallest_bytes: int = 0) -> EbbtideError:
        """What the other ranks raise: the same, with the rank that it comes from.

        Args:
            smallest_bytes: of a refused budget, what is workable on all ranks.
        """
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, EbbtideError) and kind is not RankError:
            found: EbbtideError = kind.__new__(kind, f"rank {self.rank}: {self.text}")
            vars(found).update({name: _frozen(value) for name, value in self.facts.items()})
            if smallest_bytes and isinstance(found, BudgetError):
                found.smallest_bytes = smallest_bytes
            return found
        if self.kind == KeyboardInterrupt.__name__:
            return RankError(f"rank {self.rank} was interrupted ({self.kind})", rank=self.rank)
        if self.kind == RankError.__name__:
            return RankError(self.text, rank=self.rank)
        return RankError(f"rank {self.rank} has raised {self.kind}: {self.text}", rank=self.rank)

    def to_text(self) -> str:
        """As it is published."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Failure:
        """As another rank has published it."""
        return Failure(**json.loads(text))


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
