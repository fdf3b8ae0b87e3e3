"""Offloaded state: back for all that an optimizer does, refused to whoever else reads it, lost by no failure."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ebbtide.errors import TierError, UsageError
from ebbtide.measurement.resident import storages_in
from ebbtide.optimizer.cost.forecast import LEAST_BYTES
from ebbtide.optimizer.offload import batch as batches
from ebbtide.optimizer.offload.optimizer_offload import OptimizerOffload, offload_of
from ebbtide.torch_seams import readers
from ebbtide.torch_seams.offloaded import can_offload, is_offloaded
from ebbtide.torch_seams.storages import walk
from ebbtide.transfers.disk import DiskTier
from ebbtide.transfers.lane import Job

SIZE = LEAST_BYTES // 4


def stepped(count: int = 2, kind: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> torch.optim.Optimizer:
    """An optimizer of ``count`` parameters that has stepped once."""
    parameters = [torch.nn.Parameter(torch.randn(SIZE)) for _ in range(count)]
    optimizer = kind(parameters, lr=1e-3)
    for each in parameters:
        each.grad = torch.randn_like(each)
    optimizer.step()
    return optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its first moments."""
    return [state["exp_avg"] for state in optimizer.state.values()]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path)
    yield tier
    tier.give_up_free()


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    return stepped()


@pytest.fixture
def offload(optimizer: torch.optim.Optimizer, disk: DiskTier) -> OptimizerOffload:
    return offload_of(optimizer, disk)


READS: dict[str, Callable[[torch.Tensor, torch.optim.Optimizer], Any]] = {
    "arithmetic": lambda t, _: t + 0,
    "in place": lambda t, _: t.mul_(1),
    "function": lambda t, _: torch.add(torch.zeros(SIZE), t),
    "list of tensors": lambda t, _: torch._foreach_mul([t], 1.0)[0],
    "aten": lambda t, _: torch.ops.aten.clone.default(t),
    "element": lambda t, _: t[0],
    "data": lambda t, _: t.data,
    "numpy": lambda t, _: t.numpy(),
    "array": lambda t, _: np.asarray(t),
    "dlpack": lambda t, _: torch.from_dlpack(t),
    "deepcopy": lambda t, _: copy.deepcopy(t),
    "pickle": lambda t, _: pickle.dumps(t),
    "storage": lambda t, _: t.untyped_storage(),
    "copy_": lambda t, _: torch.empty(SIZE).copy_(t),
    "copied optimizer": lambda _, o: copy.deepcopy(o),
    "thread": lambda t, _: in_thread(lambda: t.clone()),
}


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("read", READS)
def test_who_reads_it_in_the_middle_of_a_step_is_refused_by_name(
    read: str, optimizer: torch.optim.Optimizer, offload: OptimizerOffload
) -> None:
    held = moments(optimizer)[0]
    expected = held.clone()
    offload.send()
    assert all(map(is_offloaded, moments(optimizer)))
    with pytest.raises(UsageError, match=r"is given state of Adam that is on the disk tier .*offload_optimizer=True"):
        READS[read](held, optimizer)
    assert all(map(is_offloaded, moments(optimizer)))
    optimizer.state_dict()
    assert torch.equal(held, expected)
    assert moments(optimizer)[0] is held, "a reference is another tensor's now"
    assert type(held) is torch.Tensor
    assert not vars(held)
    assert offload.traffic.in_bytes == offload.traffic.out_bytes == 4 * LEAST_BYTES
    offload.send()
    assert is_offloaded(held)


def test_the_refusal_names_the_function(optimizer: torch.optim.Optimizer, offload: OptimizerOffload) -> None:
    offload.send()
    held = moments(optimizer)[0]
    with pytest.raises(UsageError, match=r"torch\.Tensor\.norm is given .*\.state_dict\(\), which brings it back"):
        held.norm()
    assert repr(held) == f"tensor(..., size=({SIZE},), offloaded)"


