"""Classifiers of torchvision on random weights, images of 64 pixels a side, each judged by :mod:`suite.judge`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from harness.record import Row
from suite.judge import judged
from suite.subject import Subject, WithLoss
from suite.summary import summary_of
from suite.vision import CLASSES, batch, import_torchvision
from suite.vision import lacking as lacking_in

TITLE = "Classifiers of torchvision: captured, bits, budget, peers"
MODELS: dict[str, tuple[int, int]] = {
    "alexnet": (128, 96),
    "densenet121": (8, 64),
    "efficientnet_b0": (16, 64),
    "googlenet": (16, 64),
    "mnasnet1_0": (16, 64),
    "mobilenet_v2": (16, 64),
    "mobilenet_v3_large": (32, 64),
    "regnet_y_400mf": (16, 64),
    "resnet18": (32, 64),
    "resnet50": (16, 64),
    "resnet152": (16, 64),
    "resnext50_32x4d": (16, 64),
    "shufflenet_v2_x1_0": (32, 64),
    "squeezenet1_1": (64, 64),
    "swin_t": (16, 64),
    "vgg16": (16, 64),
    "vit_b_16": (32, 64),
    "convnext_tiny": (16, 64),
}
"""Images a step and their side in pixels."""
CASES = tuple(MODELS)
QUICK = ("resnet18",)


def lacking() -> str:
    """What has to be installed for these models; empty if nothing."""
    return lacking_in("torchvision")


def build(name: str) -> Subject:
    """The classifier ``name`` with random weights, and a batch."""
    models = import_torchvision().models
    settings: dict[str, Any] = {"googlenet": {"init_weights": True}, "vit_b_16": {"image_size": 64}}.get(name, {})
    model = models.get_model(name, weights=None, num_classes=CLASSES, **settings).train()
    return Subject(WithLoss(model), batch(*MODELS[name]))


def rows(case: str, quick: bool) -> Iterator[Row]:
    yield from judged("torchvision", case, partial(build, case), quick=quick)


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    yield from summary_of("torchvision", CASES, rows)
