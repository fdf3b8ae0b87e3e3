"""``ebbtide machines``: the catalogue as a table, one machine with its sources, and the machine at hand."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ebbtide.cli import app
from ebbtide.step import machine as machines
from ebbtide.step.machine import Machine, catalogue, keep_machine, machine_named, measured_on
from ebbtide.units import format_allowed

DAY = datetime.date(2026, 3, 1)


@pytest.fixture(autouse=True)
def _no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machines, "cache_directory", lambda: tmp_path)


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["machines", *arguments])
    assert result.exit_code == code, result.output
    return result


def measure_here() -> Machine:
    """The machine at hand as if it had been measured on :data:`DAY`."""
    default = catalogue()["cpu"]
    flops = {"float32": 1.25e12, "bfloat16": 2.5e12}
    source = "ebbtide calibrate, 4 threads"
    machine = replace(default, flops=flops, bytes_per_second=20e9, sources={**default.sources, "flops": source})
    path = keep_machine(machine)
    assert path is not None
    noon = datetime.datetime.combine(DAY, datetime.time(12)).timestamp()
    os.utime(path, (noon, noon))
    return machine


def test_the_table_has_a_row_for_every_card_under_its_heading() -> None:
    heading, *lines = run().stdout.splitlines()
    assert heading.split() == ["machine", "usable", "float32", "bfloat16", "memory", "host"]
    cards = [each for each in catalogue().values() if each.device == "cuda"]
    rows = lines[: len(cards)]
    assert [row.split()[0] for row in rows] == [each.name for each in cards]
    ends = [heading.index(column) + len(column) for column in heading.split()[1:]]
    for row, card in zip(rows, cards, strict=True):
        starts = [len(card.name), *ends]
        cells = [row[start:end].strip() for start, end in zip(starts, ends, strict=False)]
        assert cells[0] == format_allowed(card.usable_bytes)
        assert float(cells[1]) == pytest.approx(card.flops["float32"] / 1e12, rel=1e-3)
        assert float(cells[2] or cells[1]) == pytest.approx(card.flops_for("bfloat16") / 1e12, rel=1e-3)
        assert bool(cells[2]) == ("bfloat16" in card.flops)
        assert float(cells[3]) == card.bytes_per_second / 1e9
        assert float(cells[4]) == card.links["host"].out_bytes_per_second / 1e9
    for word in ("usable", "TFLOPS", "GB/s"):
        assert word in " ".join(lines[len(cards) : -1])
    assert all(len(line) <= 88 for line in lines[:-1])


def test_the_last_line_is_the_machine_at_hand() -> None:
    assert measured_on() is None
    assert run().stdout.splitlines()[-1] == (
        "cpu: 0.05 TFLOPS in float32, 10 GB/s of the memory; the default, until ebbtide calibrate measures it"
    )
    measure_here()
    assert measured_on() == DAY
    assert run().stdout.splitlines()[-1] == (
        "cpu: 1.25 TFLOPS in float32, 2.5 TFLOPS in bfloat16, 20 GB/s of the memory; measured here on 2026-03-01"
    )


@pytest.mark.parametrize("name", [name for name in catalogue() if name != "cpu"])
def test_a_machine_is_told_with_the_source_of_every_figure(name: str) -> None:
    title, *rows = run(name).stdout.splitlines()
    assert title == name
    [usable] = [row for row in rows if row.split()[0] == "usable"]
    assert format_allowed(machine_named(name).usable_bytes) in usable
    told = [row for row in rows if row is not usable]
    sources = machine_named(name).sources
    assert sorted(source for source in sources.values() for row in told if row.endswith(f"  {source}")) == sorted(
        sources.values()
    )
    assert len(told) == len(sources)


def test_the_figures_of_one_machine_are_in_words_of_people() -> None:
    text = " ".join(run("gb200-186gb").stdout.split())
    for words in (
        "capability 10.0 NVIDIA",
        "memory 184.30 GiB",
        "context 768.00 MiB",
        "fragments 5.00 %",
        "arithmetic 80 TFLOPS in float32, 2500 TFLOPS in float16 and bfloat16 NVIDIA",
        "bandwidth 8000 GB/s",
        "least op 4 us",
        "block 512 B",
        "host 102.4 GB/s each way estimate",
        "10 us a copy",
        "holds 223.51 GiB",
    ):
        assert words in text


def test_the_machine_at_hand_is_told_as_it_was_measured() -> None:
    title, *rows = run("cpu").stdout.splitlines()
    assert title == "cpu: the default, until ebbtide calibrate measures it"
    assert len(rows) == len(catalogue()["cpu"].sources)
    measure_here()
    title, *rows = run("cpu").stdout.splitlines()
    assert title == "cpu: measured here on 2026-03-01"
    assert [row for row in rows if row.endswith("2.5 TFLOPS in bfloat16  ebbtide calibrate, 4 threads")]


def test_json_is_one_object() -> None:
    result = run("--json")
    assert len(result.stdout.splitlines()) == 1
    data = json.loads(result.stdout)
    assert set(data) == {"machines"}
    assert [each["name"] for each in data["machines"]] == list(catalogue())
    for each in data["machines"]:
        machine = machine_named(each["name"])
        assert Machine.from_json(each) == machine
        assert each["usable_bytes"] == (machine.usable_bytes or None)
        assert each["measured_on"] is None
    assert json.loads(run("t4-16gb", "--json").stdout) in data["machines"]


def test_json_says_when_the_machine_at_hand_was_measured() -> None:
    measured = measure_here()
    data = json.loads(run("cpu", "--json").stdout)
    assert data["measured_on"] == "2026-03-01"
    assert Machine.from_json(data) == measured
    assert json.loads(run("t4-16gb", "--json").stdout)["measured_on"] is None


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    result = run("rtx4080-16", code=2)
    assert "machine 'rtx4080-16' is not in the catalogue" in result.stderr
    assert "gb200-186gb" in result.stderr
    assert "did you mean 'rtx4080-16gb'" in result.stderr
    assert result.stdout == ""
