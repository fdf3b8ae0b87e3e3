"""Situations, each in a process of its own: forked from one that has imported modules and done nothing else.

1. Which modules a first step imports is told by a scout, a fork that trains a toy model and ends. What a group needs
   beside them is imported before the first of its situations.
2. The fork has no thread, no fitted model and no cache yet; a directory of its own is its user cache. It runs the
   situation by eager and fitted, judges it and sends a row through a pipe.
3. A situation of several processes is forked once more for each of the others before anything runs. Each has budget,
   bits and counts of its own; the row is the first one's, with the checks of all.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import ebbtide
from harness.record import Check, Row, at_most, holds
from situations.oracle import SLACK_BYTES, counter
from situations.registry import STATED, Situation, all_situations
from situations.run import COUNTS, Run, differences, seed_all, watch_engine

__all__ = ["PLANNED", "judged", "rows"]

PLANNED = "planned"
_FAULT = "fault.txt"
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LOADED = {"torch", "ebbtide", "numba", "llvmlite", "highspy", "sympy", "mpmath", "functorch", "networkx", "filelock"}
_HERE = str(Path(__file__).resolve().parent)


def rows(names: Iterable[str]) -> Iterator[Row]:
    """The rows of situations, each as ``group:name``, as they are asked for."""
    torch.set_num_threads(1)
    for module in _scouted():
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    counter()
    watch_engine()
    imported = set[str]()
    for group, _, name in (each.strip().partition(":") for each in names):
        known = all_situations([group])
        if group not in imported:
            imported.add(group)
            for module in getattr(importlib.import_module(f"situations.{group}"), "PRELOAD", ()):
                importlib.import_module(module)
            gc.collect()
            gc.freeze()
        yield _forked(known[name])


def _scouted() -> list[str]:
    """Definition 1, in the order of import."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("ebbtide._api.fit")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)  # whose other end may have given up
        try:
            with tempfile.TemporaryDirectory() as caches:
                os.environ["XDG_CACHE_HOME"] = caches
                model = ebbtide.fit(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), "1MiB")
                for _ in range(2):
                    model(torch.randn(3, 4)).sum().backward()
            with os.fdopen(writer, "w") as out:
                out.write("\n".join(name for name in sys.modules if name.partition(".")[0] in _LOADED))
        finally:
            os._exit(0)
    os.close(writer)
    names = (_read(reader, 600.0) or "").splitlines()
    os.close(reader)
    os.waitpid(child, 0)
    return names


def _forked(situation: Situation) -> Row:
    begin = time.monotonic()
    reader, writer = os.pipe()
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as caches:
        child = os.fork()
        if child == 0:
            os.close(reader)
            _in_child(situation, caches, writer)
        os.close(writer)
        text = _read(reader, situation.seconds)
        os.close(reader)
        if text is None:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        fault = Path(caches, _FAULT)
        where = _frames(fault.read_text()) if fault.exists() else ""
    seconds = round(time.monotonic() - begin, 1)
    if text:
        row = Row.from_json(json.loads(text))
    else:
        why = f"no end after {situation.seconds:g} s" if text is None else _died(status)
        columns = {"case": situation.name, "outcome": why, "why": why, "where": where}
        row = Row(situation.group, columns, (holds("outcome", False),))
    row.columns["seconds"] = seconds
    row.columns["cpu_seconds"] = round(usage.ru_utime + usage.ru_stime, 1)
    return row


def _frames(fault: str) -> str:
    """The innermost frames of a fault, as :mod:`faulthandler` wrote them."""
    found = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', fault)
    return " < ".join(f"{'/'.join(Path(file).parts[-3:])}:{line} {name}" for file, line, name in found[:8])


