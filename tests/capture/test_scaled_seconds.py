"""Seconds of a call at a new size follow from those of the same call at another; what it takes does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.capture.offline import capture
from ebbtide.cost import attach, profile
from ebbtide.cost.call import Call, call_with
from ebbtide.cost.profile import profile_calls
from ebbtide.cost.scaled import Timed
from ebbtide.step.provenance import Costs
from ebbtide.zoo import mlp_chain

ATEN = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    made = target(*args, **kwargs)
    return call_with(target, args, kwargs, made if isinstance(made, tuple) else (made,))


def product(rows: int, inner: int = 64, columns: int = 32) -> Call:
    return call(ATEN.mm.default, torch.empty(rows, inner), torch.empty(inner, columns))


def attention(batch: int, length: int) -> Call:
    return call(ATEN.bmm.default, torch.empty(batch * 4, length, 16), torch.empty(batch * 4, 16, length))


def test_a_new_batch_scales_and_the_nearest_size_is_taken() -> None:
    timed = Timed()
    timed.note(product(1024), 4.0)
    timed.note(product(600), 2.0)
    assert timed.seconds_of(product(1024)) == pytest.approx(4.0)
    assert timed.seconds_of(product(640)) == pytest.approx(2.0 * 640 / 600, rel=0.1)
    assert timed.seconds_of(product(900)) == pytest.approx(4.0 * 900 / 1024, rel=0.1)


@pytest.mark.parametrize(
    "other",
    [
        product(900, 48),  # two factors
        product(300),  # too far
        product(1),  # broadcast
        product(0),
        call(ATEN.mm.default, torch.empty(64, 900).t(), torch.empty(64, 32)),
        call(ATEN.mm.default, torch.empty(900, 64, dtype=torch.bfloat16), torch.empty(64, 32, dtype=torch.bfloat16)),
        call(ATEN.mul.Tensor, torch.empty(900, 64), torch.empty(900, 64)),
    ],
    ids=["two factors", "too far", "one row", "no row", "other strides", "other type", "other op"],
)
def test_what_is_not_alike_is_timed(other: Call) -> None:
    timed = Timed()
    timed.note(product(1024), 4.0)
    assert timed.seconds_of(other) is None


def test_what_is_given_besides_has_to_be_the_same() -> None:
    timed = Timed()
    timed.note(call(ATEN.sum.dim_IntList, torch.empty(64, 32), [0]), 1.0)
    assert timed.seconds_of(call(ATEN.sum.dim_IntList, torch.empty(48, 32), [0])) is not None
    assert timed.seconds_of(call(ATEN.sum.dim_IntList, torch.empty(48, 32), [1])) is None
    timed.note(call(ATEN.native_dropout.default, torch.empty(64, 32), 0.1, True), 1.0)
    assert timed.seconds_of(call(ATEN.native_dropout.default, torch.empty(48, 32), 0.2, True)) is None


def test_lengths_in_several_places_are_one_factor() -> None:
    timed = Timed()
    timed.note(attention(2, 128), 1.0)
    assert timed.seconds_of(attention(2, 96)) is not None
    assert timed.seconds_of(attention(3, 128)) is not None
    assert timed.seconds_of(attention(3, 96)) is None


def test_sizes_of_a_dataset_are_not_kept_without_end() -> None:
    timed = Timed()
    for rows in range(500, 600):
        timed.note(product(rows), 1.0)
    assert sum(map(len, timed._by_form.values())) < 10


def test_what_is_scaled_is_run_once_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = call(ATEN.native_dropout.default, torch.empty(256, 64), 0.1, True)
    runs = 0

    def count(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        return ATEN.native_dropout.default(*args)

    monkeypatch.setattr(profile, "_is_torchs", lambda _: True)
    counted = Call(count, drop.args, drop.kwargs, drop.outputs, drop.signature)
    (measured,) = profile_calls([counted], "cpu").values()
    runs = 0
    (scaled,) = profile_calls([counted], "cpu", {drop.signature: 0.25}).values()
    assert (scaled.seconds, scaled.scaled, runs) == (0.25, True, 1)
    assert (scaled.workspace_bytes, scaled.kept_bytes) == (measured.workspace_bytes, measured.kept_bytes)


def test_a_shape_that_is_met_later_is_told_and_its_seconds_are_not_kept(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})

    def joint(batch: int) -> Any:
        case = mlp_chain(batch, layers=2, width=8)
        return capture(case.model, case.args, {}, name="x", granularity_bytes=1, context={"device": "cpu"})

    first, second = joint(8), joint(6)
    attach.with_measured_costs(first.program, first.calls, "cpu")
    attach.with_measured_costs(second.program, second.calls, "cpu")
    assert attach.costs_of(first.calls, "cpu") == (Costs.MEASURED, "")
    costs, words = attach.costs_of(second.calls, "cpu")
    assert costs is Costs.MEASURED
    assert words.endswith("distinct ops are by those of other shapes")
    kept = attach.CostCache(attach.device_context("cpu")).load()
    assert {each.signature for each in first.calls} <= kept.keys()
    scaled = [each.signature for each in second.calls if attach._KNOWN and each.signature not in kept]
    assert scaled
