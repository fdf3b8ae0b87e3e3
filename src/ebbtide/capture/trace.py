"""From a call of a model to its joint graph, through torch.compile, and errors in the user's terms.

``torch.compile`` with ``aot_autograd(partition_fn=ours)`` gives the joint graph of forward and backward and runs
whatever two graphs we return (docs/adr/0002). One graph or a :class:`CaptureError`: a break would leave pieces
that nobody plans together.

Dynamo and the symbolic shapes are imported where they are used: they take as long to import as all of torch, and who
only reads a plan or mistypes a budget has no need of them.
"""

from __future__ import annotations

import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from ebbtide.capture.cuda.batch_norm import cudnn_batch_norms
from ebbtide.capture.cuda.kernels import cuda_kernels, refuse_autocast
from ebbtide.capture.known_breaks import NESTED, is_only_in_traces
from ebbtide.capture.loss import loss_only, marks_in_graphs, settle_roles
from ebbtide.capture.numbers import Numbers, numbers_apart
from ebbtide.capture.refusals import ours_inside, refusal, tells_torchs, users_line
from ebbtide.capture.rules.attention_seeds import seeds_on_the_host
from ebbtide.capture.rules.byte_labels import byte_labels
from ebbtide.capture.rules.checks import CHECK_TRUE, assertions_as_ops, factorisation_checks_as_ops
from ebbtide.capture.rules.ctc import ctc_with_sizes
from ebbtide.capture.rules.dropout import dropout_as_eager
from ebbtide.capture.rules.eager_kernels import eager_kernels
from ebbtide.capture.rules.grouped_products import true_grouped_products
from ebbtide.capture.rules.layouts import true_layouts
from ebbtide.capture.rules.norm_dtypes import true_norms
from ebbtide.capture.rules.numpy_calls import refuse_numpy
from ebbtide.capture.rules.read_places import refuse_read_places
from ebbtide.capture.rules.recurrent import packed_sequence_refusal, unroll_recurrent
from ebbtide.capture.symbolic.sizes import NotAtTheseSizes
from ebbtide.capture.uses import one_input_per_use
from ebbtide.errors import CaptureError
from ebbtide.faults import RAISED_IN_CAPTURE
from ebbtide.signals import raised_by_a_handler, signals_wait
from ebbtide.torch_seams.aot import DynamoGraph, joint_graph_settings, kinds_of_several_tensors, two_graph_backend
from ebbtide.torch_seams.carried import cut_off_freed
from ebbtide.torch_seams.checks import checks_as
from ebbtide.torch_seams.compile_mode import not_exporting
from ebbtide.torch_seams.compiler_faults import told_with_its_lines
from ebbtide.torch_seams.dynamo import (
    capture_error_type,
    forget_compiled,
    forget_frames_of,
    is_switched_off,
    one_graph_settings,
    raised_by_the_model,
    several_graphs_settings,
    without_the_compilers_words,
)
from ebbtide.torch_seams.eager_answers import Answers, answered
from ebbtide.torch_seams.fake_tensors import DATA_DEPENDENT, quiet_log
from ebbtide.torch_seams.frames import STEP, Frame, Frames, Then
from ebbtide.torch_seams.graphs import data_dependent_guard_type
from ebbtide.torch_seams.input_branches import Question, branches_on_inputs
from ebbtide.torch_seams.known_branches import Condition, known_branches
from ebbtide.torch_seams.storages import parts_of
from ebbtide.torch_seams.tracing import corrected_tracing
from ebbtide.torch_seams.trees import tree_leaves
from ebbtide.torch_seams.versions import require_supported_torch
from ebbtide.user_objects import is_a

__all__ = [
    "Partitioner",
    "Taken",
    "capture_settings",
    "compile_in_pieces",
    "compile_step",
    "forget_step",
    "forward_of",
    "frames_in_pieces",
    "inputs_by_name",
    "translated_errors",
    "without_model",
]


@dataclass(frozen=True)
class Taken:
    """What a capture took for granted besides torch's own guards.

    Attributes:
        conditions: on its sizes, of branches on numbers.
        questions: to its inputs, of branches on values.
    """

    conditions: Sequence[Condition] = ()
    questions: Sequence[Question] = ()


