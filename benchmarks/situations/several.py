"""Several forwards before a backward, graphs that are retained, losses outside, and budgets of 100 %."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Attention, Chain, ConvNet, TokenModel
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


# -- several forwards -----------------------------------------------------------------------------------------------


@variants({"siamese": 2, "triplet": 3, "five": 5})
def embeddings(run: Run, count: Any) -> None:
    """A loss over the outputs of several calls: one plan more, then steady, in how ever many steps."""
    model = run.fit(Chain(loss=False))
    for i in range(6):
        model.zero_grad()
        xs = [run.x(10 * i + k) for k in range(count)]
        with run.step():
            outs = [model(x) for x in xs]
            loss = sum((a - b).square().mean() for a, b in zip(outs, [*outs[1:], outs[0]], strict=True))
            del outs
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@variants({"in_order": 1, "reversed": -1})
def losses_of_three_calls(run: Run, order: Any) -> None:
    """Three forwards that return losses, then three backwards."""
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        model.zero_grad()
        xs = [run.x(10 * i + k) for k in range(3)]
        with run.step():
            losses = [model(x) for x in xs][::order]
            while losses:
                losses.pop(0).backward()
        run.see_model(model, f"step {i}")


@situation()
def losses_summed(run: Run) -> None:
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        model.zero_grad()
        xs = [run.x(10 * i + k) for k in range(3)]
        with run.step():
            loss = sum(model(x) for x in xs)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@situation()
def triplet_margin(run: Run) -> None:
    """Batch norm and dropout: states of generators and running statistics are those of three calls in a row."""
    model = run.fit(ConvNet(p=0.2))
    for i in range(5):
        model.zero_grad()
        xs = [run.x(10 * i + k, 8, 3, 24, 24) for k in range(3)]
        with run.step():
            loss = F.triplet_margin_loss(*[model(x) for x in xs])
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@situation()
def validated_with_gradients_on(run: Run) -> None:
    """A validation that forgot ``no_grad``: its forward never sees a backward."""
    model = run.fit(Chain())
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del x, loss
        y = run.x(i + 50)
        with run.step():
            seen = model(y)
        run.see(f"validated {i}", seen)
        del y, seen
        run.see_model(model, f"step {i}")


@situation()
def validated_while_in_flight(run: Run) -> None:
    """The same between a forward and its backward."""
    model = run.fit(Chain())
    for i in range(6):
        model.zero_grad()
        x, y = run.x(i), run.x(i + 50)
        with run.step():
            loss = model(x)
            seen = model(y)
            loss.backward()
        run.see(f"validated {i}", seen)
        del loss, seen
        run.see_model(model, f"step {i}")


@situation(captures=2)
def validated_in_eval_mode(run: Run) -> None:
    model = run.fit(Chain(p=0.1))
    for i in range(5):
        model.train()
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del x, loss
        model.eval()
        y = run.x(i + 50)
        with run.step():
            run.see(f"validated {i}", model(y))
        del y
        run.see_model(model, f"step {i}")


class Critic(Chain):
    """A mean per row."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(loss=False, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).mean(1)


@variants({"both": True, "generator_alone": False}, captures=-1)
def gan(run: Run, both: Any) -> None:
    """Generator and discriminator in turns, the discriminator frozen in the generator's step."""
    g, d = Chain(p=0.1, loss=False), Critic(depth=4)
    run.fit(g, 1.3)
    if both:
        run.fit(d, 1.3)
    og = torch.optim.Adam(g.parameters(), lr=1e-3)
    od = torch.optim.SGD(d.parameters(), lr=1e-2)
    for i in range(6):
        x, z = run.x(i), run.x(i + 50)
        state = sum(v.nbytes for each in og.state.values() for v in each.values() if isinstance(v, torch.Tensor))
        d.requires_grad_(True)
        od.zero_grad()
        with run.step(beside=[d], bytes_beside=state):
            fake = g(z)
            loss = F.softplus(-d(x)).mean() + F.softplus(d(fake.detach())).mean()
            loss.backward()
            od.step()
            d.requires_grad_(False)
            og.zero_grad()
            loss_g = F.softplus(-d(fake)).mean()
            del fake
            loss_g.backward()
        og.step()
        run.see(f"losses {i}", [loss, loss_g])
        del loss, loss_g
        run.see_model(g, f"g {i}")
        run.see_model(d, f"d {i}")


@situation()
def contrastive(run: Run) -> None:
    """Two views in one step and a loss of all against all outside."""
    model = run.fit(Chain(p=0.1, loss=False))
    for i in range(5):
        model.zero_grad()
        x = run.x(i, 256, 64)
        with run.step():
            a, b = F.normalize(model(x)), F.normalize(model(x))
            loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(256))
            del a, b
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


@situation(captures=1)
def momentum_teacher(run: Run) -> None:
    """A copy without gradients gives the target, then follows the student."""
    model = Chain(loss=False)
    teacher = copy.deepcopy(model).requires_grad_(False)
    run.fit(model)
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        with torch.no_grad():
            target = teacher(x)
        with run.step(beside=[teacher], bytes_beside=target.nbytes):
            loss = F.mse_loss(model(x), target)
            loss.backward()
        with torch.no_grad():
            for p, q in zip(model.parameters(), teacher.parameters(), strict=True):
                p.sub_(p.grad, alpha=0.1)
                q.lerp_(p, 0.1)
        del loss, target
        run.see_model(model, f"step {i}")


