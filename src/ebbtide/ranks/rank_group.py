"""One rank among those of a process group: a thread that looks for what others publish, and what follows a failure.

1. Every rank *beats*: its thread counts on in the store once a second. One whose count stands still for a while has
   ended, or hangs.
2. The first rank that fails *publishes* that. The threads of the others see it and *acknowledge*: from then on they
   begin no exchange, and say which they have begun. The one that failed waits for that, not long, and *decides* up to
   which exchange all have to come so that nobody stays in one: the furthest that anybody has begun.
3. Who lacks some of these *stands in* for its part of them, and raises what has been published: in the forward's or
   backward's begin, or, who was in the exchange, when it returns. No optimizer has stepped.
4. Then all ranks are at the same place, and a loop that has caught it on all may go on: the next failure is another.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebbtide.errors import EbbtideError, RankError
from ebbtide.ranks.journal import Event, Journal
from ebbtide.ranks.messages import Failure
from ebbtide.torch_seams.data_parallel import exchanges_so_far, stand_in_for_backward, stand_in_for_forward
from ebbtide.torch_seams.process_groups import (
    GroupStore,
    StoreGone,
    all_processes,
    is_open,
    ranks_in,
    timeout_seconds,
)

__all__ = ["RankGroup", "is_known_to_all", "known_group", "known_to_all", "say_alive"]

ErrorT = TypeVar("ErrorT", bound=BaseException)

_groups: list[RankGroup] = []

_LOOK_SECONDS, _BEAT_SECONDS = 0.2, 1.0
_LATE_SECONDS = 1.0
_ACKNOWLEDGED_SECONDS = 3.0
_EXPLAINED_SECONDS = 3.0
_SILENT_SHARE, _MOST_SILENT_SECONDS = 2 / 3, 60.0
"""How long a rank may be silent: a share of the group's timeout, so that it is named before that, and no longer.

A thread may have to wait for the interpreter while another plans: 3.3 s at the most were seen on a GPT of 12 layers."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.001, 0.05
"""Between two looks of one that waits; they begin short, for ranks that come at the same time."""


_KNOWN = "_known_to_all_ranks"


def known_to_all(error: ErrorT) -> ErrorT:
    """``error``, of which nobody has to be told any more: every rank raises it, or what says the same."""
    vars(error)[_KNOWN] = True
    return error


def is_known_to_all(error: BaseException) -> bool:
    """Whether nobody has to be told of ``error``."""
    return _KNOWN in vars(error)


def known_group(group: dist.ProcessGroup, device: torch.device) -> RankGroup:
    """The ranks of torch's ``group``, which exchanges on ``device``.

    Raises:
        RankError: if its store cannot be reached.
    """
    _groups[:] = [each for each in _groups if each.is_open]
    known = next((each for each in _groups if each.is_of(group)), None)
    if known is None:
        known = RankGroup(group, device)
        _groups.append(known)
    return known


def say_alive(device: torch.device) -> None:
    """Beat from now on (definition 1), if this is one of several processes: before its first planned call it may end.

    Args:
        device: of the model that is to be trained.
    """
    group = all_processes()
    if group is not None and group.size() > 1:
        with contextlib.suppress(RankError, RuntimeError):  # what cannot be reached is said at the first planned call
            known_group(group, device)


