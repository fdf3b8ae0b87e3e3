"""Scoped patches: whatever happens while one is open, its place has afterwards what it had before."""

from __future__ import annotations

import gc
import linecache
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ebbtide
from at_once import at_once
from ebbtide.capture.trace import capture_settings
from ebbtide.errors import CaptureError
from ebbtide.measurement.cpu_allocations import AllocationRecorder, profiler_active
from ebbtide.torch_seams.autograd import BackwardWatch
from ebbtide.torch_seams.fake_tensors import FakeTensorMode, quiet_log
from ebbtide.torch_seams.patches import (
    Attribute,
    Item,
    Patch,
    PatchTarget,
    Setting,
    open_patches,
    patched,
    places,
    wrapped,
)

CUDA = (8, 0)


def _state() -> dict[int, Any]:
    return {id(place): place.read() for place in places()}


@pytest.fixture(autouse=True)
def every_place_is_as_before() -> Iterator[None]:
    """The property: identity of what lies at every place ever patched, after as before."""
    with quiet_log(), capture_settings(here=True), capture_settings(here=False, cuda=CUDA), BackwardWatch(int):
        recorder = AllocationRecorder()
        recorder.start()
        recorder.stop()
    known = {type(place.owner).__name__ + str(place.name) for place in places()}  # type: ignore[attr-defined]
    assert len(known) >= 15, "the places are collected"
    before, all_places = _state(), places()
    yield
    gc.collect()
    assert open_patches() == 0
    for place in all_places:
        found, was = place.read(), before[id(place)]
        # As long as any model of any test lives.
        lasting = str(getattr(place, "name", "")) in ("_callback_from_stance", "is_fx_symbolic_tracing", "scale")
        environment = isinstance(place, Item) and place.owner is os.environ and found == was
        assert found is was or lasting or environment, place


# -- the mechanism -------------------------------------------------------------------------------------------------


def _owner() -> types.SimpleNamespace:
    return types.SimpleNamespace(call=lambda x: [x], value=[0])


