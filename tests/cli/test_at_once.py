"""Help, the version and refusals come at once: nobody waits for torch to be told of a typing error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from forked_commands import Ended, run_commands
from typer.testing import CliRunner, Result

from ebbtide.cli import app
from ebbtide.cli.optimizers import OPTIMIZERS
from ebbtide.names import ZOO
from ebbtide.zoo import MODELS, PRESETS

AT_ONCE: list[tuple[list[str], int, str]] = [
    (["--help"], 0, "max-batch"),
    (["-h"], 0, "max-batch"),
    (["--version"], 0, "ebbtide "),
    *(
        ([command, "-h"], 0, "--help")
        for command in ("demo", "plan", "compare", "max-batch", "doctor", "report", "show", "machines")
    ),
    (["machines"], 0, "a100-80gb"),
    (["machines", "a100-80gb"], 0, "NVIDIA A100 datasheet"),
    (["machines", "a100-80gb", "--json"], 0, '"name": "a100-80gb"'),
    (["machines", "a100-80g"], 2, "did you mean 'a100-80gb'"),
    (["show", "nobody.json"], 2, "there is no file nobody.json"),
    (["report", "nobody.json"], 2, "ebbtide plan"),
    (["report", "nobody.json", "--out", "nowhere/page.html"], 2, "no folder nowhere"),
    (["plan", "zoo:gpt", "--bugdet", "1GB"], 2, "--budget"),
    (["plna", "zoo:gpt"], 2, "plna"),
    (["plan", "zoo:gpt", "--budget", "lots"], 2, "12GiB"),
    (["plan", "zoo:gtp", "--budget", "1GB"], 2, "did you mean 'gpt'"),
    (["plan", "nobody.py:f", "--budget", "1GB"], 2, "no file nobody.py"),
    (["plan", "hf:nobody.json", "--budget", "1GB"], 2, "no file or folder nobody.json"),
    (["plan", "hf:nobody/model", "--budget", "1GB"], 2, "nothing is downloaded"),
    (["plan", "zoo:gpt", "--dtype", "f16", "--budget", "1GB"], 2, "none of float32, bfloat16, float16"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--planner", "atuo"], 2, "did you mean 'auto'"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--machine", "a100-80g"], 2, "did you mean 'a100-80gb'"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--optimizer", "sdg"], 2, "did you mean 'sgd'"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--gradients", "al"], 2, "did you mean 'all'"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--effort", "0"], 2, "--effort 0"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--time-limit", "nan"], 2, "--time-limit nan"),
    (["plan", "zoo:gpt", "--budget", "1GB", "--seed", "-1"], 2, "--seed -1"),
    (["compare", "zoo:gpt", "--planners", "auto,atuo"], 2, "did you mean 'auto'"),
    (["compare", "zoo:gpt", "--budgets", "80%,lots"], 2, "'lots'"),
    (["compare", "zoo:gpt", "--effort", "-5"], 2, "--effort -5"),
    (["max-batch", "zoo:gpt", "--budget", "lots"], 2, "'lots'"),
    (["max-batch", "zoo:gpt", "--budget", "1GB", "--overhead", "lots"], 2, "one-forward"),
    (["max-batch", "zoo:gpt", "--budget", "1GB", "--seed", "x"], 2, "--seed"),
    (["doctor", "zoo:gtp"], 2, "did you mean 'gpt'"),
    (["doctor", "zoo:gpt", "--budget", "half"], 2, "'half'"),
    (["demo", "--budget", "half"], 2, "'half'"),
    *(
        ([command, "zoo:gpt", option, "1GB", "--offload-optimizer"], 2, "needs a tier")
        for command, option in (("plan", "--budget"), ("max-batch", "--budget"), ("compare", "--budgets"))
    ),
    (["doctor", "zoo:gpt", "--offload-optimizer"], 2, "needs a tier"),
]
HEAVY = ("torch", "numpy", "numba", "highspy")


@pytest.fixture(scope="module")
def answers() -> dict[str, Ended]:
    """What every command of :data:`AT_ONCE` does."""
    commands = [arguments for arguments, _, _ in AT_ONCE]
    ended = run_commands(commands, watched=HEAVY)
    return {str(arguments): each for arguments, each in zip(commands, ended, strict=True)}


@pytest.mark.parametrize(("arguments", "code", "words"), AT_ONCE, ids=lambda value: str(value))
def test_it_comes_without_torch(arguments: list[str], code: int, words: str, answers: dict[str, Ended]) -> None:
    ended = answers[str(arguments)]
    assert ended.status == code, ended.errors
    assert words in (ended.output if code == 0 else " ".join(ended.errors.splitlines()))
    assert ended.imported == [], "what takes seconds to import"
    assert "Traceback" not in ended.errors


def test_the_script_ends_with_the_status_of_its_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ebbtide.cli", "plna"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "plna" in done.stderr


# Runs the script, and presses Ctrl-C as soon as the module that is named begins to be imported.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == WANTED:
            os.kill(os.getpid(), signal.SIGINT)
WANTED = sys.argv.pop()
sys.meta_path.insert(0, Presses())
from ebbtide.cli import main
main()
"""


