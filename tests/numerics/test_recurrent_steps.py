"""Steps with recurrent modules are captured unrolled: planned, captured and eager steps are the same step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide._api.verify import Verifier
from ebbtide.errors import CaptureError
from ebbtide.planning.pipeline import PlanningOptions, make_plan
from ebbtide.units import Budget

# torch.backends.mkldnn.flags says so on any CPU build.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")

STEPS, BATCH, VOCABULARY, WIDTH = 2, 8, 24, 16
EFFORT = 200


def rnn_relu(*args: Any, **kwargs: Any) -> nn.RNN:
    return nn.RNN(*args, **kwargs, nonlinearity="relu")


MODULES: dict[str, Callable[..., nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": rnn_relu}


class LanguageModel(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, dropout=0.3, **options)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.recurrent(self.embedding(tokens))
        return F.cross_entropy(self.head(outputs).flatten(0, 1), targets.flatten())


class Loss(nn.Module):
    """The mean square of all that a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> torch.Tensor:
        return mean_square(self.module(*args))


def mean_square(value: Any) -> Any:
    return value.square().mean() if isinstance(value, torch.Tensor) else sum(mean_square(v) for v in value)


def language_model(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (STEPS + 1, BATCH))
    return LanguageModel(MODULES[kind]), (tokens[:-1], tokens[1:])


@pytest.fixture(scope="session")
def unplanned() -> Callable[[str], ebbtide.Plan]:
    """The plan that keeps all, of each kind of language model."""

    @functools.cache
    def of(kind: str) -> ebbtide.Plan:
        model, args = language_model(kind)
        return ebbtide.plan(model, args, budget="1000%", options=ebbtide.Options(effort=EFFORT))

    return of


@pytest.fixture
def without_one_dnn() -> Iterator[None]:
    """Eager then runs ATen's own kernels for nn.LSTM, whose order of ops ours is."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def gradients_of(model: nn.Module, *args: Any) -> dict[str, torch.Tensor]:
    """Loss and all gradients, those of the arguments too, from the same seed."""
    model.zero_grad()
    leaves = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor) and t.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(2)
    loss = model(*args)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"argument {i}": leaf.grad.clone() for i, leaf in enumerate(leaves) if leaf.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_same(fitted: nn.Module, plain: nn.Module, *args: Any) -> None:
    ours, eager = gradients_of(fitted, *args), gradients_of(plain, *args)
    assert ours.keys() == eager.keys()
    assert [name for name in ours if not torch.equal(ours[name], eager[name])] == []
    step = ebbtide.step_of(fitted)
    assert step is not None
    assert step.forward_calls > 0


@pytest.mark.usefixtures("without_one_dnn")
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_planned_step_is_the_same_step(unplanned: Any, kind: str) -> None:
    model, args = language_model(kind)
    whole = unplanned(kind)
    room = whole.resident_bytes + whole.reserve_bytes + whole.baseline.above_bytes - whole.smallest_bytes
    options = PlanningOptions(effort=EFFORT, provenance=whole.provenance)
    fixed = {"resident_bytes": whole.resident_bytes, "reserve_bytes": whole.reserve_bytes, "options": options}
    check = Verifier(model, args).check
    for share in (0.6, 0.02):
        plan = make_plan(whole.program, Budget(bytes=whole.smallest_bytes + int(share * room)), **fixed)
        assert len(plan.schedule.computes) > len(plan.program.ops) + 1, "nothing is recomputed: nothing is tested"
        result = check(plan)
        assert result.differences == ()
        assert result.eager_differences == ()
        assert result.within_budget


@pytest.mark.parametrize("kind", MODULES)
def test_fitted_step_is_eagers_with_its_dropout(unplanned: Any, kind: str) -> None:
    model, args = language_model(kind)
    eager = gradients_of(model, *args)
    # What fit holds in reserve goes on top, or the budget would be below what works.
    fitted = ebbtide.fit(model, unplanned(kind).smallest_bytes + 2**14, options=ebbtide.Options(effort=EFFORT))
    ours = gradients_of(fitted, *args)
    for name in ours:
        # nn.LSTM goes to oneDNN, which rounds otherwise; a lost or other dropout is off by far more.
        rtol, atol = (1e-4, 1e-6) if kind == "lstm" else (0.0, 0.0)
        torch.testing.assert_close(ours[name], eager[name], rtol=rtol, atol=atol)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert sum(op.target == "aten.bernoulli.p" for op in plan.program.ops) == 1


@pytest.mark.usefixtures("without_one_dnn")
def test_float64() -> None:
    model, args = language_model("lstm")
    plain = model.double()
    assert_same(ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=EFFORT)), plain, *args)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


LONG = ("no batch, state given", "no batch", "projection", "weight norm", "tied parameters", "autocast")
CALLS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "states given": lambda: (nn.LSTM(4, 6, 2), (states(2, 2, 4), (states(2, 2, 6), states(2, 2, 6)))),
    "state given": lambda: (nn.GRU(4, 6, 2), (states(2, 2, 4), states(2, 2, 6))),
    "no batch": lambda: (nn.LSTM(4, 6, bidirectional=True), (states(2, 4),)),
    "no batch, state given": lambda: (nn.GRU(4, 6, batch_first=True), (states(2, 4), states(1, 6))),
    "projection": lambda: (nn.LSTM(4, 6, 2, proj_size=2, batch_first=True, dropout=0.5), (states(2, 2, 4),)),
    "no dropout in eval": lambda: (nn.RNN(4, 6, 2, dropout=0.5).eval(), (states(2, 2, 4),)),
    "one step": lambda: (nn.LSTM(4, 6), (states(1, 3, 4),)),
    "frozen parameter": lambda: (frozen(nn.GRU(4, 6)), (states(2, 2, 4),)),
    "tied parameters": lambda: (tied(nn.LSTM(6, 6, 2)), (states(2, 2, 6),)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.GRU(4, 6), "weight_hh_l0"), (states(2, 2, 4),)),
    "dropped weights": lambda: (DroppedWeights(4, 6), (states(2, 2, 4),)),
    "checkpoint": lambda: (Checkpointed(), (states(2, 2, 4),)),
    "autocast": lambda: (Autocast(), (states(2, 2, 4),)),
    "LSTMCell": lambda: (Cells(nn.LSTMCell), (states(2, 2, 4),)),
    "GRUCell": lambda: (Cells(nn.GRUCell), (states(2, 2, 4),)),
    "RNNCell": lambda: (Cells(nn.RNNCell), (states(2, 2, 4),)),
}


def frozen(module: nn.GRU) -> nn.Module:
    module.weight_hh_l0.requires_grad_(False)
    return module


def tied(module: nn.LSTM) -> nn.Module:
    module.weight_hh_l1 = module.weight_hh_l0
    module.flatten_parameters()
    return module


class DroppedWeights(nn.LSTM):
    """The hidden weights are dropped out, and ``torch.lstm`` is called by the user's own forward."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
        weights = [F.dropout(w, 0.5) if "hh" in name else w for name in names for w in [getattr(self, name)]]
        zeros = x.new_zeros(1, x.shape[1], self.hidden_size)
        return torch.lstm(
            x, (zeros, zeros), weights, has_biases=True, num_layers=1, dropout=0.0, train=True, bidirectional=False,
            batch_first=False,
        )  # fmt: skip


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 6, 2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda y: self.recurrent(y)[0].tanh(), x, use_reentrant=False)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.recurrent(x)[0]