def _died(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit {os.WEXITSTATUS(status)} without a word"


def _read(reader: int, seconds: float) -> str | None:
    """What the child wrote until it closed the pipe; ``None`` if it did not in time."""
    end, parts = time.monotonic() + seconds, []
    while (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                return b"".join(parts).decode()
            parts.append(part)
    return None


def _in_child(situation: Situation, caches: str, writer: int) -> None:
    code = 1
    try:
        os.environ["XDG_CACHE_HOME"] = caches
        os.chdir(caches)
        faulthandler.enable(Path(_FAULT).open("w"))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        quiet = os.open(os.devnull, os.O_WRONLY)
        if "SITUATIONS_LOUD" not in os.environ:
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        others = _others(situation, writer)
        row = judged(situation)
        for rank, other in enumerate(others, 1):
            row = _joined(row, rank, _read(other, situation.seconds))
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(row.to_json()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _others(situation: Situation, writer: int) -> list[int]:
    """Fork the other processes of ``situation`` (definition 3); pipes on which their rows come."""
    readers: list[int] = []
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(situation.processes)}
    for rank in range(1, situation.processes):
        reader, own = os.pipe()
        readers.append(reader)
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # it waits for the first one otherwise
            os.close(writer)
            os.environ["RANK"] = str(rank)
            with os.fdopen(own, "w") as out:
                out.write(json.dumps(judged(situation).to_json()))
            os._exit(0)
        os.close(own)
    return readers


def _joined(row: Row, rank: int, text: str | None) -> Row:
    """``row`` with what the process of ``rank`` found."""
    if not text:
        return Row(row.question, row.columns, (*row.checks, holds(f"outcome of process {rank}", False)))
    other = Row.from_json(json.loads(text))
    why = f"process {rank}: {other.columns['why']}" if other.columns["why"] else ""
    columns = row.columns | {
        "why": "; ".join(filter(None, [row.columns["why"], why])),
        "processes": rank + 1,
        "peaks of processes": f"{row.columns.get('peaks of processes', row.columns.get('peak_bytes'))}, "
        f"{other.columns.get('peak_bytes')}",
        **{name: row.columns.get(name, 0) + other.columns.get(name, 0) for name in ("planned_calls", "calls")},
    }
    return Row(row.question, columns, (*row.checks, *other.checks))


def judged(situation: Situation) -> Row:
    """Run ``situation`` by eager and fitted, here, and hold it against what is expected."""
    columns: dict[str, Any] = {"case": situation.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all()
        eager = Run(eager=True)
        try:
            situation.run(eager)
        except Exception as error:
            columns |= {"outcome": "eager fails", "why": _in_words(error), "where": _where(error)}
            return Row(situation.group, columns, (holds("eager runs", False),))
    gc.collect()
    true_peak = max(eager.peaks, default=0)
    called, COUNTS.planned, COUNTS.captures = COUNTS.called, 0, 0
    budget = int(situation.share * true_peak) or None
    columns |= {"share": situation.share, "eager_bytes": true_peak}
    ours = Run(budget, eager=False)
    outcome, told, error_here = PLANNED, "", None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seed_all()
        try:
            situation.run(ours)
        except Exception as error:
            outcome, told, error_here = type(error).__name__, _in_words(error), error
    checks = [_outcome(situation, outcome, told)]
    columns |= {"outcome": outcome, "steps": len(ours.peaks), "of_steps": len(eager.peaks)}
    why: list[str] = [] if checks[0].passed and outcome == PLANNED else [told or "planned where a refusal is expected"]
    if outcome == PLANNED:
        checks += _held(situation, eager, ours, called, columns, why)
        if situation.said and (columns["steps_over"] or situation.limit):
            checks.append(holds("said", any(re.search(situation.said, str(each.message)) for each in said)))
    elif ours.peaks:
        _held(situation, eager, ours, called, columns, why)
    passed = all(check.passed for check in checks)
    columns["why"] = "; ".join(each for each in why if each and (not passed or each.startswith(STATED)))
    if error_here is not None and not checks[0].passed:
        columns["where"] = _where(error_here)
    columns["warned"] = _warned(said)
    columns |= {f"eager, {name}": value for name, value in eager.facts.items()} | ours.facts
    checks += [holds(f"eager: {what}", False) for what in eager.wrong]
    columns["why"] = "; ".join(filter(None, [columns["why"], *eager.wrong]))
    return Row(situation.group, columns, tuple(checks))


def _outcome(situation: Situation, outcome: str, told: str) -> Check:
    refused = situation.refused
    if refused is None or (situation.either and outcome == PLANNED):
        return holds("planned", outcome == PLANNED)
    right = (
        re.fullmatch(refused.error, outcome) is not None
        and re.search(refused.text, told, re.IGNORECASE | re.DOTALL) is not None
    )
    return holds(f"refused by {refused.error}{' or planned' if situation.either else ''}", right)


def _held(
    situation: Situation, eager: Run, ours: Run, called: int, columns: dict[str, Any], why: list[str]
) -> list[Check]:
    """Budget, bits, planned calls and captures."""
    over = [i for i, (peak, most) in enumerate(zip(ours.peaks, ours.budgets, strict=True)) if peak > most + SLACK_BYTES]
    excess = max((ours.peaks[i] - ours.budgets[i] for i in over if i not in situation.over), default=0)
    calls = called if situation.calls is None else situation.calls
    captures = eager.fits if situation.captures is None else situation.captures
    wrong = differences(ours.seen, eager.seen)
    columns |= {
        "above_predicted_bytes": ours.unforeseen,
        "moves": ours.moves,
        "budget_bytes": max(ours.budgets, default=0),
        "peak_bytes": max(ours.peaks, default=0),
        "steps_over": ", ".join(map(str, over[:8])) + (f" of {len(ours.peaks)}" if over else ""),
        "planned_calls": COUNTS.planned,
        "calls": calls if calls >= 0 else None,
        "unplanned": ours.unplanned(),
        "captures": COUNTS.captures,
        "captures_expected": captures if captures >= 0 else None,
    }
    checks = [holds("equal bits", not wrong or bool(situation.limit))]
    if wrong:
        why.append(f"{STATED if situation.limit else ''}bits: {', '.join(wrong)}")
    if counter().present and ours.peaks:
        checks.insert(0, at_most("bytes over budget", max(0, excess), SLACK_BYTES))
    if over and counter().present:
        worst = max(range(len(over)), key=lambda k: ours.peaks[over[k]] / ours.budgets[over[k]])
        peak, most = ours.peaks[over[worst]], ours.budgets[over[worst]]
        stated = "" if set(over) - set(situation.over) else STATED
        why.append(
            f"{stated}over budget at steps {columns['steps_over']}: {peak / 2**20:.2f} of {most / 2**20:.2f} MiB (step "
            f"{over[worst]}), eager {max(eager.peaks) / 2**20:.2f}"
        )
    if calls >= 0:
        checks.append(holds("no call unplanned", COUNTS.planned == calls))
        if COUNTS.planned != calls:
            why.append(f"{COUNTS.planned} of {calls} calls planned")
    if captures >= 0:
        checks.append(at_most("captures", COUNTS.captures, captures))
        if captures < COUNTS.captures:
            why.append(f"{COUNTS.captures} captures for {captures}")
    if ours.wrong:
        checks.append(holds("what else is expected", False))
        why.extend(ours.wrong)
    return checks


def _in_words(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").replace(_HERE, "situations")[:700]


def _where(error: BaseException) -> str:
    """The innermost frames, ours and others', from the first cause on."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    frames = traceback.extract_tb(root.__traceback__)
    ours = [frame for frame in frames if "/ebbtide/" in frame.filename]
    parts = [f"{'/'.join(Path(f.filename).parts[-3:])}:{f.lineno} {f.name}" for f in (*ours[-2:], *frames[-1:])]
    cause = "" if root is error else f" from {_in_words(root)[:200]}"
    return " > ".join(dict.fromkeys(parts)) + cause


def _warned(said: Sequence[warnings.WarningMessage]) -> str:
    """The first warning that came from us."""
    for each in said:
        text = str(each.message)
        if "/ebbtide/" in each.filename or "budget" in text or "captured" in text:
            return re.sub(r"\s+", " ", text)[:160]
    return ""


def limit_memory(bytes_: int) -> None:
    """No more private memory than ``bytes_`` for this process (``RLIMIT_DATA``)."""
    resource.setrlimit(resource.RLIMIT_DATA, (bytes_, bytes_))
