"""The zoo: published sizes, a finite step with all gradients, and inputs that leave the global generator alone."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.zoo import (
    MODELS,
    build,
    dcgan,
    deepspeech2,
    densenet121,
    fcn8,
    gpt2_small,
    hf_gpt2,
    hf_t5,
    inception_v3,
    llama_8b,
    llama_70b,
    llama_70b_lora,
    lstm_lm,
    mobilenet,
    nmt,
    resnet50,
    resnet101,
    resnet152,
    resnet200,
    resnet1001,
    resnet2000,
    segnet,
    transformer_base,
    unet,
    vgg16,
    vgg19,
)
from ebbtide.zoo.inputs import image_batch, integers, pixel_loss
from ebbtide.zoo.small import SMALL

HF_MISSING = importlib.util.find_spec("transformers") is None
needs_transformers = pytest.mark.skipif(HF_MISSING, reason="needs transformers")


def named(names: list[str]) -> list[Any]:
    """Names as parameters; those of Hugging Face's models skip where transformers is missing."""
    return [pytest.param(name, marks=needs_transformers if name.startswith("hf_") else ()) for name in names]


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
        (vgg16, 138_357_544),
        (vgg19, 143_667_240),
        (densenet121, 7_978_856),
        (mobilenet, 4_231_976),  # Keras's trainable ones: torchvision has no MobileNet v1
    ],
)
def test_parameters_are_the_published_ones(model: Callable[..., Case], count: int) -> None:
    with FakeTensorMode():
        assert parameters(model(1, image=224)) == count


def test_sizes_that_torchvision_does_not_publish() -> None:
    with FakeTensorMode():
        # milesial/Pytorch-UNet, the same variant, with transposed convolutions and two classes.
        assert parameters(unet(1, image=(416, 608))) == 31_037_698
        assert parameters(segnet(1)) == pytest.approx(29.45e6, rel=0.001)  # Badrinarayanan et al. 2017, table 6
        # VGG-16 without its last layer, 21 scores from three depths, and three upsamplings.
        scores = 21 * (4096 + 512 + 256 + 3)
        upsamplings = 21 * 21 * (16 + 16 + 256)
        assert parameters(fcn8(1, image=224, hidden=4096)) == 138_357_544 - 4097 * 1000 + scores + upsamplings
        assert parameters(lstm_lm()) == 10_000 * 650 + 2 * (8 * 650 * 650 + 8 * 650) + 651 * 10_000


def test_those_of_the_systems_that_came_before() -> None:
    with FakeTensorMode():
        assert parameters(inception_v3(1)) == 27_161_264  # torchvision's, with the auxiliary classifier
        assert parameters(gpt2_small(1)) == 124_439_808  # as Hugging Face's
        # The example of PyTorch's repository, at its width: generator and discriminator.
        assert parameters(dcgan(1, width=64)) == 3_576_704 + 2_765_568
        # Vaswani et al. 2017, table 3 rounds to 65 million, of which the embedding is 37,000 * 512.
        assert parameters(transformer_base(1)) == pytest.approx(63.1e6, rel=0.01)
        # Nearly all is five GRUs of 800 a direction, on 1312 features and then on 800 (deepspeech.pytorch's size).
        gru = sum(2 * 3 * (inputs * 800 + 800 * 800 + 2 * 800) for inputs in (1312, 800, 800, 800, 800))
        assert parameters(deepspeech2(1)) == pytest.approx(gru, rel=0.02)


