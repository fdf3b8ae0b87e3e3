"""Costs are measured once per call and device, kept on disk, and never trusted when damaged or foreign."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import ebbtide
from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.cost import attach, profile
from ebbtide.cost.cache import CostCache, device_context
from ebbtide.cost.call import Call, TensorSpec
from ebbtide.cost.profile import Cost, profile_calls
from ebbtide.cost.profiling_budget import ProfilingBudget, arguments_for, profiling_within
from ebbtide.errors import CaptureError
from ebbtide.files import keep
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.provenance import Costs
from ebbtide.zoo import GPTConfig, gpt, mlp_chain

ATEN = torch.ops.aten


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    tensor = torch.empty(shape, dtype=dtype)
    return TensorSpec(shape, tensor.stride(), dtype, "cpu")


def call(target: Any, *args: Any) -> Call:
    def tensor(s: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(s.shape, s.stride, dtype=s.dtype)

    with FakeTensorMode():
        made = target(*pytree.tree_map_only(TensorSpec, tensor, args))
    made = made if isinstance(made, tuple) else (made,)
    outputs = tuple(TensorSpec(tuple(t.shape), t.stride(), t.dtype, "cpu") for t in made)
    return Call(target, args, {}, outputs, f"{target}({args})")


def cost_of(target: Any, *args: Any) -> Cost:
    (cost,) = profile_calls([call(target, *args)], "cpu").values()
    return cost


def test_plain_ops_take_no_workspace() -> None:
    assert cost_of(ATEN.add.Tensor, spec(64, 64), spec(64, 64)).workspace_bytes == 0
    assert cost_of(ATEN.mm.default, spec(64, 32), spec(32, 16)).workspace_bytes == 0


def test_dropout_takes_workspace() -> None:
    assert cost_of(ATEN.native_dropout.default, spec(64, 64), 0.1, True).workspace_bytes > 0


def test_synthetic_inputs_keep_their_strides_and_types() -> None:
    strided = TensorSpec((4, 8), (1, 4), torch.float32, "cpu")
    expanded = TensorSpec((4, 8), (0, 1), torch.float32, "cpu")
    assert cost_of(ATEN.add.Tensor, strided, expanded).seconds > 0
    assert cost_of(ATEN.embedding.default, spec(10, 4), spec(3, dtype=torch.int64)).seconds > 0
    assert cost_of(ATEN.where.self, spec(4, dtype=torch.bool), spec(4), spec(4)).seconds > 0
    assert cost_of(ATEN.cat.default, [spec(4, 2), spec(4, 3)], 1).seconds > 0


def test_measuring_leaves_the_generator() -> None:
    state = torch.get_rng_state()
    cost_of(ATEN.native_dropout.default, spec(8, 8), 0.5, True)
    assert torch.equal(torch.get_rng_state(), state)


def test_equal_calls_are_measured_once() -> None:
    one = call(ATEN.add.Tensor, spec(3), spec(3))
    assert len(profile_calls([one, replace(one), one], "cpu")) == 1


def test_the_amount_of_measuring_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs() -> int:
        count = 0

        def target(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return x.neg()

        profile_calls([replace(call(ATEN.neg.default, spec(64)), target=target)], "cpu")
        return count

    quiet = runs()
    ticks = iter(range(10**9))
    for clock in ("thread_time", "process_time", "perf_counter"):
        monkeypatch.setattr(f"ebbtide.cost.profile.time.{clock}", lambda: next(ticks) * 3600.0)
    assert runs() == quiet


@pytest.mark.parametrize("threads", [1, 2])
def test_a_clock_that_stands_still_now_and_then_makes_no_op_free(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """As a guest's clock of CPU time does while it pays back what the host took from it."""
    torch.set_num_threads(threads)
    readings = {"count": 0, "at": 0.0}

    def clock() -> float:
        readings["count"] += 1
        if readings["count"] % 6 != 0:  # of three runs, the third takes no time by this clock
            readings["at"] += 1e-6
        return readings["at"]

    for name in ("thread_time", "process_time"):
        monkeypatch.setattr(f"ebbtide.cost.profile.time.{name}", clock)
    cost = cost_of(ATEN.neg.default, spec(64))
    assert cost.timed
    assert cost.seconds > 0


