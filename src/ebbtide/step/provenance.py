"""Where a plan comes from: device, costs, effort, and whether anything was searched for. Typed; text in files.

It can be read like a mapping from facts to text as well, which is what a plan file holds: ``provenance["device"]``,
``"costs" in provenance``, ``dict(provenance)``. A fact that is not known is absent there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

__all__ = ["IN_THE_STEP", "NOT_KNOWN", "Costs", "LossPlace", "Planned", "Provenance"]

IN_THE_STEP = "nothing: its updates are in the step"
"""What an optimizer's step takes whose updates are ops of the model's."""
NOT_KNOWN = "not known"
"""What an optimizer's step takes that cannot be tried on fake tensors: kernels of its own, a closure that it wants."""


class Costs(enum.Enum):
    """Where seconds and workspaces of ops are from."""

    MEASURED = "measured"
    PARTLY = "measured, the smallest ops by roofline"
    ROOFLINE = "roofline"


class LossPlace(enum.Enum):
    """Where the loss of a step is computed."""

    OUTSIDE = "outside the model: what it takes is not counted"


class Planned(enum.Enum):
    """How a schedule was found."""

    SEARCHED = "searched for"
    QUICKLY = "found quickly, to begin with"
    CACHED = "from the plan cache"
    ADAPTED = "adapted from another shape's plan"


@dataclass(frozen=True, kw_only=True)
class Provenance(Mapping[str, str]):
    """Facts about a plan. What is empty or ``None`` is not known or does not apply.

    Attributes:
        device: type of the device on which the step was captured.
        torch: version and build.
        threads: of torch, when costs were measured.
        deterministic: whether deterministic algorithms were asked for.
        name: of the card, or the vector instructions of a CPU.
        tf32: whether products and convolutions may use TF32.
        cudnn: whether cuDNN times its algorithms, and whether it keeps to deterministic ones.
        mkldnn: whether the CPU build has oneDNN.
        products: in what a CPU may compute products of float32; empty where exactly in that.
        machine: name of the machine planned for.
        costs: where seconds are from.
        memory_bytes: what the machine planned for has, where it is of the catalogue.
        usable_bytes: what of that a step can take.
        usable: what is taken off, with sources.
        optimizer: class of the one whose state is counted.
        offloaded: what of that is away while a step runs.
        optimizer_step: what ``optimizer.step()`` takes while it runs besides, in words, and whether that is counted.
        estimate: what is not as on the real device.
        mapped: which ops stand for those of another device.
        workspace: which workspaces of libraries are counted.
        loss: where the loss is, if that is not inside the model.
        planned: how the schedule was found.
        notes: facts that only the planner understands, by their names.
        effort: local-search moves it was allowed.
        seed: of its random choices.
    """

    device: str = ""
    torch: str = ""
    threads: int | None = None
    deterministic: bool | None = None
    name: str = ""
    tf32: str = ""
    cudnn: str = ""
    mkldnn: bool | None = None
    products: str = ""
    machine: str = ""
    costs: Costs | None = None
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    usable: str = ""
    optimizer: str = ""
    offloaded: str = ""
    optimizer_step: str = ""
    estimate: str = ""
    mapped: str = ""
    workspace: str = ""
    loss: LossPlace | None = None
    planned: Planned = Planned.SEARCHED
    notes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    effort: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        assert not _PARSE.keys() & self.notes, f"notes {sorted(_PARSE.keys() & self.notes)} have fields of their own"

    # -- as text --------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, str]:
        """The known facts as text, notes among them; :meth:`from_dict` reads them back."""
        known: dict[str, str] = {}
        for name in _ORDER:
            value = getattr(self, name)
            if name == "notes":
                known.update(self.notes)
            elif isinstance(value, enum.Enum):
                if value is not Planned.SEARCHED:
                    known[name] = value.value
            elif value is not None and value != "":
                known[name] = str(value)
        return known

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Self:
        """The facts that :meth:`as_dict` told, and those of a program's context; unknown ones become notes.

        Raises:
            ValueError: if the text of a fact is not one of its kind.
        """
        known = {name: _PARSE[name](str(text)) for name, text in facts.items() if name in _PARSE}
        return cls(**known, notes={str(name): str(text) for name, text in facts.items() if name not in _PARSE})

    # -- as a mapping ---------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> str:
        return self.as_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither 'True' nor 'False'")
    return text == "True"


_ORDER = tuple(each.name for each in fields(Provenance))
_PARSE: dict[str, Any] = {
    **{name: str for name in _ORDER if name != "notes"},
    **dict.fromkeys(("threads", "memory_bytes", "usable_bytes", "effort", "seed"), int),
    **dict.fromkeys(("deterministic", "mkldnn"), _truth),
    "costs": Costs,
    "loss": LossPlace,
    "planned": Planned,
}
"""Per fact how its text is read."""
