"""Every op with gradients in torch's own list of ops (``OpInfo``), captured and run against eager.

1. An op's *samples* are a few of the calls that torch tests it with in float32, evenly spread over all of them.
2. Each tensor of a sample that takes a gradient is a copy of a parameter; the loss weights each output with fixed
   numbers. All samples of an op are one step; where that fails or differs each is a step of its own.
3. The captured step and eager agree if every output and every gradient has the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.errors import EbbtideError, InternalError
from harness.children import ROOT
from harness.record import Row, holds

__all__ = ["KNOWN", "SUMMARY", "TITLE", "names", "rows", "summary"]

TITLE = "Every op with gradients in torch's OpInfo list, captured against eager"
SUMMARY = "How many"
SAMPLES = 4

LOOKS = "its backward looks for zeros in eager and takes another way without; captured, it takes the way for all"
KNOWN: dict[str, str] = {"prod": LOOKS, "masked.prod": LOOKS}
"""Ops whose captured step has other bits than eager's, and why."""


def _database() -> list[Any]:
    # torch's list imports a helper of its own tests that nothing here calls.
    if "expecttest" not in sys.modules:
        helper = types.ModuleType("expecttest")
        helper.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = helper
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # Random ops are listed inside of a seeding by Python, which is no part of an op; here each run is seeded.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return [each for each in op_db if each.supports_autograd and torch.float32 in each.supported_backward_dtypes("cpu")]


def names() -> list[str]:
    """All ops, with their variants."""
    return [each.full_name for each in _database()]


@dataclass(frozen=True)
class _Slot:
    """Where a tensor of a sample goes."""

    kind: str
    index: int


class _Step(nn.Module):
    """The loss of an op's samples and all their outputs."""

    def __init__(self, op: Any, samples: Sequence[Any]) -> None:
        super().__init__()
        self.op = op
        self.parameters_of_samples = nn.ParameterList()
        self.constants: list[Tensor] = []
        self.calls = [(self._store([each.input, *each.args]), self._store(dict(each.kwargs))) for each in samples]
        self.processes = [each.output_process_fn_grad for each in samples]
        self.weights: list[Tensor | None] = []

    def _store(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.requires_grad:
                self.parameters_of_samples.append(nn.Parameter(value.detach()))
                return _Slot("parameter", len(self.parameters_of_samples) - 1)
            self.constants.append(value.detach())
            return _Slot("constant", len(self.constants) - 1)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._store(each) for each in value)
        if isinstance(value, dict):
            return {key: self._store(each) for key, each in value.items()}
        return value

    def _load(self, value: Any) -> Any:
        if isinstance(value, _Slot):
            held = self.parameters_of_samples if value.kind == "parameter" else self.constants
            return held[value.index].clone()
        if isinstance(value, list):
            return [self._load(each) for each in value]
        if type(value) is tuple:
            return tuple([self._load(each) for each in value])
        if isinstance(value, dict):
            return {key: self._load(each) for key, each in value.items()}
        return value

    def results(self) -> list[Tensor]:
        """The tensors that the op returns, sample after sample."""
        found: list[Tensor] = []
        for (args, kwargs), process in zip(self.calls, self.processes, strict=True):
            result = process(self.op(*self._load(args), **self._load(kwargs)))
            several = result if isinstance(result, (tuple, list)) else [result]
            for each in several:
                if isinstance(each, Tensor):
                    found.append(torch.view_as_real(each.resolve_conj()) if each.is_complex() else each)
        return found

    def forward(self, one: Tensor) -> Any:
        results = self.results()
        terms = [(r * w).sum() for r, w in zip(results, self.weights, strict=True) if w is not None]
        return torch.stack(terms).sum() * one, results


