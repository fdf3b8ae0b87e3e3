"""Every error Ebbflow raises on purpose. Each message says what happened, what would work and what to do."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "BudgetExceeded",
    "CaptureError",
    "EbbflowError",
    "PlanFileError",
    "PlanMismatch",
    "UsageError",
    "VerificationError",
]


class EbbflowError(Exception):
    """Base of all errors that Ebbflow raises on purpose."""


class UsageError(EbbflowError, ValueError):
    """An argument has a value that Ebbflow does not accept; the message lists the accepted forms."""


class BudgetError(EbbflowError, ValueError):
    """The budget is below what is workable. Raised before any training.

    Attributes:
        budget_bytes: the budget asked for, bytes of peak.
        floor_bytes: a proven lower bound on the peak of any schedule, bytes.
        smallest_bytes: the least budget for which a schedule was found, bytes; only this one is workable.
        resident_bytes: bytes that are resident at the step's start, whatever the plan, and the allocator's reserve.
        pinned_by: the op that pins the floor, with its source line.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        floor_bytes: int,
        smallest_bytes: int,
        resident_bytes: int,
        pinned_by: str,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.smallest_bytes = smallest_bytes
        self.resident_bytes = resident_bytes
        self.pinned_by = pinned_by


class BudgetExceeded(EbbflowError, RuntimeError):
    """A measured step went over its budget; names the op where the plan has its peak.

    Attributes:
        budget_bytes: the budget, bytes of peak.
        measured_peak_bytes: what was measured, bytes.
    """

    def __init__(self, message: str, *, budget_bytes: int, measured_peak_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.measured_peak_bytes = measured_peak_bytes


class CaptureError(EbbflowError, RuntimeError):
    """The step could not be captured as one program; names the op or line and a remedy."""


class PlanMismatch(EbbflowError, ValueError):
    """A plan does not belong to this program, device, torch build or schema; the message gives the difference."""


class PlanFileError(EbbflowError, ValueError):
    """A plan file cannot be read: truncated, damaged or not a plan. Nothing in it was executed."""


class VerificationError(EbbflowError, RuntimeError):
    """A buffer came back with other bits than it had. Raised before any wrong gradient leaves the backward."""
