"""Autograd's running state: which backward runs, which hooks are on, and when a backward has returned."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType, TracebackType
from typing import Any

import torch
from torch._C import (
    _autograd,
    _functorch,  # type: ignore[attr-defined]
)

from ebbtide.torch_seams.patches import Attribute, Patch, wrapped

__all__ = [
    "BackwardWatch",
    "accumulate_in_order",
    "active_transform",
    "backwards_begun",
    "current_graph_task_id",
    "gradient_edge",
    "gradient_hooks",
    "gradient_leaf",
    "has_saved_tensor_hooks",
    "in_backward",
    "is_freed",
    "is_function_node",
    "keeps_graph",
    "output_of_node",
    "outputs_reached",
    "release_failed_backward",
    "saved_by",
    "when_backward_ends",
    "will_accumulate",
    "will_run",
]

_LEAF = 2**64 - 1  # the sequence number of AccumulateGrad
_ENTRY = "_engine_run_backward"  # of torch.autograd: its ``backward`` and ``grad`` call it, whoever has imported them
_INPUTS = 3  # where its arguments after the roots say what gradients are asked for


def current_graph_task_id() -> int:
    """The number of the backward that runs on this thread, another for each; -1 outside of any."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread is inside a backward: so is the recomputation of a non-reentrant checkpoint."""
    return current_graph_task_id() != -1


def has_saved_tensor_hooks() -> bool:
    """Whether default hooks for saved tensors are on, on this thread.

    ``torch.autograd.graph.saved_tensors_hooks`` sets them, and so do ``save_on_cpu`` and non-reentrant checkpoint. The
    argument of torch's own question says to answer also while a graph is traced.
    """
    return bool(_autograd._top_saved_tensors_default_hooks(True))


def active_transform() -> str:
    """The transform of ``torch.func`` or the forward-mode AD inside of which this thread is; empty outside of any."""
    layer = _functorch.peek_interpreter_stack()
    if layer is not None:
        return f"torch.func's {str(layer.key()).rpartition('.')[2].lower()}"
    return "forward-mode AD (torch.autograd.forward_ad)" if torch.autograd.forward_ad._current_level >= 0 else ""


def when_backward_ends(ends: Callable[[], None]) -> None:
    """Call ``ends`` once the backward of this thread has run all its nodes; what it raises, that backward raises."""
    torch.autograd.Variable._execution_engine.queue_callback(ends)  # type: ignore[attr-defined]


def keeps_graph() -> bool:
    """Whether the backward that runs on this thread was asked to retain its graph."""
    return bool(_autograd._get_current_graph_task_keep_graph())


def will_run(node: Any) -> bool:
    """Whether the backward that runs on this thread comes to ``node``, or is asked for the gradient of its leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # which says that it does not tell of leaves that ``torch.autograd.grad`` is asked for
        return True


def will_accumulate(node: Any) -> bool:
    """Whether the backward that runs on this thread adds gradients up at the leaves behind ``node``, as one says.

    ``torch.autograd.grad`` does not, whichever it is asked for; nor does a backward that is asked for other inputs.
    """
    leaf = next((each for each, _ in node.next_functions if hasattr(each, "variable")), None)
    try:
        return leaf is None or bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # which says that it does not tell of leaves that ``torch.autograd.grad`` is asked for
        return False


def saved_by(node: Any) -> tuple[Any, ...]:
    """What the node of a ``torch.autograd.Function`` has saved.

    Raises:
        RuntimeError: if something of it was written to since, or if the graph is freed.
    """
    return () if node is None else node.saved_tensors


def is_function_node(node: object) -> bool:
    """Whether a node of autograd's graph belongs to a ``torch.autograd.Function``, as AOTAutograd's steps do."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def gradient_edge(value: Any) -> tuple[Any, int]:
    """The node that a tensor or a ``GradientEdge`` comes from, ``None`` for a leaf, and which of its outputs it is."""
    return (value.grad_fn if isinstance(value, torch.Tensor) else value.node), value.output_nr


def output_of_node(tensor: torch.Tensor, node: Any) -> int | None:
    """Which output of ``node`` it is, or a view of; ``None`` if it is none."""
    below, position = gradient_edge(tensor)
    while below is not None and below is not node and len(below.next_functions) == 1:
        below, position = below.next_functions[0]
    return position if below is node else None


