"""Exceptions, interruptions and observers; the next step is right."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import nn

import ebbtide
from situations.parts import Attention, Chain
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


class Failing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 7:
            raise ValueError("seven rows")
        return super().forward(x)


@situation(share=0.9, captures=-1, calls=-1)
def exception_in_the_forward(run: Run) -> None:
    """The model's own exception, unchanged; the next step is as if nothing had been."""
    model = run.fit(Failing(p=0.1))
    for i in range(5):
        model.zero_grad()
        if i in (0, 2):
            try:
                model(run.x(i, 7, 64))
            except ValueError as error:
                run.see(f"caught {i}", str(error))
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def exception_in_the_loss(run: Run) -> None:
    """Between forward and backward; the traceback keeps the outputs alive for a while."""
    model, caught = run.fit(Chain(loss=False)), []
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            try:
                out = model(x)
                if i in (1, 3):
                    raise KeyError("in the loss")
                out.square().mean().backward()
            except KeyError as error:
                caught.append(error)
        out = None
        caught.clear()
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def exception_in_the_backward(run: Run) -> None:
    """A hook on a parameter raises."""

    def step(model: Any, i: int) -> Any:
        handle = None
        if i in (1, 2):
            handle = model.layers[1].weight.register_hook(lambda grad: 1 / 0)
        try:
            _loss(model, run.x(i))
        except ZeroDivisionError as error:
            return str(error)
        finally:
            if handle is not None:
                handle.remove()
        return "well"

    model = run.fit(Chain(p=0.1))
    for i in range(5):
        model.zero_grad()
        with run.step():
            said = step(model, i)
        run.see(f"said {i}", said)
        model.zero_grad()
        run.see("random state", torch.get_rng_state())
    with run.step():
        model(run.x(9)).backward()
    run.see_model(model)


@situation(share=0.9, captures=-1, calls=-1)
def wrong_input_then_right(run: Run) -> None:
    """Inputs of a width that no layer takes."""
    model = run.fit(Chain(p=0.1))
    for i in range(4):
        model.zero_grad()
        try:
            model(run.x(i, 8, 63))
        except Exception as error:
            run.see(f"caught {i}", type(error).__name__)
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def interrupted(run: Run) -> None:
    """Ctrl-C between forward and backward, and in the loop."""
    model = run.fit(Chain(p=0.1))
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        try:
            with run.step():
                loss = model(x)
                if i == 2:
                    raise KeyboardInterrupt
                loss.backward()
        except KeyboardInterrupt:
            pass
        loss = None
        run.see_model(model, f"step {i}")


@situation(share=0.9, calls=-1, captures=2)
def interrupted_while_planning(run: Run) -> None:
    """The first call is stopped as it plans; the second one trains."""
    model, stops = Chain(p=0.1), [3]

    def progress(_: Any) -> None:
        stops[0] -= 1
        if stops[0] == 0:
            raise KeyboardInterrupt

    run.fit(model, progress=progress)
    if not run.eager:
        state = torch.get_rng_state()
        try:
            model(run.x(0))
            run.expect("the interrupt was swallowed", False)
        except KeyboardInterrupt:
            pass
        run.expect("the interrupted call drew random numbers", torch.equal(state, torch.get_rng_state()))
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def anomaly_detection(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                return _loss(model, run.x(i))

    run.train(Chain(), step)


@situation(share=1.2)
def deterministic_algorithms(run: Run) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        run.train(Chain(p=0.1), lambda m, i: _loss(m, run.x(i)))
    finally:
        torch.use_deterministic_algorithms(False)


@situation(share=0.9, refused=Refusal("CaptureError", "profiler"))
def profiled_from_the_start(run: Run) -> None:
    """Under the user's own profiler, where nothing can be measured."""

    def step(model: Any, i: int) -> Any:
        with torch.profiler.profile(profile_memory=True):
            return _loss(model, run.x(i))

    run.train(Chain(), step)


@situation(share=0.9)
def profiled_later(run: Run) -> None:
    """A profiler of the user's own around later steps."""

    def step(model: Any, i: int) -> Any:
        with torch.profiler.profile(profile_memory=True) if i > 1 else contextlib.nullcontext():
            return _loss(model, run.x(i))

    run.train(Chain(), step, steps=5)


# On a CPU, both keep copies where the budget is.
@variants({"offloaded": True, "cloned": False}, share=1.6, captures=-1, over=(0, 1, 2, 3))
def saved_tensor_hooks(run: Run, offloaded: Any) -> None:
    def hooks() -> Any:
        if offloaded:
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())

    def step(model: Any, i: int) -> Any:
        with hooks():
            loss = model(run.x(i))
        loss.backward()
        return loss.detach()

    run.train(Chain(p=0.1), step)


@situation(share=0.9)
def budget_changed(run: Run) -> None:
    """``set_budget`` in mid-training, between forward and backward as well: no capture more."""
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            if i == 2 and not run.eager:
                ebbtide.set_budget(model, int((run._budget or 0) * 0.85))
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9, calls=4)
def unfitted_in_the_end(run: Run) -> None:
    """``unfit`` gives the plain model back."""
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        if i == 4 and not run.eager:
            ebbtide.unfit(model)
        if i < 4:
            with run.step():
                loss = model(x)
                loss.backward()
        else:
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def inference_between(run: Run) -> None:
    """``no_grad`` and ``inference_mode`` between steps."""

    def step(model: Any, i: int) -> Any:
        loss = _loss(model, run.x(i))
        return loss

    model = run.fit(Chain(p=0.1))
    for i in range(4):
        model.zero_grad()
        with run.step():
            loss = step(model, i)
        model.eval()
        with torch.inference_mode():
            run.see(f"inferred {i}", model(run.x(i)).clone())
        with torch.no_grad():
            run.see(f"validated {i}", model(run.x(i)))
        model.train()
        run.see(f"loss {i}", loss)
        run.see_model(model, f"step {i}")


@situation(share=0.9, captures=2)
def multi_task_in_turns(run: Run) -> None:
    """Which head is used depends on an argument."""

    class Tasks(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(64, 4) for _ in range(2))

        def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
            return self.heads[task](self.features(x)).square().mean()

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i), i % 2)
        loss.backward()
        return loss.detach()

    run.train(Tasks(), step, steps=6)


@situation(share=0.9)
def encoder_of_attention(run: Run) -> None:
    run.train(Attention(p=0.1), lambda m, i: _loss(m, run.x(i, 8, 32, 32)), optimizer=lambda p: torch.optim.AdamW(p))
