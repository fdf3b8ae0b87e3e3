"""Bits: hooks that come late, autocast, interpolation, orders of summation, memory that is rewritten."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from situations.parts import Attention, Chain, ConvNet, TokenModel, Wrapped
from situations.registry import Refusal, situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


# -- hooks ----------------------------------------------------------------------------------------------------------


def _late(run: Run, put: Any, *, off: bool = False, steps: int = 6) -> None:
    """``put`` hooks on after the second step and, with ``off``, takes them off after the fourth."""
    model, handles = run.fit(Chain()), []
    for i in range(steps):
        if i == 2:
            handles = put(model)
        if i == 4 and off:
            for handle in handles:
                handle.remove()
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


HOOKS = {
    "forward": lambda m: [m.layers[2].register_forward_hook(lambda mod, args, out: out * 2)],
    "forward_pre": lambda m: [m.layers[2].register_forward_pre_hook(lambda mod, args: (args[0] * 2,))],
    "forward_kwargs": lambda m: [
        m.layers[2].register_forward_pre_hook(lambda mod, args, kw: ((args[0] + 1,), kw), with_kwargs=True)
    ],
    "on_every_layer": lambda m: [each.register_forward_hook(lambda mod, args, out: out + 1) for each in m.layers],
    "on_the_list": lambda m: [m.layers[-1].register_forward_hook(lambda mod, args, out: out.clamp(min=0))],
}


@variants({**HOOKS, "on_the_model": lambda m: [m.register_forward_hook(lambda mod, args, out: out * 2)]}, captures=-1)
def hook_late(run: Run, put: Any) -> None:
    """A forward hook or pre-hook that is put on after the first call changes loss and gradients."""
    _late(run, put)


@variants({name: HOOKS[name] for name in ("forward", "forward_pre")}, captures=-1)
def hook_late_and_off(run: Run, put: Any) -> None:
    _late(run, put, off=True)


BACKWARD = {
    "full": lambda m: [m.layers[2].register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 2,))],
    "full_pre": lambda m: [m.layers[2].register_full_backward_pre_hook(lambda mod, gout: (gout[0] * 2,))],
    "full_everywhere": lambda m: [
        each.register_full_backward_hook(lambda mod, gin, gout: (gin[0] * 2,)) for each in m.layers[1:]
    ],
}


@variants(BACKWARD, captures=-1, refused=Refusal("CaptureError", "hook"), either=True)
def backward_hook_late(run: Run, put: Any) -> None:
    """A backward hook on a submodule runs, or is refused by name; it is never ignored."""
    _late(run, put)


@variants(BACKWARD, captures=-1, refused=Refusal("CaptureError", "hook"), either=True)
def backward_hook_first(run: Run, put: Any) -> None:
    model = Chain()
    put(model)
    run.train(model, lambda m, i: _loss(m, run.x(i)))


@variants(
    {
        "parameter": lambda m: [m.layers[2].weight.register_hook(lambda grad: grad * 2)],
        "accumulated": lambda m: [
            m.layers[2].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1])
        ],
        "model_backward": lambda m: [m.register_full_backward_hook(lambda mod, gin, gout: None)],
    },
    captures=-1,
)
def hook_outside_late(run: Run, put: Any) -> None:
    """Hooks on parameters and on the model itself run outside of the captured step."""
    _late(run, put)


@situation(captures=-1)
def hook_that_only_looks(run: Run) -> None:
    """Activation statistics for a logger."""
    seen: list[float] = []
    _late(run, lambda m: [m.layers[3].register_forward_hook(lambda mod, args, out: seen.append(1.0))])
    run.see("calls of the hook", float(len(seen)))


@situation(captures=-1)
def global_hook_late(run: Run) -> None:
    """``register_module_forward_hook``: on every module of the process."""
    from torch.nn.modules import module

    handle = None
    model = run.fit(Chain())
    for i in range(5):
        if i == 2:
            handle = module.register_module_forward_hook(
                lambda mod, args, out: out * 2 if isinstance(mod, nn.Linear) else None
            )
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")
    assert handle is not None
    handle.remove()


# -- what changes on the model after the first call ------------------------------------------------------------------


def _layer_swapped(m: Any) -> None:
    m.layers[2] = nn.Linear(64, 64, bias=False)


CHANGES = {
    "dropout_rate": lambda m: setattr(m, "p", 0.3),
    "layer_replaced": _layer_swapped,
    "layer_forward": lambda m: setattr(m.layers[2], "forward", lambda x: x * 2),
    "weight_replaced": lambda m: setattr(m.layers[2], "weight", nn.Parameter(m.layers[2].weight.detach() * 2)),
    "weight_data": lambda m: setattr(m.layers[2].weight, "data", m.layers[2].weight.detach() * 2),
    "eval": lambda m: m.eval(),
    "part_in_eval": lambda m: m.layers[2].eval(),
    "frozen_part": lambda m: m.layers[2].requires_grad_(False),
    "bias_removed": lambda m: setattr(m.layers[2], "bias", None),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.layers[2]),
}


@variants(CHANGES, captures=-1)
def changed_late(run: Run, change: Any) -> None:
    """What the step depends on changes after the second step."""
    model = run.fit(Chain(p=0.1))
    for i in range(5):
        if i == 2:
            torch.manual_seed(7)
            change(model)
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        run.see_model(model, f"step {i}")


# -- autocast -------------------------------------------------------------------------------------------------------

CAST = {
    "chain": (lambda: Chain(p=0.1), lambda run, i: run.x(i)),
    "sdpa": (lambda: Attention(sdpa=True), lambda run, i: run.x(i, 8, 32, 32)),
    "sdpa_dropout": (lambda: Attention(sdpa=True, p=0.2), lambda run, i: run.x(i, 8, 32, 32)),
    "attention_dropout": (lambda: Attention(sdpa=False, p=0.2), lambda run, i: run.x(i, 8, 32, 32)),
    "attention": (lambda: Attention(sdpa=False), lambda run, i: run.x(i, 8, 32, 32)),
    "multihead": (lambda: _Multihead(0.0), lambda run, i: run.x(i, 8, 32, 32)),
    "multihead_dropout": (lambda: _Multihead(0.2), lambda run, i: run.x(i, 8, 32, 32)),
    "convolutions": (lambda: _Mean(ConvNet(p=0.2)), lambda run, i: run.x(i, 4, 3, 24, 24)),
    "tokens": (lambda: _Mean(TokenModel(p=0.1)), lambda run, i: run.tokens(i)),
    "encoder_layer": (lambda: _Mean(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)), lambda run, i: run.x(i, 8, 32, 32)),
}


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).float().square().mean()


class _Multihead(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, dropout=p, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0]).float().square().mean()


@variants(CAST, share=0.95)
def autocast(run: Run, case: Any) -> None:
    """bf16 as PyTorch advises it: the forward inside, the backward outside."""
    make, batch = case

    def step(model: Any, i: int) -> Any:
        x = batch(run, i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
        return loss.detach()

    run.train(make(), step)


@variants(
    {name: CAST[name] for name in ("chain", "sdpa_dropout", "attention_dropout", "convolutions")},
    share=0.95,
    refused=Refusal("CaptureError", "autocast"),
    either=True,
)
def backward_inside_autocast(run: Run, case: Any) -> None:
    """An error before any gradient leaves, or the right numbers."""
    make, batch = case

    def step(model: Any, i: int) -> Any:
        x = batch(run, i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
            loss.backward()
        return loss.detach()

    run.train(make(), step)


@situation(share=0.95, captures=-1, refused=Refusal("CaptureError", "autocast"), either=True)
def backward_inside_from_step_two(run: Run) -> None:
    """The first backward is outside, later ones inside: never silently other numbers."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i, 8, 32, 32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
            if i >= 2:
                loss.backward()
        if i < 2:
            loss.backward()
        return loss.detach()

    run.train(Attention(p=0.2, sdpa=False), step)


