"""A fingerprint covers every byte of a storage and its place; a buffer that comes back otherwise stops the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ebbtide
from ebbtide.errors import VerificationError
from ebbtide.lower import fingerprints as module
from ebbtide.lower.fingerprints import Fingerprints, _fingerprint_on_device, fingerprint, fingerprint_of_values
from ebbtide.zoo import MLPChain
from random_schedule import random_schedule, with_schedule


def on_device(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return _fingerprint_on_device(storage, storage.nbytes())


BOTH = pytest.mark.parametrize("hash_of", [fingerprint, on_device], ids=["on CPU", "on a device"])


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 63, 1025])
def test_every_byte_counts(hash_of: object, size: int) -> None:
    assert callable(hash_of)
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    expected = hash_of(data)
    assert hash_of(data.clone()) == expected
    for position in {0, size // 2, size - 1}:
        other = data.clone()
        other[position] ^= 1
        assert hash_of(other) != expected


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64])
def test_position_counts(hash_of: object, dtype: torch.dtype) -> None:
    assert callable(hash_of)
    a = torch.zeros(9, dtype=dtype)
    b = torch.zeros(9, dtype=dtype)
    a[2] = 1
    b[3] = 1
    assert hash_of(a) != hash_of(b)


@BOTH
def test_sign_of_zero_counts(hash_of: object) -> None:
    assert callable(hash_of)
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


@BOTH
def test_the_whole_storage_counts_whatever_the_view(hash_of: object) -> None:
    assert callable(hash_of)
    base = torch.arange(24.0).reshape(4, 6)
    views = (base.t(), base[1:, ::2], base.reshape(-1)[5:6], base[0, 0].expand(3, 3))
    assert {hash_of(view) for view in views} == {hash_of(base)}
    outside = base[:1]
    before = hash_of(outside)
    base[3, 5] = -1.0
    assert hash_of(outside) != before


@BOTH
def test_empty_tensors_are_equal(hash_of: object) -> None:
    assert callable(hash_of)
    assert hash_of(torch.empty(0)) == hash_of(torch.empty(0, 3, dtype=torch.bool))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=12), st.data())
def test_exchanged_values_are_seen(values: list[int], data: st.DataObject) -> None:
    i, j = data.draw(st.permutations(range(len(values))).map(lambda p: p[:2]))
    swapped = list(values)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    for hash_of in (fingerprint, on_device):
        a, b = (hash_of(torch.tensor(v, dtype=torch.int32)) for v in (values, swapped))
        assert (a == b) == (values == swapped)


def test_chunks_of_the_device_hash_make_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 255, (4 * 40 + 3,), dtype=torch.uint8)
    whole = on_device(data)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 16)
    assert on_device(data) == whole


# -- the step that is stopped ---------------------------------------------------------------------------------


class Unsteady(nn.Module):
    """A chain with a dropout and a counter, so that random state and buffers change in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = MLPChain(layers=4, width=16, dropout=0.1)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1.0)
        return self.chain(x)


@pytest.fixture
def tight() -> nn.Module:
    model = Unsteady()
    smallest = ebbtide.plan(model, (torch.randn(64, 16),), budget="1000%").smallest_bytes
    return ebbtide.fit(model, smallest + 1024)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """While it is on, every buffer is remembered with other bits than it had."""
    honest = Fingerprints.record
    switch = {"on": True}

    def record(self: Fingerprints, buffer: int, tensor: torch.Tensor) -> None:
        honest(self, buffer, tensor)
        if switch["on"] and buffer in self._values:
            self._values[buffer] ^= 1

    monkeypatch.setattr(Fingerprints, "record", record)
    return switch


