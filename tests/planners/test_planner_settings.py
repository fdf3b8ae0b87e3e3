"""What follows a planner's name is read in one place, refused with what is accepted, and kept with the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.errors import UsageError
from ebbtide.options import Options
from ebbtide.planners.base import HOMES, NEED_TIERS, moves_buffers, planner_named, require_planner
from ebbtide.planners.settings import setting, settings_from, several_planners
from ebbtide.planning.cache import PlanCache
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.report.plan import Plan
from ebbtide.units import Budget
from layered import SIZE, layered, linked


@dataclasses.dataclass(frozen=True)
class Some:
    count: int = setting(3, least=1)
    size: int | None = setting(None, bytes=True)
    way: str | int = setting("near", words=("near", "far", "2"))
    late: bool = setting(False)

    def __post_init__(self) -> None:
        if self.count == 7:
            raise ValueError("count is not 7")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("count=5", Some(5)),
        ("size=2KiB,late=true", Some(3, 2048, "near", True)),
        ("size=0", Some(3, 0)),
        ("way=2, count=1", Some(1, None, 2)),
    ],
)
def test_settings_are_values(text: str, expected: Some) -> None:
    assert settings_from(f"some:{text}", Some) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cuont=5", "it has no 'cuont'; did you mean 'count'"),
        ("count=0", "count=0 is not accepted"),
        ("count=-3", "count=-3 is not accepted"),
        ("count=x", "count=x is not accepted"),
        ("count=7", "count is not 7"),
        ("count", "'count' is not key=value"),
        ("count=", "'count=' is not key=value"),
        ("", "'' is not key=value"),
        ("size=5%", "size=5% is not accepted"),
        ("size=-1", "size=-1 is not accepted"),
        ("way=up", "way=up is not accepted"),
        ("late=1", "late=1 is not accepted"),
        ("count=1,count=2", "'count' is given twice"),
    ],
)
def test_what_is_not_accepted_is_refused_with_what_is(text: str, why: str) -> None:
    with pytest.raises(UsageError) as raised:
        settings_from(f"some:{text}", Some)
    assert why in str(raised.value)
    assert "some accepts count=a whole number from 1 on; size=bytes" in str(raised.value)
    assert raised.value.argument == "planner"
    assert raised.value.value == f"some:{text}"


def test_settings_of_a_planner_that_takes_none_are_refused() -> None:
    for check in (require_planner, planner_named, lambda name: Options(planner=name)):
        with pytest.raises(UsageError, match="planner 'auto' takes no settings"):
            check("auto:effort=3")
    with pytest.raises(UsageError, match=r"'swop:threshold_bytes=3' does not exist.*did you mean 'swap'"):
        require_planner("swop:threshold_bytes=3")


def test_planners_in_one_text_keep_their_settings() -> None:
    assert several_planners("auto, swap:threshold_bytes=3") == ["auto", "swap:threshold_bytes=3"]
    text = "tflms:version=1,lb=1,ub=5,greedy,libra:overlap=true"
    assert several_planners(text) == ["tflms:version=1,lb=1,ub=5", "greedy", "libra:overlap=true"]
    assert several_planners("auto,lb=5") == ["auto", "lb=5"], "which is then no planner's name"


def test_options_refuse_a_planner_that_needs_a_tier_and_has_none() -> None:
    for name in sorted(NEED_TIERS):
        assert name in HOMES
        assert moves_buffers(name)
        for asked, said in (
            (
                {},
                "none is given for this machine: give tiers='disk' where the model is on CPU, tiers='host' for a card",
            ),
            ({"machine": "v100-16gb"}, "machine 'v100-16gb' has a link to host: give tiers='host'"),
            ({"machine": dataclasses.replace(linked(1.0), links={})}, "machine 'toy' has no link"),
        ):
            options: dict[str, Any] = asked
            with pytest.raises(UsageError, match=f"planner '{name}' moves buffers and needs a tier.*{said}"):
                Options(planner=name, **options).require_complete()
        Options(planner=name, tiers="host").require_complete()


def test_a_plan_keeps_the_whole_text_and_the_cache_tells_settings_apart(tmp_path: Any) -> None:
    program, card = layered(6), linked(1.0)
    cached = PlanningOptions(machine=card, tiers=("host",), cache=PlanCache(tmp_path))
    plans: list[Plan] = []
    for planner in (f"swap:threshold_bytes={2 * SIZE}", f"swap:threshold_bytes={3 * SIZE}"):
        options = dataclasses.replace(cached, planner=planner)
        plan = make_plan(program, Budget(bytes=100 * SIZE), resident_bytes=0, options=options)
        assert plan.planner == planner
        assert f"by {planner}:" in str(plan)
        plans.append(plan)
    assert plans[0].schedule != plans[1].schedule
    path = tmp_path / "plan.json"
    plans[0].save(path)
    assert Plan.load(path).planner == plans[0].planner


def entries() -> dict[str, Callable[..., object]]:
    """Every public function that takes a planner, as calls that never come to a capture."""
    model, batch = torch.nn.Linear(2, 2), (torch.ones(2, 2),)
    return {
        "fit": lambda planner, **given: ebbtide.fit(model, "50%", options=ebbtide.Options(planner=planner, **given)),
        "plan": lambda planner, **given: ebbtide.plan(
            model, batch, budget="50%", options=ebbtide.Options(planner=planner, **given)
        ),
        "sweep": lambda planner, **given: ebbtide.sweep(
            model, batch, budgets=["50%"], planners=[planner], options=ebbtide.Options(**given)
        ),
        "max_batch": lambda planner, **given: ebbtide.max_batch(
            lambda size: pytest.fail(f"made for {size}"),
            budget=2**20,
            options=ebbtide.Options(planner=planner, **given),
        ),
        "doctor": lambda planner, **given: ebbtide.doctor(
            model, batch, options=ebbtide.Options(planner=planner, **given)
        ),
    }


@pytest.mark.parametrize("entry", ["fit", "plan", "sweep", "max_batch", "doctor"])
def test_every_entry_point_refuses_before_it_captures(entry: str) -> None:
    call = entries()[entry]
    with pytest.raises(UsageError, match="planner 'capuchin' moves buffers and needs a tier"):
        call("capuchin")
    with pytest.raises(UsageError, match="lb=5 is more than ub=4; tflms accepts"):
        call("tflms:lb=5,ub=4", tiers="host")
