"""What the profiler's helpers write to standard error while Ebbtide records allocations: nothing that is expected."""

from __future__ import annotations

import pytest
import torch

from ebbtide.torch_seams import profiler

WARNING = "Memory block of unknown size"


# Torch warns of every thousandth in the process, and not of those that lie where an earlier profile has seen one.
MANY = 10_000


def give_back(blocks: int = MANY) -> None:
    """While a profile of ours runs, blocks from before it."""
    held = [torch.empty(1) for _ in range(blocks)]
    record = profiler.AllocationProfile()
    record.start()
    held.clear()
    record.stop()


def test_old_blocks_that_are_given_back_are_no_news(capfd: pytest.CaptureFixture[str]) -> None:
    give_back()
    assert WARNING not in capfd.readouterr().err


def test_a_profile_of_the_users_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    give_back(1)
    held = [torch.empty(1) for _ in range(MANY)]
    # acc_events, or 2.11 warns that it is off.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True):
        held.clear()
    assert WARNING in capfd.readouterr().err


def test_a_level_of_the_users_is_left_alone(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    level = profiler._level()
    assert level is not None, "this torch exports its level of messages"
    monkeypatch.setattr(level.owner, "value", 0)  # TORCH_CPP_LOG_LEVEL=INFO
    give_back()
    assert WARNING in capfd.readouterr().err
    assert level.read() == 0


def test_the_level_is_put_back_where_a_profile_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    record = profiler.AllocationProfile()

    def refuse(_: object) -> None:
        raise RuntimeError("another one runs")

    monkeypatch.setattr(type(record._profile), "__enter__", refuse)
    with pytest.raises(RuntimeError, match="another one runs"):
        record.start()
    level = profiler._level()
    assert level is not None
    assert level.read() == profiler._WARNING
