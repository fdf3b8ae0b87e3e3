"""Dynamo: from Python to one graph. Imported where it is used, for it takes as long to import as all of torch."""

from __future__ import annotations

import ast
import functools
import logging
import os
import re
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.eval_frame import reset_code

from ebbtide.torch_seams.compile_mode import code_of_compiled
from ebbtide.torch_seams.fake_tensors import LIMITS
from ebbtide.torch_seams.numpy_numbers import numpys_numbers_as_constants
from ebbtide.torch_seams.patches import Attribute, Item, Setting, patched, wrapped
from ebbtide.torch_seams.tracing import made_anew, raised_in_trace

__all__ = [
    "capture_error_type",
    "copied_graph",
    "failed_by_itself",
    "forget_compiled",
    "forget_frames_of",
    "inner_exception",
    "input_again",
    "is_argument",
    "is_switched_off",
    "numpy_call",
    "one_graph_settings",
    "raised_by_the_model",
    "several_graphs_settings",
    "sizes_as_symbols",
    "without_the_compilers_words",
]

_MOST_OF_A_FRAME = 8
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # what maybe_mark_dynamic leaves on a tensor


def capture_error_type() -> type[Exception]:
    """What every error of Dynamo is: its own refusals, and wrapped ones of the user's code and of backends."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def inner_exception(error: BaseException) -> BaseException | None:
    """The exception that an error of Dynamo wraps, if it wraps one."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) and inner is not error else None


_RAISED = re.compile(r"raised exception \w+\((.*)\)$", re.MULTILINE)
_TOLIST = "to_list"  # what Dynamo calls a method that there is
_NO_METHOD = re.compile(r"call_method (?:TensorVariable\(\) (\w+)|(\w+)\(\*.*got 'attribute not defined')")  # 2.11
_FALSE_ASSERTION = "Data-dependent assertion failed (cannot compile partial graph)"  # said of constants alone
_ASSERTION = re.compile(r"^\s*(?:[^#]*:\s)?(assert\s.+)$", re.MULTILINE)
_UNTOLD_SIZE = re.compile(r"\bu\d+\b")
_COMPILERS_WORDS = re.compile(r"\n*from user code:\n.*|\n*Set TORCHDYNAMO_VERBOSE=1.*", re.DOTALL)


def raised_by_the_model(error: BaseException) -> Exception | None:
    """The exception that the traced code itself would raise, made anew; ``None`` if torch does not say.

    Nothing is run for it but, of an exception's class, what makes it (``tracing``). Relied on: an exception that no
    frame of the code catches is wrapped, with its arguments in the text; an assertion with a constant message is one of
    values that are known; a kernel that refuses its arguments fails likewise on fake tensors, and what it raised stands
    in the chain; so does what binding arguments to a function raises.
    """
    from torch._dynamo import exc
    from torch._dynamo.exc import ObservedException, TorchDynamoException, observed_exception_map

    if (theirs := raised_in_trace(error)) is not None:
        return theirs
    chain = _chain(error)
    text, last = str(error), chain[-1]
    observed = next((each for each in chain if isinstance(each, ObservedException)), None)
    of_a_kernel = getattr(exc, "FakeTensorObservedException", ())  # from 2.14 on code may catch what kernels raise
    if observed is not None and not isinstance(observed, of_a_kernel):
        kinds = [kind for kind, wrapper in observed_exception_map.items() if type(observed) is wrapper]
        said = _RAISED.search(text)
        try:
            args = ast.literal_eval(f"({said[1]},)" if said is not None and said[1] else "()")
        except (SyntaxError, ValueError):
            return None
        return made_anew(kinds[0], args) if kinds else None
    if _FALSE_ASSERTION in text:
        return AssertionError(*_said_by(text))
    missing = _NO_METHOD.search(text)
    if missing is not None and not hasattr(torch.Tensor, name := missing[1] or missing[2]) and name != _TOLIST:
        return AttributeError(f"'Tensor' object has no attribute '{name}'")
    if text.startswith("failed to bind arguments") and isinstance(last, TypeError):
        return made_anew(TypeError, last.args)
    if type(error).__name__ != "TorchRuntimeError" or isinstance(last, (TorchDynamoException, *LIMITS)):
        return None
    if _UNTOLD_SIZE.search(str(last)):
        return None  # of sizes that only data tell: the code itself may well run
    if _is_torchs_own(last):
        return None  # kernels refuse arguments with other exceptions: a fault of the trace
    return made_anew(type(last), last.args) if isinstance(last, Exception) else None


