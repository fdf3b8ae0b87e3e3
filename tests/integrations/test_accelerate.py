"""accelerate around planned models: ``fit`` and ``prepare`` in either order, hooks, states; what moves is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.errors import CaptureError, UsageError
from sampled import sampled
from trained_alike import NO_GRADIENTS, assert_left_alike, drawn, left_by, tiny_gpt2

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate import hooks  # noqa: E402

ORDERS = pytest.mark.parametrize("order", ["fit first", "prepare first"])


@pytest.fixture(autouse=True)
def _states_of_one_accelerator() -> Iterator[None]:
    """accelerate keeps its settings for the process."""
    yield
    forget()


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Of six rows, the last batch of four is smaller."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = drawn(index, 16)
        return {"input_ids": row, "labels": row}


class Loop:
    """A script of accelerate's; without an order, eager's."""

    def __init__(
        self, order: str | None, rows: int = 4, workers: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        forget()
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        model = tiny_gpt2(n_layer=1)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data = torch.utils.data.DataLoader(
            Tokens(rows), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5), **(workers or {})
        )
        if order == "fit first":
            ebbtide.fit(model, "95%", optimizer=adam, progress=None)
        self.model, self.adam, self.data = self.accelerator.prepare(model, adam, data)
        if order == "prepare first":
            ebbtide.fit(self.model, "95%", optimizer=adam, progress=None)
        self.told: list[Any] = []
        torch.manual_seed(3)

    def epoch(self) -> None:
        for batch in self.data:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.told.append(self.accelerator.gather(loss.detach()).item())
                if self.accelerator.sync_gradients:
                    self.told.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5).item())
                self.adam.step()
                self.adam.zero_grad()
        with torch.no_grad():
            self.told.append(self.accelerator.gather_for_metrics(self.model(**batch).loss).item())

    def left(self) -> dict[str, Any]:
        return left_by(self.model, self.told)

    def assert_planned(self, calls: int, evaluations: int = 1) -> None:
        model = self.accelerator.unwrap_model(self.model)
        counted, plan = ebbtide.calls_of(model), ebbtide.plan_of(model)
        assert (counted.planned, counted.unplanned) == (calls, {NO_GRADIENTS: evaluations})
        assert plan is not None
        assert plan.predicted_peak_bytes <= plan.budget_bytes


def trained(order: str | None, **settings: Any) -> Loop:
    loop = Loop(order, **settings)
    loop.epoch()
    return loop


WAYS: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize(
    ("order", "way"),
    sampled(product(["fit first", "prepare first"], WAYS), ("prepare first", "accumulated"), ("fit first", "bf16")),
)
def test_either_order_trains_alike(order: str, way: str) -> None:
    loop = trained(order, rows=6, **WAYS[way])
    loop.assert_planned(2)
    assert_left_alike(trained(None, rows=6, **WAYS[way]).left(), loop.left())


@pytest.mark.parametrize("start", sampled(["fork", "spawn"], "fork"))
def test_workers(start: str) -> None:
    workers = {"num_workers": 1, "multiprocessing_context": start}
    assert_left_alike(trained(None, workers=workers).left(), trained("fit first", workers=workers).left())


@ORDERS
def test_training_goes_on_from_a_saved_state(order: str, tmp_path: Path) -> None:
    def resumed(order: str | None, folder: Path) -> tuple[Loop, list[Any]]:
        loop = trained(order)
        loop.accelerator.save_state(str(folder))
        loop.epoch()
        first = loop.told[3:]
        loop.accelerator.load_state(str(folder))
        loop.told.clear()
        loop.epoch()
        return loop, first

    (ours, first), (theirs, of_eager) = resumed(order, tmp_path / "ours"), resumed(None, tmp_path / "theirs")
    assert_left_alike(theirs.left(), ours.left())
    assert first == of_eager
    ours.assert_planned(3, evaluations=3)
    ours.accelerator.free_memory()
    assert ebbtide.calls_of(ours.model).planned == 3


@pytest.mark.parametrize("keep", [True, False])
def test_an_unwrapped_model_is_the_planned_one(keep: bool) -> None:
    def unwrapped(order: str | None) -> Loop:
        loop = trained(order, mixed_precision="bf16")
        assert loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=keep) is loop.model
        loop.epoch()
        return loop

    ours = unwrapped("fit first")
    assert_left_alike(unwrapped(None).left(), ours.left())
    ours.assert_planned(2, evaluations=2)


class Scaled(hooks.ModelHook):
    """The loss times a factor."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        output["loss"] = output["loss"] * self.factor
        return output


