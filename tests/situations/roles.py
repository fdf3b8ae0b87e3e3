"""What an output is: frozen models, losses, outputs of one element, and arguments of many kinds."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Chain
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@situation(calls=-1, captures=-1, share=1.05)
def frozen_with_gradients_on(run: Run) -> None:
    """Nothing takes a gradient: eager just runs, and there is nothing to plan."""
    model = run.fit(Chain().requires_grad_(False))
    for i in range(3):
        x = run.x(i)
        with run.step():
            out = model(x)
        run.see(f"loss {i}", out)
        run.expect("the output wants a gradient", not out.requires_grad)
        del out


@situation(captures=-1, calls=-1, share=1.05)
def frozen_then_trained(run: Run) -> None:
    """A warm-up in which only a head outside trains, then everything."""
    model, head = run.fit(Chain(loss=False)), nn.Linear(64, 10)
    for i in range(6):
        model.requires_grad_(i >= 3)
        model.zero_grad()
        head.zero_grad()
        x = run.x(i)
        with run.step(beside=[head]):
            loss = head(model(x)).square().mean()
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")
        run.see_model(head, f"head {i}")


@situation()
def frozen_model_trained_input(run: Run) -> None:
    """Adversarial training: only the input takes a gradient."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        model(x).backward()
        return x.grad

    run.train(Chain().requires_grad_(False), step)


@situation()
def frozen_but_one(run: Run) -> None:
    model = Chain().requires_grad_(False)
    model.layers[4].requires_grad_(True)
    run.train(model, lambda m, i: _loss(m, run.x(i)))


@variants({"batch_one": 1, "batch_four": 4}, share=1.2)
def value_head(run: Run, rows: Any) -> None:
    """Policy and value, as in actor-critic: at batch 1 the value has one element and is no loss."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.policy, self.value = Chain(loss=False), nn.Linear(64, 8), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.body(x)
            return self.policy(x), self.value(x)

    def step(model: Any, i: int) -> Any:
        logits, value = model(run.x(i, rows, 64))
        loss = F.cross_entropy(logits, torch.zeros(rows, dtype=torch.long)) + (value - 1).square().mean()
        loss.backward()
        return loss.detach()

    run.train(ActorCritic(), step)


@situation(share=1.2)
def value_head_squeezed(run: Run) -> None:
    """The value as a number without dimensions beside the policy's logits: both take gradients."""

    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.policy, self.value = Chain(loss=False), nn.Linear(64, 8), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.body(x)
            return {"logits": self.policy(x), "value": self.value(x).squeeze()}

    def step(model: Any, i: int) -> Any:
        out = model(run.x(i, 1, 64))
        loss = out["logits"].logsumexp(-1).mean() + (out["value"] - 1).square()
        loss.backward()
        return loss.detach()

    run.train(ActorCritic(), step, gradients="all")


@variants({"scale_multiplied": True, "scale_alone": False}, share=1.2)
def logit_scale(run: Run, multiplied: Any) -> None:
    """CLIP's: two features and a temperature of one element; the loss is outside."""

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Chain(depth=3, loss=False), Chain(depth=3, loss=False)
            self.logit_scale = nn.Parameter(torch.tensor(2.6593))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            a, b = F.normalize(self.a(x)), F.normalize(self.b(y))
            return (a * self.logit_scale.exp() if multiplied else a), b, self.logit_scale.exp()

    def step(model: Any, i: int) -> Any:
        a, b, scale = model(run.x(i, 512, 64), run.x(i + 50, 512, 64))
        logits = a @ b.t() if multiplied else scale * (a @ b.t())
        loss = F.cross_entropy(logits, torch.arange(512))
        del a, b, logits
        loss.backward()
        return loss.detach()

    run.train(Clip(), step)


@situation(share=1.2)
def one_output_of_one_element(run: Run) -> None:
    """A regressor at batch 1."""

    def step(model: Any, i: int) -> Any:
        loss = F.mse_loss(model(run.x(i, 1, 64)), torch.ones(1, 1))
        loss.backward()
        return loss.detach()

    run.train(nn.Sequential(Chain(loss=False), nn.Linear(64, 1)), step)


@situation(share=0.9)
def three_losses(run: Run) -> None:
    """A detector's dictionary of losses, summed outside."""

    class Detector(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return {"box": x[:, :8].abs().mean(), "class": x.logsumexp(-1).mean(), "mask": x.square().mean()}

    def step(model: Any, i: int) -> Any:
        losses = model(run.x(i))
        loss = sum(losses.values())
        loss.backward()
        return {name: each.detach() for name, each in losses.items()}

    run.train(Detector(), step)


@situation(share=0.95, refused=Refusal("CaptureError", "gradients"), either=True)
def loss_and_features_both_used(run: Run) -> None:
    """A loss inside and a penalty on features outside: planned with ``gradients="all"``."""

    class Both(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return x.square().mean(), x

    def step(model: Any, i: int) -> Any:
        loss, x = model(run.x(i))
        loss = loss + x.abs().mean()
        del x
        loss.backward()
        return loss.detach()

    run.train(Both(), step, gradients="all")


@situation(share=1.2)
def loss_as_a_property(run: Run) -> None:
    """The loss is left on the model: ``model.loss``."""

    class Leaving(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.features(x)
            self.loss = x.square().mean()  # type: ignore[assignment]
            return x.detach()

    def step(model: Any, i: int) -> Any:
        model(run.x(i))
        loss, model.loss = model.loss, None
        loss.backward()
        return loss.detach()

    run.train(Leaving(), step)


class Keyed(Chain):
    """Takes a dictionary of tensors, whatever the keys."""

    def forward(self, parts: Any) -> torch.Tensor:
        return self.features(sum(parts.values())).square().mean()


KEYS = {
    "ordered_integers": lambda x, y: collections.OrderedDict([(3, x), (1, y)]),
    "integers": lambda x, y: {3: x, 1: y},
    "strings": lambda x, y: collections.OrderedDict(b=x, a=y),
    "tuples": lambda x, y: {("a", 1): x, ("b", 2): y},
    "mixed": lambda x, y: {"a": x, 1: y},
    "default": lambda x, y: collections.defaultdict(list, {"a": x, "b": y}),
}


@variants(KEYS, share=0.9)
def keys(run: Run, make: Any) -> None:
    run.train(Keyed(), lambda m, i: _loss(m, make(run.x(i), run.x(i + 50))))
