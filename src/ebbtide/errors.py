"""Every error Ebbtide raises on purpose. A message says what to do first, then why, then the figures in columns.

What a message says is in the error's attributes too, so that nobody has to take the text apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "BudgetError",
    "BudgetExceeded",
    "CaptureError",
    "EbbtideError",
    "InternalError",
    "PlanFileError",
    "PlanMismatch",
    "RankError",
    "TierError",
    "UnknownArgument",
    "UpdateError",
    "UsageError",
    "VerificationError",
]


class EbbtideError(Exception):
    """Base of all errors that Ebbtide raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own way calls the class with the message alone, which those with more to say do not take.
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[EbbtideError], args: tuple[Any, ...]) -> EbbtideError:
    """An error as it was pickled, in another process."""
    return kind.__new__(kind, *args)


def without_frames(error: EbbtideError) -> EbbtideError:
    """``error`` as users see it where they called us: what it passed on the way is shown of our own faults alone."""
    return error if isinstance(error, InternalError) else error.with_traceback(None)


def told(reason: str, remedy: str, figures: str = "") -> str:
    """What a refusal says: ``remedy`` in the first line, then why, then the figures in lines of their own."""
    why = f"Why: {reason.rstrip('.')}." if remedy else reason
    return "\n".join(each for each in (f"{_capital(remedy)}." if remedy else "", why, figures) if each)


def _capital(sentence: str) -> str:
    """``sentence`` with a large letter where it begins with a word and not with code."""
    sentence = sentence.rstrip(".")
    return sentence[:1].upper() + sentence[1:] if sentence.partition(" ")[0].isalpha() else sentence


class UsageError(EbbtideError, ValueError):
    """An argument has a value that Ebbtide does not accept; the message lists the accepted forms.

    Attributes:
        argument: name of the argument or option; empty where it is not one that is at fault.
        value: what was given; ``None`` where no argument is named.
        accepted: the values or forms that would do, if they can be listed.
    """

    def __init__(self, message: str, *, argument: str = "", value: object = None, accepted: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value
        self.accepted = tuple(accepted)


class UnknownArgument(UsageError, TypeError):
    """A public function was given an argument that it does not have; the message names those that it has.

    Attributes:
        argument: the keyword.
        value: what was given.
        accepted: the keywords that there are.
    """


class BudgetError(EbbtideError, ValueError):
    """The budget is below what is workable. Raised before any training.

    Attributes:
        reason: why it is refused.
        remedy: what to do; empty if the reason says it.
        figures: what the message says in columns; empty if the reason says it.
        budget_bytes: the budget asked for, bytes of peak.
        floor_bytes: a proven lower bound on budgets of schedules with PyTorch's op order and boundary, bytes.
        smallest_bytes: the least budget for which a schedule was found, bytes; only this one is workable.
        resident_bytes: bytes that are resident at the step's start, whatever the plan, and the allocator's reserve.
        resident_parts: what these are made of, bytes by kind in words, such as ``"weights"``.
        pinned_by: the op that pins the floor, with its source line.
    """

    def __init__(
        self,
        reason: str,
        *,
        budget_bytes: int,
        floor_bytes: int,
        smallest_bytes: int,
        resident_bytes: int,
        pinned_by: str,
        resident_parts: Mapping[str, int] | None = None,
        remedy: str = "",
        figures: str = "",
    ) -> None:
        super().__init__(told(reason, remedy and f"does not fit: {remedy}", figures))
        self.reason = reason
        self.remedy = remedy
        self.figures = figures
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.smallest_bytes = smallest_bytes
        self.resident_bytes = resident_bytes
        self.pinned_by = pinned_by
        self.resident_parts = dict(resident_parts or {})

    def because(self, reason: str) -> BudgetError:
        """This refusal for another reason."""
        facts: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "__notes__"}
        facts["reason"] = reason
        return BudgetError(**facts)