@situation()
def dropped_forward(run: Run) -> None:
    """A loss that is not finite, say: its forward is thrown away, every second time."""
    model = run.fit(Chain())
    for i in range(8):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            if i % 2:
                loss.backward()
        del loss
        run.see_model(model, f"step {i}")


# -- retained graphs ------------------------------------------------------------------------------------------------


@variants({"tight": 0.6, "roomy": 1.1})
def retained_later(run: Run, share: Any) -> None:
    """Ordinary steps first, then ``retain_graph=True``."""
    model = run.fit(Chain(), float(share) / 0.75)
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        retain = i >= 3
        with run.step():
            loss = model(x)
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
        run.see_model(model, f"step {i}")
        del loss


@variants({"tight": 0.6, "roomy": 1.1})
def retained_always(run: Run, share: Any) -> None:
    model = run.fit(Chain(p=0.1), float(share) / 0.75)
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward(retain_graph=True)
            loss.backward()
        run.see_model(model, f"step {i}")
        del loss


@situation()
def retained_and_never_used(run: Run) -> None:
    """Everywhere ``retain_graph=True``, as copied from somewhere."""
    run.train(Chain(), lambda m, i: _retaining(m, run.x(i)))


def _retaining(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward(retain_graph=True)
    return loss.detach()


@situation(share=0.9)
def two_losses_of_one_graph(run: Run) -> None:
    class Two(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return x.square().mean(), x.abs().mean()

    def step(model: Any, i: int) -> Any:
        one, other = model(run.x(i))
        one.backward(retain_graph=True)
        other.backward()
        return one.detach(), other.detach()

    run.train(Two(), step)


@situation(share=0.9)
def gradients_asked_for_before(run: Run) -> None:
    """``autograd.grad`` with a retained graph, then ``backward``: a penalty on its norm."""

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i))
        first = torch.autograd.grad(loss, model.layers[0].weight, retain_graph=True)
        loss.backward()
        return loss.detach(), first

    run.train(Chain(), step)


# -- losses outside -------------------------------------------------------------------------------------------------


LOSSES = {
    "square": lambda out, i: out.square().mean(),
    "cross_entropy": lambda out, i: F.cross_entropy(out, torch.arange(out.shape[0]) % out.shape[1]),
    "heavy": lambda out, i: sum(torch.tanh(out * k).square().mean() for k in range(1, 6)),
    "pairwise": lambda out, i: (out[:256] @ out[:256].t()).softmax(-1).square().mean(),
    "growing": lambda out, i: sum(torch.tanh(out * k).square().mean() for k in range(1, 2 + 2 * (i > 2))),
}


@variants(LOSSES)
def loss_outside(run: Run, loss_of: Any) -> None:
    def step(model: Any, i: int) -> Any:
        loss = loss_of(model(run.x(i)), i)
        loss.backward()
        return loss.detach()

    run.train(Chain(loss=False), step, steps=6)


@situation()
def loss_outside_output_kept(run: Run) -> None:
    model = run.fit(Chain(loss=False))
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            out = model(x)
            loss = out.square().mean()
            loss.backward()
        run.see_model(model, f"step {i}")


@situation()
def loss_module_with_parameters(run: Run) -> None:
    """A head outside that trains as well."""
    model, head = run.fit(Chain(loss=False)), nn.Linear(64, 10)
    for i in range(5):
        model.zero_grad()
        head.zero_grad()
        x = run.x(i)
        with run.step(beside=[head]):
            loss = F.cross_entropy(head(model(x)), torch.arange(1024) % 10)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")
        run.see_model(head, f"head {i}")


@situation()
def two_heads_outside(run: Run) -> None:
    class Heads(Chain):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.features(x)
            return {"a": x[:, :32], "b": x[:, 32:].tanh()}

    def step(model: Any, i: int) -> Any:
        out = model(run.x(i))
        loss = out["a"].square().mean() + (out["b"].abs().mean() if i % 2 else 0.0)
        del out
        loss.backward()
        return loss.detach()

    run.train(Heads(), step, steps=5)


# -- 100 % ----------------------------------------------------------------------------------------------------------

SMALL = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4)), lambda run, i: run.x(i, 2, 4)),
    "chain": (lambda: Chain(8, 2), lambda run, i: run.x(i, 4, 8)),
    "chain_dropout": (lambda: Chain(8, 2, 0.1), lambda run, i: run.x(i, 4, 8)),
    "larger_chain": (Chain, lambda run, i: run.x(i)),
    "convolutions": (ConvNet, lambda run, i: run.x(i, 2, 3, 8, 8)),
    "attention": (lambda: Attention(p=0.1), lambda run, i: run.x(i, 2, 4, 32)),
    "tokens": (TokenModel, lambda run, i: run.tokens(i, 1, 4)),
}


@variants(SMALL)
def hundred_percent(run: Run, case: Any) -> None:
    """``"100%"`` always works."""
    make, batch = case

    def step(model: Any, i: int) -> Any:
        loss = model(batch(run, i)).square().mean()
        loss.backward()
        return loss.detach()

    run.train(make(), step, budget="100%")


@variants({"linear": SMALL["linear"], "chain_dropout": SMALL["chain_dropout"]})
def hundred_percent_with_adamw(run: Run, case: Any) -> None:
    make, batch = case

    def step(model: Any, i: int) -> Any:
        loss = model(batch(run, i)).square().mean()
        loss.backward()
        return loss.detach()

    run.train(make(), step, budget="100%", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
