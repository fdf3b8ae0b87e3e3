"""What Ebbflow relies on of torch beyond its promises, each fact exercised by a small function.

They run in the tests on every tested release, and at a user's first capture on any other (``versions.py``). A canary
raises if its fact does not hold. All together take less than a second, need no CUDA and leave no trace: no random
number is drawn from the user's generator, no mode and no gradient mode of the caller matters.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ebbflow.torch_seams import (
    autograd,
    capture_canaries,
    dispatcher,
    fake_tensors,
    graphs,
    profiler,
    stance_canaries,
    storages,
    trees,
)
from ebbflow.torch_seams.canary import CANARIES, canary, expect, run

__all__ = ["CANARIES", "capture_canaries", "run", "stance_canaries"]

_aten = torch.ops.aten


# -- trees and storages --------------------------------------------------------------------------------------------


@canary
def trees_have_a_fixed_order() -> None:
    """Leaves come in the order of writing, the structure says the nesting and puts them back."""
    tree = {"b": (1, [2, None]), "a": OrderedDict(x=3)}
    leaves, spec = trees.tree_flatten(tree)
    expect(leaves == [1, 2, None, 3] == trees.tree_leaves(tree), f"leaves are {leaves}")
    expect(trees.tree_unflatten(leaves, spec) == tree, "a tree is not put together again")
    expect(trees.tree_map(lambda v: v, tree) == tree, "a tree is not mapped leaf by leaf")
    same, other = trees.tree_flatten({"b": (7, [8, 9]), "a": OrderedDict(x=0)})[1], trees.tree_flatten([1])[1]
    expect(str(same) == str(spec) != str(other), "the text of a structure does not tell nestings apart")


@canary
def storages_have_an_identity() -> None:
    """A view has its base's storage, another tensor does not, fake and empty ones included."""
    for mode in (fake_tensors.without_modes(), fake_tensors.FakeTensorMode()):
        with mode:
            for size in (4, 0):
                base, other = torch.empty(size), torch.empty(size)
                view = base.view(-1)[:2]
                expect(storages.storage_key(view) == storages.storage_key(base), "a view has a storage of its own")
                expect(storages.storage_key(other) != storages.storage_key(base), "two tensors share a storage")


@canary
def storages_can_be_watched() -> None:
    """A watch tells when the last tensor of a storage is gone, and keeps none alive."""
    tensor = torch.zeros(4)
    view = tensor[1:]
    watch = storages.StorageWatch(tensor)
    expect(watch.key == storages.storage_key(view), "a view has another key than its tensor")
    del tensor
    expect(watch.alive, "a storage is gone while a view of it lives")
    del view
    expect(not watch.alive, "a storage lives on without a tensor")


@canary
def modules_keep_tensors_in_tables() -> None:
    """Parameters, buffers and children lie in dictionaries; a tensor put there is the module's."""
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2, device="meta"))
    (child,) = storages.module_table(module).values()
    assert child is not None
    expect(set(storages.parameter_table(child)) == {"weight", "bias"}, "parameters lie elsewhere")
    expect("running_mean" in storages.buffer_table(child), "buffers lie elsewhere")
    storages.parameter_table(child)["weight"] = other = torch.nn.Parameter(torch.empty(2))
    expect(child.weight is other, "the table of parameters is a copy")


# -- fake tensors --------------------------------------------------------------------------------------------------


@canary
def fake_tensors_describe_results() -> None:
    """Shapes, strides, dtype and device of an op's result without running it, with a real tensor among its inputs."""
    mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = torch.empty(1 << 40, 2, dtype=torch.bfloat16)
        result = fake.t() + torch.ones((), dtype=torch.bfloat16)
    assert isinstance(result, fake_tensors.FakeTensor)
    expect(tuple(result.shape) == (2, 1 << 40) and result.stride() == (1, 2), "shape or strides are others")
    expect(result.dtype == torch.bfloat16, "the dtype is another")
    expect(fake_tensors.fake_device(result) == torch.device("cpu"), "the device is another")
    expect(fake_tensors.mode_of(result) is mode, "the mode is another")
    expect(not fake_tensors.has_symbolic_sizes(result), "a size is a symbol")
    expect(isinstance(mode.from_tensor(torch.ones(1)), fake_tensors.FakeTensor), "no fake tensor of a real one")


@canary
def fake_descriptions_can_be_corrected() -> None:
    """Every op on fake tensors goes through ``_dispatch_impl`` unless its description is in the cache."""
    seen: list[object] = []

    def correct(described: fake_tensors.Dispatch) -> fake_tensors.Dispatch:
        def dispatch(*args: object) -> object:
            seen.append(args[1])
            return described(*args)  # type: ignore[arg-type]

        return dispatch

    mode = fake_tensors.FakeTensorMode()
    with mode:
        fake = torch.empty(3)
        with fake_tensors.described_by(correct):
            for _ in range(2):
                fake.exp()
        fake.exp()
    expect(seen == [_aten.exp.default], f"descriptions asked for: {seen}, not exp once")