def _tagged(tag: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda below: lambda x: [tag, *below(x)]


def test_patches_nest() -> None:
    owner = _owner()
    call, value = owner.call, owner.value
    with wrapped(Attribute(owner, "call"), _tagged("a")), patched(Attribute(owner, "value"), 1):
        with wrapped(Attribute(owner, "call"), _tagged("b")), patched(Attribute(owner, "value"), 2):
            assert owner.call(0) == ["b", "a", 0]
            assert owner.value == 2
        assert owner.call(0) == ["a", 0]
        assert owner.value == 1
    assert owner.call is call
    assert owner.value is value


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_patches_close_in_any_order(choices: list[tuple[bool, int]]) -> None:
    """Against a list of those that are open: calls go through them from the newest to the oldest."""
    owner = _owner()
    call, value = owner.call, owner.value
    open_ones: list[tuple[str, Patch, Patch]] = []
    for step, (opens, which) in enumerate(choices):
        if opens or not open_ones:
            tag = str(step)
            both = (wrapped(Attribute(owner, "call"), _tagged(tag)), patched(Attribute(owner, "value"), tag))
            open_ones.append((tag, both[0].open(), both[1].open()))
        else:
            _, one, other = open_ones.pop(which % len(open_ones))
            one.close()
            other.close()
            one.close()
        assert owner.call(0) == [*(tag for tag, *_ in reversed(open_ones)), 0]
        assert owner.value == (open_ones[-1][0] if open_ones else value)
    for _, one, other in open_ones:
        one.close()
        other.close()
    assert owner.call is call
    assert owner.value is value


def test_nothing_is_put_back_where_nothing_was() -> None:
    class Parent:
        def call(self, x: int) -> list[Any]:
            return [x]

    class Child(Parent): ...

    table: dict[str, int] = {}
    with patched(Attribute(Child, "call"), lambda self, x: "patched"), patched(Item(table, "key"), 1):
        assert Child().call(1) == "patched"
        assert table == {"key": 1}
    assert "call" not in vars(Child)
    assert table == {}


def test_what_somebody_else_put_there_stays() -> None:
    owner = _owner()
    call = owner.call
    patch = wrapped(Attribute(owner, "call"), _tagged("ours")).open()
    ours = owner.call
    owner.call = theirs = lambda x: ["theirs", *ours(x)]
    assert owner.call(0) == ["theirs", "ours", 0]
    patch.close()
    assert owner.call is theirs
    assert owner.call(0) == ["theirs", 0]  # through our closed gate
    owner.call = ours  # what they had found
    assert owner.call(0) == [0]
    with wrapped(Attribute(owner, "call"), _tagged("again")):
        assert owner.call(0) == ["again", 0]
    assert owner.call is call


def test_a_patch_of_one_thread_is_seen_by_no_other() -> None:
    owner = _owner()
    seen: list[Any] = []
    with wrapped(Attribute(owner, "call"), _tagged("here"), this_thread=True):
        thread = threading.Thread(target=lambda: seen.append(owner.call(0)))
        thread.start()
        thread.join()
        assert owner.call(0) == ["here", 0]
    assert seen == [[0]]


def test_a_forgotten_patch_closes() -> None:
    owner = _owner()
    call = owner.call
    patch = wrapped(Attribute(owner, "call"), _tagged("a")).open()
    assert owner.call(0) == ["a", 0]
    del patch
    gc.collect()
    assert owner.call is call


def test_what_closes_a_patch_may_be_garbage_while_another_opens() -> None:
    owner, table = _owner(), {"key": 1}
    call = owner.call
    garbage = [patched(Attribute(owner, "call"), None).open()]
    weakref.finalize(garbage[0], patched(Item(table, "key"), 2).open().close)

    class Collecting(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            garbage.clear()  # as the collector might, in the middle of it
            super().__setitem__(key, value)

    collecting = Collecting()
    thread = threading.Thread(target=_use, args=(Item(collecting, "key"), 3), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "it waits for itself"
    assert (owner.call, table, collecting) == (call, {"key": 1}, {})


def test_a_patch_opens_once() -> None:
    patch = patched(Attribute(_owner(), "value"), 1)
    with patch, pytest.raises(RuntimeError, match="open already"):
        patch.open()
    assert not patch.is_open


def test_many_threads_patch_one_place() -> None:
    owner = _owner()
    call = owner.call
    wrong: list[Any] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            with wrapped(Attribute(owner, "call"), _tagged(str(seed)), this_thread=True):
                if chance.random() < 0.5:
                    with wrapped(Attribute(owner, "call"), _tagged("in"), this_thread=True):
                        result = owner.call(0)
                    expected = ["in", str(seed), 0]
                else:
                    result, expected = owner.call(0), [str(seed), 0]
            if result != expected:
                wrong.append(result)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert owner.call is call


@contextmanager
def _interrupted_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the ``line``-th line of the mechanism that runs on this thread.

    Not at the line of a ``with``: a trace function may raise between a block and its exit, Python's interrupts, which
    come after calls and backward jumps, never do.
    """
    count = [0]

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if "torch_seams" not in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("deferred_queue.py"):
            return None
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not code.strip().startswith("with"):
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def _use(place: PatchTarget, value: Any) -> None:
    with patched(place, value):
        pass


def test_an_interrupt_at_any_line_leaves_nothing_behind() -> None:
    line, interrupts = 0, 0
    while True:
        line += 1
        owner, table = _owner(), {"key": 1}
        call = owner.call
        try:
            with _interrupted_at(line) as count:
                with wrapped(Attribute(owner, "call"), _tagged("a"), this_thread=True):
                    _use(Item(table, "key"), 2)
                    _use(Attribute(owner, "new"), 3)
        except KeyboardInterrupt:
            interrupts += 1
        if open_patches():
            gc.collect()
        assert open_patches() == 0, line
        assert owner.call is call, line
        assert table == {"key": 1}, line
        assert not hasattr(owner, "new"), line
        if count[0] < line:
            break
    assert interrupts > 50


def test_a_setting_is_the_threads_own_where_torch_keeps_one_per_thread() -> None:
    from torch._functorch import config

    seen: list[bool] = []
    before = config.donated_buffer
    setting = Setting(config, "donated_buffer")
    with patched(setting, not before):
        assert config.donated_buffer is not before
        thread = threading.Thread(target=lambda: seen.append(config.donated_buffer))
        thread.start()
        thread.join()
    assert config.donated_buffer is before
    assert seen == [before if setting.is_of_thread else not before]


def test_threads_that_open_and_close_settings_at_once_keep_their_own() -> None:
    from torch._functorch import config

    if not Setting(config, "donated_buffer").is_of_thread:
        pytest.skip("this torch has one value for the whole process, and its threads see each other's patches")
    found: list[bool] = []

    def use() -> None:
        for _ in range(1_000):
            before = config.donated_buffer
            with patched(Setting(config, "donated_buffer"), not before):
                pass
            found.append(config.donated_buffer is before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        at_once(3, use)
    finally:
        sys.setswitchinterval(interval)
    assert all(found)


def test_settings_of_two_threads_close_in_any_order() -> None:
    from torch._functorch import config

    before = config.donated_buffer
    opened, closed, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with patched(Setting(config, "donated_buffer"), not before):
            opened.set()
            assert closed.wait(60)
            seen.append(config.donated_buffer)
        seen.append(config.donated_buffer)

    with patched(Setting(config, "donated_buffer"), not before):
        thread = threading.Thread(target=other)
        thread.start()
        assert opened.wait(60)
    closed.set()
    thread.join()
    assert seen == [not before, before]
    assert config.donated_buffer is before


# -- scenarios -----------------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    def __init__(self, during: Callable[[torch.Tensor], Any] = lambda x: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.during = during

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).relu()
        self.during(x)
        return x.sum()


def _raise(error: type[BaseException]) -> Callable[[torch.Tensor], Any]:
    def during(_: torch.Tensor) -> Any:
        raise error("the model's own")

    return during


@pytest.mark.parametrize("here", [True, False])
def test_settings_that_are_left_by_an_interrupt(here: bool) -> None:
    with pytest.raises(KeyboardInterrupt), capture_settings(here, None if here else CUDA):
        raise KeyboardInterrupt


def test_settings_that_are_closed_early_or_dropped() -> None:
    def use() -> Iterator[int]:
        with capture_settings(here=False, cuda=CUDA):
            yield 1
            yield 2

    closed, dropped = use(), use()
    assert next(closed) == next(dropped) == 1
    closed.close()
    del dropped


def test_a_capture_that_fails() -> None:
    model = ebbtide.fit(
        _Model(lambda x: print(1) if x.sum() > 0 else None), "100%", options=ebbtide.Options(verify=False)
    )
    with pytest.raises(CaptureError):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises(error: type[BaseException]) -> None:
    model = ebbtide.fit(_Model(_raise(error)), "100%", options=ebbtide.Options(verify=False))
    with pytest.raises((error, CaptureError)):
        model(torch.ones(2, 4))


def test_an_interrupt_while_a_step_is_traced() -> None:
    original = FakeTensorMode._dispatch_impl
    calls = [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return original(*args)

    with patched(Attribute(FakeTensorMode, "_dispatch_impl"), interrupted), pytest.raises(KeyboardInterrupt):
        ebbtide.plan(_Model(), (torch.ones(2, 4),), budget="1MiB")
    assert FakeTensorMode._dispatch_impl is original


def test_a_capture_inside_of_settings() -> None:
    """It opens the same patches once more, and is the same step."""
    alone = ebbtide.plan(_Model(), (torch.ones(2, 4),), budget="1MiB")
    with capture_settings(here=True):
        around = open_patches()
        inside = ebbtide.plan(_Model(), (torch.ones(2, 4),), budget="1MiB")
        assert open_patches() == around > 0
    assert inside.program.fingerprint == alone.program.fingerprint


def test_two_threads_that_capture() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ebbtide.plan(_Model(), (torch.ones(2, 4),), budget="1MiB")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_descriptions_of_another_thread_are_its_own() -> None:
    """A trace for CUDA on this thread leaves fake tensors of another alone, and neither fills the other's cache."""

    def statistics() -> torch.dtype:
        with FakeTensorMode():
            return torch.ops.aten.native_layer_norm.default(
                torch.empty(2, 4, dtype=torch.bfloat16), [4], None, None, 1e-5
            )[1].dtype

    there: list[torch.dtype] = []
    plain = statistics()
    with capture_settings(here=False, cuda=CUDA):
        assert statistics() == torch.float32
        thread = threading.Thread(target=lambda: there.append(statistics()))
        thread.start()
        thread.join()
        assert statistics() == torch.float32
    assert there == [plain] == [statistics()]
    assert plain != torch.float32


class _Features(torch.nn.Module):
    """Its loss is outside, so the first step watches for the end of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def _unfit(model: torch.nn.Module) -> None:
    ebbtide.unfit(model)


def _train_on(model: torch.nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _raise_in_backward(model: torch.nn.Module) -> None:
    output = model(torch.ones(2, 4))
    output.register_hook(_raise(ValueError))
    with pytest.raises(ValueError, match="the model's own"):
        output.sum().backward()


@pytest.mark.parametrize("then", [lambda model: None, _unfit, _train_on, _raise_in_backward])
def test_no_backward_comes(then: Callable[[torch.nn.Module], None]) -> None:
    entry = torch.autograd._engine_run_backward
    model = ebbtide.fit(_Features(), "1MiB", options=ebbtide.Options(verify=False))
    output = model(torch.ones(2, 4))
    assert open_patches() == 5, "zero_grad twice, watch, recording, what gives way to others; until a backward comes"
    del output
    then(model)
    del model
    gc.collect()
    assert open_patches() == 0
    assert torch.autograd._engine_run_backward is entry
    assert not profiler_active()


def test_a_dropped_recorder_leaves_no_profiler() -> None:
    recorder = AllocationRecorder()
    recorder.start()
    assert profiler_active()
    del recorder
    gc.collect()
    assert not profiler_active()


# -- the end of a backward -----------------------------------------------------------------------------------------


class _Gauge:
    """An owner of a watch that is told by a bound method."""

    def __init__(self) -> None:
        self.told = 0
        self.watch = BackwardWatch(self.tell)
        self.watch.open()

    def tell(self) -> None:
        self.told += 1
        self.watch.close()


def test_a_watch_may_close_itself() -> None:
    gauge, value = _Gauge(), torch.ones((), requires_grad=True)
    (value * 2).backward()
    (value * 2).backward()
    assert gauge.told == 1


def test_a_watch_is_told_of_a_backward_that_raises() -> None:
    gauge = _Gauge()
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert gauge.told == 1


def test_a_watch_whose_owner_is_gone_is_closed() -> None:
    gauge = _Gauge()
    assert open_patches() == 1
    del gauge
    gc.collect()
    assert open_patches() == 0
