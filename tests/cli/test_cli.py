"""The command line: what it prints where, its exit codes, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import time
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import ebbtide
from ebbtide.cli import app
from ebbtide.cli.interruption import KeepBest
from ebbtide.cli.max_batch import _limit
from ebbtide.errors import UsageError
from ebbtide.planners import Progress
from ebbtide.planners.search.smallest import forget_smallest
from ebbtide.report.plan import Plan
from ebbtide.report.text import progress
from ebbtide.report.text.progress import ProgressDisplay
from ebbtide.step.machine import machine_named
from ebbtide.units import format_bytes

# Six ops in a chain and back: small enough that planning takes no time.
CHAIN = {
    "graph": {"name": "chain"},
    "nodes": [{"id": i, "cost_cpu": 1.0 + i, "cost_ram": 100.0, "backward": i > 5} for i in range(12)],
    "links": [{"source": i, "target": i + 1} for i in range(11)]
    + [{"source": i, "target": 11 - i} for i in range(6) if i + 1 < 11 - i],
}
CASES = """
    import torch
    import ebbtide
    from helper import WIDTH
    from ebbtide.zoo import mlp_chain

    def chain(batch: int = 16) -> ebbtide.Case:
        return mlp_chain(batch, layers=8, width=WIDTH)

    def needs_size(batch: int) -> ebbtide.Case:
        return chain(batch)

    def nothing(batch: int = 1) -> None:
        return None

    def fails(batch: int = 1) -> ebbtide.Case:
        raise ZeroDivisionError("the user's own")
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def last_json(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN))
    return path


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 64\n")
    path = tmp_path / "cases.py"
    path.write_text(textwrap.dedent(CASES))
    return path


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"ebbtide {ebbtide.__version__}\n"


@pytest.mark.parametrize(
    "command", ["", "demo", "plan", "compare", "max-batch", "doctor", "report", "show", "machines"]
)
@pytest.mark.parametrize("columns", [60, 80])
def test_no_help_is_cut_off(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = re.sub(r"(?i)\[?\b(args|others)\]?\.\.\.", "", run(*command.split(), "--help").stdout)  # several may follow
    assert "Options:" in shown
    assert "..." not in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("123456", "'123456' has no unit: write '123456B' if bytes are meant"),
        ("0", "'0' is not more than zero"),
        ("-5GiB", "'-5GiB' is not more than zero"),
        ("8G", "write '8GiB'"),
    ],
)
@pytest.mark.parametrize("command", [("plan", "zoo:gpt"), ("max-batch", "zoo:gpt"), ("doctor", "zoo:gpt"), ("demo",)])
def test_a_budget_that_is_none_is_refused_with_what_was_meant(command: tuple[str], budget: str, words: str) -> None:
    result = run(*command, "--budget", budget)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "an int" not in result.stderr
    assert "12GiB" in result.stderr


