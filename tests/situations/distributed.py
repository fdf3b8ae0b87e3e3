"""``DistributedDataParallel`` over gloo: two processes with data of their own, each with the module inside fitted.

A step is from the call of the wrapper to the end of the backward that reduces its buckets, which are of the budget.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from situations.registry import variants
from situations.run import Run
from situations.trainers import LENGTHS, MOST_CAPTURES, _Data, expect_many_lengths, tiny_gpt2

PRELOAD = ("torch.distributed", "torch.nn.parallel.distributed", "transformers.models.gpt2.modeling_gpt2")
_STORES = itertools.count()
_PATIENCE = datetime.timedelta(seconds=120)  # processes plan at the same time, not equally fast


@dataclass(frozen=True)
class Way:
    """How a script trains.

    Attributes:
        accumulate: batches to one step of the optimizer; all but the last in ``no_sync``.
        clip: largest norm of gradients.
        bf16: autocast.
        smoothing: of labels; the loss is computed outside.
        evaluate: whether the model is evaluated after every batch.
        lengths: of the rows, in fours.
        rows: of each process.
        epochs: how often all rows come.
        workers: context of the loader's worker; empty for none.
        wrapper: settings of it.
        late: whether the module is fitted when it is wrapped.
    """

    accumulate: int = 1
    clip: float | None = None
    bf16: bool = False
    smoothing: float = 0.0
    evaluate: bool = False
    lengths: Sequence[int] = (24,)
    rows: int = 16
    epochs: int = 1
    workers: str = ""
    wrapper: tuple[tuple[str, Any], ...] = ()
    late: bool = False


WAYS: dict[str, Way] = {
    "plain": Way(),
    "accumulated": Way(accumulate=2),
    "clipped": Way(clip=0.1),
    "bf16": Way(bf16=True),
    "evaluated": Way(evaluate=True),
    "smoothed": Way(smoothing=0.1),
    "workers": Way(workers="fork"),
    "spawned": Way(workers="spawn"),
    "views_of_buckets": Way(wrapper=(("gradient_as_bucket_view", True),)),
    "small_buckets": Way(wrapper=(("bucket_cap_mb", 0.02),)),
    "fitted_late": Way(late=True),
}


@contextlib.contextmanager
def _group() -> Iterator[int]:
    """The process group; its rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = Path(f"store-{next(_STORES)}").absolute()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


class _Script:
    """A module, its wrapper, its optimizer and the data of one process."""

    def __init__(self, run: Run, way: Way, rank: int) -> None:
        self.run, self.way = run, way
        self.net = tiny_gpt2()  # of the same seed in every process
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        if not way.late:
            run.fit(self.net, optimizer=self.adam)
        self.wrapper = DistributedDataParallel(self.net, **dict(way.wrapper))
        if way.late:
            run.fit(self.net, optimizer=self.adam)
        self.data = _Data(2 * way.rows, way.lengths)
        own = torch.utils.data.Subset(self.data, range(rank * way.rows, (rank + 1) * way.rows))
        self.loader = torch.utils.data.DataLoader(
            own, batch_size=4, num_workers=bool(way.workers), multiprocessing_context=way.workers or None
        )
        torch.manual_seed(10 + rank)

    def train(self) -> list[int]:
        """Lengths of the batches."""
        run, way, lengths = self.run, self.way, list[int]()
        for epoch in range(way.epochs):
            for i, batch in enumerate(self.loader):
                lengths.append(batch["input_ids"].shape[1])
                last = (i + 1) % way.accumulate == 0
                with contextlib.nullcontext() if last else self.wrapper.no_sync():
                    with run.step(bytes_beside=self.data.tokens.nbytes):
                        loss = self._loss(batch)
                        loss.backward()
                run.see(f"loss {epoch} {i}", loss)
                del loss
                if last:
                    self._optimize(f"{epoch} {i}")
                if way.evaluate:
                    run.see(f"evaluated {epoch} {i}", self._evaluated(batch))
        run.see_model(self.net)
        run.see("state", self.adam.state_dict()["state"])
        return lengths

    def _loss(self, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.way.bf16):
            if not self.way.smoothing:
                return self.wrapper(**batch).loss
            logits = self.wrapper(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
            return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=self.way.smoothing)

    def _optimize(self, name: str) -> None:
        if self.way.clip is not None:
            self.run.see(f"norm {name}", torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.way.clip))
        self.run.see_model(self.net, name)
        self.adam.step()
        self.adam.zero_grad()

    def _evaluated(self, batch: Any) -> torch.Tensor:
        self.wrapper.eval()
        with torch.no_grad():
            loss = self.wrapper(**batch).loss
        self.wrapper.train()
        return loss


def _trained(run: Run, way: Way) -> list[int]:
    with _group() as rank:
        return _Script(run, way, rank).train()


@variants(WAYS, share=0.95, processes=2, seconds=400.0)
def ddp(run: Run, way: Any) -> None:
    _trained(run, way)


@variants({"last_batch": Way(rows=14, epochs=2)}, share=0.95, captures=2, processes=2, seconds=400.0)
@variants(
    {"lengths": Way(rows=4 * len(LENGTHS), lengths=LENGTHS)},
    share=0.95,
    captures=MOST_CAPTURES,
    processes=2,
    seconds=600.0,
)
def ddp_shapes(run: Run, way: Any) -> None:
    found = _trained(run, way)
    if len(way.lengths) > 1:
        expect_many_lengths(run, found)


@variants({"resumed": Way(epochs=1)}, share=0.95, captures=2, processes=2, seconds=400.0)
def ddp_saved(run: Run, way: Any) -> None:
    """The first process saves, and all go on from that with another model."""
    with _group() as rank:
        first = _Script(run, way, rank)
        first.train()
        if rank == 0:
            torch.save({"net": first.net.state_dict(), "adam": first.adam.state_dict()}, "saved.pt")
        dist.barrier()
        del first
        again = _Script(run, way, rank)
        saved = torch.load("saved.pt")
        again.net.load_state_dict(saved["net"])
        again.adam.load_state_dict(saved["adam"])
        del saved
        dist.barrier()  # until all have read it
        again.train()
