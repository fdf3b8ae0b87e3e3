"""The options that several commands take, written once: the same word means the same everywhere.

Nothing here imports torch: whoever asks for help or mistypes an option does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean, zoo_names
from ebbtide.options import REWRITES, STEPS, no_optimizer
from ebbtide.planners import planner_names
from ebbtide.tiers import TIERS

if TYPE_CHECKING:
    import torch

__all__ = [
    "OPTIMIZERS",
    "AsJson",
    "CaseName",
    "Effort",
    "Gradients",
    "Image",
    "Layers",
    "Length",
    "MachineName",
    "MaxNorm",
    "OffloadOptimizer",
    "OptimizerName",
    "PlanFile",
    "PlannerName",
    "ReportFile",
    "Rewrites",
    "Scaled",
    "Seed",
    "Size",
    "StepPlace",
    "Tiers",
    "TimeLimit",
    "offloading",
    "optimizer_named",
    "several_tiers",
    "sizes_of_zoo",
]

OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "adadelta": ("Adadelta", {}),
    "adafactor": ("Adafactor", {}),
    "adagrad": ("Adagrad", {}),
    "adam": ("Adam", {}),
    "adamax": ("Adamax", {}),
    "adamw": ("AdamW", {}),
    "asgd": ("ASGD", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {}),
    "rprop": ("Rprop", {}),
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgd-momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
}
"""What ``--optimizer`` may name: a class of ``torch.optim``, and with what it is made for the bytes of its state."""
_OPTIMIZER_NAMES = (*OPTIMIZERS, "none")


def _beginning(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes a word to those of ``names`` that begin with it."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _machine_names() -> Iterable[str]:
    from ebbtide.step.machine import catalogue

    return catalogue()


def _case_names() -> Iterable[str]:
    return [f"zoo:{name}" for name in zoo_names()]


CaseName = Annotated[
    str, typer.Argument(help="zoo:NAME, FILE.py:function or graph.json", autocompletion=_beginning(_case_names))
]
PlannerName = Annotated[
    str,
    typer.Option(
        help="name of the planner; its settings may follow: tflms:version=1", autocompletion=_beginning(planner_names)
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        help="of the catalogue, e.g. a100-80gb: an estimate; default: measured here",
        autocompletion=_beginning(_machine_names),
    ),
]
Tiers = Annotated[
    str | None,
    typer.Option(
        help="slower memory that buffers may be moved to: host, disk, disk:PATH, or several: host,disk",
        autocompletion=_beginning(lambda: TIERS),
    ),
]
Size = Annotated[int | None, typer.Option(help="passed to the case: batch, length or layers")]
Layers = Annotated[int | None, typer.Option(min=1, help="of a zoo: model that has them to choose")]
Length = Annotated[int | None, typer.Option(min=1, help="of the sequences of a zoo: model that has it to choose")]
Image = Annotated[int | None, typer.Option(min=1, help="height and width in pixels, of a zoo: model of images")]
Effort = Annotated[int, typer.Option(help="local-search moves per plan")]
TimeLimit = Annotated[
    float | None,
    typer.Option(help="seconds per plan; the best so far is kept, if need be after a search for one"),
]
Seed = Annotated[int, typer.Option(help="of every random choice")]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        help=f"whose state counts as resident: {', '.join(_OPTIMIZER_NAMES)}; default: the case's own",
        autocompletion=_beginning(lambda: _OPTIMIZER_NAMES),
    ),
]
Rewrites = Annotated[
    str | None,
    typer.Option(
        help="what may replace parts of the step: exact (the default), in-place or all, which keep all bits; or none",
        autocompletion=_beginning(lambda: REWRITES),
    ),
]
OffloadOptimizer = Annotated[
    bool,
    typer.Option(
        "--offload-optimizer", help="with --optimizer and --tiers: its state is in the first tier while a step runs"
    ),
]
StepPlace = Annotated[
    str | None,
    typer.Option(
        "--step",
        help="where --optimizer steps: outside, after the backward, or inside of it, gradient by gradient; default: "
        "the case's own",
        autocompletion=_beginning(lambda: STEPS),
    ),
]
MaxNorm = Annotated[
    float | None,
    typer.Option(
        help="with --step inside: to what norm gradients are clipped before they are applied; default: the case's own"
    ),
]
Scaled = Annotated[
    bool,
    typer.Option(
        "--scaler", help="with --step inside: a GradScaler scales the loss, so that updates wait for finite gradients"
    ),
]
Gradients = Annotated[
    str | None,
    typer.Option(
        help="which outputs take gradients: loss or all; default: the case's own",
        autocompletion=_beginning(lambda: ("loss", "all")),
    ),
]
PlanFile = Annotated[str, typer.Argument(help="a plan that was saved: plan.json")]
ReportFile = Annotated[Path | None, typer.Option("--report", help="write a report to this file: page.html")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def optimizer_named(name: str | None) -> Callable[[torch.nn.Module], torch.optim.Optimizer] | None:
    """What makes the optimizer ``name`` of a model; ``none`` is no optimizer, whatever the case has.

    Raises:
        UsageError: if there is none, listing those there are.
    """
    if name is None:
        return None
    name = next((known for known in _OPTIMIZER_NAMES if known.lower() == name.lower()), name)  # its class, AdamW
    if name == "none":
        return no_optimizer
    if name not in OPTIMIZERS:
        accepted = ", ".join(_OPTIMIZER_NAMES)
        raise UsageError(
            f"optimizer {name!r} is not known; accepted: {accepted}{did_you_mean(name, _OPTIMIZER_NAMES)}",
            argument="optimizer",
            value=name,
            accepted=_OPTIMIZER_NAMES,
        )
    kind, settings = OPTIMIZERS[name]

    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        import torch

        made: Any = getattr(torch.optim, kind)
        return made([p for p in model.parameters() if p.requires_grad], **settings)

    return make


def offloading(wanted: bool, tiers: str | None) -> bool:
    """Whether an optimizer's state is to be away in the step.

    Raises:
        UsageError: if there is nowhere to move it to.
    """
    if wanted and tiers in (None, "none"):
        raise UsageError(
            "--offload-optimizer needs a tier to move the state to: --tiers disk on a CPU, --tiers host on a card",
            argument="--offload-optimizer",
            value=True,
        )
    return wanted


def sizes_of_zoo(case: str, **sizes: int | None) -> dict[str, int]:
    """Those ``sizes`` of a ``zoo:`` case that were given.

    Raises:
        UsageError: if the case is none of the zoo's.
    """
    given = {name: size for name, size in sizes.items() if size is not None}
    if given and not case.startswith("zoo:"):
        options = " and ".join(f"--{name}" for name in given)
        raise UsageError(
            f"{options} {'is' if len(given) == 1 else 'are'} for zoo:NAME; {case} has sizes of its own"
            + ("" if case.endswith(".json") else ", of which its function takes one: --size"),
            argument=f"--{next(iter(given))}",
            value=next(iter(given.values())),
        )
    return given


def several_tiers(names: str | None) -> list[str] | None:
    """What ``--tiers`` names: one tier, or several with commas between them; ``none`` for none."""
    return None if names in (None, "none") else [name.strip() for name in names.split(",")]
