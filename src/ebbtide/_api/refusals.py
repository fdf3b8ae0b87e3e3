"""What cannot be planned, refused by name before anything runs: what is no model, or one that no device holds whole.

A step is planned for one device that holds the whole model. So these are refused:
1. what is no module, or is one that ``torch.jit`` compiled: its code is not there to be captured;
2. modules whose weights are moved in and out by hooks (accelerate's and diffusers' offloading): the bytes move behind
   the plan's back;
3. models whose parameters and buffers are on several devices;
4. an optimizer that trains another model: parameters that were replaced after it was made, or somebody else's; one
   whose state cannot move, or which cannot step in the step, where that is asked for;
5. wrappers that train a model in several processes or on several devices: their forward talks to the others, and the
   model that is planned is the one inside;
6. under ``fit`` a ``LightningModule``: its trainer calls ``training_step``, so a planned ``forward`` holds nothing;
7. models of which ``fully_shard`` or ``parallelize_module`` has made DTensors (``engine/sharded.py``);
8. models on a device that is neither CPU nor CUDA; under ``fit`` also those without memory (``meta``, fake tensors).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import cast

import torch

from ebbtide.engine.offload_hooks import refuse_offload_hooks
from ebbtide.engine.sharded import refuse_sharded
from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean
from ebbtide.optimizer.in_step.coupling import refuse_coupled_steps
from ebbtide.optimizer.state.combined import parts_of
from ebbtide.torch_seams import trees as pytree
from ebbtide.torch_seams.fake_tensors import FakeTensor
from ebbtide.user_objects import is_a

__all__ = [
    "refuse_foreign_optimizer",
    "refuse_to_fit",
    "refuse_to_offload",
    "refuse_to_plan",
    "refuse_to_step_inside",
    "require_call",
    "require_module",
]

_SUPPORTED = ("cpu", "cuda")
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")  # by name: importing them takes a second


def require_module(value: object, caller: str) -> None:
    """Refuse what is no module (definition 1).

    Raises:
        UsageError: naming the type given.
    """
    if isinstance(value, torch.nn.Module):
        return
    hint = f"not {type(value).__name__}"
    if isinstance(value, type):
        hint = f"not the class {value.__name__}: make one, {value.__name__}(...)"
    raise UsageError(f"{caller} takes a torch.nn.Module, {hint}", argument="model", value=cast("object", value))


def require_call(model: torch.nn.Module, args: object, kwargs: object) -> None:
    """Refuse what are no arguments of a call of ``model``.

    Raises:
        UsageError: saying what is taken.
    """
    if not isinstance(args, tuple | list):
        raise UsageError(
            f"args takes the positional arguments of one call as a tuple, not a {type(args).__name__}: args=(x,)",
            argument="args",
            value=args,
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs takes the keyword arguments of one call as a dict, not a {type(kwargs).__name__}: "
            'kwargs={"x": x}',
            argument="kwargs",
            value=kwargs,
        )
    if not args and not kwargs:
        _require_nothing_more(model)


def _require_nothing_more(model: torch.nn.Module) -> None:
    """Refuse a ``model`` whose forward takes arguments, where none was given."""
    try:
        takes = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of a callable that does not tell
        return
    try:
        takes.bind()
    except TypeError as error:
        raise UsageError(
            f"args and kwargs take what one training call of {type(model).__name__} is given, as args=(x,): {error}",
            argument="args",
            value=(),
        ) from None


def refuse_to_fit(model: torch.nn.Module) -> None:
    """Refuse a model of which no step can be trained under a plan (definitions 1 to 3 and 5 to 8).

    Raises:
        UsageError: naming what stands in the way and what to do.
    """
    _refuse_lightning(model)
    _refuse_scripts(model)
    _refuse_spread(model)
    refuse_sharded(model)
    refuse_offload_hooks(model)
    _refuse_lazy(model)
    for name, tensor in _tensors(model):
        if isinstance(tensor, FakeTensor):
            raise _refusal(
                f"{name} was made under FakeTensorMode and has no memory, so the model cannot be trained; build it "
                "outside, or use ebbtide.plan, which needs no memory"
            )
    _refuse_many_devices(model)
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise _refusal(
                f"{name} is on the meta device and has no memory, so the model cannot be trained; materialize it first "
                "(model.to_empty(device=...) and its weights), or use ebbtide.plan, which needs no memory"
            )
        _refuse_device(name, tensor)


def refuse_foreign_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that trains no parameter of a model that has some to train (definition 4).

    Raises:
        UsageError: saying whose parameters to give it.
    """
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    if optimizer is None or not trained:
        return
    groups = [group for each in parts_of(optimizer) for group in each.param_groups]
    if trained.isdisjoint(id(each) for group in groups for each in group["params"]):
        raise UsageError(
            f"the optimizer ({type(optimizer).__name__}) holds no parameter of this {type(model).__name__}: it is "
            "another model's, or was made before the model's parameters were replaced (load_state_dict(assign=True), "
            "weights tied or put in anew). Make it of model.parameters(), then fit",
            argument="optimizer",
            value=optimizer,
        )


def refuse_to_offload(optimizer: torch.optim.Optimizer | None, tiers: Collection[object]) -> None:
    """Refuse to move the state of no optimizer, to no tier, or where recorded kernels know where it lies.

    Raises:
        UsageError: saying what is missing.
    """
    if optimizer is None:
        raise _refused_offload("no optimizer is given: fit(model, budget, optimizer=optimizer, ...)")
    if not tiers:
        raise _refused_offload("no tier is given to move its state to: tiers='disk' on a CPU, tiers='host' on a card")
    if len(parts_of(optimizer)) > 1:
        raise _refused_offload("the model has several optimizers, and the state of one moves; leave it out")
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise _refused_offload(
            "the optimizer is made with capturable=True: a CUDA graph of its step would read memory that its state has "
            "left; make it without"
        )


