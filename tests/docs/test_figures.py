"""Figures that a page tells in its prose are those of the output or of the results that it speaks of."""

from __future__ import annotations

import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

from pages import ROOT, blocks, prose, read

import ebbtide

README = ROOT / "README.md"
MIB, GIB = 2**20, 2**30


def rows(name: str) -> list[dict[str, Any]]:
    """What ``benchmarks/results/NAME.json`` holds."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert isinstance(found, list)
    return found


def found(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of ``pattern``, which ``text`` has to have."""
    match = re.search(pattern, text)
    assert match is not None, f"nothing is like {pattern}"
    return match.groups()


def test_what_the_readme_says_of_its_first_output() -> None:
    [output] = [block.output for block in blocks(README) if block.language == "python"]
    shown = [
        *found(r"([\d.]+) MiB without", output),
        *found(r" of ([\d.]+) MiB", output),
        *found(r"plan: ([\d.]+) MiB", output),
    ]
    told = found(r"would take (\d+) MiB, has (\d+), and takes (\d+), as predicted", prose(README))
    assert told == tuple(str(round(float(each))) for each in shown)


def test_what_the_readme_says_of_llama() -> None:
    [command] = [block.text.strip() for block in blocks(README) if "llama" in block.text]
    planning = read(ROOT / "docs" / "planning.md")
    output = planning.partition(f"$ {command}\n")[2].partition("```")[0]
    budget, unplanned, overhead, gap = found(
        r"within (\d+) GiB instead of ([\d.]+), at ([\d.]+) % more time, within ([\d.]+) % of the proven least",
        prose(README),
    )
    assert f"--budget {budget}GiB" in command
    assert found(r"([\d.]+) GiB without", output)[0].startswith(unplanned)
    added, least = found(r"adds ([\d.]+) % of time, .* less than ([\d.]+) %", output)
    assert added == overhead
    assert float(added) - float(least) <= float(gap)
    _, usable = found(r"Of the card's (\d+) GiB it calls (\d+) usable", prose(README))
    assert found(r"h100-80gb has (\d+)[\d.]* GiB usable", output) == (usable,)


def test_the_readmes_table_has_the_measured_figures() -> None:
    measured = [row["columns"] for row in rows("path") if row["question"] == "frontier"]
    of_gpt = {row["method"]: row for row in measured if row["case"] == "gpt-24L-d128-b8"}
    named = {
        "eager": "eager",
        "Ebbtide at 50 %": "ebbtide 50%",
        "`torch.utils.checkpoint` around every block": "checkpoint per block",
        "Ebbtide at 9 %": "ebbtide 9%",
    }
    table = re.findall(r"^\| (.+?) \| ([\d.]+) MiB \| ([\d.]+) \|$", prose(README), re.MULTILINE)
    assert [name for name, *_ in table] == list(named)
    for name, peak, times in table:
        row = of_gpt[named[name]]
        assert f"{row['peak_bytes'] / MIB:.1f}" == peak
        assert f"{row['cpu_ratio_median']:.2f}" == times


def test_the_readmes_table_of_the_card_has_the_measured_figures() -> None:
    of_card = {row["columns"]["method"]: row["columns"] for row in rows("gpu/gpt-bfloat16-part")}
    named = {
        "eager": "eager",
        "`torch.utils.checkpoint` around every block": "checkpoint per block",
        "Ebbtide, that budget": "ebbtide, at the peak of checkpoint per block",
    }
    table = re.findall(r"^\| (.+?) \| ([\d.]+) GiB \| ([\d.]+) \|$", prose(README), re.MULTILINE)
    assert [name for name, *_ in table] == list(named)
    for name, peak, times in table:
        row = of_card[named[name]]
        assert (f"{row['peak_bytes'] / GIB:.2f}", f"{row['over_eager']:.2f}") == (peak, times)


def test_what_the_benchmarks_page_says_of_predicted_overheads() -> None:
    plans = [
        row["columns"]
        for row in rows("truth")
        if row["question"] == "overhead" and row["columns"].get("budget", "keep all") != "keep all"
    ]
    [chain] = [each for each in plans if (each["case"], each["budget"]) == ("chain-64, 1 thread", "5%")]
    told = found(
        r"(\d+) of (\d+) overheads within .*? and (\d+) within 6 points\. The other (\d+) were all predicted too high, "
        r".*? added ([\d.]+) %, not ([\d.]+)\.",
        prose(ROOT / "docs" / "benchmarks.md"),
    )
    far = [each["error"] for each in plans if abs(each["error"]) > 0.06]
    assert all(error < 0 for error in far)
    near = sum(each["near"] for each in plans)
    shown = (near, len(plans), len(plans) - len(far), len(far))
    assert told == (*map(str, shown), f"{chain['measured']:.1%}".rstrip("%"), f"{chain['predicted']:.1%}".rstrip("%"))


def test_what_limits_say_of_torchs_own_operators() -> None:
    [summary] = [row["columns"] for row in rows("opinfo") if row["question"] == "summary"]
    told = found(
        r"of the (\d+) operators with gradients .*?, (\d+) have .*?, (\d+) differs .*?, (\d+) are refused .*?"
        r"(\d+) fail in eager itself",
        prose(ROOT / "docs" / "limits.md"),
    )
    assert tuple(map(int, told)) == tuple(
        summary[key] for key in ("ops", "equal", "differs", "refused", "fails_in_eager")
    )


def test_what_the_tutorial_of_adapters_says_of_the_card_is_in_its_plans(tmp_path: Path) -> None:
    page = ROOT / "docs" / "lora.md"
    table = re.findall(r"^\| (as captured|rewritten) \| (.+) \|$", prose(page), re.MULTILINE)
    assert [way for way, _ in table] == ["as captured", "rewritten"]
    for way, told in table:
        name = f"lora-7b-{way.removeprefix('as ')}.json"
        [command] = re.findall(rf"^ebbtide plan (.+) --out {name}$", read(page), re.MULTILINE)
        file = tmp_path / name
        file.write_bytes(lzma.decompress((ROOT / "docs" / "plans" / f"{name}.xz").read_bytes()))
        plan = ebbtide.Plan.load(file)
        sizes = (plan.floor_bytes, plan.budget_bytes, plan.baseline_peak_bytes)
        figures = [
            f"{math.ceil(100 * plan.smallest_bytes / GIB) / 100:.2f} GiB",  # to be asked for, so it is rounded up
            *(f"{each / GIB:.2f} GiB" for each in sizes),
            *(f"{each:.2%}" for each in (plan.overhead, plan.bound)),
        ]
        assert told.split(" | ") == [each.replace("%", " %") for each in figures]
        assert f"--budget {plan.budget_bytes // GIB}GiB" in command
        assert plan.machine is not None
        assert f"--machine {plan.machine.name}" in command
        assert (plan.rewritten is None) == ("--rewrites none" in command)
