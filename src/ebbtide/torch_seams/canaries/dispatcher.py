"""The canaries of ``dispatcher`` and ``products``: what operators say of themselves, how they are traced."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher

from ebbtide.torch_seams import dispatcher, fake_tensors, products
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []

_aten = torch.ops.aten


@canary
def operators_know_their_schema() -> None:
    """Names, defaults and writes of an operator's arguments; whether it is made of others; its C++ composite kernel."""
    schema = dispatcher.schema_of(_aten.dropout_.default)
    expect([a.name for a in schema.arguments] == ["self", "p", "train"], "arguments of dropout_ are others")
    expect(schema.is_mutable and not dispatcher.schema_of(_aten.mm.default).is_mutable, "writes are told otherwise")
    expect(len(dispatcher.schema_of(_aten.native_dropout.default).returns) == 2, "results are told otherwise")
    expect(dispatcher.is_composite(_aten.matmul.default), "matmul is an op of its own")
    expect(not dispatcher.is_composite(_aten.mm.default), "mm is made of others")
    expect(_aten.mm.default.namespace == "aten" and _aten.t.default.is_view, "namespace or views are told otherwise")
    expect(torch.Tag.nondeterministic_seeded in _aten.bernoulli.p.tags, "a random op has no tag")
    ones = torch.ones(2, 2)
    expect(dispatcher.composite(_aten.matmul.default, ones, ones).sum().item() == 8, "no composite kernel of matmul")


@canary
def descriptions_ask_for_the_device() -> None:
    """The description of an embedding bag is another where ``device_hint`` says CUDA."""

    def kept() -> tuple[int, ...]:
        with fake_tensors.FakeTensorMode():
            weight, where = torch.empty(4, 2), torch.empty(3, dtype=torch.int64)
            return tuple(t.numel() for t in _aten._embedding_bag.default(weight, where, where[:1]))

    here = kept()
    fake_tensors.FakeTensorMode.cache_clear()
    with dispatcher.device_hint_is("cuda"):
        there = kept()
    fake_tensors.FakeTensorMode.cache_clear()
    expect(here != there, "an embedding bag is described alike for CPU and CUDA")


@canary
def kernels_compute_in_known_dtypes() -> None:
    """16 bits are computed in 32; channels-last tensors are recognised; a product's multiply-adds are counted."""
    expect(dispatcher.get_computation_dtype(torch.bfloat16) == torch.float32, "bfloat16 is computed otherwise")
    expect(dispatcher.get_computation_dtype(torch.float64) == torch.float64, "float64 is computed otherwise")
    image = torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last)
    expect(dispatcher.suggest_memory_format(image) is torch.channels_last, "channels-last is not recognised")
    count = dispatcher.flop_registry[_aten.mm](torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta"))
    expect(count == 2 * 2 * 3 * 5, f"a product counts {count}")
    heads = (1, 2, 4, 8)
    expect(
        dispatcher.sdpa_flop(*[torch.empty(heads, device="meta")] * 3) == 2 * 2 * (2 * 4 * 4 * 8), "attention's count"
    )
    expect(callable(dispatcher.sdpa_backward_flop), "attention's backward has no count")


@canary
def products_keep_symbols() -> None:
    """Products of batches with symbolic sizes are the calls that they are with numbers, by whichever kernel."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def products_of(rows: Tensor, matrix: Tensor) -> tuple[Tensor, ...]:
        return rows @ rows.mT, rows @ matrix, rows @ matrix.detach(), rows.transpose(0, 1) @ matrix.detach()

    arguments = torch.ones(2, 5, 3), torch.ones(3, 7, requires_grad=True)
    with dispatcher.traced_as_compiled(_aten.matmul.default, products.symbols_stay_in_python):
        graphs = [make_fx(products_of, tracing_mode=mode)(*arguments).graph for mode in ("symbolic", "fake")]
    symbols, numbers = (
        [str(n.target).replace("_unsafe_view", "view") for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)]
        for graph in graphs
    )
    expect(symbols == numbers and "aten.bmm.default" in numbers, f"products are {symbols} of symbols, else {numbers}")
    rows = next(iter(graphs[0].find_nodes(op="placeholder"))).meta["val"]
    expect(isinstance(rows.shape[1], torch.SymInt), "a product makes a number of a symbol")


@canary
def an_operator_with_a_derivative_is_traced_as_another() -> None:
    """``cudnn_batch_norm`` is traced as what a kernel in Python calls, where the compiled one asks for it."""
    asked: list[bool] = []

    def kernel(*args: object) -> tuple[Tensor, ...]:
        asked.append(bool(args[5]))
        return tuple(torch.empty(2) for _ in range(4))

    with (
        fake_tensors.FakeTensorMode(),
        enable_python_dispatcher(),
        dispatcher.traced_with_derivative(_aten.cudnn_batch_norm.default, kernel),
    ):
        one = torch.empty(2, requires_grad=True)
        _aten.cudnn_batch_norm.default(torch.empty(3, 2, 4, 4), one, one, None, None, True, 0.1, 1e-5)
    expect(asked == [True], "another kernel of cudnn_batch_norm is traced")
