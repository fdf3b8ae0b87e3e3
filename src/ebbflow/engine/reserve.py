"""What has to be kept free inside a budget for what no program shows."""

from __future__ import annotations

from ebbflow.lower.fingerprints import SCRATCH_BYTES_CUDA
from ebbflow.step.program import Program

__all__ = ["reserve_bytes"]

# Remembered over the first call and over the proven step, and the copy made to put it back.
_GENERATOR_STATE_BYTES = 3 * 5056


def reserve_bytes(program: Program, device: str, *, verify: bool | str) -> int:
    """Bytes to keep free for what the proven first step remembers; none if no step is proven.

    Args:
        program: of the step. What it changes of its inputs is copied (``snapshot``).
        device: ``"cpu"`` or ``"cuda"``.
        verify: whether steps are proven.
    """
    if not verify:
        return 0
    scratch = SCRATCH_BYTES_CUDA if device == "cuda" else 0
    changed = sum(program.buffers[b].bytes for b in program.copied_back)
    return changed + _GENERATOR_STATE_BYTES + scratch
