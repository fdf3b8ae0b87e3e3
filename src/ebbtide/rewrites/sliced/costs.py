"""What a call in slices needs while it runs: the values between its ops, of one slice."""

from __future__ import annotations

from torch import fx

from ebbtide.rewrites.sliced.calls import Tile
from ebbtide.rewrites.sliced.growth import bytes_of
from ebbtide.rewrites.views import made_by

__all__ = ["workspace_of"]


def workspace_of(tile: Tile, share: float) -> int:
    """Of the longest slice: all that is there at once between its ops, each dropped after its last reader."""
    last: dict[fx.Node, int] = {}
    for index, part in enumerate(tile.parts):
        for each in part.all_input_nodes:
            last[made_by(each)] = index
    live: dict[fx.Node, int] = {}
    most = 0
    for index, part in enumerate(tile.parts):
        live[part] = round(bytes_of(part) * share) + 64
        most = max(most, sum(live.values()))
        for each in [each for each in live if last.get(each, -1) <= index and each not in tile.results]:
            del live[each]
    return most
