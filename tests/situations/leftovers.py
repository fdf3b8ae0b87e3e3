"""Nothing stays behind: models, graphs, profilers, patches, files."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from situations.oracle import counter, vm_bytes
from situations.parts import Chain
from situations.registry import situation, variants
from situations.run import Run

MODELS = 8


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@variants({"with_optimizer": True, "without": False}, captures=-1, seconds=400.0, share=0.9)
def many_models(run: Run, told: Any) -> None:
    """Parameters, gradients and states die with their models; so do graphs, plans and fake tensors."""
    alive: list[weakref.ref[Any]] = []
    held: list[int] = []
    objects: list[int] = []
    for k in range(MODELS):
        model = Chain(256, 2 + k % 3)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.fit(model, **({"optimizer": adam} if told else {}))
        for i in range(2):
            with run.step(bytes_beside=_state(adam)) if not told else run.step():
                model(run.x(i, 512, 256)).backward()
            adam.step()
            adam.zero_grad()
        alive += [weakref.ref(model), weakref.ref(adam), weakref.ref(model.layers[0].weight)]
        del model, adam
        gc.collect()
        held.append(counter().bytes)
        objects.append(sum(isinstance(each, torch.Tensor | torch.fx.Node) for each in gc.get_objects()))
    left = sum(each() is not None for each in alive)
    run.expect(f"{left} of {len(alive)} models, optimizers and weights are alive", left == 0)
    run.expect(f"bytes of tensors grow: {held[3]} to {held[-1]}", held[-1] <= held[3] + 2**14)
    run.expect(f"tensors and graph nodes grow: {objects[3]} to {objects[-1]}", objects[-1] <= objects[3] + 20)


def _state(adam: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for each in adam.state.values() for v in each.values() if isinstance(v, torch.Tensor))


@situation(captures=-1, seconds=400.0, share=0.9)
def many_models_resident_memory(run: Run) -> None:
    """The process's own memory per model that came and went, after the first few."""
    seen: list[int] = []
    for k in range(MODELS + 6):
        model = run.fit(Chain(64, 2 + k % 3))
        with run.step():
            model(run.x(0)).backward()
        del model
        gc.collect()
        seen.append(vm_bytes("VmRSS"))
    growth = (seen[-1] - seen[6]) / (len(seen) - 7) / 2**20
    run.expect(f"{growth:.2f} MiB stay per model", growth < 0.5)


@situation(share=0.9)
def steps_leave_nothing(run: Run) -> None:
    """Forty steps: tensors that are alive afterwards, step by step."""
    model, held = run.fit(Chain(p=0.1)), []
    for i in range(40):
        model.zero_grad()
        x = run.x(i % 5)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss, x
        gc.collect()
        held.append(counter().bytes)
    run.expect(f"tensors grow over the steps: {held[5]} to {held[-1]}", held[-1] <= held[5] + 2**13)
    run.see_model(model)


@situation(share=0.9, captures=1)
def forward_without_backward(run: Run) -> None:
    """Profiler off and ``torch.autograd.backward`` as it was, though the backward never came."""
    before = torch.autograd.backward
    model = run.fit(Chain(loss=False))
    with run.step():
        out = model(run.x(0))
    run.see("out", out)
    del out
    gc.collect()
    run.expect("torch.autograd.backward is patched", torch.autograd.backward is before)
    run.expect("a profiler is on", not torch.autograd._profiler_enabled())
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.ones(3).add(1)
    run.expect("the user's profiler saw nothing", len(profile.events()) > 0)
    with run.step():
        model(run.x(1)).square().mean().backward()
    run.expect("torch.autograd.backward is patched after a step", torch.autograd.backward is before)
    run.see_model(model)


