"""Capture without running: a real, fake or meta model gives its joint graph and nothing is computed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx

from ebbtide.capture.attempts import attempted
from ebbtide.capture.cuda.kernels import rename_stand_ins
from ebbtide.capture.joint import Captured, read_joint
from ebbtide.capture.trace import compile_step, forget_step, forward_of, translated_errors
from ebbtide.errors import CaptureError, EbbtideError
from ebbtide.signals import signals_wait
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.aot import DynamoGraph
from ebbtide.torch_seams.compile_mode import OwnCompileMode
from ebbtide.torch_seams.eager_answers import Answers
from ebbtide.torch_seams.fake_tensors import FakeTensor, FakeTensorMode, mode_of
from ebbtide.torch_seams.storages import buffer_table, parameter_table

__all__ = ["capture"]


class _AtHand(EbbtideError):
    """The joint graph is at hand; nothing has to run."""


class _Reader:
    """A partitioner that reads the joint graph and stops there."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._names: dict[int, str] = {}
        self._inputs: tuple[str, ...] = ()
        self.joint: Captured | None = None

    def name_parameters(self, model: torch.nn.Module) -> None:
        """The call that is captured is one of ``model``."""
        self._names = {id(each): name for name, each in model.named_parameters()}

    def take_inputs(self, inputs: Sequence[object]) -> None:
        self._inputs = tuple(self._names.get(id(each), "") for each in inputs)

    def take_graph(self, graph: DynamoGraph) -> None:
        pass

    def take_results(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        pass

    def partition(self, joint: fx.GraphModule, forward_output_count: int) -> NoReturn:
        rename_stand_ins(joint.graph)
        read = read_joint(joint.graph, forward_output_count, **self._settings)
        known = self._inputs if len(self._inputs) == len(read.primals) else ()
        self.joint = replace(read, parameters=known)
        raise _AtHand

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        raise AssertionError("no graph is compiled after a capture")

    backward_callable = forward_callable

    def nothing_to_train(self, graph: fx.GraphModule) -> NoReturn:
        raise CaptureError(
            "the step needs no gradient: no parameter that requires one takes part in it",
            remedy="unfreeze a parameter that takes part in it; a model that is not trained needs no plan",
        )


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    granularity_bytes: int,
    context: dict[str, str],
    loss: Callable[[Any], Any] | None = None,
    every_output: bool = False,
    here: bool = True,
    cuda: tuple[int, int] | None = None,
) -> Captured:
    """The joint graph of one training call of ``model``; the model does not run.

    Args:
        model: real, built under ``FakeTensorMode``, or on the ``meta`` device.
        args: positional arguments, real, fake or meta like the model.
        kwargs: keyword arguments.
        name: of the case.
        granularity_bytes: of the allocator of the machine planned for.
        context: what the program depends on besides its ops.
        loss: applied to what the model returns, as part of the step.
        every_output: whether outputs beside a scalar loss take gradients too.
        here: whether the step is for this machine: then single kernels run where torch's description of them is
            in doubt (``capture/rules/layouts.py``); else no memory is taken at all.
        cuda: compute capability of the CUDA device that the step is for, where its tensors are on CPU: then it is
            traced as on CUDA (``capture/cuda/kernels.py``).

    Raises:
        CaptureError: if the call is not one graph.
    """
    model, args, kwargs, mode = _as_fake(model, args, dict(kwargs))
    target = None if cuda is None else "cuda"
    reader = _Reader(name=name, granularity_bytes=granularity_bytes, context=context, target=target)
    reader.name_parameters(model)
    answers = Answers()
    plain = forward = forward_of(model)
    if loss is not None:

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return loss(plain(module, *args, **kwargs))

    def attempt() -> None:
        step = compile_step(reader, elsewhere=cuda is not None)
        errors = translated_errors(model, args, kwargs, answers=answers, here=here, cuda=cuda)
        try:
            with signals_wait(), mode, torch.enable_grad(), contextlib.suppress(_AtHand), errors:
                OwnCompileMode().compiling(step, model, forward, args, kwargs, every_output)
        finally:
            forget_step(step)

    attempted(attempt, model, answers=answers)
    if reader.joint is None:
        raise CaptureError(
            "the call was not captured: nothing in it takes a gradient",
            remedy="unfreeze a parameter that takes part in it",
        )
    return reader.joint


def _as_fake(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], contextlib.AbstractContextManager[object]]:
    """The call as it is if real, in its own mode if fake; what is on ``meta``, fake or not, goes to fake CPU tensors.

    Ops take other ways on ``meta`` than where they compute: some have no gradient there.
    """
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    fake = next((t for t in tensors if isinstance(t, FakeTensor)), None)
    mode = None if fake is None else mode_of(fake)
    if not any(t.device.type == "meta" for t in tensors):
        return model, args, kwargs, contextlib.nullcontext() if mode is None else mode
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    moved: dict[torch.Tensor, torch.Tensor] = {}

    def on_cpu(value: object) -> object:
        if not isinstance(value, torch.Tensor) or value.device.type != "meta":
            return value
        if value not in moved:
            with mode:
                twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            is_parameter = isinstance(value, torch.nn.Parameter)
            moved[value] = torch.nn.Parameter(twin, value.requires_grad) if is_parameter else twin
        return moved[value]

    twin_model = copy.deepcopy(model)
    for module in twin_model.modules():
        for table in (parameter_table(module), buffer_table(module)):
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = on_cpu(tensor)  # type: ignore[assignment]
    args, kwargs = pytree.tree_map(on_cpu, (args, kwargs))
    return twin_model, args, kwargs, mode
