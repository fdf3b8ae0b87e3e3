"""Models that cannot be planned are refused by name at ``fit`` and ``plan`` themselves, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ebbtide
from ebbtide._api import refusals
from ebbtide.errors import UsageError
from ebbtide.measurement.device import cuda_index_of, on_device_of

X = (torch.ones(2, 4),)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


class AlignDevicesHook:
    """As accelerate's: by its name, with ``offload`` or without."""

    def __init__(self, offload: bool = False) -> None:
        self.offload = offload


class SequentialHook:
    """As accelerate's, which runs others."""

    def __init__(self, *hooks: object) -> None:
        self.hooks = hooks


class LoggingHook:
    offload = False


def hooked(hook: object) -> nn.Module:
    made = model()
    made[2]._hf_hook = hook  # type: ignore[assignment]
    return made


def mapped(**places: object) -> nn.Module:
    made = model()
    made.hf_device_map = places  # type: ignore[assignment]
    return made


def half_on_meta() -> nn.Module:
    made = model()
    made[2].to("meta")
    return made


def with_buffer_elsewhere() -> nn.Module:
    made = model()
    made.register_buffer("table", torch.empty(3, device="meta"))
    return made


BOTH: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "script": (lambda: torch.jit.script(model()), r"the model is a RecursiveScriptModule of torch\.jit"),
    "script inside": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), r"its module 0 is a .* of torch\.jit"),
    "offload": (lambda: hooked(AlignDevicesHook(offload=True)), "its module 2 has a AlignDevicesHook"),
    "hook in sequence": (lambda: hooked(SequentialHook(LoggingHook(), AlignDevicesHook())), "AlignDevicesHook"),
    "any offloading hook": (lambda: hooked(SimpleNamespace(offload=True)), "SimpleNamespace"),
    "device map": (lambda: mapped(a=0, b=1), r"spread .* by its device_map \(module a on 0, module b on 1\)"),
    "disk": (lambda: mapped(a="cpu", b="disk"), "module b on disk"),
    "two devices": (half_on_meta, r"spread .*parameter 0\.weight on cpu, parameter 2\.weight on meta"),
    "buffer elsewhere": (with_buffer_elsewhere, "buffer table on meta"),
}


ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "fit": lambda made: ebbtide.fit(made, "1GiB"),
    "plan": lambda made: ebbtide.plan(made, X, budget="1GiB"),
    "doctor": lambda made: ebbtide.doctor(made, X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_no_step_can_be_planned_for_is_refused(name: str, entry: str) -> None:
    make, words = BOTH[name]
    made = make()
    kind = type(made)
    with pytest.raises(UsageError, match=words) as raised:
        ENTRIES[entry](made)
    assert raised.value.argument == "model"
    assert type(made) is kind, "the model is left as it was"


def test_a_model_without_memory_can_be_planned_and_not_fitted() -> None:
    with pytest.raises(UsageError, match=r"parameter 0\.weight is on the meta device.*to_empty.*ebbtide\.plan"):
        ebbtide.fit(model().to("meta"), "1GiB")
    with FakeTensorMode():
        fake = model()
    with pytest.raises(UsageError, match=r"parameter 0\.weight was made under FakeTensorMode"):
        ebbtide.fit(fake, "1GiB")

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).mean()

    planned = ebbtide.plan(Loss().to("meta"), (X[0].to("meta"),), budget="1GiB", machine="a100-80gb")
    assert planned.program.ops


def test_a_number_on_cpu_is_no_second_device() -> None:
    made = model().to("meta")
    made.register_buffer("count", torch.tensor(0))
    planned = ebbtide.plan(made, (X[0].to("meta"),), budget="1GiB", machine="a100-80gb", loss=torch.mean)
    assert planned.program.ops
    made.register_buffer("count", torch.zeros(1))
    with pytest.raises(UsageError, match="buffer count on cpu"):
        ebbtide.plan(made, (X[0].to("meta"),), budget="1GiB", machine="a100-80gb", loss=torch.mean)


@pytest.mark.parametrize("kind", ["mps", "xla", "privateuseone", "xpu"])
def test_another_device_is_refused_by_name(kind: str) -> None:
    """No such device is here; a parameter that says it is on one is all that is asked for."""
    tensor = SimpleNamespace(device=torch.device(kind))
    with pytest.raises(UsageError, match=rf"parameter w is on {kind}.*plans for cpu and cuda") as raised:
        refusals._refuse_device("parameter w", tensor)  # type: ignore[arg-type]
    assert raised.value.accepted == ("cpu", "cuda")


def test_harmless_hooks_and_one_device_maps_are_fine() -> None:
    for made in (hooked(LoggingHook()), mapped(a="cpu", b="cpu"), model()):
        kind = type(made)
        made = ebbtide.fit(made, "1GiB", options=ebbtide.Options(effort=10))
        assert type(made) is not kind
        made(X[0]).mean().backward()
        assert ebbtide.calls_of(made).planned == 1
        assert type(ebbtide.unfit(made)) is kind


def test_the_device_of_a_model_is_the_current_one_while_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA here: the context is asked for with the model's index, and not at all on CPU."""
    asked: list[int] = []
    entered = object()

    class Device:
        def __init__(self, index: int) -> None:
            asked.append(index)

        def __enter__(self) -> object:
            return entered

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(
        "ebbtide.measurement.device.tensors_in",
        lambda _: iter([SimpleNamespace(device=torch.device("cuda", 1))]),
    )
    with on_device_of([model()]) as context:
        assert context is entered
    assert asked == [1]
    monkeypatch.undo()
    assert cuda_index_of([model()]) is None
    with on_device_of([model()]):
        pass


class Registering(nn.Linear):
    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str) -> None:
        cls.known.append(key)


class Final(type):
    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        if any(isinstance(each, Final) for each in bases):
            raise TypeError("final")
        return super().__new__(cls, name, bases, names)


class Ending(nn.Linear, metaclass=Final):
    pass


def test_classes_that_look_at_their_subclasses() -> None:
    model = ebbtide.fit(Registering(4, 4), "1MiB", options=ebbtide.Options(effort=20))
    model(torch.randn(2, 4)).sum().backward()
    assert Registering.known == []
    ended = ebbtide.fit(Ending(4, 4), "1MiB", options=ebbtide.Options(effort=20))
    ended(torch.randn(2, 4)).sum().backward()
    assert ended.weight.grad is not None


def test_a_lazy_model_is_refused_before_its_first_batch() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(UsageError, match="before the first batch"):
        ebbtide.fit(lazy, "1MiB")
    lazy(torch.randn(2, 3))
    ebbtide.fit(lazy, "1MiB", options=ebbtide.Options(effort=20))(torch.randn(2, 3)).sum().backward()
