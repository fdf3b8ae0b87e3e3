"""What makes the command line kind: suggested commands, sizes of the zoo, what is kept on Ctrl-C, time that ticks."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_commands import Ended, run_commands
from typer.testing import CliRunner, Result

import ebbtide
from ebbtide._api.estimate import AheadStep
from ebbtide.case import Case
from ebbtide.cli import app
from ebbtide.cli.imports import import_large
from ebbtide.cli.options import OPTIONS, help_of, several_tiers
from ebbtide.cli.refusals import in_words
from ebbtide.errors import BudgetError, UsageError
from ebbtide.options import Options, texts
from ebbtide.planners import Progress
from ebbtide.report.text.progress import ProgressDisplay
from ebbtide.zoo import build, mlp_chain, sizes_of


class Tokens(torch.nn.Module):
    """A head that is most of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(2048, 16), torch.nn.Linear(16, 2048, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.words(tokens)).flatten(0, 1), tokens.flatten())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    nodes = [{"id": i, "cost_cpu": 1.0 + i, "cost_ram": 100.0, "backward": i > 5} for i in range(12)]
    links = [{"source": i, "target": i + 1} for i in range(11)]
    links += [{"source": i, "target": 11 - i} for i in range(5)]
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({"graph": {"name": "chain"}, "nodes": nodes, "links": links}))
    return path


# -- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "ADAMW", "adamw"])
def test_an_optimizer_is_named_as_its_class_as_well(name: str) -> None:
    told = run("plan", "zoo:mlp_chain", "--size", 2, "--layers", 1, "--budget", "100%", "--optimizer", name, "--json")
    assert json.loads(told.stdout)["provenance"]["optimizer"] == "AdamW"


def test_no_tiers_can_be_said(graph: Path) -> None:
    assert run("plan", graph, "--budget", "100%", "--tiers", "none", "--effort", 5).exit_code == 0
    assert several_tiers("none") is several_tiers(None) is None


@pytest.mark.parametrize(("option", "name"), [("--report", "page.png"), ("--report", "page"), ("--out", "plan.html")])
def test_a_file_is_what_its_name_says(option: str, name: str, graph: Path, tmp_path: Path) -> None:
    refused = run("plan", graph, "--budget", "100%", option, tmp_path / name)
    assert refused.exit_code == 2
    assert "FILE.html" in refused.stderr
    assert not (tmp_path / name).exists()


def test_a_small_whole_number_may_be_meant_as_a_share() -> None:
    case = mlp_chain(2, layers=1)
    with pytest.raises(BudgetError, match="'60%'"):
        ebbtide.plan(case.model, case.args, budget=60, options=ebbtide.Options(progress=None))
    with pytest.raises(UsageError, match=r"Plan\.load"):
        ebbtide.fit(case.model, "chain.json")


def test_what_is_told_of_another_program_is_over_the_captured_step() -> None:
    said: list[Progress] = []
    tokens = torch.arange(512).remainder(2048)[None]
    plan = ebbtide.plan(Tokens(), (tokens,), budget="45%", options=ebbtide.Options(effort=20, progress=said.append))
    assert plan.rewritten is not None
    of_others = [each for each in said if "linear-cross-entropy" in each.stage and each.stage.startswith("planned")]
    assert any(each.best_overhead == pytest.approx(plan.overhead) for each in of_others)


# -- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [["--budget", "150B"], ["--budget=150B"]])
def test_a_refused_budget_suggests_a_command_that_works(form: list[str], graph: Path) -> None:
    refused = run("plan", graph, *form, "--effort", "50")
    assert refused.exit_code == 2
    lines = refused.stderr.splitlines()
    assert len([line for line in lines if line.startswith("ebbtide:")]) == 1
    program, *words = shlex.split(lines[-1].removeprefix("  try: "))
    assert program == "ebbtide"
    assert words[:2] == ["plan", str(graph)]
    assert run(*words).exit_code == 0


