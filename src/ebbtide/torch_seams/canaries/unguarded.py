"""Of ``unguarded``, ``unguarded_code`` and ``own_guards``: what a trace has read is asked again."""

from __future__ import annotations

from collections import OrderedDict

import torch

from ebbtide.torch_seams import dynamo, unguarded
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


@canary
def what_is_not_guarded_gets_guards() -> None:
    """What a trace read of Python's objects, and Dynamo would not ask again, is asked again."""
    ordered = OrderedDict(one=1.0, two=2.0)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * next(iter(ordered.values())) * getattr(plain, "scale", 1.0)

    step = torch.compile(plain, backend="eager", fullgraph=True, dynamic=False)
    found: list[float] = []
    with unguarded.unguarded_guarded():
        found.append(step(torch.ones(())).item())
        ordered.move_to_end("one")
        found.append(step(torch.ones(())).item())
        vars(plain)["scale"] = 3.0
        found.append(step(torch.ones(())).item())
    dynamo.forget_compiled(step)
    expect(found == [1.0, 2.0, 6.0], f"it gives {found}")
