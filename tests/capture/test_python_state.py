"""A step that reads Python's objects is another step once they have changed, whatever of them was read.

Each case reads something and changes it between calls: what is captured has to give what eager gives, or to be refused.
"""

from __future__ import annotations

import abc
import collections
import copy
import dataclasses
import enum
import functools
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import InternalTorchDynamoError, Unsupported

import ebbtide
from ebbtide.errors import CaptureError, InternalError
from ebbtide.planners import Progress
from ebbtide.torch_seams import dynamo, guard_makers
from ebbtide.torch_seams.tracing import corrected_tracing

Read = Callable[[Tensor], Tensor]
Change = Callable[[int], object]
CASES: dict[str, Callable[[], tuple[Read, Change]]] = {}


class Object:
    """Has what it is given."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


def case(make: Callable[[], tuple[Read, Change]]) -> Callable[[], tuple[Read, Change]]:
    """``make`` gives what the step reads, and what changes it before a call."""
    CASES[make.__name__] = make
    return make


def of(
    name: str, made: Callable[[], Any], read: Callable[[Tensor, Any], Tensor], change: Callable[[Any, int], object]
) -> None:
    """A case with one object, which the step finds in a closure."""

    def make() -> tuple[Read, Change]:
        it = made()
        return lambda x: read(x, it), lambda turn: change(it, turn)

    CASES[name] = make


class Letters(enum.Enum):
    A, B = 1.0, 2.0


class Ordered(collections.OrderedDict[str, float]):
    pass


class Defaulting(dict[str, float]):
    def __missing__(self, key: str) -> float:
        return self.default  # type: ignore[attr-defined, no-any-return]


def defaulting() -> Defaulting:
    made = Defaulting()
    made.default = 1.0  # type: ignore[attr-defined]
    return made


def first_last(d: Any) -> None:
    d.move_to_end(next(iter(d)))


def three() -> collections.OrderedDict[str, float]:
    return collections.OrderedDict(a=1.0, b=2.0, c=3.0)


# -- the order of keys
of("values of an ordered dictionary", three, lambda x, d: x * next(iter(d.values())), lambda d, _: first_last(d))
of("keys of an ordered dictionary", three, lambda x, d: x * d[list(d)[1]], lambda d, _: first_last(d))
of("items of an ordered dictionary", three, lambda x, d: x * next(iter(d.items()))[1], lambda d, _: first_last(d))
of("loop", three, lambda x, d: functools.reduce(lambda y, key: y * d[key] + 1, d, x), lambda d, _: first_last(d))
of(
    "values of a class of its own",
    lambda: Ordered(a=1.0, b=2.0),
    lambda x, d: x * list(d.values())[1],
    lambda d, _: first_last(d),
)
of(
    "another dictionary with the keys",
    lambda: Object(d={"a": 1, "bb": 1}),
    lambda x, o: x * len(list(o.d)[1]),
    lambda o, turn: setattr(o, "d", {"bb": 1, "a": 1} if turn % 2 else {"a": 1, "bb": 1}),
)
of(
    "a key put last",
    lambda: {"a": 1.0, "b": 2.0},
    lambda x, d: x * next(iter(d.values())),
    lambda d, _: d.update({(key := next(iter(d))): d.pop(key)}),
)
of(
    "members of a dictionary of modules",
    lambda: nn.Sequential(nn.Tanh(), nn.Softplus()),
    lambda x, m: m(x),
    lambda m, turn: m._modules.update({(key := str(turn % 2)): m._modules.pop(key)}),
)

# -- what was not there
of(
    "attribute of a function",
    lambda: types.FunctionType((lambda x: x).__code__, {}),
    lambda x, f: x * getattr(f, "scale", 1.0),
    lambda f, turn: setattr(f, "scale", 1.0 + turn),
)
of(
    "whether a function has one",
    lambda: types.FunctionType((lambda x: x).__code__, {}),
    lambda x, f: x * (2 if hasattr(f, "scale") else 1),
    lambda f, turn: setattr(f, "scale", 1) if turn == 3 else None,
)
of(
    "attribute of a module of Python",
    lambda: types.ModuleType("anything"),
    lambda x, m: x * getattr(m, "scale", 1.0),
    lambda m, turn: setattr(m, "scale", 1.0 + turn),
)
of(
    "whether a module of Python has one",
    lambda: types.ModuleType("anything"),
    lambda x, m: x * (2 if hasattr(m, "scale") else 1),
    lambda m, turn: setattr(m, "scale", 1) if turn == 3 else None,
)


@case
def attribute_of_a_method() -> tuple[Read, Change]:
    class Scaled:
        def scaled(self, x: Tensor) -> Tensor:
            return x * getattr(Scaled.scaled, "scale", 1.0)

    it = Scaled()
    return lambda x: it.scaled(x), lambda turn: setattr(Scaled.scaled, "scale", 1.0 + turn)


def lookup(x: Tensor, d: dict[str, float]) -> Tensor:
    try:
        return x * d["scale"]
    except KeyError:
        return x


of("a missing key", dict, lookup, lambda d, turn: d.update(scale=2.0) if turn == 3 else None)
of("a default", defaulting, lambda x, d: x * d["scale"], lambda d, turn: setattr(d, "default", 1.0 + turn))
of("a key with a default", defaulting, lambda x, d: x * d["scale"], lambda d, turn: d.update(scale=1.0 + turn))


@case
def environment_variable() -> tuple[Read, Change]:
    os.environ.pop("EBBTIDE_TEST_STATE", None)

    def change(turn: int) -> None:
        if turn == 4:
            del os.environ["EBBTIDE_TEST_STATE"]
        elif turn > 1:
            os.environ["EBBTIDE_TEST_STATE"] = str(turn)

    return lambda x: x * float(os.environ.get("EBBTIDE_TEST_STATE", "1")), change


@case
def environment_variable_by_function() -> tuple[Read, Change]:
    _, change = environment_variable()
    return lambda x: x * float(os.getenv("EBBTIDE_TEST_STATE", "1")), change


# -- attributes as a dictionary
of("how many attributes", Object, lambda x, o: x * (1 + len(vars(o))), lambda o, turn: setattr(o, f"a{turn}", 1))
of("attributes", lambda: Object(a=1), lambda x, o: x * sum(vars(o).values()), lambda o, turn: setattr(o, f"a{turn}", 1))
of(
    "an attribute by name",
    Object,
    lambda x, o: x * vars(o).get("a3", 1),
    lambda o, turn: setattr(o, f"a{turn}", 2.0),
)
of(
    "whether an attribute is there",
    Object,
    lambda x, o: x * (2 if "a3" in o.__dict__ else 1),
    lambda o, turn: setattr(o, f"a{turn}", 2.0),
)
of(
    "a copy of attributes",
    Object,
    lambda x, o: x * (1 + len(vars(o).copy())),
    lambda o, turn: setattr(o, f"a{turn}", 1),
)


# -- classes
@case
def attribute_of_a_base() -> tuple[Read, Change]:
    class Base:
        scale = 1.0

    class Derived(Base):
        pass

    it = Derived()
    return lambda x: x * it.scale, lambda turn: setattr(Derived, "scale", 1.0 + turn) if turn > 2 else None


@case
def method_of_a_base() -> tuple[Read, Change]:
    class Base:
        def scale(self) -> float:
            return 1.0

    class Derived(Base):
        pass

    it = Derived()
    return lambda x: x * it.scale(), lambda turn: setattr(Derived, "scale", lambda _: 2.0) if turn == 3 else None


@case
def forward_of_a_base() -> tuple[Read, Change]:
    class Derived(nn.Tanh):
        pass

    it = Derived()
    return lambda x: it(x), lambda turn: setattr(Derived, "forward", lambda _, x: x * 3) if turn == 3 else None


class Scaled:
    """A helper that is no module."""

    def scale(self) -> float:
        return 1.0

    def __add__(self, other: float) -> float:
        return 1.0 + other


@case
def method_of_a_helper() -> tuple[Read, Change]:
    helper = type("Helper", (Scaled,), {"scale": lambda _: 1.0})
    it = helper()
    return lambda x: x * it.scale(), lambda turn: setattr(helper, "scale", lambda _: 2.0) if turn == 3 else None


@case
def operator_of_a_helper() -> tuple[Read, Change]:
    helper = type("Helper", (Scaled,), {"__add__": lambda _, other: 1.0 + other})
    it = helper()
    return lambda x: x * (it + 1), lambda turn: setattr(helper, "__add__", lambda *_: 9.0) if turn == 3 else None


@case
def code_of_a_function() -> tuple[Read, Change]:
    """As reloading gives it another one."""

    def scale(x: Tensor) -> Tensor:
        return x * 1

    def other(x: Tensor) -> Tensor:
        return x * 2

    scale = types.FunctionType(scale.__code__.replace(), globals())
    return lambda x: scale(x), lambda turn: setattr(scale, "__code__", other.__code__) if turn == 3 else None


@case
def a_global_that_hides_a_builtin() -> tuple[Read, Change]:
    names: dict[str, Any] = {}
    exec("def scale(x):\n    return x * max(1, 2)", names)
    return lambda x: names["scale"](x), lambda turn: names.update(max=lambda *_: turn) if turn > 2 else None


@case
def attribute_of_a_partial() -> tuple[Read, Change]:
    it = functools.partial(torch.mul, torch.ones(()))
    return lambda x: it(x) * getattr(it, "scale", 1.0), lambda turn: setattr(it, "scale", 1.0 + turn)


@case
def class_of_an_object() -> tuple[Read, Change]:
    class One:
        scale = 1.0

    class Two:
        scale = 2.0

    it = One()
    return lambda x: x * it.scale, lambda turn: setattr(it, "__class__", Two) if turn == 3 else None


@case
def registered_class() -> tuple[Read, Change]:
    class Register(abc.ABC):  # noqa: B024
        pass

    class One:
        pass

    it = One()
    return lambda x: x * (2 if isinstance(it, Register) else 1), lambda turn: turn == 3 and Register.register(One)


# -- identity
of(
    "whether two are equal",
    lambda: Object(a=Object(), b=Object()),
    lambda x, o: x * (2 if o.a == o.b else 1),
    lambda o, turn: setattr(o, "b", o.a if turn % 2 else Object()),
)

for kind in (Object, list, dict):
    of(
        f"whether two of {kind.__name__} are one",
        lambda kind=kind: Object(a=kind(), b=kind()),  # type: ignore[misc]
        lambda x, o: x * (2 if o.a is o.b else 1),
        lambda o, turn: setattr(o, "b", o.a if turn % 2 else type(o.a)()),
    )
of(
    "which class",
    lambda: Object(a=Scaled),
    lambda x, o: x * (2 if o.a is Scaled else 1),
    lambda o, turn: setattr(o, "a", Scaled if turn % 2 else Object),
)
of(
    "whether two parameters are one",
    lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    lambda x, m: x * (2 if m[0].weight is m[1].weight else 1),
    lambda m, turn: setattr(m[0], "weight", m[1].weight if turn == 3 else nn.Parameter(torch.ones(2, 2))),
)


def attribute(x: Tensor, o: Any) -> Tensor:
    try:
        return x * o.scale
    except AttributeError:
        return x


of(
    "an attribute whose lookup raises",
    Object,
    attribute,
    lambda o, turn: setattr(o, "scale", 2.0) if turn > 2 else None,
)
of(
    "one of a module",
    lambda: nn.Linear(2, 2),
    attribute,
    lambda o, turn: setattr(o, "scale", 2.0) if turn > 2 else None,
)

# -- single values
of(
    "the sign of a zero",
    lambda: Object(a=0.0),
    lambda x, o: x * (2 if str(o.a)[0] == "-" else 1),
    lambda o, turn: setattr(o, "a", -0.0 if turn % 2 else 0.0),
)
of(
    "maxlen",
    lambda: Object(a=collections.deque([1.0])),
    lambda x, o: x * (o.a.maxlen or 1),
    lambda o, turn: setattr(o, "a", collections.deque([1.0], maxlen=1 + turn)),
)

# -- what Dynamo guards itself
of("number", lambda: Object(a=1.0), lambda x, o: x * o.a, lambda o, turn: setattr(o, "a", 1.0 + turn))
of(
    "type of a number",
    lambda: Object(a=1),
    lambda x, o: x * (2 if type(o.a) is bool else 1),
    lambda o, turn: setattr(o, "a", [1, True, 1.0][turn % 3]),
)
of(
    "nested",
    lambda: Object(a=[{"k": [1.0]}]),
    lambda x, o: x * o.a[0]["k"][0],
    lambda o, turn: o.a[0]["k"].insert(0, turn),
)
of("length", lambda: [1.0], lambda x, o: x * len(o), lambda o, _: o.append(1.0))
of("member of a set", lambda: {1}, lambda x, o: x * (2 if 3 in o else 1), lambda o, turn: o.add(turn))
of("counter", lambda: collections.Counter("a"), lambda x, o: x * o["a"], lambda o, _: o.update("a"))
of("bounded", lambda: collections.deque([1.0, 2.0], 2), lambda x, o: x * o[0], lambda o, turn: o.append(float(turn)))
of("attribute or none", Object, lambda x, o: x * getattr(o, "a", 1.0), lambda o, turn: setattr(o, "a", 1.0 + turn))
of("array", lambda: np.array([1.0]), lambda x, o: x * float(o[0]), lambda o, turn: o.__setitem__(0, 1.0 + turn))
of(
    "enumeration",
    lambda: Object(a=Letters.A),
    lambda x, o: x * o.a.value,
    lambda o, turn: setattr(o, "a", list(Letters)[turn % 2]),
)
of(
    "weak reference",
    lambda: (lambda it: Object(strong=[it], weak=weakref.ref(it)))(Object()),
    lambda x, o: x * (1 if o.weak() is None else 2),
    lambda o, turn: o.strong.clear() if turn == 3 else None,
)


@dataclasses.dataclass
class Settings:
    scale: float = 1.0


of(
    "dataclass",
    Settings,
    lambda x, o: x * dataclasses.asdict(o)["scale"],
    lambda o, turn: setattr(o, "scale", 1.0 + turn),
)
of("copy", lambda: Object(a=1.0), lambda x, o: x * copy.copy(o).a, lambda o, turn: setattr(o, "a", 1.0 + turn))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBTIDE_TEST_STATE", "1")  # what it was before is put back


@pytest.mark.parametrize("name", CASES)
def test_a_capture_is_of_what_it_read(name: str) -> None:
    x = torch.tensor([-1.5, 2.5])
    read, change = CASES[name]()
    expected = [(change(turn), read(x))[1] for turn in range(6)]
    read, change = CASES[name]()
    with corrected_tracing():
        step = torch.compile(lambda x: read(x), backend="eager", fullgraph=True, dynamic=False)
        try:
            found = [(change(turn), step(x))[1] for turn in range(6)]
        except (Unsupported, InternalTorchDynamoError):
            if torch.__version__ >= "2.13":
                raise
            pytest.skip("this torch traces no such read, and the call is refused")
    dynamo.forget_compiled(step)
    assert all(map(torch.equal, expected, found))
    assert any(not torch.equal(expected[0], each) for each in expected), "the case changes nothing"


class Model(nn.Module):
    """Its step reads what a case has."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer(x)).square().mean()


