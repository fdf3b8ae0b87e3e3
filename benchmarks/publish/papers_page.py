"""``build/pages/papers.md``: the tables of the four systems that the planners come from, theirs beside ours.

1. A line is a case of a table of the paper. *Theirs* is without and with their system, as published. *Here* is what the
   same step takes without a plan, under their algorithm as written here, and under the default.
2. *No plan can* is what a proven bound or floor leaves to any plan at all; empty where nothing is proven.
3. Figures come from the result files. What differs in method stands above each table (``SYSTEMS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from publish.markdown import table
from publish.results import Result

__all__ = ["page"]

Columns = Mapping[str, Any]
HEADER = ("case", "theirs: without", "with", "here: unplanned", "their algorithm", "default", "no plan can")
TOP = """# Four papers, table by table

The [planners](../../docs/planners.md) of Ebbtide come from four systems: Checkmate (recomputation as an optimisation
problem), Echo (recomputation in a compiler), the swapping of Meng et al. for TensorFlow, and Libra (recomputation and
swapping in one plan). Their tables, computed again here; `make pages` writes this page from `benchmarks/results`.

Each table has one layout. *Theirs* are published figures, without and with their system, from their hardware and
framework. *Here* is the same step on the same card's figures: unplanned, under their algorithm as it is written in
`published/` of this repository, and under Ebbtide's default planner. The last column is what a proven bound or floor
leaves to any plan. Overheads are over the unplanned step at the same size. Seconds, and overheads with them, are
predicted from the card's catalogue by roofline, since none of these cards was at hand; bytes are counted as PyTorch's
allocator counts them. Plans of each kind were also run at small size on a CPU, with bits and bytes compared
(the questions `real` of the [benchmarks](benchmarks.md)).
"""


@dataclass(frozen=True)
class Table:
    """One table of a paper.

    Attributes:
        title: of the section.
        result: name of the result file.
        lines: from its rows.
    """

    title: str
    result: str
    lines: Callable[[Result], Iterator[Sequence[object]]]


@dataclass(frozen=True)
class System:
    """A paper.

    Attributes:
        title: of the section.
        paper: as one cites it, and what was taken from it.
        method: what differs from the paper's own measurement.
        missing: what was not computed again, and why.
        tables: those that were.
    """

    title: str
    paper: str
    method: tuple[str, ...]
    missing: tuple[str, ...]
    tables: tuple[Table, ...]


def page(results: Sequence[Result]) -> str:
    """All of it."""
    known = {each.name: each for each in results}
    parts = [TOP]
    for system in SYSTEMS:
        parts.append(f"## {system.title}\n\n{system.paper}")
        parts.append("What differs from theirs:\n\n" + "\n".join(f"- {each}" for each in system.method))
        for each in system.tables:
            result = known[each.result]
            parts.append(f"### {each.title}\n\n{_made(result)}\n\n{table(HEADER, each.lines(result))}")
        parts.append("Not computed again:\n\n" + "\n".join(f"- {each}" for each in system.missing))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _made(result: Result) -> str:
    link = f"[{result.name}](benchmarks.md#result-{result.name.replace('_', '_')})"
    state = "; **stale**: its latest sample contradicts it" if result.is_stale else ""
    return f"From {link}, made with {', '.join(result.versions)}, {', '.join(result.dates)}{state}."


def _by_case(rows: Sequence[Columns], method: str = "method") -> dict[str, dict[str, Columns]]:
    """Rows by case and method; the first of each."""
    found: dict[str, dict[str, Columns]] = {}
    for row in rows:
        found.setdefault(str(row["case"]), {}).setdefault(str(row[method]), row)
    return found


def _overhead(row: Columns | None, name: str = "overhead_percent") -> str:
    value = None if row is None else row.get(name)
    return "" if value is None else f" (+{value:.1f} %)"


def _checkmate_batches(result: Result) -> Iterator[Sequence[object]]:
    for case, rows in _by_case(result.of("max_batch"), "planner").items():
        plain, ours = rows["keep_all"], rows["auto"]
        baselines = {name: rows[name]["batch"] for name in rows if name.startswith(("ap_", "linearized_"))}
        best = max(baselines, key=lambda name: baselines[name])
        default = f"{ours['batch']} (+{100 * ours['overhead']:.1f} %)"
        yield (
            case,
            plain["paper"],
            ours["paper"],
            plain["batch"],
            f"{baselines[best]} (`{best}`)",
            default,
            ours["no_plan_can_exceed"],
        )


def _checkmate_ratios(result: Result) -> Iterator[Sequence[object]]:
    rows = _by_case([row for row in result.of("ratios") if row["ratio"] is not None], "planner")
    for case, found in rows.items():
        rounding, mine = found.get("checkmate_lp"), found.get("auto")
        for name, row in found.items():
            if row["paper"] is not None and name != "checkmate_lp":
                yield (f"{case}, `{name}`", f"{row['paper']:.2f}", "", "", f"{row['ratio']:.3f}", "", "1")
        if rounding is not None and rounding["paper"] is not None:
            default = "" if mine is None else f"{mine['ratio']:.3f}"
            yield (f"{case}, rounding", "", f"{rounding['paper']:.2f}", "", f"{rounding['ratio']:.3f}", default, "1")


def _checkmate_graphs(result: Result) -> Iterator[Sequence[object]]:
    found: dict[tuple[str, str], dict[str, Columns]] = {}
    for row in result.of("published"):
        found.setdefault((row["case"], row["budget"]), {})[row["planner"]] = row
    for (case, budget), rows in found.items():
        ours, lp = rows["auto"], rows.get("checkmate_lp")
        theirs = "; ".join(
            f"{name} {ours[name]:g} %" for name in ("Checkmate", "Moccasin", "FastSA") if ours.get(name) is not None
        )
        bounds = [row["bound_percent"] for row in rows.values() if row.get("bound_percent") is not None]
        yield (
            f"{case}, {budget}",
            "",
            theirs,
            "",
            _percent(None if lp is None else lp["added_percent"]),
            _percent(ours["added_percent"]),
            _percent(ours["bound_percent"] if ours["bound_percent"] is not None else max(bounds, default=None)),
        )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} %"


def _echo_translation(result: Result) -> Iterator[Sequence[object]]:
    for case, rows in _by_case(result.of("sockeye")).items():
        theirs, plain, ours = rows.get("theirs, base"), rows.get("keep-all"), rows.get("auto")
        if plain is None or ours is None or theirs is None:
            continue
        echoed, host = rows.get("theirs, Echo"), rows.get("auto, host 100 %")
        default = f"{ours['peak_mb']:.0f}{_overhead(ours)}"
        if host is not None:
            default += f"; with the host's memory {host['peak_mb']:.0f}{_overhead(host)}"
        yield (
            case,
            f"{theirs['peak_mb']:.0f}",
            "" if echoed is None else f"{echoed['peak_mb']:.0f}",
            f"{plain['peak_mb']:.0f}",
            "" if rows.get("echo") is None else f"{rows['echo']['peak_mb']:.0f}{_overhead(rows['echo'])}",
            default,
            "" if ours.get("bound_percent") is None else f"overhead at least {ours['bound_percent']:.2f} %",
        )


def _echo_networks(result: Result) -> Iterator[Sequence[object]]:
    for case, rows in _by_case(result.of("networks")).items():
        plain, ours = rows.get("keep-all"), rows.get("auto")
        if plain is None or ours is None:
            continue
        echo, host = rows.get("echo"), rows.get("auto, host 100 %")
        default = f"{ours['ratio']:.2f}" + ("" if host is None else f"; with the host's memory {host['ratio']:.2f}")
        limit = "" if ours.get("no_plan_above") is None else f"{ours['no_plan_above']:.2f} by recomputing alone"
        yield (case, "1", "", "1", "" if echo is None else f"{echo['ratio']:.2f}", default, limit)


def _swap_batches(*questions: str) -> Callable[[Result], Iterator[Sequence[object]]]:
    def lines(result: Result) -> Iterator[Sequence[object]]:
        for question in questions:
            for case, rows in _by_case(result.of(question)).items():
                plain, ours = rows["keep_all"], rows["auto, host at 100%"]
                swap, alone = rows.get("swap, host at 100%"), rows.get("auto")
                default = f"{ours['target_batch']}: {ours['at_target']}{_overhead(ours)}"
                if alone is not None:
                    default += f"; by recomputing alone: {alone['at_target']}{_overhead(alone)}"
                yield (
                    f"{case} ({plain['size']})",
                    plain["their_batch"],
                    plain["target_batch"],
                    plain["largest_at_10_percent"],
                    "" if swap is None else f"{swap['at_target']}{_overhead(swap)}",
                    default,
                    "" if ours.get("bound_percent") is None else f"overhead at least {ours['bound_percent']:.2f} %",
                )

    return lines


def _swap_bytes(result: Result) -> Iterator[Sequence[object]]:
    for case, rows in _by_case(result.of("m2")).items():
        plain, ours, swap = rows["keep_all"], rows["auto, host at 100%"], rows.get("swap, host at 100%")
        floor, least = ours.get("floor_mb"), ours.get("least_at_10_percent_mb")
        yield (
            case,
            plain["their_mb"],
            plain["target_mb"],
            f"{plain['peak_mb']:.0f}",
            "" if swap is None else f"{swap['at_target']}{_overhead(swap)}",
            f"{ours['at_target']}{_overhead(ours)}" + ("" if least is None else f"; least at 10 %: {least:.0f}"),
            "" if floor is None else f"not below {floor:.0f}",
        )


def _libra(result: Result) -> Iterator[Sequence[object]]:
    for case, rows in _by_case(result.of("batch")).items():
        ours, libra, overlapped = rows["auto"], rows["libra"], rows.get("libra:overlap=true")
        of_all = "batch" not in ours
        shown = [f"{libra['ratio']:.2f}"]
        if overlapped is not None:
            shown.append(f"{overlapped['ratio']:.2f} with overlap")
        extra = "" if of_all else f" ({ours['batch']}, +{100 * ours['overhead']:.1f} %)"
        plain = "" if of_all else f"1 ({rows['keep_all']['batch']})"
        limit = ours.get("no_plan_can_exceed")
        yield (
            case,
            "1",
            "3.12" if of_all else "",
            plain or "1",
            "; ".join(shown),
            f"{ours['ratio']:.2f}{extra}",
            "" if limit is None else f"{limit:.2f}",
        )


SYSTEMS = (
    System(
        "Checkmate",
        "Paras Jain, Ajay Jain, Aniruddha Nrusimha, Amir Gholami, Pieter Abbeel, Joseph Gonzalez, Kurt Keutzer, Ion "
        "Stoica: *Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization*, MLSys 2020. Taken from "
        "it: the stage model as an integer program (`checkmate`, `checkmate_free`), its relaxation with rounding "
        "(`checkmate_lp`), the baselines that it compares with, and the reruns that serve what a baseline keeps.",
        (
            "Largest batches: the networks are built here with the authors' counting. Their plain bars are "
            "extrapolated linearly, as their README says; here every buffer is freed at its last use, which gives "
            "larger batches without a plan and smaller multiples over them.",
            "Ratios over the optimum are geometric means over budgets whose optimum is proven here; the paper's are "
            "over those of its figures. Costs are the published profiles where there are any, else FLOPs.",
            "Gurobi solved the paper's programs; HiGHS solves ours, with limits that the statuses name. Rounded plans "
            "that are over the budget are repaired here (`checkmate_lp`); `checkmate_lp_pure` is as published.",
        ),
        (
            "Bars of Figure 6 whose values are not in the text: there are no figures to compare with.",
            "Solve times: theirs are of another solver and machine.",
        ),
        (
            Table("Largest batch within 16 GiB at one more forward (§6.4, Figure 6)", "checkmate", _checkmate_batches),
            Table("Cost over the optimum's (Table 2)", "checkmate", _checkmate_ratios),
            Table("Added time on published graphs at 90 % and 80 % of the peak", "checkmate", _checkmate_graphs),
        ),
    ),
    System(
        "Echo",
        "Bojian Zheng, Nandita Vijaykumar, Gennady Pekhimenko: *Echo: Compiler-based GPU Memory Footprint Reduction "
        "for LSTM RNN Training*, ISCA 2020 (arXiv 1805.08899), and its pass as merged into MXNet (#18228). Taken "
        "from it: the pass (`echo`) with its regions, its estimate of what is released against what is allocated, "
        "and its own acceptance tests.",
        (
            "Their megabytes are those of the data that the authors published with the fourth version of the paper, of "
            "a TITAN Xp under MXNet, which kept two large tensors of the attention per step; PyTorch keeps one, so "
            "less is there to be saved (`tbd two tensors` keeps two).",
            "Steps have full lengths, where theirs are buckets of all lengths up to them; Adam's states are resident.",
            "Footprints of networks: at an overhead of at most 5 %, a limit that is ours, at the largest power-of-two "
            "batch of the card where theirs is not stated.",
        ),
        (
            "The ISCA paper's figures per network, its overheads, its experiment with four cards and its largest "
            "numbers of layers: only the abstract's mean (1.89) and largest (3.13) ratios were at hand.",
            "Its data layouts for products of recurrent layers: Ebbtide runs PyTorch's kernels as they are.",
            "Energy: nothing here measures it.",
        ),
        (
            Table("Translation at the authors' peaks, MB", "echo", _echo_translation),
            Table(
                "Footprint ratios at 5 % of overhead (mean 1.89, largest 3.13 in the abstract)", "echo", _echo_networks
            ),
        ),
    ),
    System(
        "Swap-out and swap-in for TensorFlow",
        "Chen Meng, Minmin Sun, Jun Yang, Minghui Qiu, Yang Gu: *Training Deeper Models by GPU Memory Optimization on "
        "TensorFlow*, ML Systems Workshop at NIPS 2017. Taken from it: the rewriting that lets feature maps far from "
        "the loss leave and come back behind a trigger op (`swap`), with its threshold; memory-efficient attention "
        "as a thing that a plan has to find by itself.",
        (
            "Published are batches or megabytes and the card; of most models not their sizes. One number a row "
            "(two for DCGAN) is fitted so that the step without a plan reaches their batch within 5 %; the row names "
            "it.",
            "The whole card's memory is the budget. The host's memory is reached at the card's PCIe rate; the result "
            "file has half of that rate too.",
            "The threshold of `swap` is searched for; the paper sets it by hand.",
            "The paper states no overhead: a batch counts as reached at 10 %, where it swaps, and at any overhead, "
            "which is shown, where its own operators recompute.",
        ),
        ("Samples a second of their runs: they are in figures without numbers, and of a card that was not at hand.",),
        (
            Table("Table 1a: batch by swapping", "swap_tf", _swap_batches("m1")),
            Table("Table 1b: MB at a batch of 32 by swapping", "swap_tf", _swap_bytes),
            Table("Tables 2a and 2b: batch of LSTMs and attention", "swap_tf", _swap_batches("m3", "m4")),
        ),
    ),
    System(
        "Libra",
        "Ling-Sung Wang (adviser Jerry Chou): *Libra*, master's thesis, National Tsing Hua University, 2024, and the "
        "published prototype. Taken from it: every evicted tensor is recomputed or swapped, and where a chain of "
        "recomputation makes a new peak, swapping at that peak cuts it (`libra`, with each step of its refinement as a "
        "setting).",
        (
            "Models and sizes are those of the scripts beside the prototype; the thesis itself is not public.",
            "Candidates are chosen by bytes and position; the prototype goes by names that its tracer gives.",
            "The prototype measures every trial on the card; here the simulator says what a trial takes. Its copies "
            "block, as the setting `overlap=false` has it; with `overlap=true` they run beside the ops.",
            "Batches count at 50 % of overhead at most, a limit that is ours: with copies that block, more time buys "
            "any batch.",
        ),
        (
            "The ratios over its two baselines (1.42 and 2.57): which systems they are is not public.",
            "Plan times: the prototype's are GPU steps.",
        ),
        (Table("Largest batch over the plain one within 16 GB (mean 3.12 in the abstract)", "libra", _libra),),
    ),
)
