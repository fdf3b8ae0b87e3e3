"""What is found out about the code of a step in its first runs: whether its bits come back, and what it takes.

1. ``PLANNED``: lowered, statically proven to be the program (``step_code``), and not run yet.
2. ``PROVING``: in the first step that is alone with its plan, every buffer that comes back is held against its
   fingerprint (``lower.fingerprints``).
3. ``MEASURING``: in the next undisturbed step, allocations are recorded and the peak is held against prediction and
   budget.
4. ``STEADY``: the generated code alone.

5. Where every step is to be proven, it stays ``PROVING``, and the first undisturbed step is measured besides.

A step whose first forward has not been planned is ``CAPTURED``. Without verification ``PLANNED`` is followed by
``STEADY``.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ebbtide.capture.joint import Captured
from ebbtide.engine.step_code import Callables, callables_of
from ebbtide.lower.compared import Holding, with_holding
from ebbtide.lower.fingerprints import Fingerprints, with_fingerprints
from ebbtide.lower.lowering import Lowered
from ebbtide.measurement.reserved import Reserved
from ebbtide.optimizer.in_step.gradient_recompute import likes_in
from ebbtide.transfers.traffic import Traffic

__all__ = ["FirstRuns", "Measured", "Phase"]


class Phase(enum.Enum):
    """Where a step is; the value says what happens next."""

    CAPTURED = "captured: its first forward has not been planned"
    PLANNED = "planned: its graphs are proven to be the program, and have not run"
    PROVING = "proving: what comes back is held against its fingerprints"
    MEASURING = "measuring: the next undisturbed step's peak is recorded"
    STEADY = "steady: the generated code runs alone"


@dataclass(eq=False)
class Measured:
    """What one step's code was seen to take.

    Attributes:
        above_bytes: the peak above the step's start in the measured step; ``None`` before.
        reserved: what the card's allocator held in it; ``None`` before, and on CPU.
        unsplit_bytes: kept free in every step for what the card's allocator hands out beyond what it is asked for
            (``reserve.unsplit_bytes``); more where a measured step has shown that.
        traffic: what moved in the last step that ended, on CUDA in the last one that was measured; ``None`` before, and
            where nothing moves.
    """

    above_bytes: int | None = None
    reserved: Reserved | None = None
    unsplit_bytes: int = 0
    traffic: Traffic | None = None

    def moved(self, traffic: Traffic) -> None:
        """A backward has ended. Seconds, once known, stay until others are: every step moves the same bytes."""
        if traffic.timed or self.traffic is None:
            traffic.read_clocks()
            self.traffic = traffic


@dataclass(eq=False)
class FirstRuns:
    """Where one step's code is on the way from planned to steady.

    Attributes:
        always: whether every step is proven.
        phase: definitions 1 to 5.
        checked: the code with its checks; ``None`` without verification, and once they are done.
        fingerprints: of the buffers that come back; likewise.
        holding: the ops of rewrites that are checked; likewise.
        proving: handle of the pending step that is being proven, or ``None``.
        rehearsed: whether a step that updates has been proven without updating anything.
        verified_buffers: how many came back with their bits in the proven step.
        rewrites_held: how many ops of rewrites were checked by what in it (``lower.compared``).
        free_bytes: of the budget of the plan that is being proven, for checks besides the step.
    """

    always: bool = False
    phase: Phase = Phase.PLANNED
    checked: Callables | None = None
    fingerprints: Fingerprints | None = None
    holding: list[Holding] = field(default_factory=list[Holding])
    proving: int | None = None
    rehearsed: bool = False
    verified_buffers: int = 0
    rewrites_held: dict[str, int] = field(default_factory=dict[str, int])
    free_bytes: int = 0

    def check(
        self,
        captured: Captured,
        lowered: Lowered,
        holding: Iterable[Holding],
    ) -> None:
        """Have the first run of ``lowered`` checked.

        Args:
            captured: the step.
            lowered: its two graphs.
            holding: the ops of rewrites that are to be checked.
        """
        self.fingerprints = Fingerprints(captured.program, likes_in(captured))
        graphs = with_fingerprints(lowered.forward, lowered.backward, self.fingerprints)
        self.holding = [*holding]
        with_holding(graphs, self.holding)
        self.checked = callables_of(*graphs)

    def start(self, free_bytes: int) -> None:
        """A forward is about to run under a plan whose budget has ``free_bytes`` besides the step."""
        self.free_bytes = free_bytes
        if self.phase is Phase.PLANNED:
            self.phase = Phase.STEADY if self.checked is None else Phase.PROVING

    def proven(self) -> None:
        """A whole step's buffers came back with their bits."""
        assert self.fingerprints is not None
        self.verified_buffers = self.fingerprints.checked
        self.rewrites_held = dict(Counter(each.how.value for each in self.holding if each.how is not None))
        self.proving = None
        if self.always:
            return
        self.holding = []
        self.phase = Phase.MEASURING
        self.checked = self.fingerprints = None

    def measured(self) -> None:
        """A step's peak was recorded."""
        if not self.always:
            self.phase = Phase.STEADY