@pytest.mark.parametrize(
    "name", ["values of an ordered dictionary", "attribute of a function", "method_of_a_base", "an attribute by name"]
)
def test_a_fitted_model_trains_as_what_it_reads_says(name: str) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    losses: list[list[float]] = []
    for fitted in (False, True):
        torch.manual_seed(1)
        read, change = CASES[name]()
        model = Model(read)
        if fitted:
            ebbtide.fit(model, "100%", progress=None)
        losses.append([])
        for turn in range(6):
            change(turn)
            loss = model(x)
            loss.backward()
            losses[-1].append(loss.item())
        gradient = model.layer.weight.grad
        assert gradient is not None
        losses[-1].append(gradient.sum().item())
    assert losses[0] == losses[1]


def test_a_number_to_be_read_is_refused_and_not_blamed_on_the_model() -> None:
    class Reading(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sum() * self.weight.detach()[0].tolist()[0]

    model = ebbtide.fit(Reading(4, 4), "100%", progress=None)
    with pytest.raises(CaptureError, match="tolist"):
        model(torch.ones(2, 4))


def test_a_weak_dictionary_in_a_model_is_looked_into() -> None:
    model = nn.Linear(4, 4)
    vars(model)["seen"] = weakref.WeakValueDictionary({"one": Object()})
    ebbtide.fit(model, "100%", progress=None, options=ebbtide.Options(gradients="all"))
    model(torch.ones(2, 4)).sum().backward()
    assert ebbtide.calls_of(model).planned == 1


def test_a_counter_of_writes_is_refused() -> None:
    class Versioned(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sum() * (1 + self.weight._version)

    model = ebbtide.fit(Versioned(4, 4), "100%", progress=None)
    with pytest.raises(CaptureError, match="_version"):
        model(torch.ones(2, 4))


def test_a_read_that_cannot_be_asked_again_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never taken to stay as it is."""

    def nowhere(name: str, in_globals: Any) -> Any:
        raise NameError(name)

    monkeypatch.setattr(guard_makers, "finder", lambda *_: lambda in_locals: nowhere("", in_locals))

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scales = {"one": 1.0, "two": 2.0}

        def forward(self, input: Tensor) -> Tensor:
            scaled = super().forward(input).sum()
            for scale in self.scales.values():
                scaled = scaled * scale
            return scaled

    with pytest.raises(InternalError, match="cannot be asked again later: keys in this order") as caught:
        ebbtide.fit(Scaled(), "100%", progress=None)(torch.ones(2, 4))
    assert str(caught.value).count("This is a fault in Ebbtide") == 1


def test_what_changes_beside_what_is_read_makes_no_other_step() -> None:

    class Noted(nn.Module):
        seen = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.notes = nn.Linear(4, 4), collections.OrderedDict(scale=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.notes["scale"]).square().mean()

    said: list[Progress] = []
    model = ebbtide.fit(Noted(), "100%", progress=said.append)
    for turn in range(4):
        model(torch.randn(8, 4)).backward()
        model.notes[f"note {turn}"] = 1.0
        vars(model)["extra"] = turn
        Noted.seen += 1
        copy.deepcopy(Noted())  # which leaves something in the class
        assert not Noted.__annotations__
    assert ebbtide.calls_of(model).planned == 4
    assert sum(each.stage.startswith("capturing") for each in said) == 1
