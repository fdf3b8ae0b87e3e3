"""The canaries of ``eager_answers`` and ``known_branches``: what Dynamo is relied on for at branches."""

from __future__ import annotations

import threading

import torch

from ebbflow.torch_seams import dynamo, eager_answers, known_branches
from ebbflow.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def questions_have_answers_of_our_own() -> None:
    """Who asks on this thread whether it is compiled gets our answer, and who asks on another Dynamo's."""
    heard: list[float] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if torch.compiler.is_compiling() else 0)

    def compiled() -> None:
        step = torch.compile(ask, backend="eager", fullgraph=True, dynamic=False)
        heard.append(step(torch.zeros(1)).item())
        dynamo.forget_compiled(step)

    answers = eager_answers.Answers()
    with eager_answers.answered(answers):
        compiled()
        site = answers.last
        other = threading.Thread(target=compiled)
        other.start()
        other.join()
        expect(site is not None and site[0][0] == __file__, f"the code that asks is told as {site}")
        answers.everywhere = True
        compiled()
    compiled()
    expect(heard == [0, 1, 1, 1], f"answers are {heard}")


@canary
def branches_on_numbers_are_taken() -> None:
    """A branch on a tensor that is computed from numbers is taken, and one on sizes that are symbols is told."""

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if not (torch.arange(x.shape[0]) < 3).all() else x

    step = torch.compile(branch, backend="eager", fullgraph=True, dynamic=True)
    with known_branches.known_branches() as conditions:
        expect(step(torch.ones(5)).tolist() == [2.0] * 5, "a branch goes the other way")
    dynamo.forget_compiled(step)
    expect(len(conditions) == 1 and len(conditions[0].symbols) == 1, f"conditions are {conditions}")
    (symbol,) = conditions[0].symbols
    holds = [conditions[0].holds({symbol: _integer(size)}) for size in (2, 5)]
    expect(holds == [False, True], f"a condition holds for {holds}")


def _integer(value: int) -> object:
    import sympy

    return sympy.Integer(value)
