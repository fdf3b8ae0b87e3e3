"""The zoo: published sizes, a finite step with all gradients, and inputs that leave the global generator alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.capture.without_memory import without_memory
from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.names import ZOO_GROUP, zoo_names
from ebbtide.zoo import (
    MODELS,
    PRESETS,
    build,
    gpt2_small,
    hf_gpt2,
    hf_t5,
    llama_8b,
    llama_70b,
    llama_70b_lora,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    sizes_of,
    unet,
)
from ebbtide.zoo.inputs import image_batch, integers, pixel_loss
from ebbtide.zoo.small import SMALL

HF_MISSING = importlib.util.find_spec("transformers") is None
needs_transformers = pytest.mark.skipif(HF_MISSING, reason="needs transformers")


def needs(name: str) -> bool:
    """Whether it is one of Hugging Face's models."""
    return name.startswith("hf_") or name in PRESETS


def named(names: list[str]) -> list[Any]:
    """Names as parameters; those of Hugging Face's models skip where transformers is missing."""
    return [pytest.param(name, marks=needs_transformers if needs(name) else ()) for name in names]


def parameters(case: Case) -> int:
    return sum(parameter.numel() for parameter in case.model.parameters())


def loss_of(case: Case) -> torch.Tensor:
    output = case.model(*case.args, **case.kwargs)
    return output if isinstance(output, torch.Tensor) else output.loss


@pytest.mark.parametrize(
    ("model", "count"),
    [  # torchvision's, all for 1000 classes at 224 x 224
        (resnet50, 25_557_032),
        (resnet101, 44_549_160),
        (resnet152, 60_192_808),
    ],
)
def test_parameters_are_the_published_ones(model: Callable[..., Case], count: int) -> None:
    with FakeTensorMode():
        assert parameters(model(1, image=224)) == count


@pytest.mark.parametrize(("model", "layers"), [(resnet200, 200)])
def test_a_deep_residual_network_has_its_layers(model: Callable[..., Case], layers: int) -> None:
    with torch.device("meta"):
        case = model(1, width=1)
    weights = [m for m in case.model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    shortcuts = 4  # one a stage, which nobody counts
    assert len(weights) == layers + shortcuts


def test_sizes_that_torchvision_does_not_publish() -> None:
    with FakeTensorMode():
        # milesial/Pytorch-UNet, the same variant, with transposed convolutions and two classes.
        assert parameters(unet(1, image=(416, 608))) == 31_037_698
        assert parameters(gpt2_small(1)) == 124_439_808  # as Hugging Face's


def test_llama_has_the_published_parameters() -> None:
    with FakeTensorMode():
        assert parameters(llama_8b(8)) == 8_030_261_248  # meta-llama/Meta-Llama-3-8B
        assert parameters(llama_70b(8)) == 70_553_706_496  # meta-llama/Meta-Llama-3-70B
        adapted = llama_70b_lora(8).model
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    # Hu et al. 2021: rank times inputs plus outputs, for queries and outputs 8192 wide, keys and values 1024.
    assert trained == 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024))


@needs_transformers
def test_hugging_face_at_their_own_sizes() -> None:
    with FakeTensorMode():
        assert parameters(hf_gpt2(1, vocabulary=50257, length=1024, width=768, heads=12)) == 124_439_808
        assert parameters(hf_t5(1, vocabulary=32128, width=512)) == 60_506_624


def test_every_model_has_a_small_size() -> None:
    assert sorted(SMALL) == sorted(MODELS)


@pytest.mark.parametrize("name", named(sorted(SMALL)))
def test_a_step_is_finite_and_reaches_every_parameter(name: str) -> None:
    case = SMALL[name]()
    assert all(module.training for module in case.model.modules())
    loss = loss_of(case)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    for key, parameter in case.model.named_parameters():
        if not parameter.requires_grad:
            assert name == "llama_70b_lora"
            assert "adapter" not in key
            continue
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", named(sorted({*MODELS, *PRESETS})))
def test_the_integer_is_the_batch(name: str) -> None:
    with without_memory():
        case = build(name, 3)
        tensors = [*case.args, *case.kwargs.values()]
        assert case.model.training
        assert all(3 in tensor.shape[:2] for tensor in tensors)  # or the length, where a preset has one sequence
        assert case.name.startswith(name)


@pytest.mark.parametrize("name", named(sorted(set(SMALL) - {"gpt", "mlp_chain"})))
def test_seed_decides_the_parameters_and_nothing_the_inputs(name: str) -> None:
    torch.manual_seed(1)
    first = SMALL[name]()
    torch.manual_seed(1)
    again = SMALL[name]()
    other = SMALL[name]()
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    values = [[*case.args, *case.kwargs.values()] for case in (first, other)]
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_inputs_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    image_batch(2, 32, multiple=32)
    integers(10, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_follow_the_default_device() -> None:
    with torch.device("meta"):
        case = resnet50(2, image=32, width=4)
    assert {tensor.device.type for tensor in [*case.args, *case.model.parameters()]} == {"meta"}


def test_the_loss_of_pixels_is_torchs_own() -> None:
    scores, labels = torch.randn(2, 5, 4, 6), torch.randint(5, (2, 4, 6))
    torch.testing.assert_close(pixel_loss(scores, labels), torch.nn.functional.cross_entropy(scores, labels))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'nobody'.*gpt2_small.*unet"):
        build("nobody")


@pytest.mark.parametrize("name", [name for name in sorted({*MODELS, *PRESETS}) if needs(name)])
def test_without_transformers_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(module: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr("ebbtide.zoo.packages.find_spec", nothing)
    with pytest.raises(UsageError, match=rf"zoo:{name} .*pip install transformers"):
        build(name)


def test_importing_the_zoo_imports_no_transformers() -> None:
    code = "import sys, ebbtide, ebbtide.zoo.small; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_package_brings_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"another": "ebbtide.zoo.mlp_chain:mlp_chain"}
    for module in ("ebbtide.names", "ebbtide.zoo"):
        monkeypatch.setattr(f"{module}.brought", lambda group: entries if group == ZOO_GROUP else {})
    assert sizes_of("another") == sizes_of("mlp_chain")
    assert build("another", 8, layers=3).name.startswith("mlp_chain-3L")
    assert "another" in zoo_names()
    with pytest.raises(UsageError, match=r"'vgg16' is one of the papers' models.*checkout.*pip install \./published"):
        build("vgg16")
    with pytest.raises(UsageError, match=r"no model 'vgg17'; did you mean 'vgg1[69]'.*another"):
        sizes_of("vgg17")
