"""The API, made from docstrings and signatures of the public names: ``python tests/docs/api_page.py``.

``docs/api.md`` has a sentence for every name; ``build/pages/api.md`` every argument, as the site shows it.

1. A docstring has a first sentence, paragraphs, and sections whose names end the line with a colon, as Google's style
   has them. Of a function the page shows the sentence and what each argument takes; of a class what an object has.
2. reStructuredText's marks become Markdown's: a name in double backticks or in a role is in single ones.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ebbtide
from ebbtide.engine.calls import Calls
from ebbtide.engine.step import Step
from ebbtide.entry_points import NOT_TAKEN
from ebbtide.options import Options, texts

ROOT = Path(__file__).parents[2]
INDEX, PAGE = ROOT / "docs" / "api.md", ROOT / "build" / "pages" / "api.md"
WIDTH = 110

TRAINING = (
    *("fit", "set_budget", "set_optimizer", "no_update", "total_norm", "unfit"),
    *("plan_of", "step_of", "calls_of", "metrics_of", "measure", "repeatable"),
)
AHEAD = ("plan", "sweep", "max_batch", "plot_frontier", "doctor", "verify")
RECORDS = ("Options", "Budget", "Case", "Machine", "Plan", "Program", "Status", "BatchPlan", "Verification")
RETURNED = {"Step": Step, "Calls": Calls}
"""What functions return and nobody makes."""
ONLY = {
    "Program": ("name", "ops", "buffers", "context", "seconds", "fingerprint"),
    "Step": ("phase", "plan", "verified_buffers", "rewrites_held", "measured_above_bytes", "forward_calls"),
    "Calls": ("planned", "unplanned"),
}
"""Of classes that do more, what users may rely on."""
WRITTEN = {
    "ModelT": "torch.nn.Module",
    "Rewrites": "Literal['exact', 'in-place', 'all', 'none']",
    "AnyOptimizer": "torch.optim.Optimizer | Callable[[torch.nn.Module], torch.optim.Optimizer]",
    "Interrupt": "ebbtide.planners.Interrupt",
    "PlanRecord": "Plan",
}
"""Types as users know them."""

TOP = """# API, argument by argument

Every public name, from its docstring. All are attributes of `ebbtide` and imported when they are first used.
"""
INDEX_TOP = """# API

