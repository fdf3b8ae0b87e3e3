"""Planners: one algorithm per file, one contract (``base``), found by name."""

from ebbflow.planners import auto as _auto
from ebbflow.planners import greedy as _greedy
from ebbflow.planners import keep_all as _keep_all
from ebbflow.planners import smallest as _smallest
from ebbflow.planners.base import Answer, Interrupt, Problem, Progress, Status, planner_named, planner_names

__all__ = ["Answer", "Interrupt", "Problem", "Progress", "Status", "planner_named", "planner_names"]

del _auto, _greedy, _keep_all, _smallest