def test_a_refusal_is_told_in_lines() -> None:
    error = BudgetError(
        "no plan was found",
        remedy='ask for 2048 bytes (of a fitted model: ebbtide.set_budget); step="inside" keeps no gradients',
        figures="  budget  1.50 KiB  1536 bytes",
        budget_bytes=1536,
        floor_bytes=0,
        smallest_bytes=2048,
        resident_bytes=0,
        pinned_by="nothing",
    )
    assert in_words(error, ["doctor", "zoo:gpt"]).splitlines() == [
        "ebbtide: Does not fit: ask for 2048 bytes; --step inside keeps no gradients.",
        "Why: no plan was found.",
        "  budget  1.50 KiB  1536 bytes",
        "  try: ebbtide doctor zoo:gpt --budget 2048B",
    ]
    assert in_words(error, ["compare", "a b.json", "--budgets", "80%,60%"]).endswith(
        "compare 'a b.json' --budgets 2048B"
    )
    assert in_words(UsageError("no. Never"), ["plan"]) == "ebbtide: no. Never"
    inside = UsageError('fit(model, budget, optimizer=optimizer, step="inside", options=ebbtide.Options(max_norm=1.0))')
    assert in_words(inside, ["plan"]) == "ebbtide: --optimizer adamw --step inside --max-norm 1.0"


def test_the_text_of_an_option_is_the_first_sentence_of_its_field() -> None:
    assert texts().keys() == {each.name for each in dataclasses.fields(Options)}
    for name in OPTIONS:
        sentence = texts()[name].partition("\n\n")[0]
        assert sentence.endswith("."), name
        assert help_of(name).startswith(f"{sentence[0].lower()}{sentence[1:15]}"), name
        assert "`" not in help_of(name)


@pytest.mark.parametrize(
    ("name", "command"), [("sweep", "ebbtide compare"), ("fit", "ebbtide plan"), ("explain", "ebbtide show")]
)
def test_functions_that_are_no_commands_say_which_one_does_that(name: str, command: str) -> None:
    done = CliRunner().invoke(app, [name, "zoo:gpt"])
    assert done.exit_code == 2
    assert f"No such command '{name}'" in done.output
    assert command in done.output


@pytest.mark.parametrize("budget", ["60", "12.5"])
def test_a_bare_number_gets_a_suggestion(budget: str) -> None:
    result = run("plan", "zoo:gpt", "--budget", budget)
    assert f"write '{budget}%' for a share of the unplanned peak, '{budget}GiB' for bytes" in result.stderr


# -- sizes of the zoo ------------------------------------------------------------------------------------------