@situation(share=0.95, refused=Refusal("CaptureError", "autocast"), either=True)
def backward_alone_inside_autocast(run: Run) -> None:
    """A float32 forward outside, its backward inside."""

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i, 8, 32, 32))
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return loss.detach()

    run.train(Attention(p=0.2, sdpa=False), step)


@situation(captures=2)
def autocast_on_and_off(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        x = run.x(i)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(i % 2)):
            loss = model(x)
        loss.backward()
        return loss.detach()

    run.train(Chain(p=0.1), step, steps=6)


@situation(share=0.95)
def autocast_within_the_model(run: Run) -> None:
    class Casting(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return loss + self.out[0](x).square().mean()

    run.train(Casting(p=0.2, sdpa=False), lambda m, i: _loss(m, run.x(i, 8, 32, 32)))


@situation(share=1.0)
def autocast_two_forwards(run: Run) -> None:
    """Within one block, weights are cast once and their copies are shared."""

    def step(model: Any, i: int) -> Any:
        one, other = run.x(2 * i), run.x(2 * i + 1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(one) + model(other)
        loss.backward()
        return loss.detach()

    run.train(Chain(), step)


@situation(share=0.95)
def autocast_with_scaler(run: Run) -> None:
    """``GradScaler``, as float16 loops have it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    model = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    run.fit(model)
    for i in range(4):
        sgd.zero_grad()
        x = run.x(i)
        with run.step():
            with torch.autocast("cpu", torch.float16):
                loss = model(x)
            scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def bfloat16_parameters(run: Run) -> None:
    run.train(Chain(p=0.1).bfloat16(), lambda m, i: _loss(m, run.x(i).bfloat16()))


@situation(share=0.9)
def float64(run: Run) -> None:
    run.train(Chain(p=0.1).double(), lambda m, i: _loss(m, run.x(i).double()))


# -- decompositions -------------------------------------------------------------------------------------------------


class Resized(nn.Module):
    """Convolutions around a resize to twice the size, or ``size``."""

    def __init__(self, dims: int, resize: Any) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.convs = nn.ModuleList([kind(4, 8, 3, padding=1), kind(8, 8, 3, padding=1), kind(8, 8, 3, padding=1)])
        self.last, self.resize = kind(8, 4, 3, padding=1), resize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.last(self.resize(x)).square().mean()


def _interpolated(dims: int, **how: Any) -> Any:
    shape = (4, 4, *{1: (256,), 2: (24, 24), 3: (8, 12, 12)}[dims])
    return lambda: Resized(dims, lambda x: F.interpolate(x, **({"scale_factor": 2} | how))), shape


INTERPOLATIONS = {
    "nearest": _interpolated(2, mode="nearest"),
    "nearest_1d": _interpolated(1, mode="nearest"),
    "nearest_exact": _interpolated(2, mode="nearest-exact"),
    "linear": _interpolated(1, mode="linear"),
    "linear_corners": _interpolated(1, mode="linear", align_corners=True),
    "bilinear": _interpolated(2, mode="bilinear"),
    "bilinear_corners": _interpolated(2, mode="bilinear", align_corners=True),
    "bilinear_size": _interpolated(2, mode="bilinear", size=(37, 41), scale_factor=None),
    "bilinear_down": _interpolated(2, mode="bilinear", scale_factor=0.5),
    "bilinear_antialiased": _interpolated(2, mode="bilinear", scale_factor=0.5, antialias=True),
    "bicubic": _interpolated(2, mode="bicubic"),
    "bicubic_corners": _interpolated(2, mode="bicubic", align_corners=True),
    "trilinear": _interpolated(3, mode="trilinear"),
    "trilinear_corners": _interpolated(3, mode="trilinear", align_corners=True),
    "area": _interpolated(2, mode="area", scale_factor=0.5),
}


@variants(INTERPOLATIONS, share=1.0)
def interpolate(run: Run, case: Any) -> None:
    """Eager's kernels and eager's bytes."""
    make, shape = case
    run.train(make(), lambda m, i: _loss(m, run.x(i, *shape)), steps=3)


@situation(share=1.0)
def upsample_module(run: Run) -> None:
    inner = nn.Upsample(scale_factor=2, mode="bicubic")
    run.train(Resized(2, inner), lambda m, i: _loss(m, run.x(i, 4, 4, 24, 24)), steps=3)


DECOMPOSED = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 4),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "instance_norm": lambda x: F.instance_norm(x.unflatten(1, (8, 8))).flatten(1),
    "glu": lambda x: F.glu(x, -1),
    "cumprod": lambda x: (x / 4 + 1).cumprod(-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "var_mean": lambda x: sum(torch.var_mean(x, -1, keepdim=True)) + x,
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / 64), reduction="none"),
    "grid_sample": lambda x: F.grid_sample(
        x.view(4, 4, 64, 64), torch.tanh(x.view(4, 4, 64, 64)[:, :2]).permute(0, 2, 3, 1), align_corners=False
    ).reshape(x.shape),
    "unfold": lambda x: F.unfold(x.view(4, 4, 64, 64), 3, padding=1).mean(1),
    "reflection_pad": lambda x: F.pad(x.view(4, 4, 64, 64), (1, 1, 1, 1), mode="reflect"),
    "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x.view(4, 4, 64, 64), (7, 5)),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(1024) % 100, x),
    "scatter_reduce": lambda x: torch.zeros_like(x).scatter_reduce(0, (x > 0).long(), x, "amax"),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "sort": lambda x: x.sort(-1).values * torch.arange(64),
    "embedding_bag": lambda x: F.embedding_bag(torch.arange(1024).view(128, 8), x, mode="mean"),
    "dropout2d": lambda x: F.dropout2d(x.view(4, 4, 64, 64), 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x, 0.7),
}


@variants(DECOMPOSED, share=1.02)
def operation(run: Run, function: Any) -> None:
    """A kernel between layers: eager's bits at eager's bytes."""
    run.train(Wrapped(lambda m, x: function(x).square().mean(), depth=3), lambda m, i: _loss(m, run.x(i)), steps=3)


# -- orders of summation, memory that is rewritten -------------------------------------------------------------------


@variants({"input": 2, "three": 3}, share=1.3)
def fitted_submodules_read_one_tensor(run: Run, count: Any) -> None:
    """The gradient of a tensor that several fitted submodules read is a sum in eager's order."""
    stem = nn.Linear(64, 64)
    parts = [run.fit(Chain(depth=4, loss=False), gradients="all") for _ in range(count)]
    for i in range(4):
        for module in (stem, *parts):
            module.zero_grad()
        x = run.x(i)
        with run.step(beside=[stem, *parts[1:]]):
            h = stem(x).tanh()
            loss = sum(part(h).square().mean() for part in parts) + h.abs().mean()
            del h
            loss.backward()
        run.see(f"loss {i}", loss)
        del loss
        for k, module in enumerate((stem, *parts)):
            run.see_model(module, f"part {k} step {i}")


@situation(share=1.3)
def fitted_experts(run: Run) -> None:
    """Two fitted parts of one parent, which is not fitted; one tensor feeds both and the sum."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Linear(64, 64), Chain(depth=3, loss=False), Chain(depth=3, loss=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return (x + self.a(x) * self.b(x)).square().mean()

    parent = Parent()
    run.fit(parent.a)
    run.fit(parent.b)
    for i in range(4):
        parent.zero_grad()
        x = run.x(i)
        with run.step(beside=[parent.stem, parent.b]):
            loss = parent(x)
            loss.backward()
        del loss
        run.see_model(parent, f"step {i}")


_REWRITTEN = Refusal("VerificationError", "rewritten|input|changed|verify")


@situation(share=0.45, refused=_REWRITTEN, either=True, limit="memory rewritten behind torch's back")
def numpy_view_rewritten(run: Run) -> None:
    """A prefetcher overwrites the batch between forward and backward: a limit that torch's checkpoint has as well."""
    model = run.fit(Chain())
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            x.numpy()[:] = 0.0
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.45, refused=Refusal("VerificationError", "rewritten|input|changed"))
def numpy_view_rewritten_always_verified(run: Run) -> None:
    """``verify="always"`` says so instead."""

    class Reading(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(F.relu(x)).square().mean()

    model = run.fit(Reading(), verify="always")
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            if i >= 3:
                x.numpy()[:] = 0.0
            loss.backward()
        del loss


@situation()
def verified_always(run: Run) -> None:
    """``verify="always"`` on a loop that rewrites nothing: as any other."""
    run.train(Chain(p=0.1), lambda m, i: _loss(m, run.x(i)), verify="always")


@situation()
def input_changed_in_place(run: Run) -> None:
    """``x.zero_()`` between: eager raises where it needs the old value, and so do we."""

    class Reading(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.features(x).square().mean()

    model = run.fit(Reading())
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            caught = ""
            x.zero_()
            try:
                loss.backward()
            except RuntimeError as error:
                caught = "inplace" if "inplace operation" in str(error) else str(error)[:60]
        run.see(f"caught {i}", caught)
        del loss
        if caught:
            return


@situation(share=0.9)
def static_input_buffer(run: Run) -> None:
    """One buffer for all batches, filled between steps as CUDA graphs want it."""
    buffer = torch.empty(1024, 64)

    def step(model: Any, i: int) -> Any:
        buffer.copy_(run.x(i))
        return _loss(model, buffer)

    run.train(Chain(), step)


@situation(share=0.9)
def parameter_changed_between(run: Run) -> None:
    """``optimizer.step()`` between a forward and its backward: eager raises, and so do we."""
    model = run.fit(Chain())
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
            caught = ""
            try:
                loss.backward()
            except RuntimeError as error:
                caught = "inplace" if "inplace operation" in str(error) else str(error)[:60]
        run.see(f"caught {i}", caught)
        del loss
