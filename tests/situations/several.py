"""Several forwards before a backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional as F

from situations.parts import Chain, ConvNet
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


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
    run.fit(g, 1.3 if both else None)
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
