"""The page in a real browser: it opens at once, its sums are the plan's, and a reader gets from the chart to a tensor.

Skipped where no browser is installed; what the page holds is checked without one in ``test_page.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, needs_browser
from plans import hybrid, recomputed
from test_page import ODD, html_of

from ebbtide.report.plan import Plan
from ebbtide.report.records.course import planned_course
from ebbtide.report.records.curve import Curve
from ebbtide.report.records.points import Measured
from ebbtide.report.records.stack import Category, stack_of
from ebbtide.units import format_allowed, format_bytes, format_percent, format_seconds, format_share

pytestmark = [needs_browser, pytest.mark.slow]

MOST_SECONDS = 2.0
PLANS: dict[str, Callable[[], Plan]] = {
    "recomputed": lambda: recomputed(12),
    "hybrid": lambda: hybrid(12),
    "large": lambda: recomputed(2000),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with Browser(folder) as opened:
        yield opened


def shown(browser: Browser, folder: Path, plan: Plan, name: str = "page") -> float:
    """Open the page of ``plan``; the seconds until it is ready."""
    path = folder / f"{name}.html"
    path.write_text(html_of(plan, measured=(Measured("planned", plan.predicted_peak_bytes, 0.1),)), encoding="utf-8")
    browser.errors.clear()
    browser.requests.clear()
    seconds = browser.open(path)
    browser.frame()
    assert browser.errors == []
    assert browser.requests == [path.resolve().as_uri()], "the page loads something"
    return seconds


def test_a_measured_step_is_drawn_where_it_ran(browser: Browser, folder: Path) -> None:
    """A run that took the plan's own bytes lies on the chart's upper edge; unplanned was not recorded."""
    plan = recomputed(12)
    levels = [plan.resident_bytes + moment.bytes for moment in planned_course(plan).moments]
    half = planned_course(plan).boundary
    curve = Curve(tuple(levels[:half]), tuple(levels[half:]))  # nearly: all moments hand out about as much
    path = folder / "measured.html"
    path.write_text(html_of(plan, measured=(Measured("planned", max(levels), None, curve),)), encoding="utf-8")
    browser.open(path)
    browser.frame()
    drawn = """(() => {
        const canvas = ebbtide.chart.memory, [r, g, b] = [0x2c, 0x7a, 0x4b];
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
        for (let i = 0; i < data.length; i += 4)
            if (Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 40)
                found.add(Math.floor(i / 4 / canvas.width));
        return found.size;
    })()"""
    rows_of_pixels: dict[tuple[str, str], int] = {}
    for which in ("planned", "unplanned"):
        for axis in ("time", "order"):
            browser(f"ebbtide.chart.choose('{which}', '{axis}')")
            browser.frame()
            rows_of_pixels[which, axis] = browser(drawn)
    few = max(rows_of_pixels["unplanned", axis] for axis in ("time", "order"))  # of the peak's rule and its label
    assert min(rows_of_pixels["planned", axis] for axis in ("time", "order")) > 3 * few, rows_of_pixels


def rows(browser: Browser) -> list[str]:
    found = browser("[...document.querySelectorAll('#body .row')].map(row => row.firstChild.textContent)")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_reader_finds_a_way(name: str, browser: Browser, folder: Path) -> None:
    plan = PLANS[name]()
    # The best of three: another process may have the processor meanwhile.
    assert any(shown(browser, folder, plan, name) < MOST_SECONDS for _ in range(3))
    course = planned_course(plan)

    # What is stacked adds up to the simulator's bytes at every moment, and nothing is negative.
    sums = browser(
        "(c => [...c.bytes.keys()].map(m => c.stack.reduce((sum, each) => sum + each[m], 0)))(ebbtide.plan.planned)"
    )
    assert sums == [plan.resident_bytes + moment.bytes for moment in course.moments]
    assert browser("Math.min(...ebbtide.plan.planned.stack.map(each => Math.min(...each)))") == 0
    stack = stack_of(plan.program, course, plan.resident_bytes)
    assert browser("CATEGORIES.map(each => each[1])") == [category.value for category in Category]
    assert browser("ebbtide.plan.planned.stack.map(each => [...each])") == [each.tolist() for each in stack.values()]

    # The table holds what can be seen and no more, the largest first.
    assert 5 < len(rows(browser)) < 40
    assert browser("document.querySelector('#table').getAttribute('aria-rowcount')") == str(
        len(plan.program.buffers) + 1
    )

    # A row leads to the timeline.
    browser.click("#body .row")
    selected = browser("ebbtide.chart.buffer")
    assert plan.program.buffers[selected].bytes == max(buffer.bytes for buffer in plan.program.buffers)
    assert plan.program.buffers[selected].name in browser("document.querySelector('#detail').textContent")
    lanes = browser("document.querySelector('#lanes').height")
    assert lanes > 20 * (len({moment.lane for moment in course.moments}))

    # The timeline leads to what is in memory there.
    browser.click("#chart", 0.6, 0.5)
    pinned = browser("ebbtide.chart.pinned")
    there = {stay.buffer for stay in course.stays if stay.first <= pinned <= stay.last}
    assert set(browser("ebbtide.table.rows")) == there
    browser("document.querySelector('#count button').click()")
    assert len(browser("ebbtide.table.rows")) == len(plan.program.buffers)

    # Search, decisions and sorting.
    browser("(s => { s.value = 'weight1 blocks'; ebbtide.table.update() })(document.querySelector('#search'))")
    found = [plan.program.buffers[b].name for b in browser("ebbtide.table.rows")]
    assert found
    assert all("weight1" in each for each in found)
    browser("(s => { s.value = ''; ebbtide.table.update() })(document.querySelector('#search'))")
    chip = "moved" if name == "hybrid" else "recomputed"
    browser(f"[...document.querySelectorAll('#chips button')].find(b => b.textContent.startsWith('{chip}')).click()")
    assert {browser(f"ebbtide.plan.decisionOf({b})") for b in browser("ebbtide.table.rows")[:50]} == {chip}
    browser.click("#head [role=columnheader]:nth-child(1) button")
    names = [plan.program.buffers[b].name for b in browser("ebbtide.table.rows")]
    assert names == sorted(names, key=lambda each: int("".join(filter(str.isdigit, each))))
    assert browser.errors == []


def test_the_keyboard_is_enough(browser: Browser, folder: Path) -> None:
    plan = recomputed(12)
    shown(browser, folder, plan)
    course = planned_course(plan)
    browser("document.querySelector('#chart').focus()")
    browser.press("Home", "ArrowRight", "ArrowRight")
    assert browser("document.querySelector('#chart').getAttribute('aria-valuenow')") == "2"
    browser.press("p")
    told = browser("document.querySelector('#chart').getAttribute('aria-valuetext')")
    assert told.startswith(f"Peak: {format_bytes(plan.predicted_peak_bytes)} at ")
    browser.press("Enter")
    assert browser("ebbtide.chart.pinned") == course.peak
    browser.press("Escape")
    assert browser("ebbtide.chart.pinned") is None
    browser("document.querySelector('#body').focus()")
    browser.press("ArrowDown", "ArrowDown")
    assert browser("ebbtide.table.rows.indexOf(ebbtide.table.current)") == 1
    assert browser("document.querySelector('[aria-current=true]') !== null")


def test_dragging_and_buttons_zoom(browser: Browser, folder: Path) -> None:
    shown(browser, folder, recomputed(40))
    browser.drag("#chart", 0.4, 0.6)
    low, high = browser("ebbtide.chart.view")
    assert 0.15 < high - low < 0.3
    assert browser("ebbtide.chart.pinned") is None, "a drag is no click"
    browser.click("#zoom-all")
    assert browser("ebbtide.chart.view") == [0, 1]
    browser.click("#zoom-in")
    assert browser("ebbtide.chart.view[1] - ebbtide.chart.view[0]") == pytest.approx(0.5)


def test_the_unplanned_step_can_be_stacked_too(browser: Browser, folder: Path) -> None:
    plan = hybrid(12)
    shown(browser, folder, plan)
    browser.click("#which button:nth-child(2)")
    assert browser("ebbtide.chart.which") == "unplanned"
    assert format_bytes(plan.baseline_peak_bytes) in browser("document.querySelector('#readout').textContent")
    browser.click("#axis button:nth-child(2)")
    assert browser("ebbtide.chart.axis") == "order"
    assert browser.errors == []


@pytest.mark.parametrize("name", ODD)
def test_an_odd_plan_opens(name: str, browser: Browser, folder: Path) -> None:
    shown(browser, folder, ODD[name])
    browser.click("#chart", 0.5, 0.5)
    if len(ODD[name].program.buffers):
        browser.click("#body .row")
    for key in ("Home", "End", "p", "Enter", "+", "-"):
        browser("document.querySelector('#chart').focus()")
        browser.press(key)
    assert browser.errors == []
    assert "NaN" not in browser("document.body.innerText")
    assert "undefined" not in browser("document.body.innerText")


@pytest.mark.parametrize("width", [360, 768, 1360])
def test_it_fits_phones_and_desks(width: int, browser: Browser, folder: Path) -> None:
    browser.size(width, 800)
    try:
        shown(browser, folder, hybrid(12))
        assert browser("document.documentElement.scrollWidth") <= width
        assert browser("document.querySelector('#memory').clientWidth") > 0.8 * width
        browser.click("#body .row")
        assert browser("document.documentElement.scrollWidth") <= width
    finally:
        browser.size(1280, 900)


def test_light_and_dark_differ(folder: Path, tmp_path: Path) -> None:
    with Browser(tmp_path, dark=True) as dark:
        shown(dark, folder, recomputed(5))
        background = dark("getComputedStyle(document.body).backgroundColor")
        assert sum(json.loads(f"[{background.removeprefix('rgb(').removesuffix(')')}]")) < 150
        assert dark("matchMedia('(prefers-color-scheme: dark)').matches")


def test_numbers_are_written_as_python_writes_them(browser: Browser, folder: Path) -> None:
    shown(browser, folder, recomputed(3))
    sizes = [0, 1, 1023, 1024, 1025, 10 * 2**20, 2**20 - 1, 2**30 - 1, 123456789, 2**40 + 1, 999 * 2**30, 2**53]
    assert browser(f"{sizes}.map(bytesText)") == [format_bytes(each) for each in sizes]
    assert browser(f"{sizes}.map(allowedText)") == [format_allowed(each) for each in sizes]
    shares = [0.0, 0.0325, 1.5, 12.34567]
    assert browser(f"{shares}.map(percentText)") == [format_percent(each) for each in shares]
    seconds = [0.0, 8.3e-4, 0.0124, 3.2149, 1000.0]
    assert browser(f"{seconds}.map(secondsText)") == [format_seconds(each) for each in seconds]
    parts = [(1, 3), (2, 3), (79, 100), (0, 5)]
    pairs = json.dumps(parts)
    assert browser(f"{pairs}.map(([a, b]) => shareText(a, b))") == [format_share(a, b) for a, b in parts]