def refuse_to_step_inside(optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse to have no optimizer in the step, or one that does not step on each parameter for itself.

    Raises:
        UsageError: saying what is missing, or what is another.
    """
    if optimizer is None:
        raise UsageError(
            'step="inside" is not accepted: no optimizer is given: fit(model, budget, optimizer=optimizer, '
            'step="inside")',
            argument="step",
            value="inside",
        )
    refuse_coupled_steps(optimizer)


def _refused_offload(why: str) -> UsageError:
    return UsageError(f"offload_optimizer=True is not accepted: {why}", argument="offload_optimizer", value=True)


def refuse_to_plan(model: torch.nn.Module, arguments: object) -> None:
    """Refuse a model and arguments of which no step can be captured; ``meta`` and fake tensors are fine here.

    Raises:
        UsageError: naming what stands in the way and what to do.
    """
    _refuse_scripts(model)
    _refuse_spread(model)
    refuse_sharded(model, arguments)
    refuse_offload_hooks(model)
    _refuse_lazy(model)
    _refuse_many_devices(model)
    given = (leaf for leaf in pytree.tree_leaves(arguments) if is_a(leaf, torch.Tensor))
    for name, tensor in itertools.chain(_tensors(model), (("an argument", tensor) for tensor in given)):
        if not tensor.is_meta:
            _refuse_device(name, tensor)


def _modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from cast("Iterator[tuple[str, torch.nn.Module]]", model.named_modules())


def _refuse_lazy(model: torch.nn.Module) -> None:
    for name, tensor in _tensors(model):
        if torch.nn.parameter.is_lazy(tensor):
            raise _refusal(
                f"{name} has no shape before the first batch: run one through the model under torch.no_grad() first"
            )


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer


def _refusal(text: str) -> UsageError:
    return UsageError(text, argument="model")


def _of(path: str) -> str:
    return f"its module {path}" if path else "the model"


def _refuse_scripts(model: torch.nn.Module) -> None:
    for path, module in _modules(model):
        if "_orig_mod" in dict(module.named_children()):
            raise _refusal(
                f"{_of(path)} is what torch.compile returns, which runs past Ebbtide; give the module compiled "
                "(model._orig_mod) and do not compile it: Ebbtide captures it itself"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise _refusal(
                f"{_of(path)} is a {type(module).__name__} of torch.jit, whose code cannot be captured; "
                "give the Python module that it was made of"
            )


def _refuse_spread(model: torch.nn.Module) -> None:
    """Refuse a model whose weights lie on several devices (definition 5)."""
    for path, module in _modules(model):
        bases = {each.__name__ for each in type(module).__mro__}
        if "DistributedDataParallel" in bases:
            raise _refusal(
                f"{_of(path)} is a DistributedDataParallel, whose forward talks to the other processes; give the "
                "module inside, ebbtide.fit(model.module, ...), in every process, before or after it is wrapped, and "
                "train the wrapper as before"
            )
        if "DataParallel" in bases and len(getattr(module, "device_ids", ())) > 1:
            raise _refusal(
                f"{_of(path)} is a DataParallel, which copies its module to other devices at every call; use "
                "torch.nn.parallel.DistributedDataParallel, one process per device, and fit the module inside"
            )
        if bases.intersection(_SHARDED):
            raise _refusal(
                f"{_of(path)} is sharded by {type(module).__name__}: its weights are gathered from other processes "
                "inside of the step, which no plan covers yet; train it without sharding, in DistributedDataParallel"
            )


def _refuse_lightning(model: torch.nn.Module) -> None:
    """Refuse a LightningModule (definition 6), known by its class's name: Lightning is not imported here."""
    if any(
        kind.__name__ == "LightningModule" and kind.__module__.startswith(("lightning.", "pytorch_lightning."))
        for kind in type(model).__mro__
    ):
        raise _refusal(
            f"{type(model).__name__} is a LightningModule, whose trainer calls training_step and goes past the forward "
            "that fit plans. Give the trainer the callback, and leave fit out: "
            "Trainer(callbacks=[ebbtide.integrations.lightning.MemoryBudget(budget)]), which plans the training_step. "
            "In a loop of your own fit a module inside of it that returns the loss"
        )


def _refuse_many_devices(model: torch.nn.Module) -> None:
    mapped = getattr(model, "hf_device_map", None)
    if isinstance(mapped, Mapping):
        places = {str(place): str(part) for part, place in cast("Mapping[object, object]", mapped).items()}
        if len(places) > 1:
            raise _refusal(_spread({place: f"module {part}" for place, part in places.items()}, "by its device_map"))
    first: dict[str, str] = {}
    for name, tensor in _tensors(model):
        if tensor.dim():  # torch lets one number on CPU take part in an op on any device
            first.setdefault(str(tensor.device), name)
    if len(first) > 1:
        raise _refusal(_spread(first, ""))


def _spread(places: Mapping[str, str], why: str) -> str:
    listed = ", ".join(f"{part} on {place}" for place, part in places.items())
    return (
        f"the model is spread over several devices{f' {why}' if why else ''} ({listed}); a step is planned for one "
        'device that holds the whole model: load it there (no device_map="auto"), or move it, model.to(device)'
    )


def _refuse_device(name: str, tensor: torch.Tensor) -> None:
    kind = tensor.device.type
    if kind not in _SUPPORTED:
        raise UsageError(
            f"{name} is on {tensor.device}; Ebbtide plans for {' and '.join(_SUPPORTED)}"
            f"{did_you_mean(kind, _SUPPORTED)}; move the model there, or leave it unfitted",
            argument="model",
            value=str(tensor.device),
            accepted=_SUPPORTED,
        )
