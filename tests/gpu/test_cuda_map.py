"""A step traced on CPU tensors for this card is the one traced on the card, op by op and byte by byte."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ebbtide.capture.offline import capture
from ebbtide.case import Case
from ebbtide.cost.call import Call, call_with
from ebbtide.cost.cuda_workspace import cublas_bytes, workspace_bytes
from ebbtide.cost.profile import profile_calls
from ebbtide.step.machine import Machine, machine_named
from ebbtide.step.program import Program
from ebbtide.zoo.small import SMALL
from papers import paper_model

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def this_card() -> Machine:
    major, minor = torch.cuda.get_device_capability()
    return replace(machine_named("a100-80gb"), name="this card", capability=f"{major}.{minor}")


def program_of(case: Case, device: str) -> Program:
    """The case's step, traced on ``device``; on CPU as on this card."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = pytree.tree_map(there, (case.args, dict(case.kwargs)))
    joint = capture(
        case.model.to(device),
        args,
        kwargs,
        name=case.name,
        granularity_bytes=512,
        context={"device": device},
        here=False,
        cuda=this_card().compute_capability if device == "cpu" else None,
    )
    return joint.program


def rows(program: Program) -> list[tuple[object, ...]]:
    return [
        (op.target, [program.buffers[b].bytes for b in op.outputs], op.state_bytes, op.rerunnable) for op in program.ops
    ]


def in_dtype(build: Callable[[], Case], dtype: torch.dtype) -> Case:
    case = build()
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in case.args)
    return Case(case.model.to(dtype), args, case.kwargs, case.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt", "hf_bert", "hf_llama", "llama", "nmt", "lstm_lm", "resnet50", "unet"])
def test_each_op_of_a_model_has_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    make = SMALL.get(name) or paper_model(name, small=True)
    mapped = rows(program_of(in_dtype(make, dtype), "cpu"))
    true = rows(program_of(in_dtype(make, dtype), "cuda"))
    for index, (mine, theirs) in enumerate(itertools.zip_longest(mapped, true)):
        assert mine == theirs, f"op {index}"


def attention_backward(backend: SDPBackend, dtype: torch.dtype, width: int, heads: int, key_heads: int) -> Call:
    """The backward call of one attention on the card."""
    q = torch.randn(2, heads, 1000, width, dtype=dtype, device="cuda")
    k = torch.randn(2, key_heads, 1000, width, dtype=dtype, device="cuda")
    with sdpa_kernel(backend):
        if backend is SDPBackend.FLASH_ATTENTION:
            out = aten._scaled_dot_product_flash_attention.default(q, k, k, 0.0, True)
            args = (q, q, k, k, out[0], out[1], out[2], out[3], out[4], out[5], 0.0, True, out[6], out[7])
            target = aten._scaled_dot_product_flash_attention_backward.default
        else:
            out = aten._scaled_dot_product_efficient_attention.default(q, k, k, None, True, 0.0, True)
            args = (q, q, k, k, None, out[0], out[1], out[2], out[3], 0.0, [True, True, True, False], True)
            target = aten._scaled_dot_product_efficient_attention_backward.default
        return call_with(target, args, {}, [each for each in target(*args) if each is not None])


@pytest.mark.parametrize(
    ("backend", "dtype", "width", "heads", "key_heads"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 64, 8, 8),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, 128, 8, 2),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, 64, 8, 8),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float16, 64, 8, 8),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float16, 256, 8, 8),
    ],
)
def test_workspaces_of_attention_are_no_larger_than_told(
    backend: SDPBackend, dtype: torch.dtype, width: int, heads: int, key_heads: int
) -> None:
    if backend is SDPBackend.FLASH_ATTENTION and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    call = attention_backward(backend, dtype, width, heads, key_heads)
    (cost,) = profile_calls([call], "cuda").values()
    told = workspace_bytes(call, this_card())
    assert cost.workspace_bytes <= told
    if backend is SDPBackend.FLASH_ATTENTION:  # no bound but the sum of its allocations
        assert cost.workspace_bytes >= 0.5 * told


def test_cublas_holds_what_is_told() -> None:
    program = program_of(SMALL["mlp_chain"](), "cpu")
    x = torch.randn(64, 64, device="cuda")
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    product = x @ x
    held = torch.cuda.memory_allocated() - before - product.numel() * product.element_size()
    assert 2 * held == cublas_bytes(program, this_card())
