"""State of optimizers that is away: every way to read it brings it back, and no failure loses it."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import pickle
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ebbtide.errors import TierError
from ebbtide.measurement.resident import storages_in
from ebbtide.optimizer.offload import batch as batches
from ebbtide.optimizer.offload.optimizer_offload import LEAST_BYTES, OptimizerOffload, offload_of
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
def way(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path)
    yield tier
    tier.give_up_free()


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    return stepped()


@pytest.fixture
def parking(optimizer: torch.optim.Optimizer, way: DiskTier) -> OptimizerOffload:
    return offload_of(optimizer, way)


READS: dict[str, Callable[[torch.Tensor, torch.optim.Optimizer], Any]] = {
    "arithmetic": lambda t, _: t + 0,
    "in place": lambda t, _: t.mul_(1),
    "function": lambda t, _: torch.add(torch.zeros(SIZE), t),
    "list of tensors": lambda t, _: torch._foreach_mul([t], 1.0)[0],
    "aten": lambda t, _: torch.ops.aten.clone.default(t),
    "element": lambda t, _: torch.stack([t[0], *t[1:].split(SIZE)[0]]),
    "data": lambda t, _: t.data,
    "numpy": lambda t, _: torch.from_numpy(t.numpy().copy()),
    "array": lambda t, _: torch.from_numpy(np.asarray(t)),
    "dlpack": lambda t, _: torch.from_dlpack(t).clone(),
    "deepcopy": lambda t, _: copy.deepcopy(t),
    "pickle": lambda t, _: pickle.loads(pickle.dumps(t)),
    "print": lambda t, _: (repr(t), t)[1],
    "storage": lambda t, _: torch.empty(0).set_(t.untyped_storage(), 0, (SIZE,)),
    "copy_": lambda t, _: torch.empty(SIZE).copy_(t),
    "state_dict": lambda _, o: copy.deepcopy(o.state_dict())["state"][0]["exp_avg"],
    "save": lambda _, o: saved(o)["state"][0]["exp_avg"],
    "copied optimizer": lambda _, o: moments(copy.deepcopy(o))[0],
    "loaded": lambda _, o: loaded(o),
    "thread": lambda t, _: in_thread(lambda: t.clone()),
    "compiled": lambda t, _: torch.compile(lambda x: x * 1, backend="eager")(t),
}


def saved(optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def loaded(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    other = torch.optim.Adam([torch.nn.Parameter(torch.randn(SIZE)) for _ in range(2)])
    other.load_state_dict(optimizer.state_dict())
    return moments(other)[0]


def in_thread(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("read", READS)
def test_reading_brings_it_back(read: str, optimizer: torch.optim.Optimizer, parking: OptimizerOffload) -> None:
    held = moments(optimizer)[0]
    expected = held.clone()
    parking.leave()
    assert all(map(is_offloaded, moments(optimizer)))
    assert torch.equal(READS[read](held, optimizer), expected)
    assert moments(optimizer)[0] is held, "a reference is another tensor's now"
    assert type(held) is torch.Tensor
    assert not vars(held)
    assert parking.traffic.in_bytes == parking.traffic.out_bytes == 4 * LEAST_BYTES
    parking.leave()
    assert is_offloaded(held)


def test_a_signal_handler_may_read_at_any_moment(
    optimizer: torch.optim.Optimizer, parking: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, handling = [each.clone() for each in moments(optimizer)], []

    def handle() -> None:
        if not handling:
            handling.append(True)
            assert all(map(torch.equal, moments(optimizer), expected))
            handling.clear()

    def reading(function: Callable[..., Any]) -> Callable[..., Any]:
        """As ``function``, but that somebody reads all state on this thread before it is called and after."""

        def read(*args: Any, **kwargs: Any) -> Any:
            handle()
            result = function(*args, **kwargs)
            handle()
            return result

        return read

    for name in ("is_read_elsewhere", "fill", "forget"):
        with monkeypatch.context() as patch:
            patch.setattr(batches, name, reading(getattr(batches, name)))
            parking.leave()
            parking.back()
        parking.leave()
        assert all(map(is_offloaded, moments(optimizer)))
        parking.back()
    assert not any(vars(each) for each in moments(optimizer))


def test_ctrl_c_while_it_comes_back_loses_nothing(
    optimizer: torch.optim.Optimizer, parking: OptimizerOffload, way: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, slow = [each.clone() for each in moments(optimizer)], threading.Event()
    parking.leave()
    preadv = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *args: slow.wait(10) and preadv(*args))
        patch.setattr(Job, "wait", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                moments(optimizer)[0].sum()
    others = [torch.full((SIZE,), 7.0) for _ in range(8)]  # where the copies that are under way must not write
    slow.set()
    assert all(map(torch.equal, moments(optimizer), expected))
    assert all(bool((each == 7).all()) for each in others)
    parking.leave()
    assert all(map(is_offloaded, moments(optimizer)))


def test_a_thread_that_reads_while_it_leaves_reads_what_is_there(way: DiskTier) -> None:
    optimizer = stepped(1, functools.partial(torch.optim.SGD, momentum=0.9))
    held = next(iter(optimizer.state.values()))["momentum_buffer"]
    held.set_(torch.ones(8 * 2**20))
    parking, ends, sums = offload_of(optimizer, way), threading.Event(), set[float]()

    def read() -> None:
        while not ends.is_set():
            sums.add(float(held.clone()[-1]))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        parking.leave()
        time.sleep(0.002)
    ends.set()
    thread.join()
    assert sums == {1.0}


def test_a_finalizer_of_garbage_may_read_it(optimizer: torch.optim.Optimizer, parking: OptimizerOffload) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.own, self.optimizer, self.found = self, optimizer, found

        def __del__(self) -> None:
            self.found.append(moments(self.optimizer)[0].clone())

    found: list[torch.Tensor] = []
    expected = moments(optimizer)[0].clone()
    keeper = Keeper()
    parking.leave()
    tensor = moments(optimizer)[0]
    keeper.first = tensor  # type: ignore[attr-defined]
    del keeper, tensor
    gc.collect()
    assert torch.equal(found[0], expected)


AT_EXIT = """
import atexit, sys
sys.modules["dill"] = None  # torch imports it where it is there, and it holds this module until torch is gone
import torch
class Last:
    def __del__(self):
        self.check("at the end")
