"""Captured once: what a step does not depend on, and what comes back, costs no capture."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Chain, ConvNet, TokenModel
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
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


class Plain:
    """Default ``repr``, which has the address."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


class Printing(Plain):
    def __repr__(self) -> str:
        return f"Printing({self.x}, {self.y})"


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


class Taking(Chain):
    def forward(self, batch: Any, *others: Any, **more: Any) -> torch.Tensor:
        if isinstance(batch, collections.abc.Mapping):
            x, y = batch["x"], batch["y"]
        elif isinstance(batch, tuple):
            x, y = batch
        else:
            x, y = batch.x, batch.y
        return F.mse_loss(self.features(x), y)


def _hugging(x: torch.Tensor, y: torch.Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


BATCHES = {
    "dataclass": Batch,
    "frozen_dataclass": Frozen,
    "plain_object": Plain,
    "printing_object": Printing,
    "slots": Slotted,
    "user_dict": lambda x, y: collections.UserDict(x=x, y=y),
    "batch_encoding": _hugging,
    "named_tuple": collections.namedtuple("Pair", "x y"),
    "dict": lambda x, y: {"x": x, "y": y},
}


@variants(BATCHES, share=0.9)
def batch(run: Run, make: Any) -> None:
    """A new object with new values at every call."""
    run.train(Taking(), lambda m, i: _loss(m, make(run.x(i), run.x(i + 50))), steps=5)


class Settings:
    """Default ``repr``, default ``==``."""

    scale = 1.0


ONE = Settings()
ARGUMENTS = {
    "new_object": Settings,
    "one_object": lambda: ONE,
    "function": lambda: lambda x: x,
    "none": lambda: None,
    "list": lambda: [1, 2, 3],
    "type": lambda: torch.float32,
}


@variants(ARGUMENTS, share=0.9)
def argument(run: Run, make: Any) -> None:
    """An argument that is no tensor, made anew at every call."""

    def step(model: Any, i: int) -> Any:
        loss = model((run.x(i), run.x(i + 50)), make(), how=make())
        loss.backward()
        return loss.detach()

    run.train(Taking(), step, steps=5)


@situation(captures=2, share=0.9)
def argument_decides(run: Run) -> None:
    """An argument that the forward does depend on."""

    class Choosing(Chain):
        def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
            x = self.features(x)
            return x.square().mean() if how == "square" else x.abs().mean()

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i), how="square" if i % 2 else "abs")
        loss.backward()
        return loss.detach()

    run.train(Choosing(), step, steps=6)


@situation(captures=3, share=1.1)
def frozen_in_turns(run: Run) -> None:
    """Layers are frozen in turns: a step per pattern, each captured once."""

    def step(model: Any, i: int) -> Any:
        model.requires_grad_(True)
        model.layers[i % 3].requires_grad_(False)
        return _loss(model, run.x(i))

    run.train(Chain(depth=4), step, steps=12)


@situation(captures=2, share=1.1)
def frozen_half_in_turns(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        model.requires_grad_(True)
        model.layers[:4].requires_grad_(bool(i % 2))
        return _loss(model, run.x(i))

    run.train(Chain(), step, steps=8)


@situation(captures=9, share=1.2, seconds=400.0)
def thawed_layer_by_layer(run: Run) -> None:
    """Gradual unfreezing, back and forth over nine patterns: no pattern is captured twice."""

    def step(model: Any, i: int) -> Any:
        model.requires_grad_(False)
        model.layers[8 - i % 9 :].requires_grad_(True)
        model.head.requires_grad_(True)
        return _loss(model, run.x(i, 256, 64))

    class Headed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x)).square().mean()

    run.train(Headed(), step, steps=18)


class Two(Chain):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.features(x), y)


@situation(captures=2, share=0.9)
def one_tensor_twice(run: Run) -> None:
    """``m(x, x)`` against ``m(x, y)``: two steps, in turns."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i)
        loss = model(x, x if i % 2 else run.x(i + 50))
        loss.backward()
        return loss.detach()

    run.train(Two(), step, steps=8)


@situation(captures=2, share=0.9)
def one_tensor_and_its_view(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        x = run.x(i)
        loss = model(x, x[:] if i % 2 else run.x(i + 50))
        loss.backward()
        return loss.detach()

    run.train(Two(), step, steps=8)


@situation(captures=-1, share=0.9)
def transposed_and_not(run: Run) -> None:
    """Other strides, the same shape."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i, 64, 64)
        return _loss(model, x.t() if i % 2 else x)

    run.train(Chain(), step, steps=6)


