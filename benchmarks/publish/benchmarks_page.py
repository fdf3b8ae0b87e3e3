"""``build/pages/benchmarks.md``: every result in one layout, with its plots; figures come from the result files alone.

1. A result has a line in the overview: what is asked, how many targets are met, on what version and when it was made,
   and when a sample of it last came out the same, or that it is *stale* (``harness.checked``).
2. Its section says what it ran on, what it measures, which targets were missed and what its latest sample contradicts,
   and shows the tables and plots that are made of its rows (``SECTIONS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from publish import figures, markdown
from publish.markdown import listed, table
from publish.results import Result, question_of, without_peer

__all__ = ["page", "plots"]

MOST_MISSED = 8
TOP = """# Benchmarks: every result

Every figure here is from a file in `benchmarks/results`; `make pages` writes this page, its plots, the tables of all
rows and [the papers' page](papers.md) from them, byte for byte the same wherever it runs. How each benchmark is run,
and what it holds against what, is in [benchmarks/README.md](../../benchmarks/README.md).

A result says with which version, when and on what machine it was made. `make bench` runs a sample of every benchmark
again, at full size, and holds it against its targets and against the committed result: *held* is the date and commit of
the last sample that contradicted nothing. A result is **stale** while its latest sample contradicts it: it missed a
target that the result met, or a case failed. Bytes of plans that rest on measured seconds differ from machine to
machine; they are counted beside and contradict nothing by themselves. For a release every result is made anew
(`make release-check`).
"""


_ALONE = (
    "All others hold us against published planners, PyTorch's own means or the figures of a paper, in the same run "
    "where these can run."
)


def page(results: Sequence[Result]) -> str:
    """All of it."""
    columns = ("result", "question", "targets met", "version", "made", "held")
    parts = [TOP, "## Overview\n", table(columns, map(_line, results))]
    parts += ["## Benchmarks without a peer\n", _ALONE, table(("benchmark", "why"), without_peer().items())]
    parts += [part for result in results for part in _section(result)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def plots(results: Sequence[Result]) -> dict[str, str]:
    """SVGs by their file's name."""
    return {name: svg for result in results for name, svg in figures.PLOTS.get(result.name, _no_plots)(result).items()}


def _no_plots(result: Result) -> dict[str, str]:
    return {}


def _line(result: Result) -> tuple[str, ...]:
    dates = result.dates
    made = "not recorded" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    anchor = _heading(result).lower().replace(".", "").replace(" ", "-")
    link = f"[{result.name}](#{anchor})"
    return (link, question_of(result.benchmark), _met(result), ", ".join(result.versions), made, _held(result))


def _heading(result: Result) -> str:
    return f"Result {result.name}"


def _met(result: Result) -> str:
    if "parts" in result.data:
        parts = result.data["parts"].values()
        return f"{sum(each['passed'] for each in parts)} of {sum(each['passed'] + each['failed'] for each in parts)}"
    met = sum(each["passed"] for each in result.checks)
    failed = len(result.data["failures"])
    return f"{met} of {len(result.checks)}" + (f"; {failed} cases failed" if failed else "")


def _held(result: Result) -> str:
    """When a sample of it last came out the same; that it is stale where the latest did not."""
    if result.sample is None:
        return "no sample since"
    return f"**stale**, held {result.sample.held or 'by no sample'}" if result.is_stale else result.sample.held


def _section(result: Result) -> Iterator[str]:
    yield f"## {_heading(result)}\n\n{question_of(result.benchmark)}"
    yield _origin(result)
    missed = [f"{_where(each['row'])}: {_in_words(each)}" for each in result.checks if not each["passed"]]
    missed += [f"{each['case']}: {each['error']}" for each in result.data.get("failures", ())]
    missed += [each for part in result.data.get("parts", {}).values() for each in part["failures"]]
    if missed:
        yield f"Missed:\n\n{listed(missed, MOST_MISSED)}"
    if result.is_stale and result.sample is not None:
        yield f"**Stale**: what its latest sample contradicts:\n\n{listed(result.sample.contradicted, MOST_MISSED)}"
    yield from SECTIONS.get(result.name, _no_tables)(result)


def _no_tables(result: Result) -> Iterator[str]:
    return iter(())


def _origin(result: Result) -> str:
    """Version, commits, machine and seeds, and what its latest sample gave."""
    machine = result.data.get("machine") or result.data["versions"]
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items() if name != "date")
    seeds = {name: value for each in result.origins for name, value in each.seeds.items()}
    dirty = " (some with changes that were not committed)" if any(each.changed for each in result.origins) else ""
    commits = ", ".join(dict.fromkeys(result.commits)) or "a commit that is not recorded"
    lines = [
        f"Made with {', '.join(result.versions)} at {commits}{dirty}.",
        f"Machine: {facts}. Seeds: {', '.join(f'{name} {value}' for name, value in seeds.items()) or 'none'}.",
        f"All rows: {_rows(result)}.",
    ]
    if (sample := result.sample) is not None:
        lines.append(
            f"Sampled again on {sample.origin.machine.get('date')} at {sample.origin.commit[:7]}: "
            f"{len(sample.origin.cases)} cases, {sample.targets - len(sample.missed)} of {sample.targets} targets met; "
            f"bytes, counts and verdicts: {sample.same} as in the result, {sample.other} other."
        )
    return "  \n".join(lines)