class RankGroup:
    """What this process knows of one process group.

    Args:
        group: torch's.
        device: on which it exchanges.

    Attributes:
        failing: whether a rank has published a failure that this one has not raised yet: what steady steps read.
        others_plan: whether another rank makes a plan, as this one's thread has seen it last.
        number: of this rank in the world.
        numbers: of all of them.
        wrappers: of this group, in the order of their first planned calls, which is that of all ranks.
        looked: when it was last seen what others have published.
        exchanged: how many backwards of each have exchanged gradients, by its number.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.failing = self.others_plan = False
        self.wrappers: list[weakref.ref[DistributedDataParallel]] = []
        self.exchanged = Counter[int]()
        self._group = group
        self.rank, self.numbers = ranks_in(group)
        self.number = self.numbers[self.rank]
        self.timeout_seconds = timeout_seconds(group, device)
        self._silent_seconds = min(_SILENT_SHARE * self.timeout_seconds, _MOST_SILENT_SECONDS)
        try:
            self.store = GroupStore(group, self.rank)
            self.beat(0)
        except StoreGone as error:
            raise self._store_gone(error) from error
        self._lock = threading.Lock()
        self._journal = Journal()
        self._epoch = 0
        self._failure: Failure | None = None
        self._plans, self._others_plan_since = 0, 0.0
        self.looked = time.monotonic()
        self._beats: dict[int, tuple[str | None, float]] = {}
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="ebbtide-ranks", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether torch's group has not been destroyed."""
        return is_open(self._group)

    def is_of(self, group: dist.ProcessGroup) -> bool:
        """Whether it is of torch's ``group``."""
        return self._group is group

    @property
    def others(self) -> list[int]:
        """The places of the other ranks."""
        return [each for each in range(len(self.numbers)) if each != self.rank]

    def add(self, wrapper: DistributedDataParallel) -> int:
        """The number of a wrapper, which has its first planned call."""
        self.wrappers.append(weakref.ref(wrapper))
        number = len(self.wrappers) - 1
        self.exchanged[number] = exchanges_so_far(wrapper)
        return number

    # -- where a step meets the others ------------------------------------------------------------------------------

    def begin(self, event: Event | None) -> None:
        """An exchange is about to begin here, or a call that holds none.

        Raises:
            EbbtideError: what another rank has published.
        """
        if time.monotonic() - self.looked > _LATE_SECONDS:  # what has held up the thread has held up this one
            with contextlib.suppress(StoreGone):
                self.look()
        with self._lock:
            if not self.failing:
                if event is not None:
                    self._journal.begin(event)
                return
        self.raise_failure()

    def raise_failure(self) -> None:
        """Stand in for what others wait for, and raise what has been published (definition 3).

        Raises:
            EbbtideError: it.
        """
        failure = self._failure
        if failure is None:
            return
        with contextlib.suppress(StoreGone):
            self._follow()
        raise known_to_all(failure.error())

    def tell(self, error: BaseException, *, unsent: Sequence[Event] = ()) -> None:
        """Publish that this rank raises ``error``, if the others do not know it (definition 2).

        Args:
            error: which is raised when this returns.
            unsent: exchanges that were begun, and in which nothing was sent.
        """
        if is_known_to_all(error):
            return
        known_to_all(error)
        with self._lock:
            for each in unsent:
                self._journal.take_back(each)
            others_failed = self.failing
        with contextlib.suppress(StoreGone):
            if others_failed or self.store.add(f"claim/{self._epoch}", 1) > 1:
                self._follow()
            else:
                self._lead(Failure.of(self.number, error))

    def _lead(self, failure: Failure) -> None:
        with self._lock:
            self._failure, self.failing = failure, True
            furthest = self._journal
        self.store.write(f"failed/{self._epoch}", failure.to_text())
        keys = [f"acknowledged/{self._epoch}/{each}" for each in self.others]
        said: Sequence[str | None] = ()
        for _ in _until(time.monotonic() + _ACKNOWLEDGED_SECONDS):
            said = self.store.read_all(keys)
            if None not in said:
                break
        for each in said:
            if each is not None and (journal := Journal.from_text(each)).count > furthest.count:
                furthest = journal
        self.store.write(f"decided/{self._epoch}", furthest.to_text())
        self._come_to(furthest)

    def _follow(self) -> None:
        text: str | None = None
        for _ in _until(time.monotonic() + 2 * _ACKNOWLEDGED_SECONDS):
            text = self.store.read(f"decided/{self._epoch}")
            if text is not None:
                break
        self._come_to(self._journal if text is None else Journal.from_text(text))

    def _come_to(self, target: Journal) -> None:
        """Take part in what this rank lacks of ``target``; the next failure is another (definitions 3 and 4)."""
        try:
            for event in self._journal.missing(target):
                wrapper = self.wrappers[event.wrapper]()
                if wrapper is not None and event.kind != "backward":
                    stand_in_for_forward(wrapper, gradients=event.kind == "forward")
                elif wrapper is not None:
                    stand_in_for_backward(wrapper, first=not self.exchanged[event.wrapper])
                    self.exchanged[event.wrapper] += 1
                self._journal.begin(event)
        except (RuntimeError, IndexError):  # others have ended, or wait no longer: nobody is left to stand in for
            pass
        with self._lock:
            self._journal = Journal(max(target.count, self._journal.count), self._journal.last)
            self._epoch += 1
            self._failure, self.failing = None, False

    # -- waiting ----------------------------------------------------------------------------------------------------

    def gather(
        self,
        key: str,
        own: str,
        *,
        limited: bool = False,
        enough: Callable[[Sequence[str | None]], float | None] | None = None,
    ) -> list[str]:
        """What every rank says under ``key``, where this one says ``own``; those who are silent are named.

        Args:
            key: the same on all ranks.
            own: what this one says.
            limited: whether who lives is waited for no longer than a collective would.
            enough: how many more seconds to wait for the rest, given what has been said; ``None`` is as long as they
                live. What was not said by then is an empty text.

        Raises:
            RankError: if a rank does not come, has ended or hangs.
            EbbtideError: what another rank has published meanwhile.
        """
        keys = [f"{key}/{each}" for each in range(len(self.numbers))]
        end: float | None = None
        try:
            self.store.write(keys[self.rank], own)
            begin = checked = time.monotonic()
            for now in _until(None):
                said = self.store.read_all(keys)
                if None not in said or (end is not None and now > end):
                    return [each or "" for each in said]
                if self.failing:
                    self.raise_failure()
                if enough is not None and end is None and (more := enough(said)) is not None:
                    end = now + more
                if now - checked > _BEAT_SECONDS:
                    checked = now
                    missing = [i for i, each in enumerate(said) if each is None]
                    self._require_alive(missing, now - begin, limited=limited)
        except StoreGone as error:
            raise self._store_gone(error) from error
        raise AssertionError("waiting has no end but these")

    def wait_for_plans(self) -> None:
        """Wait until no other rank makes a plan, as long as those that do are alive.

        Raises:
            RankError: if one has ended or hangs.
        """
        begin = checked = time.monotonic()
        try:
            for now in _until(None):
                if self.failing or self._planners() <= self._plans:
                    break
                if now - checked > _BEAT_SECONDS:
                    checked = now
                    self._require_alive([i for i in self.others if self.store.read(f"plans/{i}")], now - begin)
            self.others_plan = False
        except StoreGone as error:
            raise self._store_gone(error) from error

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Open while this rank alone makes a plan: the others wait for it before they exchange, if they can."""
        with contextlib.suppress(StoreGone):
            self._plans += 1
            self.store.write(f"plans/{self.rank}", "plans")
            self.store.add("planning", 1)
        try:
            yield
        finally:
            with contextlib.suppress(StoreGone):
                self._plans -= 1
                self.store.write(f"plans/{self.rank}", "")
                self.store.add("planning", -1)

    def _planners(self) -> int:
        """How many ranks make a plan alone."""
        return int(self.store.read("planning") or 0)

    def _require_alive(self, waited_for: Sequence[int], seconds: float, *, limited: bool = False) -> None:
        """Raise if one of these has been silent (definition 1), or has not come."""
        for each in waited_for:
            count, silent = self._silence(each)
            if (count is None or limited) and seconds > self.timeout_seconds:
                raise self._gone(
                    each,
                    f"has not come to its first training call within {self.timeout_seconds:.0f} s, the timeout of the "
                    "process group",
                )
            if count is not None and silent > self._silent_seconds:
                raise self._gone(each, f"has ended or hangs: it has been silent for {silent:.0f} s")

    def _gone(self, each: int, what: str) -> RankError:
        """That another rank is not to be waited for. It is told like any failure: who says so does not come either."""
        return RankError(f"rank {self.numbers[each]} {what}", rank=self.numbers[each])

    def _silence(self, each: int) -> tuple[str | None, float]:
        """The beat of a rank and for how many seconds it has stood still, as seen from here."""
        now = time.monotonic()
        known, since = self._beats.get(each, (None, now))
        count = self.store.read(f"beat/{each}")
        if count != known or each not in self._beats:
            since = now
        self._beats[each] = (count, since)
        return count, now - since

    def _store_gone(self, error: StoreGone) -> RankError:
        return known_to_all(
            RankError(
                "the store of the process group cannot be reached: the process that holds it, rank 0 most often, has "
                f"ended, or the group was destroyed ({str(error).splitlines()[0]})"
            )
        )

    # -- what a collective has raised -------------------------------------------------------------------------------

    def explain(self) -> EbbtideError | None:
        """What the store says of why a collective has failed here; ``None`` if it says nothing.

        Of a rank that plans the others are to be told: it lives, and would come to an exchange that is over.
        """
        self._beats.clear()
        try:
            for _ in _until(time.monotonic() + _EXPLAINED_SECONDS):
                if self.failing:
                    self.raise_failure()
                for each in self.others:
                    self._silence(each)
            for each in self.others:
                if self._silence(each)[1] > _EXPLAINED_SECONDS - _BEAT_SECONDS / 2:
                    return self._gone(each, "has ended or hangs")
                if self.store.read(f"plans/{each}"):
                    number, seconds = self.numbers[each], time.monotonic() - self._others_plan_since
                    return RankError(
                        f"rank {number} has been planning for {seconds:.0f} s, and the process group waits for "
                        f"{self.timeout_seconds:.0f} s",
                        rank=number,
                    )
        except StoreGone as gone:
            return self._store_gone(gone)
        except EbbtideError as error:
            return error
        return None

    # -- the thread -------------------------------------------------------------------------------------------------

    def beat(self, count: int) -> None:
        """Say that this process lives (definition 1)."""
        self.store.write(f"beat/{self.rank}", str(count))

    def look(self) -> None:
        """See what others have published, and acknowledge it (definition 2)."""
        epoch = self._epoch
        if not self.failing and (text := self.store.read(f"failed/{epoch}")) is not None:
            with self._lock:
                if epoch != self._epoch or self.failing:
                    return
                self._failure, self.failing = Failure.from_text(text), True
                own = self._journal.to_text()
            self.store.write(f"acknowledged/{epoch}/{self.rank}", own)
        self.looked = time.monotonic()
        others_plan = self._planners() > self._plans
        if others_plan and not self.others_plan:
            self._others_plan_since = time.monotonic()
        self.others_plan = others_plan


def _watch(of: weakref.ref[RankGroup]) -> None:
    """The thread of a rank, for as long as its group and the store are there."""
    beats, due = 0, 0.0
    while (group := of()) is not None and group.is_open:
        try:
            if time.monotonic() >= due:
                beats, due = beats + 1, time.monotonic() + _BEAT_SECONDS
                group.beat(beats)
            group.look()
        except StoreGone:
            group.looked = math.inf  # nobody can be asked any more
            return
        del group
        time.sleep(_LOOK_SECONDS)


def _until(end: float | None) -> Iterator[float]:
    """The time, again and again until ``end``, with longer and longer breaks."""
    pause = _SHORTEST_SECONDS
    while True:
        now = time.monotonic()
        yield now
        if end is not None and now >= end:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SECONDS)
