"""Outputs of the last call that stay alive through the next."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn

from situations.parts import Chain
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@dataclasses.dataclass
class Out:
    loss: torch.Tensor
    logits: torch.Tensor


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Giving(Chain):
    """A chain that returns its loss and logits of 1 MiB in a container of the kind asked for."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.head = make, nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.head(self.features(x))
        return self.make(x.square().mean(), x)


def _model_output(loss: torch.Tensor, x: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss, logits=x)


CONTAINERS = {
    "model_output": (lambda loss, x: _model_output(loss, x), lambda out: out.loss),
    "dict": (lambda loss, x: {"loss": loss, "logits": x}, lambda out: out["loss"]),
    "tuple": (lambda loss, x: (loss, x), lambda out: out[0]),
    "list": (lambda loss, x: [loss, x], lambda out: out[0]),
    "named_tuple": (Pair, lambda out: out.loss),
    "dataclass": (Out, lambda out: out.loss),
    "nested": (lambda loss, x: {"losses": [loss], "more": (x, {"last": x[-1:]})}, lambda out: out["losses"][0]),
    "views": (lambda loss, x: (loss, x[:10], x.t()), lambda out: out[0]),
}


@variants(CONTAINERS)
def outputs_kept(run: Run, container: Any) -> None:
    """``out = model(x)`` in a loop keeps the last outputs alive through the next forward."""
    make, loss_of = container
    model = run.fit(Giving(make))
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            out = model(x)
            loss_of(out).backward()
        run.see_model(model, f"step {i}")
        run.see(f"out {i}", out)


@situation()
def outputs_of_three_calls_kept(run: Run) -> None:
    """What a metric collects: detached features of the last three batches."""
    model, kept = run.fit(Giving(lambda loss, x: (loss, x))), collections.deque[torch.Tensor](maxlen=3)
    for i in range(7):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss, features = model(x)
            loss.backward()
        kept.append(features.detach())
        del loss, features
    run.see_model(model)


@situation()
def outputs_kept_under_no_grad(run: Run) -> None:
    """A validation after every step collects logits of 1 MiB, which live on: the next step has so much less."""
    model, kept = run.fit(Giving(lambda loss, x: {"loss": loss, "logits": x})), []
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            out = model(x)
            out["loss"].backward()
        del out
        with torch.no_grad():
            kept.append(model(x)["logits"])
    run.see("validated", kept)
    run.see_model(model)


@situation()
def losses_collected(run: Run) -> None:
    model, losses = run.fit(Chain()), []
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        losses.append(loss)
    run.see("losses", [float(each) for each in losses])
    run.see_model(model)


@situation()
def features_stored_on_the_model(run: Run) -> None:
    """``self.last = x`` in the forward: the features live until the next forward replaces them."""

    class Storing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.features(x)
            self.last = x.detach()
            return x.square().mean()

    run.train(Storing(), lambda m, i: (_loss(m, run.x(i)), m.last), steps=5)