@situation(share=0.9)
def forward_whose_loss_fails(run: Run) -> None:
    """The same after an exception in the loss, with the outputs still alive."""
    before = torch.autograd.backward
    model = run.fit(Chain(loss=False))
    with run.step():
        out = model(run.x(0))
        try:
            (out @ out).sum().backward()
        except RuntimeError as error:
            run.see("caught", type(error).__name__)
    try:
        with torch.profiler.profile(profile_memory=True) as profile:
            torch.ones(3).add(1)
        run.expect("the user's profiler saw nothing", len(profile.events()) > 0)
    except RuntimeError as error:
        run.expect(f"the user's profiler fails: {error}", False)
    del out
    gc.collect()
    run.expect("torch.autograd.backward is patched", torch.autograd.backward is before)
    for i in range(2):
        model.zero_grad()
        with run.step():
            model(run.x(i)).square().mean().backward()
    run.see_model(model)


def _caches() -> list[Path]:
    return [path for path in Path(os.environ["XDG_CACHE_HOME"]).rglob("*") if path.is_file()]


def _changed(value: Any, to: Any) -> Any:
    if isinstance(value, dict):
        return {key: _changed(each, to) for key, each in value.items()}
    if isinstance(value, list):
        return [_changed(each, to) for each in value]
    return to if isinstance(value, float) else value


def _spoil_with(text: str) -> Any:
    return lambda path: path.write_text(json.dumps(_changed(json.loads(path.read_text()), "@@")).replace('"@@"', text))


SPOILED: dict[str, Any] = {
    "infinity": _spoil_with("Infinity"),
    "nan": _spoil_with("NaN"),
    "huge": _spoil_with("1" + "0" * 400),
    "negative": _spoil_with("-1.0"),
    "text": _spoil_with('"much"'),
    "null": _spoil_with("null"),
    "cut": lambda path: path.write_text(path.read_text()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "list": lambda path: path.write_text("[1, 2]"),
}


@variants(SPOILED, captures=2, share=0.9)
def cache_spoiled(run: Run, spoil: Any) -> None:
    """Any defect of a cache is a miss."""
    for again in range(2):
        if again and not run.eager:
            for path in _caches():
                if path.suffix == ".json":
                    spoil(path)
        model = Chain(depth=4)
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p, 0, 0.1)
        run.fit(model)
        for i in range(2):
            model.zero_grad()
            x = run.x(i)
            with run.step():
                loss = model(x)
                loss.backward()
            del loss
            run.see_model(model, f"{again} step {i}")
        del model
        gc.collect()


@situation(captures=2, share=0.9)
def cache_cannot_be_written(run: Run) -> None:
    """A write that fails in the middle, as on a full disk: training goes on and no temporary file stays."""
    dump = json.dump

    def full(data: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        file.write("{")
        file.flush()
        raise OSError(28, "No space left on device")

    if not run.eager:
        json.dump = full
    try:
        for k in range(2):
            model = run.fit(Chain(depth=3 + k))
            with run.step():
                model(run.x(0)).backward()
            run.see_model(model, f"model {k}")
            del model
            gc.collect()
    finally:
        json.dump = dump
    if not run.eager:
        left = [path.name for path in _caches() if ".tmp" in path.name]
        run.expect(f"temporary files stay: {left[:2]}", not left)


@situation(share=0.9)
def cache_directory_cannot_be_made(run: Run) -> None:
    """The user's cache directory is a file."""
    if not run.eager:
        path = Path(os.environ["XDG_CACHE_HOME"]) / "a file"
        path.write_text("")
        os.environ["XDG_CACHE_HOME"] = str(path)
    model = run.fit(Chain(depth=3))
    for i in range(2):
        model.zero_grad()
        with run.step():
            model(run.x(i)).backward()
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def forked_child(run: Run) -> None:
    """A fork between steps, as data loaders do; the child trains as well."""
    model = run.fit(Chain(p=0.1))
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model.zero_grad()
                model(run.x(7)).backward()
                code = 0
            finally:
                os._exit(code)
        run.expect("the forked child fails", os.waitpid(child, 0)[1] == 0)


@situation(share=0.9)
def model_dies_in_flight(run: Run) -> None:
    """The model goes while its loss is alive; the backward still comes."""
    for k in range(3):
        model = run.fit(Chain(depth=4))
        weight = model.layers[0].weight
        with run.step():
            loss = model(run.x(k))
            del model
            gc.collect()
            loss.backward()
        run.see(f"grad {k}", weight.grad)
        del loss, weight
        gc.collect()
