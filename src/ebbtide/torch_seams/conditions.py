"""What branches on tensors have in common: where Dynamo meets them, what they are computed from, and their truth."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.dispatcher import OpOverload, schema_of
from ebbtide.torch_seams.fake_tensors import without_modes
from ebbtide.torch_seams.storages import storage_key

__all__ = [
    "autocast_now",
    "casts",
    "changes",
    "codes_that_branch",
    "codes_that_compare",
    "decided",
    "is_torchs",
    "plainly",
    "storages_of",
    "tables_of_codes",
    "truth_of",
    "written_by",
    "written_to",
    "written_unseen",
]

_AUGMENTED_NAMES = frozenset(
    name for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name[1:]}__")
) | {"setitem"}
_AUGMENTED = frozenset(getattr(operator, name) for name in _AUGMENTED_NAMES)
"""What Python calls for ``x += y`` and its kin."""
_MODULES = ("torch", "_operator", "math", "builtins")
_DEVICES = ("cpu", "cuda")


def tables_of_codes() -> Iterator[tuple[type, list[Any]]]:
    """Dynamo's translators of code, each with a copy of its table: per code of Python's instructions what traces it."""
    from torch._dynamo import symbolic_convert

    for kind in (symbolic_convert.InstructionTranslator, symbolic_convert.InliningInstructionTranslator):
        for each in (kind, *kind.__subclasses__()):
            yield each, list(each.dispatch_table)


@functools.cache
def codes_that_branch() -> list[str | None]:
    """Per code of Python's instructions its name, if it asks for the truth of a value."""
    import dis

    names: list[str | None] = [None] * 256
    for name, code in dis.opmap.items():
        if code < 256 and ("IF_TRUE" in name or "IF_FALSE" in name or name == "UNARY_NOT"):
            names[code] = name
    return names


@functools.cache
def codes_that_compare() -> tuple[int, ...]:
    """The codes of Python's instructions that compare two values."""
    import dis

    return tuple(code for name, code in dis.opmap.items() if name == "COMPARE_OP")


def decided(tx: Any, instruction: Any, name: str, outcome: bool) -> bool:
    """Put ``outcome`` in the place of the value that the instruction ``name`` asks for.

    True if the instruction is done with that: ``a or b`` has the tensor for its value, which stays on the stack.
    """
    from torch._dynamo.variables import ConstantVariable

    if not name.endswith("OR_POP"):
        tx.stack[-1] = ConstantVariable.create(outcome)
        return False
    if outcome is ("TRUE" in name):
        tx.jump(instruction)
    else:
        tx.pop()
    return True


def is_torchs(node: fx.Node) -> bool:
    """Whether a call is of a function of torch's or Python's, and of none that leaves memory as it was."""
    if "empty" in str(getattr(node.target, "__name__", node.target)):
        return False
    if node.op == "call_method":
        return True
    plain = isinstance(node.target, types.FunctionType | types.BuiltinFunctionType | type)
    home = str(getattr(node.target, "__module__", None) or "torch")
    return node.op == "call_function" and plain and home.split(".")[0] in _MODULES


def changes(node: fx.Node) -> bool:
    """Whether a call may write to an argument."""
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).is_mutable or _keeps_statistics(node)
    name = str(getattr(node.target, "__name__", node.target))
    if node.target in _AUGMENTED or "out" in node.kwargs or name.strip("_") in _AUGMENTED_NAMES:
        return True
    if _keeps_statistics(node) or _is_in_place(node):
        return True
    return name.endswith("_") and not name.endswith("__") and getattr(node.target, "__module__", "") != "_operator"


def _keeps_statistics(node: fx.Node) -> bool:
    """Whether it is a norm that may write to statistics among its arguments, which no schema says."""
    name = str(getattr(node.target, "__name__", node.target))
    return "batch_norm" in name or "instance_norm" in name


