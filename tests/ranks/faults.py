"""What goes wrong on one rank of a case: each function puts it in, for the step at which it is to come."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
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


def _interrupt_later(seconds: float) -> None:
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def _another_version(at: int) -> None:
    from ebbtide.engine import alike

    alike.__version__ = f"0.{at}.another"


FAULTS: dict[str, Callable[[int], None]] = {
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