class Cells(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell = kind(4, 6)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        state, outputs = None, []
        for step in x.unbind(0):
            state = self.cell(step, state)
            outputs.append(state if isinstance(state, torch.Tensor) else state[0])
        return outputs


@pytest.mark.usefixtures("without_one_dnn")
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.long] if each in LONG else []) for each in CALLS]
)
def test_call_is_eagers(case: str) -> None:
    module, args = CALLS[case]()
    plain = Loss(module)
    assert_same(ebbtide.fit(copy.deepcopy(plain), "1MiB", options=ebbtide.Options(effort=EFFORT)), plain, *args)


class Packs(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.module(pack_padded_sequence(x, lengths))
        return outputs.data.square().mean()


class TakesPacked(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, packed: Any) -> torch.Tensor:
        outputs, _ = self.module(packed)
        return outputs.data.square().mean()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("where", ["argument", "forward"])
def test_packed_sequence_is_refused_with_what_works(kind: str, where: str) -> None:
    module = MODULES[kind](4, 6)
    if where == "argument":
        model, args = TakesPacked(module), (pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)]),)
    else:
        model, args = Packs(module), (torch.zeros(3, 2, 4), torch.tensor([3, 2]))
    fitted = ebbtide.fit(copy.deepcopy(model), "1MiB", options=ebbtide.Options(effort=EFFORT))
    for attempt in (
        lambda: fitted(*args),
        lambda: ebbtide.plan(model, args, budget="1MiB", options=ebbtide.Options(effort=EFFORT)),
    ):
        with pytest.raises(CaptureError, match=r"(?s)the padded tensor.* PackedSequence .*test_recurrent_steps\.py"):
            attempt()


def test_plans_of_meta_and_fake_models_are_the_plan() -> None:
    model, args = language_model("lstm")
    plans = [ebbtide.plan(model, args, budget="1MiB", options=ebbtide.Options(effort=EFFORT))]
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            twin = LanguageModel(nn.LSTM)
            tokens = torch.zeros(STEPS + 1, BATCH, dtype=torch.int64)
        plans.append(
            ebbtide.plan(twin, (tokens[:-1], tokens[1:]), budget="1MiB", options=ebbtide.Options(effort=EFFORT))
        )
    assert len({plan.program.fingerprint for plan in plans}) == 1


def test_weights_set_anew_are_planned_anew() -> None:
    model, args = language_model("gru")
    fitted = ebbtide.fit(copy.deepcopy(model), "1MiB", options=ebbtide.Options(effort=EFFORT))
    assert_same(fitted, model, *args)
    for each in (fitted, model):
        each.recurrent.weight_hh_l1 = nn.Parameter(torch.ones(3 * WIDTH, WIDTH))  # type: ignore[union-attr]
    assert_same(fitted, model, *args)


def test_users_own_compile_treats_recurrent_modules_as_before() -> None:
    model, args = language_model("gru")
    ebbtide.fit(copy.deepcopy(model), "1MiB", options=ebbtide.Options(effort=EFFORT))(*args)
    assert dynamo_config.allow_rnn is False
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(graph.graph.find_nodes(op="call_function", target=torch.gru))
        return graph

    with dynamo_config.patch(allow_rnn=True):
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    assert len(seen) == 1
