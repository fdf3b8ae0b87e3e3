"""AOTAutograd: from Dynamo's graph to a joint graph of forward and backward, cut in two by whom we name.

Relied on, the same from 2.11 to 2.14 except where said (docs/adr/0002; ``torch/_functorch/_aot_autograd/`` itself
changed by thousands of lines between them, so nothing is imported from there):
1. The partitioner gets the joint graph as a module and the count of forward outputs; ``node.meta["val"]`` is the fake
   value; placeholders of the forward come first and those of the backward are called ``tangents_1`` and on.
2. What the two compilers return is called with one list if it says so by ``_boxed_call``, and may empty it.
3. The forward returns its outputs and then what it saves: as many tensors as it likes, then sizes. The backward
   takes sizes, then tensors, then tangents, and returns one value per primal, ``None`` where there is no gradient.
   From 2.14 on AOTAutograd asks of each saved tensor whether its forward graph says that it is an input; up to 2.13 it
   took none for one. It is told that none is (``_nothing_is_assumed``).
4. The joint graph is traced with gradients of the outputs that lie in memory as the outputs do, and at run time those
   that do not are copied until they do. What says how they lie is an object with sizes and strides, or a memory format,
   per gradient (``ViewAndMutationMeta.subclass_tangent_meta``), and what makes the traced ones is a function of one
   output, called for each in order (``coerce_tangent_and_suggest_memory_format``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from ebbtide.torch_seams.patches import Attribute, Setting, patched, wrapped
from ebbtide.user_objects import is_a

__all__ = [
    "DynamoGraph",
    "boxed",
    "description_of",
    "is_tangent",
    "joint_graph_settings",
    "kinds_of_several_tensors",
    "mutated_inputs",
    "output_position_of",
    "sequence_number",
    "two_graph_backend",
]

Boxed = Callable[[list[Any]], Any]


def two_graph_backend(
    *,
    partition: Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]],
    forward_callable: Callable[[fx.GraphModule], Boxed],
    backward_callable: Callable[[fx.GraphModule], Boxed],
    inference_callable: Callable[[fx.GraphModule], Boxed],
) -> Callable[[fx.GraphModule, Any], Any]:
    """A backend of ``torch.compile`` that gives its joint graph to ``partition``; no operator is decomposed.

    Args:
        partition: from the joint graph and the count of forward outputs to a forward and a backward graph.
        forward_callable: from the forward graph to what runs it.
        backward_callable: from the backward graph to what runs it.
        inference_callable: from a graph in which nothing takes a gradient to what runs it.
    """
    from torch._dynamo.backends.common import aot_autograd

    def compile_forward(graph: fx.GraphModule, _: Any) -> Boxed:
        _nothing_is_assumed()
        return forward_callable(graph)

    def partition_fn(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        return partition(joint, num_fwd_outputs)

    return aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=lambda graph, _: backward_callable(graph),
        inference_compiler=lambda graph, _: inference_callable(graph),
        partition_fn=partition_fn,
    )


class _NoneIsInput(list[bool]):
    """Says that no saved tensor is an input, so that a view among them is saved detached."""

    def __getitem__(self, _: Any) -> Any:
        return False


class _Anything:
    """Equals everything."""

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _nothing_is_assumed() -> None:
    """Take out of what AOTAutograd keeps of the forward that it has compiled now what it takes for granted.

    - The count of saved tensors: the only thing there that counts them is a list of booleans
      (``ViewAndMutationMeta.saved_tensor_is_graph_input``).
    - The memory layouts of the outputs' gradients, which then arrive as they are. Those of subclasses stay.
    """
    metadata: Any = TracingContext.get().fw_metadata
    if hasattr(metadata, "saved_tensor_is_graph_input"):
        metadata.saved_tensor_is_graph_input = _NoneIsInput()
    for each in metadata.subclass_tangent_meta:
        if hasattr(getattr(each, "memory_format", None), "stride"):
            each.memory_format = SimpleNamespace(memory_format=None, size=_Anything(), stride=_Anything())


class DynamoGraph:
    """A graph of Dynamo's that is being compiled, to be traced again later with other gradients of its outputs.

    Kept are the graph, the fake values of its inputs and how autocast and the default type were set.

    Args:
        graph: as AOTAutograd gets it.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._inputs = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        self._mode = TracingContext.get().fake_mode
        self._default_dtype = torch.get_default_dtype()
        self._autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ]

    def joint(self, like: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> tuple[fx.GraphModule, int]:
        """Its joint graph and the count of forward outputs.

        Args:
            like: per gradient of an output, what makes the traced one of what AOTAutograd would take.
        """
        from torch._functorch._aot_autograd import collect_metadata_analysis

        found: list[tuple[fx.GraphModule, int]] = []

        def keep(joint: fx.GraphModule, forward_output_count: int) -> Any:
            found.append((joint, forward_output_count))
            raise _AtHand

        def never(_: fx.GraphModule) -> Boxed:
            raise AssertionError("a graph was compiled that was only traced")

        name = "coerce_tangent_and_suggest_memory_format"
        laid_out = functools.partial(_laid_out, like)
        backend = two_graph_backend(
            partition=keep, forward_callable=never, backward_callable=never, inference_callable=never
        )
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(wrapped(Attribute(collect_metadata_analysis, name), laid_out, this_thread=True))
            stack.enter_context(tracing(TracingContext(self._mode)))
            stack.enter_context(torch.enable_grad())
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self._default_dtype)
            try:
                backend(self._graph, self._inputs)
            except _AtHand:
                pass
        return found[0]