def failed_by_itself(error: BaseException) -> bool:
    """Whether a trace failed at an assertion of torch's own, which says nothing of the code that was traced."""
    return _is_torchs_own(_chain(error)[-1])


def _chain(error: BaseException) -> list[BaseException]:
    """``error`` and what led to it, the first of all last."""
    chain: list[BaseException] = [error]
    while (following := chain[-1].__cause__ or chain[-1].__context__) is not None and following not in chain:
        chain.append(following)
    return chain


def _is_torchs_own(error: BaseException) -> bool:
    """Whether it is an assertion in code of torch, no matter who called that."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, AssertionError) else []
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(torch.__file__).parent)


def _said_by(text: str) -> tuple[str, ...]:
    """The message of the last ``assert`` among the lines of an error of Dynamo, which takes no others that way."""
    for line in reversed(_ASSERTION.findall(text)):
        with suppress(SyntaxError):
            found = ast.parse(line).body[0]
            if isinstance(found, ast.Assert) and isinstance(found.msg, ast.Constant):
                return (str(found.msg.value),)
    return ()


def without_the_compilers_words(error: Exception) -> None:
    """Take off what Dynamo appends to the message of an exception that it lets through."""
    if error.args and isinstance(error.args[0], str):
        error.args = (_COMPILERS_WORDS.sub("", error.args[0]), *error.args[1:])


def is_argument(node: torch.fx.Node) -> bool:
    """Whether a node of Dynamo's graph is a tensor among ``args`` or ``kwargs`` of the function that was compiled."""
    return node.op == "placeholder" and str(node.target).startswith(("L_args_", "L_kwargs_"))


def numpy_call(node: torch.fx.Node) -> str | None:
    """The function, method, operator or attribute of NumPy that ``node`` computes with torch; ``None`` for others."""
    from torch._dynamo import utils

    if node.op != "call_function":
        return None
    if node.target is utils.numpy_attr_wrapper:
        return str(node.args[1])
    if isinstance(node.target, utils.numpy_method_wrapper):
        return node.target.method
    if isinstance(node.target, utils.numpy_to_tensor_wrapper | utils.numpy_operator_wrapper):
        return node.target.__name__.removeprefix("wrapped_")
    return None


