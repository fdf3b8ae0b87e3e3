"""Code of well-known libraries that is no graph, and what to ask of them instead: better than to change their code.

An entry is told by the file of a frame where the capture broke, and by words of that frame where one file has several.
What was tried is named with its release; a remedy is followed in the tests, for what is not installed with the code
of the library that breaks, in a file of its name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["known_library"]


@dataclass(frozen=True)
class _Library:
    """What a frame of the library looks like (``file``, then ``line`` of its code), our words, and what was tried."""

    file: str
    reason: str
    remedy: str
    tried: str
    line: str = ""


_LIBRARIES = (
    _Library(
        r"torch_geometric/utils/(loop|_remove_self_loops)\.py",
        "A layer of PyG's looks for self-loops in the edges, of which there are as many as the data say.",
        "Make the layer with add_self_loops=False; where it needs them, add them once before training: "
        "torch_geometric.utils.add_remaining_self_loops(edge_index)",
        tried="torch_geometric 2.8.1",
    ),
    _Library(
        r"torch_geometric/",
        "PyG counts nodes or graphs in the data, and selects as many.",
        "Give it the counts as Python ints (size= of a pooling, num_nodes=, dim_size=); layers that select nodes "
        "(TopKPooling and its like) are to stay outside of the fitted module",
        tried="torch_geometric 2.8.1",
    ),
    _Library(
        r"transformers/models/\w*(moe|mixtral|experts)\w*/|transformers/integrations/moe\.py",
        "The experts run in a loop over those that the data chose.",
        'Have them run together: model.set_experts_implementation("grouped_mm"), or experts_implementation= in the '
        "configuration",
        tried="transformers 5.23",
        line=r"expert",
    ),
    _Library(
        r"transformers/models/.*",
        "SpecAugment masks the input at places that NumPy draws in the forward.",
        "Set model.config.apply_spec_augment = False; to mask, do it to the features before the call",
        tried="transformers 5.23",
        line=r"_compute_mask_indices|_mask_hidden_states|_mask_input_features",
    ),
    _Library(
        r"torchaudio/(functional|transforms)/",
        "SpecAugment masks the input at places that it draws in the forward.",
        "Mask the features before the call",
        tried="torchaudio's sources",
        line=r"mask_along_axis",
    ),
    _Library(
        r"transformers/.*",
        "Its CTC loss switches cuDNN off while it runs.",
        "Call the model without labels, and take torch.nn.functional.ctc_loss of the logits that it returns",
        tried="transformers 5.23",
        line=r"cudnn\.flags",
    ),
    _Library(
        r"(torchvision/models/detection|detectron2|mmdet)/",
        "A detector picks as many boxes as the data say.",
        "Fit the part of fixed sizes, which takes most of the memory: ebbtide.fit(model.backbone, budget)",
        tried="torchvision 0.28",
    ),
    _Library(
        r"torchdiffeq/",
        "A solver of torchdiffeq's chooses its steps by the data, or its adjoint looks at the times.",
        "Call torchdiffeq.odeint, not odeint_adjoint, with steps that are fixed and no step_size: "
        'odeint(f, y, t, method="rk4"), whose steps are those of t. A plan recomputes, as the adjoint would',
        tried="torchdiffeq 0.2.5",
    ),
)
_FRAME = re.compile(r'File "([^"]+)", line \d+(.*(?:\n.*)?)')


def known_library(frames: str) -> tuple[str, str] | None:
    """Reason and remedy for a break in one of them, the innermost first; ``None`` if it is in none.

    Args:
        frames: as Python or the compiler prints them, the innermost last.
    """
    for frame in reversed(list(_FRAME.finditer(frames))):
        path = frame[1].replace("\\", "/")
        for each in _LIBRARIES:
            if re.search(rf"/{each.file}", path) and re.search(each.line, frame[2]):
                return each.reason, each.remedy
    return None