def test_a_clock_that_stands_still_for_all_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = 0

    def clock() -> float:
        nonlocal readings
        readings += 1
        return 1.0 if readings < 200 else 1.0 + 1e-4

    monkeypatch.setattr("ebbtide.cost.profile.time.thread_time", clock)
    cost = cost_of(ATEN.neg.default, spec(64))
    assert cost.timed
    assert 0 < cost.seconds < 1e-5


def test_calls_that_no_clock_has_seen_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.cost.profile.time.thread_time", lambda: 1.0)
    cost = cost_of(ATEN.neg.default, spec(64))
    assert not cost.timed
    assert cost.seconds > 0


def test_what_a_result_has_by_default_has_a_cost_of_its_own(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that is divided has the default type, and so has what the kernel takes besides."""
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            one = call(ATEN.div.Scalar, spec(64, 64, dtype=torch.bool), 3)
            program = Program(
                "x",
                (Op("div", "aten.div.Scalar", (), (0,), signature=one.signature),),
                (Buffer("b", 64 * 64 * dtype.itemsize, 0),),
                0,
            )
            found[dtype] = attach.with_measured_costs(program, [one], "cpu").ops[0].workspace_bytes
        finally:
            torch.set_default_dtype(before)
    assert found[torch.float32] - found[torch.bfloat16] == pytest.approx(64 * 64 * 2, abs=64)


def test_short_calls_are_timed_in_rounds_so_that_what_disturbs_one_has_gone_by_another() -> None:
    order: list[str] = []

    def named(name: str) -> Call:
        def target(x: torch.Tensor) -> torch.Tensor:
            order.append(name)
            begin = time.thread_time()
            while order.count("b") < 4 and time.thread_time() < begin + 2e-3:  # until the other one has had its turn
                pass
            return x.neg()

        return replace(call(ATEN.neg.default, spec(64)), target=target, signature=name)

    torch.set_num_threads(2)
    costs = profile_calls([named("a"), named("b")], "cpu")
    assert costs["a"].seconds < 1e-3
    turns = [name for name, _ in groupby(order)]
    assert turns[:4] == ["a", "b", "a", "b"]
    assert len(turns) == 10


class _Disturbed:
    """A call whose runs take what ``seconds`` says, the last of these from then on; a clock that only it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.seconds, self.runs, self.at = seconds, 0, 1.0
        for clock in ("thread_time", "process_time", "perf_counter"):
            monkeypatch.setattr(f"ebbtide.cost.profile.time.{clock}", lambda: self.at)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.at += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1
        return x.neg()

    def cost(self) -> Cost:
        self.runs = 0
        long = replace(call(ATEN.neg.default, spec(1024, 1024)), target=self)
        (cost,) = profile_calls([long], "cpu").values()
        return cost


def test_what_rounds_do_not_agree_on_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = _Disturbed(monkeypatch, 0.01)
    assert quiet.cost() == replace(quiet.cost(), seconds=pytest.approx(0.01), steady=True)
    undisturbed = quiet.runs
    busy = _Disturbed(monkeypatch, *[0.05] * (undisturbed - 1), 0.01)
    assert busy.cost().seconds == pytest.approx(0.01), "the least of all rounds"
    assert busy.cost().steady
    assert busy.runs > undisturbed
    for_good = _Disturbed(monkeypatch, *(0.01 * 2.0**run for run in range(60)))
    assert not for_good.cost().steady
    assert for_good.runs < 60, "and is not waited for"


def test_short_calls_jitter_and_are_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _Disturbed(monkeypatch, *(1e-6 * 1.5**run for run in range(11))).cost().steady


@pytest.mark.parametrize("threads", [1, 2])
def test_time_in_which_no_thread_has_a_core_is_not_an_ops(threads: int) -> None:
    def target(x: torch.Tensor) -> torch.Tensor:
        time.sleep(5e-3)
        return x.neg()

    torch.set_num_threads(threads)
    (cost,) = profile_calls([replace(call(ATEN.neg.default, spec(64)), target=target)], "cpu").values()
    assert 0 < cost.seconds < 4e-3


def test_a_guess_is_right_where_it_is_tried_out_whatever_room_there_is() -> None:
    numbers = call(ATEN.add.Tensor, spec(), spec())
    lenders = [torch.full((8,), value) for value in (2.0, 3.0)]
    for room in (ProfilingBudget(), ProfilingBudget(0, lenders)):
        with profiling_within(room):
            (guess, tangent), _ = arguments_for(numbers)
        assert torch.equal(guess, tangent)


def test_no_more_than_so_many_calls_are_timed_and_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.cost.profile.MOST_TIMED", 2)
    calls = [call(ATEN.native_dropout.default, spec(side, 64), 0.1, True) for side in (4, 64, 8, 32, 16)]
    costs = profile_calls(calls, "cpu")
    assert [costs[each.signature].timed for each in calls] == [False, True, False, True, False]
    assert all(0 < cost.seconds < 1 and cost.workspace_bytes > 0 for cost in costs.values())
    estimated = [costs[calls[i].signature].seconds for i in (0, 2, 4)]
    assert estimated == sorted(estimated), "an estimate follows the bytes"


# -- the file -------------------------------------------------------------------------------------------------

COSTS = {"a": Cost(0.5, 7), "b": Cost(0.25, 0)}


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache({"device": "cpu", "torch": "x"}, tmp_path)


def test_costs_come_back(cache: CostCache) -> None:
    assert cache.load() == {}
    cache.add(COSTS)
    assert cache.load() == COSTS
    cache.add({"c": Cost(1.0, 1)})
    assert cache.load() == {**COSTS, "c": Cost(1.0, 1)}


def test_nothing_but_the_file_and_its_lock_is_left(cache: CostCache) -> None:
    cache.add(COSTS)
    assert {p.suffix for p in cache.path.parent.iterdir()} <= {".json", ".lock"}


def test_a_write_that_dies_leaves_the_old_file(cache: CostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.add(COSTS)

    def dies(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("ebbtide.files.os.replace", dies)
    cache.add({"c": Cost(1.0, 1)})
    assert cache.load() == COSTS


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    cache = CostCache({"device": "cpu"}, tmp_path / "file" / "below")
    cache.add(COSTS)
    assert cache.load() == {}
    assert (tmp_path / "file").read_text() == "kept"


def test_contexts_do_not_share_a_file(tmp_path: Path) -> None:
    one, two = (CostCache({"device": "cpu", "threads": t}, tmp_path) for t in "12")
    one.add(COSTS)
    assert one.path != two.path
    assert two.load() == {}


def test_a_foreign_context_is_not_trusted(cache: CostCache) -> None:
    cache.add(COSTS)
    data = json.loads(cache.path.read_text())
    data["context"]["torch"] = "another"
    assert keep(cache.path, cache.path.with_name("lock"), lambda: data)
    assert cache.load() == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema": "ebbtide-costs/1"}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": []}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": 3}}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": [1]}}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": [1, 1e999]}}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": [NaN, 1]}}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": [-1.0, 1]}}',
        '{"schema": "ebbtide-costs/1", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": [1.0, -1]}}',
        "[" * 100_000,
        '{"schema": "ebbtide-costs/0", "context": {"device": "cpu", "torch": "x"}, "costs": {"a": [1.0, 1]}}',
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(cache: CostCache, text: str) -> None:
    cache.path.write_text(text)
    assert cache.load() == {}
    cache.add(COSTS)
    assert cache.load() == COSTS