class _AtHand(BaseException):
    """The joint graph is at hand; nothing is to be compiled."""


def _laid_out(
    like: Sequence[Callable[[torch.Tensor], torch.Tensor]], coerce: Callable[..., Any]
) -> Callable[[Any], Any]:
    turn = itertools.cycle(like)  # AOTAutograd may look at a graph twice

    def coerced(output: Any) -> Any:
        traced, *rest = coerce(output)
        return (next(turn)(traced), *rest)

    return coerced


@contextmanager
def joint_graph_settings() -> Iterator[None]:
    """While open, this thread's captures are ours alone.

    - ``enable_autograd_cache`` off: AOTAutograd's cache does not know our partitioner.
    - ``donated_buffer`` on: what the backward may destroy is listed at the capture, by what the stub of the forward
      saves. Stubs save nothing, so the list is empty and ``retain_graph`` works; with the setting off there is no list,
      and torch, which reads the setting anew at the backward, takes that for something donated.
    - ``backward_pass_autocast`` off: eager's backward runs outside of ``torch.autocast``, where people call it; by
      default a capture's backward takes the forward's state.
    - Casts of autocast are kept as in eager, which casts a float32 leaf once in a block and sums the gradients
      of its uses in 16 bits: ``disable_autocast_cache`` does nothing, and leaves are leaves in the trace too
      (``FunctionalTensor.to_functional``).
    - ``decompose_custom_triton_ops`` off: an op of ``torch.library.triton_op`` stays the one op that it is registered
      as, with the fake kernel and the backward that it has; decomposed, it is a launch that returns no tensor.
    - Inductor's ``fallback_random`` on: AOTAutograd drops draws whose result nobody reads unless it is, and all later
      draws would be others than eager's.
    """
    from torch._functorch import config
    from torch._inductor import config as inductor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental import proxy_tensor

    values = {
        "donated_buffer": True,
        "enable_autograd_cache": False,
        "backward_pass_autocast": "off",
        "decompose_custom_triton_ops": False,
    }
    with ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(patched(Setting(config, name), value))
        no_cache, to_functional = (proxy_tensor, "disable_autocast_cache"), (FunctionalTensor, "to_functional")
        stack.enter_context(wrapped(Attribute(*no_cache), lambda _: nullcontext, this_thread=True))
        stack.enter_context(wrapped(Attribute(*to_functional), _leaves_stay_leaves, this_thread=True))
        stack.enter_context(patched(Setting(inductor, "fallback_random"), True))
        yield


def _leaves_stay_leaves(to_functional: Callable[..., Any]) -> Callable[..., Any]:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        functional = to_functional(tensor)
        if tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not functional.is_leaf:
            functional.detach_().requires_grad_()  # of the wrapper alone; nothing is traced
        return functional

    return convert


def boxed(function: Boxed) -> Boxed:
    """``function`` as AOTAutograd wants it: told by ``_boxed_call`` that it takes one list and empties it."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of the joint graph belongs to the backward; AOTAutograd names it so."""
    return str(node.target).startswith("tangents")


def sequence_number(node: fx.Node) -> int:
    """The number of the autograd node that was last when this one of the joint graph was made, or that runs it."""
    return int(node.meta.get("seq_nr", -1))


def description_of(node: fx.Node) -> object | None:
    """What AOTAutograd says of a placeholder of the joint graph; ``None`` if it says nothing.

    An instance of a frozen class of ``torch/_functorch/_aot_autograd/descriptors.py``, to be compared with others.
    """
    return node.meta.get("desc")


def output_position_of(tangent: fx.Node, graph: fx.Graph, forward_output_count: int) -> int | None:
    """Position of the forward output whose gradient ``tangent`` is; ``None`` if AOTAutograd does not say.

    A tangent's description has the ``output``'s; the node that runs has its outputs in the same order.
    """
    output = getattr(description_of(tangent), "output", None)
    (output_node,) = graph.find_nodes(op="output")
    descriptions = list(output_node.meta.get("desc") or [])[:forward_output_count]
    places = [position for position, each in enumerate(descriptions) if output is not None and each == output]
    return places[0] if len(places) == 1 else None


def mutated_inputs(graph: fx.Graph, forward_output_count: int) -> dict[int, object]:
    """Positions of the forward outputs that are new values of inputs, and :func:`description_of` that input.

    The output node has a list of descriptions, forward outputs first; those of new values have ``mutated_input``.
    """
    (output_node,) = graph.find_nodes(op="output")
    descriptions = list(output_node.meta.get("desc") or [])[:forward_output_count]
    inputs = {position: getattr(each, "mutated_input", None) for position, each in enumerate(descriptions)}
    return {position: mutated for position, mutated in inputs.items() if mutated is not None}


def kinds_of_several_tensors(inputs: Iterable[Any]) -> list[str]:
    """Classes of tensors among ``inputs`` that wrap several others.

    A subclass with ``__tensor_flatten__`` stands in the joint graph as what it wraps, and has one gradient beside it:
    nothing there says which primals belong together.
    """
    return sorted({type(each).__name__ for each in inputs if _count_of_plain(each) > 1})


def _count_of_plain(value: Any) -> int:
    """How many plain tensors it is made of; what is wrapped may wrap others."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_a(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return 1
    parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
    return sum(_count_of_plain(each) for each in parts if is_a(each, torch.Tensor))