def test_a_graph_is_planned_and_saved(graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("plan", graph, "--budget", "80%", "--json", "--out", out)
    data = last_json(result)
    loaded = Plan.load(out)
    assert data == json.loads(json.dumps(loaded.summary()))
    assert data["case"] == "chain"
    assert loaded.predicted_peak_bytes <= loaded.budget_bytes == 0.8 * loaded.baseline_peak_bytes
    assert len(result.stdout.splitlines()) == 1, "progress belongs on standard error"
    assert "planning" in result.stderr


def test_a_plan_as_text_says_what_its_status_means(graph: Path) -> None:
    result = run("plan", graph, "--budget", "100%")
    assert result.exit_code == 0
    assert result.stdout.startswith("chain fits as it is: ")
    assert len(result.stdout.splitlines()) <= 3
    result = run("plan", graph, "--budget", "100%", "--verbose")
    assert result.stdout.splitlines()[0].startswith("chain fits as it is: ")
    assert "\nplan for chain by auto: OPTIMAL\n" in result.stdout
    assert ebbtide.Status.OPTIMAL.value in result.stdout


def test_without_a_budget_it_is_what_the_machine_has() -> None:
    data = last_json(run("plan", "zoo:mlp_chain", "--size", 64, "--machine", "t4-16gb", "--json"))
    assert data["budget_bytes"] == machine_named("t4-16gb").usable_bytes
    refused = run("plan", "zoo:mlp_chain", "--size", 64)
    assert refused.exit_code == 2
    assert "--budget 8GiB" in refused.stderr.splitlines()[0]


def test_a_zoo_model_for_a_catalogue_machine() -> None:
    data = last_json(run("plan", "zoo:mlp_chain", "--budget", "70%", "--size", 8192, "--machine", "t4-16gb", "--json"))
    assert data["case"] == "mlp_chain-64L-d64-b8192"
    provenance = data["provenance"]
    assert isinstance(provenance, dict)
    assert provenance["machine"] == "t4-16gb"
    assert provenance["costs"] == "roofline"


def test_a_function_of_a_file_that_imports_its_neighbour(cases: Path) -> None:
    data = last_json(run("plan", f"{cases}:chain", "--budget", "90%", "--size", 256, "--json"))
    assert data["case"] == "mlp_chain-8L-d64-b256"
    provenance = data["provenance"]
    assert isinstance(provenance, dict)
    assert provenance["costs"] == "measured"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["GRAPH", "--budget", "lots"], ["'lots'", "12GiB"]),
        (["GRAPH", "--budget", "80%", "--planner", "nobody"], ["'nobody'", "greedy"]),
        (["GRAPH", "--budget", "1%"], ["Does not fit: ask for", "smallest for which a plan was found"]),
        (["GRAPH", "--budget", "80%", "--machine", "t4-16gb"], ["--machine", "graph file"]),
        (["GRAPH", "--budget", "80%", "--out", "no/such/folder/plan.json"], ["no folder"]),
        (["GRAPH", "--budget", "80%", "--out", "."], ["is a folder"]),
        (["zoo:mlp_chain", "--budget", "80%", "--machine", "abacus"], ["'abacus'", "a100-80gb"]),
        (["zoo:nobody", "--budget", "80%"], ["'nobody'", "mlp_chain"]),
        (["zoo:mlp_chain", "--budget", "80%", "--size", "0"], ["--size 0"]),
        (["nothing", "--budget", "80%"], ["is not a case", "zoo:NAME", "FILE.py:function"]),
        (["missing.py:case", "--budget", "80%"], ["no file missing.py"]),
        (["missing.json", "--budget", "80%"], ["cannot be read"]),
        (["CASES:nobody", "--budget", "80%"], ["'nobody'", "chain, fails, needs_size"]),
        (["CASES:nothing", "--budget", "80%"], ["NoneType", "ebbtide.Case"]),
        (["CASES:needs_size", "--budget", "80%"], ["--size N"]),
        (
            ["CASES:chain", "--budget", "80%", "--tiers", "disk", "--offload-optimizer"],
            ["comes without", "--optimizer"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], words: list[str], graph: Path, cases: Path
) -> None:
    result = run("plan", *(a.replace("GRAPH", str(graph)).replace("CASES", str(cases)) for a in arguments))
    assert result.exit_code == 2
    assert result.stderr.count("ebbtide: ") == 1  # its further lines are indented
    message = result.stderr[result.stderr.index("ebbtide: ") :]
    for word in words:
        assert word in message
    assert not result.stdout


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nodes": []}', '{"schema": "ebbtide-plan/1"}'])
def test_a_damaged_graph_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    result = run("plan", path, "--budget", "80%")
    assert result.exit_code == 2
    assert "ebbtide: " in result.stderr


def test_max_batch_has_the_state_of_no_optimizer_refused(cases: Path) -> None:
    result = run("max-batch", f"{cases}:chain", "--budget", "1MiB", "--tiers", "disk", "--offload-optimizer")
    assert result.exit_code == 2
    assert "comes without" in result.stderr


