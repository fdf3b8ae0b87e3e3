"""Loops of public reports: each kind of failure that was found in them, with siblings, and what refusals advise.

1. What is planned has eager's bits within the budget at every step, or says at a step that it was over.
2. What is refused has a situation beside it, ``..._as_advised``, that does what the refusal says.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from situations.parts import Chain, ConvNet
from situations.registry import Refusal, situation, variants
from situations.run import Run

LINKED = Refusal("CaptureError", "fit the submodules.*gradient of an output is read")
SECOND = Refusal("CaptureError", "second derivative")


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.linspace(-1, 1, values.numel()).reshape(values.shape)).sum()


# -- outputs that hang together ------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A chain whose features are an output beside what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Chain(depth=6, loss=False), Chain(depth=2, loss=False)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x)
        return self.head(features), features


def _scaled(result: torch.Tensor, features: torch.Tensor) -> Any:
    features.register_hook(lambda gradient: gradient * 0.5)
    (result.square().mean() + features.abs().mean()).backward()


def _retained(result: torch.Tensor, features: torch.Tensor) -> Any:
    features.retain_grad()
    (result.square().mean() + features.abs().mean()).backward()
    return features.grad


def _path_length(result: torch.Tensor, features: torch.Tensor) -> Any:
    (gradient,) = torch.autograd.grad(result.square().mean(), features, retain_graph=True)
    (result.square().mean() + features.abs().mean()).backward()
    return gradient


READ = {"hook": _scaled, "retain_grad": _retained, "path_length": _path_length}


@variants(READ, refused=LINKED)
def gradient_of_features(run: Run, read: Callable[..., Any]) -> None:
    run.train(Encoder(), lambda m, i: read(*m(run.x(i))))


@variants(READ, share=1.5, over=(0, 1), captures=2)
def gradient_of_features_as_advised(run: Run, read: Callable[..., Any]) -> None:
    model = Encoder()
    run.fit(model.body)
    run.fit(model.head)
    for i in range(4):
        model.zero_grad()
        with run.step():
            seen = read(*model(run.x(i)))
        run.see(f"seen {i}", seen)
        run.see_model(model, f"step {i}")


@situation(refused=SECOND)
def gradient_penalty(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
        gradient.square().mean().backward()

    run.train(Chain(), step)


@situation(share=0.9)
def gradient_penalty_as_advised(run: Run) -> None:
    """Inside of the forward, where it is a part of the step."""

    class Penalised(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad(self.features(x).square().mean(), x, create_graph=True)
            return gradient.square().mean()

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i).requires_grad_())
        loss.backward()
        return loss.detach()

    run.train(Penalised(), step)


# -- gradients in other memory layouts -----------------------------------------------------------------------


LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened": lambda y: _weighted(y.flatten(2).transpose(1, 2)),
    "channels_last": lambda y: _weighted(y.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)),
    "joined": lambda y: _weighted(torch.cat([y, y.detach()], 1)),
    "pooled": lambda y: y.mean((2, 3)).square().sum(),
    "mean": torch.mean,
}


@variants(LAID_OUT, share=1.2, over=(0, 1))
def layout_of_a_gradient(run: Run, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.Conv2d(8, 6, 1))

    def step(model: Any, i: int) -> Any:
        loss(model(run.x(i, 8, 3, 16, 16))).backward()

    run.train(model, step)


@situation(share=1.2, over=(0, 1))
def layout_of_a_gradient_for_ctc(run: Run) -> None:
    """Speech: batch first in the model, time first in the loss."""

    def step(model: Any, i: int) -> Any:
        logits = F.log_softmax(model(run.x(i, 8, 40, 64)), -1).transpose(0, 1)
        targets = run.tokens(i, 8, 10, most=63) + 1
        F.ctc_loss(logits, targets, torch.full((8,), 40), torch.full((8,), 10)).backward()

    run.train(Chain(loss=False), step)


# -- a tensor that is read in and outside --------------------------------------------------------------------


class Critic(nn.Module):
    """Reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Chain(depth=4, loss=False), Chain(depth=4, loss=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).tanh().mean() + self.other(x).tanh().mean()


def _outside(kind: str, y: torch.Tensor) -> torch.Tensor:
    return {"l1": y.abs().mean(), "l2": y.square().mean(), "softmax": y.softmax(-1).square().sum()}[kind]


@variants({each: each for each in ("l1", "l2", "softmax")}, share=1.5, over=(0, 1), limit="sums", said="read outside")
def read_in_and_outside(run: Run, kind: str) -> None:
    torch.manual_seed(2)
    before = nn.Linear(64, 64)
    critic = run.fit(Critic())
    for i in range(4):
        before.zero_grad()
        critic.zero_grad()
        with run.step(beside=[before]):
            y = before(run.x(i))
            (critic(y) + _outside(kind, y)).backward()
        run.see_model(before, f"step {i}")
        del y


