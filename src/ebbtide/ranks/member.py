"""A wrapper's calls on this rank: where they meet the other ranks, and what leaves them.

1. A forward with gradients outside of ``no_sync`` *arms* the wrapper's reducer: the next backward that goes through the
   wrapper exchanges gradients, once, however many forwards it goes through.
2. A steady step reads one bool before the wrapper's forward, one when its module's has returned, one when its backward
   begins and one when the whole backward has returned.
3. Whatever error leaves a planned call or its backward on the way is told to the other ranks before it is raised here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
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
from ebbtide.torch_seams.data_parallel import (
    exchanges_before_forward,
    exchanges_gradients,
    group_of,
    running_wrapper,
)
from ebbtide.torch_seams.process_groups import comes_from_a_collective
from ebbtide.torch_seams.trees import tree_leaves

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
        known = _members[wrapper] = _member(wrapper, module)
    return known


def _member(wrapper: DistributedDataParallel, module: torch.nn.Module) -> Alone:
    torchs, device = group_of(wrapper)
    if torchs.size() == 1:
        return ALONE
    _groups[:] = [each for each in _groups if each.is_open]
    group = next((each for each in _groups if each.is_of(torchs)), None)
    if group is None:
        group = RankGroup(torchs, device)
        _groups.append(group)
    if not _watch.is_open:
        _watch.open()
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
                each.grad_fn.register_prehook(self.member.backward_begins)


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
        wrapper: it, whose forward runs.

    Attributes:
        group: the ranks.
        backward: its exchange of gradients.
        steps: planned ones of the backward that runs, or has run.
    """

    def __init__(self, group: RankGroup, number: int, wrapper: DistributedDataParallel) -> None:
        self.group = group
        self.backward = Event("backward", number)
        self._first: FirstCall | None = FirstCall(group, number)
        self._armed = exchanges_gradients(wrapper)
        self.steps = _Steps()

    @property
    def is_open(self) -> bool:
        """Whether torch's group has not been destroyed."""
        return self.group.is_open

    def forward_begins(self, wrapper: DistributedDataParallel) -> None:
        """The wrapper's forward begins, with whatever it exchanges.

        Raises:
            EbbtideError: what another rank has published.
        """
        exchanged, event = self.backward.wrapper in self.group.exchanged, None
        if exchanges_before_forward(wrapper, exchanged=exchanged):
            event = Event("forward" if torch.is_grad_enabled() else "buffers", self.backward.wrapper)
        self.group.begin(event)
        self._armed = self._armed or exchanges_gradients(wrapper)

    def backward_begins(self, *_: object) -> None:
        """A backward comes to the wrapper: the last moment at which nobody waits for this rank.

        Raises:
            EbbtideError: what another rank has published.
        """
        if self in _running.members:
            return
        _running.members.append(self)
        self.steps = _Steps(exchanges=self._armed)
        if self._armed and self.group.others_plan:
            self.group.wait_for_plans()
        self.group.begin(self.backward if self._armed else None)
        self.steps.has_begun = True

    def backward_returned(self) -> None:
        """The backward that went through the wrapper has returned."""
        if self.steps.exchanges and self.steps.are_sent:
            self.group.exchanged.add(self.backward.wrapper)
            self._armed = False

    def step_begins(self) -> None:
        """The backward of a planned step of the wrapper begins.

        Raises:
            EbbtideError: what another rank has published.
        """
        self.backward_begins()
        self.steps.begun += 1

    def step_ends(self) -> None:
        """The backward of a planned step is over: its gradients are on their way to the others."""
        self.steps.done += 1

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
        """The backward of the planned call that runs."""
        return Exchange(self)


@dataclass(slots=True)
class _Steps:
    """The planned steps of one wrapper in one backward.

    Attributes:
        exchanges: whether gradients are exchanged in it.
        has_begun: whether the other ranks count on this one in it.
        begun: how many have begun.
        done: how many are over.
    """

    exchanges: bool = False
    has_begun: bool = False
    begun: int = 0
    done: int = 0

    @property
    def are_sent(self) -> bool:
        """Whether all gradients are on their way to the others, as far as they come from planned steps."""
        return self.has_begun and self.begun == self.done > 0


@dataclass(eq=False, slots=True)
class Exchange:
    """The backward of one planned call.

    Attributes:
        member: whose call it was.
        begun: whether it has begun.
    """

    member: Member
    begun: bool = False

    def begins(self, *_: object) -> None:
        """It begins; it is called once or twice.

        Raises:
            EbbtideError: what another rank has published.
        """
        if not self.begun:
            self.member.step_begins()
            self.begun = True

    def ends(self) -> None:
        """It is over."""
        self.member.step_ends()


class _Running:
    """The backward that runs, whichever thread runs its nodes; one that another one calls is a part of that."""

    def __init__(self) -> None:
        self.depth = 0
        self.members: list[Member] = []

    def begins(self, *_: object) -> None:
        """One begins."""
        self.depth += 1

    def returns(self) -> None:
        """One has ended: raise what another rank has published while this one was in the exchange."""
        self.depth = max(self.depth - 1, 0)
        if self.depth or not self.members:
            return
        members, self.members = self.members, []
        for each in members:
            each.backward_returned()
        for each in members:
            if each.group.failing:
                each.group.raise_failure()

    def raises(self, error: BaseException) -> None:
        """One raises ``error``: tell the others what is of this rank, and say in words what is of another."""
        if self.depth > 1 or not self.members:
            return
        members, self.members = self.members, []
        if is_known_to_all(error):
            return
        for group in {each.group for each in members}:
            _tell(group, [each for each in members if each.group is group], error)


def _tell(group: RankGroup, members: Sequence[Member], error: BaseException) -> None:
    begun = [each.backward for each in members if each.steps.exchanges and each.steps.has_begun]
    unsent = [each.backward for each in members if each.backward in begun and not each.steps.are_sent]
    are_sent = all(each.steps.are_sent for each in members)
    if are_sent and comes_from_a_collective(error):
        if (named := group.explain()) is not None:
            named.add_note(_NOT_WHOLE)
            group.tell(named, unsent=begun)
            raise named from error
    elif isinstance(error, EbbtideError) or not are_sent:
        error.add_note(_NOT_WHOLE)
        group.tell(error, unsent=unsent)


_running = _Running()
_watch = BackwardWatch(_running.returns, begins=_running.begins, raises=_running.raises)
