"""From the second length on a symbolic capture serves: the same program, plan and bits as a capture of its own."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import ebbtide
from ebbtide import zoo
from ebbtide._api.fit import step_of
from ebbtide.capture.offline import capture
from ebbtide.capture.symbolic import sizes
from ebbtide.engine import captured_steps, traced_graph
from ebbtide.engine.shared_calls import MOST_FAILURES, OWN_CAPTURES
from ebbtide.errors import BudgetError
from ebbtide.torch_seams.fake_tensors import forget_descriptions
from ebbtide.torch_seams.storages import storage_key
from ebbtide.zoo import GPTConfig, gpt

LENGTHS = (9, 12, 15, 18, 21, 24, 10, 30)


class Model(nn.Module):
    """Embeds tokens, draws, counts its calls; returns the loss beside what made it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.up = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(96, 32) for _ in range(2))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 1.0

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1.0)
        x = self.embed(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + self.drop(down(torch.tanh(up(x))))
        return (x * self.scale).square().mean(), x


class Transposed(Model):
    """Batch norm over a transposed tensor, whose strides torch describes otherwise than the kernel gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, x = super().forward(tokens)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 32)
        return x.square().mean(), x


class Branching(Model):
    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, x = super().forward(tokens)
        return (loss * 2.0, x) if tokens.shape[1] > 20 else (loss, x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = self.cells(self.embed(tokens))
        return x.square().mean(), x


def tokens(length: int, batch: int = 16) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 32


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(x.numel())
    loss, output = model(x)
    loss.backward()
    found = [loss.detach(), output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return [each.clone() for each in (*found, *model.buffers())]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def twins(kind: type[nn.Module] = Model, budget: str | int = "85%") -> tuple[nn.Module, nn.Module]:
    model = kind()
    return ebbtide.fit(copy.deepcopy(model), budget, options=ebbtide.Options(effort=500)), model


@pytest.fixture
def each_form_asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Holds what is written out at each shape against what every single call gives; how many nodes were held so."""
    held: list[int] = []
    written = traced_graph.at_sizes

    def at_sizes(*args: Any) -> fx.GraphModule:
        forget_descriptions()  # torch remembers another memory of some results than it gives at first
        found = written(*args)
        forget_descriptions()
        with monkeypatch.context() as patch:
            patch.setattr(sizes, "_is_told_by_forms", lambda _: False)
            wanted = written(*args)
        pairs = list(zip(found.graph.nodes, wanted.graph.nodes, strict=True))
        assert [(a.name, a.target) for a, _ in pairs] == [(b.name, b.target) for _, b in pairs]
        mine, theirs = _Forms(), _Forms()
        for a, b in pairs:
            assert mine.of(a.meta.get("val")) == theirs.of(b.meta.get("val")), a
        held.append(len(pairs))
        return found

    monkeypatch.setattr(traced_graph, "at_sizes", at_sizes)
    return held


class _Forms:
    """What there is to know of fake values: sizes, strides, types, and which lie in the memory of an earlier one."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}

    def of(self, value: object) -> object:
        if isinstance(value, list | tuple):
            return tuple(map(self.of, value))
        if not isinstance(value, torch.Tensor):
            return value
        number = self._storages.setdefault(storage_key(value), len(self._storages))
        size = value.untyped_storage().nbytes()
        form = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad)
        return (*form, number, size)


_FORMED: dict[str, Callable[[int], ebbtide.Case]] = {
    "gpt": lambda length: gpt(2, GPTConfig(vocabulary=64, length=length, layers=3, width=32, heads=2)),
    "llama": lambda length: zoo.hf_llama(2, vocabulary=64, length=length, layers=3, width=32, heads=4),
    "t5": lambda length: zoo.hf_t5(2, vocabulary=64, length=length, layers=3, width=32, heads=2),
}


@pytest.mark.parametrize("name", _FORMED)
def test_what_is_told_by_the_form_of_arguments_is_what_each_call_gives(
    name: str, each_form_asked_for: list[int]
) -> None:
    cases = [_FORMED[name](length) for length in (20, 12, 16, 9)]
    plain = cases[0].model.train()
    fitted = ebbtide.fit(copy.deepcopy(plain), "85%", options=ebbtide.Options(effort=500))
    for case in cases:
        gradients: list[list[torch.Tensor]] = []
        for each in (fitted, plain):
            each.zero_grad()
            torch.manual_seed(0)
            outputs = each(*case.args, **case.kwargs)
            (outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]).sum().backward()
            gradients.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
        assert equal(*gradients)
    assert len(each_form_asked_for) == 3


@pytest.fixture
def own_captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Per captured step that ran or was tried, whether it was to have a capture of its own."""
    made: list[bool] = []

    class Counting(captured_steps.Step):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            made.append(not self.piece.capture.symbolic)

    monkeypatch.setattr(captured_steps, "Step", Counting)
    return made


def test_many_shapes_take_few_captures_and_keep_their_bits(own_captures: list[bool]) -> None:
    model, plain = twins()
    for _ in range(2):
        for length in LENGTHS:
            assert equal(step(model, tokens(length)), step(plain, tokens(length))), length
            ran = step_of(model)
            assert ran is not None
            assert ran.plan is not None
            assert ran.plan.overhead > 0
            assert ran.verified_buffers > 0
    assert own_captures == [True] + [False] * (len(LENGTHS) - 1)


class Upscaled(nn.Module):
    """Torch has no trace of ``interpolate`` to sizes that are symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.head = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(7, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = nn.functional.interpolate(self.down(x).relu(), size=x.shape[-2:], mode="bilinear")
        return self.head(torch.cat([up, x], 1)).square().mean()


def test_what_is_not_traced_with_symbols_has_captures_of_its_own(own_captures: list[bool]) -> None:
    plain = Upscaled()
    model = ebbtide.fit(copy.deepcopy(plain), "150%")
    for size in (32, 48, 40, 36):
        x, gradients = torch.randn(2, 3, size, size), []
        for each in (model, plain):
            each.zero_grad()
            each(x).backward()
            gradients.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
        assert equal(*gradients), size
    assert own_captures.count(True) == 4
    assert own_captures.count(False) == MOST_FAILURES


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (z.unflatten(-1, (4, 8)).transpose(1, 2) for z in self.mixed(x).chunk(3, -1))
        drawn = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return drawn.float().square().mean()


def test_what_autocast_has_cast_is_not_cast_again_where_it_is_written_out(own_captures: list[bool]) -> None:
    plain = Attending()
    model = ebbtide.fit(copy.deepcopy(plain), "150%")
    for length in (12, 30, 41):
        x, gradients = torch.randn(4, length, 32), []
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(x)
            loss.backward()
            gradients.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
        assert equal(*gradients), length
    assert own_captures == [True, False, False]


def test_a_shorter_last_batch_has_a_capture_of_its_own(own_captures: list[bool]) -> None:
    model, plain = twins()
    for batch in (16, 11, 16, 13):
        assert equal(step(model, tokens(9, batch)), step(plain, tokens(9, batch)))
    assert own_captures == [True] * OWN_CAPTURES + [False]


@pytest.mark.long
@pytest.mark.parametrize(("batch", "lengths"), [(3, (9, 12, 10)), (4, (9, 12, 24))])
def test_what_is_written_out_is_the_program_of_a_capture_of_its_own(
    batch: int, lengths: tuple[int, ...], own_captures: list[bool]
) -> None:
    case = gpt(4, GPTConfig(vocabulary=64, length=40, layers=1, width=32, heads=2, dropout=0.1))
    inputs, targets = case.args
    model = ebbtide.fit(case.model, "90%", options=ebbtide.Options(effort=200, rewrites="none"))
    for length in lengths:
        args = inputs[:batch, :length].contiguous(), targets[:batch, :length].contiguous()
        model(*args).backward()
        model.zero_grad()
        if length == 9:
            continue
        plan = ebbtide.plan_of(model)
        assert plan is not None
        exact = capture(case.model, args, {}, name="own", granularity_bytes=1, context={}).program
        ours = plan.program
        for one, other in zip(ours.ops, exact.ops, strict=True):
            assert (one.target, one.inputs, one.outputs, one.signature) == (
                (other.target, other.inputs, other.outputs, other.signature)
            )
            assert (one.state_bytes, one.rerunnable, one.reads_mutated) == (
                (other.state_bytes, other.rerunnable, other.reads_mutated)
            )
        assert [b.bytes for b in ours.buffers] == [b.bytes for b in exact.buffers]
        assert (ours.boundary, ours.forward_outputs, ours.gradients, ours.mutations) == (
            (exact.boundary, exact.forward_outputs, exact.gradients, exact.mutations)
        )
    assert own_captures == [True] + [False] * (len(lengths) - 1)


@pytest.mark.long
def test_batch_and_length_may_change_together(own_captures: list[bool]) -> None:
    model, plain = twins()
    for batch, length in ((16, 9), (12, 15), (14, 18), (15, 21), (16, 16), (17, 24), (20, 30)):
        assert equal(step(model, tokens(length, batch)), step(plain, tokens(length, batch)))
    assert own_captures.count(True) < len(own_captures)


@pytest.fixture(scope="module")
def warm() -> tuple[nn.Module, nn.Module]:
    """Twins with a symbolic capture. Tests step both alike, each at lengths of its own, and leave attributes as is."""
    model, plain = twins(budget="300%")
    for length in LENGTHS[:4]:
        assert equal(step(model, tokens(length)), step(plain, tokens(length)))
    return model, plain


def test_a_size_of_one_has_a_capture_of_its_own(warm: tuple[nn.Module, nn.Module], own_captures: list[bool]) -> None:
    model, plain = warm
    for length in (20, 1, 31):
        assert equal(step(model, tokens(length)), step(plain, tokens(length)))
    assert own_captures == [False, True, False]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # torch.backends.mkldnn.flags says so
@pytest.mark.parametrize(
    "kind", [Branching, *(pytest.param(each, marks=pytest.mark.long) for each in (Recurrent, Transposed))]
)
def test_where_the_symbolic_graph_does_not_hold_a_capture_of_its_own_does(
    kind: type[nn.Module], own_captures: list[bool]
) -> None:
    lengths = (9, 21, 18, 24, 10) if kind is not Recurrent else (2, 3, 4, 5, 6)
    model, plain = twins(kind, budget="150%")
    with torch.backends.mkldnn.flags(enabled=False):  # eager's LSTM then runs ATen's kernels, as ours does
        for length in lengths:
            assert equal(step(model, tokens(length)), step(plain, tokens(length))), length
    assert own_captures.count(False) >= 1, "nothing was tried"
    if kind is not Branching:
        assert own_captures.count(False) == MOST_FAILURES


def test_an_attribute_that_changes_is_another_step(
    warm: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = warm
    for each in warm:
        monkeypatch.setattr(each, "scale", 3.0)
    for length in (LENGTHS[3], 27, LENGTHS[0], 30):
        assert equal(step(model, tokens(length)), step(plain, tokens(length)))


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
def test_backwards_of_several_shapes_find_their_own_forwards(warm: tuple[nn.Module, nn.Module]) -> None:
    for length in (21, 24, 30):
        for each in warm:
            step(each, tokens(length))
    both: list[list[torch.Tensor]] = []
    for each in warm:
        torch.manual_seed(7)
        losses = [each(tokens(length))[0] for length in (21, 24, 30)]
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()
        both.append([p.grad for p in each.parameters()])  # type: ignore[misc]
    assert equal(both[0], both[1])


def test_a_refused_shape_leaves_the_capture_to_the_others() -> None:
    smallest = ebbtide.plan(Model(), (tokens(24),), budget="1000%").smallest_bytes
    model, plain = twins(budget=smallest + 40_000)
    for length in (9, 12, 18, 24):
        assert equal(step(model, tokens(length)), step(plain, tokens(length)))
    with pytest.raises(BudgetError):
        model(tokens(96))
    for length in (11, 24, 9):
        assert equal(step(model, tokens(length)), step(plain, tokens(length)))


def test_a_graph_that_reads_otherwise_at_other_sizes_is_not_used(
    warm: tuple[nn.Module, nn.Module], own_captures: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = warm
    written: Callable[..., object] = traced_graph.at_sizes

    def elsewhere(joint: torch.fx.GraphModule, *rest: object) -> object:
        for node in joint.graph.nodes:  # as if torch had described a kernel's strides wrongly
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor) and value.dim() == 2:
                node.meta["val"] = value.t()
        return written(joint, *rest)

    monkeypatch.setattr(traced_graph, "at_sizes", elsewhere)
    assert equal(step(model, tokens(27)), step(plain, tokens(27)))
    assert own_captures[-1:] == [True]  # whether there was a shared one already, is for other tests to say


@pytest.mark.filterwarnings("ignore:another forward of this model is in flight")
@pytest.mark.filterwarnings("ignore:.*has been called with more than")
def test_a_step_that_is_forgotten_in_flight_still_has_its_backward(
    warm: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_steps, "MOST_STEPS", 1)
    both: list[list[torch.Tensor]] = []
    for each in warm:
        torch.manual_seed(7)
        losses = []
        for length in (22, 26, 22):
            losses.append(each(tokens(length))[0])
            gc.collect()
        for loss in losses:
            loss.backward()
        both.append([p.grad for p in each.parameters()])  # type: ignore[misc]
    assert equal(both[0], both[1])
