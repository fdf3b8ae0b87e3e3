"""How large the house is, and how much of it one has to hold at once: lines, words, fields of a state, frames.

1. *Fields* of a class are those that a dataclass declares and those that ``__init__`` and ``__post_init__`` assign. The
   state of a fitted model is ``FittedModel`` and, as far as they stand in ``engine/``, the classes of its fields and of
   theirs.
2. *Frames* are those of this library between a training call of a fitted model and the planner that it asks, both
   included, in a first call: counted by a planner that looks at the stack above it.
3. A docstring's first line *says nothing* if it names a definition alone, or begins with "The same" or "Of".
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.record import Row, at_most

__all__ = ["rows"]

TITLE = "Size of the code and of its parts"
ROOT = Path(__file__).resolve().parents[2]
LIBRARY, ENGINE = ROOT / "src" / "ebbtide", ROOT / "src" / "ebbtide" / "engine"
MODEL, LOOP = "FittedModel", ("fitted_class.py", "loop.py", "model.py")
MOST_FIELDS, MOST_FRAMES, MOST_LINES, MOST_WORDS = 12, 7, 58_000, 20_000
EMPTY = re.compile(r"(Definitions? [\d, and]+\.?$|The same\b|Of )")


def rows() -> Iterator[Row]:
    yield from _sizes()
    yield from _fields()
    yield _frames()


def _sizes() -> Iterator[Row]:
    """Lines of each part, words of the users' pages, and first lines that say nothing."""
    for name, folder, most in (
        ("src", "src", MOST_LINES),
        ("published", "published/src", None),
        ("tests", "tests", None),
        ("published/tests", "published/tests", None),
        ("benchmarks", "benchmarks", None),
    ):
        files = sorted((ROOT / folder).rglob("*.py"))
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        checks = () if most is None else (at_most("lines", lines, most),)
        yield Row("house", {"case": f"lines of {name}", "count": lines, "where": f"{len(files)} files"}, checks)
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("benchmarks.md", "papers.md")]
    written = [path for path in pages if path.name != "api.md"]  # that one is made of docstrings
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in written}
    most_words = max(words, key=words.__getitem__)
    columns = {
        "count": sum(words.values()),
        "where": f"{len(words)} pages; the longest, {most_words}: {words[most_words]}",
    }
    yield Row("house", {"case": "words of docs/*.md", **columns}, (at_most("words", sum(words.values()), MOST_WORDS),))
    empty = [where for path in sorted(LIBRARY.rglob("*.py")) for where in _empty_lines(path)]
    columns = {"count": len(empty), "where": ", ".join(empty[:5])}
    yield Row(
        "house", {"case": "docstrings that begin with nothing", **columns}, (at_most("docstrings", len(empty), 0),)
    )


def _empty_lines(path: Path) -> Iterator[str]:
    """Where a docstring's first line says nothing (definition 3)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and EMPTY.match(text.splitlines()[0]):
                yield f"{path.relative_to(LIBRARY)}:{getattr(node, 'name', 1)}"


def _fields() -> Iterator[Row]:
    """The widest class of a fitted model's state, and functions that take all of it."""
    classes: dict[str, ast.ClassDef] = {}
    takers: list[str] = []
    for path in sorted(ENGINE.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes |= {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for each in functions if path.name not in LOOP else ():
            given = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
            if any(one.annotation is not None and MODEL in _names(one.annotation) for one in given):
                takers.append(f"{path.name}:{each.name}")
    state, waiting = dict[str, int](), [MODEL]
    while waiting:
        name = waiting.pop()
        if name in classes and name not in state:
            fields, types = _fields_of(classes[name])
            state[name] = len(fields)
            waiting += types
    widest = max(state, key=state.__getitem__)
    columns = {"case": "fields of the widest class of a model's state", "count": state[widest], "where": widest}
    yield Row("house", columns, (at_most("fields", state[widest], MOST_FIELDS),))
    columns = {
        "case": "functions outside the loop that take the model",
        "count": len(takers),
        "where": ", ".join(takers),
    }
    yield Row("house", columns, (at_most("functions", len(takers), 0),))


def _fields_of(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Names of a class's fields, and names in their types (definition 1)."""
    fields, types = set[str](), set[str]()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            fields.add(each.target.id)
            types |= _names(each.annotation)
        elif isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__post_init__"):
            for one in ast.walk(each):
                targets: Iterable[ast.expr] = one.targets if isinstance(one, ast.Assign) else ()
                if isinstance(one, ast.AnnAssign):
                    targets, types = (one.target,), types | _names(one.annotation)
                for target in targets:
                    parts = target.elts if isinstance(target, ast.Tuple) else (target,)
                    fields |= {part.attr for part in parts if isinstance(part, ast.Attribute) and _is_self(part.value)}
                if isinstance(one, ast.Call) and isinstance(one.func, ast.Name):
                    types.add(one.func.id)
    return fields, types


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _names(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _frames() -> Row:
    """Frames from the call to the planner (definition 2)."""
    import ebbtide
    from ebbtide.planners.base import Answer, Problem
    from ebbtide.planners.keep_all import keep_all
    from ebbtide.planners.registry import planner
    from ebbtide.zoo import mlp_chain

    seen: list[str] = []

    def looking(problem: Problem) -> Answer:
        frame, found = sys._getframe(1), ["the planner"]
        while frame is not None:
            if frame.f_code.co_filename.startswith(f"{LIBRARY}/") and "/zoo/" not in frame.f_code.co_filename:
                found.append(frame.f_code.co_qualname)
            frame = frame.f_back
        seen[:] = seen or found[::-1]
        return keep_all(problem)

    planner("frames")(looking)
    case = mlp_chain(16, layers=2)
    model = ebbtide.fit(case.model, "200%", options=ebbtide.Options(planner="frames", progress=None))
    model(*case.args).backward()
    columns = {"case": "frames from a training call to the planner", "count": len(seen), "where": " > ".join(seen)}
    return Row("house", columns, (at_most("frames", len(seen), MOST_FRAMES),))
