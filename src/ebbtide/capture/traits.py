"""What an op may do besides computing: draw random numbers, have an effect, give other bits on a second run."""

from __future__ import annotations

import torch
from torch import fx

from ebbtide.step.op_traits import NAMESPACE, traits_of_op
from ebbtide.torch_seams.dispatcher import OpOverload, schema_of

__all__ = [
    "COLLECTIVES",
    "declare_repeatable",
    "draws_random",
    "generator_state_bytes",
    "has_effect",
    "is_opaque",
    "is_rerunnable",
    "keeps_storage",
]

# Arguments that make an op tagged as seeded draw nothing: attention with dropout probability 0 carries the tag too.
_PROBABILITY_ARGUMENTS = ("dropout_p", "dropout", "p")

# ATen kernels that accumulate with atomics on CUDA, so that two runs may differ in the last bits, unless
# torch.use_deterministic_algorithms is on (PyTorch's own notes on torch.use_deterministic_algorithms).
_ATOMIC_ON_CUDA = (
    "index_add",
    "index_put",
    "scatter",
    "embedding_dense_backward",
    "embedding_bag",
    "cumsum",
    "histc",
    "bincount",
    "grid_sampler",
    "upsample",
    "max_pool3d",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "nll_loss2d",
    "ctc_loss",
    "reflection_pad",
    "replication_pad",
    "kthvalue",
    "median",
    "attention_backward",
)


# ATen kernels that begin with clone_preserve_strides of their first argument: where that is a view, the result has
# a storage as large as the view's base, and the view's offset in it (aten/src/ATen/native/TensorShape.cpp, Copy.cpp).
_KEEPING_STORAGE = frozenset(
    {
        torch.ops.aten.copy.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)


COLLECTIVES = frozenset({"_c10d_functional", "_dtensor", "c10d", "c10d_functional", "symm_mem"})
"""Namespaces of ops that talk to other processes."""

_EFFECTS = COLLECTIVES | {"ebbtide"}  # namespaces of ops

# Namespaces of ops that torch itself defines, and the beginning of our own.
_TORCHS = frozenset(
    {
        *("aten", "prims", "prim", "inductor", "inductor_prims", "rngprims", "profiler", "torch_attn"),
        *("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "quantized_decomposed", "sparse"),
    }
)
_OURS = "ebbtide"

_repeatable: set[str] = set()
"""Names of other libraries' ops that somebody has declared to be functions of their arguments, ``namespace::name``."""


def declare_repeatable(name: str) -> None:
    """Let the op of this name, ``namespace::name``, run again."""
    _repeatable.add(name)


def is_opaque(node: fx.Node) -> bool:
    """Whether the call is of an op of another library, of which nobody has said that it gives the same bits again.

    A schema says what an op writes, not that it draws no random numbers of its own or counts its calls.
    """
    overload = _overload(node)
    if overload is None:
        return str(node.target).startswith("triton_kernel_wrapper")
    known = overload.namespace in _TORCHS or overload.namespace.startswith(_OURS)
    return not known and schema_of(overload).name not in _repeatable


def keeps_storage(node: fx.Node) -> bool:
    """Whether the result has a storage of the size of its first argument's, and its offset there."""
    return node.target in _KEEPING_STORAGE


def _overload(node: fx.Node) -> OpOverload | None:
    return node.target if isinstance(node.target, OpOverload) else None


def draws_random(node: fx.Node) -> bool:
    """Whether the call draws from the default generator (tagged ``nondeterministic_seeded``, probability not 0)."""
    overload = _overload(node)
    if overload is None or torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    if any(argument.name == "philox_seed" for argument in schema_of(overload).arguments):
        return False  # a backward that is given what its forward drew from
    for position, argument in enumerate(schema_of(overload).arguments):
        if argument.name in _PROBABILITY_ARGUMENTS:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            given = argument.default_value if given is None else given
            if isinstance(given, int | float) and float(given) == 0.0:
                return False
        if argument.name == "train" and position < len(node.args) and node.args[position] is False:
            return False
    return True


def generator_state_bytes(node: fx.Node, target: str | None = None) -> int:
    """Bytes of the state that a replay of a random op needs: what the generator of ``target`` hands out.

    ``target`` is a device type, ``None`` the device of the node's value.
    """
    # CUDA hands out seed and offset (16 bytes, which its allocator never sees: the state tensor lies on the host).
    return 16 if _runs_on_cuda(node, target) else torch.default_generator.get_state().nbytes


def has_effect(node: fx.Node) -> bool:
    """Whether the call does something besides returning values, so that it runs exactly once."""
    overload = _overload(node)
    if overload is None:
        return node.op == "call_function" and bool(getattr(node.target, "has_side_effect", False))
    if overload.namespace == NAMESPACE and traits_of_op(str(overload)).writes:
        return True
    return schema_of(overload).is_mutable or overload.namespace in _EFFECTS


def _runs_on_cuda(node: fx.Node, target: str | None) -> bool:
    if target is not None:
        return target == "cuda"
    value = node.meta["val"]
    values = value if isinstance(value, list | tuple) else [value]
    return any(v.device.type == "cuda" for v in values if isinstance(v, torch.Tensor))


def is_rerunnable(node: fx.Node, target: str | None = None) -> bool:
    """Whether a second run is allowed and gives the same bits on ``target``.

    ``target`` is a device type, ``None`` the device of the node's value.
    """
    if has_effect(node) or is_opaque(node):
        return False
    if not _runs_on_cuda(node, target) or torch.are_deterministic_algorithms_enabled():
        return True
    return not any(word in str(node.target) for word in _ATOMIC_ON_CUDA)
