"""Planners: one algorithm per file, one contract (``base``), found by name and imported when first asked for."""

from ebbtide.planners.base import Answer, Interrupt, Problem, Progress, Status
from ebbtide.planners.registry import missing_package, planner_named, planner_names

__all__ = ["Answer", "Interrupt", "Problem", "Progress", "Status", "missing_package", "planner_named", "planner_names"]
