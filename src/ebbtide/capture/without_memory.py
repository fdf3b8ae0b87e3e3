"""Models without memory: every tensor made inside has a shape and no bytes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from ebbtide.torch_seams.fake_tensors import (
    FakeTensorMode,
    conversions_replace,
    initialisation_reads_no_values,
)

__all__ = ["without_memory"]


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Make models and arguments as fake tensors: for a machine that is not at hand."""
    with (
        warnings.catch_warnings(),
        conversions_replace(),
        initialisation_reads_no_values(),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        # torch's own: copy.deepcopy of a module, as nn.TransformerEncoder does, asks fake parameters for an address.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
