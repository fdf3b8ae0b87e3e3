"""Lightning's ``Trainer`` with ``MemoryBudget`` among its callbacks.

A step is from the begin of a batch, where the trainer calls ``training_step``, to the end of its backward; in manual
optimization from the call of a loss method to the end of that backward. Everything but the data set counts.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from ebbtide.errors import BudgetError
from situations.registry import Refusal, situation, variants
from situations.run import COUNTS, Run, seed_all
from situations.trainers import MOST_CAPTURES

PRELOAD = ("lightning.pytorch", "torchmetrics")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
WIDTH, ROWS, BATCH = 48, 64 * 6, 64


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of sequences; of another length from batch to batch if they vary."""

    def __init__(self, rows: int = ROWS, lengths: tuple[int, ...] = (4,)) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.x = torch.randn(rows, max(lengths), WIDTH, generator=drawn)
        self.y = torch.randint(10, (rows,), generator=drawn)
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index, : self.lengths[index // BATCH % len(self.lengths)]], self.y[index]

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.y.nbytes


class Net(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1, self.training)
        return self.head(x.mean(1))


class Module(pl.LightningModule):
    """Most of what a ``training_step`` does."""

    def __init__(self, smoothing: float = 0.0, scheduled: bool = False) -> None:
        super().__init__()
        self.net, self.smoothing, self.scheduled = Net(), smoothing, scheduled

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y, label_smoothing=self.smoothing)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("valid", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        made = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.scheduled:
            return made
        return [made], [{"scheduler": torch.optim.lr_scheduler.StepLR(made, 1, 0.9), "interval": "step"}]


class Watch(pl.Callback):
    """Steps of the trainer as steps of the run."""

    def __init__(self, run: Run, data: Any, *, manual: bool = False) -> None:
        self.run, self.data, self.manual = run, data, manual
        self.open = contextlib.ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.manual:
            COUNTS.called += self.run.eager
            self.open.enter_context(self.run.step(bytes_beside=self.data.nbytes))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if not self.manual:
            self.open.close()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run.see(f"outputs {trainer.current_epoch} {batch_idx}", outputs)
        self.run.see(f"logged {trainer.current_epoch} {batch_idx}", trainer.logged_metrics)
        self.run.see_model(pl_module, f"batch {trainer.current_epoch} {batch_idx}")


HELD_OUT = Data(BATCH)


def train(run: Run, module: pl.LightningModule, *, data: Any = None, ckpt_path: str | None = None,
          workers: dict[str, Any] | None = None, manual: bool = False, callbacks: Any = None,
          **settings: Any) -> pl.Trainer:  # fmt: skip
    """Train ``module`` as the situation says."""
    data = Data() if data is None else data
    given: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False} | settings
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, callbacks=[Watch(run, data, manual=manual), *(callbacks or [])], **given,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, **({"batch_size": BATCH} | (workers or {})))
    held_out = torch.utils.data.DataLoader(HELD_OUT, batch_size=BATCH // 2)
    trainer.fit(module, loader, held_out, ckpt_path=ckpt_path)
    run.see_model(module)
    return trainer


TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.1},
    "clipped_values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16_mixed": {"precision": "bf16-mixed"},
    "bf16_true": {"precision": "bf16-true"},
    "evaluated": {"val_check_interval": 2, "num_sanity_val_steps": 1},
    "two_epochs": {"max_epochs": 2},
    "anomaly": {"detect_anomaly": True},
}


@variants(TRAINERS, share=0.9)
def lightning_callback(run: Run, settings: Any) -> None:
    """Options of the trainer."""
    train(run, Module(), callbacks=run.lightning(), **settings)


MODULES: dict[str, Callable[[], tuple[pl.LightningModule, dict[str, Any]]]] = {
    "smoothed": lambda: (Module(smoothing=0.1), {}),
    "scheduled": lambda: (Module(scheduled=True), {}),
    "workers": lambda: (Module(), {"workers": {"num_workers": 2, "multiprocessing_context": "fork"}}),
    "spawned": lambda: (Module(), {"workers": {"num_workers": 1, "multiprocessing_context": "spawn"}}),
    "shuffled": lambda: (Module(), {"workers": {"shuffle": True}}),
}


@variants(MODULES, share=0.9)
def lightning_module_is(run: Run, made: Any) -> None:
    module, settings = made()
    train(run, module, callbacks=run.lightning(), **settings)


@situation(share=0.9, captures=2)
def lightning_last_batch(run: Run) -> None:
    """It is smaller."""
    train(run, Module(), data=Data(ROWS - 20), callbacks=run.lightning())


@situation(share=0.9, captures=MOST_CAPTURES, seconds=600.0)
def lightning_lengths(run: Run) -> None:
    """A length for each of seven batches, twice."""
    train(run, Module(), data=Data(7 * BATCH, lengths=(8, 7, 6, 5, 4, 3, 2)), callbacks=run.lightning(), max_epochs=2)


@situation(share=0.9, captures=2)
def lightning_resumed(run: Run) -> None:
    """Saved after an epoch, and resumed by another trainer."""
    first = train(run, Module(), callbacks=run.lightning())
    first.save_checkpoint("saved.ckpt")
    del first
    train(run, Module(), callbacks=run.lightning(), ckpt_path="saved.ckpt", max_epochs=2)


