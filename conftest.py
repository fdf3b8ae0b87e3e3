"""What every test gets: one thread, a fixed seed, a cache directory of its own, and no deadlines."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ebbtide.cost import attach
from ebbtide.cost.call import Call
from ebbtide.cost.profile import Cost
from ebbtide.cost.roofline import roofline_seconds
from ebbtide.planners.search import smallest
from ebbtide.planning import cache as plan_cache
from ebbtide.planning.beside import Search
from ebbtide.step.machine import machine_named

# A shared machine makes any deadline a coin toss. Continuous integration draws the same examples every time, so
# that a red run is about the change; elsewhere each run draws new ones.
settings.register_profile("ebbtide", deadline=None, derandomize="CI" in os.environ, print_blob=True)
# `make quick` and `make nightly` ask for these: a tenth of the examples, and all, see ``strategies.examples``.
settings.register_profile("quick", settings.get_profile("ebbtide"), max_examples=10)
settings.register_profile("nightly", settings.get_profile("ebbtide"), derandomize=False)
settings.load_profile("ebbtide")


def pytest_configure() -> None:
    """Bits depend on the thread count; one thread is also the kindest to whatever else the machine does."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none: everything marked ``gpu`` and all of ``tests/gpu``."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is false here")
    here = Path(__file__).parent / "tests" / "gpu"
    for item in items:
        if item.get_closest_marker("gpu") is not None or here in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def short_descents() -> Iterator[int]:
    """Every first plan looks for the smallest peak, seconds by default; gives how many moves it makes then.

    How low that search gets is for tests of planners, which call it with efforts of their own.
    """
    moves = smallest.FIRST_EFFORT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smallest, "FIRST_EFFORT", 500)
        yield moves


@pytest.fixture(scope="session", autouse=True)
def searches_beside() -> Iterator[Callable[..., Search | None]]:
    """No test but those of it searches beside training; gives what begins a search."""
    begin = Search.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "begin", staticmethod(lambda *_: None))
        yield begin


_seconds_are_measured = False


@pytest.fixture(scope="session", autouse=True)
def _steady_seconds() -> Iterator[None]:
    """Ops run and their bytes are measured, but what they take is made up, so that plans are the same in every run.

    They are the roofline. Which plan of a small program is the best is a matter of microseconds, and a test that asks
    for one kind of plan would pass on one day and fail on the next. ``measured_seconds`` undoes it for one test.
    """
    measure = attach.profile_calls
    machine = machine_named("cpu")

    def steady(
        calls: Sequence[Call], device: str, scaled_seconds: Mapping[str, float] | None = None
    ) -> dict[str, Cost]:
        costs = measure(calls, device, scaled_seconds)
        if _seconds_are_measured:
            return costs
        seconds = {call.signature: roofline_seconds(call, machine) for call in calls}
        return {key: replace(cost, seconds=seconds[key]) for key, cost in costs.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "profile_calls", steady)
        yield


@pytest.fixture(autouse=True)
def _measured_seconds(request: pytest.FixtureRequest) -> Iterator[None]:
    global _seconds_are_measured
    _seconds_are_measured = request.node.get_closest_marker("measured_seconds") is not None
    yield
    _seconds_are_measured = False


_frozen_modules = 0


@pytest.fixture(autouse=True)
def _modules_are_no_garbage() -> None:
    """Set aside what modules hold: every capture collects garbage, and would look at all of torch again."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 50:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def _nothing_is_left_of_other_tests() -> None:
    """What fitted models of other tests have returned and somebody keeps is nothing to this one."""
    leftovers = sys.modules.get("ebbtide.measurement.leftovers")
    if leftovers is not None:
        leftovers.forget_all()
    linked_outputs = sys.modules.get("ebbtide.engine.linked_outputs")
    if linked_outputs is not None:
        linked_outputs.forget_all()  # a hook that holds its own output keeps its graph for good, as in eager


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    """Seed 0 before every test; a test that changes the thread count need not change it back."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share measured costs with each other, those of other processes too, never with the user's cache."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield


@pytest.fixture(autouse=True)
def _own_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test starts from another's plans."""
    monkeypatch.setattr(plan_cache, "plans_directory", lambda: tmp_path / "plans")


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache directory for one test; platformdirs finds it."""
    directory = tmp_path / "cache"
    directory.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory
