"""Echo: what a compiler pass drops and makes again for recurrent networks, and for others, without running GEMMs again.

The pass of Zheng et al., "Echo: Compiler-based GPU Memory Footprint Reduction for LSTM RNN Training", ISCA 2020, as
released in MXNet (pull request 18228, ``src/nnvm/gradient.cc``), told for joint ATen programs:
1. Ops are sorted by ``echo_policy``, the forward is cut into regions at heavy ops by ``echo_regions``, and
   ``echo_estimate`` says which ops of a region are *made again*: those that are not kept.
2. Every op that is made again runs once in the backward, where it is first needed, and its buffers are held to their
   last read (``segments.again_when_needed``). An op is *charged* only if the backward, or an op that is charged, reads
   its output: a matrix product that is read by nothing of the backward is not run again, though its input is.
3. Echo has no budget: it makes its stash small, once. Two of its versions differ in how far back a chain of states is
   chased (``echo_regions``, definition 4): not at all, or to its begin. Here both are tried, and caps of 1, 2, 4, ...
   steps between them: the longer a chain, the smaller the stash, and the more of it is alive at once when it is made
   again. The cheapest plan that fits is the answer, the one of the smallest cap where several cost the same.

What differs: parameters and inputs are no buffers and release nothing (a tanh of an input is made again, where MXNet's
code, for which the input's bytes are released, keeps it); a budget that the unplanned step fits gets that step, as from
all baselines (Echo itself would make its stash small all the same); and the order of the backward stays as captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ebbtide.planners.base import Answer, Problem, Status
from ebbtide.planners.keep_all import keep_all
from ebbtide.planners.registry import planner
from ebbtide.planners.search.reruns_from_kept import Residents
from ebbtide.step.program import Program
from ebbtide_published.planners.echo_estimate import made_again
from ebbtide_published.planners.echo_policy import policies
from ebbtide_published.planners.echo_regions import borders, regions
from ebbtide_published.planners.segments import Trials, again_when_needed

__all__ = ["charged", "decided", "echo", "residents_of", "stash_bytes"]


@planner("echo")
def echo(problem: Problem) -> Answer:
    """Echo's stash at every cap; the cheapest plan that fits."""
    if (unplanned := keep_all(problem)).status is Status.OPTIMAL:
        return unplanned
    trials = Trials(problem)
    for cap, again in _by_cap(problem):
        runs = charged(problem.program, again)
        chased = "states chased to their begin" if cap is None else f"states chased over {cap} steps"
        trials.measure(f"{chased}: {len(runs)} ops again", residents_of(problem.program, again))
    return trials.answer()


def decided(program: Program, cap: int | None = None) -> frozenset[int]:
    """The forward ops that are made again (definition 1).

    Args:
        program: any.
        cap: steps over which a state is made again from the one before; ``None`` for any number.
    """
    border = borders(program, policies(program), cap)
    found: set[int] = set()
    for region in regions(program, border):
        found |= made_again(program, border, region)
    return frozenset(found)


def charged(program: Program, again: Collection[int]) -> frozenset[int]:
    """Those of the ops that are made again whose outputs the backward needs (definition 2)."""
    found: set[int] = set()
    for op in range(len(program.ops) - 1, -1, -1):
        if op >= program.boundary or op in found:
            found.update(
                p
                for b in program.ops[op].inputs
                if b not in program.pinned and (p := program.buffers[b].producer) is not None and p in again
            )
    return frozenset(found)


def residents_of(program: Program, again: Collection[int]) -> Residents:
    """What is held if these forward ops are made again (definition 2)."""
    return again_when_needed(program, _saved(program, again))


def stash_bytes(program: Program, again: Collection[int]) -> int:
    """Bytes that cross the boundary if these forward ops are made again: Echo's own measure, with forward outputs."""
    runs = charged(program, again)
    return sum(
        program.buffers[b].bytes
        for op in program.ops[: program.boundary]
        for b in op.outputs
        if b in program.pinned
        or (
            program.buffers[b].producer not in again
            and any(r >= program.boundary or r in runs for r in program.readers[b])
        )
    )


def _by_cap(problem: Problem) -> Iterator[tuple[int | None, frozenset[int]]]:
    """Caps from 0 on, doubled, then none, with what is made again; a cap that changes nothing more is the last."""
    whole = decided(problem.program)
    cap = 0
    while not problem.interrupt:
        again = decided(problem.program, cap)
        if again == whole:
            yield None, whole
            return
        yield cap, again
        cap = 2 * cap or 1


def _saved(program: Program, again: Collection[int]) -> frozenset[int]:
    """Buffers of ops that are not made again."""
    return frozenset(b for op in range(program.boundary) if op not in again for b in program.ops[op].outputs)
