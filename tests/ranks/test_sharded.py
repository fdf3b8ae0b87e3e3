"""A model of whose parameters a process holds shards is refused by name, whichever comes first, fit or sharding."""

from __future__ import annotations

from rank_cases.cases import ORDERS
from rank_cases.launch import run_ranks


def test_sharded_models_are_refused_before_anything_runs() -> None:
    """In each order at the first step at which it can be known: at ``fit``, or at the next call."""
    for outcome in run_ranks("sharded_in_every_way"):
        assert not outcome.error, outcome.text
        for case, found in outcome.found.items():
            how, order = case.split()
            assert found["at"] == ORDERS[order], (case, found)
            name = "DTensor" if how == "parallel" else "fully_shard"
            assert name in found["said"] or "is sharded by" in found["said"], (case, found)
            assert "DistributedDataParallel" in found["said"]
