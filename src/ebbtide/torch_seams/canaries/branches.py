"""For ``eager_answers``, ``conditions``, ``known_branches``, ``input_branches``, ``checks``, ``context_variables``."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx.node import has_side_effect

from ebbtide.torch_seams import checks, context_variables, dynamo, eager_answers, input_branches, known_branches
from ebbtide.torch_seams.canaries.registry import canary, expect

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


@canary
def branches_on_inputs_are_taken() -> None:
    """A branch on values of arguments is taken, told with where it is from, and answered again for other arguments."""

    def branch(args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        full = bool(args[0].all())
        return args[0] * 2 if full and args[0].sum().item() > 3 else args[0]

    step = torch.compile(branch, backend="eager", fullgraph=True, dynamic=False)
    given = {"args": (torch.ones(5),)}
    with input_branches.branches_on_inputs(given) as asked:
        expect(step(given["args"]).tolist() == [2.0] * 5, "a branch goes the other way")
    dynamo.forget_compiled(step)
    expect([each.answer for each in asked] == [True, True], f"what was asked is {asked}")
    expect(input_branches.other_answer(asked, given) is None, "the same arguments answer otherwise")
    for position, other in enumerate((torch.tensor([1.0, 0, 1, 1, 1]), torch.ones(2))):
        found = input_branches.other_answer(asked, {"args": (other,)})
        expect(found is asked[position], f"{other} answers {found} otherwise")


def _integer(value: int) -> object:
    import sympy

    return sympy.Integer(value)


@torch.library.custom_op("ebbtide_canaries::check_true", mutates_args=())
def _check_true(condition: torch.Tensor, kind: str, message: str, told: list[torch.Tensor]) -> torch.Tensor:
    if not condition:
        raise checks.Raised(kind, message).error(told)
    return condition.new_empty(0)


@_check_true.register_fake
def _(condition: torch.Tensor, *_: object) -> torch.Tensor:
    return condition.new_empty(0)


has_side_effect(torch.ops.ebbtide_canaries.check_true.default)


@canary
def checks_of_values_are_traced() -> None:
    """A branch that does nothing but raise, and a check of all values, are calls of an op that raises their words."""

    def raises(x: torch.Tensor) -> torch.Tensor:
        largest = x.max()
        if largest > 9:
            raise ValueError(f"{largest:.1f} of {x.shape[0]}")
        return x * 2

    def checked(x: torch.Tensor) -> torch.Tensor:
        largest = x.max()
        torch._check_tensor_all_with(ValueError, largest <= 9, lambda: f"{largest:.1f} of {x.shape[0]}")  # type: ignore[attr-defined]
        return x * 2

    for function in (raises, checked):
        step = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
        with checks.checks_as(torch.ops.ebbtide_canaries.check_true.default):
            expect(step(torch.ones(3)).tolist() == [2.0] * 3, f"{function.__name__} gives something else")
        expect(_said(step, torch.full((3,), 10.0)) == "ValueError('10.0 of 3')", f"{function.__name__} says otherwise")
        dynamo.forget_compiled(step)


def _said(step: Any, x: torch.Tensor) -> str:
    try:
        step(x)
    except Exception as error:
        return repr(error)
    return "nothing"


_SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@canary
def context_variables_have_values_in_traces() -> None:
    """A context variable that the traced code sets and resets has its values there, and a guard outside of it."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        outer = _SCALE.get()
        token = _SCALE.set(4.0)
        inner = _SCALE.get()
        _SCALE.reset(token)
        return x * inner * outer * _SCALE.get()

    step = torch.compile(scaled, backend="eager", fullgraph=True, dynamic=False)
    found: list[float] = []
    with context_variables.context_variables_traced():
        for scale in (1.0, 3.0, 1.0):
            token = _SCALE.set(scale)
            found.append(step(torch.ones(())).item())
            _SCALE.reset(token)
    dynamo.forget_compiled(step)
    expect(found == [4.0, 36.0, 4.0], f"it gives {found}")
