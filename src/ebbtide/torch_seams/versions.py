"""Which versions of torch Ebbtide was tested on, and what happens on any other."""

from __future__ import annotations

import functools
import re

import torch

from ebbtide.errors import CaptureError

__all__ = ["TESTED", "is_tested", "require_supported_torch"]

TESTED = ("2.11", "2.12", "2.13", "2.14")
"""Releases on which the canaries, the numerics tier and the demo are run by hand (``make test-torch``): 2.11.0, 2.12.0,
2.13.0 and 2.14.1 (``benchmarks/results/torch-*``)."""


def is_tested(version: str) -> bool:
    """Whether a version of torch, such as ``"2.13.0+cpu"``, belongs to a release in :data:`TESTED`."""
    release = re.match(r"\d+\.\d+", version)
    return release is not None and release[0] in TESTED


def require_supported_torch() -> None:
    """Refuse a torch on which something that Ebbtide relies on has changed; free of cost on tested releases.

    On any other release every canary runs, once per process.

    Raises:
        CaptureError: if one fails, with its name, the torch at hand and the tested ones.
    """
    version = str(torch.__version__)
    if not is_tested(version):
        _run_canaries(version)


@functools.cache  # an exception is not kept: a failing canary fails again
def _run_canaries(version: str) -> None:
    from ebbtide.torch_seams.canaries import CANARIES, run

    for name in CANARIES:
        try:
            run(name)
        except Exception as error:
            raise CaptureError(
                f"Ebbtide was tested on torch {', '.join(TESTED)}; this is torch {version}, and something that Ebbtide "
                f"relies on is different in it: canary {name!r}: {str(error) or repr(error)}",
                remedy="install a tested release of torch, or a newer Ebbtide; else report the canary",
            ) from error
