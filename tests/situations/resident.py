"""Tensors that are resident and that no module lists; first calls that try things out."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Chain, Mapped
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


BATCHES = {
    "dataclass": lambda x, y: Batch(x, y),
    "user_dict": lambda x, y: collections.UserDict(x=x, y=y),
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered": lambda x, y: collections.OrderedDict(x=x, y=y),
    "tuple": lambda x, y: (x, y),
}


@variants(BATCHES, share=0.85)
def batch_counts(run: Run, make: Any) -> None:
    """A batch of whatever kind is an input of the step, and counts."""

    class Taking(Chain):
        def forward(self, batch: Any) -> torch.Tensor:
            if isinstance(batch, tuple):
                x, y = batch
            elif isinstance(batch, Batch):
                x, y = batch.x, batch.y
            else:
                x, y = batch["x"], batch["y"]
            return F.mse_loss(self.features(x), y)

    run.train(Taking(depth=4), lambda m, i: _loss(m, make(run.x(i), run.x(i + 50))))


class Hidden(Chain):
    """Reads a tensor of 2 MiB that is no buffer, held in a place that ``place`` names."""

    def __init__(self, place: str) -> None:
        super().__init__(depth=4)
        big = torch.randn(1024, 512)
        self.mix = nn.Linear(512, 64)
        if place == "attribute":
            self.big = big
        elif place == "list":
            self.held = [big]
        elif place == "dict":
            self.held = {"big": big}
        elif place == "object":
            self.held = Batch(big, big)
        elif place == "function":
            self.get = lambda: big
        elif place == "buffer":
            self.register_buffer("held", big)
        elif place == "expanded":
            self.register_buffer("held", torch.randn(1, 512).expand(1024, 512))
        elif place == "view":
            self.held = torch.randn(2048, 512)[:1024]
        self.place = place
        if place not in ("attribute", "list", "dict", "object", "function", "buffer"):
            del big

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = getattr(self, "held", None)
        if self.place == "attribute":
            held = self.big
        elif self.place == "list":
            held = self.held[0]
        elif self.place == "dict":
            held = self.held["big"]
        elif self.place == "object":
            held = self.held.x
        elif self.place == "function":
            held = self.get()
        return self.features(x + self.mix(held)).square().mean()


@variants(
    {name: name for name in ("attribute", "list", "dict", "object", "function", "buffer", "expanded", "view")},
    share=0.85,
)
def hidden_tensor(run: Run, place: Any) -> None:
    run.train(Hidden(place), lambda m, i: _loss(m, run.x(i)))


@variants({"list": True, "module": False}, share=0.85)
def teacher(run: Run, listed: Any) -> None:
    """A teacher without gradients, in a list where no module sees it, or as a submodule."""

    class Student(Chain):
        def __init__(self) -> None:
            super().__init__(192, 4)
            other = Chain(192, 4, loss=False).requires_grad_(False)
            self.teacher: Any = [other] if listed else other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = (self.teacher[0] if listed else self.teacher)(x)
            return F.mse_loss(self.features(x), target)

    run.train(Student(), lambda m, i: _loss(m, run.x(i, 768, 192)))


@situation(share=0.85)
def hidden_layers_train(run: Run) -> None:
    """Layers in a plain list: their parameters take gradients that no module lists."""

    class InAList(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(192, 192)
            self.rest = [nn.Linear(192, 192) for _ in range(4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.rest:
                x = F.gelu(layer(x))
            return x.square().mean()

    def step(m: Any, i: int) -> Any:
        loss = _loss(m, run.x(i, 768, 192))
        return [loss, *[layer.weight.grad for layer in m.rest]]

    run.train(InAList(), step)


@situation(share=1.05)
def large_buffers(run: Run) -> None:
    """Buffers are most of what is resident, and are read as they are."""
    model = Mapped(lambda m, x: (x @ m.big @ m.w).square().mean(), w=torch.randn(512, 64))
    model.register_buffer("big", torch.randn(512, 512))
    run.train(model, lambda m, i: _loss(m, run.x(i, 64, 512)))


@situation(share=1.05)
def expanded_buffer(run: Run) -> None:
    """A buffer of one row, expanded: finding out what an op costs must not make it whole (16 of 0.7 MiB)."""
    model = Mapped(lambda m, x: (x @ m.w * m.wide[:64]).square().mean(), w=torch.randn(64, 64))
    model.register_buffer("wide", torch.randn(1, 64).expand(65536, 64))
    run.train(model, lambda m, i: _loss(m, run.x(i, 64, 64)))


@situation(share=1.05)
def expanded_input(run: Run) -> None:
    """The batch is one row, expanded."""
    model = Mapped(lambda m, x: (x[:32] @ m.w).square().mean() + x.mean(), w=torch.randn(64, 512))
    run.train(model, lambda m, i: _loss(m, run.x(i, 1, 64).expand(32768, 64)))


@situation(share=1.03)
def wide_first_call(run: Run) -> None:
    """Weights of 16 MiB, small activations: ops timed on copies of resident weights are over at once."""
    run.train(Chain(1024, 4), lambda m, i: _loss(m, run.x(i, 16, 1024)), steps=3)


@situation(share=1.03)
def wide_embedding(run: Run) -> None:
    """A table of 12 MiB."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(50000, 64), nn.Linear(64, 64)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens)).square().mean()

    run.train(Table(), lambda m, i: _loss(m, run.tokens(i, most=50000)), steps=3)