@pytest.mark.parametrize("command", ["plan", "doctor", "compare", "max-batch"])
def test_an_error_in_the_users_function_is_told_with_its_line(command: str, cases: Path) -> None:
    line = next(i for i, text in enumerate(cases.read_text().splitlines(), 1) if "raise ZeroDivisionError" in text)
    budget = {"compare": "--budgets", "plan": "--budget"}.get(command, "--budget")
    result = run(command, f"{cases}:fails", budget, "1MiB")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"ebbtide: {cases}:{line}: ZeroDivisionError: the user's own"
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import nothing_of_this_name\n", 1),
        ("x = 1\ndef broken(:\n", 2),
        ("x = 1\n\n1 / 0\n", 3),
        (
            "import torch, ebbtide\ndef case():\n    return ebbtide.Case(torch.nn.ReLU(), (torch.ones(-3),))\n",
            3,
        ),
    ],
)
def test_an_error_in_the_users_file_is_told_with_its_line(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    result = run("plan", f"{path}:case", "--budget", "80%")
    assert result.exit_code == 2
    assert f"ebbtide: {path}:{line}: " in result.stderr
    assert "Traceback" not in result.output


def test_demo_refuses_too_few_steps_and_a_bad_budget() -> None:
    assert "--steps 2" in run("demo", "--steps", 2).stderr
    result = run("demo", "--budget", "half")
    assert result.exit_code == 2
    assert "'half'" in result.stderr


# -- Ctrl-C -------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_best_and_a_second_one_aborts() -> None:
    told: list[Progress] = []
    with KeepBest(told.append) as keeper:
        keeper.tell(Progress("search", best_overhead=0.5))
        os.kill(os.getpid(), signal.SIGINT)
        assert keeper.interrupt.interrupted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert told == [Progress("search", best_overhead=0.5)]


def test_ctrl_c_aborts_while_there_is_nothing_to_keep() -> None:
    with KeepBest(lambda _: None) as keeper:
        keeper.tell(Progress("search"))
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert not keeper.interrupt.interrupted


def test_the_time_limit_counts_from_the_planner_on() -> None:
    keeper = KeepBest(lambda _: None, time_limit_seconds=0.0)
    assert not keeper.interrupt
    keeper.tell(Progress("search"))
    assert keeper.interrupt.expired


def test_a_plan_interrupted_by_ctrl_c_is_printed(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as the planner has found something: it has to stop, and what it found has to come out."""

    class Impatient(KeepBest):
        def tell(self, progress: Progress) -> None:
            super().tell(progress)
            if progress.best_overhead is not None and not self.interrupt.interrupted:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.modules["ebbtide.cli.plan"], "KeepBest", Impatient)
    data = last_json(run("plan", graph, "--budget", "80%", "--planner", "greedy", "--json"))
    assert data["status"] == "TIME_LIMIT"


def test_ctrl_c_while_the_smallest_budget_is_looked_for_says_what_is_known(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the refusal, which says the smallest so far: here before the planner was asked at all."""
    told: list[int] = []

    class Impatient(KeepBest):
        def tell(self, progress: Progress) -> None:
            super().tell(progress)
            told.extend(filter(None, [progress.smallest_bytes]))
            if progress.smallest_bytes is not None and not self.interrupt.interrupted:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.modules["ebbtide.cli.plan"], "KeepBest", Impatient)
    forget_smallest()
    result = run("plan", graph, "--budget", "1B", "--planner", "greedy")
    assert result.exit_code == 2
    assert re.search(rf"smallest for which a plan was found +{format_bytes(told[-1])} +{told[-1]} bytes", result.stderr)
    assert "The search was interrupted: a longer one may find a plan within less" in result.stderr


def test_ctrl_c_before_there_is_anything_says_what_it_ended(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Impatient(KeepBest):
        def tell(self, progress: Progress) -> None:
            super().tell(progress)
            told.append(str(progress))
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.modules["ebbtide.cli.plan"], "KeepBest", Impatient)
    result = run("plan", graph, "--budget", "60%")
    assert result.exit_code == 130
    ended = result.stderr.splitlines()[-1]
    assert ended == f"ebbtide: stopped by Ctrl-C at this: {told[-1]}; there is no result yet"


def test_a_search_for_a_batch_that_is_interrupted_gives_one_that_fits(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(KeepBest):
        def tell(self, progress: Progress) -> None:
            super().tell(progress)
            if progress.best_overhead is not None and not self.interrupt.interrupted:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.modules["ebbtide.cli.max_batch"], "KeepBest", Impatient)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a case's folder is added to it
    result = run("max-batch", f"{cases}:chain", "--budget", "400KiB", "--effort", "50", "--json")
    data = last_json(result)
    assert isinstance(data["batch"], int)
    assert data["batch"] > 0
    assert data["plan"]["predicted_peak_bytes"] <= 400 * 1024  # type: ignore[index]
    assert "stopped by Ctrl-C" in result.stderr


def test_the_batch_of_an_interrupted_search_is_the_largest_that_was_told_to_fit(
    cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    class Impatient(KeepBest):
        def tell(self, progress: Progress) -> None:
            super().tell(progress)
            if (found := re.fullmatch(r"batch (\d+) fits", progress.stage)) and (progress.best_overhead or 0) > 0:
                told.append(int(found[1]))
                if not self.interrupt.interrupted:
                    os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sys.modules["ebbtide.cli.max_batch"], "KeepBest", Impatient)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = run("max-batch", f"{cases}:chain", "--budget", "400KiB", "--effort", "50", "--json")
    data = last_json(result)
    assert told, "some batch needs recomputation"
    assert data["batch"] == told[0]
    assert data["batch"] > data["unplanned_batch"]  # type: ignore[operator]
    assert data["plan"]["predicted_peak_bytes"] <= 400 * 1024  # type: ignore[index]
    assert "stopped by Ctrl-C" in result.stderr


# -- progress -----------------------------------------------------------------------------------------------


def test_progress_in_words() -> None:
    assert str(Progress("greedy")) == "greedy"
    assert str(Progress("looking", smallest_bytes=1537)) == "looking: smallest so far 1.51 KiB"
    known = str(Progress("local search", best_overhead=0.25, bound=0.1))
    assert known == "local search: best overhead 25.00 %, bound 10.00 %, gap 15.00 %"


def test_plain_progress_is_a_line_per_stage_and_few_of_what_a_planner_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    with ProgressDisplay(stream) as display:
        display.stage("capturing")
        display(Progress("greedy", 0.3))
        display.stage("planning")
        monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
        for overhead in (0.2, 0.2, 0.1):
            display(Progress("greedy", overhead))
    assert [line.split("s  ")[1] for line in stream.getvalue().splitlines()] == [
        "capturing",
        "planning",
        "greedy: best overhead 20.00 %",
        "greedy: best overhead 10.00 %",
    ]


def test_progress_on_a_terminal_changes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay(terminal) as display:
        display.stage("capturing")
        display(Progress("greedy", 0.3))
        time.sleep(0.3)  # rich redraws 12.5 times a second
    assert "greedy: best overhead 30.00 %" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()


@pytest.mark.parametrize(
    ("overhead", "words"), [("20", "write 20% if that is meant"), ("lots", "accepted: one-forward")]
)
def test_a_limit_of_overhead_that_is_none_is_refused(overhead: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        _limit(overhead)


def test_limits_of_overhead() -> None:
    assert [_limit(each) for each in ("any", "one-forward", "20%", "0.2", "150%")] == [
        None,
        "one-forward",
        0.2,
        0.2,
        1.5,
    ]
