"""Random draws in the forward, layers that are dropped, hooks that ask for gradients."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from situations.parts import Chain, TokenModel, Wrapped
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


_DRAWS = Refusal("CaptureError", "random|draw|numpy|generator")


def _drawn(draw: Any) -> Any:
    return lambda: Wrapped(lambda m, x: x.square().mean() * draw(m))


DRAWS = {
    "random_random": lambda m: 1 + random.random(),
    "random_uniform": lambda m: random.uniform(0.5, 2.0),
    "random_randint": lambda m: random.randint(1, 3),
    "random_choice": lambda m: random.choice([1.0, 2.0, 3.0]),
    "numpy_uniform": lambda m: float(np.random.uniform(0.5, 2.0)),
    "numpy_random": lambda m: np.random.rand(),
    "numpy_generator": lambda m: float(m.rng.uniform(0.5, 2.0)),
    "torch_generator": lambda m: torch.rand((), generator=m.torch_rng),
    "torch_item": lambda m: torch.rand(()).item() + 1.0,
    "torch_tensor": lambda m: torch.rand(()) + 1.0,
}


@variants(DRAWS, refused=_DRAWS, either=True, captures=-1)
def draw(run: Run, made: Any) -> None:
    """A number drawn in the forward: its value is an input of the step, or a refusal says how to draw it outside."""
    model = _drawn(made)()
    model.rng, model.torch_rng = np.random.default_rng(5), torch.Generator().manual_seed(5)
    run.train(model, lambda m, i: _loss(m, run.x(i)), steps=5)


@situation(refused=_DRAWS, either=True, captures=-1)
def draw_mask_by_numpy(run: Run) -> None:
    """A mask from NumPy, as wav2vec 2 makes it."""

    def masked(m: Any, x: torch.Tensor) -> torch.Tensor:
        mask = torch.from_numpy(np.random.rand(*x.shape) > 0.3)
        return torch.where(mask, x, torch.zeros_like(x)).square().mean()

    run.train(Wrapped(masked), lambda m, i: _loss(m, run.x(i)))


@situation(refused=_DRAWS, either=True, captures=-1)
def draw_dropout_with_generator(run: Run) -> None:
    """Dropout written out, with a ``torch.Generator`` of the model's own."""
    generator = torch.Generator().manual_seed(3)

    def dropped(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * (torch.rand(x.shape, generator=generator) > 0.1)).square().mean()

    run.train(Wrapped(dropped), lambda m, i: _loss(m, run.x(i)))


_LAYERDROP = Refusal("CaptureError", "layerdrop|random|draw|data")


class LayerDropped(Chain):
    """As M2M100: a draw per layer decides whether it runs."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if not self.training or drawn >= self.rate:
                x = F.gelu(layer(x))
        return x


@situation()
def layerdrop_of_zero(run: Run) -> None:
    """A draw that is above 0 whatever it is: its branch is decidable."""
    run.train(LayerDropped(0.0), lambda m, i: _loss(m, run.x(i)))


@situation()
def layerdrop_as_hugging_face(run: Run) -> None:
    """``skip_the_layer = self.training and (dropout_probability < self.layerdrop)``, at 0."""

    class AsThere(LayerDropped):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                dropout_probability = torch.rand([])
                skip = bool(self.training and (dropout_probability < self.rate))
                if not skip:
                    x = F.gelu(layer(x))
            return x

    run.train(AsThere(0.0), lambda m, i: _loss(m, run.x(i)))


@situation(refused=_LAYERDROP)
def layerdrop(run: Run) -> None:
    """Above 0 it needs a graph per pattern."""
    run.train(LayerDropped(0.5), lambda m, i: _loss(m, run.x(i)))


@situation(captures=-1, refused=Refusal("CaptureError", "random|draw"), either=True)
def stochastic_depth_by_random(run: Run) -> None:
    """A draw of Python's decides whether a layer runs."""

    class Skipping(Chain):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if random.random() > 0.3:
                    x = F.gelu(layer(x))
            return x

    run.train(Skipping(), lambda m, i: _loss(m, run.x(i)))


@situation()
def stochastic_depth_by_mask(run: Run) -> None:
    """timm's ``DropPath``: a mask per row."""

    class Path(Chain):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8)
                x = x + F.gelu(layer(x)) * kept
            return x

    run.train(Path(), lambda m, i: _loss(m, run.x(i)))


@variants({"before": True, "after": False}, captures=-1)
def input_requires_grad(run: Run, before: Any) -> None:
    """``enable_input_require_grads()``: a hook on the embedding calls ``requires_grad_`` on its output."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = TokenModel(p=0.1).requires_grad_(False)
            self.net.head.requires_grad_(True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.net(tokens, tokens)

    model = Adapted()
    hook = lambda mod, args, out: (out.requires_grad_(True), None)[1]  # noqa: E731
    if before:
        model.net.embed.register_forward_hook(hook)
    run.fit(model)
    for i in range(5):
        if i == 2 and not before:
            model.net.embed.register_forward_hook(hook)
        model.zero_grad()
        x = run.tokens(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation()
def requires_grad_in_the_forward(run: Run) -> None:
    """``x.requires_grad_()`` on an intermediate result of frozen layers."""

    class Asking(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.layers[0](x)
            x.requires_grad_(True)
            return self.features(x).square().mean()

    run.train(Asking(), lambda m, i: _loss(m, run.x(i)))


@situation(share=1.1)
def gradient_checkpointing_of_adapters(run: Run) -> None:
    """Frozen layers, adapters, checkpoints, and the hook that gradient checkpointing needs: PEFT's usual set-up."""
    model = _Checkpointed(Chain(p=0.1).requires_grad_(False))
    model.adapter.requires_grad_(True)
    model.first.register_forward_hook(lambda mod, args, out: (out.requires_grad_(True), None)[1])
    run.train(model, lambda m, i: _loss(m, run.x(i)))


class _Checkpointed(nn.Module):
    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.first, self.chain, self.adapter = nn.Linear(64, 64), chain, nn.Linear(64, 64)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.chain.features, x, use_reentrant=False)
        return self.adapter(x).square().mean()
