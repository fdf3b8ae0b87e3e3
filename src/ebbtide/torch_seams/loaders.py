"""What torch's data loaders give out, as it is given: their iterators have one ``__next__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]

from ebbtide.torch_seams.patches import Attribute, Patch, wrapped

__all__ = ["each_batch"]


def each_batch(tell: Callable[[Any], None]) -> Patch:
    """A patch while which is open ``tell`` is given every batch of every loader, before whoever asked for it."""

    def telling(below: Callable[..., Any]) -> Callable[..., Any]:
        def give(iterator: Any) -> Any:
            batch = below(iterator)
            tell(batch)
            return batch

        return give

    return wrapped(Attribute(_BaseDataLoaderIter, "__next__"), telling, lasting=True)