def _is_in_place(node: fx.Node) -> bool:
    """Whether a function is told so, as ``torch.nn.functional.relu(x, inplace=True)`` is."""
    if not isinstance(node.target, types.FunctionType):
        return bool(node.kwargs.get("inplace"))
    names = list(inspect.signature(node.target).parameters)
    at = names.index("inplace") if "inplace" in names else len(node.args)
    return bool(node.kwargs.get("inplace", at < len(node.args) and node.args[at]))


def autocast_now() -> dict[str, bool]:
    """By kind of device, whether ops on this thread are in another precision than their arguments."""
    return {kind: torch.is_autocast_enabled(kind) for kind in _DEVICES}


def casts(root: fx.Node, used: Collection[fx.Node], begun: Mapping[str, bool]) -> bool:
    """Whether what ``root`` is computed from, ``used``, is computed of floating numbers where autocast is on.

    Args:
        root: of Dynamo's graph.
        used: nodes of that graph.
        begun: :func:`autocast_now` when the graph began.
    """
    around = [dict(begun)]
    for node in root.graph.nodes:
        if node.target is _enter_autocast:
            kind, _, enabled, *_ = node.args
            around.append({**around[-1], str(kind): bool(enabled)})
        elif node.target is _exit_autocast:
            around.pop()
        elif node in used and node.op != "placeholder":
            values = [each.meta.get("example_value") for each in (node, *node.all_input_nodes)]
            tensors = [each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()]
            if any(around[-1].get(each.device.type, False) for each in tensors):
                return True
        if node is root:
            break
    return False


@contextmanager
def plainly() -> Iterator[None]:
    """While open, ops run on real tensors as written: no mode, no autocast, nothing for a backward."""
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        stack.enter_context(torch.no_grad())
        for kind, on in autocast_now().items():
            if on:
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def written_to(root: fx.Node, used: Iterable[fx.Node]) -> bool:
    """Whether something has been written to the memory of these nodes by the time that ``root`` is computed."""
    ours = storages_of(used)
    before = itertools.takewhile(lambda node: node is not root, root.graph.nodes)
    if written_unseen(used, ()):
        return True
    return any(not ours.isdisjoint(written_by(node)) for node in before if changes(node))


def written_by(node: fx.Node) -> set[int]:
    """The memory that a call of :func:`changes` may write to.

    That is of its first argument and of what is given as ``out``; of an operator or a norm, of all arguments.
    """
    if isinstance(node.target, OpOverload) or _keeps_statistics(node):
        return storages_of(node.all_input_nodes)
    targets: list[fx.Node] = []
    fx.map_arg([node.args[:1], node.kwargs.get("out")], targets.append)
    return storages_of(targets)


def written_unseen(nodes: Iterable[fx.Node], seen: Collection[int]) -> bool:
    """Whether an input among nodes has been written to, by torch's own count, whose memory is not among ``seen``."""
    given = (node.meta.get("example_value") for node in nodes if node.op == "placeholder")
    tensors = [value for value in given if isinstance(value, torch.Tensor) and not value.is_inference()]
    return any(value._version and storage_key(value) not in seen for value in tensors)


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory of what nodes give that are tensors."""
    values = (node.meta.get("example_value") for node in nodes)
    return {storage_key(value) for value in values if isinstance(value, torch.Tensor)}


def truth_of(graph: fx.GraphModule, inputs: Iterable[Any]) -> bool | None:
    """The truth of what ``graph`` gives; ``None`` if it draws random numbers, or cannot be computed here."""
    before = _random_states()
    try:
        with plainly():
            outcome = bool(fx.Interpreter(graph).run(*inputs))
    except Exception as error:
        if raised_by_a_handler(error):
            raise
        return None
    finally:
        drawn = [old != new for old, new in zip(before, _random_states(), strict=True)]
        if any(drawn):
            states = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in before]
            torch.set_rng_state(states[0])
            for index, state in enumerate(states[1:]):
                torch.cuda.set_rng_state(state, index)
    return None if any(drawn) else outcome


def _random_states() -> list[bytes]:
    """States of all generators, in memory that is none of torch's: a budget holds while a question is answered."""
    with without_modes():
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return [each.numpy().tobytes() for each in (torch.get_rng_state(), *cuda)]
