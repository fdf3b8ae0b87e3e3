"""Whoever calls a fitted model and however: the call is planned, or refused by name, with eager's bits."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.engine.calls import Calls
from ebbtide.errors import UsageError
from ebbtide.torch_seams.patches import open_patches


class Net(nn.Module):
    """A loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.rest = nn.Sequential(nn.GELU(), nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x)).square().mean()


X = torch.randn(64, 16)

Change = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]


def _patched_before(model: nn.Module) -> Any:
    original = model.forward
    model.forward = types.MethodType(lambda self, x: original(x) * 2, model)
    return lambda: model


def _patched_by_partial(model: nn.Module) -> Any:
    """As accelerate's ``add_hook_to_module``."""
    old = model.forward

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) * 3

    model.forward = functools.update_wrapper(functools.partial(new_forward, model), old)
    return lambda: model


def _prepared(model: nn.Module) -> Any:
    """As accelerate's ``prepare_model`` under mixed precision."""

    class ToFloat:
        def __init__(self, function: Any) -> None:
            self.function = function
            functools.update_wrapper(self, function)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*args, **kwargs).float()

    context = torch.autocast("cpu", dtype=torch.bfloat16)
    assert "__func__" in dir(model.forward)
    model.forward = types.MethodType(context(model.forward.__func__), model)
    model.forward = types.MethodType(ToFloat(model.forward.__func__), model)
    return lambda: model


