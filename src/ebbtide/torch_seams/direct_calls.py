"""Generated code that calls torch's operators by the shortest way that there is.

1. ``torch.ops.aten.mm.default(a, b)`` looks up four names, enters a frame of Python and reads every argument by the
   operator's schema. ``torch.mm(a, b)``, which torch makes for eager code, does neither: of a small step that is a
   tenth of its time.
2. A function of torch's is called instead where it is *seen* to call that very operator, once and with the same
   arguments: both are called on the values of the trace, under a mode that notes what comes to the dispatcher.
3. Any other operator is called without the frame and the names: by what its ``OpOverload`` calls.
4. Functions of torch's ask modes of the user's (``TorchFunctionMode``) what to do, who were asked when the step was
   traced. So they are called with such modes off; not so where an operator of somebody else's may open one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.torch_seams.graphs import with_code
from ebbtide.torch_seams.trees import tree_leaves

__all__ = ["boxed_callable", "eager_function"]

_HOLDERS: tuple[Any, ...] = (torch, torch._C._nn, torch.Tensor)  # type: ignore[attr-defined]
"""Where functions of torch's are that have an operator's name."""
_OF_TORCH = ("aten", "prims")
_CALL = re.compile(r"^( +)(\w+) = torch\.ops\.\w+\.\w+\.\w+\(", re.MULTILINE)
_known: dict[object, Callable[..., Any] | None] = {}


class _Noting(TorchDispatchMode):
    """Notes the operators that are called; those on fake values compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # what fake values are asked, such as their device
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def boxed_callable(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The code of a graph module, with direct calls; it takes its arguments as one list and empties it.

    No frame keeps saved tensors then. Nodes have the values of the trace (``meta["val"]``) where there are any.
    """
    called = [node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    of_torch = all(target.namespace in _OF_TORCH for target in called)
    codegen = _DirectCodeGen()
    codegen.functions = of_torch
    module.graph.set_codegen(codegen)
    forward = with_code(module).forward
    if not of_torch:
        return forward

    def run(args: list[Any]) -> Any:
        with torch._C.DisableTorchFunction():  # definition 4
            return forward(args)

    return run


class _DirectCodeGen(_BoxedCodeGen):
    """Boxed code whose calls of operators are direct (definitions 2 and 3)."""

    functions = True
    """Whether functions of torch's are called."""

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> Any:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        by_name = {node.name: node for node in nodes}
        names: dict[int, str] = {}

        def direct(found: re.Match[str]) -> str:
            node = by_name.get(found[2])
            if node is None or not isinstance(node.target, OpOverload):
                return found[0]
            function = (eager_function(node) if self.functions else None) or node.target._op
            name = names.setdefault(id(function), f"_{node.target._opname}_{len(names)}")
            code.globals[name] = function
            return f"{found[1]}{found[2]} = {name}("

        code.src = _CALL.sub(direct, code.src)
        return code


def eager_function(node: fx.Node) -> Callable[..., Any] | None:
    """A function of torch's that does what ``node`` does (definition 2); ``None`` where none is known."""
    target = node.target
    assert isinstance(target, OpOverload)
    try:
        key = (target, _form(node.args), _form(node.kwargs))
        if key not in _known:
            _known[key] = _found(target, *fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"]))
        return _known[key]
    except KeyError:  # a value that the trace does not know
        return None


def _form(value: Any) -> object:
    """What of an argument tells functions apart: the type of tensors and of numbers, all of anything else."""
    if isinstance(value, fx.Node):
        return type(value.meta["val"])
    if isinstance(value, Mapping):
        return tuple((name, _form(each)) for name, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (type(value), *dict.fromkeys(map(_form, value)))
    return type(value) if type(value) in (int, float) else (type(value), repr(value))


def _found(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if not tensors or not all(map(_computes_nothing, tensors)):
        return None  # what makes tensors would do so, and draw numbers; a default device concerns its function besides
    wanted = _calls(target, args, kwargs)
    if wanted is None or len(wanted) != 1 or wanted[0][0] is not target:
        return None
    name = target._schema.name.partition("::")[2]
    functions = [function for holder in _HOLDERS if (function := getattr(holder, name, None)) is not None]
    fit = (each for each in functions if _is_builtin(each) and _same(_calls(each, args, kwargs), wanted))
    return next(fit, None)


def _computes_nothing(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _is_builtin(function: object) -> bool:
    """Whether torch has made it from its table of operators: what is written in Python may do other things besides."""
    return type(function) in (type(torch.mm), type(torch.Tensor.view))


def _calls(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] | None:
    """What ``function`` calls, ``None`` if it does not take such arguments."""
    noting = _Noting()
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), noting:
            function(*args, **kwargs)
    except Exception:
        return None
    return noting.calls


def _same(value: Any, other: Any) -> bool:
    """Whether two calls are one: the same tensors and operators, equal numbers of the same type."""
    if isinstance(value, torch.Tensor) or isinstance(value, OpOverload):
        return value is other
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(value[each], other[each]) for each in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return bool(value == other) or repr(value) == repr(other)
