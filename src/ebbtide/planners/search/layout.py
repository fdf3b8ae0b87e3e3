"""How the interval state lies in memory: one flat array of 64-bit integers, so that compiling it stays cheap.

Numba compiles a function of one array several times faster than one of fifteen, and passes it for less. Rows are
named by their *address* in that array:
1. Words ``0..HEADER-1`` are the header (``H_*``): counters, and where each table starts.
2. Op ``o``, its first run and stage ``o`` share the row at ``at(o)``: the columns ``N_*`` are the run, ``OP_*``
   the op, ``S_*`` the stage. There is one row more than ops, for the stage that ends the step.
3. A buffer is the address of its row (columns ``B_*``); lists of inputs, outputs and readers are ranges of words.
4. A rerun is the address of its row (columns ``N_*``), from ``H_NODES`` on. So is a load, whose column ``N_OP`` is
   the negative address of its buffer; free rows have -1 there.
5. Stage ``t`` has a row of clocks (columns ``C_*``) at ``H_CLOCKS + t * C_COLUMNS``: when it begins, and until when
   each lane is taken then. They are walked by ``search.clock`` alone, and right for stages before ``H_STALE``.
"""

from __future__ import annotations

from ebbtide.planners.search.jit import inner

__all__ = ["HEADER", "at"]

# Columns of a run.
N_OP, N_STAGE, N_IN_STAGE, N_OF_OP = 0, 1, 2, 3
N_READY, N_NEXT = 4, 5  # of a load: when the buffer is there; another that is read first in the same stage
N_COLUMNS = 6
# Columns of an op, behind those of its first run.
OP_WORKSPACE, OP_MADE, OP_COST, OP_STATE, OP_LIMIT = 4, 5, 6, 7, 8  # OP_MADE: bytes of all outputs
OP_IN, OP_IN_END, OP_OUT, OP_OUT_END = 9, 10, 11, 12
OP_REACH, OP_ESTIMATE, OP_FORBID = 13, 14, 15  # no use of its outputs is later; last measured price; search only
OP_REMADE = 19  # bytes of the outputs that a rerun makes
# Columns of a stage.
S_HEAD, S_LOCAL, S_DIRTY = 16, 17, 18
S_LOADS, S_HOLDS = 20, 21  # its loads, and the buffers that are held until it ends
ROW = 22
# Columns of a buffer.
B_BYTES, B_PRODUCER, B_PINNED, B_READ, B_READ_END, B_STAMP, B_STEP, B_ENDS = 0, 1, 2, 3, 4, 5, 6, 7
B_LOADS, B_HOLD, B_NEXT_HOLD = 8, 9, 10  # ascending by stage; until which stage it is held; others held so long
B_TIER, B_OUT, B_IN, B_OUT_SHARE, B_IN_SHARE = (
    11,
    12,
    13,
    14,
    15,
)  # its tier (-1: none); costs
B_OUT_LANE, B_IN_LANE, B_STORED, B_COPIED = 16, 17, 18, 19  # columns C_*; bytes in the tier; when it is copied
B_STALL, B_ESTIMATE, B_FORBID = 20, 21, 22  # for how long its first free waits; the others as of ops
B_COLUMNS = 23
# Columns of clocks.
C_NOW, C_ARRIVED, C_LANES = 0, 1, 2
MOST_TIERS = 3
C_COLUMNS = C_LANES + 2 * MOST_TIERS
# The header.
H_OPS, H_BUFFERS, H_BUFFERS_END, H_NODES, H_HIGH, H_FREE, H_ROOM = 0, 1, 2, 3, 4, 5, 6  # H_HIGH: end of rows ever used
H_TREE_SIZE, H_TOP, H_ADD = 7, 8, 9
H_JOURNAL_AT, H_JOURNAL, H_JOURNAL_ROWS = 10, 11, 12
H_TOUCHED_AT, H_TOUCHED, H_STEPS_AT = 13, 14, 15
H_STACK_AT, H_PENDING_AT, H_OFFERS_AT, H_BEST_AT = 16, 17, 18, 19
H_COST, H_RERUNS, H_STAMP, H_RANDOM, H_BEST_COST, H_BEST_COUNT = 20, 21, 22, 23, 24, 25
H_BOUNDARY, H_BETWEEN = 26, 27  # H_BETWEEN: by how much user code at the boundary exceeds what it leaves
H_WORK, H_WORK_LIMIT = 28, 29  # runs walked so far, and beyond which searches stop
H_EARLY = 30  # 1: searches may place a rerun before the stage that uses it
H_LOADS, H_CLOCKS, H_STALE, H_MAKESPAN, H_BEST_HOLDS = 31, 32, 33, 34, 35
H_NEEDS, H_END = 36, 37  # per stage the loads that are read first there; end of all words
H_MOVES_ONLY, H_BASE = 38, 39  # 1: searches rerun nothing; cost of every op once
H_TIERS = 40  # how many tiers buffers may be moved to; with any, searches judge by the makespan
H_LEFT = 41  # bytes left in each tier
HEADER = H_LEFT + MOST_TIERS
# Kinds of journal rows.
J_ADDED, J_REMOVED, J_LOCAL, J_LOADED, J_UNLOADED, J_HELD = 0, 1, 2, 3, 4, 5
# Rows of the journal kept free, so that one change always fits: an op touches one stage per input and output.
JOURNAL_RESERVE = 4096
# Live entries of the lazy heap of offers.
OFFERS = 12


@inner
def at(o: int) -> int:
    """The address of the row of op, first run and stage ``o``."""
    return HEADER + o * ROW
