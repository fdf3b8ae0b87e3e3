"""A machine: what a device holds, how fast it computes, and its links to slower tiers.

Machines come from the catalogue (``machines.toml``, every number with its source) or are measured on the
device at hand. A plan made for a catalogue machine is an estimate and says so.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ebbtide.errors import UsageError
from ebbtide.files import cache_directory, keep, read_record
from ebbtide.names import did_you_mean

__all__ = ["Link", "Machine", "catalogue", "is_elsewhere", "keep_machine", "machine_named", "measured_on"]

_LEAST_RATE = 1e-3  # per second; with MOST_SECONDS (``program``) in mind, what a file says stays finite when added up
_MOST_DELAY = 1e9
_MEASURED_SCHEMA = "ebbtide-machine/1"


@dataclass(frozen=True, slots=True)
class Link:
    """A device's link to one slower tier.

    Attributes:
        tier: ``"host"`` or ``"disk"``.
        capacity_bytes: what the tier holds.
        out_bytes_per_second: device to tier.
        in_bytes_per_second: tier to device.
        latency_seconds: what every transfer costs besides its bytes.
        duplex: whether both ways run at once, each at its own rate; else one transfer waits for the other, whichever
            way it goes, as on a disk.
        compute_share: what computing loses while a transfer is under way, as a share of the transfer's seconds.
        alignment_bytes: a copy takes a multiple of this in the tier.
        least_bytes: of a buffer that is worth moving.
    """

    tier: str
    capacity_bytes: int
    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0
    duplex: bool = True
    compute_share: float = 0.0
    alignment_bytes: int = 1
    least_bytes: int = 0

    def round_up(self, count: int) -> int:
        """``count`` bytes as they lie in the tier."""
        return -(-count // self.alignment_bytes) * self.alignment_bytes

    def seconds(self, count: int, direction: Literal["out", "in"]) -> float:
        """What moving ``count`` bytes takes on a free lane."""
        rate = self.out_bytes_per_second if direction == "out" else self.in_bytes_per_second
        return self.latency_seconds + count / rate

    def slowed(self, share: float) -> Link:
        """This link at ``share`` of its rates."""
        out, back = self.out_bytes_per_second, self.in_bytes_per_second
        return replace(self, out_bytes_per_second=share * out, in_bytes_per_second=share * back)

    def lane(self, direction: Literal["out", "in"]) -> str:
        """The lane on which transfers of that way run, by name."""
        return f"{self.tier} {direction}" if self.duplex else self.tier


@dataclass(frozen=True)
class Machine:
    """One device.

    Attributes:
        name: catalogue name, or ``"cpu"`` for the machine at hand.
        device: the torch device type, ``"cpu"`` or ``"cuda"``.
        memory_bytes: what the device has; 0 for the machine at hand, which is asked.
        flops: peak arithmetic per second by dtype name (``"float32"``, ``"bfloat16"``, ...).
        bytes_per_second: device memory bandwidth.
        launch_seconds: the least that any op takes.
        granularity_bytes: the allocator rounds every block up to a multiple of this.
        links: to slower tiers, by tier.
        sources: where each number is from.
        capability: the compute capability of a CUDA device, ``"8.0"``; ``""`` for one of a custom machine that is not
            told, which then counts as 8.0.
        context_bytes: what the device's context takes of its memory in every process.
        fragmentation: share of the rest that the allocator holds in pieces too small for what is asked.
    """

    name: str
    device: str
    memory_bytes: int
    flops: dict[str, float]
    bytes_per_second: float
    launch_seconds: float
    granularity_bytes: int
    links: dict[str, Link] = field(default_factory=dict[str, Link])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    capability: str = ""
    context_bytes: int = 0
    fragmentation: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """What a step can take of the memory: without the context, and without what fragmentation loses."""
        return max(int((self.memory_bytes - self.context_bytes) * (1.0 - self.fragmentation)), 0)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number of ``capability``."""
        major, _, minor = (self.capability or "8.0").partition(".")
        return int(major), int(minor or 0)

    def round_up(self, count: int) -> int:
        """``count`` bytes as this device's allocator takes them."""
        return -(-count // self.granularity_bytes) * self.granularity_bytes

    def flops_for(self, dtype: str) -> float:
        """Peak arithmetic per second for ``dtype``; float32's where the catalogue has none."""
        return self.flops.get(dtype, self.flops["float32"])

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` reads it back."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Machine:
        """The machine that :meth:`to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: if ``data`` is no machine.
        """
        return Machine(
            name=str(data["name"]),
            device=str(data["device"]),
            memory_bytes=_whole(data["memory_bytes"]),
            flops={str(dtype): _rate(rate) for dtype, rate in data["flops"].items()},
            bytes_per_second=_rate(data["bytes_per_second"]),
            launch_seconds=_delay(data["launch_seconds"]),
            granularity_bytes=max(_whole(data["granularity_bytes"]), 1),
            links={str(tier): _link(tier, link) for tier, link in data["links"].items()},
            sources={str(key): str(text) for key, text in data["sources"].items()},
            capability=str(data["capability"]),
            context_bytes=_whole(data.get("context_bytes", 0)),  # earlier files know nothing of it
            fragmentation=_share(data.get("fragmentation", 0.0)),
        )


def _link(tier: str, data: Mapping[str, Any]) -> Link:
    return Link(
        tier=tier,
        capacity_bytes=_whole(data["capacity_bytes"]),
        out_bytes_per_second=_rate(data["out_bytes_per_second"]),
        in_bytes_per_second=_rate(data["in_bytes_per_second"]),
        latency_seconds=_delay(data["latency_seconds"]),
        duplex=bool(data.get("duplex", True)),  # from here on, earlier files know nothing of it
        compute_share=_share(data.get("compute_share", 0.0)),
        alignment_bytes=max(_whole(data.get("alignment_bytes", 1)), 1),
        least_bytes=_whole(data.get("least_bytes", 0)),
    )


def _whole(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number of bytes")
    return value


def _rate(value: object) -> float:
    if not isinstance(value, int | float) or not _LEAST_RATE <= value < math.inf:
        raise ValueError(f"{value!r} is not a rate per second")
    return value


def _share(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(f"{value!r} is not a share")
    return value


def _delay(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= _MOST_DELAY:
        raise ValueError(f"{value!r} is not a delay in seconds")
    return value


def _machine(name: str, row: dict[str, Any]) -> Machine:
    links = {link["tier"]: Link(**link) for link in row.get("links", [])}
    fields = {key: value for key, value in row.items() if key != "links"}
    return Machine(name=name, links=links, **fields)


@cache
def catalogue() -> dict[str, Machine]:
    """All machines of the catalogue by name."""
    text = resources.files("ebbtide.step").joinpath("machines.toml").read_text(encoding="utf-8")
    return {name: _machine(name, row) for name, row in tomllib.loads(text)["machine"].items()}


def is_elsewhere(machine: Machine | None) -> bool:
    """Whether a plan is for a machine of the catalogue: its costs are estimated, and a model needs shapes only."""
    return machine is not None and machine.name != "cpu"


def machine_named(name: str) -> Machine:
    """The catalogue's machine ``name``; ``cpu`` is as it was measured here, if it was (``ebbtide calibrate``).

    Raises:
        UsageError: if there is none, listing those there are.
    """
    machines = catalogue()
    if name not in machines:
        near = did_you_mean(name.lower(), machines)
        raise UsageError(
            f"machine {name!r} is not in the catalogue{near or ';'} it has: {', '.join(machines)}",
            argument="machine",
            value=name,
            accepted=tuple(machines),
        )
    return (_measured() or machines[name]) if name == "cpu" else machines[name]


def keep_machine(machine: Machine) -> Path | None:
    """Keep what was measured of the machine at hand; the file, or ``None`` if it cannot be written."""
    path = _measured_path()
    data = {"schema": _MEASURED_SCHEMA, "machine": machine.to_json()}
    return path if keep(path, path.with_name(".lock"), lambda: data) else None


def measured_on() -> date | None:
    """The day on which the machine at hand was measured; ``None`` if it was not."""
    if _measured() is None:
        return None
    try:
        return date.fromtimestamp(_measured_path().stat().st_mtime)
    except OSError:  # it has gone since
        return None


def _measured() -> Machine | None:
    """What was measured of the machine at hand; ``None`` if nothing was, or its file is no good."""
    found = read_record(_measured_path(), _MEASURED_SCHEMA, lambda data: Machine.from_json(data["machine"]))
    return found if found is not None and found.name == "cpu" and not found.links else None


def _measured_path() -> Path:
    return cache_directory() / "machine" / "cpu.json"
