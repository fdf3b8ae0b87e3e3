"""The canaries of ``autograd``, ``graphs``, ``direct_calls``, ``profiler``: how code and backwards run, and records."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor

from ebbtide.torch_seams import autograd, direct_calls, profiler
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def boxed_code_empties_its_list() -> None:
    """A graph with boxed code takes one list and holds no argument beyond its last use."""
    module = torch.fx.symbolic_trace(lambda x: (x + 1) * 2)
    run = direct_calls.boxed_callable(module)
    given = [torch.ones(2)]
    expect(run(given).sum().item() == 8, "boxed code computes something else")
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


class _Asking(torch.autograd.Function):
    runs: tuple[bool, ...] = ()

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first * second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        output: Tensor = _Asking.output  # type: ignore[attr-defined]
        assert output.grad_fn is not None
        _Asking.runs = tuple(autograd.will_run(node) for node, _ in output.grad_fn.next_functions)
        return gradients[0], gradients[0]


@canary
def a_backward_knows_where_it_will_come() -> None:
    """A node knows to which of those behind it a backward comes: to all, or to those that gradients are asked of."""
    leaf = torch.ones((), requires_grad=True)
    inner = torch.ones((), requires_grad=True) * 2
    output: Tensor = _Asking.apply(leaf, inner)  # type: ignore[assignment]
    _Asking.output = output  # type: ignore[attr-defined]
    for asked, runs in (((leaf,), (True, False)), ((inner,), (False, True)), ((leaf, inner), (True, True))):
        torch.autograd.grad(output, asked, retain_graph=True)
        expect(_Asking.runs == runs, f"asked for some gradients, nodes are said to run as {_Asking.runs}")
    output.backward()
    del _Asking.output  # type: ignore[attr-defined]
    expect(_Asking.runs == (True, True), "a whole backward is said to leave nodes out")


@canary
def backwards_are_counted() -> None:
    """Each backward of the process takes the next number, so that those that began are counted without any hook."""
    value = torch.ones((), requires_grad=True)
    before = autograd.backwards_begun()
    autograd.release_failed_backward()
    autograd.backwards_begun()
    (value * 2).backward()
    torch.autograd.grad(value * 2, value)
    after = autograd.backwards_begun()
    expect(before is not None and after == before + 2, f"two backwards count as from {before} to {after}")


@canary
def gradients_are_seen_to_arrive() -> None:
    """A hook on the leaf's node runs before its gradient is added, in each backward that adds one; a copy has none."""
    value, came = torch.ones(3, requires_grad=True), []
    leaf = autograd.gradient_leaf(value)
    hook = leaf.register_prehook(lambda _: came.append((autograd.current_graph_task_id(), value.grad is None)))
    made: list[int] = []
    output: Tensor = _Making.apply(value, made)  # type: ignore[assignment]
    output.sum().backward()
    expect(len(came) == 1 and came[0][0] >= 0 and came[0][1], f"of one gradient came {came}")
    expect(value.grad is not None and value.grad.data_ptr() == made[0], "a gradient that is looked at is copied")
    torch.autograd.grad((value * 2).sum(), value)
    expect(len(came) == 1, "a gradient that is not added arrives")
    hook.remove()
    (value * 2).sum().backward()
    expect(len(came) == 1, "a hook that was removed runs")


class _Making(torch.autograd.Function):
    """Hands out a gradient that nobody else holds, and notes where it lies."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, made: list[int]) -> Tensor:
        ctx.made = made
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        made = gradients[0] * 2
        ctx.made.append(made.data_ptr())
        return made, None


class _Kept(torch.autograd.Function):
    gradients: list[weakref.ref[Tensor]]

    @staticmethod
    def forward(ctx: object, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        made = gradients[0] + 1, gradients[0] + 2
        _Kept.gradients = [weakref.ref(each) for each in made]
        return made


@canary
def a_failed_backward_is_released() -> None:
    """Gradients on their way to other leaves than the one whose hook raised stay queued until another backward."""
    leaves = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    for each in leaves:
        each.register_hook(fail)
    root: Tensor = _Kept.apply(*leaves)  # type: ignore[assignment]
    with contextlib.suppress(ArithmeticError):
        root.backward()
    del root
    autograd.release_failed_backward()
    expect(not any(each() is not None for each in _Kept.gradients), "a failed backward's gradients stay in use")


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
    """Autograd runs the ready node of the highest sequence number next; that of a leaf can be set."""
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
def backwards_are_seen() -> None:
    """``Tensor.backward``, ``autograd.backward`` and ``grad`` reach one function, looked up when it is called."""
    begun: list[tuple[int, int]] = []
    ends: list[int] = []
    value = torch.ones((), requires_grad=True)
    imported = torch.autograd.grad
    with autograd.BackwardWatch(lambda: ends.append(1), begins=lambda a, b: begun.append((len(a), len(b)))):
        (value * 2).backward()
        imported(value * 2, value)
    (value * 2).backward()
    expect(len(ends) == 2, f"{len(ends)} of two backwards' ends were seen")
    expect(begun == [(1, 0), (1, 1)], f"roots and inputs of two backwards: {begun}")
    raised: list[BaseException] = []
    freed = value * value
    freed.backward()
    try:
        with autograd.BackwardWatch(raises=raised.append):
            freed.backward()
    except RuntimeError as error:
        expect(raised == [error], "what a backward raises is not seen")
    else:
        expect(False, "a graph that is freed runs again")


@canary
def hooks_and_edges_of_tensors_are_seen() -> None:
    """A tensor's hooks outlive it with its node, and it tells of which output of which node it is a view."""
    first, second = torch.ones(2, requires_grad=True).clone().unbind()
    hooks, node = autograd.gradient_hooks(first), first.grad_fn
    handle = first.register_hook(lambda _: None)
    expect(len(hooks) == 1 and not autograd.gradient_hooks(second), "hooks are not told")
    handle.remove()
    expect(not hooks, "a hook that was removed is told")
    kept = weakref.ref(hooks)
    del first, hooks, handle
    expect(kept() is not None, "hooks went with their tensor")
    expect(autograd.output_of_node(second.view(1), node) == 1, "a view's output is not found")
    expect(autograd.outputs_reached([(second * 2).sum()], node) == {1}, "what a backward reaches is not found")


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
    calls = [event.name for event in record.calls()]
    expect(not calls, f"calls of ops are recorded as well: {calls}")
    sizes = [size for _, _, size in record.events()]
    expect(104_729 in sizes and -104_729 in sizes[sizes.index(104_729) :], f"recorded: {sizes}")
    expect(not profiler.profiler_active(), "a stopped profiler is active")
