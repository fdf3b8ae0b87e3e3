"""What goes wrong on one rank of a case: each function puts it in, for the step at which it is to come."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbtide.errors import BudgetExceeded, TierError, VerificationError

__all__ = ["FAULTS"]


def _in_planning(act: Callable[[], None], at: int) -> None:
    """Have ``act`` called while the plan number ``at`` is made."""
    from ebbtide.engine import loop

    measure, calls = loop.with_measured_costs, iter(range(1000))

    def measured(*args: Any) -> Any:
        if next(calls) == at:
            act()
        return measure(*args)

    loop.with_measured_costs = measured


def _in_backward(error: Callable[[], BaseException], at: int) -> None:
    """Have planned backward number ``at`` raise."""
    from ebbtide.engine import executor

    compute, calls = executor._gradients, iter(range(1000))

    def computed(*args: Any) -> Any:
        if next(calls) == at:
            raise error()
        return compute(*args)

    executor._gradients = computed


def _after_backward(error: Callable[[], BudgetExceeded], at: int) -> None:
    """Have the judge of steps raise once the backward of step ``at``, which is recorded, has returned."""
    from ebbtide.engine.judging import Judge

    say, begins, calls = Judge._say, Judge.call_begins, list[bool]()

    def call_begins(judge: Any) -> None:
        calls.append(True)
        begins(judge)
        calls[-1] = False

    def said(judge: Any) -> None:
        if len(calls) == at + 1 and not calls[-1]:
            judge._verdict = error()
        say(judge)

    Judge._say, Judge.call_begins = said, call_begins


def kill(number: int) -> None:
    """End this process by a signal; ``launch`` knows by a file that it does not wait for others."""
    Path(os.environ["RANK_FILES"] + ".killed").touch()
    if number == signal.SIGSEGV:
        ctypes.string_at(0)
    os.kill(os.getpid(), number)
    time.sleep(60)


def _kill_later(tenths: int) -> None:
    later = threading.Timer(tenths / 10, lambda: kill(signal.SIGKILL))
    later.daemon = True
    later.start()


def _interrupt_at_the_store(at: int) -> None:
    """Have Ctrl-C come while this rank, which has planned, waits for the others to say so."""
    from ebbtide.ranks.rank_group import RankGroup

    gather = RankGroup.gather

    def gathered(group: Any, key: str, own: str, **more: Any) -> Any:
        if key.endswith(f"{at}/planned"):
            threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return gather(group, key, own, **more)

    RankGroup.gather = gathered


def _skew_costs(at: int) -> None:
    """Have the ops of this rank take other seconds than they do."""
    from ebbtide.engine import loop

    measure = loop.with_measured_costs

    def measured(*args: Any) -> Any:
        program = measure(*args)
        ops = [replace(op, seconds=op.seconds * ((i + at) * 5 % 7 + 1)) for i, op in enumerate(program.ops)]
        return replace(program, ops=tuple(ops))

    loop.with_measured_costs = measured


def _no_store(at: int) -> None:
    """Have the group's store out of reach."""
    from torch.distributed import distributed_c10d

    from ebbtide.ranks import rank_group

    def gone(*_: Any) -> Any:
        raise RuntimeError(f"connection {at} refused")

    rank_group._groups.clear()
    distributed_c10d._get_process_group_store = gone


def _another_version(at: int) -> None:
    from ebbtide.engine import alike

    alike.__version__ = f"0.{at}.another"


FAULTS: dict[str, Callable[[int], None]] = {
    "skewed costs": _skew_costs,
    "no store": _no_store,
    "killed later": _kill_later,
    "killed before": lambda at: kill(signal.SIGKILL),
    "interrupted at the store": _interrupt_at_the_store,
    "another version": _another_version,
    "slow": lambda at: _in_planning(lambda: time.sleep(4), at),
    "late": lambda at: _in_planning(lambda: time.sleep(40), at),
    "killed": lambda at: _in_planning(lambda: kill(signal.SIGKILL), at),
    "segfault": lambda at: _in_planning(lambda: kill(signal.SIGSEGV), at),
    "interrupted": lambda at: _in_planning(lambda: os.kill(os.getpid(), signal.SIGINT), at),
    "verification": lambda at: _in_backward(lambda: VerificationError("other bits", buffer="b", op="mm"), at),
    "tier": lambda at: _in_backward(lambda: TierError("the disk is full", tier="disk"), at),
    "interrupted in backward": lambda at: _in_backward(KeyboardInterrupt, at),
    "exceeded": lambda at: _after_backward(
        lambda: BudgetExceeded("it went over", budget_bytes=1, measured_peak_bytes=2), at
    ),
}
"""By name, called with the number of the step, or of the plan, at which it is to come."""
