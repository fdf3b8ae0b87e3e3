"""What a failed proof puts back: tensors that the step changes and random state as they were before the forward.

Of each storage the bytes from the first to the last that a tensor reaches are copied, once: an expanded one shows
more elements than it has, and several may share one storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ebbtide.cost.call import extent_of
from ebbtide.torch_seams.storages import storage_key

__all__ = ["snapshot"]


def snapshot(tensors: Iterable[torch.Tensor], device: str) -> Callable[[], None]:
    """What puts ``tensors`` and random state back to where they are now."""
    parts = [_vector(*span) for span in _spans(tensors)]
    saved = [(part, part.clone()) for part in parts]
    cpu_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if device == "cuda" else None

    def restore() -> None:
        with torch.no_grad():
            for part, value in saved:
                part.copy_(value)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    return restore


def _spans(tensors: Iterable[torch.Tensor]) -> Iterable[tuple[torch.Tensor, int, int]]:
    """Per storage a tensor that has it, and the first byte that they reach and the one behind the last."""
    spans: dict[int, tuple[torch.Tensor, int, int]] = {}
    for buffer in tensors:
        if extent := extent_of(buffer.shape, buffer.stride()):
            first = int(buffer.storage_offset()) * buffer.element_size()
            last = first + extent * buffer.element_size()
            _, begin, end = spans.get(storage_key(buffer), (buffer, first, last))
            spans[storage_key(buffer)] = buffer, min(begin, first), max(end, last)
    return spans.values()


def _vector(buffer: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The bytes of the storage of ``buffer`` from ``begin`` to ``end``; shares it."""
    flat = torch.empty(0, dtype=torch.uint8, device=buffer.device)
    return flat.set_(buffer.untyped_storage(), begin, (end - begin,), (1,))