@canary
def fake_tensors_refuse_what_data_decides() -> None:
    """A value or a size that only data could tell raises one of ``LIMITS``, and the log of it has a known name."""
    from torch._subclasses import fake_tensor

    with fake_tensors.FakeTensorMode():
        fake = torch.empty(3)
        for question in (lambda: bool(fake.sum() > 0), fake.nonzero):
            try:
                question()
            except fake_tensors.LIMITS:
                continue
            raise RuntimeError("an answer that depends on data was given")
    with fake_tensors.FakeTensorMode(), fake_tensors.numbers_are(1):
        expect(torch.empty(3).sum().item() == 1.0, "a number that nobody knows is not answered")
        expect(bool(torch.empty(3).sum() > 0), "a truth that nobody knows is not answered")
        expect((torch.tensor(4.0) + 1).item() == 5.0, "a fake number forgets its value")
    with fake_tensors.quiet_log():
        expect(fake_tensor.log.disabled, "what goes wrong on fake tensors is logged elsewhere")


@canary
def modes_can_be_left() -> None:
    """Inside ``without_modes`` ops run on real memory, though a mode is active outside."""
    with fake_tensors.FakeTensorMode(), fake_tensors.without_modes():
        expect(torch.ones(2).sum().item() == 2, "a mode is active still")


# -- the dispatcher ------------------------------------------------------------------------------------------------


@canary
def operators_know_their_schema() -> None:
    """Names, defaults and writes of an operator's arguments; whether it is made of others; its C++ composite kernel."""
    schema = dispatcher.schema_of(_aten.dropout_.default)
    expect([a.name for a in schema.arguments] == ["self", "p", "train"], "arguments of dropout_ are others")
    expect(schema.is_mutable and not dispatcher.schema_of(_aten.mm.default).is_mutable, "writes are told otherwise")
    expect(len(dispatcher.schema_of(_aten.native_dropout.default).returns) == 2, "results are told otherwise")
    expect(dispatcher.is_composite(_aten.matmul.default), "matmul is an op of its own")
    expect(not dispatcher.is_composite(_aten.mm.default), "mm is made of others")
    expect(_aten.mm.default.namespace == "aten" and _aten.t.default.is_view, "namespace or views are told otherwise")
    expect(torch.Tag.nondeterministic_seeded in _aten.bernoulli.p.tags, "a random op has no tag")
    ones = torch.ones(2, 2)
    expect(dispatcher.composite(_aten.matmul.default, ones, ones).sum().item() == 8, "no composite kernel of matmul")


@canary
def descriptions_ask_for_the_device() -> None:
    """The description of an embedding bag is another where ``device_hint`` says CUDA."""

    def kept() -> tuple[int, ...]:
        with fake_tensors.FakeTensorMode():
            weight, where = torch.empty(4, 2), torch.empty(3, dtype=torch.int64)
            return tuple(t.numel() for t in _aten._embedding_bag.default(weight, where, where[:1]))

    here = kept()
    fake_tensors.FakeTensorMode.cache_clear()
    with dispatcher.device_hint_is("cuda"):
        there = kept()
    fake_tensors.FakeTensorMode.cache_clear()
    expect(here != there, "an embedding bag is described alike for CPU and CUDA")


