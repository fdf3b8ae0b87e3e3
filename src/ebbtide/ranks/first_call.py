"""Before the first step of a wrapper: all ranks say what they train and plan for, and then whether they have planned.

1. Ranks *come* with what has to be the same on all: the versions, the model's parameters, the budget, which in bytes
   may be 5 % apart. Where something differs, all raise, and say which ranks have what. Nothing has been captured.
2. Each plans by itself, as long as it takes, and *says* that it has, or the error that it was refused with. Ranks that
   are done wait in the store, where the group's timeout does not count. If one is refused, all raise that, and a budget
   with the smallest that is workable on all. Nothing has run, so the next call is another attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ebbtide.errors import BudgetError, UsageError
from ebbtide.ranks.messages import Failure
from ebbtide.ranks.rank_group import RankGroup, known_to_all

__all__ = ["FirstCall"]

_APART = 1.05
"""How far budgets in bytes may be apart: what cards of one machine have free differs by what else is on them."""
_REFUSED_SECONDS = 4.0
"""How long a refusal waits for the ranks that still plan: what all of them need is said together then."""


class FirstCall:
    """The first planned call of one wrapper, until all ranks have planned.

    Args:
        group: the ranks.
        wrapper: number of the wrapper among those of the group.

    Attributes:
        planning: whether all have come, and this rank has not said yet whether it has planned.
    """

    def __init__(self, group: RankGroup, wrapper: int) -> None:
        self._group = group
        self._wrapper = wrapper
        self._attempt = 0
        self.planning = False

    def _key(self, what: str) -> str:
        return f"first/{self._wrapper}/{self._attempt}/{what}"

    def come(self, facts: Mapping[str, str | int]) -> None:
        """Say what this rank has, and wait until all have (definition 1).

        Args:
            facts: what has to be the same, in words; of a number of bytes about the same.

        Raises:
            UsageError: if something differs.
            RankError: if a rank does not come.
        """
        said = [
            json.loads(each) for each in self._group.gather(self._key("come"), json.dumps(dict(facts)), limited=True)
        ]
        differing = [name for name in facts if _differ([each.get(name) for each in said])]
        if not differing:
            self.planning = True
            return
        name = differing[0]
        found: dict[str, list[int]] = {}
        for number, each in zip(self._group.numbers, said, strict=True):
            value = each.get(name)
            found.setdefault(f"{value} bytes" if isinstance(value, int) else str(value), []).append(number)
        listed = "; ".join(f"{value} on {_ranks(numbers)}" for value, numbers in found.items())
        argument = "budget" if name == "budget" else "model"
        raise known_to_all(
            UsageError(
                f"the ranks of a DistributedDataParallel have to be alike, and their {name} differs: {listed}",
                argument=argument,
            )
        )

    def planned(self) -> None:
        """Say that this rank has a plan, and wait until all have (definition 2).

        Raises:
            EbbtideError: what another rank is refused with.
        """
        self.planning = False  # what fails from here on the others may know nothing of: they may have gone on
        refused = self._said("")
        if self._group.failing:  # one was interrupted after it had said so
            self._group.raise_failure()
        if not refused:
            return
        raise known_to_all(refused[0].error(smallest_bytes=_workable(refused)))

    def refused(self, error: BaseException) -> None:
        """Say that this rank raises ``error`` and has no plan; what is workable on all ranks is added to it."""
        refused = self._said(Failure.of(self._group.number, error).to_text())
        known_to_all(error)
        smallest = _workable(refused)
        if isinstance(error, BudgetError) and smallest > error.smallest_bytes:
            error.add_note(f"On another rank {smallest} bytes are the smallest for which a plan was found")
            error.smallest_bytes = smallest

    def again(self) -> None:
        """The call has come to nothing, on all ranks: the next one is another attempt."""
        self._attempt += 1
        self.planning = False

    def _said(self, own: str) -> list[Failure]:
        """The refusals of all ranks, where this one says ``own``: a failure or nothing."""
        said = self._group.gather(self._key("planned"), own or _PLANNED, enough=_enough)
        return [Failure.from_text(each) for each in said if each and each != _PLANNED]


_PLANNED = "planned"


def _enough(said: Sequence[str | None]) -> float | None:
    return _REFUSED_SECONDS if any(each is not None and each != _PLANNED for each in said) else None


def _workable(refused: Sequence[Failure]) -> int:
    return max((each.smallest_bytes for each in refused), default=0)


def _differ(values: Sequence[object]) -> bool:
    """Whether these are not the same; numbers of bytes may be a little apart: what each rank's own device has free."""
    numbers = [each for each in values if isinstance(each, int)]
    if len(numbers) < len(values):
        return len(set(values)) > 1
    return max(numbers) > _APART * min(numbers)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
