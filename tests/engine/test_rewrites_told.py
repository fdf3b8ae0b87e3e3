"""What rewrites would lower, what they cost and why they are not used is told: doctor, compare, explain, calibrate."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ebbtide
from ebbtide.cli import app
from ebbtide.errors import BudgetError, UsageError
from ebbtide.report.text.compare import row_of, write_rows
from ebbtide.report.text.doctor import write_findings
from ebbtide.rewrites import choices, facts
from head_models import FORMS, LEFT, Tower, arguments


def findings(model: Tower, budget: str | None = None, **options: object) -> tuple[ebbtide.Findings, str]:
    asked = ebbtide.Options(progress=None, **options)  # type: ignore[arg-type]
    found = ebbtide.doctor(model, arguments(), budget=budget, options=asked)
    stream = io.StringIO()
    write_findings(found, stream)
    return found, stream.getvalue()


def test_the_doctor_tells_what_each_form_would_lower_and_take() -> None:
    found, text = findings(FORMS["plain"](), budget="60%")
    forms = {each.what.split(": ")[1].split(" (")[0]: each for each in found.rewrites}
    assert set(forms) == {"kept", "guessed", "rows", "lean", "all"}  # of the head, and of what dies
    for each in forms.values():
        assert each.floor_bytes is not None
        assert each.floor_bytes < found.floor_bytes
        assert not each.why_not
    kept, rows = forms["kept"].seconds, forms["rows"].seconds
    assert kept is not None
    assert rows is not None
    assert kept < rows  # it makes no product twice
    assert found.rewritten
    assert found.rewritten[0] in text
    assert "rewrites, chosen where a budget asks for it" in text
    assert not [each for each in found.advice if each.rule == "loss_in_chunks"]
    assert json.loads(json.dumps(found.to_json()))["rewrites"]


def test_the_doctor_tells_none_where_they_are_switched_off() -> None:
    found, text = findings(FORMS["plain"](), rewrites="none")
    assert not found.rewrites
    assert "rewrites" not in text
    assert [each for each in found.advice if each.rule == "loss_in_chunks"]


@pytest.mark.parametrize("form", LEFT)
def test_the_doctor_tells_why_something_is_left(form: str) -> None:
    make, why = LEFT[form]
    found, text = findings(make())
    [left] = [each for each in found.rewrites if each.floor_bytes is None]
    assert why in left.why_not
    assert f"left as it is: {left.what}" in text


@pytest.mark.parametrize(("held", "word"), [(False, "not the bits of the whole"), (None, "ebbtide calibrate")])
def test_the_doctor_tells_which_fact_is_missing(held: bool | None, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "measured", lambda found, _: dict.fromkeys((f.signature for f in found), held))
    found, text = findings(FORMS["plain"]())
    assert all(word in each.why_not for each in found.rewrites)
    assert "NOT used" in text
    assert [each for each in found.advice if each.rule == "loss_in_chunks"]


def test_compare_and_explain_name_what_was_rewritten() -> None:
    plan = ebbtide.plan(FORMS["plain"](), arguments(), budget="60%", options=ebbtide.Options(progress=None))
    assert plan.rewritten is not None
    named = str(plan.rewritten.rewrites[0])
    row = row_of("tower", plan)
    assert row.rewritten == named
    stream = io.StringIO()
    write_rows([row], stream)
    assert named in stream.getvalue()
    assert f"rewritten: {named}" in plan.explain("layers")
    with pytest.raises(UsageError, match="What was rewritten has no buffers of its own"):
        plan.explain("_log_softmax")


CASE = """
import torch
from torch.nn import functional as F
import ebbtide

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(301, 16), torch.nn.Linear(16, 301)

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.words(tokens)), tokens)

def model(tokens):
    return ebbtide.Case(Model(), (torch.arange(tokens) % 301,))
"""


def test_calibrate_finds_out_ahead_what_rewrites_rest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_KNOWN", {})
    (tmp_path / "case_of_words.py").write_text(CASE)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", "case_of_words.py:model", "--size", "257", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["facts"]
    assert len({each["fact"] for each in told}) >= 5
    known = facts.known_facts("cpu")
    assert sum("h[257,16]" in signature for signature in known) == len(told)
    assert {each["holds"] for each in told} <= {True, False}
    text = CliRunner().invoke(app, ["calibrate", "case_of_words.py:model", "--size", "257"])
    assert "facts about the kernels here" in text.stdout
    assert torch.is_grad_enabled()


def test_a_refusal_names_the_command_where_there_was_no_room_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "measured", lambda found, _: dict.fromkeys((f.signature for f in found), None))
    with pytest.raises(BudgetError) as refused:
        ebbtide.fit(FORMS["plain"](), 1, progress=None)(*arguments())
    [note] = [each for each in refused.value.__notes__ if "ebbtide calibrate" in each]
    assert "was not tried" in note
    monkeypatch.setattr(choices, "measured", lambda found, _: dict.fromkeys((f.signature for f in found), False))
    with pytest.raises(BudgetError) as refused:
        ebbtide.fit(FORMS["plain"](), 1, progress=None)(*arguments())
    assert not [each for each in getattr(refused.value, "__notes__", ()) if "ebbtide calibrate" in each]