# -- reentrant checkpoints over data alone -------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Nothing of the input of its checkpoint takes a gradient."""

    def __init__(self, *, reentrant: bool, part: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = part or Chain(depth=4, loss=False), Chain(depth=2), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@situation(refused=Refusal("CaptureError", "use_reentrant=False"), either=True)
def reentrant_over_data(run: Run) -> None:
    run.train(Checkpointed(reentrant=True), lambda m, i: _loss(m, run.x(i)))


@situation(refused=Refusal("CaptureError", "use_reentrant=False"), either=True)
def reentrant_over_normed_data(run: Run) -> None:
    body = nn.Sequential(nn.BatchNorm1d(64), Chain(depth=3, loss=False))
    run.train(Checkpointed(reentrant=True, part=body), lambda m, i: _loss(m, run.x(i)))


@situation()
def reentrant_over_data_as_advised(run: Run) -> None:
    run.train(Checkpointed(reentrant=False), lambda m, i: _loss(m, run.x(i)))


# -- crashes -------------------------------------------------------------------------------------------------


class _NoLength(tuple[Any, ...]):
    def __len__(self) -> int:
        raise NotImplementedError


class _NoTruth:
    def __bool__(self) -> bool:
        raise TypeError("no truth")

    __eq__ = __bool__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class _NoIteration(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("not to be walked")


@variants({"length": _NoLength((4, "0e")), "truth": _NoTruth(), "iteration": _NoIteration([1])})
def attributes_that_forbid(run: Run, value: Any) -> None:
    model = Chain()
    model.kept = [value]
    run.train(model, lambda m, i: _loss(m, run.x(i)))


class Codebook(nn.Module):
    """A buffer that is written without ``detach``, at the first call or at every one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how, self.ready = Chain(depth=4, loss=False), how, False
        self.register_buffer("code", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if self.how == "first" and not self.ready:
            self.code.copy_(hidden.mean(0))
            self.ready = True
        if self.how == "running":
            self.code = 0.9 * self.code.detach() + 0.1 * hidden.mean(0)
        loss = (hidden - self.code.detach()).square().mean()
        if self.how != "running":
            with torch.no_grad():
                self.code.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return loss


@variants({each: each for each in ("first", "every", "running")}, share=1.0, captures=-1)
def buffer_with_a_graph(run: Run, how: str) -> None:
    run.train(Codebook(how), lambda m, i: _loss(m, run.x(i)))


class _Registered(type):
    """A user's metaclass."""

    known: list[str] = []  # noqa: RUF012

    def __new__(cls, name: str, bases: Any, body: Any, **settings: Any) -> Any:
        cls.known.append(name)
        return super().__new__(cls, name, bases, body)


class _Abstract(abc.ABC):
    """Mixed into a model's class."""

    @abc.abstractmethod
    def never(self) -> None: ...


class _Plain:
    """Likewise."""


@variants({"abstract": _Abstract, "registered": _Registered("Mixin", (), {}), "plain": _Plain})
def class_of_a_fitted_model_mixed(run: Run, mixin: type) -> None:
    model = run.fit(Chain())
    mixed = type("Patched", (mixin, type(model)), {})
    run.expect("a class of both", issubclass(mixed, mixin) and issubclass(mixed, Chain))
    for i in range(3):
        model.zero_grad()
        with run.step():
            _loss(model, run.x(i))
        run.see_model(model, f"step {i}")


# -- advice --------------------------------------------------------------------------------------------------


class _Deleting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.y = x.tanh()
        return ctx.y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        result = gradient * (1 - ctx.y * ctx.y)
        del ctx.y
        return result


class _Resetting(_Deleting):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        result = gradient * (1 - ctx.y * ctx.y)
        ctx.y = None
        return result


@variants({"deleted": _Deleting, "reset": _Resetting}, share=0.9)
def attribute_of_a_function(run: Run, function: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = Chain(depth=6, loss=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function.apply(self.chain(x)).square().mean()

    run.train(Model(), lambda m, i: _loss(m, run.x(i)))


INDEXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column": lambda h: h[:, h.mean(0).argmax()].square().mean(),
    "row": lambda h: h[h.mean(1).argmin()].square().mean(),
}
SELECTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "column": lambda h: h.index_select(1, h.mean(0).argmax().reshape(1)).squeeze(1).square().mean(),
    "row": lambda h: h.index_select(0, h.mean(1).argmin().reshape(1)).squeeze(0).square().mean(),
}


@variants(INDEXED, refused=Refusal("CaptureError", "index_select"), either=True)
def index_by_a_single_number(run: Run, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _indexed(run, take)


@variants(SELECTED)
def index_by_a_single_number_as_advised(run: Run, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _indexed(run, take)


def _indexed(run: Run, take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return take(self.features(x))

    run.train(Model(), lambda m, i: _loss(m, run.x(i)))


@situation()
def assertion_on_a_buffer(run: Run) -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("knots", torch.linspace(0, 1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rises = self.knots[1:] > self.knots[:-1]
            assert rises.all() or (~rises).all(), "knots must be monotonic"
            return super().forward(x)

    run.train(Model(), lambda m, i: _loss(m, run.x(i)))


@variants({"frozen": "frozen", "mean": "mean"}, refused=Refusal("CaptureError|UsageError", "unfreeze|branch"))
def told_what_is_wrong(run: Run, what: str) -> None:
    class Model(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.features(x)
            if what == "mean" and hidden.mean().item() > 0:
                hidden = hidden * 2
            return hidden.square().mean()

    model = Model()
    if what == "frozen":
        model.layers.requires_grad_(run.eager)
    run.train(model, lambda m, i: _loss(m, run.x(i)))


# -- bytes at every step -------------------------------------------------------------------------------------

OVER = "over its budget|exceed"


def _boxes(y: torch.Tensor, count: int) -> torch.Tensor:
    boxes = torch.linspace(-1, 1, count * y.shape[1]).reshape(count, y.shape[1])
    return (y[:, None] - boxes).abs().mean()


def _pairs(y: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cdist(y[: 64 * count], y[: 64 * count]).mean()


def _copies(y: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([y * k for k in range(1, count + 1)]).square().mean()


@variants(
    {"boxes": _boxes, "pairs": _pairs, "copies": _copies}, share=0.95, over=tuple(range(1, 12)), said=OVER, captures=1
)
def loss_outside_that_grows(run: Run, loss: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Room for the first loss; the larger one is said at the next step that is looked at, and then has room."""

    def step(model: Any, i: int) -> Any:
        loss(model(run.x(i, 512, 64)), 2 if i < 4 else 8).backward()

    run.train(Chain(loss=False), step, steps=12)


@variants({"backward": True, "forward": False}, share=0.95, over=(0, 1), said=OVER)
def another_model_between(run: Run, backward: bool) -> None:
    """A discriminator that is trained, or looked at, between the generator's forward and backward."""
    torch.manual_seed(3)
    other = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    model = run.fit(Chain(loss=False))
    for i in range(6):
        model.zero_grad()
        with run.step(beside=[other]):
            y = model(run.x(i))
            judged = other(y.detach()).mean()
            if backward:
                judged.backward()
                other.zero_grad()
            del judged
            y.square().mean().backward()
        run.see_model(model, f"step {i}")
        del y


@variants({"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}, share=1.25, over=(0, 1), said=OVER)
def optimizer_in_hooks(run: Run, kind: Any) -> None:
    """Eager has one gradient at a time; a planned backward hands them out together, so it needs room for all."""
    model = Chain(256, 6)
    own = {each: kind([each], lr=1e-3, foreach=False) for each in model.parameters()}

    def stepped(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(stepped)
    run.train(model, lambda m, i: _loss(m, run.x(i, 64, 256)), steps=6, zero=False)


@variants({"flattened": 8, "once": 1}, share=0.95, over=(0, 1), said=OVER)
def graph_retained_to_the_end(run: Run, copies: int) -> None:
    """``retain_graph=True`` at the last backward, and more is made while the graph is there."""
    model = Chain(128, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    run.fit(model, optimizer=optimizer)
    for i in range(6):
        model.zero_grad()
        with run.step():
            loss = model(run.x(i, 512, 128))
            loss.backward(retain_graph=True)
            made = [torch.cat([each.grad.flatten() for each in model.parameters()]) for _ in range(copies)]
        del made, loss
        optimizer.step()
        run.see_model(model, f"step {i}")


@situation(share=1.2, over=(0, 1))
def last_layers_gradient_first(run: Run) -> None:
    """An adaptive weight (VQGAN): the gradient of the last layer alone, then the backward."""

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i, 4, 3, 16, 16)).square().mean()
        (last,) = torch.autograd.grad(loss, model.head.weight, retain_graph=True)
        (loss * last.norm()).backward()
        return loss.detach()

    run.train(ConvNet(), step)


def _by_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def _by_model(model: Any, optimizer: Any) -> None:
    model.zero_grad()


CLEARED = {"by_optimizer": _by_optimizer, "by_model": _by_model}


@variants(CLEARED, share=1.0)
def zeroed_before_the_backward(run: Run, clear: Callable[[Any, Any], None]) -> None:
    """As PyTorch's tutorials write it: the old gradients are there in the forward, and gone in the backward."""
    model = Chain(256, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    run.fit(model, optimizer=optimizer)
    for i in range(6):
        with run.step():
            loss = model(run.x(i, 64, 256))
            clear(model, optimizer)
            loss.backward()
        run.see_model(model, f"step {i}")
        optimizer.step()


@situation(share=0.9, over=(3, 4, 5), said=OVER)
def zeroed_before_the_backward_and_then_not(run: Run) -> None:
    """A step that then adds up is said, and the next are planned for that."""
    model = Chain(256, 6)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    run.fit(model, optimizer=optimizer)
    for i in range(6):
        with run.step():
            loss = model(run.x(i, 512, 256))
            if i != 3:
                optimizer.zero_grad()
            loss.backward()
        run.see_model(model, f"step {i}")
        optimizer.step()
