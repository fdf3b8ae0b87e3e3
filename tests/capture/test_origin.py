"""Module paths are those of ``named_modules``, however Dynamo came to a module."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ebbtide.capture.origin import module_of

PATHS = {
    "L['self'].layers.0.up": "layers.0.up",
    "L['module']._modules['layers']._modules['0'].up": "layers.0.up",
    "L['module'].__dict__['_modules']['base_model'].__dict__['_modules']['model'].lm_head": "base_model.model.lm_head",
    "L['self']": "",
}


@pytest.mark.parametrize("written", PATHS)
def test_module_paths(written: str) -> None:
    node = fx.Graph().call_function(torch.relu)
    node.meta["nn_module_stack"] = {"a": ("L['self']", torch.nn.Module), "b": (written, torch.nn.Linear)}
    assert module_of(node) == PATHS[written]
