"""Lightning's ``Trainer`` with a memory budget: the same training, every step planned.

Bytes are held against an allocation counter by ``tests/situations/lightning.py``, of which some run here.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.engine import captured_steps
from ebbtide.errors import BudgetError, CaptureError, UsageError

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

from ebbtide.integrations.lightning import MemoryBudget  # noqa: E402 - needs lightning

ROOT = Path(__file__).parents[2]
WIDTH = 32

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    # At sizes this small a kernel's scratch memory is some percent of the step; bytes are held by the counter below.
    pytest.mark.filterwarnings("ignore:the step took .* the budget holds:UserWarning"),
]


def rows(count: int = 96) -> torch.utils.data.TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 4, WIDTH, generator=drawn), torch.randint(5, (count,), generator=drawn)
    return torch.utils.data.TensorDataset(x, y)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.head(x.mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.log("loss", loss)
        self.log("accuracy", self.accuracy(out, y), on_step=True, on_epoch=True)
        return {"loss": loss, "out": out.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Look(pl.Callback):
    """What each batch has left."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
        returned = {key: value.float().sum().item() for key, value in outputs.items()}
        self.seen.append((logged, returned, torch.get_rng_state().tolist()))


def trained(*callbacks: Any, kind: Any = Module, ckpt_path: Any = None, batch: int = 32, **settings: Any) -> Any:
    """A trainer that has trained, its module, and what it has left."""
    torch.manual_seed(1)
    module, look = kind(), Look()
    given = {"max_epochs": 1, "enable_checkpointing": False, "logger": False} | settings
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[look, *callbacks], **given,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(rows(), batch_size=batch, shuffle=True)
    trainer.fit(module, loader, torch.utils.data.DataLoader(rows(8)), ckpt_path=ckpt_path)
    return trainer, module, look.seen


def assert_same(one: Any, other: Any) -> None:
    assert one[2] == other[2]
    for key, value in one[1].state_dict().items():
        assert torch.equal(value, other[1].state_dict()[key]), key


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "mixed": {"precision": "bf16-mixed"},
    "of sixteen bits": {"precision": "bf16-true"},
    "evaluated": {"val_check_interval": 1},
    "a smaller last batch": {"batch": 40},
}


@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_within_the_budget(way: str) -> None:
    budget = MemoryBudget("97%", options=ebbtide.Options(progress=None))
    ours = trained(budget, **WAYS[way])
    assert_same(trained(**WAYS[way]), ours)
    assert budget.calls is not None
    assert (budget.calls.planned, budget.calls.unplanned) == (3, {})
    assert budget.plan is not None
    assert budget.plan.predicted_peak_bytes <= budget.plan.budget_bytes
    assert {"training_step", "log", "log_dict"}.isdisjoint(vars(ours[1])), "the module is as it was"
    assert "forward" not in vars(ours[1].accuracy)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_the_optimizer_steps_inside_of_the_step(max_norm: float | None) -> None:
    options = {} if max_norm is None else {"max_norm": max_norm}
    budget = MemoryBudget("97%", options=ebbtide.Options(step="inside", progress=None, **options))
    ours = trained(budget)
    assert_same(trained(**({} if max_norm is None else {"gradient_clip_val": max_norm})), ours)
    assert budget.calls is not None
    assert (budget.calls.planned, budget.calls.unplanned) == (3, {})


