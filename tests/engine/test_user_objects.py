"""Objects of other people's classes that forbid to be looked into train all the same: no line of theirs is run."""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine.key import key_of
from ebbtide.measurement.resident import resident_bytes, tensors_in
from ebbtide.torch_seams.storages import walk
from ebbtide.user_objects import attributes_of, builtin_of, declares, elements_of, is_a

METHODS = ["len", "iter", "eq", "ne", "lt", "bool", "repr", "str", "contains", "getitem", "reversed", "getattr"]


class Forbidden(Exception):
    """Somebody has run a method of a user's."""


def forbid(*_args: Any, **_kwargs: Any) -> Any:
    raise Forbidden


def forbidding(base: type, *but: str) -> Any:
    """A class derived from ``base`` of which every method of the list raises."""
    names: dict[str, Any] = {f"__{name}__": forbid for name in METHODS if name not in but}
    names |= dict.fromkeys(("items", "values", "keys", "get", "copy"), forbid)
    return type(f"Forbidding{base.__name__.title()}", (base,), {**names, "__hash__": base.__hash__})


class Pretending(forbidding(object)):
    __class__ = property(forbid)  # type: ignore[assignment]
    __array_interface__ = property(forbid)


class Unhashable(type):
    """A metaclass with ``==`` and so without a hash."""

    def __eq__(cls, other: object) -> bool:
        raise Forbidden

    __repr__ = forbid


class OfUnhashable(metaclass=Unhashable):
    pass


@dataclasses.dataclass(slots=True, eq=False)
class Slotted:
    table: torch.Tensor


class Lazy(Mapping[str, Any]):
    """A mapping that loads from a disk what it is asked for."""

    __getitem__ = __len__ = __iter__ = values = items = keys = __eq__ = forbid  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __init__(self) -> None:
        self.cached = {"x": torch.zeros(7)}


MAKERS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: forbidding(tuple)((1, torch.zeros(7))),
    "list": lambda: forbidding(list)([torch.zeros(7)]),
    "dict": lambda: forbidding(dict, "getattr")(x=torch.zeros(7)),
    "ordered": lambda: forbidding(OrderedDict, "getattr")(),
    "deque": lambda: forbidding(deque, "getattr")([torch.zeros(7)]),
    "set": lambda: forbidding(set)([1]),
    "int": lambda: forbidding(int)(3),
    "float": lambda: forbidding(float)(3.0),
    "str": lambda: forbidding(str)("text"),
    "object": lambda: forbidding(object)(),
    "mapping": Lazy,
    "metaclass": OfUnhashable,
    "slots": lambda: Slotted(torch.zeros(7)),
}
HOLDING = {"tuple", "list", "dict", "deque", "mapping", "slots"}


class Model(nn.Module):
    def __init__(self, held: object = None) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        object.__setattr__(self, "held", held)  # torch's own asks for a class
        self.more = [[held], {"x": held}]

    def forward(self, x: torch.Tensor, _options: object = None) -> torch.Tensor:
        return self.layer(x).square().sum()


def trained(model: nn.Module, *args: object) -> torch.Tensor:
    model(torch.ones(5, 8), *args).backward()
    return next(model.parameters()).grad  # type: ignore[return-value]


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_that_holds_one_is_planned_and_what_it_holds_counts(name: str) -> None:
    model = ebbtide.fit(Model(MAKERS[name]()), "1MiB", options=ebbtide.Options(effort=50))
    trained(model)
    assert ebbtide.plan_of(model) is not None
    assert sum(walk(model)[2].values()) == resident_bytes([model]) == 2 * (64 + 8) * 4 + (28 if name in HOLDING else 0)


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"metaclass"}))
def test_a_call_with_one_is_planned(name: str) -> None:
    model = ebbtide.fit(Model(), "1MiB", options=ebbtide.Options(effort=50))
    made = MAKERS[name]
    trained(model, made())
    trained(model, {"options": [made()]})
    assert ebbtide.plan_of(model) is not None