class Partitioner(Protocol):
    """What turns a joint graph into the two graphs that run, and those into callables."""

    def take_inputs(self, inputs: Sequence[object]) -> None:
        """What the step that comes next goes in with, in the order of its primals."""
        ...

    def take_graph(self, graph: DynamoGraph) -> None:
        """The graph that is traced next, to be traced again where gradients arrive in other memory layouts."""
        ...

    def take_results(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """What a call of the step has given for ``inputs``, before the model's own code has it."""
        ...

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph of ``joint``; contracts: ``lower/lowering.py``."""
        ...

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """What runs the forward; takes a list and empties it (``_boxed_call``)."""
        ...

    def backward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """What runs the backward, likewise."""
        ...

    def nothing_to_train(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """What is called in place of a step of which nothing takes a gradient; or raises."""
        ...


def forward_of(model: torch.nn.Module) -> Callable[..., Any]:
    """What runs when ``model`` is called, as a function that takes it first; one put on the model itself counts."""
    own = model.__dict__.get("forward")
    return type(model).forward if own is None else without_model(own)


def without_model(own: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` that was put on a model itself, as a function that takes the model first."""

    def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return forward


_counter = itertools.count()
_backends: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()


def _template(module: Any, forward: Any, args: Any, kwargs: Any, every_output: bool) -> Any:
    outputs = forward(module, *args, **kwargs)
    return (outputs, []) if every_output else loss_only(outputs)


def inputs_by_name(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Where a step has its inputs, by the names of the function that is captured."""
    return {"module": module, "args": args, "kwargs": kwargs}


def _fresh_step(template: Callable[..., Any] = _template) -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo keeps its cache and its recompile limit per code object."""
    name = f"{STEP}_{next(_counter)}"
    return types.FunctionType(template.__code__.replace(co_name=name), globals(), name)


@signals_wait()  # it imports the compiler, half of which could never be imported again
def compile_step(
    partitioner: Partitioner, *, elsewhere: bool = False, symbolic: bool = False, numbers: Numbers | None = None
) -> Callable[..., Any]:
    """A function ``step(module, forward, args, kwargs, every_output)`` that captures at its first call.

    It runs what the partitioner returned, and gives the forward's outputs and those of them that may be detached
    (``loss.loss_only``) unless every output is to take gradients. The first call has to be made inside
    :func:`translated_errors`. The caller keeps the partitioner alive.

    Args:
        partitioner: what makes the two graphs.
        elsewhere: whether CPU tensors are traced for a CUDA device.
        symbolic: whether sizes that are marked as changing (``torch_seams.dynamo.sizes_as_symbols``) are symbols;
            all others are numbers.
        numbers: of its model, some of which may be symbols that are taken out of the graph (``capture.numbers``).

    Raises:
        CaptureError: on a release of torch that is not supported.
    """
    require_supported_torch()
    if is_switched_off():
        raise CaptureError(
            "torch.compile is switched off in this process, and Ebbtide captures steps with it",
            remedy="start Python without TORCHDYNAMO_DISABLE=1",
        )
    backend = _backend_of(partitioner, numbers, elsewhere=elsewhere)
    with not_exporting():
        step = torch.compile(_fresh_step(), backend=backend, fullgraph=True, dynamic=None if symbolic else False)
    _backends[step] = backend
    return step


def _backend_of(
    partitioner: Partitioner, numbers: Numbers | None = None, *, elsewhere: bool = False, part: bool = False
) -> Callable[[fx.GraphModule, Any], Any]:
    """What ``torch.compile`` gives its graph to, of which ``partitioner`` makes the two that run.

    ``part`` is whether other parts of the step may read what the graph reads (``uses``).
    """
    marks_in_graphs()
    held = weakref.ref(partitioner)

    def kept() -> Partitioner:
        alive = held()
        assert alive is not None, "the partitioner is gone"
        return alive

    planned = two_graph_backend(
        partition=lambda joint, forward_output_count: kept().partition(joint, forward_output_count),
        forward_callable=lambda graph: kept().forward_callable(graph),
        backward_callable=lambda graph: kept().backward_callable(graph),
        inference_callable=lambda graph: kept().nothing_to_train(graph),
    )

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        _refuse_several(kinds_of_several_tensors(inputs))
        _refuse_opaque(inputs)
        beside = None if numbers is None else numbers_apart(graph, numbers)
        if beside is not None:
            graph, inputs = beside.graph, beside.without_numbers(inputs)
        settle_roles(graph)
        refuse_read_places(graph)
        refuse_numpy(graph)
        assertions_as_ops(graph)
        unroll_recurrent(graph)
        if elsewhere:
            refuse_autocast(graph)
        graph, again = one_input_per_use(graph, inputs) if part else (graph, [])
        inputs = _with_again(inputs, again)
        kept().take_inputs(inputs)
        kept().take_graph(DynamoGraph(graph))
        compiled = _told_to(kept, cut_off_freed(planned(graph, inputs), graph.graph))
        if again:
            return lambda *inputs: compiled(*_with_again(inputs, again))
        return compiled if beside is None else beside.around(compiled)

    return backend


def _with_again(inputs: Sequence[Any], again: Sequence[int]) -> list[Any]:
    """``inputs``, and after them those of these positions again."""
    return [*inputs, *(inputs[position] for position in again)]


def _template_in_pieces(module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(module, *args, **kwargs)


@signals_wait()  # as compile_step
def compile_in_pieces(partitioner: Callable[[], Partitioner]) -> Callable[..., Any]:
    """A function ``step(module, forward, args, kwargs)`` whose graph may break, each part of it a graph of its own.

    It is called inside of ``OwnCompileMode.in_pieces`` with :func:`frames_in_pieces`: a frame for which something is
    raised here runs as in eager.

    Args:
        partitioner: makes what makes the two graphs of a part. The caller keeps what it made alive.
    """
    require_supported_torch()

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        return _backend_of(partitioner(), part=True)(graph, inputs)

    with not_exporting():
        step = torch.compile(_fresh_step(_template_in_pieces), backend=backend)
    _backends[step] = backend
    return step


def frames_in_pieces(left: Callable[[str, str], None]) -> Frames:
    """The frames of the steps of one model in pieces.

    Args:
        left: is told of a frame that runs as in eager, since torch or we fail to compile it, and why.
    """

    @contextmanager
    def settings(frame: Frame) -> Iterator[None]:
        several = several_graphs_settings(others=frame.others, fixed=frame.fixed)
        with quiet_log(), capture_settings(here=True), answered(Answers()), several:
            yield

    def failed(error: Exception, frame: Frame) -> Then:
        ours = ours_inside(error)
        if isinstance(ours, NotAtTheseSizes) and not frame.fixed:
            return Then.WITH_FIXED_SIZES
        if raised_by_a_handler(error) or isinstance(error, OSError | MemoryError):
            return Then.RAISE
        if not isinstance(ours, CaptureError):  # which says what of the code is no graph, as a break does
            left(frame.place, f"{type(error).__name__}: {error}".partition("\n")[0])
        return Then.AS_IN_EAGER

    return Frames(settings, failed)


def _told_to(kept: Callable[[], Partitioner], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, whose results the partitioner is told of."""

    def run(*inputs: Any) -> Any:
        results = compiled(*inputs)
        kept().take_results(results, inputs)
        return results

    return run


def _refuse_several(kinds: list[str]) -> None:
    """Raise for inputs that are several tensors each."""
    if "NestedTensor" in kinds:
        raise CaptureError(NESTED[0], remedy=NESTED[1], op="NestedTensor")
    if kinds:
        raise CaptureError(
            f"a parameter or an argument is a tensor that wraps several others ({', '.join(kinds)}), and which "
            "gradients are whose cannot be told in its joint graph",
            remedy="Keep what it wraps in buffers and dequantize in the forward, as bitsandbytes' layers do "
            "(Linear8bitLt, Linear4bit), or train the adapters on the unquantized weights",
            op=", ".join(kinds),
        )


def _refuse_opaque(inputs: Iterable[object]) -> None:
    """Raise for inputs whose memory torch does not show."""
    opaque = [each.layout for each in inputs if is_a(each, torch.Tensor) and next(parts_of(each), None) is None]
    if opaque:
        raise CaptureError(
            "A parameter or an argument is in a format of oneDNN's (to_mkldnn), whose memory torch does not show",
            remedy="Give it as a plain tensor (to_dense()): training has no use for that format",
            op=str(opaque[0]),
        )


def forget_step(step: Callable[..., Any], frames: Frames | None = None) -> None:
    """Free what Dynamo keeps for a function of :func:`compile_step`, which it would keep until the process ends.

    Args:
        step: the function.
        frames: what was compiled for it besides its own.
    """
    backend = _backends.pop(step)
    if frames is not None:
        forget_frames_of(backend, frames.codes)
    forget_compiled(step, backend)


@contextmanager
def capture_settings(here: bool, cuda: tuple[int, int] | None = None) -> Iterator[None]:
    """Settings under which a step is captured; ``here`` if it is for this machine, whose kernels may then be asked.

    ``cuda`` is the compute capability of the CUDA device for which a step of CPU tensors is traced, if it is.
    """
    with (
        warnings.catch_warnings(),
        joint_graph_settings(),
        one_graph_settings(),
        corrected_tracing(),
        checks_as(CHECK_TRUE),
        ctc_with_sizes(),
        true_layouts() if here else nullcontext(),
        eager_kernels(),
        factorisation_checks_as_ops(),
        dropout_as_eager() if here else nullcontext(),
        true_norms() if here else nullcontext(),
        seeds_on_the_host() if here else nullcontext(),
        true_grouped_products() if here else nullcontext(),
        byte_labels(),
        cudnn_batch_norms(elsewhere=False) if cuda is None else cuda_kernels(cuda),
    ):
        # torch's own: Dynamo instantiates custom autograd functions, which torch deprecates.
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)
        # Dynamo looks at the gradients of the tensors that it is given; of one that is a result it has to warn.
        # Of what it cannot trace Dynamo warns in words of its own besides raising an error.
        warnings.filterwarnings("ignore", message="Dynamo does not know how to trace", category=UserWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        yield


@contextmanager
def translated_errors(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    answers: Answers,
    here: bool = True,
    cuda: tuple[int, int] | None = None,
) -> Iterator[Taken]:
    """Turn Dynamo's errors into ours or the user's own. Nothing of the user's is run for it.

    Gives what is found on the way that has to be so wherever the step is what is captured.

    Args:
        module: whose call is captured.
        args: positional arguments of the call.
        kwargs: keyword arguments.
        answers: what code of the model is told that asks whether it is compiled.
        here: whether the step is for this machine, so that its kernels may be asked (``capture/rules/layouts.py``).
        cuda: compute capability of the CUDA device for which CPU tensors are traced (``capture/cuda/kernels.py``).

    Raises:
        EbbtideError: whatever our partitioner raised, unwrapped.
        CaptureError: for a graph break, with its reason and the user's line.
        InternalError: for a fault of ours.
        Exception: the user's own, unchanged, where the model itself raises.
    """
    # Before Dynamo meets one: it runs kernels of what such a tensor wraps while it describes them, and may crash.
    _refuse_several(kinds_of_several_tensors([*module.parameters(), *module.buffers(), *tree_leaves((args, kwargs))]))
    try:
        # What only raises is a check rather than a question: the settings' way with branches comes before that.
        with (
            quiet_log(),
            branches_on_inputs(inputs_by_name(module, args, kwargs)) as questions,
            capture_settings(here, cuda),
            answered(answers),
            known_branches() as conditions,
        ):
            yield Taken(conditions, questions)
    except (capture_error_type(), *_data_dependent()) as error:
        ours = ours_inside(error)
        if ours is not None:
            raise ours from ours.__cause__
        packed = packed_sequence_refusal((args, kwargs), str(error))
        theirs = None if packed else raised_by_the_model(error)
        if theirs is not None and not is_only_in_traces(str(theirs), users_line(error)):
            theirs.add_note(f"{RAISED_IN_CAPTURE}: {users_line(error)}")
            raise theirs from None
        found = refusal(error, module, packed)
        raise found from found.__cause__ or (error if tells_torchs(found) else None)
    except Exception as error:
        bare = told_with_its_lines(error)
        if bare is not None:
            raise refusal(bare, module) from error
        without_the_compilers_words(error)
        raise


def _data_dependent() -> tuple[type[Exception], ...]:
    """What torch raises where a size or a number depends on data, also where Dynamo does not wrap it."""
    return (*DATA_DEPENDENT, data_dependent_guard_type())
