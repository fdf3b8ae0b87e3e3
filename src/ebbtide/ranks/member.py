"""A wrapper's calls on this rank: where they meet the other ranks, and what leaves them.

1. A steady step reads one bool before the wrapper's forward, one when its module's has returned, one when its backward
   begins and one when the whole backward has returned.
2. Whatever error leaves a planned call or its backward on the way is told to the other ranks before it is raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ebbtide.errors import EbbtideError
from ebbtide.ranks.backwards import StepBackward, WrapperBackward, watch_backwards
from ebbtide.ranks.first_call import FirstCall
from ebbtide.ranks.journal import Event
from ebbtide.ranks.rank_group import RankGroup, is_known_to_all, known_group
from ebbtide.torch_seams.data_parallel import (
    exchanges_before_forward,
    exchanges_gradients,
    group_of,
    running_wrapper,
)
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["ALONE", "Alone", "Member", "member_of"]

_members: MutableMapping[torch.nn.Module, Alone] = WeakIdKeyDictionary()


def member_of(module: torch.nn.Module) -> Alone:
    """This rank as one of those of the wrapper whose forward calls ``module``; ``ALONE`` outside of one."""
    wrapper = running_wrapper(module)
    if wrapper is None:
        return ALONE
    known = _members.get(wrapper)
    if known is None or not known.is_open:
        known = _members[wrapper] = _member(wrapper, module)
    return known


def _member(wrapper: DistributedDataParallel, module: torch.nn.Module) -> Alone:
    torchs, device = group_of(wrapper)
    if torchs.size() == 1:
        return ALONE
    group = known_group(torchs, device)
    watch_backwards()
    member = Member(group, group.add(wrapper), wrapper)
    wrapper.register_forward_pre_hook(_Entry(member))
    if wrapper.module is not module:
        wrapper.register_forward_hook(_Exit(member))
    return member


@dataclass(eq=False)
class _Entry:
    """The hook before a wrapper's forward. A copy of it, as of a wrapper that is copied or pickled, does nothing."""

    member: Member | None = None

    def __call__(self, wrapper: DistributedDataParallel, args: object) -> None:
        del args
        if self.member is not None and self.member.is_open:
            self.member.forward_begins(wrapper)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@dataclass(eq=False)
class _Exit(_Entry):
    """The hook behind a wrapper's forward of which a part is planned: what is around that has exchanges before it."""

    def __call__(self, wrapper: DistributedDataParallel, args: object, outputs: object = None) -> None:  # type: ignore[override]
        del wrapper, args
        if self.member is None or not self.member.is_open:
            return
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.grad_fn.register_prehook(self.member.backward.begins)


class Alone:
    """What a planned call does for other ranks where there are none: nothing."""

    is_open = True

    def enter(self, facts: Callable[[], Mapping[str, str | int]]) -> None:
        """A planned call of the wrapper's module begins; ``facts`` are what has to be the same on all ranks.

        Raises:
            EbbtideError: what another rank has published, or that ranks differ.
        """

    def leave(self) -> None:
        """The call has run, and is about to return.

        Raises:
            EbbtideError: what another rank has published.
        """

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

    def exchange(self) -> StepBackward | None:
        """The backward of the call that runs."""
        return None


ALONE = Alone()


class Member(Alone):
    """This rank as one of those that train a wrapper.

    Args:
        group: the ranks.
        number: of the wrapper among those of the group.
        wrapper: it, whose forward runs.

    Attributes:
        group: the ranks.
        backward: that of the wrapper.
    """

    def __init__(self, group: RankGroup, number: int, wrapper: DistributedDataParallel) -> None:
        self.group = group
        self.backward = WrapperBackward(group, number, exchanges=exchanges_gradients(wrapper))
        self._number = number
        self._first: FirstCall | None = FirstCall(group, number)

    @property
    def is_open(self) -> bool:
        """Whether torch's group has not been destroyed."""
        return self.group.is_open

    def forward_begins(self, wrapper: DistributedDataParallel) -> None:
        """The wrapper's forward begins, with whatever it exchanges.

        Raises:
            EbbtideError: what another rank has published.
        """
        event = None
        if exchanges_before_forward(wrapper, exchanged=self.group.exchanged[self._number]):
            event = Event("forward" if torch.is_grad_enabled() else "buffers", self._number)
        self.group.begin(event)
        if exchanges_gradients(wrapper):
            self.backward.arm()

    def enter(self, facts: Callable[[], Mapping[str, str | int]]) -> None:
        """Before the first step, meet the others."""
        if self._first is not None:
            self._first.come(facts())

    def leave(self) -> None:
        """Raise what another rank has published while the forward ran."""
        if self.group.failing:
            self.group.raise_failure()

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

    def exchange(self) -> StepBackward:
        """The backward of the planned call that runs."""
        return StepBackward(self.backward)
