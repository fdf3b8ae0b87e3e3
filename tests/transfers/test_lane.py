"""A lane copies in order, keeps nothing, and survives failures, idleness and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref

import pytest

from ebbtide.transfers import lane as lanes
from ebbtide.transfers.lane import Lane


class Thing:
    pass


def test_jobs_run_in_order_on_a_thread_of_their_own():
    lane, done = Lane("test"), list[tuple[int, int]]()
    jobs = [lane.submit(lambda i=i: done.append((i, threading.get_ident()))) for i in range(20)]
    jobs[-1].wait()
    assert [i for i, _ in done] == list(range(20))
    assert {thread for _, thread in done} != {threading.get_ident()}
    assert all(job.done and not job.failure for job in jobs)


def test_what_is_copied_is_let_go_before_the_job_is_done():
    lane, thing = Lane("test"), Thing()
    watch = weakref.ref(thing)

    def work(it: Thing = thing) -> None:
        assert it is not None

    job = lane.submit(work)
    del work, thing
    job.wait()
    gc.collect()
    assert watch() is None


def test_a_failure_is_kept_as_text_and_the_next_job_runs():
    lane, thing = Lane("test"), Thing()
    watch = weakref.ref(thing)

    def fail(it: Thing = thing) -> None:
        raise OSError(28, "No space left on device")

    ended: list[str] = []
    job = lane.submit(fail, lambda: ended.append("fail"))
    del fail, thing
    job.wait()
    gc.collect()
    assert job.failure == "No space left on device"
    assert ended == ["fail"]
    assert watch() is None
    after = lane.submit(lambda: None)
    after.wait()
    assert not after.failure


def test_a_cancelled_job_does_nothing_and_ends():
    lane, gate, ran = Lane("test"), threading.Event(), list[int]()
    first = lane.submit(gate.wait)
    ended: list[int] = []
    second = lane.submit(lambda: ran.append(1), lambda: ended.append(1))
    second.cancel()
    gate.set()
    first.wait()
    second.wait()
    assert ran == []
    assert ended == [1]


def test_an_idle_lane_has_no_thread_and_starts_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lanes, "_IDLE_SECONDS", 0.02)
    lane = Lane("that idles")
    lane.submit(lambda: None).wait()
    deadline = time.monotonic() + 10
    while any(thread.name == "ebbtide that idles" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lane.submit(lambda: None).wait()


def test_a_forked_child_has_lanes_of_its_own():
    lane, gate = Lane("test"), threading.Event()
    held = lane.submit(gate.wait)
    child = os.fork()
    if not child:
        ok = 1
        try:
            job = lane.submit(lambda: None)
            job.wait()
            ok = 0 if job.done else 1
        finally:
            os._exit(ok)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    held.wait()


def test_where_no_thread_can_be_started_whoever_submits_does_the_job(monkeypatch: pytest.MonkeyPatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lane, done = Lane("test"), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert lane.submit(lambda: done.append(threading.get_ident())).done
    later = lane.submit(lambda: done.append(threading.get_ident()))
    later.wait()
    assert done[0] == threading.get_ident() != done[1]


def test_an_interrupted_submit_leaves_a_lane_that_works(monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    lane, done = Lane("test to interrupt"), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.submit(lambda: done.append(-1))
    jobs = [lane.submit(lambda i=i: done.append(i)) for i in range(5)]
    jobs[-1].wait()
    assert done == [0, 1, 2, 3, 4], "what was not submitted is not done"
    for _ in range(1000):  # the first thread sees that it is not wanted once it comes to run
        if [each.name for each in threading.enumerate()].count("ebbtide test to interrupt") == 1:
            return
        time.sleep(0.005)
    raise AssertionError("two threads serve one lane")


def test_an_end_that_fails_does_not_end_the_lane():
    def fail() -> None:
        raise ZeroDivisionError

    lane = Lane("test")
    job = lane.submit(lambda: None, fail)
    job.wait()
    assert "ZeroDivisionError" in job.failure
    after = lane.submit(lambda: None)
    after.wait()
    assert not after.failure


def test_ctrl_c_while_somebody_waits_stops_nobody():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    lane = Lane("test")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(300):
            job = lane.submit(lambda: time.sleep(2e-4))
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 2e-6 * i)
                job.wait()
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            job.wait()
            assert job.done
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
