"""Runs a case of ``cases`` in several processes over gloo, and says what became of each of them.

1. A *rank* is a process that a fork server makes with torch imported. All ranks of a case join one group on 127.0.0.1,
   whose timeout is :data:`TIMEOUT`.
2. What a rank ends with is its :class:`Outcome`: what its case returned, or the error that left it. One that has ended
   without a word has ``"ended"`` for its error, and one that is there at the limit ``"hangs"``; it is killed.
3. A rank that is done stays until all are (``stays``), as one whose script goes on after an error would: whoever waits
   for it in a collective is not woken by its end.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LIMIT_SECONDS", "TIMEOUT", "Outcome", "free_port", "run_ranks"]

TIMEOUT = datetime.timedelta(seconds=15)
LIMIT_SECONDS = 60.0
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "ebbtide",
    "ebbtide._api.fit",
    "rank_cases.cases",
)
_STAYS_SECONDS = 40.0


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        error: the class of its error; empty if it returned.
        text: of the error, with the notes on it.
        seconds: from the moment at which its group was there.
        found: what the case returned.
    """

    error: str = ""
    text: str = ""
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict[str, Any])


def run_ranks(
    name: str, ranks: int = 2, *, seconds: float = LIMIT_SECONDS, stays: bool = True, **arguments: Any
) -> list[Outcome]:
    """What became of each rank of case ``name``.

    Args:
        name: of a function of ``cases``, called with the rank, how many there are and ``arguments``.
        ranks: how many.
        seconds: after which what is still there is killed.
        stays: whether a rank that is done waits for the others.
        arguments: of the case.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    with tempfile.TemporaryDirectory() as folder:
        job = json.dumps({"name": name, "ranks": ranks, "port": free_port(), "stays": stays, "arguments": arguments})
        children = [context.Process(target=_rank, args=(rank, job, folder), daemon=True) for rank in range(ranks)]
        end = time.monotonic() + seconds
        try:
            for each in children:
                each.start()
            while any(each.is_alive() for each in children) and time.monotonic() < end:
                time.sleep(0.05)
            hanging = [each.is_alive() for each in children]
        finally:
            for each in children:
                if each.pid is not None:
                    each.kill()
                    each.join()
        return [_outcome(Path(folder), rank, hangs=hanging[rank]) for rank in range(ranks)]


def _outcome(folder: Path, rank: int, *, hangs: bool) -> Outcome:
    path, said = folder / f"{rank}.json", folder / f"{rank}.txt"
    if path.exists():
        return Outcome(**json.loads(path.read_text()))
    return Outcome("hangs" if hangs else "ended", said.read_text()[-4000:] if said.exists() else "", LIMIT_SECONDS)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, job: str, folder: str) -> None:
    """The process of a rank."""
    import torch
    import torch.distributed as dist

    from rank_cases import cases

    asked = json.loads(job)
    os.environ["XDG_CACHE_HOME"], os.environ["RANK_FILES"] = f"{folder}/cache-{rank}", f"{folder}/{rank}"
    out = open(Path(folder, f"{rank}.txt"), "w", buffering=1)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what it starts beside itself
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 10, exit=False)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{asked['port']}",
        rank=rank,
        world_size=asked["ranks"],
        timeout=TIMEOUT,
    )
    begin = time.monotonic()
    try:
        found = getattr(cases, asked["name"])(rank, asked["ranks"], **asked["arguments"])
        outcome = {"found": found}
    except BaseException as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        outcome = {"error": type(error).__name__, "text": text, "found": getattr(error, "found", {})}
        traceback.print_exc()
    outcome["seconds"] = time.monotonic() - begin
    path = Path(folder, f"{rank}.json")
    path.with_suffix(".part").write_text(json.dumps(outcome))
    path.with_suffix(".part").rename(path)
    with contextlib.suppress(Exception):
        _wait_for_others(Path(folder), asked)
    sys.stdout.flush()
    os._exit(0)


def _wait_for_others(folder: Path, asked: dict[str, Any]) -> None:
    end = time.monotonic() + (_STAYS_SECONDS if asked["stays"] else 0)
    while time.monotonic() < end and not all(_is_done(folder, rank) for rank in range(asked["ranks"])):
        time.sleep(0.05)


def _is_done(folder: Path, rank: int) -> bool:
    return (folder / f"{rank}.json").exists() or (folder / f"{rank}.killed").exists()
