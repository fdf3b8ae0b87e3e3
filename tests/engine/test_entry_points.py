"""The same options at every entry point: checked before anything of the model runs, and with the same effect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from docs.api_page import AHEAD, TRAINING
from ebbtide.entry_points import NOT_TAKEN
from ebbtide.errors import UnknownArgument, UsageError
from ebbtide.planners import Interrupt
from ebbtide.torch_seams.fake_tensors import FakeTensor, FakeTensorMode
from ebbtide.zoo import mlp_chain

ANY = 2**40


class Untouchable(nn.Module):
    """A model that nobody may call: what is absurd is refused before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model was called")


X = (torch.ones(2, 2),)


def untouchable_case(batch: int) -> ebbtide.Case:
    raise AssertionError("a case was made")


ENTRIES: dict[str, Callable[..., object]] = {
    "plan": lambda **given: ebbtide.plan(Untouchable(), X, budget=ANY, **given),
    "sweep": lambda **given: ebbtide.sweep(Untouchable(), X, **{"budgets": [ANY], **given}),
    "doctor": lambda **given: ebbtide.doctor(Untouchable(), X, **given),
    "max_batch": lambda **given: ebbtide.max_batch(untouchable_case, budget=ANY, **given),
    "fit": lambda **given: ebbtide.fit(Untouchable(), ANY, **given),
}
ABSURD: dict[str, Any] = {
    "planner": "atuo",
    "effort": 0,
    "time_limit": float("nan"),
    "seed": -1,
    "optimizer": "adamw",
    "loss": "mse",
    "machine": "abacus",
    "gradients": "most",
    "progress": "loud",
}


PUBLIC = {name: getattr(ebbtide, name) for name in (*TRAINING, *AHEAD) if inspect.isfunction(getattr(ebbtide, name))}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_keyword_that_there_is_not_is_answered_with_the_nearest(name: str) -> None:
    """Every keyword but for its last letter, before anything else is looked at; otherwise a call goes as before."""
    function = PUBLIC[name]
    known = list(inspect.signature(function).parameters)
    for each in known:
        if (name, each) == ("sweep", "planners"):  # without its last letter it is an option
            continue
        with pytest.raises(UnknownArgument) as raised:
            function(object(), **{each[:-1]: 3} if each[:-1] not in known else {f"{each}_": 3})
        assert isinstance(raised.value, UsageError)
        assert isinstance(raised.value, TypeError)
        assert raised.value.accepted == tuple(known)
        meant = f"{name} has no argument {raised.value.argument!r}; did you mean {each!r}? it has: {', '.join(known)}"
        assert str(raised.value) == meant
    with pytest.raises(TypeError, match="missing") as raised_by_python:
        function()
    assert not isinstance(raised_by_python.value, UsageError)


def test_what_is_given_by_place_and_goes_by_name_is_told() -> None:
    said = r"max_batch takes make_case by place, and 2 .* by name it takes budget, vary"
    with pytest.raises(UnknownArgument, match=said):
        ebbtide.max_batch(Untouchable(), mlp_chain, budget="1MiB")  # type: ignore[misc, arg-type]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("option", ABSURD)
def test_an_absurd_value_is_refused_before_it_can_be_given(entry: str, option: str) -> None:
    with pytest.raises(UsageError) as raised:
        ENTRIES[entry](options=ebbtide.Options(**{option: ABSURD[option]}))
    assert raised.value.argument == option


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_option_that_is_given_by_name_is_told_where_it_goes(entry: str) -> None:
    with pytest.raises(UnknownArgument) as raised:
        ENTRIES[entry](verify=False, seed=3)
    said = f"{entry} takes verify and seed in its options: options=ebbtide.Options(verify=False, seed=3)"
    assert (str(raised.value), raised.value.argument) == (said, "verify")
    with pytest.raises(UnknownArgument, match=r"options=ebbtide\.Options\(max_norm=\.\.\.\)"):
        ENTRIES[entry](max_norm=torch.ones(()))
    with pytest.raises(UnknownArgument, match=r"has no argument 'gradiens'.*did you mean 'gradients'"):
        ENTRIES[entry](gradiens="all")


NAMED_FIELDS = [
    *[("fit", each) for each in ("optimizer", "tiers", "step", "progress")],
    *[(entry, each) for entry in ("plan", "sweep", "doctor") for each in ("machine", "loss")],
    ("max_batch", "machine"),
]