def test_bytes_that_are_no_text_are_ignored(cache: CostCache) -> None:
    cache.path.write_bytes(b"\xff\xfe\x00")
    assert cache.load() == {}


# -- a program ------------------------------------------------------------------------------------------------


@pytest.fixture
def joint() -> Captured:
    case = mlp_chain(8, layers=2, width=8)
    return capture(case.model, case.args, {}, name="x", granularity_bytes=1, context={"device": "cpu"})


def test_the_second_capture_measures_nothing(
    joint: Captured, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    program = attach.with_measured_costs(joint.program, joint.calls, "cpu")
    assert all(op.seconds > 0 for op in program.ops)

    def never(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(attach, "profile_calls", never)
    assert attach.with_measured_costs(joint.program, joint.calls, "cpu") == program
    monkeypatch.setattr(attach, "_KNOWN", {})  # another process, which finds the file
    monkeypatch.setattr(attach, "_TIMED", {})  # another process, which finds the file
    assert attach.with_measured_costs(joint.program, joint.calls, "cpu") == program


def test_a_plan_says_how_much_is_estimated(
    joint: Captured, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    attach.with_measured_costs(joint.program, joint.calls, "cpu")
    assert attach.costs_of(joint.calls, "cpu") == (Costs.MEASURED, "")
    cache_file = CostCache(device_context("cpu")).path
    cache_file.unlink()
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    monkeypatch.setattr("ebbtide.cost.profile.MOST_TIMED", 3)
    attach.with_measured_costs(joint.program, joint.calls, "cpu")
    count = len({each.signature for each in joint.calls})
    costs, words = attach.costs_of(joint.calls, "cpu")
    assert (costs, words) == (Costs.PARTLY, f"the seconds of {count - 3} of {count} distinct ops are by roofline")
    assert len(json.loads(cache_file.read_text())["costs"]) == 3, "an estimate is not kept"
    case = mlp_chain(8, layers=2, width=8)
    assert ebbtide.plan(case.model, case.args, budget="1MiB").provenance.costs is Costs.PARTLY


def test_what_is_not_steady_is_told_and_taken_anew_by_the_next_process(
    joint: Captured, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    measured = profile_calls(joint.calls, "cpu")
    busy = next(iter(measured))
    unsteady = {**measured, busy: replace(measured[busy], steady=False)}
    monkeypatch.setattr(attach, "profile_calls", lambda *_: unsteady)
    attach.with_measured_costs(joint.program, joint.calls, "cpu")
    costs, words = attach.costs_of(joint.calls, "cpu")
    assert (costs, words) == (
        Costs.MEASURED,
        f"the machine was busy: the seconds of 1 of {len(measured)} distinct ops are doubtful, and not kept",
    )
    assert busy not in json.loads(CostCache(device_context("cpu")).path.read_text())["costs"]


def test_a_profiler_at_the_first_call_is_named(cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_KNOWN", {})
    monkeypatch.setattr(attach, "_TIMED", {})
    case = mlp_chain(8, layers=2, width=8)
    model = ebbtide.fit(case.model, "1MiB")
    with torch.profiler.profile(acc_events=True), pytest.raises(CaptureError, match="profiler"):
        model(*case.args)
    model(*case.args).backward()


def test_costs_depend_on_the_thread_count() -> None:
    one = device_context("cpu")
    torch.set_num_threads(2)
    assert device_context("cpu") != one


def test_a_catalogue_machine_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(attach, "profile_calls", never)
    case = gpt(1, GPTConfig(vocabulary=16, length=8, layers=1, width=8, heads=2))
    # cuBLAS and the proof of the first step hold 22 MiB on a card, whatever the model.
    plan = ebbtide.plan(case.model, case.args, budget="24MiB", machine="a100-80gb")
    assert plan.provenance["costs"] == "roofline"
    assert plan.step_seconds > 0


# -- seconds on a card, whose clock is made up -------------------------------------------------------------------------


class _Card:
    """A stream that runs what it was given once the host waits for it; an op takes what ``seconds`` says next."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.queue, self.now = seconds, list[tuple[str, Any]](), 0.0

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        card = self

        class Event:
            at = 0.0

            def record(self) -> None:
                card.queue.append(("event", self))

            def synchronize(self) -> None:
                card.run()

            def elapsed_time(self, other: Any) -> float:
                return 1e3 * (other.at - self.at)

        return Event()

    def run(self) -> None:
        for what, given in self.queue:
            if what == "event":
                given.at = self.now
            else:
                self.now += given
        self.queue.clear()

    def op(self, *_: object) -> None:
        self.queue.append(("op", self.seconds.pop(0)))


def test_all_runs_on_a_card_are_launched_before_the_first_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _Card([3e-5, 1e-5, 2e-5])
    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(profile, "keep_waiting", lambda seconds: (waits.append(seconds), card.op()))
    card.seconds.insert(0, 1e-3)
    given = Call(card.op, (), {}, (), "an op")
    assert profile._seconds_on_cuda(given, (), {}, 3) == pytest.approx(1e-5)
    assert waits == [1e-3]
    assert profile._seconds_on_cuda(given, (), {}, 0) == float("inf")
