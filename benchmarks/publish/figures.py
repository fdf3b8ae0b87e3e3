"""What plots and tables of frontiers are made of: peaks and times of methods, by model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from publish.markdown import mib, ratio
from publish.plot import Series, plot
from publish.results import Result

__all__ = ["PLOTS", "WHICH_BUDGET", "at_peers_peaks", "path_cases", "peer_cases"]

Columns = Mapping[str, Any]
GROUPS = ("checkpoint per block", "selective", "activation_memory_budget", "save_on_cpu", "inductor", "planner")
OURS = "ebbtide"
WHICH_BUDGET = "which-budget"
BENDS = {
    "gpt-12L-d768": "GPT, 12 layers",
    "llama-8L-d512": "Llama, 8 layers",
    "resnet50-b32": "ResNet-50, batch 32",
}
"""The models of that plot, by their case in the results."""
ACROSS, UP = "peak above the step's start, MiB", "CPU time, times eager's"


def _slug(case: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in case.lower())


def peer_cases(rows: Sequence[Columns]) -> Iterator[tuple[str, str]]:
    """Models, each with the name of its plot."""
    for case in dict.fromkeys(row["case"] for row in rows if "over_eager_median" in row):
        yield case, f"peers-{_slug(case)}"


def path_cases(result: Result) -> Iterator[tuple[str, str]]:
    """Cases of ``path.py``'s frontier, each with the name of its plot."""
    for case in dict.fromkeys(row["case"] for row in result.of("frontier")):
        yield case, f"path-{_slug(case)}"


def at_peers_peaks(rows: Sequence[Columns]) -> Iterator[tuple[object, ...]]:
    """Each recompute peer beside the plan of ours with the largest budget that its peak allows."""
    for peer in rows:
        if not str(peer["method"]).startswith(GROUPS[:3]) or "error" in peer:
            continue
        mine = next(
            (row for row in rows if row["case"] == peer["case"] and peer["method"] in row.get("against", ())), None
        )
        against = mine["against"][peer["method"]] if mine is not None else None
        yield (
            peer["case"],
            peer["method"],
            mib(peer["peak_bytes"]),
            ratio(peer["over_eager_median"]),
            ratio(mine["over_eager_median"]) if mine is not None else "no plan",
            f"{against['ratio']:.3f}{_forbidden(against)}" if against is not None else "",
            peer["bits"],
        )


def _forbidden(against: Columns) -> str:
    """The bound, where it allows no plan that meets the target."""
    return f" (forbidden: at least {against['least']:.3f})" if against["forbidden"] else ""


def _series(rows: Sequence[Columns], time: str) -> Iterator[Series]:
    eager = [row for row in rows if row["method"] == "eager"]
    ours = [row for row in rows if str(row["method"]).startswith(OURS)]
    yield Series("Ebbtide", [(row["peak_bytes"] / 2**20, row[time]) for row in ours], joined=True)
    yield Series("eager", [(row["peak_bytes"] / 2**20, row[time]) for row in eager])
    for group in GROUPS:
        points = [(row["peak_bytes"] / 2**20, row[time]) for row in rows if str(row["method"]).startswith(group)]
        if points:
            yield Series("published planners" if group == "planner" else group, points)


def _peer_plots(result: Result) -> dict[str, str]:
    rows = result.of("frontier")
    return {
        name: plot(case, ACROSS, UP, list(_series(_ran(rows, case, "over_eager_median"), "over_eager_median")))
        for case, name in peer_cases(rows)
    }


def _path_plots(result: Result) -> dict[str, str]:
    rows = result.of("frontier")
    return {
        name: plot(case, ACROSS, UP, list(_series(_ran(rows, case, "cpu_ratio_median"), "cpu_ratio_median")))
        for case, name in path_cases(result)
    }


def _ran(rows: Sequence[Columns], case: str, time: str) -> list[Columns]:
    return [row for row in rows if row["case"] == case and row.get(time) is not None]


def _which_budget(result: Result) -> dict[str, str]:
    """The frontiers of three models: what less memory costs, and where that bends."""
    rows = result.of("gap")
    series = [
        Series(name, [(100 * row["of_peak"], row["overhead_percent"]) for row in rows if row["case"] == case], True)
        for case, name in BENDS.items()
    ]
    return {WHICH_BUDGET: plot("What a budget costs", "budget, % of the unplanned peak", "time added, %", series)}


PLOTS: dict[str, Callable[[Result], dict[str, str]]] = {
    "peers": _peer_plots,
    "path": _path_plots,
    "planning": _which_budget,
}
"""By the result's name: SVGs by their file's."""
