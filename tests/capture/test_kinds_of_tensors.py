"""Tensors without strides or with several parts: refused by name where a step reads them, counted where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.errors import CaptureError
from ebbtide.measurement.resident import storages_in
from ebbtide.torch_seams.storages import walk

# torch's own, of formats that it calls new.
pytestmark = pytest.mark.filterwarnings("ignore:(Sparse|The PyTorch API of nested|torch.quantize_per)")
ROWS = 6
Make = Callable[[], torch.Tensor]


def coo() -> torch.Tensor:
    places = torch.tensor([[0, 1, 1, 3, 5], [2, 0, 4, 3, 1]])
    return torch.sparse_coo_tensor(places, torch.tensor([0.5, 1.5, -1.0, 2.0, 0.25]), (ROWS, ROWS)).coalesce()


def jagged(layout: torch.layout = torch.jagged) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(4, 4)], layout=layout)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(ROWS, ROWS), 0.1, 0, torch.qint8)


SPARSE: dict[str, tuple[Make, str]] = {
    "coo": (coo, "index_add"),
    "csr": (lambda: coo().to_sparse_csr(), "index_add"),
    "csc": (lambda: coo().to_sparse_csc(), "index_add"),
    "bsr": (lambda: coo().to_dense().to_sparse_bsr((2, 2)), "index_add"),
    "bsc": (lambda: coo().to_dense().to_sparse_bsc((2, 2)), "index_add"),
}
OTHERS: dict[str, tuple[Make, str]] = {
    "nested": (lambda: jagged(torch.strided), "padded tensor and a mask"),
    "jagged": (jagged, "padded tensor and a mask"),
    "oneDNN's": (lambda: torch.ones(ROWS, ROWS).to_mkldnn(), "plain tensor"),
    "quantized": (quantized, "Dequantize it before"),
}


def product(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if t.is_nested:
        return torch.cat(list(t.unbind()))
    if t.is_quantized:
        return t.dequantize() @ x
    return t.to_dense() @ x if t.layout is torch._mkldnn else torch.sparse.mm(t, x)  # type: ignore[attr-defined]


class Graph(nn.Module):
    """A layer over rows, of which an odd tensor makes others if it is read."""

    def __init__(self, odd: torch.Tensor | None = None, *, buffer: bool = False, reads: bool = True) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads
        if buffer:
            self.register_buffer("odd", odd)
        else:
            self.odd = odd

    def forward(self, x: torch.Tensor, odd: torch.Tensor | None = None) -> torch.Tensor:
        if not self.reads:
            return self.linear(x).square().sum()
        return self.linear(product(self.odd if odd is None else odd, x)).square().sum()  # type: ignore[arg-type]


def calls(make: Make, where: str, *, reads: bool = True) -> tuple[Graph, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = Graph(None if where == "argument" else make(), buffer=where == "buffer", reads=reads)
    return model, (torch.ones(ROWS, 4), make()) if where == "argument" else (torch.ones(ROWS, 4),)


@pytest.mark.parametrize("where", ["argument", "buffer", "attribute"])
@pytest.mark.parametrize("kind", [*SPARSE, *OTHERS])
def test_what_is_read_is_refused_by_name(kind: str, where: str) -> None:
    make, remedy = {**SPARSE, **OTHERS}[kind]
    model, arguments = calls(make, where)
    with pytest.raises(CaptureError) as refused:
        ebbtide.fit(model, "1GiB")(*arguments)
    assert remedy in str(refused.value).partition("\n")[0]
    assert len(str(refused.value).split()) <= 80


@pytest.mark.parametrize("where", ["argument", "buffer", "attribute"])
@pytest.mark.parametrize("kind", [*SPARSE, "nested", "oneDNN's", "quantized"])
def test_what_is_not_read_hinders_nothing(kind: str, where: str) -> None:
    model, arguments = calls({**SPARSE, **OTHERS}[kind][0], where, reads=False)
    model = ebbtide.fit(model, "1GiB")
    for _ in range(2):
        model(*arguments).backward()
    assert ebbtide.calls_of(model).planned == 2


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("buffer", [True, False])
def test_a_sparse_tensor_counts_by_its_parts(kind: str, buffer: bool) -> None:
    model = Graph(SPARSE[kind][0](), buffer=buffer)
    alone = Graph()
    more = sum(walk(model)[2].values()) - sum(walk(alone)[2].values())
    assert more == sum(storages_in([SPARSE[kind][0]()]).values()) > 0
    assert sum(storages_in([model]).values()) - sum(storages_in([alone]).values()) == more


def test_a_sparse_gradient_counts_by_its_parts() -> None:
    """A loss beside the planned call may have left one."""
    table = nn.Embedding(10, 4, sparse=True)
    before = sum(walk(table)[2].values())
    table(torch.tensor([1, 2])).sum().backward()
    assert sum(walk(table)[2].values()) - before == 2 * 8 + 2 * 4 * 4


class ByIndex(Graph):
    def forward(self, x: torch.Tensor, places: Any = None, values: Any = None) -> torch.Tensor:
        rows, columns = places
        return self.linear(torch.zeros_like(x).index_add(0, rows, values[:, None] * x[columns])).square().sum()


class Dense(Graph):
    def forward(self, x: torch.Tensor, odd: torch.Tensor | None = None) -> torch.Tensor:
        assert odd is not None
        return self.linear(odd @ x).square().sum()


def made_sparse(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(x.to_sparse(), torch.ones(4, 4))


def made_coo(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (ROWS, ROWS)), x)


def made_csr(x: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.arange(ROWS + 1), torch.arange(ROWS), torch.ones(ROWS), (ROWS, ROWS)) @ x


def made_nested(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(torch.nested.as_nested_tensor([x[:2], x[2:]]).unbind()))


class Making(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.make(self.linear(x)).square().sum()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [*((each, "index_add") for each in (made_sparse, made_coo, made_csr)), (made_nested, "padded tensor and a mask")],
)
def test_what_the_forward_makes_is_refused_by_name(make: Callable[[torch.Tensor], torch.Tensor], remedy: str) -> None:
    with pytest.raises(CaptureError) as refused:
        ebbtide.fit(Making(make), "1GiB")(torch.ones(ROWS, 4))
    assert remedy in str(refused.value).partition("\n")[0]
    assert len(str(refused.value).split()) <= 80


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_a_view_of_a_sparse_tensors_values_is_refused_by_name(kind: str) -> None:
    model = ebbtide.fit(ByIndex(), "1GiB")
    with pytest.raises(CaptureError, match=r"clone\(\)"):
        model(torch.ones(ROWS, 4), coo().indices(), SPARSE[kind][0]().values())


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("advised", [ByIndex, Dense])
def test_what_the_refusal_advises_is_planned(kind: str, advised: type[Graph]) -> None:
    """With eager's numbers, and with those of the product of the sparse tensor."""
    sparse, x = SPARSE[kind][0](), torch.randn(ROWS, 4)
    parts = sparse.to_dense().to_sparse_coo() if kind in ("bsr", "bsc") else sparse.to_sparse_coo()
    arguments = (x, sparse.to_dense())
    if advised is ByIndex:
        arguments = (x, parts.coalesce().indices().clone(), parts.coalesce().values().clone())
    torch.manual_seed(0)
    eager, fitted = advised(), advised()
    fitted.load_state_dict(eager.state_dict())
    ebbtide.fit(fitted, "1GiB")
    for _ in range(2):
        losses = [model(*arguments) for model in (eager, fitted)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert torch.equal(eager.linear.weight.grad, fitted.linear.weight.grad)  # type: ignore[arg-type]
    assert ebbtide.calls_of(fitted).planned == 2
    torch.testing.assert_close(losses[0], eager.linear(coo().to_dense() @ x).square().sum())
