"""``torch.compile`` before, after, around and beside; threads."""

from __future__ import annotations

import copy
import itertools
import threading
import types
from typing import Any

import torch

from situations.parts import Around, Chain
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


_BY_NAME = Refusal("UsageError|CaptureError", "forward|compile|training_step|wrap")


@variants({"eager": "eager", "aot": "aot_eager"}, refused=_BY_NAME, either=True, share=0.9)
def compiled_afterwards(run: Run, backend: Any) -> None:
    """``torch.compile(fitted)``."""
    model = run.fit(Chain())
    compiled = torch.compile(model, backend=backend)
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = compiled(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@variants({"before": True, "after": False}, refused=_BY_NAME, either=True, share=0.9)
def compiled_in_place(run: Run, before: Any) -> None:
    """``model.compile()`` before or after ``fit``."""
    model = Chain()
    if before:
        model.compile(backend="aot_eager")
    run.fit(model)
    if not before:
        model.compile(backend="aot_eager")
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@situation(refused=_BY_NAME, either=True, share=0.9)
def compiled_around(run: Run) -> None:
    """A fitted module inside of one that is compiled."""
    outer = Around(Chain())
    run.fit(outer.inner)
    compiled = torch.compile(outer, backend="aot_eager")
    for i in range(3):
        outer.zero_grad()
        x = run.x(i)
        with run.step(beside=[outer.first], bytes_beside=x.nbytes):
            loss = compiled(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(outer, f"step {i}")


@situation(refused=_BY_NAME, either=True, share=0.9)
def compiled_part(run: Run) -> None:
    """A submodule that was compiled in place, below a fitted one."""
    model = Chain()
    model.layers[2].compile(backend="aot_eager")
    run.train(model, lambda m, i: _loss(m, run.x(i)), steps=3)


@situation(refused=_BY_NAME, either=True, share=0.9)
def compiled_function_around(run: Run) -> None:
    """``torch.compile`` of a whole training step."""
    model = run.fit(Chain())

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2

    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = forward(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def compiled_elsewhere(run: Run) -> None:
    """Unrelated code is compiled between steps."""
    double = torch.compile(lambda x: (x * 2).sum(), backend="aot_eager")

    def step(model: Any, i: int) -> Any:
        loss = _loss(model, run.x(i))
        return loss, double(run.x(i, 4 + i, 4))

    run.train(Chain(), step)


def _fresh() -> Any:
    """A function with a code object of its own, so that it is compiled anew."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3 + 1).sin().sum()

    return types.FunctionType(function.__code__.replace(co_name=f"function_{next(_NAMES)}"), globals())


_NAMES = itertools.count()


@situation(share=1.1, seconds=400.0)
def compiling_in_another_thread(run: Run) -> None:
    """Another thread compiles all the time: ``is_compiling()`` is global to the process, this model's steps are not."""
    model, stop, failed = run.fit(Chain(16, 3), "1MiB"), threading.Event(), []

    def compile_() -> None:
        try:
            while not stop.is_set():
                torch.compile(_fresh(), backend="eager")(torch.ones(7))
        except Exception as error:
            failed.append(repr(error)[:200])

    thread = threading.Thread(target=compile_)
    if not run.eager:
        thread.start()
    try:
        for i in range(150):
            model.zero_grad()
            loss = model(run.x(i, 32, 16))
            loss.backward()
            run.see(f"loss {i}", loss)
            del loss
    finally:
        stop.set()
        if not run.eager:
            thread.join()
    run.expect(f"the other thread's compilation fails: {failed[:1]}", not failed)
    run.see_model(model)


@situation(share=1.1)
def compiling_while_a_thread_trains(run: Run) -> None:
    """The other way round: the fitted model trains in a thread, the main thread compiles."""
    model, failed = run.fit(Chain(16, 3), "1MiB"), []

    def train() -> None:
        try:
            for i in range(100):
                model.zero_grad()
                model(run.x(i, 32, 16)).backward()
        except Exception as error:
            failed.append(repr(error)[:200])

    thread = threading.Thread(target=train)
    thread.start()
    compiled = 0
    try:
        while thread.is_alive():
            if run.eager:
                thread.join()
                break
            torch.compile(_fresh(), backend="eager")(torch.ones(7))
            compiled += 1
    except Exception as error:
        run.expect(f"a compilation in the main thread fails: {repr(error)[:200]}", False)
    thread.join()
    run.expect(f"training fails: {failed[:1]}", not failed)
    run.see_model(model)


@situation(share=0.9)
def trained_in_a_thread(run: Run) -> None:
    def work() -> None:
        run.train(Chain(), lambda m, i: _loss(m, run.x(i)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@situation(share=0.9)
def backward_in_another_thread(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return loss.detach()

    run.train(Chain(p=0.1), step)


@variants({"own_models": True, "one_model": False}, share=5.0, captures=-1)
def threads_train(run: Run, own: Any) -> None:
    """Three threads at a time: a model each, or one model whose gradients are asked for and kept, which count."""
    first = Chain()
    models = [run.fit(copy.deepcopy(first)) for _ in range(3)] if own else [run.fit(first)] * 3
    found: dict[str, Any] = {}
    failed: list[str] = []

    def work(k: int) -> None:
        try:
            for i in range(8):
                loss = models[k](run.x(10 * k + i, 128 + 16 * (i % 2), 64))
                found[f"{k} {i}"] = torch.autograd.grad(loss, list(models[k].parameters()))
        except Exception as error:
            failed.append(repr(error)[:200])

    with run.step():
        if own:
            for k in range(3):
                models[k](run.x(0, 128, 64)).backward()
        else:
            models[0](run.x(0, 128, 64)).backward()
    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.expect(f"a thread fails: {failed[:1]}", not failed)
    for name in sorted(found):
        run.see(name, found[name])
