"""Which ops Echo may run again: a table of three values over ATen ops, each entry with the authors' version it is from.

Definitions:
1. An op's *policy* is ``BOTH``: it may run again, and so may what made its inputs; ``INPUTS``: it is heavy arithmetic
   and never runs again, but its gradient reads its inputs, and what made these may (``Y = X W`` has gradients that
   read ``X`` and ``W`` and never ``Y``); ``NEVER``: it never runs again, and its gradient reads no activation but its
   own outputs, so that nothing before it would be made again for its sake. A joint graph lists what a gradient op
   reads, so the last two differ in what they say of chains alone (``echo_regions``, definition 3).
2. Ops are ``BOTH`` unless :data:`TABLE` says otherwise. It has entries of the *merged* version (MXNet's pull request
   18228: convolution, fully-connected, concat, softmax-output, embedding and dropout never run again), of the
   *research* version (branch ``bojian/Echo-Refactored`` of UofT-EcoSystem, and its three-valued forerunner: also
   batched products, softmax, sums and means, zeros) and *ours*, for ops that MXNet did not have. Where the two
   versions disagree (batch norm, reshapes that copy, a fully-connected layer of one output) the merged one holds.
3. Whatever the table says, ops that draw random numbers, that may not run again, or that read what the step
   mutates are ``NEVER``, and ops of neither ``aten`` nor ``prims`` are ``INPUTS``. Programs without ATen ops (published
   graphs) have heavy ops by cost (``arithmetic``): these are ``INPUTS``.
"""

from __future__ import annotations

import enum

from ebbtide.step.program import Op, Program
from ebbtide_published.planners.arithmetic import aten_name, has_aten_ops, heavy_by_cost, is_foreign

__all__ = ["TABLE", "Policy", "Version", "policies"]


class Policy(enum.Enum):
    """Whether an op, and what made its inputs, may run again (definition 1)."""

    NEVER = enum.auto()
    INPUTS = enum.auto()
    BOTH = enum.auto()


class Version(enum.Enum):
    """Whose entry it is (definition 2)."""

    MERGED = enum.auto()
    RESEARCH = enum.auto()
    OURS = enum.auto()


_NAMES: dict[tuple[Policy, Version], str] = {
    # Convolution, FullyConnected; ATen has several names for each.
    (Policy.INPUTS, Version.MERGED): """convolution convolution_overrideable cudnn_convolution miopen_convolution
        mkldnn_convolution slow_conv3d_forward _slow_conv2d_forward conv_depthwise3d _conv_depthwise2d
        mm addmm mv addmv dot vdot linear mkldnn_linear matmul""",
    # batch_dot.
    (Policy.INPUTS, Version.RESEARCH): "bmm baddbmm addbmm",
    # Kernels that hold products inside, which MXNet had not.
    (Policy.INPUTS, Version.OURS): """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward
        _efficient_attention_forward _cudnn_attention_forward _scaled_dot_product_fused_attention_overrideable
        _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm _cudnn_rnn mkldnn_rnn_layer miopen_rnn _cdist_forward
        _trilinear _fft_c2c _fft_r2c _fft_c2r linalg_lu_factor_ex linalg_cholesky_ex linalg_qr _linalg_eigh
        _linalg_svd _linalg_solve_ex linalg_inv_ex linalg_solve_triangular""",
    # Concat, SoftmaxOutput (the softmax with its loss), Embedding, Dropout.
    (Policy.NEVER, Version.MERGED): """cat stack _log_softmax nll_loss_forward nll_loss2d_forward embedding
        embedding_renorm _embedding_bag native_dropout _fused_dropout bernoulli""",
    # softmax, sum, mean, _zeros, zeros_like.
    (Policy.NEVER, Version.RESEARCH): "_softmax _safe_softmax sum mean zeros zeros_like new_zeros",
}

TABLE: dict[str, tuple[Policy, Version]] = {name: entry for entry, names in _NAMES.items() for name in names.split()}
"""Definition 2: by the name between ``aten.`` and the overload."""


def policies(program: Program) -> tuple[Policy, ...]:
    """The policy of every forward op (definitions 2 and 3)."""
    forward = program.ops[: program.boundary]
    if has_aten_ops(program):
        return tuple(_once(op) or _named(op) for op in forward)
    heavy = heavy_by_cost(program)
    return tuple(_once(op) or (Policy.INPUTS if heavy(op) else Policy.BOTH) for op in forward)


def _once(op: Op) -> Policy | None:
    """``NEVER`` for what may not run again after the boundary, or would draw again."""
    return Policy.NEVER if op.random or not op.rerunnable or op.reads_mutated else None


def _named(op: Op) -> Policy:
    """By the table; foreign ops are taken for heavy."""
    if is_foreign(op):
        return Policy.INPUTS
    policy, _ = TABLE.get(aten_name(op), (Policy.BOTH, None))
    return policy