def test_what_finds_no_gradients_is_refused_before_the_first_step_inside() -> None:
    for settings, said in (
        ({"gradient_clip_val": 0.1}, "gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
    ):
        with pytest.raises(UsageError, match=said):
            trained(MemoryBudget("97%", options=ebbtide.Options(step="inside", progress=None)), **settings)
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(UsageError, match="accumulate_grad_batches"):
        trained(MemoryBudget("97%", options=ebbtide.Options(step="inside", progress=None)), scheduler)

    class Logs(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", sum(each.grad.norm() for each in self.parameters() if each.grad is not None))

    with pytest.raises(UsageError, match="is read before"):
        trained(MemoryBudget("97%", options=ebbtide.Options(step="inside", progress=None)), kind=Logs)


def test_training_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    trained(MemoryBudget("97%", options=ebbtide.Options(progress=None)))[0].save_checkpoint(saved)
    budget = MemoryBudget("97%", options=ebbtide.Options(progress=None))
    ours = trained(budget, ckpt_path=saved, max_epochs=2)
    trained()[0].save_checkpoint(saved)
    assert_same(trained(ckpt_path=saved, max_epochs=2), ours)
    assert budget.calls is not None
    assert budget.calls.planned == 3


class Numbers(Module):
    """A number of Python's that is another in every epoch, and a tensor that is written to once it is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        loss = F.cross_entropy(out, batch[1]) * (1 + self.current_epoch)
        noted = out.detach().sum()
        self.log_dict({"epoch": self.current_epoch, "before": noted})
        noted.zero_()
        self.log("after", noted)
        if self.current_epoch:
            self.log("later", loss)
        return {"loss": loss}


class Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(4))


def test_averaged_weights_get_their_statistics() -> None:
    """In an epoch without a backward, with batch norms whose momentum is none."""

    def averaging() -> Any:
        return pl.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)

    budget = MemoryBudget("97%", options=ebbtide.Options(progress=None))
    ours = trained(budget, averaging(), kind=Normed, max_epochs=2)
    assert_same(trained(averaging(), kind=Normed, max_epochs=2), ours)
    assert budget.calls is not None
    assert (budget.calls.planned, budget.calls.unplanned) == (6, {})


def test_what_is_logged_is_never_stale() -> None:
    budget = MemoryBudget("97%", options=ebbtide.Options(progress=None))
    ours = trained(budget, kind=Numbers, max_epochs=2)
    assert_same(trained(kind=Numbers, max_epochs=2), ours)
    first, last = ours[2][0][0], ours[2][-1][0]
    assert (first["epoch"], last["epoch"], "later" in first, "later" in last) == (0.0, 1.0, False, True)
    assert first["before"] != first["after"] == 0.0
    assert budget.calls is not None
    assert budget.calls.planned == 6


class Skips(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("epoch", self.current_epoch)
        return None if self.current_epoch else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_step_that_is_skipped_has_nothing_to_plan() -> None:
    budget = MemoryBudget("97%", options=ebbtide.Options(progress=None))
    ours = trained(budget, kind=Skips, max_epochs=2)
    assert_same(trained(kind=Skips, max_epochs=2), ours)
    assert budget.calls is not None
    assert budget.calls.planned == 3
    assert list(budget.calls.unplanned.values()) == [3]


class UsesAMetric(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        self.log("percent", self.accuracy(out, batch[1]) * 100)
        return F.cross_entropy(out, batch[1])


def test_computing_with_a_metric_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="uses what a metric returned"):
        trained(MemoryBudget("97%", options=ebbtide.Options(progress=None)), kind=UsesAMetric)


class Writes(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("a step")
        return F.cross_entropy(self(batch[0]), batch[1])


def test_what_is_no_graph_is_refused_with_its_line_and_leaves_the_module_as_it_was() -> None:
    kept: list[Any] = []

    class Kept(Writes):
        def on_train_start(self) -> None:
            kept.append(self)

    with pytest.raises(CaptureError, match=r'print\("a step"\)'):
        trained(MemoryBudget("97%", options=ebbtide.Options(progress=None)), kind=Kept)
    assert {"training_step", "log"}.isdisjoint(vars(kept[0]))


class Counts(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        if batch_idx % 2 == 0:
            self.log("even", out.sum())
        return {"loss": F.cross_entropy(out, batch[1])}


def test_a_number_of_a_batch_that_chooses_what_is_logged_makes_a_step_for_each_choice() -> None:
    captured: list[Any] = []
    budget = MemoryBudget("1MiB", options=ebbtide.Options(progress=captured.append))
    _, module, seen = trained(budget, kind=Counts, batch=12)
    _, plain, theirs = trained(kind=Counts, batch=12)
    assert seen == theirs
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert budget.calls is not None
    assert budget.calls.planned == 8
    # The first value is taken as it is; then one step with and one without what is logged.
    assert sum("capturing the step" in each.stage for each in captured) == 3


class Weighs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]) * (1 + batch_idx)}


def test_a_step_for_each_number_of_a_batch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "MOST_IN_A_ROW", 2)
    budget = MemoryBudget("1MiB", options=ebbtide.Options(progress=None))
    with pytest.raises(CaptureError, match=r"(?s)on_train_batch_end.*self\.batch_idx == 1"):
        trained(budget, kind=Weighs, batch=16)
    assert budget.calls is not None
    assert budget.calls.planned == 2


class Copies(Module):
    copied: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        trainer, self._trainer = self._trainer, None
        type(self).copied = copy.deepcopy(self)
        self._trainer = trainer


def test_copies_made_in_training_are_plain_modules() -> None:
    trained(MemoryBudget("97%", options=ebbtide.Options(progress=None)), kind=Copies, max_steps=1)
    copied = Copies.copied
    assert vars(copied)["training_step"].__self__ is copied
    assert vars(copied)["training_step"].__func__ is Module.training_step


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = Module(), nn.Linear(5, 5)

    def first_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.one(x), y)
        self.log("first", loss)
        return loss

    def second_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.other(self.one(x).detach()), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.first_loss(*batch)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        losses = {}
        for optimizer, name in zip(self.optimizers(), ("first_loss", "second_loss"), strict=True):
            optimizer.zero_grad()
            losses[name] = getattr(self, name)(*batch)
            self.manual_backward(losses[name])
            optimizer.step()
        return {name: loss.detach() for name, loss in losses.items()}

    def configure_optimizers(self) -> Any:
        kinds = ((torch.optim.AdamW, self.one), (torch.optim.SGD, self.other))
        return [kind(each.parameters(), lr=1e-2) for kind, each in kinds], []


def test_manual_optimization_plans_the_losses_that_are_named() -> None:
    budget = MemoryBudget("99%", losses=["first_loss", "second_loss"], options=ebbtide.Options(progress=None))
    ours = trained(budget, kind=Manual)
    assert_same(trained(kind=Manual), ours)
    assert budget.calls is not None
    assert (budget.calls.planned, budget.calls.unplanned) == (6, {})
    assert budget.plan is not None
    moments = 2 * sum(each.nbytes for each in ours[1].one.parameters())
    assert budget.plan.resident_bytes >= 2 * moments, "weights, gradients and both moments of the first optimizer"


@pytest.mark.parametrize(
    ("losses", "kind", "said"),
    [
        ((), Manual, r"MemoryBudget\(budget, losses="),
        (["training_step"], Manual, "no step that could be planned"),
        (["frist_loss"], Manual, "first_loss"),
        (["forward"], Module, "Leave losses out"),
    ],
)
def test_methods_that_are_none_are_refused_by_name(losses: Any, kind: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(MemoryBudget("97%", losses=losses), kind=kind)


def test_a_trainer_that_spreads_or_compiles_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="2 budgets"):
        trained(MemoryBudget("97%"), MemoryBudget("97%"))
    with pytest.raises(UsageError, match="a compiled LightningModule"):
        trained(MemoryBudget("97%"), kind=lambda: torch.compile(Module(), backend="eager"))

    class Fetches(Module):
        def training_step(self, dataloader_iter: Any) -> Any:
            raise AssertionError

    with pytest.raises(UsageError, match="dataloader_iter"):
        trained(MemoryBudget("97%"), kind=Fetches)

    class Two(Module):
        def prepare_data(self) -> None:
            self.trainer.strategy.world_size = 2

    with pytest.raises(UsageError, match="one of 2 processes"):
        trained(MemoryBudget("97%"), kind=Two)


def test_a_backward_beside_the_planned_one_is_refused_with_where_it_belongs() -> None:
    class Penalized(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            sum(each.abs().sum() for each in self.parameters()).backward()

    with pytest.raises(UsageError, match=r"(?s)MemoryBudget plans training_step.*losses=\[\.\.\.\].*two kinds"):
        trained(MemoryBudget("100%"), kind=Penalized)


def test_fit_refuses_a_lightning_module_with_the_line_that_works() -> None:
    with pytest.raises(UsageError, match=r"Trainer\(callbacks=\[ebbtide.integrations.lightning.MemoryBudget\(budget"):
        ebbtide.fit(Module(), "1GiB")


@pytest.mark.long
def test_the_largest_batch_trains_and_the_next_does_not() -> None:
    budget = MemoryBudget("256KiB", options=ebbtide.Options(progress=None))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module = Module()

    def batch_of(count: int) -> Any:
        return torch.zeros(count, 4, WIDTH), torch.zeros(count, dtype=torch.long)

    found = budget.max_batch(trainer, module, batch_of, options=ebbtide.Options(progress=None, effort=500))
    assert "training_step" not in vars(module)
    assert all(each.grad is None for each in module.parameters())
    assert 1 < found.unplanned_batch < found.batch < 90
    trained(budget, batch=found.batch, limit_train_batches=1, max_epochs=2)
    assert budget.calls is not None
    assert budget.calls.planned == 2
    with pytest.raises(BudgetError):
        trained(
            MemoryBudget("256KiB", options=ebbtide.Options(progress=None)), batch=found.batch + 6, limit_train_batches=1
        )


def test_bad_input_is_refused_where_it_is_given() -> None:
    with pytest.raises(UsageError, match="12GiB"):
        MemoryBudget("lots")
    with pytest.raises(UsageError, match="asks the trainer for its own"):
        MemoryBudget("1GiB", options=ebbtide.Options(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)))
    with pytest.raises(UsageError, match="bugdet"):
        MemoryBudget("1GiB", bugdet=3)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(UsageError, match="not Linear"):
        MemoryBudget("1GiB").max_batch(trainer, nn.Linear(1, 1), torch.zeros)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizes manually"):
        MemoryBudget("1GiB").max_batch(trainer, Manual(), torch.zeros)


def test_memory_goes_to_the_trainers_loggers(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trained(MemoryBudget("85%", log=True), logger=logger, log_every_n_steps=1)
    logger.save()
    written = Path(logger.log_dir, "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert {"ebbtide/budget_bytes", "ebbtide/measured_peak_bytes", "loss"} <= set(written[0].split(","))