last = Last()
def check(when):
    print(when, all(map(torch.equal, expected, [each["exp_avg"] for each in optimizer.state.values()])))
{before}
from pathlib import Path
from ebbtide.transfers.disk import DiskTier
from ebbtide.optimizer.offload.optimizer_offload import offload_of
parameters = [torch.nn.Parameter(torch.randn(100_000)) for _ in range(2)]
optimizer = torch.optim.Adam(parameters)
for each in parameters:
    each.grad = torch.randn(100_000)
optimizer.step()
expected = [each["exp_avg"].clone() for each in optimizer.state.values()]
offload_of(optimizer, DiskTier(Path({directory!r}))).leave()
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("atexit.register(check, 'atexit')", marks=pytest.mark.long),
        "last.check = check; sys.modules['x'] = last",
    ],
)
def test_it_can_be_read_as_the_interpreter_ends(before: str, tmp_path: Path) -> None:
    code = AT_EXIT.format(before=before, directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("True\n"), done.stderr
    assert not list(tmp_path.iterdir())


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


def test_state_is_found_wherever_an_optimizer_keeps_it(way: DiskTier) -> None:
    optimizer = stepped(2, _Odd)
    assert isinstance(optimizer, _Odd)
    kept = [*optimizer.state["shared"].values(), *optimizer.param_groups[0]["kept"].values()]
    kept += [each["momentum_buffer"] for each in optimizer.inner.state.values()]
    offload_of(optimizer, way).leave()
    assert len(kept) == 6
    assert all(map(is_offloaded, kept))
    optimizer.step()
    assert not any(map(is_offloaded, kept))


def test_a_model_that_holds_its_optimizers_state_does_not_bring_it_back(
    optimizer: torch.optim.Optimizer, parking: OptimizerOffload
) -> None:
    model = torch.nn.Linear(2, 2)
    model.moments = moments(optimizer)  # type: ignore[assignment]
    parking.leave()
    assert storages_in([model]).keys() == walk(model)[2].keys()
    assert sum(storages_in([model]).values()) == 24
    assert all(map(is_offloaded, moments(optimizer)))


def test_what_is_made_of_tensors_counts_by_these() -> None:
    assert sum(storages_in([torch.eye(8).to_sparse()]).values()) == 2 * 8 * 8 + 8 * 4
    assert sum(storages_in([TwoTensor(torch.ones(8), torch.ones(8))]).values()) == 64


def test_what_needs_no_memory_brings_nothing_back(optimizer: torch.optim.Optimizer, parking: OptimizerOffload) -> None:
    held = moments(optimizer)[0]
    parking.leave()
    assert (held.shape, held.dtype, held.device.type, held.numel()) == ((SIZE,), torch.float32, "cpu", SIZE)
    assert held.nbytes == held.numel() * held.element_size() == LEAST_BYTES
    assert (len(held), held.dim(), held.stride(), held.requires_grad, held.grad_fn) == (SIZE, 1, (1,), False, None)
    assert is_offloaded(held)
    with torch._C.DisableTorchFunctionSubclass():
        assert held.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_steps_are_those_of_a_state_that_never_left(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], way: DiskTier
) -> None:
    twins: list[torch.optim.Optimizer] = []
    for leaving in (False, True):
        torch.manual_seed(0)
        optimizer = stepped(kind=lambda p, lr: kind(p, lr=lr, **options))
        for _ in range(3):
            if leaving:
                offload_of(optimizer, way).leave()
            for each in optimizer.param_groups[0]["params"]:
                each.grad = torch.randn_like(each)
            optimizer.step()
        twins.append(optimizer)
    for one, other in zip(twins[0].param_groups[0]["params"], twins[1].param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        for name, value in twins[0].state[one].items():
            assert torch.equal(value, twins[1].state[other][name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_step_brings_it_back(way: DiskTier) -> None:
    optimizer, reference = twins = stepped(1), stepped(1)
    for each in twins:
        each.load_state_dict(copy.deepcopy(reference.state_dict()))
    parking, step = offload_of(optimizer, way), torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        parking.leave()
        for each in twins:
            each.param_groups[0]["params"][0].grad = torch.ones(SIZE)
        step()
        reference.step()
    assert torch.equal(moments(optimizer)[0], moments(reference)[0])


def test_what_somebody_else_has_stays(optimizer: torch.optim.Optimizer, parking: OptimizerOffload) -> None:
    first, second = moments(optimizer)
    others: list[Any] = [first[:3], first.detach(), first.untyped_storage(), np.from_dlpack(first)]
    while others:
        parking.leave()
        assert not is_offloaded(first), type(others[-1])
        assert is_offloaded(second)
        parking.back()
        others.pop()
    parking.leave()
    assert is_offloaded(first)
    parking.back()
    array = second.numpy()
    parking.leave()
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
    optimizer: torch.optim.Optimizer, parking: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [each.clone() for each in moments(optimizer)]
    parking.leave()
    parking.back()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(TierError, match="moving the optimizer's state 0"):
            parking.leave()
    assert not any(map(is_offloaded, moments(optimizer)))
    assert all(map(torch.equal, moments(optimizer), expected))
    parking.leave()
    assert all(map(torch.equal, moments(optimizer), expected))


def test_a_disk_that_fails_on_the_way_back_loses_nothing(
    optimizer: torch.optim.Optimizer, parking: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [each.clone() for each in moments(optimizer)]
    parking.leave()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(TierError, match="is fetched again when it is read next"):
            optimizer.step()
        with pytest.raises(TierError):
            moments(optimizer)[0].sum()
    assert is_offloaded(moments(optimizer)[0])
    assert all(map(torch.equal, moments(optimizer), expected))


@pytest.mark.parametrize("kept", ["state_dict", "error", "nothing"])
def test_after_a_lost_disk_training_goes_on_from_a_checkpoint(
    kept: str, optimizer: torch.optim.Optimizer, parking: OptimizerOffload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the lost state still, in a dictionary or an error: it is not the optimizer's any more."""
    checkpoint = copy.deepcopy(optimizer.state_dict())
    expected = [each.clone() for each in moments(optimizer)]
    parking.leave()
    held: list[object] = [optimizer.state_dict()["state"]] if kept == "state_dict" else []
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
        parking.leave()
        with pytest.raises(TierError):  # of the optimizer's own state
            optimizer.step()
    optimizer.step()
    assert not any(map(is_offloaded, moments(optimizer)))
    parking.end()
    assert len(held) == (kept != "nothing")


def test_regions_go_with_the_state(way: DiskTier) -> None:
    optimizer = stepped()
    offload_of(optimizer, way).leave()
    assert not way._free
    held = moments(optimizer)
    expected = len(held)
    del optimizer
    gc.collect()
    assert len([each.sum() for each in held]) == expected  # whoever holds a tensor can read it still
    assert len(way._free) == 1
    optimizer = stepped()
    offload_of(optimizer, way).leave()
    del optimizer, held
    gc.collect()
    assert len(way._free) == 1


def test_a_forked_process_is_told(optimizer: torch.optim.Optimizer, parking: OptimizerOffload) -> None:
    expected = moments(optimizer)[0].clone()
    parking.leave()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            moments(optimizer)[0].sum()
        except TierError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    assert b"this process was forked while the optimizer's state was on the disk tier" in os.read(reader, 1000)
    os.close(reader)
    assert torch.equal(moments(optimizer)[0], expected)


def test_models_share_the_parking_of_an_optimizer(optimizer: torch.optim.Optimizer, way: DiskTier) -> None:
    one, other = offload_of(optimizer, way), offload_of(optimizer, way)
    assert one is other
    one.leave()
    one.end()
    assert not any(map(is_offloaded, moments(optimizer)))
    other.leave()
    assert is_offloaded(moments(optimizer)[0])
    other.end()
    assert offload_of(optimizer, way) is not one


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
            assert readers.is_read_elsewhere(container, 0, lambda: True), f"{elsewhere} is another reference"
    finally:
        os.write(there, b".")
        thread.join()
        os.close(here)
        os.close(there)
