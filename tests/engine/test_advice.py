"""What a refusal advises works: each is provoked, its advice is followed, and the step is planned with eager's bits.

A refusal has its remedy in the first line and 80 words at the most; its figures stand in columns of their own.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ebbtide
from asserting import number, wordless
from ebbtide.capture import known_breaks, known_libraries
from ebbtide.errors import BudgetError, CaptureError, EbbtideError, UsageError
from ebbtide.optimizer.cost.step_end import end_of
from ebbtide.optimizer.in_step.coupling import may_step_inside
from ebbtide.units import format_bytes

Body = Callable[[Any, torch.Tensor], torch.Tensor]
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
MOST_WORDS = 80


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("place", torch.tensor(2))
        self.body = body

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()).square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def words(error: EbbtideError) -> int:
    """Of prose: without the line of the user's and the figures, which have lines of their own."""
    lines = [line for line in str(error).splitlines() if not line.startswith("  ")]
    return len(" ".join([*lines, *getattr(error, "__notes__", ())]).split())


def refused(call: Callable[[], object], kind: type[EbbtideError] = CaptureError) -> Any:
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert words(error) <= MOST_WORDS, str(error)
    first, second, *_ = str(error).splitlines()
    said = first[:-1].lower().removeprefix("does not fit: ")
    assert said == error.remedy.rstrip(".").lower()  # type: ignore[attr-defined]
    assert second.startswith("Why: ")
    return error