def copied_graph(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """``graph`` of Dynamo anew, with what Dynamo has written to it; it reads its own again when it is compiled."""
    nodes, known = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    nodes.output(nodes.graph_copy(graph.graph, known))
    for old, new in known.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    made = torch.fx.GraphModule(graph, nodes)
    made.meta = dict(graph.meta)
    if hasattr(graph, "_param_name_to_source"):
        made._param_name_to_source = graph._param_name_to_source  # type: ignore[assignment]
    return made


def input_again(node: torch.fx.Node, after: torch.fx.Node, name: str) -> torch.fx.Node:
    """Another input for the tensor of ``node``, behind that of ``after``; no guard of AOTAutograd's names it."""
    with node.graph.inserting_after(after):
        made = node.graph.placeholder(name)
    made.meta.update(node.meta)
    made._dynamo_source = None  # type: ignore[attr-defined]
    return made


def forget_compiled(function: Callable[..., Any], backend: Callable[..., Any] | None = None) -> None:
    """Free what Dynamo keeps for a function of ``torch.compile``, which it would keep until the process ends.

    - Its cache hangs on the code object of the function that was compiled (``_torchdynamo_orig_callable``).
    - Whatever its guards know by identity has a finalizer that holds the guards: of a class or a module, for good.
    - ``cached_backends`` keeps every backend, and the code state the sizes seen by every function, by its name.
    """
    from torch._dynamo import pgo
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends

    code = code_of_compiled(function)
    guards = {id(entry.guard_manager) for entry in _debug_get_cache_entry_list(code)}
    reset_code(code)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        manager = _manager_of(finalizer)
        if manager is not None and id(getattr(manager, "guard_manager", None)) in guards:
            finalizer.detach()
    for key, kept in list(cached_backends.items()):
        if backend is not None and getattr(kept, "compiler_fn", kept) is backend:
            del cached_backends[key]
    states = pgo._CODE_STATE or {}
    for known in [each for each in states if (each.name, each.filename) == (code.co_name, code.co_filename)]:
        del states[known]


def forget_frames_of(backend: Callable[..., Any], codes: Iterable[types.CodeType]) -> None:
    """Free what Dynamo has compiled of frames for a backend, as it does where what a guard knows by identity is gone.

    What others have compiled of the same code stays.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for code in list(codes):
        for entry in _debug_get_cache_entry_list(code):
            guards = entry.guard_manager
            if getattr(entry.backend, "compiler_fn", entry.backend) is backend and guards.extra_state is not None:
                guards.extra_state.invalidate(entry, DeletedGuardManagerWrapper("its model is gone"))


def _manager_of(finalizer: weakref.finalize[..., Any]) -> object:
    """Whose guards a finalizer holds, if it is one of Dynamo's."""
    found = finalizer.peek()
    function = found[1] if found is not None else None
    method = function.func if isinstance(function, functools.partial) else None
    owner = getattr(method, "__self__", None)
    return owner if type(owner).__name__ == "CheckFunctionManager" else None


def is_switched_off() -> bool:
    """Whether ``torch.compile`` gives back what it is given, for the life of the process."""
    return os.environ.get("TORCHDYNAMO_DISABLE", "") == "1"


def _ignored_messages() -> set[Any]:
    """Logging and warnings, which a captured step leaves out: they would break its graph. ``print`` is refused."""
    levels = ("debug", "info", "warning", "error", "critical", "exception", "log")
    logger = [getattr(logging.Logger, name) for name in dir(logging.Logger) if name in levels or name.endswith("_once")]
    return {warnings.warn, *logger}  # asked anew: libraries add methods (transformers' warning_once)


@contextmanager
def one_graph_settings() -> Iterator[None]:
    """While open, this thread's captures have sizes that are numbers, no messages, and recurrent modules.

    - ``automatic_dynamic_shapes`` off and ``assume_static_by_default`` on: a size is a number unless it is marked; an
      automatic dynamic shape has no bytes.
    - ``ignore_logger_methods``: calls that are left out of the graph instead of breaking it. Torch 2.11 sorts them
      to log them with a compilation's metrics, cannot, and would log an error of 100 lines for each capture.
    - ``skip_nnmodule_hook_guards`` off: a hook that is put on a submodule later makes another step.
    - ``disable`` off: somebody may have switched compilation off for their own code.
    - ``enable_dynamo_decompositions`` off: ``addcmul_``, ``addcdiv_`` and ``add_`` with a factor stay one operator. The
      handler that takes ``torch.addcdiv`` apart asks no setting, so it hands the call on.
    - ``trace_autograd_ops`` on: ``torch.autograd.grad`` inside of the step is part of its graph.
    - ``optimize_ddp`` off: inside of a DistributedDataParallel a graph would be split by the buckets of its gradients.
    - ``use_numpy_random_stream`` on: NumPy's draws are refused; else torch's generator takes their place.
    - ``profile_guard_manager``: how long guards take is not measured for torch's log, which empties the processor's
      caches before it, a tenth of a small capture.
    - ``GetAttrVariable``: of the names of torch's own classes and functions Dynamo knows no methods. PEFT asks whether
      ``type(weight).__module__.startswith("torchao.")``.
    - Numbers of NumPy's are constants (``numpy_numbers``).
    - ``allow_rnn``: without it Dynamo refuses the recurrent modules that ``capture/rules/recurrent.py`` unrolls. Up to
      2.12 torch describes the last states of an LSTM with a dimension too many.
    """
    from torch._decomp import decompositions
    from torch._dynamo import config, guards, utils
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    values = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "ignore_logger_methods": _ignored_messages(),
        "enable_dynamo_decompositions": False,
        "allow_rnn": True,
        "skip_nnmodule_hook_guards": False,
        "disable": False,
        "trace_autograd_ops": True,
        "use_numpy_random_stream": True,
        "optimize_ddp": False,
    }
    with ExitStack() as stack:
        for name, value in values.items():
            if hasattr(config, name):
                stack.enter_context(patched(Setting(config, name), value))
        if torch.addcdiv in handlers:
            stack.enter_context(wrapped(Item(handlers, torch.addcdiv), _not_handled, this_thread=True))
        stack.enter_context(wrapped(Attribute(GetAttrVariable, "call_method"), _of_names, this_thread=True))
        stack.enter_context(numpys_numbers_as_constants())
        if hasattr(utils, _LOGGED):
            stack.enter_context(wrapped(Attribute(utils, _LOGGED), _or_none, this_thread=True))
        if hasattr(decompositions, _LAYER):
            stack.enter_context(wrapped(Attribute(decompositions, _LAYER), _states_of_rows, this_thread=True))
        if hasattr(guards, "profile_guard_manager"):
            stack.enter_context(wrapped(Attribute(guards, "profile_guard_manager"), _no_latency, this_thread=True))
        yield


