"""A model that looks at the values of its inputs goes eager's way, call by call, and every way is planned."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ebbtide
from ebbtide.engine import compiled
from ebbtide.errors import BudgetError, CaptureError
from ebbtide.measurement.cpu_allocations import AllocationRecorder, peak_above
from ebbtide.torch_seams.patches import open_patches
from sampled import sampled

Body = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MASKS = ([1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1])


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), body
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.linear(x), x, mask).sum()


def trains_as_eager(body: Body, masks: Iterator[torch.Tensor] | None = None) -> nn.Module:
    """Train eager and fitted side by side on calls that go several ways; what comes of it is equal in every bit."""
    torch.manual_seed(0)
    eager = Model(body)
    fitted = ebbtide.fit(copy.deepcopy(eager), "1GiB", progress=None)
    given = masks or (torch.tensor(each) for each in MASKS)
    for count, mask in enumerate(given, start=1):
        x = torch.randn(len(mask), 8)
        found = []
        for model in (eager, fitted):
            model.zero_grad()
            loss = model(x, mask.clone())
            loss.backward()
            found.append([loss.detach(), *(each.grad for each in model.parameters()), *model.buffers()])
        assert all(map(torch.equal, *found)), f"call {count} of {body.__name__}"
        assert ebbtide.calls_of(fitted).planned == count
    assert not ebbtide.calls_of(fitted).unplanned
    return fitted


# -- ways of asking ------------------------------------------------------------------------------------------------


def plain(m: Any, y: Any, x: Any, mask: Any) -> Any:
    if mask.all():
        return y * 2
    return y * mask[:, None]


def negated(m: Any, y: Any, x: Any, mask: Any) -> Any:
    if not mask.bool().all():
        return y * mask[:, None]
    return y * 2


def both(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if mask.all() and mask.sum() > 3 else y * mask[:, None]


def either(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if (mask == 0).any() or (x > 100).any() else y * 3


def kept(m: Any, y: Any, x: Any, mask: Any) -> Any:
    padded = (mask == 0).any() or (x > 100).any()
    return y * 2 if padded else y * 3


def nested(m: Any, y: Any, x: Any, mask: Any) -> Any:
    if mask.any():
        return y * 2 if mask.all() else y * mask[:, None]
    return y * 5


def repeated(m: Any, y: Any, x: Any, mask: Any) -> Any:
    count = 0
    while (mask > count).all():
        count += 1
    return y * (count + 1)


def each_one(m: Any, y: Any, x: Any, mask: Any) -> Any:
    for row in range(mask.shape[0]):
        if mask[row]:
            y = y * 2
    return y


def item_truth(m: Any, y: Any, x: Any, mask: Any) -> Any:
    full = mask.bool().all().item()
    return y * 2 if full else y * mask[:, None]


def item_number(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if mask.sum().item() > 3 else y * mask[:, None]


def item_fraction(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if mask.float().mean().item() == 1.0 else y * mask[:, None]


def as_bool(m: Any, y: Any, x: Any, mask: Any) -> Any:
    full = bool(mask.all())
    return y * 2 if full else y * mask[:, None]


def as_int(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if int(mask.sum()) == 4 else y * mask[:, None]


def difference(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if int(mask.max()) - int(mask.min()) == 0 else y * 3


def listed(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if sum(mask.tolist()) == 4 else y * 3


def contained(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if 0 in mask else y * 3


def chained(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if 0 < mask.min() <= 1 else y * 3


def written(m: Any, y: Any, x: Any, mask: Any) -> Any:
    """What is asked is written by the step itself, in memory of its own."""
    wide = mask.float().expand(2, -1).clone()
    wide[0, mask == 0] = 7.0
    wide.mul_(2)
    return y * 2 if (wide > 10).any() else y * 3


def written_by_a_function(m: Any, y: Any, x: Any, mask: Any) -> Any:
    low = mask.float() - 0.5
    nn.functional.relu(low, True)
    return y * 2 if (low < 0).any() else y * (2 + mask.sum())


def of_a_buffer(m: Any, y: Any, x: Any, mask: Any) -> Any:
    """Set by a step for the steps after it."""
    if m.flag:
        return y * 2
    m.flag.copy_(mask.all())
    return y * 3


def and_a_check(m: Any, y: Any, x: Any, mask: Any) -> Any:
    if mask.max() > 1:
        raise ValueError("no mask")
    return y * 2 if mask.all() else y * 3


WAYS = (
    plain, negated, both, either, kept, nested, repeated, each_one, item_truth, item_number, item_fraction, as_bool,
    as_int, difference, listed, contained, chained, written, written_by_a_function,
    of_a_buffer, and_a_check,
)  # fmt: skip


@pytest.mark.parametrize("body", WAYS, ids=lambda body: body.__name__)
def test_every_way_is_eagers(body: Body, captures: list[Any]) -> None:
    trains_as_eager(body)
    assert len(captures) == (1 if body is written_by_a_function else 3 if body in (nested, each_one) else 2)
    assert open_patches() == 0


def test_a_check_raises_as_eager_does(captures: list[Any]) -> None:
    fitted = trains_as_eager(and_a_check)
    before = len(captures)
    with pytest.raises(ValueError, match="no mask"):
        fitted(torch.randn(4, 8), torch.tensor([1, 2, 1, 1]))
    assert len(captures) == before


def sized(m: Any, y: Any, x: Any, mask: Any) -> Any:
    """As transformers asks a mask that is longer than the rows: by a size that is read from features."""
    rows = y.shape[0]
    return y * 2 if mask[:rows].all() and (~mask.bool()[rows:]).all() else y * mask[:, None]


@pytest.mark.parametrize("body", sampled([plain, sized], plain), ids=lambda body: body.__name__)
def test_lengths_share_a_capture_for_each_way(body: Body, captures: list[Any]) -> None:
    lengths = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 7, 8]

    def masks() -> Iterator[torch.Tensor]:
        for length in lengths:
            for full in (True, False):
                mask = torch.ones(length, dtype=torch.int64)
                mask[1] = int(full)
                yield mask

    trains_as_eager(body, masks())
    shared = [each for each in captures if each.symbolic]
    assert len(shared) == 2
    assert len(captures) == 2 + 2  # a length both ways, then two that are shared


# -- what asking takes ---------------------------------------------------------------------------------------------


class Looking(nn.Module):
    """It looks at each value of inputs that are large beside all that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = x.mean(0)
        return self.linear(pooled * (2 if ((x * 3).abs() > 100).any() else 3)).square().sum()


