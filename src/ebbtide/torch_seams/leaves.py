"""``requires_grad_()`` on an intermediate result while a step is captured, called or assigned.

It changes no gradient of a parameter, so that it may be part of a graph; the result itself, whose own gradient would be
lost, may not leave the graph. Dynamo from 2.12 on traces the call and refuses whatever is computed from such a result
as an output (``OutputGraph._check_requires_grad_intermediate_outputs``): here only the result itself is refused. Dynamo
of an older release refuses the call. There it is traced as 2.12 does it, with the nodes that ``torch._functorch``'s
``enable_inplace_requires_grad`` has always become, and outputs are looked at where Dynamo compiles its graph.

An assignment is refused by every release, one that changes nothing too (PEFT's AdaLoRA writes ``I.requires_grad =
False`` of what takes no gradient anyway). Here it is the call; of ``False`` only where nothing changes, since eager
refuses the other. So is ``torch.nn.Parameter(x)`` of a result refused (its DoRA writes that of a transposed weight):
here it is ``x.detach().requires_grad_()``, which it is to autograd, of a parameter's type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ebbtide.torch_seams.patches import Attribute, patched, wrapped

__all__ = ["leaves_traced"]

_CHECK = "_check_requires_grad_intermediate_outputs"
_MAKES = "call_nn_parameter"
_ASSIGNS = "SetAttrBuiltinVariable"  # from 2.13 on


@contextmanager
def leaves_traced() -> Iterator[None]:
    """While open, captures of this thread trace ``requires_grad_()`` on a result, and refuse that result as output."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable, builtin

    with ExitStack() as stack:
        if isinstance(vars(TorchInGraphFunctionVariable).get(_MAKES), classmethod):
            makes = Attribute(TorchInGraphFunctionVariable, _MAKES)
            stack.enter_context(patched(makes, _make_parameter(TorchInGraphFunctionVariable)))
        if (assigns := getattr(builtin, _ASSIGNS, None)) is not None:
            stack.enter_context(wrapped(Attribute(assigns, "_call_setattr"), _assign_leaves, this_thread=True))
        if hasattr(OutputGraph, _CHECK):
            stack.enter_context(wrapped(Attribute(OutputGraph, _CHECK), _check_leaves, this_thread=True))
        else:
            calls, ends = (TensorVariable, "method_requires_grad_"), (OutputGraph, "compile_and_call_fx_graph")
            stack.enter_context(wrapped(Attribute(*calls), _make_leaf, this_thread=True))
            stack.enter_context(wrapped(Attribute(*ends), _refuse_leaves, this_thread=True))
        yield


def _returns_leaf(graph: Any, outputs: list[Any]) -> bool:
    made = (each for each in graph.leaf_var_creation_order if not each.source)
    leaves = {each.as_proxy().node for each in made}
    return bool(leaves & {each.as_proxy().node for each in outputs if hasattr(each, "proxy")})


def _check_leaves(below: Callable[..., Any]) -> Callable[..., Any]:
    def check(graph: Any, outputs: list[Any], tx: Any) -> Any:
        return below(graph, outputs, tx) if _returns_leaf(graph, outputs) else None

    return check


def _refuse_leaves(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import Unsupported

    def compile_graph(graph: Any, tx: Any, outputs: list[Any], root: Any) -> Any:
        if _returns_leaf(graph, outputs):
            raise Unsupported("returning intermediate with requires_grad_()")
        return below(graph, tx, outputs, root)

    return compile_graph


def _assign_leaves(below: Callable[..., Any]) -> Callable[..., Any]:
    def assign(builtin: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        said = value.as_python_constant() if value.is_python_constant() else None
        named = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        if not named or not owner.is_tensor() or not isinstance(said, bool):
            return below(builtin, tx, owner, name, value)
        if owner.as_proxy().node.meta["example_value"].requires_grad and not said:
            return below(builtin, tx, owner, name, value)
        owner.method_requires_grad_(tx, value)
        return value

    return assign


def _make_parameter(owner: Any) -> Any:
    """In every thread, since what is a class method cannot tell of one; what others trace is handed on."""
    below, ours = getattr(owner, _MAKES), threading.get_ident()

    def make(_: Any, tx: Any, data: Any = None, requires_grad: Any = True) -> Any:
        said = requires_grad if isinstance(requires_grad, bool) else requires_grad.as_python_constant()
        if ours != threading.get_ident() or data is None or not data.is_tensor():
            return below(tx, data, requires_grad)
        is_input = data.as_proxy().node.op in ("placeholder", "get_attr")
        if is_input or data.python_type() not in (torch.Tensor, torch.nn.Parameter):
            return below(tx, data, requires_grad)
        made = data.call_method(tx, "detach", [], {})
        if said:
            made.method_requires_grad_(tx)
        made.class_type = torch.nn.Parameter
        return made

    return classmethod(make)


def _make_leaf(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._C._functorch import get_inplace_requires_grad_allowed as allowed
    from torch._C._functorch import set_inplace_requires_grad_allowed as allow

    def requires_grad_(variable: Any, tx: Any, requires_grad: Any = True) -> Any:
        wanted = requires_grad is True or requires_grad.as_python_constant()
        example = variable.as_proxy().node.meta["example_value"]
        if variable.source or not wanted or example.requires_grad:
            return below(variable, tx, requires_grad)
        before = allowed()
        # The same is done now, with fake tensors, and written for AOTAutograd's traces, which run under functorch.
        allow(True)
        try:
            tx.output.create_node("call_function", allow, (True,), {})
            tx.output.create_proxy("call_method", "requires_grad_", (variable.as_proxy(),), {})
            tx.output.create_node("call_function", allow, (before,), {})
        finally:
            allow(before)
        example.requires_grad_()
        variable.requires_grad = True
        tx.output.leaf_var_creation_order.append(variable)
        return variable

    return requires_grad_
