"""The backward that goes through a wrapper: when it exchanges gradients, and whom an error in it leaves waiting.

1. A forward with gradients outside of ``no_sync`` *arms* the wrapper: the next backward that goes through it exchanges
   gradients, once, however many forwards it goes through.
2. A backward of torch's may go through several wrappers, several planned steps of each, and other backwards.
3. What leaves it as an error is told to the other ranks, with what of it they wait for: the gradients that this rank
   has begun to exchange and not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.errors import EbbtideError
from ebbtide.ranks.journal import Event
from ebbtide.ranks.rank_group import RankGroup, is_known_to_all
from ebbtide.torch_seams.autograd import BackwardWatch
from ebbtide.torch_seams.process_groups import comes_from_a_collective

__all__ = ["StepBackward", "WrapperBackward", "watch_backwards"]

_NOT_WHOLE = "The gradients of this step are not whole on any rank: clear them before another one"


class WrapperBackward:
    """What goes backward through one wrapper.

    Args:
        group: the ranks.
        number: of the wrapper among those of the group.
        exchanges: whether the forward that runs arms it.

    Attributes:
        group: the ranks.
        event: its exchange of gradients.
        exchanges: whether gradients are exchanged in the backward that runs, or has run.
        has_begun: whether the other ranks count on this one in it.
        steps_begun: planned steps of it that have begun.
        steps_done: planned steps of it that are over.
    """

    def __init__(self, group: RankGroup, number: int, *, exchanges: bool) -> None:
        self.group = group
        self.event = Event("backward", number)
        self._armed = exchanges
        self._forget()

    def _forget(self, *, exchanges: bool = False) -> None:
        self.exchanges, self.has_begun = exchanges, False
        self.steps_begun = self.steps_done = 0

    @property
    def is_sent(self) -> bool:
        """Whether all gradients are on their way to the others, as far as they come from planned steps."""
        return self.has_begun and self.steps_begun == self.steps_done > 0

    def arm(self) -> None:
        """A forward runs whose backward exchanges gradients."""
        self._armed = True

    def begins(self, *_: object) -> None:
        """A backward comes to the wrapper: the last moment at which nobody waits for this rank.

        Raises:
            EbbtideError: what another rank has published.
        """
        if self in _running.wrappers:
            return
        _running.wrappers.append(self)
        self._forget(exchanges=self._armed)
        if self._armed and self.group.others_plan:
            self.group.wait_for_plans()
        self.group.begin(self.event if self._armed else None)
        self.has_begun = True

    def returned(self) -> None:
        """The backward that went through the wrapper has returned."""
        if self.exchanges and self.is_sent:
            self.group.exchanged[self.event.wrapper] += 1
            self._armed = False


@dataclass(eq=False, slots=True)
class StepBackward:
    """The backward of one planned step.

    Attributes:
        of: the wrapper's, which it is a part of.
        has_begun: whether it has.
    """

    of: WrapperBackward
    has_begun: bool = False

    def begins(self, *_: object) -> None:
        """It begins; it is called once or twice.

        Raises:
            EbbtideError: what another rank has published.
        """
        if not self.has_begun:
            self.of.begins()
            self.of.steps_begun += 1
            self.has_begun = True

    def ends(self) -> None:
        """It is over: its gradients are on their way to the others."""
        self.of.steps_done += 1


class _Running:
    """The backward that runs, whichever thread runs its nodes; one that another one calls is a part of that."""

    def __init__(self) -> None:
        self.depth = 0
        self.wrappers: list[WrapperBackward] = []

    def begins(self, *_: object) -> None:
        """One begins."""
        self.depth += 1

    def returns(self) -> None:
        """One has ended: raise what another rank has published while this one was in the exchange."""
        self.depth = max(self.depth - 1, 0)
        if self.depth or not self.wrappers:
            return
        wrappers, self.wrappers = self.wrappers, []
        for each in wrappers:
            each.returned()
        for each in wrappers:
            if each.group.failing:
                each.group.raise_failure()

    def raises(self, error: BaseException) -> None:
        """One raises ``error``: tell the others what is of this rank, and say in words what is of another."""
        if self.depth > 1 or not self.wrappers:
            return
        wrappers, self.wrappers = self.wrappers, []
        if is_known_to_all(error):
            return
        for group in {each.group for each in wrappers}:
            _tell(group, [each for each in wrappers if each.group is group], error)


def _tell(group: RankGroup, wrappers: Sequence[WrapperBackward], error: BaseException) -> None:
    begun = [each for each in wrappers if each.exchanges and each.has_begun]
    are_sent = all(each.is_sent for each in wrappers)
    if are_sent and comes_from_a_collective(error):
        if (named := group.explain()) is not None:
            named.add_note(_NOT_WHOLE)
            group.tell(named, unsent=[each.event for each in begun])
            raise named from error
    elif isinstance(error, EbbtideError) or not are_sent:
        error.add_note(_NOT_WHOLE)
        group.tell(error, unsent=[each.event for each in begun if not each.is_sent])


_running = _Running()
_watch = BackwardWatch(_running.returns, begins=_running.begins, raises=_running.raises)


def watch_backwards() -> None:
    """From now on, know when a backward of torch's begins and how it ends."""
    if not _watch.is_open:
        _watch.open()