@pytest.mark.parametrize("share", ["100%", None])
def test_what_asking_takes_is_in_the_budget(share: str | None) -> None:
    x = torch.randn(1 << 16, 8)
    asked = 2 * x.nbytes + x.numel()  # products, magnitudes, and whether they are large
    model = Looking()
    own = sum(each.nbytes for each in model.parameters())
    fitted = ebbtide.fit(model, share or own + x.nbytes + asked + (1 << 16), progress=None)
    fitted(x).backward()
    for _ in range(2):
        fitted.zero_grad()
        with ebbtide.measure(fitted, x) as measured:
            fitted(x).backward()
        plan = ebbtide.plan_of(fitted)
        assert plan is not None
        assert own + x.nbytes + x.nbytes < measured.peak_bytes <= plan.budget_bytes
    assert ebbtide.calls_of(fitted).planned == 3


def test_a_budget_without_room_for_asking_is_refused() -> None:
    x = torch.randn(1 << 16, 8)
    model = Looking()
    small = sum(each.nbytes for each in model.parameters()) + x.nbytes + (1 << 18)
    fitted = ebbtide.fit(model, small, progress=None)
    for _ in range(2):
        with pytest.raises(BudgetError, match="asks of values of its inputs take") as refused:
            fitted(x)
    least = refused.value.smallest_bytes
    assert least is not None
    ebbtide.set_budget(fitted, least)
    fitted(x).backward()
    assert ebbtide.calls_of(fitted).planned == 1


ASKING: dict[str, Callable[[torch.Tensor], Any]] = {
    "a sort": lambda x: x.sort().values[3] > 0,
    "a quantile": lambda x: x.quantile(0.9) > 0,
    "distances": lambda x: torch.cdist(x.view(512, -1), x.view(512, -1)).max() > 0,
    "another layout": lambda x: x.view(512, -1).t().reshape(-1)[1:].sum() > 0,
    "closeness": lambda x: torch.isclose(x, x + 1).all(),
}


