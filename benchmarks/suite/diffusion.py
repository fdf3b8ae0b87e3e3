"""The UNets of diffusers on random weights, with a mean-squares loss inside, each judged by :mod:`suite.judge`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from harness.record import Row
from suite import vision
from suite.judge import judged
from suite.subject import NotSupported, Subject, WithLoss
from suite.summary import summary_of

TITLE = "UNets of diffusers: captured, bits, budget, peers"
_CHANNELS = (32, 64)
_GROUPS = {"block_out_channels": _CHANNELS, "norm_num_groups": 8}
_CROSS = {
    **_GROUPS, "sample_size": 16, "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 8,
}  # fmt: skip
MODELS: Mapping[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet1DModel": ({"block_out_channels": (32, 64, 64), "in_channels": 14, "out_channels": 14, "sample_size": 256,
                     "extra_in_channels": 0,
                     "down_block_types": ("DownBlock1D", "DownBlock1D", "AttnDownBlock1D"),
                     "up_block_types": ("AttnUpBlock1D", "UpBlock1D", "UpBlock1D")}, (8, 14, 256)),
    "UNet2DModel": ({**_GROUPS, "sample_size": 32, "layers_per_block": 2, "attention_head_dim": 8,
                     "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                     "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}, (8, 3, 32, 32)),
    "UNet2DConditionModel": ({**_CROSS, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, (16, 4, 16, 16)),
    "UNet3DConditionModel": ({**_CROSS, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                              "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}, (2, 4, 4, 16, 16)),
    "UNetSpatioTemporalConditionModel": ({
        "block_out_channels": _CHANNELS, "sample_size": 16, "layers_per_block": 1, "cross_attention_dim": 32,
        "num_attention_heads": (4, 4), "addition_time_embed_dim": 16, "projection_class_embeddings_input_dim": 48,
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")}, (2, 4, 8, 16, 16)),
    "UNetMotionModel": ({**_GROUPS, "sample_size": 16, "layers_per_block": 1, "cross_attention_dim": 32,
                         "num_attention_heads": 4, "motion_num_attention_heads": 4, "motion_max_seq_length": 8,
                         "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
                         "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")}, (2, 4, 4, 16, 16)),
    "Kandinsky3UNet": ({"block_out_channels": (32, 64, 128, 256), "layers_per_block": 3, "cross_attention_dim": 32,
                        "encoder_hid_dim": 32, "attention_head_dim": 16, "time_embedding_dim": 64, "groups": 8},
                       (8, 4, 16, 16)),
}  # fmt: skip
CASES = tuple(MODELS)
QUICK = ("UNet2DModel",)


def lacking() -> str:
    """What has to be installed for these models; empty if nothing."""
    return "" if find_spec("diffusers") else "diffusers is not installed: make suite-vision"


def build(name: str) -> Subject:
    """The class ``name`` with random weights, and a batch to take noise from."""
    if not vision.lacking("torchvision"):
        vision.import_torchvision()  # which diffusers imports where it is installed
    diffusers: Any = import_module("diffusers")

    settings, shape = MODELS[name]
    model = getattr(diffusers, name)(**settings).train()
    return Subject(WithLoss(model), _inputs(name, shape), checkpoint)


def _inputs(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    batch = shape[0]
    given = {"sample": torch.randn(shape), "timestep": torch.randint(0, 1000, (batch,)), "target": torch.randn(shape)}
    if "cross_attention_dim" in MODELS[name][0]:
        given["encoder_hidden_states"] = torch.randn(batch, 8, 32)
    if name == "UNetMotionModel":  # a text per frame
        given["encoder_hidden_states"] = torch.randn(batch * shape[2], 8, 32)
    if name == "UNetSpatioTemporalConditionModel":  # noise and the frame that the video begins with
        given["target"] = torch.randn(batch, shape[1], 4, *shape[3:])
        given["added_time_ids"] = torch.randn(batch, 3)
    if name == "Kandinsky3UNet":
        given["encoder_attention_mask"] = torch.ones(batch, 8)
    return given


def checkpoint(model: nn.Module) -> None:
    """The library's own switch."""
    assert isinstance(model, WithLoss)
    inner: Any = model.model
    if not getattr(inner, "_supports_gradient_checkpointing", False):
        raise NotSupported("the class has no gradient checkpointing")
    inner.enable_gradient_checkpointing()


def rows(case: str, quick: bool) -> Iterator[Row]:
    yield from judged("diffusion", case, partial(build, case), quick=quick)


def summary(rows: Sequence[Row]) -> Iterator[Row]:
    yield from summary_of("diffusion", CASES, rows)
