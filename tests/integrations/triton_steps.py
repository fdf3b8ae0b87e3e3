"""Steps with Triton kernels, for ``test_triton.py``: trained in eager and planned, or planned for a machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

import ebbtide
from ebbtide.errors import EbbtideError

_BLOCK = 1024


@triton.jit
def sine_kernel(x, out, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.sin(tl.load(x + at, mask=at < count)), mask=at < count)


@triton.jit
def slope_kernel(x, gradient, out, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    found = tl.cos(tl.load(x + at, mask=at < count)) * tl.load(gradient + at, mask=at < count)
    tl.store(out + at, found, mask=at < count)


def launched(kernel: Any, *given: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(given[0])
    kernel[(triton.cdiv(out.numel(), _BLOCK),)](*given, out, out.numel(), block=_BLOCK)
    return out


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return launched(sine_kernel, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return launched(slope_kernel, ctx.saved_tensors[0], gradient.contiguous())


def registered(register: Callable[..., Any], wrap: Callable[[Any], Any], collects: bool, fakes: bool) -> Any:
    """The op, by one of torch's two ways. Triton's interpreter launches on fake tensors too, so it needs ``fakes``."""

    ending = "" if collects else "_leaving"  # what an op was measured to take is kept by its name

    @register(f"triton_steps::sine{ending}", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        out = launched(wrap(sine_kernel), x)
        if collects:
            gc.collect()
        return out

    @register(f"triton_steps::slope{ending}", mutates_args=())
    def slope(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        out = launched(wrap(slope_kernel), x, gradient)
        if collects:
            gc.collect()
        return out

    if fakes:
        sine.register_fake(lambda x: torch.empty_like(x))
        slope.register_fake(lambda x, gradient: torch.empty_like(x))
    sine.register_autograd(
        lambda context, gradient: slope(context.saved_tensors[0], gradient.contiguous()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return sine


class Layers(nn.Module):
    def __init__(self, op: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(self.op(torch.tanh(layer(x))))
        return x.square().mean()


def liger(kind: str) -> nn.Module:
    import liger_kernel.transformers as kernels

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.loss = nn.Linear(32, 64, bias=False), kernels.LigerFusedLinearCrossEntropyLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.loss(self.head.weight, x, torch.zeros(len(x), dtype=torch.long))

    if kind == "liger_norm":
        return nn.Sequential(nn.Linear(32, 32), kernels.LigerRMSNorm(32))
    if kind == "liger_head":
        return Head()
    import transformers as hf

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, **sizes))
    kernels.apply_liger_kernel_to_llama(model=model)
    return model


def made(kind: str, fakes: bool) -> Callable[[], nn.Module]:
    if kind.startswith("liger"):
        return lambda: liger(kind)
    if kind == "function":
        return lambda: Layers(Sine.apply)
    if kind == "triton_op":
        op = registered(torch.library.triton_op, torch.library.wrap_triton, fakes, fakes)
    else:
        op = registered(torch.library.custom_op, lambda kernel: kernel, kind != "leaves", True)
    return lambda: Layers(op)


def trained(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    left: list[torch.Tensor] = []
    for _ in range(3):
        loss = model(torch.randn(128, 32))
        loss.backward()
        left += [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]
        model.zero_grad()
    return left


def runs(plan: Any) -> list[int]:
    ops = zip(plan.program.ops, map(int, plan.timeline.runs), strict=True)
    return [n for op, n in ops if op.target.startswith("triton_steps.")]


def main(kind: str, machine: str | None = None) -> None:
    make = made(kind, fakes=machine is None)
    options = ebbtide.Options(effort=100, progress=None)
    if machine is not None:
        tokens = torch.zeros(1, 8, dtype=torch.long)
        given: Any = {"kwargs": {"input_ids": tokens, "labels": tokens}}
        given = given if kind == "liger_llama" else {"args": (torch.randn(128, 32),)}
        print(f"planned, runs: {runs(ebbtide.plan(make(), **given, budget='100%', machine=machine, options=options))}")
        return
    fitted = ebbtide.fit(make(), "90%", options=options)
    ours, theirs = trained(fitted), trained(make())
    equal = len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    print(f"equal: {equal}, planned: {ebbtide.calls_of(fitted).planned}, runs: {runs(ebbtide.plan_of(fitted))}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except EbbtideError as error:
        print(type(error).__name__, " ".join(str(error).split()))