@situation()
def two_models_in_flight(run: Run) -> None:
    """What another fitted model's step in flight holds counts for both."""
    one, other = run.fit(Chain(), 1.0), run.fit(Chain(depth=4), 1.0)
    for i in range(4):
        one.zero_grad()
        other.zero_grad()
        x = run.x(i)
        with run.step(beside=[other]):
            first = one(x)
            second = other(x)
            (first + second).backward()
        del first, second
        run.see_model(one, f"one {i}")
        run.see_model(other, f"other {i}")


@situation()
def gradients_there_at_the_start(run: Run) -> None:
    """``zero_grad(set_to_none=False)``: gradients stay resident."""

    def step(m: Any, i: int) -> Any:
        m.zero_grad(set_to_none=False)
        return _loss(m, run.x(i))

    run.train(Chain(), step, zero=False)


@situation(share=0.9, captures=-1)
def tables_per_length(run: Run) -> None:
    """A table for each length of inputs, kept in a dictionary of the model: a step reads one, all are resident."""

    class Tables(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) not in self.tables:
                self.tables[len(x)] = torch.arange(float(x.numel())).view_as(x).cos()
            return self.features(x * self.tables[len(x)]).square().mean()

    run.train(Tables(), lambda m, i: _loss(m, run.x(i, 1024 - 128 * (i % 3), 64)), steps=6)


@situation(share=0.85)
def constant_from_a_list(run: Run) -> None:
    """``torch.tensor(a_list)`` in the forward: the capture holds it, 31 KiB, from then on."""
    numbers = torch.randn(8000, generator=torch.Generator().manual_seed(1)).tolist()

    class Listed(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(x + torch.tensor(numbers)[:64]).square().mean()

    run.train(Listed(), lambda m, i: _loss(m, run.x(i, 128, 64)))


def _of_the_input(loss: torch.Tensor, x: torch.Tensor, _: Any) -> Any:
    loss.backward()
    return x.grad


def _asked_for(loss: torch.Tensor, x: torch.Tensor, _: Any) -> Any:
    return torch.autograd.grad(loss, x)[0]


def _of_the_weights(loss: torch.Tensor, _: torch.Tensor, model: Any) -> Any:
    return torch.autograd.grad(loss, list(model.parameters()))


KEPT = {"of_the_input": _of_the_input, "asked_for": _asked_for, "of_the_weights": _of_the_weights}


@variants(KEPT, share=0.8, captures=2)
def gradients_kept_by_the_loop(run: Run, read: Any) -> None:
    """Adversarial training, gradient surgery: what one planned backward gave is there in the next planned step."""
    model = run.fit(Chain(256, 8))
    for i in range(5):
        model.zero_grad()
        with run.step():
            x = run.x(i, 512, 256).requires_grad_()
            kept = read(model(x), x, model)
            _loss(model, x.detach() + 0.1)
        run.see(f"kept {i}", kept)
        run.see_model(model, f"step {i}")
        del kept, x