@pytest.mark.parametrize(("model", "layers"), [(resnet200, 200), (resnet1001, 1001), (resnet2000, 2000)])
def test_a_deep_residual_network_has_its_layers(model: Callable[..., Case], layers: int) -> None:
    with torch.device("meta"):
        case = model(1, width=1)
    weights = [m for m in case.model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    shortcuts = 4  # one a stage, which nobody counts
    assert len(weights) == layers + shortcuts


def test_one_call_of_both_players_has_the_gradients_of_either() -> None:
    both = dcgan(2, noise_size=8, width=4)
    both.model(*both.args).backward()
    for player in ("discriminator", "generator"):
        alone = dcgan(2, noise_size=8, width=4, player=player)
        alone.model.load_state_dict(dcgan_state := copy.deepcopy(both.model.state_dict()))
        assert dcgan_state.keys() == alone.model.state_dict().keys()
        alone.model(*alone.args, **alone.kwargs).backward()
        for key, parameter in alone.model.named_parameters():
            if not key.startswith(player):
                assert parameter.grad is None
                continue
            torch.testing.assert_close(parameter.grad, both.model.get_parameter(key).grad)


@pytest.mark.parametrize("image", [106, (299, 64)])
def test_inception_needs_a_grid_for_its_auxiliary_classifier(image: int | tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"107 pixels"):
        inception_v3(1, image=image)


@pytest.mark.parametrize(("image", "kernel"), [(107, (1, 1)), ((224, 298), (3, 4)), (299, (5, 5)), (331, (5, 5))])
def test_inception_reduces_its_auxiliary_kernel_on_small_images(
    image: int | tuple[int, int], kernel: tuple[int, int]
) -> None:
    with FakeTensorMode():
        case = inception_v3(2, image=image, width=8)
        assert case.model.auxiliary[2][0].kernel_size == kernel  # type: ignore[index, union-attr]
        assert case.model(*case.args).shape == ()


@pytest.mark.parametrize(("image", "layers"), [(64, 5), (256, 7)])
def test_a_larger_dcgan_has_a_layer_per_doubling(image: int, layers: int) -> None:
    with FakeTensorMode():
        case = dcgan(2, noise_size=8, width=4, image=image)
        convolutions = [m for m in case.model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.ConvTranspose2d)]
        assert len(convolutions) == 2 * layers
        assert case.model.generator(case.args[1]).shape == case.args[0].shape == (2, 3, image, image)  # type: ignore[operator]
        assert case.model(*case.args).shape == ()


@pytest.mark.parametrize("image", [32, 96])
def test_a_dcgan_halves_its_images_down_to_four_pixels(image: int) -> None:
    with pytest.raises(UsageError, match=r"power of two, 64 pixels"):
        dcgan(1, image=image)


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
            assert (name, key) == ("fcn8", "up8.weight") or (name == "llama_70b_lora" and "adapter" not in key)
            continue
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", named(sorted(MODELS)))
def test_the_integer_is_the_batch(name: str) -> None:
    with FakeTensorMode():
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
        case = mobilenet(2, image=32)
    assert {tensor.device.type for tensor in [*case.args, *case.model.parameters()]} == {"meta"}


@pytest.mark.parametrize("image", [0, 33, (64, 48), (-32, 32)])
def test_an_image_that_does_not_fit_is_refused(image: int | tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"image=.* multiples of 32"):
        segnet(1, image=image)


def test_the_loss_of_pixels_is_torchs_own() -> None:
    scores, labels = torch.randn(2, 5, 4, 6), torch.randint(5, (2, 4, 6))
    torch.testing.assert_close(pixel_loss(scores, labels), torch.nn.functional.cross_entropy(scores, labels))


def test_frozen_upsampling_of_fcn_is_bilinear() -> None:
    model = fcn8(1, image=32, width=2, hidden=2, classes=3).model
    weight = model.get_parameter("up8.weight")
    plane = torch.full((1, 3, 4, 4), 2.0)
    raised = torch.nn.functional.conv_transpose2d(plane, weight, stride=8, padding=4)
    assert raised.shape == (1, 3, 32, 32)
    torch.testing.assert_close(raised[..., 4:-4, 4:-4], torch.full((1, 3, 24, 24), 2.0))


def test_decoder_reads_no_token_before_its_turn() -> None:
    case = nmt(1, vocabulary=50, length=4, width=8, dropout=0.0)
    source, target = case.args
    later = target.clone()
    later[:, -2] = (later[:, -2] + 1) % 50

    def scores(tokens: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        with case.model.get_submodule("head").register_forward_hook(lambda _, __, out: seen.append(out)):
            case.model(source, tokens)
        return seen[0]

    before, after = scores(target), scores(later)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'nobody'.*densenet121.*vgg19"):
        build("nobody")


@pytest.mark.parametrize("name", [name for name in sorted(MODELS) if name.startswith("hf_")])
def test_without_transformers_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(module: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr("ebbtide.zoo.hf.find_spec", nothing)
    with pytest.raises(UsageError, match=rf"zoo:{name} .*pip install transformers"):
        build(name)


def test_importing_the_zoo_imports_no_transformers() -> None:
    code = "import sys, ebbtide, ebbtide.zoo.small; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