class Asking(nn.Module):
    def __init__(self, ask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(8, 8), ask

    def forward(self, x: torch.Tensor, looked_at: torch.Tensor) -> torch.Tensor:
        return self.linear(x * 2 if self.ask(looked_at) else x).square().sum()


@pytest.mark.parametrize("name", ASKING)
def test_what_kernels_take_to_answer_is_in_the_smallest_budget(name: str) -> None:
    """The smallest budget that is named holds from the first call on, in which the branch is first looked at."""
    x, looked_at = torch.randn(4, 8), torch.randn(1 << 17)
    ask = ASKING[name]
    with pytest.raises(BudgetError) as refused:
        ebbtide.fit(Asking(ask), 1, progress=None)(x, looked_at)
    least = refused.value.smallest_bytes
    assert least is not None
    fitted = ebbtide.fit(Asking(ask), least, progress=None)
    for _ in range(2):
        recorder = AllocationRecorder()
        recorder.start()
        with torch.no_grad():
            ask(looked_at)
        alone = peak_above(recorder.stop())
        own = sum(each.nbytes for each in (*fitted.parameters(), x, looked_at))
        assert own + alone <= least
        fitted(x, looked_at).backward()
        fitted.zero_grad()
    assert ebbtide.calls_of(fitted).planned == 2


# -- in which precision, and of which numbers ----------------------------------------------------------------------


class Rounded(nn.Module):
    """Its branch goes another way in bfloat16, which rounds what it looks at."""

    def __init__(self, inside: bool, around: bool) -> None:
        super().__init__()
        self.linear, self.inside, self.around = nn.Linear(8, 8), inside, around
        self.register_buffer("w", torch.ones(8, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside):
            looked_at = y @ self.w
            if self.around and looked_at[0, 0] == 1.0:
                x = x * 2
        if not self.around and looked_at[0, 0] == 1.0:
            x = x * 2
        return self.linear(x).float().square().sum()


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_a_branch_is_looked_at_in_eagers_precision(inside: bool, outside: bool, around: bool) -> None:
    """Or it is refused at its line; never is the other way taken, and never is a call without a plan."""
    torch.manual_seed(0)
    eager = Rounded(inside, around)
    fitted = ebbtide.fit(copy.deepcopy(eager), "1MiB", progress=None)
    x = torch.randn(4, 8)
    for value in (1.001, 1.5, 1.001):
        y = torch.zeros(4, 8)
        y[:, 0] = value
        found = []
        for model in (eager, fitted):
            model.zero_grad()
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                    loss = model(x, y)
            except CaptureError:
                assert inside or outside, "nothing is under autocast"
                return
            loss.backward()
            found.append([loss.detach(), *(each.grad for each in model.parameters())])
        assert all(map(torch.equal, *found)), value
    assert ebbtide.calls_of(fitted).planned == 3
    assert not ebbtide.calls_of(fitted).unplanned


NANS: dict[str, Callable[[Any], bool]] = {
    "not itself": lambda f: f.item() != f.item(),
    "itself": lambda f: f.item() == f.item(),
    "float": lambda f: float(f) != float(f),
    "after others": lambda f: not (f.item() > 0) and not (f.item() <= 0) and f.item() != f.item(),
    "a tensor": lambda f: f != f,
    "isnan": lambda f: f.isnan(),
}


@pytest.mark.parametrize("name", NANS)
def test_a_number_that_is_none_is_told(name: str) -> None:
    def told(m: Any, y: Any, x: Any, number: Any) -> Any:
        return y * 2 if NANS[name](number[0]) else y

    numbers = (torch.tensor([each, 0.0, 0.0, 0.0]) for each in (1.0, math.nan, -1.0, math.nan, math.inf))
    trains_as_eager(told, numbers)


def test_a_comparison_that_tells_nan_from_what_the_step_computes_is_refused() -> None:
    def told(m: Any, y: Any, x: Any, mask: Any) -> Any:
        number = y.detach().sum().item()
        return y * 2 if number != number else y

    fitted = ebbtide.fit(Model(told), "1GiB", progress=None)
    with pytest.raises(CaptureError, match="to tell a NaN"):
        fitted(torch.randn(4, 8), torch.ones(4))


# -- changed meanwhile ---------------------------------------------------------------------------------------------


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * 2 if self.flag else x).square().sum()


@pytest.mark.parametrize("changes", [1, 1000])
def test_what_changes_while_it_is_captured_is_captured_again(monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
    """Such as a flag that another thread sets: no training call runs without a plan."""
    torch.manual_seed(0)
    eager = Flagged()
    fitted = ebbtide.fit(copy.deepcopy(eager), "1MiB", progress=None)
    partition, left = compiled.Capture.partition, [changes]

    def flips(self: Any, *args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            other = threading.Thread(target=fitted.flag.logical_not_)
            other.start()
            other.join()
        return partition(self, *args)

    monkeypatch.setattr(compiled.Capture, "partition", flips)
    x = torch.randn(4, 8)
    found = [fitted(x)]
    eager.flag.copy_(fitted.flag)
    found.append(eager(x))
    assert torch.equal(*found)
    assert left[0] < changes
    assert ebbtide.calls_of(fitted).planned == 1
    assert not ebbtide.calls_of(fitted).unplanned


def test_what_never_is_as_it_was_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = ebbtide.fit(Flagged(), "1MiB", progress=None)
    monkeypatch.setattr("ebbtide.torch_seams.input_branches.Question.holds", lambda *_: False)
    with pytest.raises(CaptureError, match="nothing change the model"):
        fitted(torch.randn(4, 8))
    assert not ebbtide.calls_of(fitted).unplanned


# -- what is no question of the inputs -----------------------------------------------------------------------------


def of_features(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if (y > 0).all() else y * 3


def of_weights(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if (m.linear.weight > 0).all() else y * 3


def drawn(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y * 2 if torch.rand(()) < mask.sum() else y * 3


def of_written_input(m: Any, y: Any, x: Any, mask: Any) -> Any:
    mask.mul_(0)
    return y * 2 if mask.all() else y * 3


def as_a_size(m: Any, y: Any, x: Any, mask: Any) -> Any:
    return y[: mask.sum().item()]


def _asks_flag(m: Any, y: Any) -> Any:
    return y * 2 if m.flag else y * 3


def of_an_augmented_buffer(m: Any, y: Any, x: Any, mask: Any) -> Any:
    m.flag |= mask.any()
    return _asks_flag(m, y)


def of_a_buffer_written_by_a_view(m: Any, y: Any, x: Any, mask: Any) -> Any:
    view = m.flag[None]
    view ^= mask[:1] > 0
    return _asks_flag(m, y)


def of_a_copy_written_by_a_view(m: Any, y: Any, x: Any, mask: Any) -> Any:
    seen = mask.clone()
    part = seen[1:]
    part &= 0
    part.copy_(part * 2)
    return y * 2 if torch.ops.aten.add_.Tensor(seen, 1).all() and m.flag.logical_or_(mask[0] > 0) else y * 3


def of_a_buffer_written_by_an_operator(m: Any, y: Any, x: Any, mask: Any) -> Any:
    torch.ops.aten.logical_not_.default(m.flag)
    return _asks_flag(m, y)


@torch.library.custom_op("ebbtide_input_branches::turn", mutates_args=("flag",))
def turn(flag: torch.Tensor) -> None:
    flag.logical_not_()


def of_a_buffer_written_by_a_custom_operator(m: Any, y: Any, x: Any, mask: Any) -> Any:
    turn(m.flag)
    return _asks_flag(m, y)


def of_statistics(m: Any, y: Any, x: Any, mask: Any) -> Any:
    """A norm writes to them, which no schema says."""
    F.batch_norm(x + 5, m.mean, m.variance, training=True)
    return y * 2 if m.mean.sum() > 0 else y * 3


@pytest.mark.parametrize(
    "body",
    [
        of_features,
        of_weights,
        drawn,
        of_written_input,
        as_a_size,
        of_an_augmented_buffer,
        of_a_buffer_written_by_a_view,
        of_a_copy_written_by_a_view,
        of_a_buffer_written_by_an_operator,
        of_a_buffer_written_by_a_custom_operator,
        of_statistics,
    ],
    ids=lambda body: body.__name__,
)
def test_other_questions_are_refused_at_their_line(body: Body) -> None:
    model = ebbtide.fit(Model(body), "1GiB", progress=None)
    mask = torch.ones(4, dtype=torch.int64)
    state = torch.get_rng_state()
    before = [each.clone() for each in model.buffers()]
    with pytest.raises(CaptureError, match=r"test_input_branches\.py"):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), mask)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), before)), "nothing of the model has run"
    assert mask.tolist() == [1] * 4
    assert open_patches() == 0


# -- Hugging Face's masks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_mask_that_masks_nothing_is_left_out_as_in_eager(autocast: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    eager = transformers.LlamaForCausalLM(config)
    fitted = ebbtide.fit(copy.deepcopy(eager), "90%", progress=None)
    for padded in (False, True, False):
        ids = torch.randint(0, 64, (2, 16))
        mask = torch.ones_like(ids)
        mask[1, 12:] = int(not padded)
        found = []
        for model in (eager, fitted):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            loss.backward()
            found.append([loss.detach(), *(each.grad for each in model.parameters())])
        assert all(map(torch.equal, *found)), f"padded: {padded}"
    assert ebbtide.calls_of(fitted).planned == 3


def test_each_of_many_ways_is_captured_once(captures: list[Any]) -> None:
    def ways(m: Any, y: Any, x: Any, mask: Any) -> Any:
        for place in range(4):
            if mask[place] > 0:
                y = y * (place + 2)
        return y

    masks = [[number >> place & 1 for place in range(4)] for number in range(11)]
    with pytest.warns(UserWarning, match="calls go many ways"):
        trains_as_eager(ways, (torch.tensor(each) for each in [*masks, *masks]))
    assert len(captures) == len(masks)
