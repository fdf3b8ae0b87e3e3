"""Canaries of ``extra_guards``, ``code_guards`` and ``guard_makers``: what a trace has read is asked again.

A patch whose place is gone from torch is left out without a word, since releases differ in what they need. What it was
for is tried out here, definition by definition.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ebbtide.torch_seams import dynamo, extra_guards
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []


def _asked_again(read: Callable[[torch.Tensor], torch.Tensor], changes: Mapping[str, Callable[[], object]]) -> None:
    """After each of ``changes``, by what they change, ``read`` that is compiled gives what it gives as it is."""
    step, one = torch.compile(read, backend="eager", fullgraph=True, dynamic=False), torch.ones(())
    try:
        with extra_guards.extra_guards():
            step(one)
            for what, change in changes.items():
                change()
                expect(step(one).item() == read(one).item(), f"{what} is not asked for again")
    finally:
        dynamo.forget_compiled(step)


@canary
def what_is_not_guarded_gets_guards() -> None:
    """The order of keys, and what was not there: keys, attributes of functions, modules and partials."""
    ordered, keys = OrderedDict(one=1.0, two=2.0), dict[str, float]()
    module, partial = types.ModuleType("module"), functools.partial(torch.mul, torch.ones(()))
    function = types.FunctionType((lambda: None).__code__, {})

    def read(x: torch.Tensor) -> torch.Tensor:
        x = x * next(iter(ordered.values())) * getattr(function, "scale", 1.0) * getattr(module, "scale", 1.0)
        x = x * 2 if hasattr(module, "other") else x
        try:
            x = x * keys["scale"]
        except KeyError:
            x = x + 1
        return partial(x) * getattr(partial, "scale", 1.0)

    _asked_again(
        read,
        {
            "the order of keys": lambda: ordered.move_to_end("one"),
            "an attribute of a function": lambda: setattr(function, "scale", 3.0),
            "an attribute of a module": lambda: setattr(module, "scale", 5.0),
            "whether a module has an attribute": lambda: setattr(module, "other", 1),
            "a key": lambda: keys.update(scale=7.0),
            "an attribute of a partial": lambda: setattr(partial, "scale", 11.0),
        },
    )


@canary
def what_objects_are_gets_guards() -> None:
    """Attributes as a dictionary, identity, and single values: the sign of a zero, the bound of a deque."""

    class Object:
        pass

    it: Any = Object()
    it.one, it.other, it.zero, it.queue = Object(), Object(), 0.0, deque([1.0])

    def read(x: torch.Tensor) -> torch.Tensor:
        x = x * vars(it).get("scale", 1.0)
        x = x * 3 if "more" in it.__dict__ else x
        x = x * 5 if it.one is it.other else x
        x = x * 7 if str(it.zero)[0] == "-" else x
        return x * (it.queue.maxlen or 1)

    _asked_again(
        read,
        {
            "an attribute by name": lambda: setattr(it, "scale", 2.0),
            "whether there is an attribute": lambda: setattr(it, "more", 1),
            "whether two are one": lambda: setattr(it, "other", it.one),
            "the sign of a zero": lambda: setattr(it, "zero", -0.0),
            "the bound of a deque": lambda: setattr(it, "queue", deque([1.0], maxlen=11)),
        },
    )


@canary
def code_gets_guards() -> None:
    """The code of functions, methods of bases, and builtins that a global hides."""

    class Base:
        def scale(self) -> float:
            return 1.0

    class Derived(Base):
        pass

    names: dict[str, Any] = {}
    exec("def larger(x):\n    return x * max(1, 2)", names)
    scale, it = types.FunctionType((lambda x: x * 1).__code__, globals()), Derived()

    def read(x: torch.Tensor) -> torch.Tensor:
        return names["larger"](scale(x)) * it.scale()

    _asked_again(
        read,
        {
            "the code of a function": lambda: setattr(scale, "__code__", (lambda x: x * 3).__code__),
            "a method of a base": lambda: setattr(Derived, "scale", lambda _: 5.0),
            "a builtin": lambda: names.update(max=lambda *_: 7),
        },
    )
