"""What follows a planner's name is read in one place, refused with what is accepted, and kept with the plan."""

from __future__ import annotations

import dataclasses

import pytest

from ebbtide.errors import UsageError
from ebbtide.options import Options
from ebbtide.planners.registry import planner_named, require_planner
from ebbtide.planners.settings import setting, settings_from, several_planners


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
