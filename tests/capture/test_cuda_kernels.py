"""A step traced on CPU tensors for a CUDA machine has the ops, shapes and dtypes that CUDA has.

The oracle is torch itself: its descriptions of the CUDA ops run on ``meta`` tensors, which know no CPU. Which kernel
attention gets is written out by hand, case by case, from PyTorch's documentation and sources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide._api.estimate import capture_ahead, capture_program
from ebbtide.capture.cuda.attention import Attention, kernel_for
from ebbtide.capture.cuda.notes import cpu_only_ops
from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.capture.without_memory import without_memory
from ebbtide.case import Case
from ebbtide.cost.call import call_with
from ebbtide.cost.cuda_workspace import workspace_bytes
from ebbtide.errors import CaptureError
from ebbtide.options import Options
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.step.legality import check
from ebbtide.step.machine import machine_named
from ebbtide.step.program import Program
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt
from ebbtide.zoo.small import SMALL
from papers import paper_model

aten = torch.ops.aten
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
GRANULARITY = 512
LAYERS = 1
FORWARD = {
    "flash": aten._scaled_dot_product_flash_attention.default,
    "efficient": aten._scaled_dot_product_efficient_attention.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention.default,
}
BACKWARD = {
    "flash": aten._scaled_dot_product_flash_attention_backward.default,
    "efficient": aten._scaled_dot_product_efficient_attention_backward.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention_backward.default,
}


class Step(nn.Module):
    """A loss of what ``compute`` makes of one scaled input each."""

    def __init__(self, compute: Callable[..., torch.Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        self.parts = nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        scaled = [x * self.scale.to(x.dtype) if x.is_floating_point() else x for x in inputs]
        return self.compute(*self.parts, *scaled).float().sum()


def joint_of(
    compute: Callable[..., torch.Tensor],
    *inputs: tuple[Sequence[int], torch.dtype],
    modules: Callable[[], Sequence[nn.Module]] = tuple,
    capability: tuple[int, int] | None = (8, 0),
) -> Captured:
    with without_memory():
        step = Step(compute, *modules())
        args = tuple(torch.empty(tuple(shape), dtype=dtype) for shape, dtype in inputs)
    context = {"device": "cpu"}
    return capture(
        step, args, {}, name="step", granularity_bytes=GRANULARITY, context=context, here=False, cuda=capability
    )


def sizes(joint: Captured, target: object) -> list[int]:
    """Bytes of the buffers that the only op with this target makes."""
    (op,) = [op for op in joint.program.ops if op.target == str(target)]
    return [joint.program.buffers[b].bytes for b in op.outputs]


def rounded(results: Sequence[object]) -> list[int]:
    """Bytes of tensors as CUDA's allocator takes them."""
    tensors = [each for each in results if isinstance(each, torch.Tensor)]
    return [-(-each.numel() * each.element_size() // GRANULARITY) * GRANULARITY for each in tensors]


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


@dataclass(frozen=True)
class Call:
    """One call of attention, and the kernel that it gets on capability 8.0, 9.0 and 7.0."""

    on: tuple[str, str, str]
    dtype: torch.dtype = BRAIN
    queries: tuple[int, ...] = (2, 8, 96, 64)
    keys: tuple[int, ...] = (2, 8, 96, 64)
    mask: torch.dtype | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False


# A100, H100 and V100.
CALLS = {
    "bfloat16": Call(("flash", "cudnn", "math")),
    "float16": Call(("flash", "cudnn", "efficient"), dtype=HALF),
    "float32": Call(("efficient", "efficient", "efficient"), dtype=SINGLE),
    "float64": Call(("math", "math", "math"), dtype=DOUBLE),
    "causal": Call(("flash", "cudnn", "math"), causal=True),
    "dropout": Call(("flash", "cudnn", "efficient"), dtype=HALF, dropout=0.25),
    "causal, float32, dropout": Call(("efficient",) * 3, dtype=SINGLE, dropout=0.1, causal=True),
    "additive mask": Call(("efficient", "cudnn", "math"), mask=BRAIN),
    "bool mask": Call(("efficient", "cudnn", "efficient"), dtype=HALF, mask=torch.bool),
    "bool mask, float32": Call(("efficient",) * 3, dtype=SINGLE, mask=torch.bool),
    "unaligned mask": Call(("efficient", "cudnn", "math"), mask=BRAIN, queries=(2, 8, 96, 64), keys=(2, 8, 93, 64)),
    "cross": Call(("flash", "cudnn", "math"), keys=(2, 8, 80, 64)),
    "cross, causal": Call(("efficient", "cudnn", "math"), keys=(2, 8, 80, 64), causal=True),
    "grouped": Call(("flash", "cudnn", "math"), keys=(2, 2, 96, 64), grouped=True, causal=True),
    "grouped, float32": Call(("math",) * 3, dtype=SINGLE, keys=(2, 2, 96, 64), grouped=True),
    "grouped, mask": Call(("math", "cudnn", "math"), keys=(2, 2, 96, 64), grouped=True, mask=BRAIN),
    "head of 256": Call(("flash", "cudnn", "math"), queries=(2, 4, 64, 256), keys=(2, 4, 64, 256)),
    "head of 320": Call(("efficient", "efficient", "math"), queries=(2, 4, 64, 320), keys=(2, 4, 64, 320)),
    "head of 60": Call(("flash", "flash", "math"), queries=(2, 4, 64, 60), keys=(2, 4, 64, 60)),
    "head of 6, float32": Call(("math", "math", "efficient"), SINGLE, (2, 4, 64, 6), (2, 4, 64, 6)),
    "three dimensions": Call(("math",) * 3, queries=(8, 96, 64), keys=(8, 96, 64)),
}
A100, H100, V100 = CAPABILITIES = ((8, 0), (9, 0), (7, 0))
# Those that are captured, each on a card where it gets another kernel, other dtypes or other shapes than the rest.
CAPTURED = {
    "bfloat16": A100,
    "float32": V100,
    "causal": H100,
    "dropout": A100,
    "causal, float32, dropout": A100,
    "bool mask": A100,
    "additive mask": H100,
    "unaligned mask": A100,
    "grouped": A100,
    "grouped, mask": A100,
    "head of 60": A100,
}


def captured_attention(call: Call, capability: tuple[int, int] | None) -> Captured:
    inputs = [(call.queries, call.dtype), (call.keys, call.dtype), (call.keys, call.dtype)]
    if call.mask is not None:
        inputs.append(((call.queries[-2], call.keys[-2]), call.mask))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        given = mask[0].detach() if mask else None
        return F.scaled_dot_product_attention(
            q, k, v, given, call.dropout, call.causal, scale=None, enable_gqa=call.grouped
        )

    return joint_of(attend, *inputs, capability=capability)


def attention_ops(program: Program) -> list[str]:
    return [op.target for op in program.ops if "attention" in op.target]


@pytest.mark.parametrize("name", CALLS)
def test_attention_gets_the_kernel_that_cuda_takes(name: str) -> None:
    call = CALLS[name]
    q, k = (empty(shape, call.dtype).requires_grad_() for shape in (call.queries, call.keys))
    mask = None if call.mask is None else empty((call.queries[-2], call.keys[-2]), call.mask)
    made = Attention(q, k, k, mask, call.dropout, call.causal, grouped=call.grouped)
    assert tuple(kernel_for(made, capability) for capability in CAPABILITIES) == call.on


@pytest.mark.parametrize("name", CAPTURED)
def test_attention_makes_the_buffers_of_that_kernel(name: str) -> None:
    call, capability = CALLS[name], CAPTURED[name]
    kernel = call.on[CAPABILITIES.index(capability)]
    joint = captured_attention(call, capability)
    found = attention_ops(joint.program)
    if kernel == "math":
        assert found == []
        assert any(op.target in ("aten.bmm.default", "aten._safe_softmax.default") for op in joint.program.ops)
        return
    assert found == [str(FORWARD[kernel]), str(BACKWARD[kernel])]
    width = -(-call.queries[-1] // 8) * 8 if kernel == "flash" else call.queries[-1]
    q, k = (empty((*shape[:-1], width), call.dtype) for shape in (call.queries, call.keys))
    mask = None if call.mask is None else empty((*call.queries[:-1], call.keys[-2]), call.dtype)
    extra = () if kernel == "flash" else (mask, True)
    forward = FORWARD[kernel](q, k, k, *extra, call.dropout, call.causal)
    assert sizes(joint, FORWARD[kernel]) == rounded(forward)
    assert sizes(joint, BACKWARD[kernel]) == rounded((q, k, k))
    random = [op.random for op in joint.program.ops if "attention" in op.target]
    assert random == [call.dropout > 0, False]  # the backward is given what the forward drew from


def test_logsumexp_of_the_efficient_kernel_is_padded() -> None:
    """96 rows are a multiple of 32 already; these are not."""
    odd = replace(CALLS["float32"], queries=(1, 3, 1000, 64), keys=(1, 3, 1000, 64))
    output, logsumexp, *_ = sizes(captured_attention(odd, (8, 0)), FORWARD["efficient"])
    assert output == 4 * 3 * 1000 * 64
    assert logsumexp == 4 * 3 * 1024


@pytest.mark.parametrize(
    ("capability", "width", "dropout", "kernel"),
    [
        ((8, 0), 208, 0.0, "flash"),
        ((8, 9), 192, 0.0, "flash"),
        ((8, 9), 208, 0.0, "efficient"),
        ((8, 9), 256, 0.0, "flash"),
        ((8, 9), 256, 0.1, "efficient"),
        ((12, 0), 208, 0.0, "efficient"),
        ((10, 0), 256, 0.0, "flash"),
        ((10, 0), 128, 0.0, "cudnn"),
        ((5, 2), 64, 0.0, "efficient"),
    ],
)
def test_small_shared_memory_and_other_cards(
    capability: tuple[int, int], width: int, dropout: float, kernel: str
) -> None:
    q = torch.empty(1, 2, 16, width, dtype=HALF, device="meta", requires_grad=True)
    assert kernel_for(Attention(q, q, q, dropout=dropout), capability) == kernel


def test_settings_of_the_user_decide_as_on_cuda() -> None:
    q = torch.empty(1, 2, 16, 64, dtype=HALF, device="meta", requires_grad=True)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend, kernel in ((SDPBackend.MATH, "math"), (SDPBackend.EFFICIENT_ATTENTION, "efficient")):
        with sdpa_kernel(backend):
            assert kernel_for(Attention(q, q, q), (9, 0)) == kernel
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel_for(Attention(q, q, q), (9, 0)) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [
        ("rtxa6000-48gb", 84),
        ("l40s-48gb", 142),
        ("h200-141gb", 132),
        ("b200-180gb", 148),
        ("gb200-186gb", 152),
        ("rtx5090-32gb", 170),
    ],
)
def test_a_deterministic_flash_backward_has_its_sums_for_every_multiprocessor(name: str, multiprocessors: int) -> None:
    tensor = torch.empty(1, 1, 128, 32, dtype=HALF, device="meta")
    call = call_with(BACKWARD["flash"], [tensor] * 5, {}, [])
    once = 4 * 128 * 32
    assert once < workspace_bytes(call, machine_named(name)) < 2 * once
    torch.use_deterministic_algorithms(True)
    try:
        assert workspace_bytes(call, machine_named(name)) >= multiprocessors * once
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=str)
def test_layer_norm_keeps_wide_statistics(dtype: torch.dtype) -> None:
    joint = joint_of(lambda x: F.layer_norm(x, (64,)), ((4, 300, 64), dtype))
    expected = aten.native_layer_norm.default(empty((4, 300, 64), dtype), [64], None, None, 1e-5)
    assert expected[1].dtype == (DOUBLE if dtype == DOUBLE else SINGLE)
    assert sizes(joint, aten.native_layer_norm.default) == rounded(expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
def test_batch_norm_keeps_wide_statistics(dtype: torch.dtype, training: bool) -> None:
    channels = 700
    joint = joint_of(
        lambda norm, x: norm(x),
        ((2, channels, 4, 4), dtype),
        modules=lambda: [nn.BatchNorm2d(channels).train(training)],
    )
    x, weight = empty((2, channels, 4, 4), dtype), empty((channels,), SINGLE)
    if dtype == SINGLE:  # cuDNN's
        kept = [weight, weight, empty((0,), torch.uint8)]
        expected = [x, *kept, weight, weight] if training else [x]
        name = "batch_norm" if training else "batch_norm_inference"
        assert sizes(joint, f"ebbtide_cuda.{name}.default") == rounded(expected)
        return
    if training:
        op = aten._native_batch_norm_legit_functional.default
        expected = op(x, weight, weight, weight, weight, True, 0.1, 1e-5)
    else:
        op = aten._native_batch_norm_legit_no_training.default
        expected = op(x, weight, weight, weight, weight, 0.1, 1e-5)
    assert sizes(joint, op) == rounded(expected)
    assert sizes(joint, op)[1] == -(-4 * channels // GRANULARITY) * GRANULARITY


def test_rms_norm_is_one_op_with_a_number_per_row() -> None:
    joint = joint_of(lambda norm, x: norm(x), ((4, 300, 64), BRAIN), modules=lambda: [nn.RMSNorm(64, dtype=BRAIN)])
    assert sizes(joint, aten._fused_rms_norm.default) == [2 * 4 * 300 * 64, -(-4 * 4 * 300 // 512) * 512]
    x, rstd, weight = empty((4, 300, 64), BRAIN), empty((4, 300, 1), SINGLE), empty((64,), BRAIN)
    backward = aten._fused_rms_norm_backward.default
    assert sizes(joint, backward) == rounded(backward(x, x, [64], rstd, weight, [True, True]))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own, and why it is composed
def test_rms_norm_of_mixed_dtypes_stays_composed() -> None:
    joint = joint_of(lambda norm, x: norm(x), ((4, 300, 64), BRAIN), modules=lambda: [nn.RMSNorm(64)])
    assert not any("rms_norm" in op.target for op in joint.program.ops)


def test_lstm_cell_is_the_fused_one() -> None:
    joint = joint_of(lambda cell, x: sum(cell(x)), ((30, 20), SINGLE), modules=lambda: [nn.LSTMCell(20, 50)])
    gates, state, bias = empty((30, 200), SINGLE), empty((30, 50), SINGLE), empty((200,), SINGLE)
    forward = aten._thnn_fused_lstm_cell.default
    assert sizes(joint, forward) == rounded(forward(gates, gates, state, bias, bias))
    backward = aten._thnn_fused_lstm_cell_backward_impl.default
    assert sizes(joint, backward) == rounded(backward(state, state, state, state, gates, True))


@pytest.mark.parametrize("bias", [True, False])
def test_gru_cell_is_the_fused_one(bias: bool) -> None:
    joint = joint_of(lambda cell, x: cell(x), ((30, 20), SINGLE), modules=lambda: [nn.GRUCell(20, 50, bias=bias)])
    gates, state, biases = empty((30, 150), SINGLE), empty((30, 50), SINGLE), empty((150 if bias else 0,), SINGLE)
    # RNN.cu: a workspace of five numbers for each hidden one; torch describes neither op without a device.
    assert sizes(joint, aten._thnn_fused_gru_cell.default) == rounded([state, empty((30, 250), SINGLE)])
    made = sizes(joint, aten._thnn_fused_gru_cell_backward.default)
    assert made == rounded([gates, gates, state, biases, biases])


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax], ids=["softmax", "log_softmax"])
def test_softmax_widens_float16_itself(softmax: Callable[..., torch.Tensor]) -> None:
    shape = (16, 4096)
    joint = joint_of(lambda x: softmax(x, -1, dtype=SINGLE), (shape, HALF))
    op = aten._softmax.default if softmax is F.softmax else aten._log_softmax.default
    backward = aten._softmax_backward_data.default if softmax is F.softmax else aten._log_softmax_backward_data.default
    wide = empty(shape, SINGLE)
    assert sizes(joint, op) == rounded([op(empty(shape, HALF), -1, True)]) == rounded([wide])
    assert sizes(joint, backward) == rounded([backward(wide, wide, -1, HALF)])
    assert not any(op.target == "aten._to_copy.default" and op.inputs for op in joint.program.ops[1:3])


def test_log_sigmoid_keeps_nothing() -> None:
    assert sizes(joint_of(F.logsigmoid, ((64, 64), SINGLE)), aten.log_sigmoid_forward.default) == [4 * 64 * 64, 0]


def test_dropout_keeps_a_byte_for_each_element() -> None:
    joint = joint_of(lambda x: F.dropout(x, 0.1), ((64, 64), BRAIN))
    expected = aten.native_dropout.default(empty((64, 64), BRAIN), 0.1, True)
    assert sizes(joint, aten.native_dropout.default) == rounded(expected)


def test_atomics_and_generators_are_those_of_cuda() -> None:
    tokens = ((4, 100), torch.int64)
    joint = joint_of(
        lambda table, tokens, x: F.dropout(table(tokens) * x, 0.5),
        tokens,
        ((16,), SINGLE),
        modules=lambda: [nn.Embedding(50, 16)],
    )
    ops = {op.target: op for op in joint.program.ops}
    assert not ops["aten.embedding_dense_backward.default"].rerunnable
    assert ops["aten.native_dropout.default"].state_bytes == 16
    here = joint_of(F.relu, ((4, 4), SINGLE), capability=None)
    assert all(op.rerunnable for op in here.program.ops)


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # as torch says too, on a build without CUDA
def test_autocast_of_cuda_is_refused_where_it_would_do_nothing() -> None:
    def autocast(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=BRAIN):
            return linear(x)

    with pytest.raises(CaptureError, match=r"autocast\('cuda'\).*model\.to\(torch\.bfloat16\)"):
        joint_of(autocast, ((4, 4), SINGLE), modules=lambda: [nn.Linear(4, 4)])


# -- whole models -------------------------------------------------------------------------------------------------


def vit() -> Case:
    pytest.importorskip("transformers")
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=64,
        patch_size=16,
        attention_probs_dropout_prob=0.1,
    )
    kwargs = {"pixel_values": torch.empty(2, 3, 64, 64), "labels": torch.zeros(2, dtype=torch.int64)}
    return Case(ViTForImageClassification(config).train(), kwargs=kwargs, name="vit")


def short_mobilenet() -> Case:
    """The stem and two separable convolutions of it."""
    case = paper_model("mobilenet", small=True)()
    model: Any = case.model
    model.features, model.head = model.features[:7], nn.Linear(96, 10)
    return case


def small_gpt() -> Case:
    return gpt(2, GPTConfig(vocabulary=64, length=32, layers=LAYERS, width=64, heads=4, dropout=0.1))


CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "gpt": (small_gpt, "efficient"),
    "hf_bert": (partial(SMALL["hf_bert"], layers=1), "efficient"),
    "hf_gpt2": (partial(SMALL["hf_gpt2"], layers=1), "efficient"),
    # Grouped heads are left to torch in eager, and no fused kernel of float32 takes them: products and a softmax.
    "hf_llama": (partial(SMALL["hf_llama"], layers=1), "_softmax"),
    "hf_t5": (partial(SMALL["hf_t5"], layers=1), ""),
    "vit": (vit, "efficient"),
    "mobilenet": (short_mobilenet, ""),
    "unet": (partial(SMALL["unet"], levels=2), ""),
    "lstm_lm": (lambda: paper_model("lstm_lm", small=True)(length=3), ""),
    "nmt": (lambda: paper_model("nmt", small=True)(length=2), "_thnn_fused_lstm_cell"),
}
QUICK = ("gpt", "hf_llama", "vit", "nmt")
SLOW = ("hf_bert", "lstm_lm")  # the others are long


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in QUICK
        else pytest.param(name, marks=[pytest.mark.slow, *([] if name in SLOW else [pytest.mark.long])])
        for name in CASES
    ],
)
def test_a_model_for_a_card_has_no_op_of_the_cpu(name: str) -> None:
    build, part = CASES[name]
    with without_memory():
        case = build()
    machine = machine_named("a100-80gb")
    step = capture_ahead(case.model, case.args, case.kwargs, name=name, options=Options(machine=machine))
    assert cpu_only_ops(step.program) == []
    assert "0 ops keep their CPU form" in step.provenance["mapped"]
    assert any(part in op.target for op in step.program.ops)
    assert check(step.program, unplanned_schedule(step.program)) == []
    options = PlanningOptions(effort=200)
    fixed = step.resident_bytes + step.reserve_bytes
    unplanned = simulate(step.program, unplanned_schedule(step.program)).above_bytes
    smallest, _ = smallest_of(step.program)
    budget = Budget(bytes=fixed + (smallest + unplanned) // 2)
    plan = step.plan(budget, options)
    assert check(plan.program, plan.schedule, plan.budget_bytes - fixed) == []
    assert plan.provenance["mapped"].startswith("traced as on CUDA 8.0: ")


def test_a_step_for_this_machine_is_not_touched() -> None:
    case = small_gpt()
    attention = aten.scaled_dot_product_attention.default
    kernels, dispatch = dict(attention.py_kernels), FakeTensorMode._dispatch_impl
    hint = torch._meta_registrations.device_hint

    def here() -> Program:
        context = {"device": "cpu"}
        return capture(case.model, case.args, case.kwargs, name="gpt", granularity_bytes=1, context=context).program

    before = here()
    _, mapped, _ = capture_program(case.model, case.args, case.kwargs, machine=machine_named("a100-80gb"))
    assert here().fingerprint == before.fingerprint != mapped.fingerprint
    assert len(attention_ops(mapped)) == 2 * LAYERS
    assert (dict(attention.py_kernels), FakeTensorMode._dispatch_impl) == (kernels, dispatch)
    assert torch._meta_registrations.device_hint is hint
    x: Any = torch.randn(2, 3, 8, 4)
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x))
