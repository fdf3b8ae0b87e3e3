"""Ebbflow trains PyTorch models inside a byte budget, with the same numbers. The public API, all of it.

Names are imported when they are first used: ``import ebbflow`` costs little beyond ``import torch``, and the command
line answers a mistyped option without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbflow import errors as errors

if TYPE_CHECKING:
    from ebbflow._api.doctor import doctor as doctor
    from ebbflow._api.estimate import plan as plan
    from ebbflow._api.estimate import sweep as sweep
    from ebbflow._api.fit import calls_of as calls_of
    from ebbflow._api.fit import fit as fit
    from ebbflow._api.fit import no_update as no_update
    from ebbflow._api.fit import plan_of as plan_of
    from ebbflow._api.fit import set_budget as set_budget
    from ebbflow._api.fit import set_optimizer as set_optimizer
    from ebbflow._api.fit import step_of as step_of
    from ebbflow._api.fit import total_norm as total_norm
    from ebbflow._api.fit import unfit as unfit
    from ebbflow._api.max_batch import BatchPlan as BatchPlan
    from ebbflow._api.max_batch import max_batch as max_batch
    from ebbflow._api.repeatable import repeatable as repeatable
    from ebbflow._api.verify import Verification as Verification
    from ebbflow._api.verify import verify as verify
    from ebbflow.case import Case as Case
    from ebbflow.clipping import Clipping as Clipping
    from ebbflow.measurement.peak import measure as measure
    from ebbflow.report.plots.frontier import plot_frontier as plot_frontier
    from ebbflow.step.machine import Machine as Machine
    from ebbflow.step.plan import Plan as Plan
    from ebbflow.step.program import Program as Program
    from ebbflow.step.status import Status as Status
    from ebbflow.units import Budget as Budget

__version__ = "0.1.0"

_HOMES = {
    "BatchPlan": "ebbflow._api.max_batch",
    "Budget": "ebbflow.units",
    "Case": "ebbflow.case",
    "Clipping": "ebbflow.clipping",
    "Machine": "ebbflow.step.machine",
    "Plan": "ebbflow.step.plan",
    "Program": "ebbflow.step.program",
    "Status": "ebbflow.step.status",
    "Verification": "ebbflow._api.verify",
    "calls_of": "ebbflow._api.fit",
    "doctor": "ebbflow._api.doctor",
    "fit": "ebbflow._api.fit",
    "max_batch": "ebbflow._api.max_batch",
    "measure": "ebbflow.measurement.peak",
    "no_update": "ebbflow._api.fit",
    "plan": "ebbflow._api.estimate",
    "plan_of": "ebbflow._api.fit",
    "plot_frontier": "ebbflow.report.plots.frontier",
    "repeatable": "ebbflow._api.repeatable",
    "set_budget": "ebbflow._api.fit",
    "set_optimizer": "ebbflow._api.fit",
    "step_of": "ebbflow._api.fit",
    "sweep": "ebbflow._api.estimate",
    "total_norm": "ebbflow._api.fit",
    "unfit": "ebbflow._api.fit",
    "verify": "ebbflow._api.verify",
}

__all__ = ["errors", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ebbflow' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    helpers = {"Any", "TYPE_CHECKING", "import_module"}
    return sorted({*globals(), *_HOMES} - helpers)