def hooked(model: Any, first: Callable[[Any], Any], *then: Callable[[Any], Any]) -> dict[str, Any]:
    told: list[Any] = []
    torch.manual_seed(3)
    for i, change in enumerate((first, *then)):
        change(model)
        tokens = drawn(i, 4, 16)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        told += [loss.item(), sum(each.grad.double().sum().item() for each in model.parameters())]
    return left_by(model, told)


def test_hooks_come_and_go() -> None:
    ways = (
        lambda model: hooks.add_hook_to_module(model, Scaled(2)),
        lambda model: hooks.add_hook_to_module(model, Scaled(3)),
        hooks.remove_hook_from_module,
    )
    model = ebbtide.fit(tiny_gpt2(n_layer=1), "95%", progress=None)
    assert_left_alike(hooked(tiny_gpt2(n_layer=1), *ways), hooked(model, *ways))
    assert ebbtide.calls_of(model).planned == 3


def call(model: Any) -> None:
    tokens = drawn(0, 4, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()


MOVES: dict[str, Callable[[Any], Any]] = {
    "cpu_offload": lambda model: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "attach_align_device_hook": lambda model: hooks.attach_align_device_hook(model, execution_device="cpu"),
    "cpu_offload_with_hook": lambda model: accelerate.cpu_offload_with_hook(model, execution_device="cpu"),
}


@pytest.mark.parametrize("way", MOVES)
def test_hooks_that_move_weights_are_refused_by_name(way: str) -> None:
    before, after = tiny_gpt2(n_layer=1), ebbtide.fit(tiny_gpt2(n_layer=1), "1GiB", progress=None)
    for model in (before, after):
        MOVES[way](model)
    with pytest.raises(UsageError, match=r"(AlignDevicesHook|CpuOffload).*remove_hook_from_submodules"):
        ebbtide.fit(before, "1GiB")
    with pytest.raises(UsageError, match=r"(AlignDevicesHook|CpuOffload).*remove_hook_from_submodules"):
        call(after)
    assert not ebbtide.calls_of(after).planned


def test_hooks_that_move_weights_are_refused_in_a_model_that_has_trained() -> None:
    model = ebbtide.fit(tiny_gpt2(n_layer=1), "1GiB", progress=None)
    call(model)
    MOVES["attach_align_device_hook"](model)
    with pytest.raises(UsageError, match="AlignDevicesHook"):
        call(model)
    hooks.remove_hook_from_submodules(model)
    call(model)
    assert ebbtide.calls_of(model).planned == 2


def test_a_model_that_went_to_no_device_is_refused() -> None:
    model = ebbtide.fit(tiny_gpt2(n_layer=1), "1GiB", progress=None).to("meta")
    with pytest.raises(UsageError, match="is on meta now"):
        model(input_ids=drawn(0, 4, 16).to("meta"))


def test_hooks_in_a_row_are_refused_with_what_to_do() -> None:
    model = ebbtide.fit(tiny_gpt2(n_layer=1), "1GiB", progress=None)
    hooks.add_hook_to_module(model, hooks.SequentialHook(Scaled(2), Scaled(3)))
    with pytest.raises(CaptureError, match="make one ModelHook"):
        call(model)


def test_what_accelerate_compiled_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch.compile returns"):
        Loop("prepare first", dynamo_backend="eager")
