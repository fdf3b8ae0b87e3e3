"""What a command is asked to plan for: ``zoo:NAME``, ``hf:PATH``, ``FILE.py:function`` or ``graph.json``."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from ebbtide.case import Case
from ebbtide.cli.configurations import PREFIX, name_of, read_configuration
from ebbtide.errors import EbbtideError, UsageError
from ebbtide.names import require_zoo_name
from ebbtide.signals import raised_by_a_handler

if TYPE_CHECKING:
    from ebbtide.step.program import Program

__all__ = [
    "blame",
    "check_case",
    "is_graph",
    "is_sized",
    "load_case",
    "model_of",
    "refuse_for_graphs",
    "refuse_to_offload_nothing",
]

_ZOO = "zoo:"
_FORMS = (
    "a case is zoo:NAME, hf:PATH (a config.json of transformers), FILE.py:function (the function takes an int and "
    "returns an ebbtide.Case), "
    "or graph.json (networkx node-link)"
)


def is_graph(text: str) -> bool:
    """Whether ``text`` names a graph file."""
    return text.endswith(".json") and not is_sized(text)


def is_sized(text: str) -> bool:
    """Whether ``text`` names a model that is made here and has sizes by name, of the zoo or of a configuration."""
    return text.startswith((_ZOO, PREFIX))


def model_of(text: str) -> Callable[..., Case]:
    """The function that makes the cases of ``text``, which :func:`is_sized`.

    Raises:
        UsageError: if it names nothing.
    """
    from ebbtide import zoo

    if text.startswith(PREFIX):
        return zoo.model_of(zoo.Configuration(text, name_of(text), read_configuration(text)))
    return zoo.model_named(text.removeprefix(_ZOO))


def check_case(text: str, size: int | None = None) -> None:
    """Refuse what names no case, as far as that shows without building it and without torch.

    Raises:
        UsageError: saying what would work.
    """
    if size is not None and size < 1:
        raise UsageError(f"--size {size} is not 1 or more", argument="size", value=size)
    if is_graph(text):
        return
    if text.startswith(PREFIX):
        read_configuration(text)
        return
    head, colon, tail = text.rpartition(":")
    if not colon or not tail or not (head == "zoo" or head.endswith(".py")):
        raise UsageError(f"{text!r} is not a case: {_FORMS}", argument="case", value=text)
    if head == "zoo":
        require_zoo_name(tail)
    elif not Path(head).is_file():
        raise UsageError(f"there is no file {head}; {_FORMS}", argument="case", value=text)


def load_case(
    text: str, size: int | None = None, *, fake: bool = False, sizes: Mapping[str, int | str] | None = None
) -> Case | Program:
    """What ``text`` names.

    Args:
        text: ``zoo:NAME``, ``hf:PATH``, ``FILE.py:function`` or a path that ends in ``.json``.
        size: passed to the function: batch, length or layers, as it takes it. ``None`` is its own default.
        fake: build the model under ``FakeTensorMode``: shapes without memory.
        sizes: others by name, where it :func:`is_sized`.

    Raises:
        UsageError: if ``text`` names nothing, saying what would work.
    """
    check_case(text, size)
    if is_graph(text):
        return _graph(Path(text))
    from ebbtide.capture.without_memory import without_memory

    mode = without_memory() if fake else contextlib.nullcontext()
    if is_sized(text):
        from ebbtide.zoo import sized

        model = model_of(text)
        with mode:
            return sized(model, text, size, sizes or {})
    head, _, tail = text.rpartition(":")
    with blame(text):
        function = _function(Path(head), tail)
        arguments = _arguments(function, size, text)
        with mode:
            case = function(*arguments)
    if not isinstance(case, Case):
        raise UsageError(f"{text} returned {type(case).__name__}; return ebbtide.Case(model, args, kwargs)")
    return case if case.name else replace(case, name=tail)


def refuse_to_offload_nothing(text: str) -> NoReturn:
    """Refuse to have the state of no optimizer away.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"--offload-optimizer has an optimizer's state away in the step, and {text} comes without one: add --optimizer "
        "adamw, or the name of another",
        argument="--offload-optimizer",
        value=True,
    )


@contextlib.contextmanager
def blame(text: str) -> Iterator[None]:
    """An error that a user's file raises inside is told with its line there, and without the way that led to it.

    Raises:
        UsageError: in its place.
    """
    try:
        yield
    except EbbtideError:
        raise
    except Exception as error:
        line = _line_of(error, Path(text.rpartition(":")[0]))
        if line is None or raised_by_a_handler(error):
            raise
        raise UsageError(f"{line}: {type(error).__name__}: {error}", argument="case", value=text) from error


def _line_of(error: Exception, path: Path) -> str | None:
    """Where in the file at ``path`` an error comes from, ``file:line``; ``None`` if from somewhere else."""
    if not path.is_file():
        return None
    if (
        isinstance(error, SyntaxError)
        and error.filename is not None
        and Path(error.filename).resolve() == path.resolve()
    ):
        return f"{path}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}:{own[-1].lineno}" if own else None


def _graph(path: Path) -> Program:
    """The program of a published graph file."""
    from ebbtide.step.graph_file import program_from_graph

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); {_FORMS}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); {_FORMS}") from error
    if isinstance(data, dict) and str(data.get("schema", "")).startswith("ebbtide-plan"):
        raise UsageError(f"{path} is a plan already; read it with ebbtide.Plan.load, or name a graph file")
    if isinstance(data, dict) and "model_type" in data:
        raise UsageError(f"{path} is a configuration of transformers and no graph file; name it hf:{path}")
    name = data.get("graph", {}).get("name") if isinstance(data, dict) and isinstance(data.get("graph"), dict) else None
    return program_from_graph(data, name=str(name or path.stem))


def _function(path: Path, name: str) -> Callable[..., object]:
    """The function ``name`` of the file, which is run as a module to find it."""
    module = _module(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise UsageError(f"{path} has no function {name!r}; it has: {', '.join(sorted(own)) or 'none'}")
    return function


def _module(path: Path) -> ModuleType:
    """The file as a module; its neighbours can be imported, as when Python runs it. Its errors are its own."""
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path.stem not in sys.modules else f"_ebbtide_case_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.compile look their module up
    spec.loader.exec_module(module)
    return module


def _arguments(function: Callable[..., object], size: int | None, text: str) -> tuple[int, ...]:
    """The arguments for ``function``: the size, or none where it has a default."""
    signature = inspect.signature(function)
    arguments = () if size is None else (size,)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        hint = "give it with --size N" if size is None else "it has to take one int, or leave --size out"
        raise UsageError(f"{text}{signature} cannot be called with {arguments}: {error}; {hint}") from error
    return arguments


def refuse_for_graphs(text: str, options: Sequence[str]) -> None:
    """Refuse options that a graph file has no use for.

    Raises:
        UsageError: naming them.
    """
    if options:
        raise UsageError(f"{' and '.join(options)} cannot apply to {text}: a graph file has its own sizes and costs")
