"""Models of the papers and of today, sized by arguments. ``zoo:NAME`` on the command line."""

from __future__ import annotations

from collections.abc import Callable

from ebbflow.case import Case
from ebbflow.errors import UsageError
from ebbflow.zoo.gpt import GPT, GPTConfig, gpt
from ebbflow.zoo.mlp_chain import MLPChain, mlp_chain

__all__ = ["GPT", "MODELS", "GPTConfig", "MLPChain", "build", "gpt", "mlp_chain"]

MODELS: dict[str, Callable[[int], Case]] = {"gpt": gpt, "mlp_chain": mlp_chain}


def build(name: str, size: int | None = None) -> Case:
    """The zoo's case ``name``; ``size`` is its batch, the default size if ``None``.

    Raises:
        UsageError: if the zoo has no such model, listing those it has.
    """
    if name not in MODELS:
        raise UsageError(f"the zoo has no model {name!r}; it has: {', '.join(sorted(MODELS))}")
    return MODELS[name]() if size is None else MODELS[name](size)  # type: ignore[call-arg]