def bits(model: nn.Module, *args: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    loss = model(*args)
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def trains_as_eager(make: Callable[[], nn.Module], *args: Any) -> None:
    torch.manual_seed(0)
    plain = make()
    fitted = ebbtide.fit(copy.deepcopy(plain), "100%", options=ebbtide.Options(effort=100))
    mine, theirs = bits(fitted, *args), bits(plain, *args)
    assert len(mine) == len(theirs) > 1
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert ebbtide.calls_of(fitted).planned == 1


# -- statements ---------------------------------------------------------------------------------------------------


def branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    if y.mean().item() > 0.5:
        y = y * 2
    return y.mean()


def chooses_by_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    return torch.where(y.mean() > 0.5, y * 2, y).mean()


def indexes_by_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.hidden(x)[:, m.place].mean()


def selects_by_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.hidden(x).index_select(1, m.place.reshape(1)).squeeze(1).mean()


def indexes_by_a_result(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    return y[y.sum(1).argmax()].mean()


def selects_by_a_result(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    return y.index_select(0, y.sum(1).argmax().reshape(1)).squeeze(0).mean()


def asserts_by_a_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    torch._assert(y.sum() >= 0, "not finite")
    return y.mean()


def asserts_a_number(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    number(y.tanh())
    return y.mean()


def asserts_a_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    wordless(y)
    return y.mean()


def selects_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    return y[y > 0.5].sum()


def masks_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    return torch.where(y > 0.5, y, 0.0).sum()


def prints(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.hidden(x)
    print(y.sum())
    return y.mean()


def prints_nothing(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.hidden(x).mean()


@pytest.mark.parametrize(
    ("wrong", "right", "remedy"),
    [
        (branches, chooses_by_value, "torch.where(condition, a, b)"),
        (indexes_by_a_buffer, selects_by_a_buffer, "x.index_select(1, i.reshape(1)).squeeze(1)"),
        (indexes_by_a_result, selects_by_a_result, "x.index_select(1, i.reshape(1)).squeeze(1)"),
        (asserts_by_a_call, asserts_a_tensor, "assert torch.isfinite(x).all(), 'not finite'"),
        (asserts_a_number, asserts_a_tensor, "assert (x > 0).all()"),
        (selects_rows, masks_rows, "torch.where"),
        (prints, prints_nothing, "print it after the call"),
    ],
)
def test_a_statement_is_refused_with_what_to_write(wrong: Body, right: Body, remedy: str) -> None:
    model = ebbtide.fit(Model(wrong), "1GiB")
    assert remedy.lower() in refused(lambda: model(X)).remedy.lower()
    trains_as_eager(lambda: Model(right), X)


def test_assertions_on_buffers_in_code_of_others_are_planned() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        assert m.place.item() == 2
        assert (m.place > 1).all() or (m.place < 0).all(), "place must be {}".format("large")
        return m.hidden(x).mean()

    trains_as_eager(lambda: Model(body), X)


def test_a_frozen_model_says_what_takes_no_gradient() -> None:
    model = ebbtide.fit(Model(prints_nothing).requires_grad_(False), "1GiB")
    loss = model(X)
    error = refused(lambda: loss.backward())
    assert "the fitted Model" in error.reason
    assert isinstance(error, RuntimeError), "as torch's own is"
    model.requires_grad_(True)
    model(X).backward()
    assert ebbtide.calls_of(model).planned == 1
    head = nn.Linear(16, 1)
    model.requires_grad_(False)
    head(model(X).expand(1, 16)).sum().backward()
    assert head.weight.grad is not None


def test_a_refusal_shows_of_the_library_where_it_was_called() -> None:
    fitted = ebbtide.fit(Model(branches), "1GiB")
    calls: list[Callable[[], object]] = [
        lambda: fitted(X),
        lambda: ebbtide.plan(Model(branches), (X,), budget="1GiB"),
        lambda: ebbtide.plan(Model(prints_nothing), (X,), budget="1KiB"),
    ]
    for call in calls:
        error = refused(call, EbbtideError)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ebbtide/" in frame.filename]
        assert len(frames) == 1
        assert error.__cause__ is None
        assert error.__suppress_context__


# -- libraries ----------------------------------------------------------------------------------------------------


def library(folder: Path, file: str, code: str) -> ModuleType:
    """Code of a library that is not installed here, in a file of its name."""
    path = folder / "site-packages" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{folder.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LOOPS = """
def add_remaining_self_loops(edge_index, count):
    import torch
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    loop = torch.arange(count)
    return torch.cat([edge_index, torch.stack([loop, loop])], 1)
"""
STEPS = """
def integrate(f, y, adaptive):
    h = 0.25
    if not adaptive:
        for _ in range(4):
            y = y + h * f(y)
        return y
    while (f(y) * h).abs().max() > 0.5:
        h = h / 2
    return y + h * f(y)
"""
PICKS = """
def postprocess(boxes):
    return boxes[boxes > 0.5].sum()
"""


class Graphs(nn.Module):
    def __init__(self, loops: ModuleType, add: bool) -> None:
        super().__init__()
        self.linear, self.loops, self.add = nn.Linear(8, 8), loops.add_remaining_self_loops, add

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        if self.add:
            edges = self.loops(edges, x.shape[0])
        return torch.zeros_like(x).index_add(0, edges[1], self.linear(x)[edges[0]]).square().mean()


def test_self_loops_are_added_once(tmp_path: Path) -> None:
    loops = library(tmp_path, "torch_geometric/utils/loop.py", LOOPS)
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 2, 0]])
    model = ebbtide.fit(Graphs(loops, True), "1GiB")
    assert "add_self_loops=False" in refused(lambda: model(X, edges)).remedy
    trains_as_eager(lambda: Graphs(loops, False), X, loops.add_remaining_self_loops(edges, 16))


class Solves(nn.Module):
    def __init__(self, solver: ModuleType, adaptive: bool) -> None:
        super().__init__()
        self.linear, self.solver, self.adaptive = nn.Linear(8, 8), solver.integrate, adaptive

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.solver(lambda y: self.linear(y).tanh(), x, self.adaptive).square().mean()


def test_solvers_take_fixed_steps(tmp_path: Path) -> None:
    solver = library(tmp_path, "torchdiffeq/_impl/solvers.py", STEPS)
    model = ebbtide.fit(Solves(solver, True), "1GiB")
    assert 'method="rk4"' in refused(lambda: model(X)).remedy
    trains_as_eager(lambda: Solves(solver, False), X)


class Detects(nn.Module):
    def __init__(self, heads: ModuleType) -> None:
        super().__init__()
        self.backbone, self.heads = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), heads.postprocess

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads(self.backbone(x))


def test_of_a_detector_the_backbone_is_fitted(tmp_path: Path) -> None:
    heads = library(tmp_path, "torchvision/models/detection/roi_heads.py", PICKS)
    model = ebbtide.fit(Detects(heads), "1GiB")
    assert "ebbtide.fit(model.backbone, budget)" in refused(lambda: model(X)).remedy
    ebbtide.unfit(model)
    plain = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the loss outside, which the first step measures
        ebbtide.fit(model.backbone, "1GiB")
        mine, theirs = bits(model, X), bits(plain, X)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert ebbtide.calls_of(model.backbone).planned == 1


TOKENS = torch.arange(32).reshape(2, 16) % 29
SPEECH = {
    "vocab_size": 16,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_length": 2,
    "ctc_zero_infinity": True,
}


class OfTransformers(nn.Module):
    """A model of transformers', with the loss that it gives, or that of its logits."""

    def __init__(self, inner: nn.Module, loss: Callable[[Any], torch.Tensor] = lambda out: out.loss) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.loss(self.inner(**kwargs))


def test_experts_run_together() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",
    )
    call = {"input_ids": TOKENS, "labels": TOKENS}
    model = ebbtide.fit(OfTransformers(transformers.MixtralForCausalLM(config)), "1GiB")
    error = refused(lambda: model(call))
    assert 'model.set_experts_implementation("grouped_mm")' in error.remedy

    def make() -> nn.Module:
        made = transformers.MixtralForCausalLM(copy.deepcopy(config))
        made.set_experts_implementation("grouped_mm")
        return OfTransformers(made)

    trains_as_eager(make, call)


def test_speech_is_masked_before_the_call_and_its_loss_taken_behind_it() -> None:
    transformers = pytest.importorskip("transformers")
    sound, labels = torch.randn(2, 1600, generator=torch.Generator().manual_seed(2)), torch.ones(2, 4, dtype=torch.long)

    def make(**changed: bool) -> Any:
        return transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**{**SPEECH, **changed}))

    def ctc(out: Any) -> torch.Tensor:
        scores = out.logits.log_softmax(-1).transpose(0, 1)
        lengths = [torch.full((2,), size) for size in (scores.shape[0], 4)]
        return nn.functional.ctc_loss(scores, labels, *lengths, zero_infinity=True)

    model = ebbtide.fit(OfTransformers(make()), "1GiB")
    assert "apply_spec_augment = False" in refused(lambda: model({"input_values": sound, "labels": labels})).remedy
    model = ebbtide.fit(OfTransformers(make(apply_spec_augment=False)), "1GiB")
    assert "ctc_loss of the logits" in refused(lambda: model({"input_values": sound, "labels": labels})).remedy
    trains_as_eager(lambda: OfTransformers(make(apply_spec_augment=False), ctc), {"input_values": sound})


