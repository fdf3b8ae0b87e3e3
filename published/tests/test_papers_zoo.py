"""The papers' models: published sizes, a finite step with all gradients, and parameters that the seed decides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.zoo import (
    build,
)
from ebbtide_published.zoo.dcgan import dcgan
from ebbtide_published.zoo.deepspeech import deepspeech2
from ebbtide_published.zoo.densenet import densenet121
from ebbtide_published.zoo.fcn import fcn8
from ebbtide_published.zoo.inception import inception_v3
from ebbtide_published.zoo.lstm_lm import lstm_lm
from ebbtide_published.zoo.mobilenet import mobilenet
from ebbtide_published.zoo.nmt import nmt
from ebbtide_published.zoo.resnet import resnet1001, resnet2000
from ebbtide_published.zoo.segnet import segnet
from ebbtide_published.zoo.small import PAPERS
from ebbtide_published.zoo.transformer import transformer_base
from ebbtide_published.zoo.vgg import vgg16, vgg19


def parameters(case: Case) -> int:
    return sum(parameter.numel() for parameter in case.model.parameters())


def loss_of(case: Case) -> torch.Tensor:
    output = case.model(*case.args, **case.kwargs)
    return output if isinstance(output, torch.Tensor) else output.loss


@pytest.mark.parametrize(
    ("model", "count"),
    [  # torchvision's, all for 1000 classes at 224 x 224
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
        assert parameters(segnet(1)) == pytest.approx(29.45e6, rel=0.001)  # Badrinarayanan et al. 2017, table 6
        # VGG-16 without its last layer, 21 scores from three depths, and three upsamplings.
        scores = 21 * (4096 + 512 + 256 + 3)
        upsamplings = 21 * 21 * (16 + 16 + 256)
        assert parameters(fcn8(1, image=224, hidden=4096)) == 138_357_544 - 4097 * 1000 + scores + upsamplings
        assert parameters(lstm_lm()) == 10_000 * 650 + 2 * (8 * 650 * 650 + 8 * 650) + 651 * 10_000


def test_those_of_the_systems_that_came_before() -> None:
    with FakeTensorMode():
        assert parameters(inception_v3(1)) == 27_161_264  # torchvision's, with the auxiliary classifier
        # The example of PyTorch's repository, at its width: generator and discriminator.
        assert parameters(dcgan(1, width=64)) == 3_576_704 + 2_765_568
        # Vaswani et al. 2017, table 3 rounds to 65 million, of which the embedding is 37,000 * 512.
        assert parameters(transformer_base(1)) == pytest.approx(63.1e6, rel=0.01)
        # Nearly all is five GRUs of 800 a direction, on 1312 features and then on 800 (deepspeech.pytorch's size).
        gru = sum(2 * 3 * (inputs * 800 + 800 * 800 + 2 * 800) for inputs in (1312, 800, 800, 800, 800))
        assert parameters(deepspeech2(1)) == pytest.approx(gru, rel=0.02)


@pytest.mark.parametrize(("model", "layers"), [(resnet1001, 1001), (resnet2000, 2000)])
def test_a_deep_residual_network_has_its_layers(model: Callable[..., Case], layers: int) -> None:
    with torch.device("meta"):
        case = model(1, width=1)
    weights = [m for m in case.model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    shortcuts = 4  # one a stage, which nobody counts
    assert len(weights) == layers + shortcuts


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_step_is_finite_and_reaches_every_parameter(name: str) -> None:
    case = PAPERS[name]()
    assert all(module.training for module in case.model.modules())
    loss = loss_of(case)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    for key, parameter in case.model.named_parameters():
        if not parameter.requires_grad:
            assert (name, key) == ("fcn8", "up8.weight")
            continue
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_integer_is_the_batch(name: str) -> None:
    with FakeTensorMode():
        case = build(name, 3)
        tensors = [*case.args, *case.kwargs.values()]
        assert case.model.training
        assert all(3 in tensor.shape[:2] for tensor in tensors)  # or the length, where a preset has one sequence
        assert case.name.startswith(name)


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_seed_decides_the_parameters_and_nothing_the_inputs(name: str) -> None:
    torch.manual_seed(1)
    first = PAPERS[name]()
    torch.manual_seed(1)
    again = PAPERS[name]()
    other = PAPERS[name]()
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    values = [[*case.args, *case.kwargs.values()] for case in (first, other)]
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


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


@pytest.mark.parametrize("image", [0, 33, (64, 48), (-32, 32)])
def test_an_image_that_does_not_fit_is_refused(image: int | tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"image=.* multiples of 32"):
        segnet(1, image=image)