@pytest.mark.filterwarnings("ignore:what SGD takes while it steps cannot be found out")  # true of some of them
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_with_one_steps(name: str) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.held = optimizer.param_groups[0]["held"] = MAKERS[name]()  # type: ignore[attr-defined]
    ebbtide.fit(model, "1MiB", optimizer=optimizer, options=ebbtide.Options(effort=50))
    for _ in range(2):
        optimizer.zero_grad()
        trained(model)
        optimizer.step()
    assert ebbtide.plan_of(model) is not None


class Unequal(Model):
    """Equal to nothing, itself included."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        return False


class NoTruth(Model):
    __hash__ = nn.Module.__hash__
    __eq__ = __bool__ = __len__ = __iter__ = forbid  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Unequal, NoTruth])
def test_a_fitted_model_is_known_whatever_it_equals(kind: type[Model]) -> None:
    model = ebbtide.fit(kind(), "1MiB", options=ebbtide.Options(effort=50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model)
    optimizer.step()
    assert ebbtide.plan_of(model) is not None


class Irrep(tuple[Any, ...]):
    """One of a list of pairs, as e3nn has them."""

    def __len__(self) -> int:
        raise NotImplementedError


class Equivariant(Model):
    def forward(self, x: torch.Tensor, _options: object = None) -> torch.Tensor:
        total, first = x.sum() * 0, 0
        for count, width in self.held:  # type: ignore[attr-defined]
            total = total + (self.layer(x)[:, first : first + count * width].square().sum())
            first += count * width
        return total


def test_a_forward_may_read_what_forbids_its_length_and_is_captured_again_when_that_changes() -> None:
    held = [Irrep((2, 1)), Irrep((1, 3))]
    model = ebbtide.fit(Equivariant(held), "1MiB", options=ebbtide.Options(effort=50))
    eager = Equivariant(held)
    eager.load_state_dict(model.state_dict())
    for _ in range(2):
        assert torch.equal(trained(model), trained(eager))
    held[1] = Irrep((1, 2))
    assert torch.equal(trained(model), trained(eager))
    held.pop()
    assert torch.equal(trained(model), trained(eager))


class Returning(Model):
    def forward(self, x: torch.Tensor, _options: object = None) -> Any:
        return self.layer(x).square().sum(), self.held


class Mine(tuple[Any, ...]):
    pass


@pytest.mark.parametrize("make", [lambda: Mine((1, 2)), lambda: Irrep((1, 2)), MAKERS["object"], Lazy])
def test_one_that_a_forward_returns_stays_what_it_is(make: Callable[[], Any]) -> None:
    held = make()
    model = ebbtide.fit(Returning(held), "1MiB", options=ebbtide.Options(effort=50))
    loss, returned = model(torch.ones(5, 8))
    loss.backward()
    assert type(returned) is type(held)


def test_containers_are_read_by_the_class_that_they_derive_from() -> None:
    one = torch.zeros(1)
    weak = weakref.WeakValueDictionary({"x": one})
    for value in (forbidding(list)([one]), forbidding(tuple)([one]), forbidding(dict)(x=one), weak):
        found = elements_of(value)
        assert found is not None
        assert found[0] == 1
        assert next(found[1]) is one
    assert elements_of(Lazy()) is None
    assert [*tensors_in(MappingProxyType({"x": [UserDict(x=one)]}))] == [one]
    assert [*tensors_in([Pretending(), one])] == [one]
    around: list[Any] = [one]
    around.append(around)
    assert [*tensors_in(around)] == [one]


def test_attributes_and_values_are_read_without_asking() -> None:
    assert [*attributes_of(Slotted(torch.zeros(1)))] == ["table"]
    assert attributes_of(Pretending()) == {}
    assert key_of((), (Pretending(),), {}) == key_of((), (Pretending(),), {})
    assert [*attributes_of(Lazy())] == ["cached"]
    assert declares(Slotted, "__dataclass_fields__")
    assert not is_a(Pretending(), torch.Tensor)
    for base in (int, float, str):
        assert type(builtin_of(forbidding(base)("3"))) is base
    assert builtin_of(True) is True
    assert builtin_of(object()) is None


def test_keys_tell_apart_what_forbids_to_be_asked() -> None:
    kinds = [forbidding(int), forbidding(str)]
    for kind in kinds:
        keys = {key_of((), (kind(text),), {}) for text in ("3", "3", "4")}
        assert len(keys) == 2