def _replaced(model: nn.Module) -> Any:
    """A patch that does not call what it replaces."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.rest[1](self.first(x)).square().mean() + self.rest(self.first(x)).mean()

    model.forward = types.MethodType(forward, model)
    return lambda: model


def _compiled(model: nn.Module) -> Any:
    compiled = []
    return lambda: (
        compiled[0] if compiled else compiled.append(torch.compile(model, backend="aot_eager")) or compiled[0]
    )


def _compiled_around(model: nn.Module) -> Any:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.sin()) * 2

    outer = torch.compile(Outer(), backend="aot_eager")
    return lambda: outer


def _compiled_in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return lambda: model


def _method(model: nn.Module) -> Any:
    return lambda: lambda x: type(model).forward(model, x)


CHANGES: dict[str, Change] = {
    "a method put on the model": _patched_before,
    "a partial put on the model": _patched_by_partial,
    "accelerate's prepare": _prepared,
    "a patch that replaces": _replaced,
    "torch.compile": _compiled,
    "torch.compile around": _compiled_around,
    "model.compile": _compiled_in_place,
    "the class's forward": _method,
}


def _losses(model: nn.Module, call: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call()(X)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of what it compiles for the user
@pytest.mark.parametrize("fit_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_call_is_planned(change: str, fit_first: bool) -> None:
    torch.manual_seed(1)
    model = Net()
    plain = copy.deepcopy(model)
    expected = _losses(plain, CHANGES[change](plain))
    if fit_first:
        ebbtide.fit(model, "100%", options=ebbtide.Options(effort=10))
        call = CHANGES[change](model)
    else:
        call = CHANGES[change](model)
        ebbtide.fit(model, "100%", options=ebbtide.Options(effort=10))
    assert all(torch.equal(a, b) for a, b in zip(_losses(model, call), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert ebbtide.calls_of(model).planned == 3
    assert not ebbtide.calls_of(model).unplanned


def test_a_forward_that_is_put_on_later_or_taken_off_is_heeded() -> None:
    model = ebbtide.fit(Net().eval(), "100%", options=ebbtide.Options(effort=10))
    first = model(X).detach()
    original = model.forward
    model.forward = types.MethodType(lambda self, x: original(x) * 2, model)
    assert torch.equal(model(X).detach(), first * 2)
    model.forward = types.MethodType(lambda self, x: original(x) * 4, model)
    assert torch.equal(model(X).detach(), first * 4)
    del model.forward
    assert torch.equal(model(X).detach(), first)
    with pytest.raises(AttributeError):
        del model.forward
    assert ebbtide.calls_of(model).planned == 4
    model.forward = types.MethodType(lambda self, x: original(x) * 2, model)
    ebbtide.unfit(model)
    assert torch.equal(model(X).detach(), first * 2)
    with torch.no_grad():
        assert torch.equal(model(X), first * 2)


def test_calls_that_train_nothing_are_counted_apart() -> None:
    model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
    with torch.no_grad():
        model(X)
    model(X).backward()
    calls = ebbtide.calls_of(model)
    assert calls.planned == 1
    assert list(calls.unplanned.values()) == [1]
    assert "no gradients" in next(iter(calls.unplanned))
    with pytest.raises(UsageError, match="not fitted"):
        ebbtide.calls_of(Net())


def test_a_compiled_function_in_one_graph_says_what_stands_in_the_way() -> None:
    model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
    with pytest.raises(Exception, match="Ebbtide plans this model's training calls"):
        torch.compile(lambda x: model(x) * 2, backend="aot_eager", fullgraph=True)(X)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_the_model_as_it_is_written(strict: bool) -> None:
    model = ebbtide.fit(Net().eval(), "100%", options=ebbtide.Options(effort=10))
    exported = torch.export.export(model, (X,), strict=strict)
    torch.testing.assert_close(exported.module()(X), model(X))


def test_a_trainer_that_goes_past_the_model_is_refused_before_a_weight_changes() -> None:
    class Module(Net):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.rest(self.first(batch)).square().mean()

        def other_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self(batch)

    model = ebbtide.fit(Module(), "100%", options=ebbtide.Options(effort=10))
    model.training_step(X).backward()
    with pytest.raises(UsageError, match="such as a training_step"):
        torch.optim.SGD(model.parameters(), 0.1).step()
    with torch.no_grad():
        model.training_step(X)
    ebbtide.unfit(model)
    ebbtide.fit(model.rest, "100%", options=ebbtide.Options(effort=10))
    model.training_step(X).backward()
    assert ebbtide.calls_of(model.rest).planned == 1


@pytest.mark.parametrize("by_closure", [False, True])
def test_weights_are_not_changed_by_gradients_of_no_planned_call(by_closure: bool) -> None:
    model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.rest(model.first(X)).mean()
        loss.backward()
        return loss

    def step() -> None:
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    with pytest.raises(UsageError, match="no planned call"):
        step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(UsageError, match="no planned call"):
        optimizer.step()
    optimizer.zero_grad()
    model(X).backward()
    optimizer.step()
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(UsageError, match="no planned call"):
        step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert ebbtide.calls_of(model).unplanned == {"optimizer steps on gradients of no planned call": 3}


def test_gradients_from_before_fit_are_the_users() -> None:
    model = Net()
    model(X).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ebbtide.fit(model, "100%", options=ebbtide.Options(effort=10))
    optimizer.step()
    optimizer.zero_grad()
    model.rest(model.first(X)).mean().backward()
    with pytest.raises(UsageError, match="no planned call"):
        optimizer.step()


def test_a_model_that_is_fitted_again_is_counted_anew(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x = Net(), X
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        ebbtide.fit(model, "100%", optimizer=optimizer)
        model(x).backward()
        optimizer.step()
        assert ebbtide.calls_of(model) == Calls(planned=1)
        ebbtide.unfit(model)
        optimizer.zero_grad()
        model(x).backward()
    ebbtide.fit(model, "100%", optimizer=optimizer)
    optimizer.step()  # gradients from before
    assert not recwarn.list


def test_ordinary_optimizer_loops_are_left_alone(recwarn: pytest.WarningsRecorder) -> None:
    first, second = (ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10)) for _ in range(2))
    other = nn.Linear(16, 1)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    per_layer = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first.first, first.rest)]
    lbfgs = torch.optim.LBFGS(second.parameters(), max_iter=3)
    unrelated = torch.optim.SGD(other.parameters(), lr=0.1)
    for model in (first, second, first):
        both.zero_grad(set_to_none=False)
        model(X).backward()
        both.step()
        for each in per_layer:
            each.step()
        other(X).mean().backward()
        unrelated.step()

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = second(X)
        loss.backward()
        return loss

    lbfgs.step(closure)
    assert not [each for each in recwarn.list if "planned call" in str(each.message)]
    assert not ebbtide.calls_of(first).unplanned
    assert not ebbtide.calls_of(second).unplanned


def test_somebody_elses_compilations_are_theirs() -> None:
    """Another thread compiles while this one trains: neither disturbs the other."""
    import threading

    model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
    model(X).backward()
    failed: list[BaseException] = []
    done = threading.Event()

    def compile_on() -> None:
        try:
            for width in range(2, 5):
                compiled = torch.compile(lambda x, w=width: (x * w).sin().sum(), backend="aot_eager")
                compiled(torch.randn(width))
        except BaseException as error:  # what a thread raises is lost
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=compile_on)
    thread.start()
    steps = 1
    while not done.is_set() or steps < 20:
        model(X).backward()
        steps += 1
    thread.join()
    assert not failed
    assert ebbtide.calls_of(model).planned == steps
    assert not ebbtide.calls_of(model).unplanned


def test_a_users_stance_is_for_the_users_own() -> None:
    with torch.compiler.set_stance("force_eager"):
        model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
        for _ in range(2):
            model(X).backward()
    assert ebbtide.calls_of(model).planned == 2
    compiled = torch.compile(lambda x: x.sin(), backend="aot_eager")
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        compiled(X)


def test_nothing_is_left_of_models_that_are_gone() -> None:
    import gc

    before = None
    for _ in range(2):  # what is there for all fitted models, such as a look at batches, may stay until it next looks
        model = ebbtide.fit(Net(), "100%", options=ebbtide.Options(effort=10))
        model(X).backward()
        del model
        gc.collect()
        before = open_patches(lasting=True) if before is None else before
    assert open_patches(lasting=True) <= before
    assert open_patches() == 0


def test_a_fitted_part_of_a_fitted_model_is_planned_with_it() -> None:
    inner = ebbtide.fit(nn.Sequential(nn.Linear(4, 4), nn.GELU()), "1MiB", progress=None)
    outer = ebbtide.fit(nn.Sequential(inner, nn.Linear(4, 1)), "1MiB", progress=None)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    for _ in range(2):
        outer(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not ebbtide.calls_of(inner).unplanned
    torch.nn.Sequential.forward(inner, torch.randn(3, 4)).sum().backward()
    with pytest.raises(UsageError, match="no planned call"):
        optimizer.step()