After this page you know every public name. `help(ebbtide.fit)` tells all arguments of one, and `make pages` writes
`build/pages/api.md`, where they are for all; this page is written with it. The command line has the
[same words](planning.md#the-command-line).
"""


def marked(text: str) -> str:
    """Definition 2, on one line."""
    text = re.sub(r":\w+:`~(?:\w+\.)*(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def sections(value: object) -> dict[str, str]:
    """The parts of a docstring by name; the first sentence is ``""``, the paragraphs after it ``"More"``."""
    text = inspect.cleandoc(value.__doc__ or "")
    head, *parts = re.split(r"^(Args|Attributes|Returns|Raises):\n", text, flags=re.MULTILINE)
    sentence, _, more = head.partition("\n\n")
    found = {"": marked(sentence), "More": "\n\n".join(marked(each) for each in more.strip().split("\n\n") if each)}
    return found | dict(zip(parts[::2], map(textwrap.dedent, parts[1::2]), strict=True))


def entries(section: str) -> Iterator[tuple[str, str]]:
    """Name and meaning of each entry of a section."""
    for each in re.split(r"\n(?=\S)", section.strip()):
        name, _, meaning = each.partition(":")
        if meaning:
            yield name.strip(), marked(meaning)


def default_of(value: object) -> str:
    """A default as one would type it; of what has no such text, dots."""
    plain = value is None or isinstance(value, str | int | float | tuple)
    return repr(value).replace("'", '"') if plain else "..."


def signature(name: str, function: Any) -> str:
    """How it is called, arguments by name with their defaults."""
    words: list[str] = []
    kinds = inspect.Parameter
    starred = False
    for each in inspect.signature(function).parameters.values():
        if each.name == "self" or each.name.startswith("_"):
            continue
        if each.kind is kinds.KEYWORD_ONLY and not starred:
            words.append("*")
        starred = starred or each.kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        mark = "*" if each.kind is kinds.VAR_POSITIONAL else ""
        words.append(f"{mark}{each.name}" + ("" if each.default is kinds.empty else f"={default_of(each.default)}"))
    text = f"ebbtide.{name}({', '.join(words)})"
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent=" " * (len(name) + 9), break_long_words=False))


def function_lines(name: str, function: Any) -> Iterator[str]:
    """The entry of a function, or of a class that is called as one."""
    parts = sections(function)
    types = {each.name: each.annotation for each in inspect.signature(function).parameters.values()}
    yield f"### {name}\n\n```\n{signature(name, function)}\n```\n\n{parts['']}\n"
    if parts["More"]:
        yield f"{parts['More']}\n"
    lines = [f"- `{each}`{_type(types.get(each.lstrip('*')))}: {said}" for each, said in entries(parts.get("Args", ""))]
    if lines:
        yield "\n".join(lines) + "\n"
    if parts.get("Returns"):
        yield f"Returns: {marked(parts['Returns'])}\n"
    raised = [f"`{each}` {said.rstrip('.')}" for each, said in entries(parts.get("Raises", ""))]
    if raised:
        yield f"Raises {'; '.join(raised)}.\n"
    if isinstance(function, type) and parts.get("Attributes"):
        yield (
            "It has "
            + "; ".join(f"`{each}`, {said.rstrip('.')}" for each, said in entries(parts["Attributes"]))
            + ".\n"
        )


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else ""
    for ours, written in WRITTEN.items():
        text = re.sub(rf"\b{ours}\b", written, text)
    return f" (`{text}`)" if text else ""


def class_lines(name: str, kind: type[Any]) -> Iterator[str]:
    """The entry of a class: what its objects have and do."""
    parts, only = sections(kind), ONLY.get(name, ())
    yield f"### {name}\n\n{parts['']}\n"
    if parts["More"] and not only:
        yield f"{parts['More']}\n"
    if kind is Options:
        yield "\n".join(option_lines()) + "\n"
        return
    if issubclass(kind, enum.Enum):
        yield "\n".join(f"- `{each.name}`: {each.value}" for each in kind) + "\n"
        return
    homes = [each for each in reversed(kind.__mro__) if each.__module__.startswith("ebbtide.")]
    had = {name: said for home in homes for name, said in entries(sections(home).get("Attributes", ""))}
    lines = [f"- `{each}`: {said}" for each, said in had.items() if not only or each in only]
    for each, value in {name: value for home in homes for name, value in vars(home).items()}.items():
        if each.startswith("_") or each in had or (only and each not in only) or not _documented(value):
            continue
        inner = _function_of(value)
        called = ""
        if inspect.isfunction(value) or isinstance(value, staticmethod | classmethod):
            called = f"({', '.join(p for p in inspect.signature(inner).parameters if p not in ('self', 'cls'))})"
        lines.append(f"- `{each}{called}`: {sections(inner)['']}")
    yield "\n".join(lines) + "\n"


def option_lines() -> Iterator[str]:
    """Each option with its type, its default and its text, and which functions do not take it."""
    said = texts()
    for each in dataclasses.fields(Options):
        refusing = [name for name, refused in NOT_TAKEN.items() if each.name in refused and name != "verify"]
        meaning = marked(said[each.name].replace("\n\n", " "))
        without = f" Not taken by {' and '.join(f'`{name}`' for name in refusing)}." if refusing else ""
        yield f"- `{each.name}={default_of(each.default)}`{_type(each.type)}: {meaning}{without}"


def _function_of(value: Any) -> Any:
    """What a property, a cached one, a method of a class or a plain one is made of."""
    return getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)


def _documented(value: object) -> bool:
    inner = _function_of(value)
    return bool(inspect.isfunction(inner) and inner.__doc__)


def index() -> str:
    """A sentence for every name."""
    assert {*TRAINING, *AHEAD, *RECORDS, "errors"} == set(ebbtide.__all__), "a public name has no place here"
    named = {"Training within a budget": TRAINING, "Ahead of time": AHEAD, "What these take and return": RECORDS}
    parts = [INDEX_TOP]
    for title, names in named.items():
        lines = [f"- `{name}`: {sections(getattr(ebbtide, name))['']}" for name in names]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    lines = [f"- `{name}`: {sections(kind)['']}" for name, kind in RETURNED.items()]
    return "\n".join(parts) + "\n".join(lines) + "\n- `errors`: the module of [all exceptions](errors.md).\n"


def page() -> str:
    """Every argument."""
    parts = [TOP, "## Training within a budget\n"]
    for name in TRAINING:
        parts += function_lines(name, getattr(ebbtide, name))
    parts.append("## Ahead of time\n")
    for name in AHEAD:
        parts += function_lines(name, getattr(ebbtide, name))
    parts.append("## What these take and return\n")
    for name in RECORDS:
        parts += class_lines(name, getattr(ebbtide, name))
    for name, kind in RETURNED.items():
        parts += class_lines(name, kind)
    return "\n".join(parts)


if __name__ == "__main__":
    INDEX.write_text(index(), encoding="utf-8")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