@pytest.mark.parametrize(("entry", "option"), NAMED_FIELDS)
def test_what_is_given_in_both_ways_is_refused_by_name(entry: str, option: str) -> None:
    value: Any = {
        "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters()),
        "tiers": "disk",
        "step": "inside",
        "progress": print,
        "machine": "h100-80gb",
        "loss": torch.mean,
    }[option]
    with pytest.raises(UsageError, match=f"^{option} is given twice, by {option}= and in options=") as raised:
        ENTRIES[entry](**{option: value}, options=ebbtide.Options(**{option: value}))
    assert raised.value.argument == option


REFUSED = [(entry, option) for entry, fields in NOT_TAKEN.items() for option in fields if entry in ENTRIES]
GIVEN: dict[str, Any] = {
    "loss": torch.mean,
    "machine": "h100-80gb",
    "interrupt": Interrupt(),
    "planner": "greedy",
    "on_violation": "raise",
}


@pytest.mark.parametrize(("entry", "option"), REFUSED)
def test_what_an_entry_point_does_not_know_it_refuses_by_name(entry: str, option: str) -> None:
    """In its options and by name alike, with the same reason."""
    value = GIVEN[option] if option != "start" else ebbtide.plan(nn.Sequential(nn.Linear(2, 2)), X, budget=ANY)
    for given in ({"options": ebbtide.Options(**{option: value})}, {option: value}):
        with pytest.raises(UsageError, match=f"^{entry} takes no {option}: ") as raised:
            ENTRIES[entry](**given)
        assert raised.value.argument == option


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_are_no_options_is_refused(entry: str) -> None:
    with pytest.raises(UsageError, match=r"^options takes an ebbtide\.Options, not \{"):
        ENTRIES[entry](options={"effort": 3})


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_an_option_needs_of_another_is_said(entry: str) -> None:
    if entry == "max_batch":  # whose cases may say where the optimizer steps
        return
    with pytest.raises(UsageError, match='give step="inside" and optimizer= besides'):
        ENTRIES[entry](options=ebbtide.Options(max_norm=1.0))


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name != "sweep"])
@pytest.mark.parametrize("budget", ["lots", 0, -3, True, None, 1.5, "2000%"])
def test_an_absurd_budget_is_refused_everywhere(entry: str, budget: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: ebbtide.plan(Untouchable(), X, budget=budget),
        "doctor": lambda: ebbtide.doctor(Untouchable(), X, budget=budget if budget is not None else 0),
        "max_batch": lambda: ebbtide.max_batch(untouchable_case, budget=budget),
        "fit": lambda: ebbtide.fit(Untouchable(), budget),
    }
    with pytest.raises(UsageError) as raised:
        calls[entry]()
    assert raised.value.argument == "budget"


@pytest.mark.parametrize("option", ["budgets", "planners"])
def test_a_sweep_takes_several_and_says_so(option: str) -> None:
    given = {"budgets": [ANY], "planners": ["auto"], option: "60%"}
    with pytest.raises(UsageError, match="takes a sequence"):
        ENTRIES["sweep"](**given)


def test_verify_checks_what_it_is_given() -> None:
    model, plan = Untouchable(), ebbtide.plan(nn.Sequential(nn.Linear(2, 2)), X, budget=ANY)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("plan", lambda: ebbtide.verify(model, X, None, "plan.json")),  # type: ignore[arg-type]
        ("effort", lambda: ebbtide.verify(model, X, None, plan, options=ebbtide.Options(effort=3))),
        ("args", lambda: ebbtide.verify(model, X[0], None, plan)),  # type: ignore[arg-type]
        ("kwargs", lambda: ebbtide.verify(model, X, ["x"], plan)),  # type: ignore[arg-type]
        ("model", lambda: ebbtide.verify("model", X, None, plan)),  # type: ignore[arg-type]
    ]
    for argument, call in wrong:
        with pytest.raises(UsageError) as raised:
            call()
        assert raised.value.argument == argument


NAMED = {name: call for name, call in ENTRIES.items() if name not in ("max_batch", "fit")}


@pytest.mark.parametrize("entry", NAMED)
def test_a_name_is_text(entry: str) -> None:
    with pytest.raises(UsageError, match="name=5 is not accepted; name takes a str"):
        NAMED[entry](name=5)