class BudgetExceeded(EbbtideError, RuntimeError):
    """A step went over its budget: the first measured one, or with ``on_violation="raise"`` any that was judged.

    Attributes:
        budget_bytes: the budget, bytes of peak.
        measured_peak_bytes: what was measured, bytes.
        op: where the plan has its peak, with its source line; empty where the message says what grew.
    """

    def __init__(self, message: str, *, budget_bytes: int, measured_peak_bytes: int, op: str = "") -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.measured_peak_bytes = measured_peak_bytes
        self.op = op


class CaptureError(EbbtideError, RuntimeError):
    """The step could not be captured as one program; names the op or line and a remedy.

    Attributes:
        reason: what stands in the way.
        remedy: what to do; empty if the reason says it.
        op: the op at fault, empty if it is no single op.
        source: ``file:line`` in the user's code, empty if unknown.
    """

    def __init__(
        self, reason: str, *, remedy: str = "", op: str = "", source: str = "", message: str | None = None
    ) -> None:
        super().__init__(message or told(reason, remedy))
        self.reason = reason
        self.remedy = remedy
        self.op = op
        self.source = source


class PlanMismatch(EbbtideError, ValueError):
    """A plan does not belong to this program, device, torch build or schema; the message gives the difference.

    Attributes:
        differences: each in words.
    """

    def __init__(self, message: str, *, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


class PlanFileError(EbbtideError, ValueError):
    """A plan file cannot be read: truncated, damaged or not a plan. Nothing in it was executed.

    Attributes:
        path: of the file; ``None`` if the plan came from elsewhere.
    """

    def __init__(self, message: str, *, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.path = None if path is None else Path(path)


class VerificationError(EbbtideError, RuntimeError):
    """A proven step made other bits than it should have. Raised before any wrong gradient leaves the backward.

    Either a buffer came back, recomputed or from slower memory, with other bits than it had; or the op of a rewrite
    gave other bits than the captured ops whose place it takes, on the step's own numbers.

    Attributes:
        buffer: name of the buffer; of a rewrite, what of its results is different.
        op: the op that makes it, with its source line.
    """

    def __init__(self, message: str, *, buffer: str = "", op: str = "") -> None:
        super().__init__(message)
        self.buffer = buffer
        self.op = op


class UpdateError(EbbtideError, RuntimeError):
    """With the optimizer in the step, a step is not what eager's would be, after some parameters have been updated.

    Attributes:
        updated: names of the parameters that have been updated; all others are as they were.
    """

    def __init__(self, message: str, *, updated: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.updated = tuple(updated)


class TierError(EbbtideError, RuntimeError):
    """A slower tier cannot be used, has no room, or failed in a step; no gradient of that step was handed out.

    Attributes:
        tier: ``"disk"`` or ``"host"``.
        path: the directory of a disk tier; ``None`` for others.
    """

    def __init__(self, message: str, *, tier: str, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.path = None if path is None else Path(path)


class RankError(EbbtideError, RuntimeError):
    """Another process of the same training has failed, has ended or does not answer, so that no step can be run.

    What another rank raises of the errors here is raised on all as what it is, with the rank in its text.

    Attributes:
        rank: which; ``None`` if it is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class InternalError(EbbtideError, RuntimeError):
    """A fault of Ebbtide's own, never of the model's: says what to report.

    Attributes:
        what: what went wrong.
        op: the op at which it did, with its source line; empty if it is no single op.
        versions: of Python and of the packages that matter, by name; for the report.
    """

    def __init__(self, what: str, *, op: str = "") -> None:
        self.what = what
        self.op = op
        self.versions = _versions()
        listed = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        super().__init__(
            f"{what}{f' (at {op})' if op else ''}. This is a fault in Ebbtide, not in your model. Please report it "
            f"with this traceback, the versions ({listed}) and, if you can share it, a model and arguments "
            "that show it"
        )


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in ("ebbtide", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