# -- budgets ------------------------------------------------------------------------------------------------------


def tower(*, checkpointed: bool = False) -> nn.Module:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(m.hidden, x, use_reentrant=False) if checkpointed else m.hidden(x)
        return x.mean()

    return Model(body)


LARGE = X.repeat(64, 1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, None])
def test_a_budget_is_refused_with_one_that_works(kind: Any) -> None:
    torch.manual_seed(0)
    model = tower()
    optimizer = None if kind is None else kind(model.parameters(), lr=0.1)
    ebbtide.fit(model, "1KiB", optimizer=optimizer, options=ebbtide.Options(effort=100))
    error = refused(lambda: model(LARGE), BudgetError)
    assert f"sk for at least {error.smallest_bytes} bytes" in error.remedy
    for kind_of_part, size in error.resident_parts.items():
        assert f"{kind_of_part} " in error.figures
        assert f" {size} bytes" in error.figures
    assert f"{format_bytes(error.smallest_bytes)} " in error.figures
    ebbtide.set_budget(model, error.smallest_bytes)
    model(LARGE).backward()
    assert ebbtide.calls_of(model).planned == 1


def test_an_optimizer_is_advised_only_what_it_can_do() -> None:
    weight = [nn.Parameter(torch.zeros(3))]
    sgd = end_of(torch.optim.SGD(weight, foreach=True), 1000).remedies
    assert not any("SGD" in each for each in sgd)
    assert "make it with foreach=False" in sgd
    assert any("SGD" in each for each in end_of(torch.optim.AdamW(weight), 1000).remedies)
    assert end_of(torch.optim.SGD(weight, fused=True), 1000, one_by_one=True).remedies == ("train fewer weights",)
    plain, coupled = torch.optim.SGD(weight), torch.optim.LBFGS(weight)
    assert may_step_inside(weakref.ref(plain))
    assert not may_step_inside(weakref.ref(coupled))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_what_an_optimizer_is_advised_can_be_made(options: dict[str, bool]) -> None:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    ebbtide.fit(model, "100%", optimizer=optimizer, options=ebbtide.Options(effort=100))
    model(LARGE).backward()
    optimizer.step()


