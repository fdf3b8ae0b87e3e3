"""Where bytes and seconds of the unplanned step go, by kind and by type of layer: what Echo's motivation is made of.

Definitions (Zheng et al., Echo, ISCA 2020, profile a step so):
1. *Feature maps* are what the forward makes, the loss among it. *Gradients of weights* are what the backward leaves.
   *Intermediates of the backward* are all else that it makes: gradients of feature maps and what leads to them.
   *Gradients of the forward's outputs* are what it begins with: no op makes them.
2. A *layer* is a module whose forward issued ops itself; those of its backward are the same layer's. Its *type* is its
   class. Ops of the outermost module belong to its class, those of no module to none.
3. All bytes are those at the unplanned peak. What is resident, what no op makes, workspace and user code belong to no
   layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.step.occupancy import Moment
from ebbtide.step.program import Program

__all__ = [
    "BACKWARD",
    "FEATURE_MAPS",
    "GRADIENTS",
    "TANGENTS",
    "WORKSPACE",
    "Kind",
    "LayerType",
    "kinds_at",
    "layer_types_at",
]

FEATURE_MAPS = "feature maps"
GRADIENTS = "gradients of weights"
TANGENTS = "gradients of the forward's outputs"
BACKWARD = "intermediates of the backward"
WORKSPACE = "workspace of the op that runs"
_BETWEEN = "user code between forward and backward"
_STATES = "states of random generators"
_ANY = "resident"


@dataclass(frozen=True, slots=True)
class Kind:
    """Bytes of one kind at the unplanned peak.

    Attributes:
        name: of the kind, in words.
        bytes: of it.
        resident: whether it is there before the step.
    """

    name: str
    bytes: int
    resident: bool


@dataclass(frozen=True, slots=True)
class LayerType:
    """All layers of one type (definition 2).

    Attributes:
        name: of the class; empty for ops of no module.
        layers: how many there are.
        bytes: of their buffers at the unplanned peak.
        forward_seconds: of their ops before the boundary.
        backward_seconds: of their ops after it.
    """

    name: str
    layers: int
    bytes: int
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of all their ops."""
        return self.forward_seconds + self.backward_seconds


def kinds_at(program: Program, peak: Moment, resident: Mapping[str, int], resident_bytes: int) -> tuple[Kind, ...]:
    """The unplanned peak by kind, what is resident first; kinds without a byte are left out.

    Args:
        program: of the step.
        peak: the moment of the unplanned peak.
        resident: bytes that are resident by kind, empty if that is not known.
        resident_bytes: all of them.
    """
    above = dict.fromkeys((FEATURE_MAPS, GRADIENTS, TANGENTS, BACKWARD), 0)
    gradients = set(program.gradients)
    for b in peak.buffers:
        producer = program.buffers[b].producer
        if producer is None:
            kind = TANGENTS
        elif producer < program.boundary:
            kind = FEATURE_MAPS
        else:
            kind = GRADIENTS if b in gradients else BACKWARD
        above[kind] += program.buffers[b].bytes
    above |= {WORKSPACE: peak.workspace_bytes, _BETWEEN: peak.user_bytes, _STATES: peak.state_bytes}
    there = dict(resident) or {_ANY: resident_bytes}
    kinds = [Kind(name, size, True) for name, size in there.items()]
    kinds += [Kind(name, size, False) for name, size in above.items()]
    return tuple(kind for kind in kinds if kind.bytes)


def layer_types_at(program: Program, peak: Moment, types: Mapping[str, str]) -> tuple[LayerType, ...]:
    """Types of layers, those with the most bytes at the unplanned peak first, then by seconds.

    Args:
        program: of the step.
        peak: the moment of the unplanned peak.
        types: the class of each module by its path; empty if that is not known, and then nothing is.
    """
    if not types:
        return ()
    layers: dict[str, set[str]] = {}
    size: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    live = set(peak.buffers)
    for index, op in enumerate(program.ops):
        name = types.get(op.module, "")
        layers.setdefault(name, set()).add(op.module)
        seconds.setdefault(name, [0.0, 0.0])[index >= program.boundary] += op.seconds
        size[name] = size.get(name, 0) + sum(program.buffers[b].bytes for b in op.outputs if b in live)
    found = [LayerType(name, len(layers[name]), size[name], *seconds[name]) for name in layers]
    return tuple(sorted(found, key=lambda each: (-each.bytes, -each.seconds, each.name)))