@contextmanager
def several_graphs_settings(*, others: int, fixed: bool) -> Iterator[None]:
    """While open, over :func:`one_graph_settings`, what breaks a graph breaks it, and the code there runs as in eager.

    Of the frame that is compiled ``others`` graphs are kept that count for its limits and are not ours; its sizes are
    ``fixed``, or symbols if they change.

    - ``trace_numpy`` off: NumPy computes by itself.
    - ``automatic_dynamic_shapes`` on: a size or an integer that has changed is a symbol, since code between the graphs
      may give another at every step; ``specialize_float`` on: a fraction is none.
    - ``recompile_limit``: a frame that is compiled for so many values of what it is guarded by runs as in eager from
      then on, and what it calls is compiled by itself. The trace says nothing of either.
    """
    from torch._dynamo import config

    values = {
        "trace_numpy": False,
        "automatic_dynamic_shapes": not fixed,
        "specialize_float": True,
        "recompile_limit": _MOST_OF_A_FRAME + others,
        "accumulated_recompile_limit": config.accumulated_recompile_limit + others,
    }
    log = logging.getLogger("torch._dynamo")
    level = log.level
    with ExitStack() as stack:
        stack.callback(log.setLevel, level)
        log.setLevel(logging.ERROR)
        for name, value in values.items():
            stack.enter_context(patched(Setting(config, name), value))
        yield


def _no_latency(_: Callable[..., Any]) -> Callable[..., float]:
    return lambda *args, **kwargs: 0.0


_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


def _of_names(below: Callable[..., Any]) -> Callable[..., Any]:
    """Methods of texts that name what is torch's own, of which the trace has a guard already."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.torch import BaseTorchVariable

    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if variable.name in _NAMES and isinstance(variable.obj, BaseTorchVariable):
            found = getattr(variable.obj.value, variable.name, None)
            if isinstance(found, str):
                return ConstantVariable.create(found).call_method(tx, name, args, kwargs)
        return below(variable, tx, name, args, kwargs)

    return call_method


_LOGGED = "_get_dynamo_config_for_logging"


def _or_none(below: Callable[[], str | None]) -> Callable[[], str | None]:
    """The settings as text for a compilation's metrics, or none where torch cannot write one of them."""

    def settings() -> str | None:
        try:
            return below()
        except TypeError:
            return None

    return settings


_LAYER = "one_layer_lstm"


def _states_of_rows(below: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's last states have rows and columns, no steps."""

    def layer(*args: Any, **kwargs: Any) -> Any:
        outputs, states = below(*args, **kwargs)
        return outputs, tuple(state[0] if state.dim() == 3 else state for state in states)

    return layer


def _not_handled(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


@contextmanager
def sizes_as_symbols(tensors: Iterable[torch.Tensor], dimensions: Iterable[Iterable[int]]) -> Iterator[None]:
    """While open, a capture takes some sizes of these tensors as symbols, unless something makes them numbers.

    Args:
        tensors: arguments of the call to be captured.
        dimensions: per tensor, which of its sizes.
    """
    from torch._dynamo import maybe_mark_dynamic

    marked = list(tensors)
    ours = [(tensor, mark) for tensor in marked for mark in _MARKS if not hasattr(tensor, mark)]
    try:
        for tensor, changing in zip(marked, dimensions, strict=True):
            for dimension in changing:
                maybe_mark_dynamic(tensor, dimension)
        yield
    finally:
        for tensor, mark in ours:
            if hasattr(tensor, mark):
                delattr(tensor, mark)
