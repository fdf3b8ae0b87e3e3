"""Ebbflow trains PyTorch models inside a byte budget, with the same numbers. The public API, all of it."""

from ebbflow import errors as errors
from ebbflow.ahead import plan as plan
from ebbflow.ahead import sweep as sweep
from ebbflow.case import Case as Case
from ebbflow.fit import fit as fit
from ebbflow.fit import plan_of as plan_of
from ebbflow.fit import step_of as step_of
from ebbflow.fit import unfit as unfit
from ebbflow.machine import Machine as Machine
from ebbflow.max_batch import BatchPlan as BatchPlan
from ebbflow.max_batch import max_batch as max_batch
from ebbflow.measure.peak import measure as measure
from ebbflow.plan import Plan as Plan
from ebbflow.plan import Status as Status
from ebbflow.program import Program as Program
from ebbflow.units import Budget as Budget
from ebbflow.verify import Verification as Verification
from ebbflow.verify import verify as verify

__version__ = "0.1.0"
