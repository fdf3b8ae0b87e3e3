"""The joint graph read as a program: which node creates which storage, which is a view, what each op reads.

Definitions:
1. Two tensors share a buffer exactly if their fake values share a storage (``storage_key``).
2. A node that creates a storage is an *op*; one whose storages all exist already is a *view*, and so is a
   ``getitem`` on either. Storages of the forward's inputs and of constants are resident and no buffers.
3. A node is *live* if an output depends on it, or if it draws random numbers or has an effect.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ebbtide.capture.known_breaks import LAUNCHES_AS_OPS
from ebbtide.capture.known_libraries import known_library
from ebbtide.capture.known_ops import KnownOps
from ebbtide.capture.origin import module_of, source_of
from ebbtide.capture.rules.batch_norm import RUNNING_STATISTICS, drop_ignored_reads, repeat_of
from ebbtide.capture.rules.copy_back import insert_copy_back
from ebbtide.capture.rules.counted_weights import count_as_eager
from ebbtide.capture.rules.gradient_copies import copy_gradients, copy_positions, uncopied
from ebbtide.capture.rules.masked_outputs import drop_masked_outputs
from ebbtide.capture.rules.uninitialised import fill_uninitialised
from ebbtide.capture.traits import (
    COLLECTIVES,
    draws_random,
    generator_state_bytes,
    has_effect,
    is_rerunnable,
    keeps_storage,
)
from ebbtide.cost.call import Call, call_of, extent_of
from ebbtide.errors import CaptureError, InternalError
from ebbtide.step.program import COPY_BACK, Buffer, Op, Program
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.aot import description_of, is_tangent, mutated_inputs
from ebbtide.torch_seams.data_parallel import world_size
from ebbtide.torch_seams.graphs import is_checkpointed, stack_trace_of
from ebbtide.torch_seams.storages import storage_key

__all__ = ["Captured", "read_joint", "reread"]


@dataclass(frozen=True)
class Captured:
    """A joint graph with its program and the way from one to the other.

    Attributes:
        graph: the joint graph, without reads that kernels ignore (``batch_norm``).
        program: what the planners see.
        op_nodes: per op of the program, its node.
        base_nodes: per buffer, the node whose value is the whole buffer; ``None`` if nobody reads it.
        buffer_of: per node with a tensor value, its buffer, or ``None`` for a resident storage.
        outputs: the joint outputs in order; ``None`` where there is none.
        forward_output_count: how many of them the forward returns.
        returned: buffers of those that are no new values of inputs.
        mutated: placeholders whose storage the boundary's copy-back changes.
        calls: per op, what it is called with.
        granularity_bytes: the device's allocator rounds blocks up to a multiple of this.
        target: type of the device that the step is for, if it is not that of its tensors.
        parameters: per primal, the name of the model's parameter that it is, empty where it is none; empty if nobody
            has asked.
    """

    graph: fx.Graph
    program: Program
    op_nodes: tuple[fx.Node, ...]
    base_nodes: tuple[fx.Node | None, ...]
    buffer_of: dict[fx.Node, int | None]
    outputs: tuple[Any, ...]
    forward_output_count: int
    returned: tuple[int, ...]
    mutated: frozenset[fx.Node]
    calls: tuple[Call, ...]
    granularity_bytes: int = 1
    target: str | None = None
    parameters: tuple[str, ...] = ()

    @property
    def primals(self) -> list[fx.Node]:
        """Placeholders of the forward, in order."""
        return [n for n in self.graph.find_nodes(op="placeholder") if not is_tangent(n)]

    @property
    def copied_gradients(self) -> frozenset[int]:
        """Positions of the primals whose gradients are copied in the step (``gradient_copies``)."""
        return copy_positions(self.outputs, self.forward_output_count)

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors that live with the graph: user code made them from Python numbers while it was traced."""
        names = [str(node.target) for node in self.graph.find_nodes(op="get_attr")]
        return [getattr(self.graph.owning_module, name) for name in names]

    @property
    def tangents(self) -> list[fx.Node]:
        """Placeholders that only the backward has, in order."""
        return [n for n in self.graph.find_nodes(op="placeholder") if is_tangent(n)]


def tensors_of(value: object) -> list[torch.Tensor | None]:
    """The elements of a node's value, ``None`` where an element is no tensor."""
    elements: Sequence[object] = value if isinstance(value, list | tuple) else (value,)
    return [e if isinstance(e, torch.Tensor) else None for e in elements]