@pytest.mark.parametrize("option", ["budgets", "planners"])
def test_a_sweep_of_nothing_is_refused(option: str) -> None:
    given = {"budgets": [ANY], "planners": ["auto"], option: []}
    with pytest.raises(UsageError, match=f"{option} is empty"):
        ENTRIES["sweep"](**given)


def test_a_sweep_takes_what_can_be_gone_through_once() -> None:
    case = mlp_chain(16, layers=2, width=8)
    plans = ebbtide.sweep(case.model, case.args, budgets=iter([ANY]), planners=iter(["keep_all", "greedy"]))  # type: ignore[arg-type]
    assert [plan.planner for plan in plans] == ["keep_all", "greedy"]


@pytest.mark.parametrize("call", [ebbtide.unfit, ebbtide.plan_of, ebbtide.step_of, lambda x: ebbtide.set_budget(x, 1)])
@pytest.mark.parametrize("thing", [3, None, "model", nn.Linear, [nn.Linear(1, 1)]])
def test_what_is_not_a_module_is_refused_after_fitting_too(call: Callable[[Any], object], thing: object) -> None:
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        call(thing)


def test_what_is_not_a_path_or_a_name_is_refused() -> None:
    plan = ebbtide.plan(nn.Sequential(nn.Linear(2, 2)), X, budget=ANY)
    for call in (ebbtide.Plan.load, plan.save, plan.explain):
        for thing in (5, None, ["plan.json"]):
            with pytest.raises(UsageError, match=r"not (int|NoneType|list)"):
                call(thing)  # type: ignore[arg-type]


def test_verify_takes_its_plan_by_name() -> None:
    case = mlp_chain(16, layers=2, width=8)
    plan = ebbtide.plan(case.model, case.args, budget=ANY)
    assert ebbtide.verify(case.model, case.args, plan=plan) == ebbtide.verify(case.model, case.args, None, plan)
    with pytest.raises(UsageError, match=r"verify\(model, args, plan=plan\)"):
        ebbtide.verify(case.model, case.args)


def test_classes_where_objects_are_meant_are_named() -> None:
    with pytest.raises(UsageError, match=r"AdamW\(model\.parameters\(\)\)"):
        ebbtide.plan(Untouchable(), X, budget=ANY, options=ebbtide.Options(optimizer=torch.optim.AdamW))
    with pytest.raises(UsageError, match=r"Untouchable\(\.\.\.\)"):
        ebbtide.fit(Untouchable, ANY)  # type: ignore[type-var]


