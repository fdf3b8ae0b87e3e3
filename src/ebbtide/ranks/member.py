"""A wrapper's calls on this rank: where they meet the other ranks, and what leaves them.

A steady step reads one bool before the wrapper's forward, one when its module's has returned, one when the backward of
the planned step begins and one when the whole backward has returned. Whatever error leaves a planned call or its
backward on the way is told to the other ranks before it is raised here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.errors import EbbtideError
from ebbtide.ranks.first_call import FirstCall
from ebbtide.ranks.journal import Event
from ebbtide.ranks.rank_group import RankGroup, is_known_to_all
from ebbtide.torch_seams.autograd import BackwardWatch
from ebbtide.torch_seams.data_parallel import exchanges_gradients, group_of, running_wrapper
from ebbtide.torch_seams.process_groups import comes_from_a_collective

__all__ = ["ALONE", "Alone", "Exchange", "Member", "member_of"]

OutputsT = TypeVar("OutputsT")

_members: MutableMapping[torch.nn.Module, Alone] = WeakIdKeyDictionary()
_groups: list[RankGroup] = []
_NOT_WHOLE = "The gradients of this step are not whole on any rank: clear them before another one"


def member_of(module: torch.nn.Module) -> Alone:
    """This rank as one of those of the wrapper whose forward calls ``module``; ``ALONE`` outside of one."""
    wrapper = running_wrapper(module)
    if wrapper is None:
        return ALONE
    known = _members.get(wrapper)
    if known is None or not known.is_open:
        known = _members[wrapper] = _member(wrapper)
    return known


def _member(wrapper: DistributedDataParallel) -> Alone:
    torchs, device = group_of(wrapper)
    if torchs.size() == 1:
        return ALONE
    _groups[:] = [each for each in _groups if each.is_open]
    group = next((each for each in _groups if each.is_of(torchs)), None)
    if group is None:
        group = RankGroup(torchs, device)
        _groups.append(group)
        _watch.open()
    member = Member(group, group.add(wrapper), weakref.ref(wrapper))
    wrapper.register_forward_pre_hook(_Entry(member))
    return member


@dataclass(eq=False)
class _Entry:
    """The hook before a wrapper's forward. A copy of it, as of a wrapper that is copied or pickled, does nothing."""

    member: Member | None = None

    def __call__(self, wrapper: torch.nn.Module, args: object) -> None:
        del wrapper, args
        if self.member is not None and self.member.group.is_open:
            self.member.group.begin(self.member.forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Entry, ()


class Alone:
    """What a planned call does for other ranks where there are none: nothing."""

    is_open = True

    def enter(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """A planned call of the wrapper's module begins; ``facts`` are what has to be the same on all ranks.

        Raises:
            EbbtideError: what another rank has published, or that ranks differ.
        """

    def leave(self, outputs: OutputsT) -> OutputsT:
        """The call returns ``outputs``.

        Raises:
            EbbtideError: what another rank has published.
        """
        return outputs

    def failed(self, error: BaseException) -> None:
        """The call raises ``error``: tell the others, if they do not know."""

    def planned(self) -> None:
        """This rank has a plan for the call, or needs none. Before the first step all have to.

        Raises:
            EbbtideError: what another rank is refused with.
        """

    def planning(self) -> AbstractContextManager[None]:
        """Open while a plan is made for the call."""
        return nullcontext()

    def tell(self, error: BaseException) -> None:
        """Publish ``error``, which this rank raises outside of its calls and backwards."""

    def exchange(self) -> Exchange | None:
        """The backward of the call that runs."""
        return None


ALONE = Alone()


class Member(Alone):
    """This rank as one of those that train a wrapper.

    Args:
        group: the ranks.
        number: of the wrapper among those of the group.
        wrapper: it.
    """

    def __init__(self, group: RankGroup, number: int, wrapper: weakref.ref[DistributedDataParallel]) -> None:
        self.group = group
        self.forward, self.backward = Event("forward", number), Event("backward", number)
        self._wrapper = wrapper
        self._first: FirstCall | None = FirstCall(group, number)

    @property
    def is_open(self) -> bool:
        """Whether torch's group has not been destroyed."""
        return self.group.is_open

    def enter(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Before the first step, meet the others."""
        if self._first is not None:
            self._first.come(facts())

    def leave(self, outputs: OutputsT) -> OutputsT:
        """Raise what another rank has published while the forward ran."""
        if self.group.failing:
            self.group.raise_failure()
        return outputs

    def failed(self, error: BaseException) -> None:
        """Say that this rank is refused, or fails."""
        if self._first is None:
            self.group.tell(error)
        else:
            self._refused(self._first, error)

    def _refused(self, first: FirstCall, error: BaseException) -> None:
        try:
            if first.planning and not is_known_to_all(error):
                first.refused(error)
            else:
                self.group.tell(error)
        except EbbtideError as other:  # somebody else has failed meanwhile; what this one raises is its own
            error.add_note(str(other))
        finally:
            first.again()

    def planned(self) -> None:
        """Before the first step, wait until all ranks have planned."""
        if self._first is not None:
            self._first.planned()
            self._first = None

    def planning(self) -> AbstractContextManager[None]:
        """Let the others wait for this rank; before the first step they do so anyway."""
        return nullcontext() if self._first is not None else self.group.planning()

    def tell(self, error: BaseException) -> None:
        """Publish ``error``."""
        self.group.tell(error)

    def exchange(self) -> Exchange:
        """The exchange of gradients that follows."""
        wrapper = self._wrapper()
        return Exchange(self, synced=wrapper is not None and exchanges_gradients(wrapper))


@dataclass(eq=False, slots=True)
class Exchange:
    """The backward of one planned call.

    Attributes:
        member: whose call it was.
        synced: whether gradients are exchanged in it.
        begun: whether the planned step's part has begun.
        sent: whether it is over, so that gradients are on their way to the others.
    """

    member: Member
    synced: bool
    begun: bool = False
    sent: bool = False

    def begins(self, *_: object) -> None:
        """The planned step's backward begins: the last moment at which nobody waits for this rank.

        Raises:
            EbbtideError: what another rank has published.
        """
        if self.begun:
            return
        group = self.member.group
        _running.exchange = self
        if group.others_plan and self.synced:
            group.wait_for_plans()
        group.begin(self.member.backward if self.synced else None)
        self.begun = True


class _Running:
    """The backward that runs, whichever thread runs its nodes."""

    exchange: Exchange | None = None


_running = _Running()


def _returned() -> None:
    """A backward has returned: raise what another rank has published while this one was in the exchange."""
    exchange, _running.exchange = _running.exchange, None
    if exchange is None:
        return
    group = exchange.member.group
    if exchange.sent and exchange.synced:
        group.exchanged.add(exchange.member.backward.wrapper)
    if group.failing:
        group.raise_failure()


def _raised(error: BaseException) -> None:
    """A backward raises ``error``: tell the others what is of this rank, and say in words what is of another."""
    exchange, _running.exchange = _running.exchange, None
    if exchange is None or is_known_to_all(error):
        return
    group = exchange.member.group
    if exchange.begun and exchange.sent and comes_from_a_collective(error):
        if (named := group.explain()) is not None:
            named.add_note(_NOT_WHOLE)
            group.tell(named, unsent=exchange.synced)
            raise named from error
    elif isinstance(error, EbbtideError) or not exchange.sent:
        error.add_note(_NOT_WHOLE)
        group.tell(error, unsent=exchange.synced and exchange.begun and not exchange.sent)


_watch = BackwardWatch(_returned, raises=_raised)