def _rows(result: Result) -> str:
    if "parts" in result.data:
        return f"[{result.name}.json](../../benchmarks/results/{result.name}.json)"
    return f"[{result.name}.md](results/{result.name}.md)"


def _where(row: dict[str, object]) -> str:
    columns = row["columns"]
    assert isinstance(columns, dict)
    return ", ".join(
        [str(row["question"]), *(str(columns[name]) for name in ("case", "method", "budget") if name in columns)]
    )


def _in_words(check: dict[str, object]) -> str:
    if check["relation"] == "is":
        return str(check["what"])
    return f"{check['what']} {check['value']:.4g}, not {check['relation']} {check['target']:g}"


def _image(name: str, text: str) -> str:
    return f"![{text}](plots/{name}.svg)"


def _peers(result: Result) -> Iterator[str]:
    rows = result.of("frontier")
    yield (
        "Peaks are bytes above the step's start; times are CPU time of the process at one thread over eager's, the "
        "median over rounds in which every method runs once. *Recompute peers* run eager's kernels: checkpoints, "
        "selective policies and `activation_memory_budget` run op by op. Inductor's kernels are its own. Where a "
        "proven bound allows no plan that meets the target, the bound stands beside."
    )
    yield table(
        ("model", "lowest recompute or other peer", "Ebbtide's lowest", "of that peer's", "floor", "capture adds"),
        (
            (
                row["case"],
                f"{markdown.mib(row['lowest_peer_bytes'])} ({row['lowest_peer']})",
                markdown.mib(row["lowest_bytes"]),
                markdown.ratio(row["of_lowest_peer"]),
                markdown.mib(row["floor_bytes"]),
                f"{100 * (row['captured_over_eager'] - 1):.1f} %",
            )
            for row in rows
            if row["method"] == "all"
        ),
    )
    yield "At the peak of each recompute peer:"
    yield table(
        ("model", "peer", "its peak", "its time", "Ebbtide's time there", "of the peer's", "bits of the peer"),
        figures.at_peers_peaks(rows),
    )
    wrong = [
        (
            row["case"],
            row["method"],
            row.get("error") or _difference(row),
        )
        for row in rows
        if "error" in row or row.get("bits") == "other than eager"
    ]
    if wrong:
        yield "Methods that fail, find no plan, or give other bits than eager:"
        yield table(("model", "method", "what"), wrong)
    for case, name in figures.peer_cases(rows):
        yield _image(name, f"peak against time of every method on {case}")


def _difference(row: Mapping[str, Any]) -> str:
    count, first = row["tensors_that_differ"], row["first_difference"]
    return f"{row['bits']} in {count} tensors, {first} among them, by up to {row['off_by']:.2g} of the largest value"


def _path(result: Result) -> Iterator[str]:
    for case, name in figures.path_cases(result):
        yield _image(name, f"peak against time on {case}")


def _planning(result: Result) -> Iterator[str]:
    yield table(
        ("model", "ops", "budget", "overhead", "bound", "gap in points", "per-block checkpoint"),
        (
            (
                row["case"],
                row["ops"],
                row["budget"],
                markdown.percent(row["overhead_percent"]),
                markdown.percent(row["bound_percent"]),
                f"{row['gap_points']:.3f}",
                markdown.percent(row.get("per_block_percent")),
            )
            for row in result.of("gap")
            if row["budget"] in ("50% of the peak", "1.05 x floor", "1.3 x floor", "per-block checkpointing's peak")
        ),
    )


def _public_suite(result: Result) -> Iterator[str]:
    for question in dict.fromkeys(row["question"] for row in result.rows):
        rows = [row for row in result.of(question) if row["case"] == "all"]
        of_all = next(row for row in rows if row["method"] == "all")
        yield (
            f"{question}: {of_all['models']} models, {of_all['captured']} captured, {of_all['refused']} refused, "
            f"{of_all['wrong_bits']} steps with wrong bits, {of_all['over_budget']} over budget. Geometric means:"
        )
        yield table(
            ("method", "models", "errors", "other bits than eager", "peak of eager's", "time of eager's"),
            (
                (
                    row["method"],
                    row["models"],
                    row["errors"],
                    row.get("not_as_eager"),
                    markdown.ratio(row.get("of_eager_peak")),
                    markdown.ratio(row.get("over_eager_median")),
                )
                for row in rows
                if row["method"] != "all"
            ),
        )


def _counts(result: Result) -> Iterator[str]:
    rows = result.of("counts")
    names = list(dict.fromkeys(name for row in rows for name in row))
    yield table(names, ([_plain(row.get(name)) for name in names] for row in rows))


def _plain(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def _torch(result: Result) -> Iterator[str]:
    yield table(
        ("part", "passed", "failed", "skipped", "seconds"),
        (
            (name, part["passed"], part["failed"], part["skipped"], part["seconds"])
            for name, part in result.data["parts"].items()
        ),
    )


SECTIONS: dict[str, Callable[[Result], Iterator[str]]] = {
    "peers": _peers,
    "path": _path,
    "planning": _planning,
    "public_suite": _public_suite,
    "promises": _counts,
    "trainers": _counts,
    **{f"torch-{release}": _torch for release in ("2.11.0", "2.12.0", "2.13.0", "2.14.1")},
}
