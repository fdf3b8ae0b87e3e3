"""What Ebbtide relies on of torch beyond its promises, each fact exercised by a small function.

They run in the tests on every tested release, and at a user's first capture on any other (``versions.py``). A canary
raises if its fact does not hold. All together take less than a second, need no CUDA and leave no trace: no random
number is drawn from the user's generator, no mode and no gradient mode of the caller matters.

A module here has the canaries of the module of the same name beside this folder; of smaller ones those of several, as
its first line says.
"""

from __future__ import annotations

from ebbtide.torch_seams.canaries import (
    aot,
    autograd,
    branches,
    cards,
    compile_mode,
    compiler_faults,
    compiling_flag,
    data_parallel,
    dispatcher,
    dynamo,
    extra_guards,
    fake_tensors,
    gradient_norms,
    loaders,
    numbers,
    offloaded,
    optimizers,
    patches,
    process_groups,
    sharding,
    storages,
    tracing,
)
from ebbtide.torch_seams.canaries.registry import CANARIES, run

__all__ = [
    "CANARIES",
    "aot",
    "autograd",
    "branches",
    "cards",
    "compile_mode",
    "compiler_faults",
    "compiling_flag",
    "data_parallel",
    "dispatcher",
    "dynamo",
    "extra_guards",
    "fake_tensors",
    "gradient_norms",
    "loaders",
    "numbers",
    "offloaded",
    "optimizers",
    "patches",
    "process_groups",
    "run",
    "sharding",
    "storages",
    "tracing",
]