def test_other_bits_stop_the_step_and_leave_no_trace(tight: nn.Module, faulty: dict[str, bool]) -> None:
    x = torch.randn(64, 16)
    state = torch.get_rng_state()
    parameters = [p.detach().clone() for p in tight.parameters()]
    loss = tight(x)
    with pytest.raises(VerificationError, match=r"came back with other bits when .* ran again"):
        loss.backward()
    assert all(p.grad is None for p in tight.parameters())
    assert all(torch.equal(p, q) for p, q in zip(tight.parameters(), parameters, strict=True))
    assert tight.steps.item() == 0.0
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_of_earlier_steps_survive_a_stopped_one(tight: nn.Module, faulty: dict[str, bool]) -> None:
    for parameter in tight.parameters():
        parameter.grad = torch.ones_like(parameter)
    ebbtide.unfit(tight)
    smallest = ebbtide.plan(tight, (torch.randn(64, 16),), budget="1000%").smallest_bytes
    ebbtide.fit(tight, smallest + 1024)
    loss = tight(torch.randn(64, 16))
    with pytest.raises(VerificationError):
        loss.backward()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in tight.parameters())  # type: ignore[arg-type]


def test_the_model_trains_on_once_the_fault_is_gone(tight: nn.Module, faulty: dict[str, bool]) -> None:
    plain = Unsteady()
    plain.load_state_dict(tight.state_dict())
    x = torch.randn(64, 16)
    loss = tight(x)
    with pytest.raises(VerificationError):
        loss.backward()
    faulty["on"] = False
    del loss
    for model in (tight, plain):
        torch.manual_seed(3)
        model(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(tight.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    step = ebbtide.step_of(tight)
    assert step is not None
    assert step.verified_buffers > 0


def test_an_op_with_other_bits_on_its_second_run_is_found() -> None:
    runs = 0

    @torch.library.custom_op("ebbtide_tests::drifting", mutates_args=())
    def drifting(x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return x + runs

    @drifting.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    drifting.register_autograd(lambda ctx, gradient: gradient)

    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = drifting(layer(x)).tanh()
            return x.square().mean()

    model = Drifting()
    x = torch.randn(64, 16)
    plan = ebbtide.plan(model, (x,), budget="1000%")
    target = next(i for i, op in enumerate(plan.program.ops) if "drifting" in op.target)
    schedules = (random_schedule(plan.program, seed, drop=0.2) for seed in range(100))
    schedule = next(s for s in schedules if s.computes.count(target) > 1)
    ebbtide.fit(model, with_schedule(plan, schedule))
    loss = model(x)
    with pytest.raises(VerificationError, match="drifting"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.sin()))
        return x.square().mean()


def test_every_step_may_be_proven() -> None:
    """Memory of an input that NumPy rewrites behind torch's back is seen at any step, before a gradient leaves."""
    memory = torch.randn(256, 32).numpy()
    x = torch.from_numpy(memory)
    plan = ebbtide.plan(Chain(), (x,), budget="1000%", options=ebbtide.Options(effort=10))
    seen = {}
    for verify in (True, "always"):
        model = ebbtide.fit(Chain(), plan.smallest_bytes + 40_000, options=ebbtide.Options(effort=100, verify=verify))
        for _ in range(4):
            model.zero_grad()
            model(x).backward()
        step = ebbtide.step_of(model)
        assert step is not None
        assert step.measured_above_bytes is not None
        model.zero_grad()
        loss = model(x)
        memory += 1
        try:
            loss.backward()
            seen[verify] = False
        except VerificationError:
            seen[verify] = True
            assert all(each.grad is None for each in model.parameters())
        memory -= 1
    assert seen == {True: False, "always": True}


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 7, 64])
def test_a_part_of_a_storage_has_the_fingerprint_of_its_copy(first: int) -> None:
    whole = torch.arange(200, dtype=torch.uint8)
    part = whole[first : first + 101]
    alone = part.clone()
    assert fingerprint_of_values(part) == fingerprint_of_values(alone) == fingerprint(alone)
    on_device = [_fingerprint_on_device(t.untyped_storage(), 101, o) for t, o in ((whole, first), (alone, 0))]
    assert on_device[0] == on_device[1]
    assert fingerprint_of_values(whole[first + 1 : first + 102]) != fingerprint_of_values(part)
