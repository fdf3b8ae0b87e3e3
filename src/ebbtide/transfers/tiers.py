"""From the names of tiers to tiers that can be used on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from ebbtide.errors import UsageError
from ebbtide.files import cache_directory
from ebbtide.tiers import Tier
from ebbtide.transfers.disk import disk_tier, refuse_directory
from ebbtide.transfers.host import host_tier
from ebbtide.transfers.paths import TransferPath
from ebbtide.transfers.staged import staged_disk

__all__ = ["open_tiers"]


def open_tiers(tiers: Iterable[Tier], device: str) -> dict[str, TransferPath]:
    """The tiers by name, each ready to be used from ``device``, a type.

    Raises:
        UsageError: for the host's memory where the device's is the host's.
        TierError: for a directory that cannot be a tier.
    """
    found: dict[str, TransferPath] = {}
    for tier in tiers:
        if tier.directory is None:
            if device != "cuda":
                raise UsageError(
                    f"tiers={tier.name!r} is not accepted for a model on {device}: the memory of a CPU is the host's, "
                    "so that moving tensors there would free nothing. Use tiers='disk' or 'disk:PATH'",
                    argument="tiers",
                    value=tier.name,
                    accepted=("disk", "disk:PATH"),
                )
            found[tier.name] = host_tier()
            continue
        if tier.directory.is_relative_to(cache_directory()):
            tier.directory.mkdir(parents=True, exist_ok=True)
        refuse_directory(tier.directory)
        found[tier.name] = staged_disk(tier.directory) if device == "cuda" else disk_tier(tier.directory)
    return found
