"""A better plan, searched by a process of its own while training goes on under the first one.

1. The *request* is problems as they are planned in full: program, budget, machine, effort, and the schedule of a first
   plan to start from. The *answers* are what the planner gives and the smallest budgets, as the plan cache keeps them.
2. The process imports this module and nothing of the user's: it is started with ``-m`` and knows no script. It has the
   lowest priority, and waits until no other of this user searches beside training.
3. It ends with the process that started it, at the latest a second later, however that ends. Both files have no name,
   so that nothing of it stays behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from ebbtide.children import end_with_starter, start_child
from ebbtide.files import cache_directory, locked
from ebbtide.planners.base import Interrupt, Problem
from ebbtide.planners.registry import planner_named
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.cache import CachedAnswer
from ebbtide.step.machine import Machine
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule

__all__ = ["Search"]

NICENESS = 19
"""Of the process that searches: the lowest priority. A core that is busy otherwise gives it a hundredth of its time."""
_LOCK = "beside.lock"


@dataclass(eq=False)
class Search:
    """One search that goes on beside this process.

    Attributes:
        process: that searches.
        owner: number of the process that started it; to one that was forked from that it is nothing.
    """

    process: subprocess.Popen[bytes]
    owner: int
    _answers: IO[bytes]

    @staticmethod
    def begin(planner: str, problems: Sequence[Problem]) -> Search | None:
        """Start a search; ``None`` where no process can be started.

        Args:
            planner: its name.
            problems: what it is asked, one after the other.
        """
        with contextlib.ExitStack() as failed:
            try:
                answers = failed.enter_context(tempfile.TemporaryFile())
                with tempfile.TemporaryFile() as request:
                    request.write(json.dumps([planner, *map(_request, problems)]).encode())
                    request.seek(0)
                    process = start_child(__name__, NICENESS, stdin=request, stdout=answers)
            except (OSError, ValueError):
                return None
            failed.pop_all()
        return Search(process, os.getpid(), answers)

    @property
    def goes_on(self) -> bool:
        """Whether there is no answer yet, and may be one."""
        return os.getpid() == self.owner and self.process.poll() is None

    def answers(self) -> list[CachedAnswer | None]:
        """What was found by a search that goes on no more, problem by problem; empty where it failed."""
        if os.getpid() != self.owner:
            return []
        self._answers.seek(0)
        try:
            found: list[Any] = json.loads(self._answers.read())
            return [None if each is None else CachedAnswer.from_json(each) for each in found]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []
        finally:
            self._answers.close()

    def end(self) -> None:
        """Stop searching, whatever was found."""
        if os.getpid() != self.owner or self.process.returncode is not None:
            return
        self.process.kill()
        self.process.wait()
        self._answers.close()


def _request(problem: Problem) -> dict[str, Any]:
    return {
        "program": problem.program.to_json(),
        "above_budget_bytes": problem.above_budget_bytes,
        "machine": None if problem.machine is None else problem.machine.to_json(),
        "tiers": list(problem.tiers),
        "effort": problem.effort,
        "seed": problem.seed,
        "seeds": [each.to_json() for each in problem.seeds],
    }


def _problem(request: dict[str, Any]) -> Problem:
    return Problem(
        program=Program.from_json(request["program"]),
        above_budget_bytes=request["above_budget_bytes"],
        machine=None if request["machine"] is None else Machine.from_json(request["machine"]),
        tiers=tuple(request["tiers"]),
        effort=request["effort"],
        seed=request["seed"],
        seeds=tuple(map(Schedule.from_json, request["seeds"])),
        interrupt=Interrupt(),
    )


# -- in the process that searches -----------------------------------------------------------------------------


def _main() -> None:
    (niceness,) = map(int, end_with_starter())
    with contextlib.suppress(OSError):
        os.nice(niceness)
    name, *requests = json.load(sys.stdin.buffer)
    planner, found = planner_named(name), list[dict[str, Any] | None]()
    with contextlib.ExitStack() as alone:
        with contextlib.suppress(OSError):  # where there is no place for a lock, several search at once
            alone.enter_context(locked(cache_directory() / _LOCK, -1))
        for problem in map(_problem, requests):
            answer = planner(problem)
            smallest, _ = smallest_of(problem.program, links=problem.links)
            found.append(None if answer.schedule is None else CachedAnswer(answer, smallest).to_json())
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    _main()
