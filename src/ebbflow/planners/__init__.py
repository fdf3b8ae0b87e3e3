"""Planners: one algorithm per file, one contract (``base``), found by name."""

from ebbflow.planners import anneal as anneal
from ebbflow.planners import auto as auto
from ebbflow.planners import auto_free as auto_free
from ebbflow.planners import chain as chain
from ebbflow.planners import checkmate as checkmate
from ebbflow.planners import checkmate_lp as checkmate_lp
from ebbflow.planners import chen as chen
from ebbflow.planners import greedy as greedy
from ebbflow.planners import keep_all as keep_all
from ebbflow.planners import min_cut as min_cut
from ebbflow.planners import per_block as per_block
from ebbflow.planners import retention as retention
from ebbflow.planners import revolve as revolve
from ebbflow.planners import smallest as smallest
from ebbflow.planners.base import (
    Answer,
    Interrupt,
    Problem,
    Progress,
    Status,
    missing_extra,
    planner_named,
    planner_names,
)

__all__ = ["Answer", "Interrupt", "Problem", "Progress", "Status", "missing_extra", "planner_named", "planner_names"]
