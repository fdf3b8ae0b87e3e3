"""What is resident on CPU: outputs that stay alive, states of optimizers, tensors that no module lists."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from transformers.optimization import Adafactor as HuggingAdafactor

from situations.parts import Chain, Mapped
from situations.registry import situation, variants
from situations.run import Run

PRELOAD = ("transformers.modeling_outputs", "transformers.optimization")


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


# -- outputs of the last call ---------------------------------------------------------------------------------------


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


CONTAINERS = {
    "model_output": (lambda loss, x: CausalLMOutput(loss=loss, logits=x), lambda out: out.loss),
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
    """Validation keeps its own outputs, which were never planned; the step is told nothing of them."""
    model = run.fit(Giving(lambda loss, x: {"loss": loss, "logits": x}))
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            out = model(x)
            out["loss"].backward()
        del out
        with torch.no_grad():
            run.see(f"validated {i}", model(x)["loss"])
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


# -- states of optimizers -------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "adafactor_hugging": lambda p: HuggingAdafactor(p, lr=1e-3, relative_step=False, scale_parameter=False),
    "groups": lambda p: _groups(list(p)),
}


def _groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    halves = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 1e-4}]
    return torch.optim.AdamW(halves, lr=1e-3)


@variants(OPTIMIZERS)
def optimizer(run: Run, make: Any) -> None:
    """``optimizer=``: what its state takes is planned for from the first step on, and trying it out takes nothing."""
    run.train(Chain(192, 6), lambda m, i: _loss(m, run.x(i, 768, 192)), steps=4, optimizer=make)


@variants({name: OPTIMIZERS[name] for name in ("adamw", "adamw_fused", "momentum", "adafactor")}, share=1.03)
def heavy_optimizer(run: Run, make: Any) -> None:
    """Parameters and state are nearly all of it."""
    run.train(Chain(512, 4), lambda m, i: _loss(m, run.x(i, 64, 512)), steps=4, optimizer=make)


@situation()
def optimizer_not_told_of(run: Run) -> None:
    """Without ``optimizer=`` its state does not count, so it is left out here as well."""
    model = run.fit(Chain())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        state = sum(v.nbytes for each in adam.state.values() for v in each.values() if isinstance(v, torch.Tensor))
        with run.step(bytes_beside=state):
            model(x).backward()
        adam.step()
        run.see_model(model, f"step {i}")


@situation()
def optimizer_of_two_models(run: Run) -> None:
    """One optimizer, two modules, one of which is fitted: the other's state is resident as well."""
    model, head = Chain(128, 6), nn.Linear(128, 128)
    adam = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    run.fit(model, optimizer=adam)
    for i in range(4):
        adam.zero_grad()
        x = run.x(i, 512, 128)
        with run.step(beside=[head]):
            h = head(x)
            loss = model(h)
            del h
            loss.backward()
        adam.step()
        run.see_model(model, f"step {i}")
        run.see_model(head, f"head {i}")
        del loss


@situation()
def optimizer_state_loaded(run: Run) -> None:
    """A state that was saved comes back before the first step: it is there, and counts once."""
    model = Chain(192, 6)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    adam.zero_grad()
    run.fit(model, optimizer=adam)
    for i in range(3):
        x = run.x(i, 768, 192)
        with run.step():
            loss = model(x)
            loss.backward()
        adam.step()
        adam.zero_grad()
    run.see_model(model)


# -- tensors that no module lists -----------------------------------------------------------------------------------


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


@variants({name: name for name in ("attribute", "list", "dict", "object", "function", "buffer", "expanded", "view")}, share=0.85)
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
    model = Mapped(lambda m, x: (x[:32] @ m.w).square().mean() + x.mean(), w=torch.randn(64, 64))
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
