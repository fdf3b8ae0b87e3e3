"""Models of timm on random weights, each judged by :mod:`suite.judge`; the list of PyTorch's own benchmarks, and more.

Those that take any size have images of 64 or 96 pixels a side; for the others it is set when they are built, or left at
what they are made for. All else, dropped paths among it, is as timm has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from harness.record import Row
from suite.judge import judged
from suite.subject import NotSupported, Subject, WithLoss
from suite.summary import summary_of
from suite.vision import CLASSES, batch, import_torchvision
from suite.vision import lacking as lacking_in

TITLE = "Models of timm: captured, bits, budget, peers"
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "beit_base_patch16_224": (64, 64, {"img_size": 64, "depth": 2}),
    "cait_xxs24_224": (32, 64, {"img_size": 64, "depth": 6}),
    "coat_tiny": (4, 64, {"img_size": 64}),
    "convit_tiny": (32, 64, {"img_size": 64}),
    "convmixer_768_32": (8, 64, {}),
    "convnextv2_nano": (8, 64, {}),
    "crossvit_9_240": (4, 240, {}),
    "cspdarknet53": (16, 64, {}),
    "deit_base_distilled_patch16_224": (64, 64, {"img_size": 64, "depth": 2}),
    "deit_tiny_patch16_224": (32, 64, {"img_size": 64}),
    "densenet121": (8, 64, {}),
    "dla102": (16, 64, {}),
    "dm_nfnet_f0": (8, 64, {}),
    "dpn107": (8, 64, {}),
    "eca_botnext26ts_256": (2, 128, {"img_size": 128}),
    "ese_vovnet19b_dw": (16, 64, {}),
    "fbnetc_100": (16, 64, {}),
    "gernet_l": (32, 64, {}),
    "ghostnet_100": (16, 64, {}),
    "gluon_inception_v3": (16, 96, {}),
    "gmixer_24_224": (8, 64, {"img_size": 64}),
    "gmlp_s16_224": (16, 64, {"img_size": 64}),
    "hrnet_w18": (8, 64, {}),
    "inception_v3": (16, 96, {}),
    "nest_tiny": (2, 224, {}),
    "lcnet_050": (32, 64, {}),
    "levit_128": (8, 224, {}),
    "mixer_s32_224": (16, 128, {"img_size": 128}),
    "mixnet_l": (8, 64, {}),
    "mnasnet_100": (16, 64, {}),
    "mobilenetv2_100": (16, 64, {}),
    "mobilenetv3_large_100": (16, 64, {}),
    "mobilevit_s": (8, 64, {}),
    "nfnet_l0": (16, 64, {}),
    "pit_b_224": (4, 224, {"depth": (1, 1, 1)}),
    "pnasnet5large": (4, 64, {}),
    "poolformer_m36": (8, 64, {}),
    "regnety_002": (16, 64, {}),
    "repvgg_a2": (32, 64, {}),
    "res2net50_14w_8s": (16, 64, {}),
    "resmlp_12_224": (64, 64, {"img_size": 64}),
    "resnest50d": (16, 64, {}),
    "resnet18": (32, 64, {}),
    "rexnet_100": (16, 64, {}),
    "sebotnet33ts_256": (2, 128, {"img_size": 128}),
    "selecsls42b": (32, 64, {}),
    "spnasnet_100": (16, 64, {}),
    "swin_base_patch4_window7_224": (2, 224, {"depths": (1, 1, 1, 1)}),
    "tf_efficientnet_b0": (8, 64, {}),
    "tf_mixnet_l": (4, 64, {}),
    "tinynet_a": (8, 64, {}),
    "tnt_s_patch16_224": (4, 224, {"depth": 2}),
    "twins_pcpvt_base": (8, 64, {"img_size": 64}),
    "visformer_small": (2, 224, {}),
    "vit_base_patch16_224": (64, 64, {"img_size": 64, "depth": 2}),
    "volo_d1_224": (4, 128, {"img_size": 128}),
    "xcit_nano_12_p16_224": (16, 64, {"img_size": 64}),
}
"""Images a step, their side in pixels, and what is reduced."""
CASES = tuple(MODELS)
QUICK = ("deit_tiny_patch16_224",)


def lacking() -> str:
    """What has to be installed for these models; empty if nothing."""
    return lacking_in("timm")


def build(name: str) -> Subject:
    """The model ``name`` with random weights, and a batch."""
    import_torchvision()  # which timm imports
    timm: Any = import_module("timm")

    images, side, reduced = MODELS[name]
    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **reduced).train()
    return Subject(WithLoss(model), batch(images, side), checkpoint)


def checkpoint(model: nn.Module) -> None:
    """The library's own switch, which calls the variant of checkpoints that enters autograd again by default."""
    assert isinstance(model, WithLoss)
    inner: Any = model.model
    try:
        inner.set_grad_checkpointing(True)
    except (AssertionError, AttributeError) as error:
        raise NotSupported(str(error) or "the model has no checkpointing") from error


def rows(case: str, quick: bool) -> Iterator[Row]:
    yield from judged("timm", case, partial(build, case), quick=quick)


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    yield from summary_of("timm", CASES, rows)