@situation(captures=2, share=0.9)
def input_with_and_without_gradient(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_(bool(i % 2))
        return _loss(model, x), x.grad

    run.train(Chain(), step, steps=8)


@situation(captures=2, share=0.9)
def train_and_eval_in_turns(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        model.train(i % 2 == 0)
        return _loss(model, run.x(i))

    run.train(Chain(p=0.1), step, steps=8)


@situation(captures=-1, share=0.9)
def step_counter_attribute(run: Run) -> None:
    """``self.step += 1``, which the step does not read."""

    class Counting(Chain):
        steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return super().forward(x)

    def step(model: Any, i: int) -> Any:
        return _loss(model, run.x(i)), model.steps

    run.train(Counting(), step, steps=4)


@situation(share=0.9)
def step_counter_buffer(run: Run) -> None:
    class Counting(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return super().forward(x)

    run.train(Counting(), lambda m, i: _loss(m, run.x(i)), steps=5)


@situation(share=0.9)
def same_weights_again(run: Run) -> None:
    """``load_state_dict`` between steps."""
    model = Chain()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    held = sum(value.nbytes for value in saved.values())
    run.fit(model)
    for i in range(5):
        model.zero_grad()
        if i == 2:
            model.load_state_dict(saved)
        x = run.x(i)
        with run.step(bytes_beside=held):
            loss = model(x)
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        del loss
        run.see_model(model, f"step {i}")


@situation(captures=-1, share=0.9)
def weights_assigned(run: Run) -> None:
    """``load_state_dict(assign=True)`` puts other parameter objects there."""
    model = run.fit(Chain())
    for i in range(5):
        model.zero_grad()
        if i == 2:
            model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True)
            model.requires_grad_(True)
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def gradients_and_none_in_turns(run: Run) -> None:
    """``set_to_none`` both ways."""

    def step(model: Any, i: int) -> Any:
        model.zero_grad(set_to_none=bool(i % 2))
        return _loss(model, run.x(i))

    run.train(Chain(), step, steps=6, zero=False)


@variants({"batches": 4, "lengths": 9}, captures=-1, share=1.2, seconds=400.0)
def shapes(run: Run, kinds: Any) -> None:
    """Batches and lengths that change."""

    def step(model: Any, i: int) -> Any:
        k = i % kinds
        tokens = run.tokens(i, 4 + (k if kinds == 4 else 0), 8 + (2 * k if kinds == 9 else 0))
        loss = model(tokens, tokens)
        loss.backward()
        return loss.detach()

    run.train(TokenModel(p=0.1), step, steps=2 * kinds)


@situation(captures=2, share=1.0)
def last_batch_is_smaller(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        return _loss(model, run.x(i, 1000 if i % 4 == 3 else 1024, 64))

    run.train(Chain(), step, steps=8)


@situation(captures=-1, share=1.0)
def images_of_two_sizes(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        size = 24 + 8 * (i % 2)
        loss = model(run.x(i, 4, 3, size, size)).square().mean()
        loss.backward()
        return loss.detach()

    run.train(ConvNet(), step, steps=6)


@situation(share=0.9, captures=2)
def keywords_in_another_order(run: Run) -> None:
    """A forward may look at the order of its ``**kwargs``."""

    def step(model: Any, i: int) -> Any:
        x, y = run.x(i), run.x(i + 50)
        loss = model(**({"x": x, "y": y} if i % 2 else {"y": y, "x": x}))
        loss.backward()
        return loss.detach()

    run.train(Two(), step, steps=6)


@situation(captures=-1, share=0.9)
def optional_mask_in_turns(run: Run) -> None:
    """An argument that is a tensor or ``None``."""

    class Masked(Chain):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.features(x)
            return (x.square().mean(-1) * mask).mean() if mask is not None else x.square().mean()

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i), torch.ones(1024) if i % 2 else None)
        loss.backward()
        return loss.detach()

    run.train(Masked(), step, steps=6)


@situation(captures=-1, share=0.9)
def numbers_that_change(run: Run) -> None:
    """A weight as a Python number, other at every call: one capture per value is what is known; not for ever."""

    class Weighted(Chain):
        def forward(self, x: torch.Tensor, weight: float) -> torch.Tensor:
            return super().forward(x) * weight

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i), 1.0 + 0.1 * (i % 3))
        loss.backward()
        return loss.detach()

    run.train(Weighted(), step, steps=6)


@situation(share=0.9)
def weight_as_tensor(run: Run) -> None:
    class Weighted(Chain):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * weight

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i), torch.tensor(1.0 + 0.1 * i))
        loss.backward()
        return loss.detach()

    run.train(Weighted(), step, steps=6)
