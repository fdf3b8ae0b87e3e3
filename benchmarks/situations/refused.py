"""What eager runs: planned wherever one graph can hold it, else refused by name with what to change."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from situations.parts import Attention, Chain, TokenModel, Wrapped
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


# -- frozen, and outputs of one element ------------------------------------------------------------------------------


@situation(calls=-1, captures=-1)
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


@situation(captures=-1, calls=-1)
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


# -- arguments ------------------------------------------------------------------------------------------------------


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


# -- random draws ---------------------------------------------------------------------------------------------------

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
            if not self.training or drawn > self.rate:
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


# -- hooks that ask for gradients -----------------------------------------------------------------------------------


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


# -- kernels and functions ------------------------------------------------------------------------------------------


@situation(refused=Refusal("CaptureError", "autograd.grad|gradient"), either=True, share=1.1)
def grad_in_the_forward(run: Run) -> None:
    """Forces as gradients of an energy: ``torch.autograd.grad`` in the forward."""

    class Forces(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                energy = self.features(x).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().mean()

    run.train(Forces(depth=3), lambda m, i: _loss(m, run.x(i)))


@situation(refused=Refusal("CaptureError", "autograd.grad|gradient"), either=True, share=1.1)
def grad_in_the_forward_detached(run: Run) -> None:
    """The same without a graph of its own."""

    class Weighted(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.features(x)
            (weight,) = torch.autograd.grad(out.square().sum(), out, retain_graph=True)
            return (out * weight.detach()).mean()

    run.train(Weighted(depth=3), lambda m, i: _loss(m, run.x(i)))


def _square(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x[:64] @ x[:64].t() / 64 + 3 * torch.eye(64)


ALGEBRA = {
    "solve": lambda m, x: torch.linalg.solve(_square(m, x), x[:64]).square().mean(),
    "logdet": lambda m, x: torch.logdet(_square(m, x)) / 64,
    "slogdet": lambda m, x: torch.linalg.slogdet(_square(m, x)).logabsdet / 64,
    "inv": lambda m, x: torch.linalg.inv(_square(m, x)).square().mean(),
    "cholesky": lambda m, x: torch.linalg.cholesky(_square(m, x)).square().mean(),
    "lu_solve": lambda m, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(_square(m, x)), x[:64]).square().mean(),
    "eigh": lambda m, x: torch.linalg.eigh(_square(m, x)).eigenvalues.square().mean(),
    "svd": lambda m, x: torch.linalg.svdvals(x[:64]).mean(),
    "qr": lambda m, x: torch.linalg.qr(x[:128])[1].abs().mean(),
    "lstsq": lambda m, x: torch.linalg.lstsq(x[:128], x[128:256]).solution.square().mean(),
    "matrix_exp": lambda m, x: torch.linalg.matrix_exp(_square(m, x) / 100).square().mean(),
}


@variants(ALGEBRA, share=1.02)
def algebra(run: Run, function: Any) -> None:
    """Kernels that cannot be timed on made-up numbers."""
    run.train(Wrapped(function, depth=4), lambda m, i: _loss(m, run.x(i)), steps=3)


def _ctc(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x.view(128, 8, 64).log_softmax(-1)
    targets = torch.arange(8 * 20).view(8, 20) % 63 + 1
    return F.ctc_loss(scores, targets, torch.full((8,), 128), torch.full((8,), 20))


def _ctc_concatenated(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x.view(128, 8, 64).log_softmax(-1)
    lengths = torch.arange(8) + 13
    return F.ctc_loss(scores, torch.arange(int(132)) % 63 + 1, torch.full((8,), 128), lengths, zero_infinity=True)


CRITERIA = {
    "ctc": _ctc,
    "ctc_concatenated": _ctc_concatenated,
    "ctc_tuples": lambda m, x: F.ctc_loss(
        x.view(128, 8, 64).log_softmax(-1), torch.ones(8, 20, dtype=torch.long), (128,) * 8, (20,) * 8
    ),
    "nll": lambda m, x: F.nll_loss(x.log_softmax(-1), torch.arange(1024) % 64),
    "cross_entropy_ignored": lambda m, x: F.cross_entropy(x, torch.arange(1024) % 65 - 1, ignore_index=-1),
    "cross_entropy_smoothed": lambda m, x: F.cross_entropy(x, torch.arange(1024) % 64, label_smoothing=0.1),
    "multi_margin": lambda m, x: F.multi_margin_loss(x, torch.arange(1024) % 64),
    "cosine": lambda m, x: F.cosine_embedding_loss(x[:512], x[512:], torch.ones(512)),
    "gaussian_nll": lambda m, x: F.gaussian_nll_loss(x, torch.zeros_like(x), x.exp()),
}


@variants(CRITERIA, share=1.02)
def criterion(run: Run, function: Any) -> None:
    run.train(Wrapped(function, depth=4), lambda m, i: _loss(m, run.x(i)), steps=3)


_SPARSE = Refusal("CaptureError|UsageError", "sparse")


@variants({"embedding": False, "bag": True}, refused=_SPARSE, either=True, share=1.2)
def sparse(run: Run, bag: Any) -> None:
    """``sparse=True``: planned, or refused by name."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = (nn.EmbeddingBag if bag else nn.Embedding)(1000, 32, sparse=True)
            self.out = nn.Linear(32, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens)).square().mean()

    run.train(Looking(), lambda m, i: _loss(m, run.tokens(i, most=1000)))