def test_fit_says_where_a_loss_goes_and_takes_no_function_that_makes_an_optimizer() -> None:
    with pytest.raises(UsageError, match="model's forward"):
        ebbtide.fit(Untouchable(), ANY, options=ebbtide.Options(loss=torch.mean))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="make it first"):
        ebbtide.fit(Untouchable(), ANY, optimizer=lambda model: torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the one optimizer that trains the model .* and not list"):
        ebbtide.fit(Untouchable(), ANY, optimizer=[])  # type: ignore[arg-type]


def test_fit_takes_seed_and_time_limit() -> None:
    case = mlp_chain(64, layers=6, width=32)
    ebbtide.fit(case.model, "80%", options=ebbtide.Options(seed=5, time_limit=60, effort=50))
    case.model(*case.args).backward()
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert (plan.provenance["seed"], plan.provenance["effort"]) == ("5", "50")


# -- what the options do -----------------------------------------------------------------------------------------


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def state_bytes(model: nn.Module) -> int:
    """Adam's state, from its documentation: two moments like the parameter, and a step count of 4 bytes."""
    return sum(2 * p.numel() * p.element_size() + 4 for p in model.parameters())


@pytest.mark.long
def test_an_optimizer_counts_in_every_estimate() -> None:
    def make(batch: int, **more: Any) -> ebbtide.Case:
        case = mlp_chain(batch, layers=2, width=64)
        return ebbtide.Case(case.model, case.args, name="chain", **more)

    case = make(4)
    size = state_bytes(case.model)
    plain = ebbtide.plan(case.model, case.args, budget=ANY)
    for optimizer in (adam, adam(case.model)):
        made = ebbtide.plan(case.model, case.args, budget=ANY, options=ebbtide.Options(optimizer=optimizer))
        assert made.resident_bytes - plain.resident_bytes == size
        found = ebbtide.doctor(case.model, case.args, options=ebbtide.Options(optimizer=optimizer))
        assert found.resident_bytes - plain.resident_bytes == size
    asked = ebbtide.Options(planner="keep_all", effort=1)
    unplanned = ebbtide.plan(case.model, case.args, budget=ANY, options=asked)
    largest = functools.partial(ebbtide.max_batch, budget=unplanned.predicted_peak_bytes + size + 2**17)
    without = largest(make, options=asked)
    given = largest(make, options=replace(asked, optimizer=adam))
    of_case = largest(lambda batch: _with_adam(make(batch)), options=asked)
    overridden = largest(lambda batch: _with_adam(make(batch)), options=replace(asked, optimizer=_no_state))
    assert given.batch == of_case.batch < without.batch == overridden.batch


def _with_adam(case: ebbtide.Case) -> ebbtide.Case:
    return ebbtide.Case(case.model, case.args, name=case.name, optimizer=adam(case.model))


def _no_state(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_makes_an_optimizer_has_to_make_one() -> None:
    case = mlp_chain(4, layers=2, width=8)
    with pytest.raises(UsageError, match=r"returned list"):
        ebbtide.plan(
            case.model, case.args, budget=ANY, options=ebbtide.Options(optimizer=lambda model: list(model.parameters()))
        )  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError) as raised:
        ebbtide.plan(
            case.model,
            case.args,
            budget=ANY,
            options=ebbtide.Options(optimizer=lambda params: torch.optim.AdamW(params)),
        )  # type: ignore[arg-type]
    assert "lambda model: torch.optim.AdamW(model.parameters())" in raised.value.__notes__[0]
    with pytest.raises(UsageError, match="cannot be foreseen"):
        ebbtide.plan(
            case.model,
            case.args,
            budget=ANY,
            options=ebbtide.Options(optimizer=lambda model: torch.optim.LBFGS(model.parameters())),
        )
    with pytest.raises(UsageError, match="optimizer=lambda model"):
        ebbtide.max_batch(untouchable_case, budget=ANY, options=ebbtide.Options(optimizer=adam(case.model)))  # type: ignore[arg-type]


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_a_case_says_its_loss_and_gradients() -> None:
    def make(batch: int) -> ebbtide.Case:
        return ebbtide.Case(Scores(), (torch.zeros(batch, 16),), name="scores", loss=lambda y: y.square().mean())

    case = make(32)
    inside = ebbtide.doctor(case.model, case.args, loss=case.loss)
    outside = ebbtide.doctor(case.model, case.args)
    assert (inside.loss_outside, outside.loss_outside) == (False, True)
    found = ebbtide.max_batch(make, budget="4MiB", options=ebbtide.Options(planner="keep_all", effort=1))
    assert found.plan is not None
    assert found.plan.program.tangents
    assert sum(found.plan.program.buffers[b].bytes for b in found.plan.program.tangents) == 4


def test_the_doctor_judges_a_budget() -> None:
    case = mlp_chain(256, layers=8, width=32)
    plain = ebbtide.doctor(case.model, case.args, top=3, name="chain")
    assert (plain.case, plain.budget_bytes, plain.overhead, len(plain.largest)) == ("chain", None, None, 3)
    deep = ebbtide.doctor(case.model, case.args, budget="60%", options=ebbtide.Options(effort=100))
    assert deep.budget_bytes == int(0.6 * plain.baseline_peak_bytes)
    assert deep.overhead is not None
    assert deep.overhead > 0
    small = ebbtide.doctor(case.model, case.args, budget=plain.floor_bytes - 1)
    assert (small.budget_bytes, small.overhead) == (plain.floor_bytes - 1, None)
    with pytest.raises(UsageError, match="top"):
        ebbtide.doctor(case.model, case.args, top=0)


def test_tracing_and_fake_tensors_train_nothing() -> None:
    """``torch.fx`` and a user's ``FakeTensorMode`` get the model as it is written, and no call is planned."""
    model = ebbtide.fit(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), "1GiB", options=ebbtide.Options(effort=50)
    )
    assert len(torch.fx.symbolic_trace(model).graph.nodes) == 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(model(torch.randn(2, 4)), FakeTensor)
    assert ebbtide.calls_of(model).planned == 0
    model(torch.randn(2, 4)).sum().backward()
    assert ebbtide.calls_of(model).planned == 1
