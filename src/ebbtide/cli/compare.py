"""``ebbtide compare``: planners side by side on one case, over budgets.

With ``--json`` one list of objects with keys ``case, planner, status, budget_bytes, predicted_peak_bytes,
measured_peak_bytes, overhead, measured_overhead, bound, bound_class, gap, rewritten, smallest_bytes, reason,
plan_seconds``; what a planner does not know or was not asked is ``null``. The two before the last say of a planner
without a plan which budget is the least for which one was found, and why there is none.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ebbtide.cli.arguments import CaseName, ReportFile, Size, check_sizes
from ebbtide.cli.imports import import_large
from ebbtide.cli.interruption import KeepBest
from ebbtide.cli.options import Sizes, with_options
from ebbtide.cli.output import check_page, check_picture, save_frontier, save_report, write_json
from ebbtide.cli.steps import captured_step, check_request
from ebbtide.errors import UsageError
from ebbtide.options import Options
from ebbtide.planners.registry import require_planner
from ebbtide.planners.settings import several_planners
from ebbtide.step.machine import is_elsewhere
from ebbtide.units import Budget

if TYPE_CHECKING:
    from ebbtide._api.estimate import AheadStep
    from ebbtide.case import Case
    from ebbtide.report.plan import Plan
    from ebbtide.report.records.points import Measured
    from ebbtide.report.text.compare import Row
    from ebbtide.report.text.progress import ProgressDisplay
    from ebbtide.step.refusal import Refusal

__all__ = ["compare"]


@with_options(without=["planner"], time_limit=60.0)
def compare(
    *,
    case: CaseName,
    budgets: Annotated[str, typer.Option(help="separated by commas: 80%,60%,12GiB")] = "80%,60%,40%",
    planners: Annotated[str, typer.Option(help="names separated by commas, settings included, or all")] = "all",
    options: Options,
    size: Size = None,
    sizes: Sizes,
    run: Annotated[bool, typer.Option("--run", help="run every plan here and measure it")] = False,
    report: ReportFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="draw the frontier to this file: FILE.png, .svg or .pdf (extra plot)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
) -> None:
    """Plan one training step with several planners and hold them against each other.

    Ctrl-C ends the plan that is being made with the best found so far, and the comparison after it; a second one ends
    both at once, and what was found until then is shown. Exit code 2 and the reason if no planner has a plan for any of
    the budgets.
    """
    check_page(report)
    check_picture(plot, "--plot")
    named = [each.strip() for each in budgets.split(",") if each.strip()]
    if not named:
        raise UsageError("--budgets names none; give some, as 80%,60%,12GiB", argument="budgets", value=budgets)
    parsed = [Budget.parse(each) for each in named]
    if planners != "all":
        for each in several_planners(planners):
            require_planner(each)
            options.require_tiers_for(each)
    if run and is_elsewhere(options.target):
        raise UsageError(
            f"--run cannot run on {options.machine}, which is not this machine; leave --machine or --run out"
        )
    if run and options.inside:
        raise UsageError("--run runs the step without its optimizer; leave --run or --step inside out")
    check_request(case, size, options, run=run)
    check_sizes(case, sizes)

    import_large("numpy", "torch")
    from ebbtide.report.text.compare import row_of, write_rows
    from ebbtide.report.text.plan import starting_of
    from ebbtide.report.text.progress import ProgressDisplay
    from ebbtide.step.refusal import Refusal

    names = _names(planners, moving=bool(options.tiers))
    with ProgressDisplay(sys.stderr) as display:
        captured, loaded = captured_step(case, size, replace(options, progress=display), display, sizes)
        stop = _Stop()
        outcomes = _planned(captured, parsed, names, options, display, stop)
        rows = [row_of(captured.program.name, outcome) for outcome in outcomes]
        runs: list[tuple[Plan, Measured]] = []
        if run and not stop.now:
            assert loaded is not None
            rows, runs = _attempt(loaded, outcomes, rows, display, stop)
    if stop.came:
        most = len(set(parsed)) * len(names)
        print(f"stopped by Ctrl-C: this is what {len(outcomes)} of {most} plans give", file=sys.stderr)
    _save_reports(outcomes, runs, report, plot)
    if as_json:
        write_json([row.to_json() for row in rows])
    else:
        program = captured.program
        write_rows(rows, sys.stdout, starting_of(len(program.ops), program.seconds, captured.machine))
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    if refusals and len(refusals) == len(outcomes):
        raise refusals[-1].error  # no budget had a plan: why, and the least that would
    if stop.now:
        raise typer.Exit(130)


@dataclass
class _Stop:
    """Whether Ctrl-C has come, and whether it came twice, or while plans ran: nothing more is begun then."""

    came: bool = False
    now: bool = False


def _planned(
    step: AheadStep,
    budgets: list[Budget],
    names: list[str],
    options: Options,
    display: ProgressDisplay,
    stop: _Stop,
) -> list[Plan | Refusal]:
    """What the planners have found, all of it or, once Ctrl-C has come, until then.

    Raises:
        KeyboardInterrupt: if that is nothing.
    """
    from ebbtide.planning.pipeline import PlanningOptions

    outcomes: list[Plan | Refusal] = []
    try:
        with KeepBest(display, None) as keeper:
            how = PlanningOptions.of(replace(options, progress=keeper.tell, interrupt=keeper.interrupt))
            for outcome in step.frontier(budgets, names, how):
                outcomes.append(outcome)
                if keeper.interrupt.interrupted:
                    stop.came = True
                    break
    except KeyboardInterrupt:
        if not outcomes:
            raise
        stop.came = stop.now = True
    return outcomes


def _names(planners: str, *, moving: bool) -> list[str]:
    """The planners asked for; of ``all``, those that are installed, and without tiers those that need none."""
    from ebbtide.planners.registry import missing_package, needs_tiers, planner_named, planner_names

    if planners != "all":
        names = several_planners(planners)
        for name in names:
            planner_named(name)
        return names
    for name in planner_names():
        if missing := missing_package(name):
            print(f"left out: {missing}", file=sys.stderr)
    return [name for name in planner_names() if not missing_package(name) and (moving or not needs_tiers(name))]


def _attempt(
    case: Case, outcomes: list[Plan | Refusal], rows: list[Row], display: ProgressDisplay, stop: _Stop
) -> tuple[list[Row], list[tuple[Plan, Measured]]]:
    """The rows with what running their plans gave, and that; once Ctrl-C has come, the rest without."""
    from ebbtide._api.timed_runs import try_plans
    from ebbtide.report.plan import Plan
    from ebbtide.report.records.points import Measured

    plans = [outcome for outcome in outcomes if isinstance(outcome, Plan)]
    trials = try_plans(case, plans)
    found, runs = list(rows), list[tuple[Plan, Measured]]()
    try:
        for place, (outcome, row) in enumerate(zip(outcomes, rows, strict=True)):
            if isinstance(outcome, Plan):
                display.stage(f"running {outcome.planner} at {row.budget_bytes} bytes")
                trial = next(trials)
                found[place] = row.measured(trial.measured_peak_bytes, trial.measured_overhead)
                taken = Measured("planned", trial.measured_peak_bytes, trial.measured_overhead, trial.curve)
                runs.append((outcome, taken))
    except KeyboardInterrupt:
        stop.came = stop.now = True
    return found, runs


def _save_reports(
    outcomes: list[Plan | Refusal], runs: list[tuple[Plan, Measured]], report: Path | None, plot: Path | None
) -> None:
    """The page of all plans, in detail of that within the smallest budget, of ``auto`` if it has one there; a plot."""
    from ebbtide.report.plan import Plan
    from ebbtide.report.records.page import page_of

    plans = [each for each in outcomes if isinstance(each, Plan)]
    if not plans or (report is None and plot is None):
        return
    shown = min(plans, key=lambda plan: (plan.budget_bytes, plan.planner != "auto", plan.overhead))
    rest = [plan for plan in plans if plan is not shown]
    save_report(page_of(shown, rest, runs=runs), report)
    save_frontier([shown, *rest], runs, plot)