def saved(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return [each["exp_avg"] for each in torch.load(file)["state"].values()]


def loaded(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[torch.Tensor]:
    optimizer.load_state_dict(state)
    return moments(optimizer)


def handled(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The checkpoint that a handler of a signal saves."""
    found: list[torch.Tensor] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: found.extend(saved(optimizer)))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    return found


CHECKPOINTS: dict[str, Callable[[torch.optim.Optimizer], list[torch.Tensor]]] = {
    "state_dict": lambda o: [each["exp_avg"] for each in copy.deepcopy(o.state_dict())["state"].values()],
    "saved": saved,
    "saved by a thread": lambda o: in_thread(lambda: saved(o)),
    "saved by a signal handler": handled,
    "loaded into another": lambda o: loaded(torch.optim.Adam(o.param_groups[0]["params"]), o.state_dict()),
    "loaded again": lambda o: loaded(o, o.state_dict()),
}


@pytest.mark.parametrize("take", CHECKPOINTS)
def test_checkpoints_are_what_they_are_without(
    take: str, optimizer: torch.optim.Optimizer, offload: OptimizerOffload
) -> None:
    expected = [each.clone() for each in moments(optimizer)]
    offload.send()
    assert all(map(is_offloaded, moments(optimizer)))
    assert all(map(torch.equal, CHECKPOINTS[take](optimizer), expected))
    offload.send()
    assert all(map(is_offloaded, moments(optimizer)))


def test_what_was_taken_before_a_step_can_be_loaded_in_its_middle(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload
) -> None:
    """The dictionary has the very tensors."""
    kept, expected = optimizer.state_dict(), [each.clone() for each in moments(optimizer)]
    offload.send()
    assert all(map(torch.equal, loaded(optimizer, kept), expected))


def test_a_hook_before_the_step_may_read_it(optimizer: torch.optim.Optimizer, disk: DiskTier) -> None:
    sums: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: sums.append(float(moments(optimizer)[0].sum())))
    expected = float(moments(optimizer)[0].sum())
    offload_of(optimizer, disk).send()
    optimizer.step()
    assert sums == [expected]


def test_a_signal_handler_saves_a_checkpoint_at_any_moment(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [each.clone() for each in moments(optimizer)]
    found, handling = list[list[torch.Tensor]](), list[bool]()

    def signalled(function: Callable[..., Any]) -> Callable[..., Any]:
        """As ``function``, with a signal before it and after."""

        def call(*args: Any, **kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            result = function(*args, **kwargs)
            signal.raise_signal(signal.SIGUSR1)
            return result

        return call

    def handle(*_: object) -> None:
        if not handling:
            handling.append(True)
            found.append(saved(optimizer))
            handling.clear()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for name in ("refuse_reads", "is_read_elsewhere", "fill"):
            with monkeypatch.context() as patch:
                patch.setattr(batches, name, signalled(getattr(batches, name)))
                offload.send()
                offload.bring_back()
            offload.send()
            assert all(map(is_offloaded, moments(optimizer)))
            offload.bring_back()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(found) >= 3
    assert all(all(map(torch.equal, each, expected)) for each in found)
    assert not any(vars(each) for each in moments(optimizer))


def test_ctrl_c_while_it_comes_back_loses_nothing(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, slow = [each.clone() for each in moments(optimizer)], threading.Event()
    offload.send()
    preadv = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *args: slow.wait(10) and preadv(*args))
        patch.setattr(Job, "wait", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                optimizer.state_dict()
    others = [torch.full((SIZE,), 7.0) for _ in range(8)]  # where the copies that are under way must not write
    slow.set()
    offload.bring_back()
    assert all(map(torch.equal, moments(optimizer), expected))
    assert all(bool((each == 7).all()) for each in others)
    offload.send()
    assert all(map(is_offloaded, moments(optimizer)))


def test_a_thread_that_reads_while_it_leaves_reads_what_is_there_or_is_refused(disk: DiskTier) -> None:
    optimizer = stepped(1, functools.partial(torch.optim.SGD, momentum=0.9))
    held = next(iter(optimizer.state.values()))["momentum_buffer"]
    held.set_(torch.ones(8 * 2**20))
    offload, ends, sums = offload_of(optimizer, disk), threading.Event(), set[float]()

    def read() -> None:
        while not ends.is_set():
            with suppress(UsageError):
                sums.add(float(held.clone()[-1]))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        offload.send()
        time.sleep(0.002)
        offload.bring_back()
    ends.set()
    thread.join()
    assert sums == {1.0}


class _Odd(torch.optim.Optimizer):
    """State under a name, in a group, sparse, and in an optimizer that it holds."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for index, each in enumerate(group["params"]):
                self.state["shared"].setdefault(index, torch.zeros_like(each)).add_(each.grad)
                self.state[each]["few"] = (each.grad * (each.grad > 1)).to_sparse()
                group.setdefault("kept", {}).setdefault(index, torch.zeros_like(each)).add_(each.grad)
        self.inner.step()


def test_state_is_found_wherever_an_optimizer_keeps_it(disk: DiskTier) -> None:
    optimizer = stepped(2, _Odd)
    assert isinstance(optimizer, _Odd)
    kept = [*optimizer.state["shared"].values(), *optimizer.param_groups[0]["kept"].values()]
    kept += [each["momentum_buffer"] for each in optimizer.inner.state.values()]
    offload_of(optimizer, disk).send()
    assert len(kept) == 6
    assert all(map(is_offloaded, kept))
    optimizer.step()
    assert not any(map(is_offloaded, kept))


def test_a_model_that_holds_its_optimizers_state_does_not_bring_it_back(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload
) -> None:
    model = torch.nn.Linear(2, 2)
    model.moments = moments(optimizer)  # type: ignore[assignment]
    offload.send()
    assert storages_in([model]).keys() == walk(model)[2].keys()
    assert sum(storages_in([model]).values()) == 24
    assert all(map(is_offloaded, moments(optimizer)))


def test_what_is_made_of_tensors_counts_by_these() -> None:
    assert sum(storages_in([torch.eye(8).to_sparse()]).values()) == 2 * 8 * 8 + 8 * 4
    assert sum(storages_in([TwoTensor(torch.ones(8), torch.ones(8))]).values()) == 64


def test_what_needs_no_memory_is_answered(optimizer: torch.optim.Optimizer, offload: OptimizerOffload) -> None:
    held = moments(optimizer)[0]
    offload.send()
    assert (held.shape, held.dtype, held.device.type, held.numel()) == ((SIZE,), torch.float32, "cpu", SIZE)
    assert held.nbytes == held.numel() * held.element_size() == LEAST_BYTES
    assert (len(held), held.dim(), held.stride(), held.requires_grad, held.grad_fn) == (SIZE, 1, (1,), False, None)
    assert is_offloaded(held)
    with torch._C.DisableTorchFunctionSubclass():
        assert held.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_steps_are_those_of_a_state_that_never_left(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], disk: DiskTier
) -> None:
    twins: list[torch.optim.Optimizer] = []
    for leaving in (False, True):
        torch.manual_seed(0)
        optimizer = stepped(kind=lambda p, lr: kind(p, lr=lr, **options))
        for _ in range(3):
            if leaving:
                offload_of(optimizer, disk).send()
            for each in optimizer.param_groups[0]["params"]:
                each.grad = torch.randn_like(each)
            optimizer.step()
        twins.append(optimizer)
    for one, other in zip(twins[0].param_groups[0]["params"], twins[1].param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        for name, value in twins[0].state[one].items():
            assert torch.equal(value, twins[1].state[other][name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_step_brings_it_back(disk: DiskTier) -> None:
    optimizer, reference = twins = stepped(1), stepped(1)
    for each in twins:
        each.load_state_dict(copy.deepcopy(reference.state_dict()))
    offload, step = offload_of(optimizer, disk), torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        offload.send()
        for each in twins:
            each.param_groups[0]["params"][0].grad = torch.ones(SIZE)
        step()
        reference.step()
    assert torch.equal(moments(optimizer)[0], moments(reference)[0])


def test_what_somebody_else_has_stays(optimizer: torch.optim.Optimizer, offload: OptimizerOffload) -> None:
    first, second = moments(optimizer)
    others: list[Any] = [first[:3], first.detach(), first.untyped_storage(), np.from_dlpack(first)]
    while others:
        offload.send()
        assert not is_offloaded(first), type(others[-1])
        assert is_offloaded(second)
        offload.bring_back()
        others.pop()
    offload.send()
    assert is_offloaded(first)
    offload.bring_back()
    array = second.numpy()
    offload.send()
    assert not is_offloaded(second)
    assert array[0] == second[0]


def test_only_what_is_large_and_plain_can_leave() -> None:
    fitting = torch.zeros(SIZE)
    assert can_offload(fitting)
    assert can_offload(torch.empty_strided((8, SIZE // 8), (1, 8)))
    assert not can_offload(torch.zeros(2 * SIZE)[SIZE:])
    assert not can_offload(torch.nn.Parameter(fitting))
    assert not can_offload(torch.zeros(SIZE).share_memory_())
    assert not can_offload(torch.from_numpy(np.zeros(SIZE)))
    assert not can_offload(torch.zeros(SIZE).to_sparse())


def failing(*_: object) -> int:
    raise OSError(5, "Input/output error")


def test_a_disk_that_fails_on_the_way_out_leaves_everything_in_place(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [each.clone() for each in moments(optimizer)]
    offload.send()
    offload.bring_back()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(TierError, match="moving the optimizer's state 0"):
            offload.send()
    assert not any(map(is_offloaded, moments(optimizer)))
    assert all(map(torch.equal, moments(optimizer), expected))
    offload.send()
    offload.bring_back()
    assert all(map(torch.equal, moments(optimizer), expected))


def test_a_disk_that_fails_on_the_way_back_loses_nothing(
    optimizer: torch.optim.Optimizer, offload: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [each.clone() for each in moments(optimizer)]
    offload.send()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(TierError, match="is fetched again by the next"):
            optimizer.step()
        with pytest.raises(TierError):
            optimizer.state_dict()
    assert is_offloaded(moments(optimizer)[0])
    offload.bring_back()
    assert all(map(torch.equal, moments(optimizer), expected))


@pytest.mark.parametrize("kept", ["state", "error", "nothing"])
def test_after_a_lost_disk_training_goes_on_from_a_checkpoint(
    kept: str, optimizer: torch.optim.Optimizer, offload: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the lost state still, in a dictionary or an error: it is not the optimizer's any more."""
    checkpoint = copy.deepcopy(optimizer.state_dict())
    expected = [each.clone() for each in moments(optimizer)]
    offload.send()
    held: list[object] = [dict(optimizer.state)] if kept == "state" else []
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(TierError) as raised:
            optimizer.step()
        if kept == "error":
            held.append((raised.value, [*optimizer.state.values()]))
        del raised
        optimizer.load_state_dict(checkpoint)
        assert all(map(torch.equal, moments(optimizer), expected))
        optimizer.step()
        offload.send()
        with pytest.raises(TierError):  # of the optimizer's own state
            optimizer.step()
    optimizer.step()
    assert not any(map(is_offloaded, moments(optimizer)))
    offload.release()
    assert len(held) == (kept != "nothing")


def test_regions_go_with_the_optimizer(disk: DiskTier) -> None:
    optimizer = stepped()
    offload_of(optimizer, disk).send()
    assert not disk._free
    held = moments(optimizer)
    del optimizer
    gc.collect()
    assert len(disk._free) == 1
    with pytest.raises(UsageError):
        held[0].sum()


def test_a_forked_process_is_told(optimizer: torch.optim.Optimizer, offload: OptimizerOffload) -> None:
    expected = moments(optimizer)[0].clone()
    offload.send()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            optimizer.state_dict()
        except TierError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"this process was forked while the optimizer's state was on the disk tier" in os.read(reader, 1000)
    os.close(reader)
    offload.bring_back()
    assert torch.equal(moments(optimizer)[0], expected)


def test_models_share_the_offload_of_an_optimizer(optimizer: torch.optim.Optimizer, disk: DiskTier) -> None:
    one, other = offload_of(optimizer, disk), offload_of(optimizer, disk)
    assert one is other
    one.send()
    one.release()
    assert not any(map(is_offloaded, moments(optimizer)))
    other.send()
    assert is_offloaded(moments(optimizer)[0])
    other.release()
    assert offload_of(optimizer, disk) is not one


@pytest.mark.parametrize("has_torch", [False, True])
def test_a_thread_of_an_installed_package_that_has_no_torch_reads_nothing(has_torch: bool) -> None:
    """Notebooks, debuggers and test runners have threads that wait for their channel, however they do it."""
    here, there = os.pipe()
    names: dict[str, Any] = {"__name__": "channel", "os": os, **({"nn": torch.nn} if has_torch else {})}
    path = Path(sysconfig.get_path("purelib")) / "channel" / "base.py"
    exec(compile(f"def receive():\n    os.read({here}, 1)", path, "exec"), names)
    thread = threading.Thread(target=names["receive"], daemon=True)
    thread.start()
    while thread.ident not in sys._current_frames():
        time.sleep(0.001)
    tensor = torch.zeros(4)
    container, elsewhere = [tensor], [tensor]
    frame = sys._current_frames()[thread.ident]
    try:
        while frame.f_code.co_filename != str(path):
            time.sleep(0.001)
            frame = sys._current_frames()[thread.ident]
        assert readers._may_read(frame) is has_torch
        if has_torch:
            assert readers.is_read_elsewhere(container, 0), f"{elsewhere} is another reference"
    finally:
        os.write(there, b".")
        thread.join()
        os.close(here)
        os.close(there)
