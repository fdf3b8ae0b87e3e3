"""What a plan tells about a step that was traced on CPU tensors as on CUDA (``cuda.kernels``)."""

from __future__ import annotations

from collections import Counter

from ebbtide.cost.cuda_workspace import NOT_COUNTED, cublas_bytes
from ebbtide.step.machine import Machine
from ebbtide.step.program import Program
from ebbtide.units import format_bytes

__all__ = ["cpu_only_ops", "ops_as_on_cuda", "workspace_on_cuda"]

# Ops that a CPU never has, in words.
_MAPPED = {
    "aten._scaled_dot_product_cudnn_attention.default": "attention by cuDNN's kernel",
    "aten._scaled_dot_product_flash_attention.default": "attention by the flash kernel",
    "aten._scaled_dot_product_efficient_attention.default": "attention by the memory-efficient kernel",
    "aten._fused_rms_norm.default": "fused RMS norm",
    "aten._thnn_fused_lstm_cell.default": "fused LSTM cell",
    "aten._thnn_fused_gru_cell.default": "fused GRU cell",
}
# Parts of the names of ops that CUDA does not have, or that it may do by another op which is not traced here.
_CPU_FORMS = ("_for_cpu", "mkldnn", "_ctc_loss")


def cpu_only_ops(program: Program) -> list[str]:
    """Targets, one per op, that keep the form that the CPU gives them."""
    return [op.target for op in program.ops if any(part in op.target for part in _CPU_FORMS)]


def ops_as_on_cuda(program: Program, machine: Machine) -> str:
    """What became what."""
    counts = Counter(op.target for op in program.ops)
    mapped = [f"{words} ({counts[target]})" for target, words in _MAPPED.items() if counts[target]]
    kept = Counter(cpu_only_ops(program))
    keep = ", ".join(f"{target} ({count})" for target, count in sorted(kept.items()))
    capability = ".".join(map(str, machine.compute_capability))
    told = f"{sum(kept.values())} ops keep their CPU form: {keep}" if kept else "0 ops keep their CPU form"
    return f"traced as on CUDA {capability}: {', '.join(mapped) or 'no call differs'}; {told}"


def workspace_on_cuda(program: Program, machine: Machine) -> str:
    """Which workspaces are in a plan's bytes."""
    missing = sum(op.target in NOT_COUNTED for op in program.ops)
    return (
        f"{format_bytes(cublas_bytes(program, machine))} of cuBLAS resident; attention, embedding and indexing "
        f"counted per op; cuDNN's not ({missing} convolutions)"
    )