class Metrics(Module):
    """Logs, metrics, a dictionary of outputs, numbers that change once an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.several = torchmetrics.MetricCollection({"m": torchmetrics.MeanMetric(), "s": torchmetrics.SumMetric()})
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        loss = F.cross_entropy(out, y)
        accuracy = self.accuracy(out, y)
        self.log("accuracy", accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log_dict({"mean": self.mean, "epoch": self.current_epoch, "largest": out.detach().max()}, on_epoch=True)
        self.log_dict(self.several(loss))
        scaled = out * 1.0
        self.log("before", scaled.sum())
        scaled.zero_()
        self.log("after", scaled.sum())
        return {"loss": loss, "accuracy": accuracy, "out": out.detach()}


@situation(share=0.95, captures=2)
def lightning_metrics(run: Run) -> None:
    train(run, Metrics(), callbacks=run.lightning(), max_epochs=2)


class EveryOther(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.log("even", loss * 2)
        return loss


@situation(share=0.9, captures=-1)
def lightning_reads_the_batch_number(run: Run) -> None:
    train(run, EveryOther(), callbacks=run.lightning())


class Copied(Module):
    """A gradient that autograd copies, of a parameter as large as the rest; and batches that come one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(40_000))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 1e-3 * self.large.sum()


@variants({"cleared": {}, "accumulated": {"accumulate_grad_batches": 3}}, share=0.95)
def lightning_gradient_is_copied(run: Run, settings: Any) -> None:
    train(run, Copied(), callbacks=run.lightning(), **settings)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Of no known length: the trainer fetches a batch ahead."""

    nbytes = 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(5):
            drawn = torch.Generator().manual_seed(i)
            yield torch.randn(BATCH, 4, WIDTH, generator=drawn), torch.randint(10, (BATCH,), generator=drawn)


@situation(share=0.9)
def lightning_stream(run: Run) -> None:
    train(run, Module(), data=Stream(), workers={"batch_size": None}, callbacks=run.lightning())


@situation(share=0.9, captures=3)
def lightning_holds_from_the_first_step(run: Run) -> None:
    """The least budget that the first call takes is enough for all that follow, though gradients come.

    What is refused is captured twice: without room to ask kernels for layouts, and in what the named budget leaves.
    """
    callbacks = run.lightning()
    if callbacks:
        probe = run.lightning()
        probe[0]._budget = 1 << 10
        run.fits -= 1
        try:
            train(run, Module(), callbacks=probe)
        except BudgetError as error:
            run._budget = error.smallest_bytes
        callbacks = run.lightning()
        run.fits -= 1
        del probe
        for _ in range(3):  # the refused trainer, and what its generators held
            gc.collect()
    seed_all()
    train(run, Module(), callbacks=callbacks)


class Adversarial(pl.LightningModule):
    """Two optimizers in manual optimization, each toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1))
        self.run: Any = None

    def _judged(self, x: torch.Tensor, real: float) -> torch.Tensor:
        out = self.critic(x)
        return F.binary_cross_entropy_with_logits(out, torch.full_like(out, real))

    def generator_loss(self, rows: int) -> torch.Tensor:
        loss = self._judged(self.generator(torch.randn(rows, 8)), 1.0)
        self.log("generator", loss)
        return loss

    def critic_loss(self, x: torch.Tensor) -> torch.Tensor:
        made = self.generator(torch.randn(len(x), 8)).detach()
        loss = self._judged(x, 1.0) + self._judged(made, 0.0)
        self.log("critic", loss)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0].flatten(0, 1)
        generator, critic = self.optimizers()
        for optimizer, method, given in ((generator, "generator_loss", len(x)), (critic, "critic_loss", x)):
            self.toggle_optimizer(optimizer)
            COUNTS.called += self.run.eager
            with self.run.step(bytes_beside=self.run.data):
                loss = getattr(self, method)(given)
                self.manual_backward(loss)
            del loss
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        made = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (self.generator, self.critic)]
        return made, []


@situation(share=0.9, captures=2)
def lightning_manual(run: Run) -> None:
    """Two losses, two optimizers."""
    module, data = Adversarial(), Data()
    module.run, run.data = run, data.nbytes  # type: ignore[attr-defined]
    train(run, module, data=data, manual=True, callbacks=run.lightning(losses=["generator_loss", "critic_loss"]))


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], pl.LightningModule]]] = {
    "manual": ({}, Adversarial),
}


@variants(REFUSED, refused=Refusal("UsageError", "losses="))
def lightning_refused(run: Run, case: Any) -> None:
    settings, made = case
    module, data = made(), Data()
    module.run, run.data = run, data.nbytes  # type: ignore[attr-defined]
    train(run, module, data=data, manual=True, callbacks=run.lightning(), **settings)


@situation(refused=Refusal("UsageError", r"Trainer\(callbacks=\[.*MemoryBudget"))
def lightning_module_fitted(run: Run) -> None:
    """``fit`` on a LightningModule."""
    train(run, run.fit(Module()))
