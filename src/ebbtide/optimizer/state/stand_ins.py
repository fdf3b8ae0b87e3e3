"""Optimizers of the class and options of another one, to be stepped in its place."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch

from ebbtide.optimizer.state.options import is_option, is_plain

__all__ = ["stand_in_of", "tried_out"]


@contextmanager
def tried_out(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, stand-ins of an optimizer step; what its class draws and counts is as before then.

    That is the random states of torch, Python and NumPy, and plain attributes of its classes. Torch's own draw and
    count nothing there.
    """
    classes = type(optimizer).__mro__[:-1]
    own = [each for each in classes if not each.__module__.startswith(("torch.", "typing", "abc"))]
    if not own:
        yield
        return
    python, of_numpy = random.getstate(), numpy.random.get_state()
    kept = [(each, name, value) for each in own for name, value in vars(each).items() if is_plain(value)]
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(of_numpy)
            for each, name, value in kept:
                if vars(each).get(name) is not value:
                    setattr(each, name, value)


def stand_in_of(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the class of ``optimizer``, of other groups: what it keeps in attributes it has as well.

    Options are not only in groups: a class of somebody's own may keep the norm that it clips by, or whether it takes a
    momentum, in an attribute, a dictionary in one, or a function. What holds anything else (tensors, modules, a value
    for each parameter) is what its constructor makes.
    """
    stand_in = type(optimizer)(groups)  # type: ignore[call-arg]
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and not name.startswith("_optimizer_") and is_option(value):
            with suppress(Exception):
                vars(stand_in)[name] = copy.deepcopy(value)  # functions and plain values are as they are
    return stand_in


_OF_TORCH = frozenset(("state", "param_groups", "defaults"))
