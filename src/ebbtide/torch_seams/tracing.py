"""What Dynamo makes of single statements of the user's code, corrected while a step is captured.

1. A number that Python's ``random`` draws would be drawn anew at every call of what was captured, and twice at a first
   call, which is asked for its plan before it runs: it is refused, as NumPy's draws are.
2. ``requires_grad_()`` on an intermediate result is traced, and such a result is no output (``leaves.py``).
3. A comparison of ``torch.rand`` with a number that lies outside of [0, 1) has one outcome, whatever is drawn.
4. ``checkpoint_sequential`` is its loop over ``checkpoint``, which Dynamo knows.
5. Dynamo traces no exception that has an ``__init__`` of its own. Where one is made of constants to be raised, and
   nothing of the user's could catch it or end before it does, it is made for real: the trace ends in it.
6. Dynamo tells in words which exception nobody caught. Its 2.11 tells the arguments in words of its own, which cannot
   be read back: there they are taken from the exception that it keeps.
7. A context variable is traced (``context_variables.py``).
8. What Dynamo reads without a guard gets one (``extra_guards.py``).
9. A reentrant checkpoint none of whose arguments takes a gradient cuts the graph, as in eager (``reentrant.py``).
10. An attribute that a ``torch.autograd.Function`` takes off its context, mostly to free memory, is off.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as checkpoints

from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.context_variables import context_variables_traced
from ebbtide.torch_seams.extra_guards import extra_guards
from ebbtide.torch_seams.leaves import leaves_traced
from ebbtide.torch_seams.patches import Attribute, Item, wrapped
from ebbtide.torch_seams.reentrant import reentrant_checkpoints_cut

__all__ = ["PYTHON_DRAWS", "corrected_tracing", "made_anew", "only_withs", "raised_in_trace", "traced_by_dynamo_as"]

PYTHON_DRAWS = "a number is drawn by Python's random module"
"""The text of the refusal of definition 1."""


@contextmanager
def traced_by_dynamo_as(
    function: Callable[..., Any], instead: Callable[..., Any], when: Callable[..., bool]
) -> Iterator[None]:
    """While open, captures of this thread inline ``instead`` where the user's code calls a function of torch's.

    Args:
        function: that Dynamo would put into its graph.
        instead: takes the same arguments; Python that Dynamo can trace.
        when: asked with the arguments as the trace has them, fake tensors among them.
    """
    from torch._dynamo.variables import UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()

    def make(below: Callable[..., Any]) -> Callable[..., Any]:
        def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            example = [_example(each) for each in args]
            if when(*example, **{name: _example(each) for name, each in kwargs.items()}):
                return tx.inline_user_function_return(UserFunctionVariable(instead), list(args), kwargs)
            return below(variable, tx, *args, **kwargs)

        return handle

    with wrapped(Item(handlers, function), make, this_thread=True, default=lambda *_, **__: None):
        yield


def _example(value: Any) -> Any:
    """A fake tensor for a traced one."""
    node = getattr(getattr(value, "proxy", None), "node", None)
    return value if node is None else node.meta.get("example_value")


@contextmanager
def corrected_tracing() -> Iterator[None]:
    """While open, captures of this thread trace definitions 1 to 10 so."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import misc, user_defined

    _inline_sequential()
    with ExitStack() as stack:
        for module in (misc, user_defined):
            if hasattr(module, "call_random_fn"):
                stack.enter_context(wrapped(Attribute(module, "call_random_fn"), _refuse_draw, this_thread=True))
        stack.enter_context(leaves_traced())
        stack.enter_context(context_variables_traced())
        stack.enter_context(extra_guards())
        stack.enter_context(reentrant_checkpoints_cut())
        context = Attribute(misc.AutogradFunctionContextVariable, "call_method")
        stack.enter_context(wrapped(context, _take_off, this_thread=True))
        if hasattr(user_defined, "UserDefinedExceptionClassVariable"):
            kind = user_defined.UserDefinedExceptionClassVariable  # which in 2.11 inherits the method
            place, inherited = Attribute(kind, "call_function"), kind.call_function
            stack.enter_context(wrapped(place, _raise_own, this_thread=True, default=inherited))
        if "debug_repr" not in vars(misc.ExceptionVariable):
            place = Attribute(symbolic_convert.InstructionTranslatorBase, "exception_handler")
            stack.enter_context(wrapped(place, _tell_arguments, this_thread=True))
        for sign in _OUTCOMES:
            decide = functools.partial(_decided, sign)
            stack.enter_context(wrapped(Item(symbolic_convert.compare_op_handlers, sign), decide, this_thread=True))
        yield


