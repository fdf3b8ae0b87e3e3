"""Numbers of NumPy's are constants of a trace, as Python's are; what is NumPy's but no constant is known.

Dynamo makes tensors of float64 of them, guarded by their type alone. Eager takes them as Python's numbers wherever it
computes with them, so ``loss * np.sqrt(2)`` stays of float32, and in their own type where it makes a tensor of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_aggregate

from ebbtide.torch_seams.patches import Attribute, wrapped

__all__ = ["WITH_ARRAYS", "is_numpys", "makes_tensors", "numpys_numbers_as_constants"]

_KINDS = (np.floating, np.signedinteger, np.unsignedinteger)
WITH_ARRAYS = "a number of NumPy's meets an array"
"""The text of the refusal where the wider of two types decides, which torch's ops are not told."""
_MAKES_TENSORS = (torch.tensor, torch.as_tensor, torch.asarray)
_NUMPYS = "ebbtide_numpys"


def is_numpys(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph is an array or a number of NumPy's in eager."""
    return _NUMPYS in node.meta


def makes_tensors(node: fx.Node) -> bool:
    """Whether an op makes a tensor of what it is given, in the type of NumPy's number."""
    from torch import _refs

    return node.target in (*_MAKES_TENSORS, torch.from_numpy, _refs.tensor)


class _Given:
    """What stands for a number of NumPy's among the arguments of an op that is about to be put into the graph."""

    def __init__(self, number: Any) -> None:
        self.number = number


def _is_numpys(value: object) -> bool:
    """Whether it is a real number of NumPy's that fits into one of Python's."""
    return isinstance(value, _KINDS) and type(value).__module__ == "numpy" and value.itemsize <= 8


@contextmanager
def numpys_numbers_as_constants() -> Iterator[None]:
    """While open, traces of this thread take numbers of NumPy's as constants, each guarded by its value.

    What NumPy makes of constants alone is computed by NumPy; ops of torch's are given Python's numbers.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import NumpyVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    with ExitStack() as stack:
        for owner, name, make in (
            (VariableBuilder, "_wrap", _wrapped_by_value),
            (SourcelessBuilder, "create", _built),
            (ConstantVariable, "create", _created),
            (NumpyVariable, "call_function", _by_numpy),
            (TorchInGraphFunctionVariable, "call_function", _in_its_type),
            (OutputGraph, "create_proxy", _pythons_to_ops),
            (TensorVariable, "__init__", _told),
        ):
            stack.enter_context(wrapped(Attribute(owner, name), make, this_thread=True))
        yield


def _wrapped_by_value(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import config
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.guards import GuardBuilder

    def wrap(builder: Any, value: object) -> Any:
        if isinstance(value, np.ndarray) and not config.trace_numpy:  # what is read of it has no guard
            raise Unsupported("NumPy computes by itself where a step is several graphs")
        if isinstance(value, np.bool_):
            builder.install_guards(GuardBuilder.ID_MATCH)  # there are two
        elif _is_numpys(value):
            builder.install_guards(GuardBuilder.EQUALS_MATCH)
        else:
            return below(builder, value)
        return _variable_of(value, source=builder.source)

    return wrap


def _built(below: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tx, value: (
        _variable_of(value) if _is_numpys(value) or isinstance(value, np.bool_) else below(tx, value)
    )


def _created(below: Callable[..., Any]) -> Callable[..., Any]:
    def create(value: Any, **kwargs: Any) -> Any:
        if _is_numpys(value):
            return _class()(value, **kwargs)
        return below(bool(value) if isinstance(value, np.bool_) else value, **kwargs)

    return create


def _by_numpy(below: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        constants = _constants(args, kwargs)
        if constants is not None and not isinstance(getattr(variable.value, "__self__", None), np.random.RandomState):
            found = _variable_of(variable.value(*constants[0], **constants[1]))
            if found is not None:
                return found
        return below(variable, tx, args, kwargs)

    return call_function


def _in_its_type(below: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor(np.float64(0.3))`` is of float64."""
    from torch._dynamo.variables.constant import ConstantVariable

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if variable.value in _MAKES_TENSORS and args and "dtype" not in kwargs:
            constants = _constants(args[:1], {})
            if constants is not None:
                kwargs = {**kwargs, "dtype": ConstantVariable.create(variable.value(*constants[0]).dtype)}
        return below(variable, tx, args, kwargs)

    return call_function


def _told(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables.tensor import NumpyNdarrayVariable

    def make(variable: Any, *args: Any, **kwargs: Any) -> None:
        below(variable, *args, **kwargs)
        if isinstance(variable, NumpyNdarrayVariable):
            variable.proxy.node.meta[_NUMPYS] = True

    return make


def _pythons_to_ops(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import utils
    from torch._dynamo.exc import Unsupported

    numpys = (utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper)

    def create_proxy(output: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        values = (*args, *kwargs.values()) if isinstance(target, numpys) else ()
        arrays = {_numpys_type(each) for each in values if isinstance(each, fx.Proxy)}

        def given(each: Any) -> Any:
            if not isinstance(each, _Given):
                return each
            if any(np.result_type(of, each.number) != of for of in arrays):
                raise Unsupported(WITH_ARRAYS)
            return each.number.item()

        return below(output, kind, target, *map_aggregate((args, kwargs), given), *rest, **named)

    return create_proxy


def _numpys_type(array: fx.Proxy) -> str:
    return str(array.node.meta["example_value"].dtype).removeprefix("torch.")


def _constants(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments, if all are constants."""
    try:
        return [each.as_python_constant() for each in args], {k: v.as_python_constant() for k, v in kwargs.items()}
    except NotImplementedError:
        return None


def _variable_of(value: object, **kwargs: Any) -> Any:
    """A constant of a number or a type; ``None`` for others."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import NumpyDTypeVariable

    if isinstance(value, np.dtype):
        return NumpyDTypeVariable(value)
    number = _is_numpys(value) or isinstance(value, np.bool_ | bool | float | int | str)
    return ConstantVariable.create(value, **kwargs) if number else None


@functools.cache
def _class() -> Any:
    """Of variables; made late, for Dynamo takes as long to import as all of torch."""
    from torch._dynamo.variables.constant import ConstantVariable

    class NumpysNumber(ConstantVariable):
        """A constant that is NumPy's where Python computes with it, and Python's in the graph."""

        def __init__(self, value: Any, **kwargs: Any) -> None:
            super().__init__(value.item(), **kwargs)
            self.value = value

        def as_proxy(self) -> Any:
            return _Given(self.value)

        def reconstruct(self, codegen: Any) -> None:
            codegen.append_output(codegen.create_load_const_unchecked(self.value))

        def var_getattr(self, tx: Any, name: str) -> Any:
            found = _variable_of(getattr(self.value, name, None))
            return super().var_getattr(tx, name) if found is None else found

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            constants, method = _constants(args, kwargs), getattr(self.value, name, None)
            if constants is not None and method is not None:
                found = _variable_of(method(*constants[0], **constants[1]))
                if found is not None:
                    return found
            return super().call_method(tx, name, args, kwargs)

    return NumpysNumber
