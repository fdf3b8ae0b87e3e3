"""The translation models in Sockeye's form: sizes, layers, what is refused; and layers of the classic forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide_published.zoo.nmt import NMTConfig, nmt, nmt_luong

SMALL: dict[str, Any] = {"vocabulary": 40, "length": 4, "width": 8, "dropout": 0.0}


def parameters(case: Case) -> int:
    return sum(parameter.numel() for parameter in case.model.parameters())


def scores(case: Case, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, __: Any, out: torch.Tensor) -> None:
        seen.append(out)

    with case.model.get_submodule("head").register_forward_hook(keep):
        case.model(source, target)
    return seen[0]


def test_sizes_of_their_own():
    config = NMTConfig(
        mlp=True, layers=2, width=512, embedding=300, attention=256, vocabulary=7710, source_vocabulary=17192
    )
    with FakeTensorMode():
        case = nmt(2, config=config)
    lstm = 2 * (4 * 256 * (300 + 256) + 8 * 256)  # both directions
    upper = 4 * 512 * (512 + 512) + 8 * 512
    decoder = 4 * 512 * (300 + 512 + 512) + 8 * 512
    attention = 2 * 512 * 256 + 256
    readout, head = 512 * (1024 + 1), 7710 * (512 + 1)
    expected = 300 * (17192 + 7710) + lstm + 2 * upper + decoder + attention + readout + head
    assert parameters(case) == expected
    assert case.name == "nmt-2L-d512-t30-b2"


def test_lengths_of_source_and_target():
    case = nmt(3, config=NMTConfig(mlp=True, source_length=7, **SMALL))
    assert [tuple(each.shape) for each in case.args] == [(3, 7), (3, 5)]
    assert torch.isfinite(case.model(*case.args))


@pytest.mark.parametrize("form", [{}, {"multiplicative": True}, {"mlp": True}, {"mlp": True, "normalised": True}])
def test_every_parameter_of_every_layer_is_reached(form: dict[str, bool]):
    case = nmt(2, config=NMTConfig(layers=3, **SMALL, **form))
    case.model(*case.args).backward()
    for key, parameter in case.model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


def test_one_embedding_for_both_sides():
    case = nmt(2, config=NMTConfig(mlp=True, tied=True, **SMALL))
    assert case.model.source is case.model.target
    assert "target.weight" not in dict(case.model.named_parameters())


def test_decoder_reads_no_token_before_its_turn_and_feeds_what_it_read():
    case = nmt(1, config=NMTConfig(mlp=True, layers=2, **SMALL))
    source, target = case.args
    later = target.clone()
    later[:, 1] = (later[:, 1] + 1) % 40
    before, after = scores(case, source, target), scores(case, source, later)
    assert torch.equal(before[:, :1], after[:, :1])
    assert not torch.isclose(before[:, 1:], after[:, 1:]).all(-1).any()


def test_layers_of_the_classic_forms():
    for make in (nmt, nmt_luong):
        one, two = make(2, **SMALL), make(2, layers=2, **SMALL)
        assert not any(key.startswith("upper") for key in one.model.state_dict())
        assert sum(key.startswith("upper") for key in two.model.state_dict()) == 8
        assert two.name == one.name.replace("-d8", "-2L-d8")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"layers": 0}, "layers=0"),
        ({"width": 7}, "width=7 is odd"),
        ({"mlp": True, "multiplicative": True}, "two scores"),
        ({"attention": 16}, "belong to mlp"),
        ({"normalised": True, "multiplicative": True}, "belong to mlp"),
        ({"tied": True, "vocabulary": 40, "source_vocabulary": 50}, "source has 50 tokens, the target 40"),
    ],
)
def test_what_does_not_go_together_is_refused(config: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=says):
        NMTConfig(**config)
