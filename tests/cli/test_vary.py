"""What else than the batch can be as large as fits: layers and length, by the function and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ebbtide
from ebbtide.case import Case
from ebbtide.cli import app
from ebbtide.errors import BudgetError, UsageError
from ebbtide.names import zoo_names
from ebbtide.zoo import GPTConfig, build, gpt, mlp_chain, sizes_of
from papers import paper_model

TINY = GPTConfig(vocabulary=64, length=16, layers=1, width=32, heads=2, dropout=0.0)


def chain(layers: int) -> Case:
    return mlp_chain(64, layers=layers, width=16)


def is_tight(make: Callable[[int], Case], found: ebbtide.BatchPlan, budget: int) -> bool:
    """Whether the answer fits, and one more does not."""
    assert found.plan.predicted_peak_bytes <= budget
    case = make(found.batch + 1)
    with pytest.raises(BudgetError):
        ebbtide.plan(case.model, case.args, budget=budget, options=ebbtide.Options(effort=100, progress=None))
    return True


def test_the_most_layers_are_found_where_each_adds_ops() -> None:
    budget = 60_000
    told: list[str] = []
    found = ebbtide.max_batch(
        chain,
        budget=budget,
        vary="layers",
        options=ebbtide.Options(effort=100, progress=lambda each: told.append(each.stage)),
    )
    assert found.vary == "layers"
    assert 0 < found.unplanned_batch < found.batch
    assert is_tight(chain, found, budget)
    assert f"layers {found.batch} fits" in told
    none = ebbtide.max_batch(
        chain, budget=budget, vary="layers", overhead=0.0, options=ebbtide.Options(effort=100, progress=None)
    )
    assert found.unplanned_batch == none.unplanned_batch <= none.batch < found.batch
    assert not dict(none.captured)[none.batch + 1]


def test_a_line_asks_for_few_captures() -> None:
    found = ebbtide.max_batch(
        chain, budget=60_000, vary="layers", overhead=0.0, options=ebbtide.Options(effort=100, progress=None)
    )
    assert len(found.captured) <= 4


@pytest.mark.long
@pytest.mark.slow
def test_the_greatest_length_is_found_where_ops_stay_and_bytes_do_not_grow_evenly() -> None:
    def make(length: int) -> Case:
        return gpt(1, TINY, length=length)

    found = ebbtide.max_batch(make, budget=200_000, vary="length", options=ebbtide.Options(effort=100, progress=None))
    assert found.batch > 16
    assert is_tight(make, found, 200_000)


@pytest.mark.long
@pytest.mark.slow
def test_the_greatest_length_is_found_where_each_token_adds_ops() -> None:
    def make(length: int) -> Case:
        return paper_model("lstm_lm")(4, vocabulary=16, width=8, layers=1, dropout=0.0, length=length)

    found = ebbtide.max_batch(make, budget=24_500, vary="length", options=ebbtide.Options(effort=100, progress=None))
    assert found.batch > 2
    assert is_tight(make, found, 24_500)


def test_what_does_not_fit_once_is_refused_by_its_name() -> None:
    with pytest.raises(BudgetError, match="not even 1 layer fits"):
        ebbtide.max_batch(chain, budget="1KiB", vary="layers", options=ebbtide.Options(effort=50, progress=None))
    with pytest.raises(BudgetError, match="not even a length of 1 fits"):
        ebbtide.max_batch(
            lambda n: gpt(1, TINY, length=n),
            budget="1KiB",
            vary="length",
            options=ebbtide.Options(effort=50, progress=None),
        )
    for wrong in ("depth", ["batch"], None):
        with pytest.raises(UsageError, match=r"vary=.* is none of batch, layers, length"):
            ebbtide.max_batch(chain, budget="1GiB", vary=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", zoo_names())
def test_every_model_says_its_sizes(name: str) -> None:
    sizes = sizes_of(name)
    assert sizes[0] in ("batch", "length")
    assert set(sizes) <= {"batch", "layers", "length", "image", "dtype", "lora"}


def test_the_zoo_builds_by_size() -> None:
    assert build("mlp_chain", 8, layers=3).name.startswith("mlp_chain-3L")
    tokens, _ = build("gpt", 2, layers=1, length=8).args
    assert tokens.shape == (2, 8)
    assert len(build("llama", 1, layers=2, length=4).model.get_submodule("blocks")) == 2  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="zoo:resnet50 has no layers to choose; it takes: batch"):
        build("resnet50", layers=3)
    with pytest.raises(UsageError, match="the zoo has no model"):
        sizes_of("resnet51")


def test_the_command_line_varies_layers() -> None:
    arguments = "max-batch zoo:mlp_chain --vary layers --size 64 --budget 2MB --overhead 0% --effort 50"
    result = CliRunner().invoke(app, [*arguments.split(), "--json"])
    data = json.loads(result.stdout.splitlines()[-1])
    assert (data["vary"], data["case"]) == ("layers", "zoo:mlp_chain")
    assert data["batch"] >= data["unplanned_batch"] > 1
    said = CliRunner().invoke(app, arguments.split()).stdout
    assert said.startswith("most layers of zoo:mlp_chain within 1.90 MiB at an overhead of at most 0.00 %")
    assert f": {data['batch']}, unplanned" in said.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zoo:resnet50", "--vary", "layers"], "zoo:resnet50 has no layers to vary; it takes: batch"),
        (["zoo:llama_8b", "--vary", "batch"], "it takes: length, layers"),
        (["zoo:gpt", "--vary", "depth"], "none of batch, layers, length"),
        (["zoo:gpt", "--size", "4"], "--vary something else"),
        (["zoo:gpt", "--vary", "layers", "--size", "0"], "--size"),
        (["case.py:make", "--vary", "layers"], "for zoo:NAME"),
    ],
)
def test_what_cannot_be_varied_is_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("case.py").write_text("def make(batch): ...\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["max-batch", *arguments, "--budget", "1GB"])
    assert result.exit_code == 2
    assert message in result.stderr
