"""Where figures come from: the sources that were measured, by their hashes, the commit, the machine and the seeds.

1. A benchmark names in ``MEASURED`` the folders and modules of ``src/ebbtide`` that its claims depend on, and in
   ``SEEDS`` what it draws random numbers from. Both are literals, so that they can be read without running it.
2. The hash of a part is over the names and the code of its sources, in order of their names. Comments, docstrings and
   empty lines are no code. No git is needed for it.
3. An origin is of cases, as a result may be put together from several runs. Where a run did not write its origin down,
   the hashes are those of the commit that added its figures, and ``recorded`` says so.
4. A case is *stale* where a part that its benchmark measures has another hash today, or none was recorded.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import subprocess
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["AFTERWARDS", "AT_RUN", "Origin", "current_cases", "declared", "digest", "module_hashes", "origin_now"]

BENCHMARKS = Path(__file__).resolve().parents[1]
SOURCE = BENCHMARKS.parent / "src" / "ebbtide"
SUFFIXES = (".py", ".toml")
AT_RUN = "by the run"
AFTERWARDS = "afterwards, from the commit that added the figures"


@dataclass(frozen=True)
class Origin:
    """What some cases of a result were made from.

    Attributes:
        commit: that was checked out; empty where git could not tell.
        changed: whether files of ``src`` or ``benchmarks`` differed from that commit.
        modules: hashes by part of ``src/ebbtide``.
        machine: it was made on, with versions and date.
        seeds: of the benchmark.
        recorded: how this is known.
        cases: that it holds for.
    """

    commit: str
    changed: bool
    modules: Mapping[str, str]
    machine: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, Any] = field(default_factory=dict)
    recorded: str = AT_RUN
    cases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "cases": list(self.cases)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Origin:
        return Origin(**{**data, "cases": tuple(data["cases"])})

    def differing(self, today: Mapping[str, str]) -> tuple[str, ...]:
        """The parts by which its cases are stale (definition 4)."""
        return tuple(part for part, known in today.items() if self.modules.get(part) != known)


@functools.cache
def declared(name: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """``MEASURED`` and ``SEEDS`` of the benchmark ``name``; empty where it is none."""
    path = BENCHMARKS / f"{name}.py"
    found: dict[str, Any] = {"MEASURED": (), "SEEDS": {}}
    if path.exists():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                key = node.targets[0].id
                if key in found:
                    found[key] = ast.literal_eval(node.value)
    return tuple(found["MEASURED"]), found["SEEDS"]


def digest(sources: Iterable[tuple[str, bytes]]) -> str:
    """Definition 2, of names and bytes; empty if there are none."""
    found = hashlib.sha256()
    ordered = sorted(sources)
    for name, content in ordered:
        found.update(name.encode() + b"\0" + hashlib.sha256(_code(content)).digest())
    return found.hexdigest()[:16] if ordered else ""


@functools.cache
def _code(content: bytes) -> bytes:
    """What of a source is code; of what is no Python, all."""
    text = content.decode()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return content
    lines: list[str] = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for each in ast.walk(tree):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            last = each.end_lineno or each.lineno
            lines[each.lineno - 1 : last] = [""] * (last - each.lineno + 1)
    return "\n".join(stripped for line in lines if (stripped := line.rstrip())).encode()


def module_hashes(name: str, source: Path = SOURCE) -> dict[str, str]:
    """The hashes that the parts measured by the benchmark ``name`` have today."""
    parts, _ = declared(name)
    return {
        part: digest((p.relative_to(source).as_posix(), p.read_bytes()) for p in _files(source, part)) for part in parts
    }


def _files(source: Path, part: str) -> list[Path]:
    """A module is a file or a folder of them; ``.`` is all."""
    single = source / f"{part}.py"
    if single.exists():
        return [single]
    return [path for path in (source / part).rglob("*") if path.suffix in SUFFIXES]


def origin_now(name: str, machine: Mapping[str, Any]) -> Origin:
    """The origin of what the benchmark ``name`` measures from here on."""
    _, seeds = declared(name)
    changed = bool(_git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results"))
    return Origin(_git("rev-parse", "HEAD"), changed, module_hashes(name), dict(machine), dict(seeds))


def current_cases(name: str, path: Path) -> set[str]:
    """Cases of the result at ``path`` that are not stale; none where there is no such file."""
    if not path.exists():
        return set()
    today = module_hashes(name)
    known = [Origin.from_json(each) for each in json.loads(path.read_text(encoding="utf-8")).get("origins", ())]
    return {case for each in known if not each.differing(today) for case in each.cases}


def _git(*arguments: str) -> str:
    """What git says, or nothing where it is not there or this is no checkout of it."""
    command = ["git", "-C", str(BENCHMARKS.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
