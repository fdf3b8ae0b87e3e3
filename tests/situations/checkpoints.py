"""Checkpoints inside and around, adapters, preference losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from situations.parts import Chain, TokenModel
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@variants({"two": 2, "three": 3}, share=1.3)
def sequential_checkpoints(run: Run, segments: Any) -> None:
    """``checkpoint_sequential`` in the forward of a fitted model."""

    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.layers, segments, x, use_reentrant=False).square().mean()

    run.train(Sequential(), lambda m, i: _loss(m, run.x(i)))


@situation(share=1.3, refused=Refusal("CaptureError", "reentrant"), either=True)
def sequential_checkpoints_reentrant(run: Run) -> None:
    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=True).square().mean()

    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        model(x).backward()
        return x.grad

    run.train(Sequential(), step)


@variants({"other": False, "reentrant": True}, share=1.3, captures=-1, calls=-1)
def fitted_parts_under_checkpoints(run: Run, reentrant: Any) -> None:
    """``checkpoint_sequential`` over submodules that are fitted each."""
    parts = [run.fit(Chain(depth=3, p=0.1, loss=False)) for _ in range(3)]
    whole = nn.Sequential(*parts)
    for i in range(4):
        whole.zero_grad()
        x = run.x(i).requires_grad_()
        with run.step(beside=parts[1:]):
            loss = checkpoint_sequential(whole, 2, x, use_reentrant=reentrant).square().mean()
            loss.backward()
        run.see(f"x.grad {i}", x.grad)
        del loss
        run.see_model(whole, f"step {i}")


@situation(share=1.3, captures=-1, calls=-1)
def fitted_twice_under_checkpoints(run: Run) -> None:
    """One fitted module in two checkpoints of one step."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False) + checkpoint(model, x * 2, use_reentrant=False)
        loss.backward()
        return loss.detach(), x.grad

    run.train(Chain(p=0.1), step)


@situation(share=1.3, captures=-1, calls=-1)
def fitted_under_nested_checkpoints(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        x = run.x(i).requires_grad_()
        inner = lambda x: checkpoint(model, x, use_reentrant=False) * model(x)  # noqa: E731
        loss = checkpoint(inner, x, use_reentrant=False)
        loss.backward()
        return loss.detach(), x.grad

    run.train(Chain(p=0.1), step)


@situation(share=0.9)
def checkpoints_inside(run: Run) -> None:
    """Checkpoints placed by hand inside of the model."""

    class ByHand(Chain):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: F.dropout(F.gelu(layer(x)), 0.1), x, use_reentrant=False)
            return x

    run.train(ByHand(), lambda m, i: _loss(m, run.x(i)))


class LoRA(nn.Module):
    """A layer as PEFT writes it: frozen weight, two small ones, dropout before them."""

    def __init__(self, base: nn.Linear, rank: int = 4, p: float = 0.05) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(p)})
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base(x, *args, **kwargs)
        for name in self.active_adapters:
            x = x.to(self.lora_A[name].weight.dtype)
            result = result + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
        return result


class DoRA(LoRA):
    """Weight-decomposed: the norm of the merged weight is detached, found from an identity through the adapters."""

    def __init__(self, base: nn.Linear, rank: int = 4, p: float = 0.05) -> None:
        super().__init__(base, rank, p)
        self.magnitude = nn.Parameter(torch.linalg.norm(base.weight.detach(), dim=1))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        a, b, scaling = self.lora_A["default"], self.lora_B["default"], self.scaling["default"]
        dropped = self.lora_dropout["default"](x)
        result = self.base(x)
        identity = torch.eye(a.weight.shape[1], device=a.weight.device, dtype=x.dtype)
        delta = b(a(identity)).T.detach()
        norm = torch.linalg.norm(self.base.weight + scaling * delta, dim=1).to(x.dtype).detach()
        scale = (self.magnitude / norm).view(1, -1)
        base_result = result - self.base.bias if self.base.bias is not None else result
        return result + (scale - 1) * base_result + scale * b(a(dropped)) * scaling


def _adapted(kind: Any) -> nn.Module:
    model = Chain()
    model.requires_grad_(False)
    for k in range(len(model.layers)):
        model.layers[k] = kind(model.layers[k])
    return model


@variants({"lora": LoRA, "dora": DoRA}, share=0.9)
def adapters(run: Run, kind: Any) -> None:
    run.train(_adapted(kind), lambda m, i: _loss(m, run.x(i)))


@situation(share=0.9, captures=2)
def adapters_switched_off(run: Run) -> None:
    """``disable_adapter()``: the reference of a preference loss is the same model without its adapters."""
    model = run.fit(_adapted(LoRA))
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            for layer in model.layers:
                layer.active_adapters = []
            with torch.no_grad():
                reference = model(x)
            for layer in model.layers:
                layer.active_adapters = ["default"]
            loss = (model(x) - reference).square()
            loss.backward()
        del loss, reference
        run.see_model(model, f"step {i}")


def _log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1).sum(-1)


@variants({"concatenated": True, "two_forwards": False}, share=1.0)
def preferences(run: Run, concatenated: Any) -> None:
    """TRL's DPO: policy and frozen reference, chosen and rejected, a log-sigmoid of log-ratios outside."""
    policy, reference = TokenModel(), TokenModel().requires_grad_(False)
    reference.load_state_dict(policy.state_dict())
    run.fit(policy)
    sgd = torch.optim.SGD(policy.parameters(), lr=1e-2)
    for i in range(5):
        sgd.zero_grad()
        chosen, rejected = run.tokens(i), run.tokens(i + 50)
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            reference_logps = _log_probabilities(reference(both), both)
        with run.step(beside=[reference], bytes_beside=reference_logps.nbytes + both.nbytes):
            if concatenated:
                logps = _log_probabilities(policy(both), both)
            else:
                logps = torch.cat([_log_probabilities(policy(each), each) for each in (chosen, rejected)])
            ratio = (logps - reference_logps).chunk(2)
            loss = -F.logsigmoid(0.1 * (ratio[0] - ratio[1])).mean()
            del logps, ratio
            loss.backward()
        sgd.step()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(policy, f"step {i}")


@situation(share=1.0)
def preferences_inside(run: Run) -> None:
    """Policy and reference in one module that gives the loss."""

    class Dpo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.reference = TokenModel(), TokenModel().requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logps = _log_probabilities(self.policy(tokens), tokens)
            with torch.no_grad():
                old = _log_probabilities(self.reference(tokens), tokens)
            ratio = (logps - old).chunk(2)
            return -F.logsigmoid(0.1 * (ratio[0] - ratio[1])).mean()

    run.train(Dpo(), lambda m, i: _loss(m, run.tokens(i)))