def _refuse_draw(_below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import Unsupported

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise Unsupported(PYTHON_DRAWS)

    return refuse


def raised_in_trace(error: BaseException) -> Exception | None:
    """The exception of the user's own in which a trace ended (5 and 6), if ``error`` says that it did."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(theirs := getattr(found, "_ebbtide_raised", None), Exception):
            return theirs
        found = found.__cause__ or found.__context__
    return None


def _take_off(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables import ConstantVariable, DeletedVariable

    def call(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "__delattr__":
            return below(variable, tx, name, args, kwargs)
        attribute = args[0].as_python_constant()
        variable.var_getattr(tx, attribute)  # which says that there is none
        tx.output.side_effects.store_attr(variable, attribute, DeletedVariable())
        return ConstantVariable.create(None)

    return call


def _raise_own(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import Unsupported

    def make(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _leaves_all_frames(tx) or not all(each.is_python_constant() for each in [*args, *kwargs.values()]):
            return below(variable, tx, args, kwargs)
        values = [each.as_python_constant() for each in args]
        named = {name: each.as_python_constant() for name, each in kwargs.items()}
        try:
            theirs = variable.value(*values, **named)
        except Exception as error:
            if raised_by_a_handler(error):
                raise
            theirs = error
        ended: Any = Unsupported(f"raises {type(theirs).__name__}")
        ended._ebbtide_raised = theirs
        raise ended

    return make


def made_anew(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    """An exception of this kind; its class may want other arguments than it keeps."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


_KEY = re.compile(r"^Dict key lookup failed for .* Debug representation of the key is (.*)$", re.DOTALL)


def _tell_arguments(below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import Unsupported

    def handle(tx: Any, raised: Exception) -> Any:
        try:
            return below(tx, raised)
        except Unsupported as error:
            if error.__cause__ is raised:  # nobody caught it
                caught = tx.exn_vt_stack.get_current_exception()
                if all(each.is_python_constant() for each in caught.args):
                    args = tuple(each.as_python_constant() for each in caught.args)
                    args = _missing_key(args) or args
                    error._ebbtide_raised = made_anew(caught.python_type(), args)  # type: ignore[attr-defined]
            raise

    return handle


def _missing_key(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The key alone where the arguments of an exception are a sentence of Dynamo's about a key."""
    said = _KEY.search(args[0]) if len(args) == 1 and isinstance(args[0], str) else None
    try:
        return (ast.literal_eval(ast.literal_eval(said[1])),) if said else None
    except (SyntaxError, ValueError):
        return None


def _leaves_all_frames(tx: Any) -> bool:
    """Whether an exception that is made now is raised next, past nothing of the user's that may catch it."""
    if tx.current_instruction.opname == "RAISE_VARARGS":  # ``raise Mine``, a class, which Dynamo raises as it is
        return False
    while tx.next_instruction.opname == "RETURN_VALUE" and tx.parent is not None:  # of a function that makes it
        tx = tx.parent
    raising = tx.next_instruction
    if raising.opname != "RAISE_VARARGS" or raising.arg != 1:
        return False
    while tx is not None:
        # Context managers of torch's, which Dynamo knows, hold no exception back; others are "generic".
        if tx.active_generic_context_managers or not only_withs(tx, tx.current_instruction):
            return False
        tx = tx.parent
    return True


def only_withs(tx: Any, instruction: Any) -> bool:
    """Whether nothing but ``with`` handles an exception at ``instruction``, by the table of Python's own."""
    while (entry := instruction.exn_tab_entry) is not None:
        instruction = entry.target
        following = tx.instructions[tx.indexof[instruction] + 1]
        if instruction.opname != "COPY" and following.opname != "WITH_EXCEPT_START":  # COPY: the end of a handler
            return False
    return True


# Of ``torch.rand() SIGN number``, in [0, 1): the outcome for numbers at most 0, below 0, and at least 1.
_OUTCOMES: dict[str, tuple[bool | None, bool, bool]] = {
    "<": (False, False, True),
    ">=": (True, True, False),
    "<=": (None, False, True),
    ">": (None, True, False),
}
_MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def _outcome(sign: str, number: float) -> bool | None:
    at_zero, below_zero, from_one = _OUTCOMES[sign]
    if number >= 1:
        return from_one
    return below_zero if number < 0 else at_zero if number == 0 else None


def _decided(sign: str, below: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables import ConstantVariable

    def compare(tx: Any, operands: list[Any], kwargs: dict[str, Any]) -> Any:
        left, right = operands
        outcome = None
        if _is_drawn(left) and _is_number(right):
            outcome = _outcome(sign, right.as_python_constant())
        elif _is_drawn(right) and _is_number(left):
            outcome = _outcome(_MIRRORED[sign], left.as_python_constant())
        return below(tx, operands, kwargs) if outcome is None else ConstantVariable.create(outcome)

    return compare


def _is_drawn(value: Any) -> bool:
    """Whether a traced value is one number that ``torch.rand`` drew."""
    node = getattr(getattr(value, "proxy", None), "node", None)
    return node is not None and node.target is torch.rand and node.meta["example_value"].dim() == 0


def _is_number(value: Any) -> bool:
    return value.is_python_constant() and isinstance(value.as_python_constant(), int | float)


@functools.cache
def _inline_sequential() -> None:
    """Say once what ``checkpoint_sequential`` is. Torch's public registry of such words has no way to take one back."""

    def checkpoint_sequential(
        functions: Any, segments: int, input: Any, use_reentrant: Any = None, **kwargs: Any
    ) -> Any:
        preserve = kwargs.pop("preserve_rng_state", True)
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(arg for arg in kwargs))
        if use_reentrant is None:
            use_reentrant = True
        if isinstance(functions, torch.nn.Sequential):
            functions = list(functions.children())
        size = len(functions) // segments

        def run(start: int, end: int) -> Callable[[Any], Any]:
            def forward(input: Any) -> Any:
                for j in range(start, end):
                    input = functions[j](input)
                return input

            return forward

        end = 0
        for start in range(0, size * (segments - 1), size):
            end = start + size
            input = checkpoints.checkpoint(
                run(start, end), input, use_reentrant=use_reentrant, preserve_rng_state=preserve
            )
        return run(end, len(functions))(input)

    try:
        torch.compiler.substitute_in_graph(checkpoints.checkpoint_sequential)(checkpoint_sequential)
    except ValueError:  # somebody else has said it
        return