@dataclass
class _Reader:
    """One pass over the joint graph in captured order."""

    graph: fx.Graph
    granularity_bytes: int
    live: set[fx.Node]
    target: str | None
    known: KnownOps | None = None
    device: str | None = None
    resident_storages: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    buffer_of_storage: dict[int, int] = field(default_factory=dict[int, int])
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    base_nodes: list[fx.Node | None] = field(default_factory=list["fx.Node | None"])
    ops: list[Op] = field(default_factory=list[Op])
    op_nodes: list[fx.Node] = field(default_factory=list[fx.Node])
    calls: list[Call] = field(default_factory=list[Call])
    buffer_of: dict[fx.Node, int | None] = field(default_factory=dict["fx.Node", "int | None"])
    element_of_op: dict[tuple[fx.Node, int], int] = field(default_factory=dict["tuple[fx.Node, int]", int])
    text: dict[fx.Node, str] = field(default_factory=dict["fx.Node", str])
    resident_bytes: int = 0

    def new_buffer(
        self, name: str, tensor: torch.Tensor, producer: int | None, base: fx.Node | None, least_bytes: int = 0
    ) -> int:
        index = len(self.buffers)
        # What the tensor reaches, not what its fake storage says: that depends on whether the fake value came from
        # torch's cache of them, and two captures of one step have to be one program.
        reach = extent_of(tensor.shape, tensor.stride()) * tensor.element_size()
        size = -(-max(reach, least_bytes) // self.granularity_bytes) * self.granularity_bytes
        dense = tensor.storage_offset() == 0 and reach == tensor.numel() * tensor.element_size()
        if self.device == "cuda" and tensor.device.type != self.device:
            dense = False  # on the host already, as seeds of dropout are: no tier takes it from the card
        self.buffers.append(Buffer(name, int(size), producer, whole=dense and not least_bytes))
        self.base_nodes.append(base)
        self.buffer_of_storage[storage_key(tensor)] = index
        return index

    def placeholder(self, node: fx.Node) -> None:
        value = node.meta["val"]
        self.text[node] = f"input{len(self.text)}"
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt):
                raise CaptureError(
                    f"input {node.name} has a dynamic size", remedy="mark the sizes static (dynamic=False)"
                )
            return
        if is_tangent(node):
            self.buffer_of[node] = self.new_buffer(node.name, value, None, node)
            return
        key = storage_key(value)
        if key not in self.resident_storages:
            self.resident_storages[key] = node
            size = value.untyped_storage().nbytes()
            self.resident_bytes += -(-size // self.granularity_bytes) * self.granularity_bytes
        self.buffer_of[node] = None

    def constant(self, node: fx.Node) -> None:
        """A tensor that the user's code made from Python numbers while it was traced; it lives with the graph."""
        value = getattr(self.graph.owning_module, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise _refusal(
                next(iter(node.users), node),
                "runs a part of the step as a graph of its own (torch.cond, while_loop, scan and their like), whose "
                "ops cannot be planned one by one",
                "choose by value (torch.where) instead of by branch, write a loop of a fixed length in Python, or put "
                "it outside of the fitted model",
            )
        node.meta.setdefault("val", value)
        self.text[node] = f"constant{len(self.text)}"
        self.resident_storages[storage_key(node.meta["val"])] = node
        self.buffer_of[node] = None

    def call(self, node: fx.Node, mutated_storages: frozenset[int]) -> None:
        if node.target is operator.getitem:
            self._getitem(node)
            return
        values = tensors_of(node.meta["val"])
        if any(isinstance(size, torch.SymInt) for v in values if v is not None for size in v.shape):
            raise _refusal(
                node,
                "returns a tensor whose size depends on data",
                _instead(node) or "mask instead of selecting (torch.where), or pad outside the model",
            )
        keys = [storage_key(v) for v in values if v is not None]
        known = [k in self.buffer_of_storage or k in self.resident_storages for k in keys]
        if keys and all(known):
            self._view(node, values)
            return
        if not keys or any(known) or len(set(keys)) != len(keys):
            if node.target is torch.ops.aten._local_scalar_dense.default:
                raise _refusal(
                    node,
                    "reads a number out of a tensor (item(), tolist(), int(), a slice by a tensor), so that the step "
                    "depends on data",
                    _instead(node)
                    or "leave item(), tolist() and int() of a tensor out of the forward: compute with the tensor, or "
                    "give the number to the forward as a Python int; what is only logged or kept can stay a tensor "
                    "(loss.detach()), and be read after the step; keep all rows and mask (torch.where) instead of "
                    "cutting out as many as the data say",
                )
            if str(node.target).startswith("triton_kernel_wrapper"):
                raise _refusal(node, "is a Triton kernel that is launched in the model itself", LAUNCHES_AS_OPS)
            raise _refusal(
                node,
                "returns "
                + ("no tensor" if not keys else "tensors that share memory with each other or with its inputs"),
                "wrap it in a custom op that returns fresh tensors (torch.library.custom_op)",
            )
        self._op(node, values, mutated_storages)

    def _getitem(self, node: fx.Node) -> None:
        source, element = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(element, int)
        if (source, element) in self.element_of_op:
            index = self.element_of_op[source, element]
            if self.base_nodes[index] is None:
                self.base_nodes[index] = node
            self.buffer_of[node] = index
            self.text[node] = f"b{index}"
        else:
            self._view(node, tensors_of(node.meta["val"]))

    def _view(self, node: fx.Node, values: list[torch.Tensor | None]) -> None:
        first = next(v for v in values if v is not None)
        self.buffer_of[node] = self.buffer_of_storage.get(storage_key(first))
        self.text[node] = self._call_text(node)

    def _storage_bytes(self, node: Any) -> int:
        """Bytes of the storage that the value of ``node`` is a view of."""
        buffer = self.buffer_of[node]
        return self.buffers[buffer].bytes if buffer is not None else node.meta["val"].untyped_storage().nbytes()

    def _call_text(self, node: fx.Node) -> str:
        def text(n: fx.Node) -> Any:
            return _Name(self.text[n])

        args = fx.map_arg(node.args, text)
        kwargs = fx.map_arg(node.kwargs, text)
        inner = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in sorted(kwargs.items())]
        return f"{node.target}({', '.join(inner)})"

    def _op(self, node: fx.Node, values: list[torch.Tensor | None], mutated_storages: frozenset[int]) -> None:
        inputs: set[int] = set()
        reads_mutated = False
        for source in node.all_input_nodes:
            buffer = self.buffer_of.get(source)
            if buffer is not None:
                inputs.add(buffer)
            elif source in self.buffer_of:
                reads_mutated |= storage_key(tensors_of(source.meta["val"])[0]) in mutated_storages  # type: ignore[arg-type]
        index = len(self.ops)
        single = isinstance(node.meta["val"], torch.Tensor)
        outputs: list[int] = []
        for element, value in enumerate(values):
            if value is None:
                continue
            name = node.name if single else f"{node.name}[{element}]"
            kept = self._storage_bytes(node.args[0]) if keeps_storage(node) else 0
            buffer = self.new_buffer(name, value, index, node if single else None, kept)
            outputs.append(buffer)
            if not single:
                self.element_of_op[node, element] = buffer
        if single:
            self.buffer_of[node] = outputs[0]
            self.text[node] = f"b{outputs[0]}"
        op, call = (None if self.known is None else self.known.look_up(node)) or self._alone(node)
        repeat = repeat_of(node) if reads_mutated else None
        self.ops.append(
            replace(
                op,
                inputs=tuple(sorted(inputs)),
                outputs=tuple(outputs),
                views=(self._call_text(node),),
                reads_mutated=reads_mutated and not repeat,
                repeat=str(repeat or ""),
                once=RUNNING_STATISTICS if repeat else 0,
                until=(),
            )
        )
        self.op_nodes.append(node)
        self.calls.append(call)

    def _alone(self, node: fx.Node) -> tuple[Op, Call]:
        """The op that ``node`` is and its call, as far as they do not depend on others."""
        call = call_of(node)
        op = Op(
            name=node.name,
            target=str(node.target),
            inputs=(),
            outputs=(),
            state_bytes=generator_state_bytes(node, self.target) if draws_random(node) else 0,
            rerunnable=is_rerunnable(node, self.target),
            source=source_of(node),
            module=module_of(node),
            signature=call.signature,
        )
        return op, call


_COUNT_ALL = (
    "count or add up over all n values that there may be, torch.zeros(n).index_add(0, values, torch.ones(count)), with "
    "n and count as Python ints; or do it before the call, and give the forward what comes of it padded to one size"
)
_INSTEAD = {
    "unique(": _COUNT_ALL,
    "unique_consecutive(": _COUNT_ALL,
    "bincount(": _COUNT_ALL,
    "tensor_split(": "give tensor_split the places of its cuts as ints, in a tuple: tensor_split(x, (2, 4))",
    "repeat_interleave(": "give repeat_interleave the size that comes out, if it is always the same "
    "(repeat_interleave(..., output_size=n)); else repeat all rows equally often and mask (torch.where)",
}


def _instead(node: fx.Node) -> str:
    """What to write in the user's line, where one argument is all that is in the way."""
    trace = stack_trace_of(node)
    if (of_library := known_library(trace)) is not None:
        return of_library[1]
    code = trace.rpartition('  File "')[2]
    return next((remedy for call, remedy in _INSTEAD.items() if call in code), "")


def _refusal(node: fx.Node, what: str, remedy: str) -> CaptureError:
    source = source_of(node)
    return CaptureError(
        f"op {node.target} at {source or 'an unknown line'} {what}", remedy=remedy, op=str(node.target), source=source
    )


def _refuse_sparse(graph: fx.Graph) -> None:
    """A sparse tensor has as many bytes as its data say, and neither strides nor one storage."""
    for node in graph.nodes:
        for value in tensors_of(node.meta.get("val")):
            if value is not None and value.layout is not torch.strided:
                raise _refusal(
                    node,
                    f"makes a tensor of layout {value.layout}, which has no fixed place and size in memory",
                    "make the gradients of embeddings dense (sparse=False, the default), and the tensors of the step "
                    "(to_dense())",
                )


class _Name(str):
    """Text that prints without quotes inside argument lists."""

    def __repr__(self) -> str:
        return str(self)


def _live_nodes(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    kept = (n for n in graph.nodes if n.op == "call_function" and (draws_random(n) or has_effect(n)))
    return _ancestors([*roots, *kept])


def _mutated_placeholders(graph: fx.Graph, descriptions: Iterable[object]) -> frozenset[fx.Node]:
    """The placeholders that ``descriptions`` are of."""
    names = set(descriptions)
    found = [n for n in graph.find_nodes(op="placeholder") if description_of(n) in names]
    if len(found) != len(names):
        raise InternalError("a mutated input of the captured step has no placeholder")
    return frozenset(found)


def _boundary(reader: _Reader, forward_live: set[fx.Node]) -> int:
    """Index of the first op that runs after the boundary in captured order.

    Before it: all that the forward's outputs depend on, and every random op or op with an effect that precedes
    the first op that depends on a tangent.
    """
    ops = reader.ops
    tangents = {b for b, buffer in enumerate(reader.buffers) if buffer.producer is None}
    first_late = next((i for i, op in enumerate(ops) if tangents.intersection(op.inputs)), len(ops))
    ordered = [i for i, op in enumerate(ops) if op.random or not op.rerunnable]
    ends = [i + 1 for i in range(len(ops)) if reader.op_nodes[i] in forward_live]
    ends += [i + 1 for i in ordered if i < first_late]
    return max(ends, default=0)


def _refuse_collectives(ops: Sequence[Op]) -> None:
    """Refuse a step in which several processes talk: each would time its ops, and plan, in its own way.

    Raises:
        CaptureError: naming the first such op.
    """
    if world_size() == 1:
        return
    for op in ops:
        if op.target.split(".")[0] in COLLECTIVES:
            raise CaptureError(
                f"the step talks to other processes, by {op}, and plans are not agreed on between processes yet",
                remedy="let DistributedDataParallel exchange the gradients, outside of the step: fit the module inside "
                "of it. Leave out layers that talk in their forward (SyncBatchNorm, tensor or expert parallel ones)",
                op=str(op),
                source=op.source,
            )


def _refuse_late_reads_of_mutated(ops: Sequence[Op]) -> None:
    """Eager PyTorch refuses the same steps in their backward, by its version counters."""
    for op in ops:
        if op.reads_mutated:
            raise CaptureError(
                f"the backward needs the value that an input had before the model changed it in place, for {op}",
                remedy="change a copy (clone() it first), or change it after its last use",
                op=str(op),
                source=op.source,
            )


def read_joint(
    graph: fx.Graph,
    forward_output_count: int,
    *,
    name: str,
    granularity_bytes: int,
    context: dict[str, str],
    target: str | None = None,
    leaves: Collection[int] | None = None,
) -> Captured:
    """The program of a joint graph from AOTAutograd, without costs.

    Args:
        graph: placeholders ``primals_*`` and ``tangents_*``, functional ATen calls, one output.
        forward_output_count: how many of the outputs the forward returns.
        name: of the case.
        granularity_bytes: the device's allocator rounds blocks up to a multiple of this.
        context: what the program depends on besides its ops.
        target: type of the device that the step is for, if it is not that of its tensors.
        leaves: positions of the primals whose gradients become ``.grad``; ``None`` for all.

    Raises:
        CaptureError: for dynamic sizes and for ops whose memory cannot be followed; names op and line.
    """
    _refuse_sparse(graph)
    drop_ignored_reads(graph)
    drop_masked_outputs(graph)
    fill_uninitialised(graph)
    count_as_eager(graph)
    copy_gradients(graph, forward_output_count, leaves)
    joint = _read(graph, forward_output_count, name, granularity_bytes, context, target)
    program = joint.program
    new_values = [joint.outputs[p] for p in mutated_inputs(graph, forward_output_count)]
    held = set(program.forward_outputs) - set(joint.returned)
    held -= {b for op in program.ops for b in op.outputs[len(op.outputs) - op.once :]}
    copied = [n for n in new_values if isinstance(n, fx.Node) and joint.buffer_of.get(n) in held]
    if not copied:
        return joint
    insert_copy_back(graph, copied, joint.op_nodes[program.boundary - 1])
    return _read(graph, forward_output_count, name, granularity_bytes, context, target)


def accumulating(captured: Captured, positions: Iterable[int]) -> Captured:
    """The step where these primals have gradients already, to which new ones are added: those are not copied.

    Args:
        captured: the step where none has.
        positions: some of ``captured.copied_gradients``.
    """
    return reread(captured, uncopied(captured.graph, captured.forward_output_count, positions))


def reread(captured: Captured, graph: fx.Graph) -> Captured:
    """The step of ``graph``, which has the inputs and outputs of ``captured``, as a value."""
    program = captured.program
    read = _read(
        graph,
        captured.forward_output_count,
        program.name,
        captured.granularity_bytes,
        dict(program.context),
        captured.target,
        KnownOps(zip(captured.op_nodes, program.ops, captured.calls, strict=True)),
    )
    return replace(read, parameters=captured.parameters)


def _read(
    graph: fx.Graph,
    forward_output_count: int,
    name: str,
    granularity_bytes: int,
    context: dict[str, str],
    target: str | None,
    known_ops: KnownOps | None = None,
) -> Captured:
    outputs = tuple(pytree.tree_leaves(next(iter(graph.find_nodes(op="output"))).args))
    forward_roots = [n for n in outputs[:forward_output_count] if isinstance(n, fx.Node)]
    forward_live = _ancestors(forward_roots)
    live = _live_nodes(graph, [n for n in outputs if isinstance(n, fx.Node)])
    updates = mutated_inputs(graph, forward_output_count)
    mutated = _mutated_placeholders(graph, updates.values())
    mutated_storages = frozenset(storage_key(n.meta["val"]) for n in mutated)
    reader = _Reader(
        graph, granularity_bytes, live, target, known_ops, context.get("device") if target is None else None
    )
    for node in graph.nodes:
        if node.op == "placeholder":
            reader.placeholder(node)
        elif node.op == "get_attr":
            reader.constant(node)
        elif node.op == "call_function" and node in live:
            reader.call(node, mutated_storages)
        elif node.op not in {"output", "call_function"}:
            raise InternalError(f"the captured step holds {node.op} {node.target}, which Ebbtide does not know")

    def buffers_of(nodes: Iterable[object]) -> tuple[int, ...]:
        found = (reader.buffer_of.get(n) for n in nodes if isinstance(n, fx.Node))
        return tuple(sorted({b for b in found if b is not None}))

    # An output that is a new value itself is the changed input to user code, not this buffer.
    changed = {outputs[p] for p in updates}
    returned = buffers_of(out for out in outputs[:forward_output_count] if out not in changed)
    gradients = buffers_of(outputs[forward_output_count:])
    read = {b for op in reader.ops for b in op.inputs}.union(returned, gradients)
    new_values = buffers_of(outputs[p] for p in updates)
    copied = {b for op in reader.ops if op.target == COPY_BACK for b in op.inputs}
    made_once = {b for op in reader.ops for b in op.outputs[len(op.outputs) - op.once :]}
    boundary = _boundary(reader, forward_live)
    _refuse_collectives(reader.ops)
    _refuse_late_reads_of_mutated(reader.ops[boundary:])
    program = Program(
        name=name,
        ops=tuple(reader.ops),
        buffers=tuple(reader.buffers),
        boundary=boundary,
        forward_outputs=tuple(sorted({*returned, *read.intersection({*new_values, *made_once}) - copied})),
        gradients=gradients,
        mutations=tuple(b for b in new_values if b not in read),
        resident_bytes=reader.resident_bytes,
        context={**context, "checkpoints": "left out"} if any(map(is_checkpointed, graph.nodes)) else context,
    )
    return Captured(
        graph=graph,
        program=program,
        op_nodes=tuple(reader.op_nodes),
        base_nodes=tuple(reader.base_nodes),
        buffer_of=reader.buffer_of,
        outputs=outputs,
        forward_output_count=forward_output_count,
        returned=returned,
        mutated=mutated,
        calls=tuple(reader.calls),
        granularity_bytes=granularity_bytes,
        target=target,
    )


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen
