"""Models whose class is another one, or is made for one object: planned as what they are, or refused by name."""

from __future__ import annotations

import abc
import copy
import types
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import pytest
import torch
from torch import nn

import ebbtide
from eager_steps import assert_trains_as_eager, history
from ebbtide.errors import UsageError

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square().mean()


class Sum(Mean):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.__class__.__name__ == "Sum"
        return self.two(torch.tanh(self.one(x))).sum()


class Fast(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def as_eager(model: nn.Module, plain: nn.Module, steps: int = 2) -> bool:
    mine, theirs = (history(each, lambda: (X,), steps) for each in (model, plain))
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))  # type: ignore


def test_a_model_that_is_given_another_class_is_refused_at_the_next_step_of_its_optimizer() -> None:
    model = Mean()
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    assert as_eager(model, plain)
    model.__class__ = Sum
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(X).backward()
    with pytest.raises(UsageError, match="within the budget"):
        optimizer.step()
    assert type(ebbtide.unfit(model)) is Sum
    ebbtide.fit(model, "1GiB")
    plain.__class__ = Sum
    assert as_eager(model, plain)


def test_the_class_of_a_fitted_model_has_its_own_metaclass() -> None:
    model = ebbtide.fit(Mean(), "1GiB")
    assert type(type(model)) is type(Mean)
    mixed = type("Patched", (abc.ABC, type(model)), {})
    assert issubclass(mixed, Mean)


def test_a_part_that_is_given_another_class_makes_another_step() -> None:
    model = Mean()
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    assert as_eager(model, plain)
    model.one.__class__ = plain.one.__class__ = Fast
    assert as_eager(model, plain)
    assert ebbtide.calls_of(model).planned == 4


def test_a_class_that_does_not_fit_changes_nothing() -> None:
    model = ebbtide.fit(Mean(), "1GiB")
    with pytest.raises(TypeError):
        model.__class__ = 3  # type: ignore[assignment]
    model(X).backward()
    assert ebbtide.calls_of(model).planned == 1


def test_parametrizations_come_and_go() -> None:
    model = Mean()
    plain = copy.deepcopy(model)
    ebbtide.fit(model.one, "1GiB")
    for each in (model, plain):
        torch.nn.utils.parametrizations.weight_norm(each.one)
    assert as_eager(model, plain, 1)
    for each in (model, plain):
        torch.nn.utils.parametrize.remove_parametrizations(each.one, "weight")
    assert as_eager(model, plain, 1)
    assert ebbtide.calls_of(model.one).planned == 2


def traced() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(Mean())


def test_a_graph_module_is_planned() -> None:
    model = traced()
    kind = type(model)
    assert_trains_as_eager(model, lambda: (X,))
    made = copy.deepcopy(model)
    assert not hasattr(type(made), "_ebbtide_plain")
    assert torch.equal(made(X), model(X))
    assert type(ebbtide.unfit(model)) is kind


def test_a_graph_module_is_recompiled_once_it_is_not_fitted() -> None:
    model = traced()
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    assert as_eager(model, plain, 1)
    for each in (model, plain):
        output = each.graph.output_node()
        with each.graph.inserting_before(output):
            output.args = (each.graph.call_function(torch.exp, output.args),)
    with pytest.raises(UsageError, match="cannot be recompiled"):
        model.recompile()
    ebbtide.unfit(model)
    for each in (model, plain):
        each.recompile()
    ebbtide.fit(model, "1GiB")
    assert as_eager(model, plain, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_graph_modules_are_parts_of_what_others_compile() -> None:
    model = nn.Sequential(traced(), nn.Identity())
    plain = copy.deepcopy(model)
    ebbtide.fit(model[0], "1GiB")
    assert as_eager(torch.compile(model, backend="eager"), plain, 1)  # type: ignore[arg-type]
    assert ebbtide.calls_of(model[0]).planned == 1


# -- what goes past the forward ------------------------------------------------------------------------------------


class CallOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean()


class PastForward(CallOnly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


class AroundForward(PastForward):
    def __call__(self, *args: Any) -> Any:
        return nn.Module.__call__(self, *args) * 2


class SwitchesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.layer(x).mean()


def trained(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.set_grad_enabled(not isinstance(model, SwitchesOn)):
        loss = model(X)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("model", [CallOnly, PastForward, SwitchesOn])
def test_what_goes_past_the_plan_is_refused_before_a_weight_changes(model: type[nn.Module]) -> None:
    fitted = ebbtide.fit(model(), "1GiB")
    before = [each.clone() for each in fitted.parameters()]
    with pytest.raises(UsageError, match="Call the model that was fitted with gradients on"):
        trained(fitted)
    assert all(torch.equal(a, b) for a, b in zip(before, fitted.parameters(), strict=True))


def test_a_call_around_the_forward_is_planned() -> None:
    model = ebbtide.fit(AroundForward(), "1GiB")
    trained(model)
    assert ebbtide.calls_of(model).planned == 1


def test_gradients_that_a_forward_switches_on_are_planned_where_they_are_on() -> None:
    assert_trains_as_eager(SwitchesOn(), lambda: (X,))


def test_an_optimizer_of_another_model_is_refused() -> None:
    model = Mean()
    foreign = torch.optim.AdamW(Mean().parameters())
    with pytest.raises(UsageError, match="holds no parameter of this Mean"):
        ebbtide.fit(model, "1GiB", optimizer=foreign)
    ebbtide.fit(model.requires_grad_(False), "1GiB", optimizer=torch.optim.SGD([X.clone().requires_grad_()], 0.1))


T = TypeVar("T")


class WithAbstract(abc.ABC):
    @abc.abstractmethod
    def twice(self) -> int:
        return 2


class Speaks(Protocol):
    def speak(self) -> str: ...


@runtime_checkable
class SpeaksAtRunTime(Protocol):
    def speak(self) -> str: ...


@pytest.mark.parametrize("base", [WithAbstract, Speaks, SpeaksAtRunTime, Generic[T]])
def test_a_class_with_another_metaclass_comes_beside_a_fitted_one(base: Any) -> None:
    model = ebbtide.fit(nn.Linear(4, 4), "1MiB", options=ebbtide.Options(effort=50))
    patched = types.new_class("Patched", (base, type(model)))
    patched.__abstractmethods__ = frozenset()
    made = patched(4, 4)
    assert isinstance(made, nn.Linear)
    made(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(made.bias.grad, model.bias.grad)  # type: ignore[arg-type]
    assert ebbtide.plan_of(model) is not None
    assert not isinstance(nn.Linear(4, 4), type(model))


class Tagging(type):
    """Registers the classes that it makes, with the keyword that it asks for."""

    made: ClassVar[list[tuple[str, str]]] = []

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], *, tag: str) -> Any:
        kind = super().__new__(cls, name, bases, names)
        kind.tag = tag  # type: ignore[attr-defined]
        cls.made.append((name, tag))
        return kind

    def __init__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], *, tag: str) -> None:
        super().__init__(name, bases, names)


class AbstractTagging(Tagging, abc.ABCMeta):
    """The same of abstract classes."""


class Tagged(Mean, metaclass=Tagging, tag="user's"):
    """Made by a metaclass with a keyword."""


class AbstractTagged(Mean, metaclass=AbstractTagging, tag="user's"):
    """Likewise, and may be asked for virtual subclasses."""


class Announced(Mean):
    """Registers the classes that are derived from it."""

    derived: ClassVar[list[str]] = []

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        Announced.derived.append(cls.__name__)


@pytest.mark.parametrize("kind", [Tagged, AbstractTagged])
def test_a_metaclass_of_the_users_makes_the_classes_that_users_write(kind: Any) -> None:
    """It is not asked for the generated one, which it would register, or for which it wants a keyword."""
    Tagging.made.clear()
    model = kind()
    plain = copy.deepcopy(model)
    ebbtide.fit(model, "1GiB")
    assert as_eager(model, plain)
    assert (Tagging.made, model.tag, type(type(model))) == ([], "user's", type(kind))
    derived: Any = types.new_class("Derived", (type(model),), {"tag": "derived"})
    assert (Tagging.made, derived.tag) == ([("Derived", "derived")], "derived")
    derived()(X).backward()
    mixed: Any = types.new_class("Mixed", (type(ebbtide.fit(Mean(), "1GiB")), kind), {"tag": "mixed"})
    assert mixed.tag == "mixed"
    mixed()(X).backward()
    if kind is AbstractTagged:
        type(model).register(int)
        assert issubclass(int, type(model))
        assert not issubclass(int, kind) or issubclass(type(model), kind), "what is virtual of one is no other's"


def test_classes_that_users_derive_from_a_fitted_one_are_announced() -> None:
    Announced.derived.clear()
    model = ebbtide.fit(Announced(), "1GiB")
    assert not Announced.derived
    types.new_class("Derived", (type(model),))
    assert Announced.derived == ["Derived"]
