"""From the names of tiers to tiers that can be used on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from ebbflow.errors import UsageError
from ebbflow.files import cache_directory
from ebbflow.tiers import Tier
from ebbflow.transfers.disk import DiskTier, disk_tier, refuse_directory

__all__ = ["open_tiers"]


def open_tiers(tiers: Iterable[Tier], device: str) -> dict[str, DiskTier]:
    """The tiers by name, each ready to be used from ``device``.

    Raises:
        UsageError: for the host's memory where the device's is the host's.
        TierError: for a directory that cannot be a tier.
    """
    found: dict[str, DiskTier] = {}
    for tier in tiers:
        if tier.directory is None:
            raise UsageError(
                f"tiers={tier.name!r} is not accepted for a model on {device}: "
                + (
                    "the memory of a CPU is the host's, so that moving tensors there would free nothing. Use "
                    "tiers='disk' or 'disk:PATH'"
                    if device == "cpu"
                    else "moving to the host is planned for cards that are not at hand, and not run yet"
                ),
                argument="tiers",
                value=tier.name,
                accepted=("disk", "disk:PATH"),
            )
        if tier.directory.is_relative_to(cache_directory()):
            tier.directory.mkdir(parents=True, exist_ok=True)
        refuse_directory(tier.directory)
        found[tier.name] = disk_tier(tier.directory)
    return found
