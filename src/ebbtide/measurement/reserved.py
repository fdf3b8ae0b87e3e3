"""What PyTorch's allocator holds of a card beyond what tensors take, and what the card has left.

1. A budget is of *allocated* bytes, those of tensors as the allocator rounds them. The card is asked for segments, of
   which blocks are cut: *reserved* bytes are all segments, *fragments* the part of them that is free, and that the
   allocator can give back to nobody because the rest of its segment is in use.
2. A card refuses when segments would exceed it. So a step within its budget may run out of memory where the budget and
   the fragments are more than this process can have: what is free on the card and what it has reserved already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ebbtide.measurement.card_peaks import allocated_peak
from ebbtide.measurement.device import cuda_index_of
from ebbtide.units import format_allowed, format_bytes, format_rows

__all__ = [
    "Reserved",
    "out_of_memory_explained",
    "requested_now",
    "reserved_at_peak",
    "too_large_for_the_card",
    "usable_of_the_card",
]

_MUCH = 0.05  # fragments, of the budget
_GROW = "start the process with PYTORCH_ALLOC_CONF=expandable_segments:True, which lets segments grow"


@dataclass(frozen=True, slots=True)
class Reserved:
    """The allocator's highest levels in one step (definition 1).

    Attributes:
        allocated_bytes: of tensors.
        reserved_bytes: of segments, what earlier steps have left of them included.
        fragment_bytes: free in segments that are in use.
        free_bytes: that the card had left when the step ended.
        requested_bytes: that the allocator was asked for, of what it had handed out; ``None`` if it does not say.
    """

    allocated_bytes: int
    reserved_bytes: int
    fragment_bytes: int
    free_bytes: int = 0
    requested_bytes: int | None = None

    @property
    def fragmentation(self) -> float:
        """Fragments as a share of what is reserved."""
        return self.fragment_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def advice(self, budget_bytes: int) -> str:
        """What to do about fragments that are much of a budget and that the card has no room for beside it, else empty.

        Args:
            budget_bytes: of the step.
        """
        much = self.allocated_bytes + self.fragment_bytes > budget_bytes * (1 + _MUCH)
        if not much or self.free_bytes > self.fragment_bytes:
            return ""
        return (
            f"the allocator held {format_bytes(self.fragment_bytes)} in pieces beside the "
            f"{format_bytes(self.allocated_bytes)} in use ({format_bytes(self.reserved_bytes)} reserved in all), so "
            f"this step needs more of the card than its budget of {format_allowed(budget_bytes)}. If the card is full, "
            f"{_GROW}, or call torch.cuda.empty_cache() after the first two steps"
        )


def reserved_at_peak() -> Reserved:
    """The highest levels on the current card since its statistics were reset last."""
    seen = torch.cuda.memory_stats()
    fragments, requested = seen.get("inactive_split_bytes.all.peak", 0), seen.get("requested_bytes.all.peak")
    free, _ = torch.cuda.mem_get_info()
    return Reserved(allocated_peak(), torch.cuda.max_memory_reserved(), fragments, free, requested)


def requested_now() -> int:
    """Bytes that the current card's allocator was asked for and that are in use; 0 if it does not say."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)


def usable_of_the_card(roots: Iterable[object]) -> int | None:
    """Bytes that tensors of this process may take of the card of ``roots``, theirs included; ``None`` on a CPU.

    What is free and what the process holds already, less what fragments may take.
    """
    index = cuda_index_of(roots)
    if index is None:
        return None
    free, _ = torch.cuda.mem_get_info(index)
    return int((free + torch.cuda.memory_reserved(index)) * (1 - _MUCH))


def too_large_for_the_card(roots: Iterable[object], budget_bytes: int | None) -> str:
    """Why a budget is more than this process can have of the card of ``roots``; empty if it is not, or on a CPU."""
    index = cuda_index_of(roots)
    if index is None or budget_bytes is None:
        return ""
    free, total = torch.cuda.mem_get_info(index)
    own = torch.cuda.memory_reserved(index)
    if budget_bytes <= free + own:
        return ""
    return (
        f"a budget of {format_allowed(budget_bytes)} is more than this process can have of cuda:{index}: of "
        f"{format_bytes(total)} it holds {format_bytes(own)} and {format_bytes(free)} are free, the rest is in use "
        f"elsewhere. A step within the budget may run out of memory; ask for {format_allowed(free + own)} or less, or "
        "end what else runs there"
    )


@contextmanager
def out_of_memory_explained(budget_bytes: int) -> Iterator[None]:
    """While open, an error for want of memory on a card gets a note of what is held there, and of what to do next.

    Args:
        budget_bytes: of the step that runs.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if torch.cuda.is_initialized():
            error.add_note(_explained(budget_bytes))
        raise


def _explained(budget_bytes: int) -> str:
    free, total = torch.cuda.mem_get_info()
    own, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    if budget_bytes > free + own:
        remedy = f"Give it {free + own} bytes or less (ebbtide.set_budget), or end what else runs on the card"
    elif own - used > budget_bytes * _MUCH:
        remedy = f"Of what is reserved much is in pieces: {_GROW}"
    else:
        remedy = (
            "The card has room for the budget, so something beside the plan takes more: a smaller budget "
            "(ebbtide.set_budget) leaves it room"
        )
    rows = [
        ("budget", format_allowed(budget_bytes), budget_bytes, ""),
        ("allocated by this process", format_bytes(used), used, ""),
        ("reserved by it", format_bytes(own), own, ""),
        ("held by others, and by CUDA", format_bytes(total - free - own), total - free - own, ""),
        ("free", format_allowed(free), free, f"of {format_bytes(total)}"),
    ]
    return f"This was a planned step of Ebbtide's. {remedy}.\n{format_rows(rows)}"