def test_the_callback_of_transformers_does_not_advise_what_it_refuses() -> None:
    pytest.importorskip("transformers")
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from ebbtide.engine.fitted_class import FITTED
    from ebbtide.integrations.hf import MemoryBudget

    model = tower()
    budget, args = MemoryBudget("1KiB"), TrainingArguments(use_cpu=True, report_to="none")
    optimizer = torch.optim.AdamW(model.parameters())
    budget.on_train_begin(args, TrainerState(), TrainerControl(), model=model, optimizer=optimizer)
    assert model in FITTED
    error = refused(lambda: model(LARGE), BudgetError)
    assert "inside" not in str(error)
    budget.release()


def test_shares_say_what_they_are_of() -> None:
    options = ebbtide.Options(effort=100)
    large = ebbtide.plan(tower(), (LARGE,), budget="130%", options=options).details
    assert "130% of the unplanned peak, more than the unplanned step takes" in large
    assert "checkpoints" not in large
    with_checkpoints = ebbtide.plan(tower(checkpointed=True), (LARGE,), budget="90%", options=options).details
    assert "which keeps what the model's checkpoints drop" in with_checkpoints
    assert "more than the unplanned step takes" not in with_checkpoints
    error = refused(lambda: ebbtide.plan(tower(checkpointed=True), (LARGE,), budget="1%", options=options), BudgetError)
    assert "which keeps what the model's checkpoints drop" in error.figures


def test_a_plan_of_a_forward_without_a_loss_says_what_that_means() -> None:
    without_loss = ebbtide.plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (LARGE,), budget="100%")
    assert "outside the model: the gradients of what it returns count in full" in without_loss.details
    assert "outside the model" not in ebbtide.plan(tower(), (LARGE,), budget="100%").details


@pytest.mark.filterwarnings("error:this copy of a fitted")
def test_a_copy_is_said_to_be_unplanned_once() -> None:
    class Copied(Model):
        pass

    model = ebbtide.fit(Copied(prints_nothing), "1GiB")
    with pytest.warns(UserWarning, match="this copy of a fitted Copied is plain") as said:
        copied = copy.deepcopy(model)
    assert said[0].filename == __file__
    copy.deepcopy(nn.Sequential(model))
    assert type(copied) is Copied
    ebbtide.fit(copied, "1GiB")
    copied(X).backward()
    assert ebbtide.calls_of(copied).planned == 1


# -- memory that is gone ------------------------------------------------------------------------------------------

GIB = 2**30
CARD = {"mem_get_info": (1 * GIB, 8 * GIB), "memory_reserved": 4 * GIB, "memory_allocated": 4 * GIB}
_failing: list[int] = []