def _samples(op: Any) -> list[Any]:
    found = [s for s in op.sample_inputs("cpu", torch.float32, requires_grad=True) if _takes_gradient(s)]
    count = min(SAMPLES, len(found))
    return [found[i * (len(found) - 1) // max(count - 1, 1)] for i in range(count)]


def _takes_gradient(sample: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return any(isinstance(each, Tensor) and each.requires_grad and each.numel() for each in leaves)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _values(step: _Step) -> list[Tensor | None]:
    """Loss, outputs, gradients."""
    step.zero_grad()
    _seed()
    loss, results = step(torch.ones(()))
    values = [loss.detach().clone(), *(each.detach().clone() for each in results)]
    loss.backward()
    return [*values, *(each.grad for each in step.parameters_of_samples)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(one.isnan(), other.isnan())


def _largest(pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> float:
    """The largest difference relative to the tensor that it is in."""
    found = 0.0
    for one, other in pairs:
        if one is None or other is None or one.shape != other.shape:
            return float("inf")
        one, other = one.to_dense(), other.to_dense()
        scale = other.double().abs().nan_to_num().max().clamp_min(1e-30) if other.numel() else 1.0
        if other.numel():
            found = max(found, float(((one.double() - other.double()).abs().nan_to_num().max()) / scale))
    return found


@dataclass(frozen=True)
class _Outcome:
    """What came of one step: ``equal``, ``differs``, ``refused``, ``fails in eager`` or ``ERROR``."""

    word: str
    why: str = ""


def _tried(op: Any, samples: Sequence[Any]) -> _Outcome:
    _seed()
    try:
        plain = _Step(op.op, samples)
        fitted = copy.deepcopy(plain)
        plain.weights = [_weight(each) for each in plain.results()]
        if all(each is None for each in plain.weights):
            return _Outcome("no gradient")
        expected = _values(plain)
        if not all(map(_same, expected, _values(plain))):
            return _Outcome("fails in eager", "two runs of eager differ")
    except Exception as error:  # eager's own limits are no subject of ours
        return _Outcome("fails in eager", _line(error))
    fitted.weights = plain.weights
    try:
        found = _values(ebbtide.fit(fitted, "2GiB", options=ebbtide.Options(effort=10)))
        again = _values(fitted)
    except InternalError as error:
        return _Outcome("ERROR", _line(error))
    except EbbtideError as error:
        return _Outcome("refused", _line(error))
    except Exception as error:
        return _Outcome("ERROR", f"{type(error).__name__}: {_line(error)}")
    finally:
        torch._dynamo.reset()
    pairs = [*zip(found, expected, strict=True), *zip(again, expected, strict=True)]
    if all(_same(*pair) for pair in pairs):
        return _Outcome("equal")
    if any((one is None) != (other is None) for one, other in pairs):
        return _Outcome("differs", "a gradient of zeros where eager has none")
    return _Outcome("differs", f"by {_largest(pairs):.1e} of the largest number")


def _weight(result: Tensor) -> Tensor | None:
    """Fixed numbers for a result that takes a gradient."""
    if not result.requires_grad:
        return None
    generator = torch.Generator().manual_seed(result.numel())
    return torch.rand(result.shape, generator=generator).to(result.dtype)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()).replace(f"{ROOT}{os.sep}", "")[:240]


def rows(wanted: Sequence[str]) -> Iterator[Row]:
    """A row for each of these ops."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known = {each.full_name: each for each in _database()}
    for name in wanted:
        with contextlib.redirect_stdout(sys.stderr):
            row = _row(name, known[name])
        yield row


def _row(name: str, op: Any) -> Row:
    _seed()
    samples = _samples(op)
    outcomes = [_tried(op, samples)] * len(samples) if samples else [_Outcome("no gradient")]
    if outcomes[0].word not in ("equal", "no gradient") and len(samples) > 1:
        outcomes = [_tried(op, [each]) for each in samples]
    word = next(
        (w for w in ("ERROR", "differs", "refused", "fails in eager", "equal") if _has(outcomes, w)), "no gradient"
    )
    why = KNOWN.get(name, "") if word == "differs" else ""
    found = next((each.why for each in outcomes if each.word == word), "")
    equal = sum(each.word == "equal" for each in outcomes)
    columns = {"case": name, "samples": len(samples), "equal": equal, "outcome": word, "found": found, "reason": why}
    return Row("opinfo", columns, (holds("same bits, or named", word != "ERROR" and (word != "differs" or bool(why))),))


def _has(outcomes: Sequence[_Outcome], word: str) -> bool:
    return any(each.word == word for each in outcomes)


def summary(found: Sequence[Row]) -> Row:
    """How many ops came to what."""
    counts: dict[str, Any] = {"case": "all", "ops": len(found), "samples": sum(r.columns["samples"] for r in found)}
    for word in ("equal", "no gradient", "fails in eager", "refused", "differs", "ERROR", "crash"):
        counts[word.replace(" ", "_").lower()] = sum(row.columns["outcome"] == word for row in found)
    return Row("summary", counts)
