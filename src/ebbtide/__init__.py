"""Ebbtide trains PyTorch models inside a byte budget, with the same numbers. The public API, all of it.

Names are imported when they are first used: ``import ebbtide`` costs little beyond ``import torch``, and the command
line answers a mistyped option without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbtide import errors as errors
from ebbtide.version import __version__ as __version__

if TYPE_CHECKING:
    from ebbtide._api.doctor import doctor as doctor
    from ebbtide._api.estimate import plan as plan
    from ebbtide._api.estimate import sweep as sweep
    from ebbtide._api.fit import calls_of as calls_of
    from ebbtide._api.fit import fit as fit
    from ebbtide._api.fit import no_update as no_update
    from ebbtide._api.fit import plan_of as plan_of
    from ebbtide._api.fit import set_budget as set_budget
    from ebbtide._api.fit import set_optimizer as set_optimizer
    from ebbtide._api.fit import step_of as step_of
    from ebbtide._api.fit import total_norm as total_norm
    from ebbtide._api.fit import unfit as unfit
    from ebbtide._api.max_batch import BatchPlan as BatchPlan
    from ebbtide._api.max_batch import max_batch as max_batch
    from ebbtide._api.metrics import metrics_of as metrics_of
    from ebbtide._api.repeatable import repeatable as repeatable
    from ebbtide._api.verify import Verification as Verification
    from ebbtide._api.verify import verify as verify
    from ebbtide.case import Case as Case
    from ebbtide.measurement.peak import measure as measure
    from ebbtide.options import Options as Options
    from ebbtide.report.plan import Plan as Plan
    from ebbtide.report.plots.frontier import plot_frontier as plot_frontier
    from ebbtide.step.machine import Machine as Machine
    from ebbtide.step.program import Program as Program
    from ebbtide.step.status import Status as Status
    from ebbtide.units import Budget as Budget

_HOMES = {
    "BatchPlan": "ebbtide._api.max_batch",
    "Budget": "ebbtide.units",
    "Case": "ebbtide.case",
    "Machine": "ebbtide.step.machine",
    "Options": "ebbtide.options",
    "Plan": "ebbtide.report.plan",
    "Program": "ebbtide.step.program",
    "Status": "ebbtide.step.status",
    "Verification": "ebbtide._api.verify",
    "calls_of": "ebbtide._api.fit",
    "doctor": "ebbtide._api.doctor",
    "fit": "ebbtide._api.fit",
    "max_batch": "ebbtide._api.max_batch",
    "measure": "ebbtide.measurement.peak",
    "metrics_of": "ebbtide._api.metrics",
    "no_update": "ebbtide._api.fit",
    "plan": "ebbtide._api.estimate",
    "plan_of": "ebbtide._api.fit",
    "plot_frontier": "ebbtide.report.plots.frontier",
    "repeatable": "ebbtide._api.repeatable",
    "set_budget": "ebbtide._api.fit",
    "set_optimizer": "ebbtide._api.fit",
    "step_of": "ebbtide._api.fit",
    "sweep": "ebbtide._api.estimate",
    "total_norm": "ebbtide._api.fit",
    "unfit": "ebbtide._api.fit",
    "verify": "ebbtide._api.verify",
}

__all__ = ["errors", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    helpers = {"Any", "TYPE_CHECKING", "import_module"}
    return sorted({*globals(), *_HOMES} - helpers)