@situation(refused=_SPARSE, either=True, share=1.2)
def sparse_product(run: Run) -> None:
    """A sparse matrix as a constant, as in graph networks."""
    indices = torch.stack([torch.arange(1024), (torch.arange(1024) * 7) % 1024])
    matrix = torch.sparse_coo_tensor(indices, torch.ones(1024), (1024, 1024)).coalesce()
    run.train(Wrapped(lambda m, x: torch.sparse.mm(matrix, x).square().mean()), lambda m, i: _loss(m, run.x(i)))


# -- checkpoints ----------------------------------------------------------------------------------------------------


@variants({"two": 2, "three": 3}, share=1.3)
def sequential_checkpoints(run: Run, segments: Any) -> None:
    """``checkpoint_sequential`` in the forward of a fitted model."""

    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)])

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


# -- adapters, preferences ------------------------------------------------------------------------------------------


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


# -- what no plan can hold ------------------------------------------------------------------------------------------


@situation(refused=Refusal("CaptureError", "depends on data|data-dependent|branch|control flow"))
def branch_on_data(run: Run) -> None:
    run.train(Wrapped(lambda m, x: x.square().mean() if x.sum() > 0 else x.abs().mean()), lambda m, i: _loss(m, run.x(i)))


@situation(refused=Refusal("CaptureError", "depends on data|data-dependent|nonzero|size"))
def size_from_data(run: Run) -> None:
    run.train(Wrapped(lambda m, x: x[x > 0].square().mean()), lambda m, i: _loss(m, run.x(i)))


@situation(refused=Refusal("CaptureError", "packed"))
def packed_sequence(run: Run) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 8)

        def forward(self, x: Any) -> torch.Tensor:
            return self.rnn(x)[0].data.square().mean()

    def step(model: Any, i: int) -> Any:
        return _loss(model, nn.utils.rnn.pack_padded_sequence(run.x(i, 12, 4, 8), torch.tensor([12, 10, 7, 3])))

    run.train(Packed(), step)


@situation(refused=Refusal("UsageError", "torch.compile|compiled"))
def compiled_first(run: Run) -> None:
    """``fit(torch.compile(model))``."""
    run.fit(torch.compile(Chain(), backend="eager"))


@situation(refused=Refusal("UsageError", "torch.jit|ScriptModule"))
def scripted(run: Run) -> None:
    run.fit(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.GELU())))


@situation(refused=Refusal("BudgetError", "too small"))
def budget_too_small(run: Run) -> None:
    run.train(Chain(), lambda m, i: _loss(m, run.x(i)), budget="64KiB")


@situation(share=0.9)
def printing(run: Run) -> None:
    """``print`` in the forward: a refusal says how to leave it out, or the step is planned without it."""

    class Printing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                print("forward", x.shape)
            return super().forward(x)

    run.train(Printing(), lambda m, i: _loss(m, run.x(i)))


@situation(share=1.1, captures=1)
def recurrent(run: Run) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(x)[0]).square().mean()

    run.train(Recurrent(), lambda m, i: _loss(m, run.x(i, 8, 4, 16)), steps=3)


@situation(share=0.95)
def custom_function(run: Run) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return grad * 2 + x * 0

    run.train(Wrapped(lambda m, x: Doubled.apply(x).square().mean()), lambda m, i: _loss(m, run.x(i)))


@situation(share=0.95)
def attention_blocks(run: Run) -> None:
    run.train(Attention(p=0.1, blocks=3), lambda m, i: _loss(m, run.x(i, 8, 32, 32)))