@canary
def kernels_compute_in_known_dtypes() -> None:
    """16 bits are computed in 32; channels-last tensors are recognised; a product's multiply-adds are counted."""
    expect(dispatcher.get_computation_dtype(torch.bfloat16) == torch.float32, "bfloat16 is computed otherwise")
    expect(dispatcher.get_computation_dtype(torch.float64) == torch.float64, "float64 is computed otherwise")
    image = torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last)
    expect(dispatcher.suggest_memory_format(image) is torch.channels_last, "channels-last is not recognised")
    count = dispatcher.flop_registry[_aten.mm](torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta"))
    expect(count == 2 * 2 * 3 * 5, f"a product counts {count}")
    heads = (1, 2, 4, 8)
    expect(
        dispatcher.sdpa_flop(*[torch.empty(heads, device="meta")] * 3) == 2 * 2 * (2 * 4 * 4 * 8), "attention's count"
    )
    expect(callable(dispatcher.sdpa_backward_flop), "attention's backward has no count")


# -- graphs and autograd -------------------------------------------------------------------------------------------


@canary
def boxed_code_empties_its_list() -> None:
    """A graph with boxed code takes one list and holds no argument beyond its last use."""
    module = torch.fx.symbolic_trace(lambda x: (x + 1) * 2)
    graphs.boxed_codegen(module)
    given = [torch.ones(2)]
    expect(module.forward(given).sum().item() == 8, "boxed code computes something else")
    expect(not given, "boxed code leaves its list as it was")


class _Node(torch.autograd.Function):
    tasks: list[int]

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        _Node.tasks.append(autograd.current_graph_task_id())
        return gradients[0] * 2


@canary
def backwards_have_numbers() -> None:
    """-1 outside of any backward, inside of each another number. A Function's node is told by its class."""
    _Node.tasks = []
    value = torch.ones((), requires_grad=True)
    output: Tensor = _Node.apply(value)  # type: ignore[assignment]
    expect(autograd.is_function_node(output.grad_fn), "a Function's node is of another class")
    expect(not autograd.is_function_node((value * 2).grad_fn), "any node counts as a Function's")
    expect(not autograd.in_backward(), "a backward runs that nobody began")
    torch.autograd.grad(output, value, retain_graph=True)
    torch.autograd.grad(output, value)
    expect(-1 not in _Node.tasks and len(set(_Node.tasks)) == 2, f"backwards have the numbers {_Node.tasks}")


class _Saving(torch.autograd.Function):
    kept: list[bool]

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value * 2)
        return value * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _Saving.kept.append(autograd.keeps_graph())
        return gradients[0] * 3


@canary
def leaves_get_their_gradients_in_the_order_asked_for() -> None:
    """Of what is ready, autograd runs the node of the highest sequence number next; that of a leaf can be set."""
    order: list[int] = []
    leaves = [torch.ones(1, requires_grad=True) for _ in range(6)]
    for number, leaf in enumerate(leaves):
        leaf.register_hook(lambda _, number=number: order.append(number))
    output = torch.stack(leaves)
    expect(len(output.grad_fn.next_functions) == len(leaves), "a node has other entries than tensors went in")  # type: ignore[union-attr]
    autograd.accumulate_in_order(output.grad_fn, [3, 0, 5, 1, 4, 2])
    output.sum().backward()
    expect(order == [1, 3, 5, 0, 4, 2], f"gradients came in the order {order}")


@canary
def retained_graphs_are_seen() -> None:
    """A backward tells whether it retains its graph."""
    _Saving.kept = []
    value = torch.ones((), requires_grad=True)
    output: Tensor = _Saving.apply(value)  # type: ignore[assignment]
    torch.autograd.grad(output, value, retain_graph=True)
    torch.autograd.grad(output, value)
    expect(_Saving.kept == [True, False], f"backwards say that they retain their graph: {_Saving.kept}")


@canary
def saved_tensor_hooks_are_seen() -> None:
    """Default hooks for saved tensors are told on and off."""
    expect(not autograd.has_saved_tensor_hooks(), "hooks are on that nobody set")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        expect(autograd.has_saved_tensor_hooks(), "hooks are on and are not seen")
    expect(not autograd.has_saved_tensor_hooks(), "hooks are seen that are off")


@canary
def ends_of_backwards_are_seen() -> None:
    """``Tensor.backward`` goes through ``torch.autograd.backward``, looked up when it is called; ``grad`` likewise."""
    ends: list[int] = []
    value = torch.ones((), requires_grad=True)
    with autograd.BackwardWatch(lambda: ends.append(1)):
        (value * 2).backward()
        torch.autograd.grad(value * 2, value)
    (value * 2).backward()
    expect(len(ends) == 2, f"{len(ends)} of two backwards' ends were seen")


@canary
def allocations_are_recorded() -> None:
    """The profiler reports a block of the CPU allocator with its size when it is taken and when it is given back."""
    if profiler.profiler_active():
        return  # the user's own; a second one must not be started
    record = profiler.AllocationProfile()
    record.start()
    try:
        expect(profiler.profiler_active(), "a profiler runs and is not seen")
        torch.empty(104_729, dtype=torch.uint8)
    finally:
        record.stop()
    sizes = [size for _, _, size in record.events()]
    expect(104_729 in sizes and -104_729 in sizes[sizes.index(104_729) :], f"recorded: {sizes}")
    expect(not profiler.profiler_active(), "a stopped profiler is active")


@canary
def hooks_on_every_module_are_seen() -> None:
    """Tables of the hooks on all modules, each registered under a number of its own."""
    from ebbflow.torch_seams.hooks import global_hooks

    kinds = [
        torch.nn.modules.module.register_module_forward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_full_backward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    ]
    seen = {global_hooks()}
    for register in kinds:
        handle = register(lambda *_: None)  # type: ignore[arg-type]
        seen.add(global_hooks())
        handle.remove()
    expect(len(seen) == 1 + len(kinds), f"hooks of {len(kinds)} kinds are told apart: {seen}")