@pytest.mark.parametrize("module", ["ebbtide.cli.commands", "typer", "ebbtide.options", "ebbtide.step.plan"])
def test_ctrl_c_is_answered_in_one_line_while_it_imports(module: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    command = [sys.executable, "-c", INTERRUPTED, "show", "plan.json", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        130,
        "ebbtide: stopped by Ctrl-C while it started; there is no result yet\n",
    )


def complete(words: str, shell: str = "bash") -> list[str]:
    environment = {
        **os.environ,
        "_EBBTIDE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide.cli"], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_values() -> None:
    assert complete("ebbtide pl") == ["plan"]
    assert complete("ebbtide plan --pla") == ["--planner"]
    assert complete("ebbtide plan --planner gre") == ["greedy"]
    assert complete("ebbtide plan --machine a100") == ["a100-40gb", "a100-80gb"]
    assert complete("ebbtide machines rtx50") == ["rtx5090-32gb"]
    assert complete("ebbtide plan zoo:mlp") == ["zoo:mlp_chain"]
    assert complete("ebbtide plan hf") == ["hf:"]
    assert complete("ebbtide plan --dtype b") == ["bfloat16"]
    assert complete("ebbtide doctor --optimizer adamw") == ["adamw"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_and_installed(shell: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "ebbtide.cli"]
    shown = subprocess.run([*command, "--show-completion", shell], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "_EBBTIDE_COMPLETE" in shown.stdout
    installed = subprocess.run(
        [*command, "--install-completion", shell], env=environment, capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("_EBBTIDE_COMPLETE" in path.read_text() for path in files)


def test_the_zoos_names_are_those_it_has() -> None:
    assert sorted([*MODELS, *PRESETS]) == sorted(ZOO)


# -- what the options of commands do -------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_every_optimizer_that_can_be_named_is_torchs() -> None:
    for kind, settings in OPTIMIZERS.values():
        made = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(2, 2))], **settings)
        assert isinstance(made, torch.optim.Optimizer)


CASE = """
    import torch, ebbtide
    from ebbtide.zoo import mlp_chain

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(8, 300)

        def forward(self, x):
            return self.head(x)

    def with_adam(batch: int = 16):
        case = mlp_chain(batch, layers=4, width=32)
        return ebbtide.Case(case.model, case.args, optimizer=torch.optim.Adam(case.model.parameters()))

    def with_loss(batch: int = 16):
        return ebbtide.Case(Scores(), (torch.zeros(batch, 8),), loss=lambda y: y.square().mean(), gradients="all")
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "at_once_cases.py"
    path.write_text(textwrap.dedent(CASE))
    return path


def test_an_optimizer_is_named_or_the_cases_own(cases: Path) -> None:
    def resident(*more: object) -> int:
        return int(
            str(as_json("plan", f"{cases}:with_adam", "--budget", "1GiB", "--effort", 1, *more)["resident_bytes"])
        )

    own, none, momentum = resident(), resident("--optimizer", "sgd"), resident("--optimizer", "sgd-momentum")
    assert resident("--optimizer", "none") == none, "whatever the case has"
    parameters = 4 * (4 * (32 * 32 + 32))
    assert momentum - none == parameters
    assert own - none == 2 * parameters + 4 * 8  # two moments, and the count of steps of each of 8 parameters


def test_every_text_says_what_is_counted(cases: Path) -> None:
    with_adam = run("plan", f"{cases}:with_adam", "--budget", "1GiB", "--effort", 1, "--verbose").stdout
    counted = "parameters, buffers, gradients, arguments, state of Adam, what optimizer.step() takes while it runs\n"
    assert f"  counted    {counted}" in with_adam
    without = run("plan", f"{cases}:with_adam", "--budget", "1GiB", "--effort", 1, "--optimizer", "none", "-v").stdout
    assert "arguments; not optimizer state (none was given), what optimizer.step() takes while it runs" in without
    doctor = run("doctor", f"{cases}:with_adam", "--machine", "t4-16gb").stdout
    assert f"  counted    {counted}" in doctor
    assert "  memory     unplanned: t4-16gb has 14.73 GiB, 13.28 GiB usable, " in doctor


def test_the_doctor_takes_the_cases_loss_and_a_budget(cases: Path) -> None:
    found = as_json("doctor", f"{cases}:with_loss", "--budget", "100%", "--optimizer", "adamw", "--effort", 5)
    assert found["loss_outside"] is False
    assert found["overhead"] == 0.0 or found["overhead"] is None
    text = run("doctor", f"{cases}:with_loss", "--budget", "1GiB")
    assert "  budget     1.00 GiB" in text.stdout


def test_seeds_and_efforts_reach_the_planner(cases: Path) -> None:
    made = as_json("plan", f"{cases}:with_adam", "--budget", "1GiB", "--effort", 7, "--seed", 3, "--time-limit", 60)
    provenance = made["provenance"]
    assert isinstance(provenance, dict)
    assert (provenance["effort"], provenance["seed"]) == ("7", "3")


def test_a_graph_file_has_no_use_for_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("{}")
    for option, value in (("--optimizer", "adam"), ("--gradients", "all"), ("--machine", "t4-16gb")):
        result = run("plan", path, "--budget", "80%", option, value)
        assert result.exit_code == 2
        assert option in result.stderr


@pytest.mark.long
def test_max_batch_and_compare_take_them_too(cases: Path) -> None:
    common = ["--optimizer", "adam", "--seed", 1, "--effort", 5, "--time-limit", 60]
    found = as_json("max-batch", f"{cases}:with_adam", "--budget", "1MiB", "--planner", "keep_all", *common)
    less = as_json("max-batch", f"{cases}:with_adam", "--budget", "1MiB", "--planner", "keep_all", "--optimizer", "sgd")
    assert int(str(found["batch"])) < int(str(less["batch"]))
    compared = run(
        "compare", f"{cases}:with_adam", "--planners", "keep_all", "--budgets", "1GiB", "--run", *common, "--json"
    )
    assert compared.exit_code == 0, compared.stderr
    [row] = json.loads(compared.stdout.splitlines()[-1])
    assert abs(row["measured_peak_bytes"] - row["predicted_peak_bytes"]) <= 0.01 * row["predicted_peak_bytes"]


def test_no_public_name_brings_the_compiler() -> None:
    """It takes as long to import as torch; the first capture imports it."""
    code = (
        "import sys, torch, ebbtide\n"
        "for name in ebbtide.__all__: getattr(ebbtide, name)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