def outputs_reached(roots: Sequence[Any], node: Any) -> frozenset[int]:
    """The outputs of ``node`` that a backward from ``roots`` comes to."""
    edges = [gradient_edge(each) for each in roots]
    seen: set[Any] = set()
    found: set[int] = set()
    while edges:
        below, position = edges.pop()
        if below is node:
            found.add(position)
        elif below is not None and below not in seen:
            seen.add(below)
            edges.extend(below.next_functions)
    return frozenset(found)


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a backward from ``tensor`` raises since one has freed its graph; never of a tensor without a node.

    A node that has given back what it saved raises when that is read.
    """
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = ["saved_tensors"] if is_function_node(node) else [n for n in dir(node) if n.startswith("_saved_")]
        try:
            for name in names:
                getattr(node, name)
        except RuntimeError:
            return True
        waiting += (below for below, _ in node.next_functions)
    return False


def gradient_hooks(tensor: torch.Tensor) -> Mapping[int, Callable[..., Any]]:
    """The hooks on the gradient of ``tensor``, which is no leaf: its node holds them, whoever holds the tensor.

    What ``register_hook`` makes for the first of them is made here, and stays for others.
    """
    tensor.register_hook(_note_number).remove()
    assert tensor._backward_hooks is not None
    return tensor._backward_hooks


def accumulate_in_order(node: Any, order: Sequence[int]) -> None:
    """Let the leaves behind ``node``, which is about to run, get their gradients in this order.

    Autograd's queue gives out first what has the highest sequence number; all leaves have the highest there is, and of
    equal ones its heap takes any. None of the others' comes near. A node has an entry of ``next_functions`` for every
    tensor that went in.

    Args:
        node: of a ``torch.autograd.Function``.
        order: per tensor that went in, its place.
    """
    behind = node.next_functions
    if len(behind) != len(order):
        return  # not the graph that is known
    for (leaf, _), place in zip(behind, order, strict=True):
        if leaf is not None and hasattr(leaf, "variable"):
            leaf._set_sequence_nr(_LEAF - place)


_leaf = torch.ones((), requires_grad=True)
_root, _one = _leaf.clone(), torch.ones(())
_numbered = _leaf.clone()
_begun_here = itertools.count()
_of_thread = threading.local()


def _note_number(_: Any) -> None:
    _of_thread.number = current_graph_task_id()


assert _numbered.grad_fn is not None
_numbered.grad_fn.register_prehook(_note_number)


def _backward_of_nothing(root: torch.Tensor) -> None:
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.run_backward((root,), (_one,), True, False, (_leaf,), allow_unreachable=True, accumulate_grad=False)


def backwards_begun() -> int | None:
    """How many backwards have begun in this process on any thread, those of this module left out.

    Each takes the next number, and this begins one to see which is next. ``None`` inside of a backward.
    """
    if in_backward():
        return None
    before = next(_begun_here)
    _backward_of_nothing(_numbered)
    return int(_of_thread.number) - before


class _Of(torch.autograd.Function):
    """A function of nothing but whose graph has the leaf of its argument."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
        del ctx, parameter
        return torch.empty(0, device="cpu")


def gradient_leaf(parameter: torch.Tensor) -> Any:
    """The node of autograd's graph that gives ``parameter`` its gradient; it lives as long as somebody has it.

    It is made while this thread has the interpreter's lock. ``torch.autograd.graph.get_gradient_edge`` makes it in an
    operator, without: it holds the parameter's own lock then and waits for the interpreter's, and if another thread's
    ``Function.apply``, with which a captured step begins, waits for the parameter's at that moment, both wait for good.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        result = _Of.apply(parameter)
    return result.grad_fn.next_functions[0][0]  # before 2.12 the node is gone with its result


def release_failed_backward() -> None:
    """Free what a backward that raised on this thread has left in autograd's queue: gradients on their way.

    Torch does so in the middle of the next backward: until then they are in use beside all that is in the step. Of a
    backward that computes nothing, and runs no operator, that takes ten microseconds.
    """
    if not in_backward():
        next(_begun_here)
        _backward_of_nothing(_root)


class BackwardWatch(AbstractContextManager["BackwardWatch"]):
    """While open, is told whenever ``torch.autograd.backward`` or ``torch.autograd.grad`` begins, returns or raises.

    What both call is wrapped by a patch, on all threads, because a training loop may call them anywhere. It may be
    closed from inside ``ends``, and it is closed when it is garbage.

    Args:
        ends: called without arguments. A bound method is held weakly, so that its object may own the watch and both
            may be garbage together.
        begins: called with the roots and the inputs, which may be none, before anything runs; what it raises is what
            the caller gets, and nothing has run then.
        raises: called with the error that a backward raises, before ``ends``; what it raises is raised instead.
    """

    def __init__(
        self,
        ends: Callable[[], None] | None = None,
        *,
        begins: Callable[[Sequence[Any], Sequence[Any]], None] | None = None,
        raises: Callable[[BaseException], None] | None = None,
    ) -> None:
        ended: Callable[[], Callable[[], None] | None]
        ended = weakref.WeakMethod(ends) if isinstance(ends, MethodType) else lambda: ends

        def make(below: Callable[..., Any]) -> Callable[..., Any]:
            def entry(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
                try:
                    if begins is not None:
                        begins(roots, args[_INPUTS] or ())
                    return below(roots, *args, **kwargs)
                except BaseException as error:
                    if raises is not None:
                        raises(error)
                    raise
                finally:
                    alive = ended()
                    if alive is not None:
                        alive()

            return entry

        self._patch: Patch = wrapped(Attribute(torch.autograd, _ENTRY), make)

    @property
    def is_open(self) -> bool:
        """Whether it is told."""
        return self._patch.is_open

    def open(self) -> None:
        """Begin."""
        self._patch.open()

    def close(self) -> None:
        """End; does nothing if it is not open."""
        self._patch.close()

    def __enter__(self) -> BackwardWatch:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
