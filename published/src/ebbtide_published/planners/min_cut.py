"""What PyTorch's compiler saves for the backward: a minimum cut between what must be saved and what must be read.

The rule is that of ``min_cut_rematerialization_partition`` in ``torch/_functorch/partitioners.py`` (torch 2.13),
told for our programs:
1. A forward op is *made again* in the backward or not, and a buffer is *saved* exactly if its op is not made again
   while the backward, or an op that is, reads it. Ops that are made again are a choice, except for banned ones.
2. Saving a buffer costs its bytes times ``1.1 ** d``, where ``d``, between 1 and 100, is the number of reads on the
   shortest way to the backward: what lies far from it is rather made again. Saving a forward output is free, since
   it is held anyway. The saved buffers are those of least cost in all, a minimum cut.
3. *Banned* are at every level ops that may not run after the boundary, and, level by level:
   ``allowlist`` (PyTorch's default): random ops, ops that make less than a quarter of the bytes they read, and
   those that are not in its list of cheap ones (pointwise, simple reductions, indexing, what makes constants);
   ``not compute`` (its next step towards a smaller memory budget): random ops, the same reductions, and ops of heavy
   arithmetic; ``inputs`` (its last step): nothing more.
4. Every op that is made again runs once in the backward, where it is first needed, and its buffers are held to
   their last read.

The cheapest level that fits is the answer. What differs: nothing is fused here, so PyTorch's bans and its doubled
weight that foresee fusion have no meaning and are left out (buffers read by unfused ops of the backward, used far
apart, long chains); parameters and inputs are no buffers and cost nothing; views are no ops. PyTorch fits no byte
budget; between its last two steps it solves a knapsack over a ratio of saved bytes, which is left out. In programs
without ATen ops (published graphs) an op is taken for heavy if its seconds per byte that it reads and makes are
more than those of the forward as a whole, and the first two levels are one.

The cut is found by Dinic's algorithm (Soviet Mathematics Doklady 11, 1970).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.step.program import Op, Program
from ebbtide_published.planners.arithmetic import aten_name, has_aten_ops, heavy_by_cost, is_foreign
from ebbtide_published.planners.segments import Trials, again_when_needed

__all__ = ["Flow", "min_cut", "saved_buffers"]

FARTHER = 1.1  # definition 2: PyTorch's own constants
FARTHEST = 100
REDUCTION = 4  # definition 3: its ratio of bytes read to bytes made
# Its ``compute_intensive_ops``.
HEAVY = frozenset(
    """mm convolution convolution_backward bmm addmm _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _flash_attention_forward _efficient_attention_forward
    upsample_bilinear2d _scaled_mm""".split()
)
# Its ``recomputable_ops``, without views and operators on plain numbers: names of ``aten`` and ``prims``.
CHEAP = frozenset(
    """__and__ __lshift__ __or__ __rshift__ __xor__ _grad_sum_to_size _to_copy _unsafe_view abs acos acosh add
    addcdiv addcmul amax angle any arange argmax asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone conj_physical
    copysign cos cosh deg2rad digamma div elu empty empty_like eq erf erfc erfinv exp exp2 expm1 float_power floor
    fmax fmin fmod frac frexp full full_like gather gcd ge gelu gelu_backward gt hardshrink hardsigmoid hardtanh
    heaviside hypot i0 igamma igammac index iota isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp
    lgamma lift_fresh_copy log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
    logit logit_backward lt masked_fill max maximum mean min minimum mish mul mvlgamma nan_to_num
    native_dropout_backward ne neg new_zeros nextafter ones polygamma positive pow rad2deg reciprocal relu relu6
    remainder round rrelu rsqrt rsub scalar_tensor selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward
    sin sinc sinh softplus softshrink sqrt square std sub sum sum_to_size tan tanh tanh_backward threshold
    threshold_backward to triu true_divide trunc type_as var var_mean where xlogy zeros zeros_like
    _low_memory_max_pool_offsets_to_indices convert_element_type prepare_softmax_online""".split()
)

Ban = Callable[[Op], bool]


@planner("min_cut")
def min_cut(problem: Problem) -> Answer:
    """The minimum cut at each level; the cheapest that fits."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    trials = Trials(problem)
    for level, banned in _levels(problem.program).items():
        if problem.interrupt:
            break
        saved = saved_buffers(problem.program, banned)
        trials.measure(f"{level}: {len(saved)} saved", again_when_needed(problem.program, saved))
    return trials.answer()