def test_models_of_the_zoo_take_their_sizes() -> None:
    result = run(
        "plan", "zoo:mlp_chain", "--size", 64, "--layers", 3, "--budget", "100%", "--machine", "t4-16gb", "--json"
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["case"].startswith("mlp_chain-3L-")
    assert "image" in sizes_of("unet")
    assert build("unet", 1, image=64).args[0].shape[-2:] == (64, 64)
    refused = run("plan", "zoo:mlp_chain", "--image", 64, "--budget", "100%")
    assert refused.exit_code == 2
    assert "zoo:mlp_chain has no image to choose; it takes: batch, layers" in refused.stderr


@pytest.mark.parametrize(
    "command", [("plan", "--budget", "1GB"), ("compare",), ("doctor",), ("max-batch", "--budget", "1GB")]
)
def test_sizes_are_of_the_zoo_alone(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text("def case(batch=1): ...")
    name, *options = command
    result = run(name, f"{tmp_path / 'case.py'}:case", *options, "--layers", 3)
    assert result.exit_code == 2
    assert "--layers is for zoo:NAME" in result.stderr


def test_what_is_to_be_found_is_not_given() -> None:
    result = run("max-batch", "zoo:mlp_chain", "--budget", "1GB", "--vary", "layers", "--layers", 3)
    assert result.exit_code == 2
    assert "--layers is what is to be found" in result.stderr


# -- max-batch -------------------------------------------------------------------------------------------------


def tiny(batch: int) -> Case:
    return mlp_chain(batch, layers=2, width=16)


@pytest.mark.parametrize("limit", [1, 3, 40])
def test_a_size_that_cannot_be_made_keeps_the_smaller_ones(limit: int) -> None:
    def make(batch: int) -> Case:
        if batch > limit:
            raise ValueError(f"no more than {limit} rows")
        return tiny(batch)

    found = ebbtide.max_batch(make, budget="1MiB", options=ebbtide.Options(effort=50, progress=None))
    assert found.batch == limit
    assert found.unplanned_batch <= limit
    assert dict(found.captured)[limit]
    assert found.failed
    assert all(size > limit and why == f"ValueError: no more than {limit} rows" for size, why in found.failed)
    assert not {size for size, _ in found.failed} & {size for size, _ in found.captured}


def test_what_cannot_be_made_at_all_is_the_callers_error() -> None:
    def make(batch: int) -> Case:
        raise ValueError("never")

    with pytest.raises(ValueError, match="never"):
        ebbtide.max_batch(make, budget="1MiB", options=ebbtide.Options(effort=50, progress=None))


def test_each_size_that_was_tried_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from ebbtide.zoo import mlp_chain\n"
        "def case(batch: int):\n"
        "    if batch > 20:\n"
        "        raise ValueError('no more rows')\n"
        "    return mlp_chain(batch, layers=2, width=16)\n"
    )
    result = run("max-batch", f"{tmp_path / 'mine.py'}:case", "--budget", "1MiB", "--effort", 50)
    assert result.exit_code == 0, result.stderr
    assert "at an overhead of at most 100.00 %: 20, unplanned 20" in result.stdout
    assert "20 fits" in next(line for line in result.stdout.splitlines() if line.startswith("  tried "))
    assert ": ValueError: no more rows" in result.stdout


# -- Ctrl-C ----------------------------------------------------------------------------------------------------


def test_a_comparison_keeps_what_it_has(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AheadStep.frontier

    def cut_off(self: AheadStep, *arguments: Any) -> Iterator[object]:
        yield next(iter(whole(self, *arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(AheadStep, "frontier", cut_off)
    result = run("compare", graph, "--budgets", "100%,90%", "--planners", "auto", "--json")
    assert result.exit_code == 130
    assert "this is what 1 of 2 plans give" in result.stderr
    assert len(json.loads(result.stdout)) == 1


def test_an_import_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "large_package.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            import_large("large_package")
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.modules.pop("large_package").whole
    assert "packages are being imported" in capfd.readouterr().err


def test_elapsed_time_ticks_while_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay(terminal) as display:
        display.stage("capturing")
        time.sleep(1.4)
    assert len(set(re.findall(r"capturing \((\d+) s\)", terminal.getvalue()))) > 1


REFUSED = [
    ("plan zoo:mlp_chain --budget 60% --step inside", "--optimizer adamw --step inside"),
    ("plan zoo:mlp_chain --budget 60% --max-norm 1", "give --step inside and --optimizer besides"),
    ("plan zoo:mlp_chain --budget 60% --tiers foo", "or none for no movement"),
    ("max-batch zoo:mlp_chain --budget 1MiB --overhead -1", "one-forward, or any"),
    ("max-batch zoo:mlp_chain --budget 60%", "for example --budget 16GiB"),
    ("plan zoo:gpt2 --budget 60%", "did you mean 'gpt2_small' or 'gpt2_xl'?"),
    ("doctor zoo:mlp_chain --planner greedy", "give --budget 60% besides"),
    ("compare zoo:mlp_chain --budgets ,", "--budgets names none"),
]
NO_SHARE = "max-batch zoo:gpt --budget 60"


@pytest.fixture(scope="module")
def refusals() -> dict[str, Ended]:
    """How the commands of :data:`REFUSED` end, and :data:`NO_SHARE`."""
    commands = [*(words for words, _ in REFUSED), NO_SHARE]
    ended = run_commands([each.split() for each in commands], before=("torch", "ebbtide.zoo"))
    return dict(zip(commands, ended, strict=True))


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_refusals_are_in_the_words_of_commands(words: str, said: str, refusals: dict[str, Ended]) -> None:
    ended = refusals[words]
    assert ended.status == 2
    assert said in ended.errors
    assert '="' not in ended.errors
    assert "None" not in ended.errors


def test_no_share_is_advised_where_none_is_taken(refusals: dict[str, Ended]) -> None:
    assert "'60GiB' for bytes" in refusals[NO_SHARE].errors
    assert "%" not in refusals[NO_SHARE].errors