@torch.library.custom_op("ebbtide_advice::may_fail", mutates_args=())
def may_fail(x: torch.Tensor, place: int) -> torch.Tensor:
    if place in _failing:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return x.clone()


may_fail.register_fake(lambda x, place: torch.empty_like(x))
may_fail.register_autograd(lambda ctx, gradient: (may_fail(gradient, 1), None), setup_context=lambda *_, **__: None)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("budget", "card", "remedy"),
    [
        ("6GiB", {}, f"Give it {5 * GIB} bytes or less (ebbtide.set_budget), or end what else runs on the card"),
        ("4GiB", {"memory_allocated": GIB}, "PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ("2GiB", {}, "a smaller budget (ebbtide.set_budget) leaves it room"),
    ],
)
def test_a_card_that_is_full_says_who_holds_what(
    monkeypatch: pytest.MonkeyPatch, place: int, budget: str, card: dict[str, Any], remedy: str
) -> None:
    """Gradients and state stay as eager leaves them, and the next step goes on."""
    torch.manual_seed(0)
    plain = Model(lambda m, x: may_fail(m.hidden(x), 0).mean())
    model = ebbtide.fit(copy.deepcopy(plain), budget)
    model(X).backward()
    before = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    assert before
    for name, value in {**CARD, **card}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    _failing.append(place)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
            model(X).backward()
    finally:
        _failing.clear()
    monkeypatch.undo()
    [note] = caught.value.__notes__
    assert remedy in note
    assert "held by others, and by CUDA  3.00 GiB" in note
    assert f"budget  {' ' * 21}{budget[0]}.00 GiB" in note
    assert len([line for line in note.splitlines() if line.startswith("  ")]) == 5
    after = [each.grad for each in model.parameters() if each.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(bits(model, X), bits(plain, X), strict=True))


# -- all of them --------------------------------------------------------------------------------------------------


def _entries() -> Iterator[tuple[str, str]]:
    for each in (*known_breaks._BREAKS, *known_libraries._LIBRARIES):
        yield each.reason, each.remedy


@pytest.mark.parametrize(("reason", "remedy"), list(_entries()))
def test_what_is_known_of_breaks_is_short(reason: str, remedy: str) -> None:
    error = CaptureError(f"the step cannot be captured as one graph. {reason}", remedy=remedy)
    assert words(error) <= MOST_WORDS
    assert str(error).startswith(remedy[0].upper())


_RAISED = {"BudgetError", "CaptureError", "UsageError", "UpdateError", "_refusal", "refused_budget", "told"}


def _text(node: ast.expr, named: dict[str, str]) -> str:
    """What a part of a message is, longest branch; what is put in counts as one word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(each, named) for each in parts)
        case ast.FormattedValue(value=value):
            return _text(value, named)
        case ast.BinOp(left=left, right=right):
            return _text(left, named) + _text(right, named)
        case ast.IfExp(body=body, orelse=orelse):
            return max(_text(body, named), _text(orelse, named), key=len)
        case ast.Name(id=name):
            return named.get(name, "one")
        case _:
            return "one"


def _messages() -> Iterator[Any]:
    for path in sorted(Path(ebbtide.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        named = {
            target.id: _text(node.value, {})
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _RAISED:
                said = [*node.args, *(each.value for each in node.keywords if each.arg in ("reason", "remedy"))]
                yield pytest.param(" ".join(_text(each, named) for each in said), id=f"{path.name}:{node.lineno}")


@pytest.mark.parametrize("message", list(_messages()))
def test_what_is_raised_anywhere_is_short(message: str) -> None:
    assert len(message.split()) <= MOST_WORDS


def test_a_call_without_its_arguments_is_refused_before_anything_is_captured() -> None:
    with pytest.raises(UsageError, match=r"args=\(x,\): missing a required"):
        ebbtide.plan(tower(), budget="50%")