def saved_buffers(program: Program, banned: Collection[int]) -> frozenset[int]:
    """Forward buffers that are saved (definitions 1 and 2).

    Args:
        program: any.
        banned: forward ops that may not be made again.
    """
    ops = program.ops[: program.boundary]
    weight = _weights(program)
    first = 2 + len(ops)  # node of buffer 0, after the two ends and the ops
    flow = Flow(first + len(program.buffers))
    unbounded = sum(weight) + 1
    for index, op in enumerate(ops):
        if index in banned:
            flow.add(0, 2 + index, unbounded)
        for b in op.outputs:
            flow.add(2 + index, first + b, weight[b])
            for reader in program.readers[b]:
                flow.add(first + b, 2 + reader if reader < program.boundary else 1, unbounded)
    near = flow.source_side(0, 1)
    return frozenset(b for index, op in enumerate(ops) if near[2 + index] for b in op.outputs if not near[first + b])


class Flow:
    """A network for maximum flow and minimum cut, with integer capacities.

    Args:
        nodes: their number.
    """

    def __init__(self, nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(nodes)]  # edges of a node; edge e is undone by e ^ 1
        self._head: list[int] = []
        self._left: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An edge."""
        for node, other, left in ((tail, head, capacity), (head, tail, 0)):
            self._out[node].append(len(self._head))
            self._head.append(other)
            self._left.append(left)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """Per node, whether it is on the source's side of the minimum cut next to the source."""
        level = self._levels(source)
        while level[sink] >= 0:
            self._block(source, sink, level)
            level = self._levels(source)
        return [each >= 0 for each in level]

    def _levels(self, source: int) -> list[int]:
        """Per node, its distance from the source over edges with something left; -1 beyond reach."""
        level = [-1] * len(self._out)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self._out[node]:
                other = self._head[edge]
                if self._left[edge] > 0 and level[other] < 0:
                    level[other] = level[node] + 1
                    queue.append(other)
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """Push flow along shortest paths until each has a full edge."""
        tried = [0] * len(self._out)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                least = min(self._left[edge] for edge in path)
                for edge in path:
                    self._left[edge] -= least
                    self._left[edge ^ 1] += least
                full = next(place for place, edge in enumerate(path) if self._left[edge] == 0)
                node = self._head[path[full] ^ 1]
                del path[full:]
            edges = self._out[node]
            while tried[node] < len(edges):
                edge = edges[tried[node]]
                if self._left[edge] > 0 and level[self._head[edge]] == level[node] + 1:
                    path.append(edge)
                    node = self._head[edge]
                    break
                tried[node] += 1
            else:
                if node == source:
                    return
                node = self._head[path.pop() ^ 1]
                tried[node] += 1


def _weights(program: Program) -> list[int]:
    """What saving each buffer costs (definition 2)."""
    distance = [FARTHEST] * len(program.ops)
    weight = [0] * len(program.buffers)
    for index in range(len(program.ops) - 1, -1, -1):
        if index >= program.boundary:
            distance[index] = 0
            continue
        for b in program.ops[index].outputs:
            near = min((distance[r] + 1 for r in program.readers[b]), default=FARTHEST)
            distance[index] = min(distance[index], near)
            if b not in program.pinned:
                weight[b] = int(program.buffers[b].bytes * FARTHER ** min(near, FARTHEST))
    return weight


def _levels(program: Program) -> dict[str, frozenset[int]]:
    """The banned ops of every level (definition 3), the one that makes least again first."""

    def banned(ban: Ban) -> frozenset[int]:
        return frozenset(i for i, op in enumerate(program.ops[: program.boundary]) if _never(op) or ban(op))

    def reduces(op: Op) -> bool:
        made = sum(program.buffers[b].bytes for b in op.outputs)
        return made * REDUCTION < sum(program.buffers[b].bytes for b in op.inputs)

    heavy, cheap = _arithmetic(program)
    return {
        "allowlist": banned(lambda op: op.random or reduces(op) or not cheap(op)),
        "not compute": banned(lambda op: op.random or reduces(op) or heavy(op)),
        "inputs": banned(lambda _: False),
    }


def _never(op: Op) -> bool:
    """Whether it may not run after the boundary again."""
    return not op.rerunnable or op.reads_mutated


def _arithmetic(program: Program) -> tuple[Ban, Ban]:
    """Which ops are heavy, and which are cheap: by name, or by cost in programs without ATen ops."""
    if has_aten_ops(program):
        return (lambda op: is_foreign(op) or aten_name(op) in HEAVY), (lambda op: aten_name(op) in CHEAP)
    heavy = heavy_by_cost(program)
    return heavy, lambda op: not heavy(op)
