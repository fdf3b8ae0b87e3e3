"""Updates in a captured step: where they stand, that no planner can read behind them, and what the proofs see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import ebbtide
from ebbtide._api.estimate import AheadStep, capture_ahead
from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured
from ebbtide.capture.offline import capture
from ebbtide.cost.cache import device_context
from ebbtide.errors import VerificationError
from ebbtide.lower.emit import CLAIM
from ebbtide.lower.fingerprints import Fingerprints
from ebbtide.lower.lowering import lower
from ebbtide.lower.proof import ProofError, prove
from ebbtide.optimizer.in_step.gradient_recompute import cuts_of, likes_in, with_recompute_pass
from ebbtide.optimizer.in_step.insertion import UpdateInsertion
from ebbtide.optimizer.in_step.norm_ops import PartialNorm, TotalNorm, total_norm_of
from ebbtide.optimizer.in_step.proof import prove_norms, prove_recompute_pass, prove_updates
from ebbtide.optimizer.in_step.updates import PREFIX, updatable, updates_in, with_updates
from ebbtide.options import Options
from ebbtide.planners import planner_names
from ebbtide.planners.registry import needs_tiers
from ebbtide.planning.pipeline import PlanningOptions
from ebbtide.step.legality import check
from ebbtide.step.program import Program
from ebbtide.step.schedule import Compute, Schedule
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.units import Budget
from ebbtide.zoo import GPTConfig, gpt


class Chain(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = torch.tanh(each(x))
        return x.square().mean()


class Detached(nn.Module):
    """What the first layer makes is also used behind autograd's back, by a layer whose gradient comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.early, self.late = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.sigmoid(self.mask(x))
        return (self.late(torch.tanh(self.early(x)) * mask.detach()) + mask).square().mean()


def captured(model: nn.Module, *args: Tensor) -> Captured:
    return capture(
        model, args, {}, name="case", granularity_bytes=1, context=device_context("cpu"), loss=None, every_output=False
    )


def inside(model: nn.Module, *args: Tensor) -> tuple[Captured, Captured]:
    """The step of ``model`` as captured, and with SGD in it."""
    plain = captured(model, *args)
    return plain, UpdateInsertion(torch.optim.SGD(model.parameters(), lr=0.1), model).with_updates(plain)


def small_gpt(layers: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    case = gpt(2, GPTConfig(vocabulary=64, length=16, layers=layers, width=16, heads=2, dropout=0.1, tied=True))
    return case.model, *case.args


MODELS: dict[str, Callable[[], tuple[nn.Module, ...]]] = {
    "chain": lambda: (Chain(), torch.randn(8, 16)),  # type: ignore[dict-item]
    "detached": lambda: (Detached(), torch.randn(8, 16)),  # type: ignore[dict-item]
    "gpt": small_gpt,  # type: ignore[dict-item]
}


def needs(program: Program, op: int) -> set[int]:
    """All that may have to run so that ``op`` can, with none of its inputs there: it and its rerunnable ancestors."""
    found, waiting = {op}, [op]
    while waiting:
        for buffer in program.ops[waiting.pop()].inputs:
            producer = program.buffers[buffer].producer
            if producer is not None and program.ops[producer].rerunnable and producer not in found:
                found.add(producer)
                waiting.append(producer)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_nothing_behind_an_update_may_need_what_it_has_changed(name: str) -> None:
    _, step = inside(*MODELS[name]())  # type: ignore[arg-type]
    program = step.program
    readers = {u: {o for o, op in enumerate(program.ops) if u in op.until} for op in program.ops for u in op.until}
    assert len(updates_in(step)) == len(updatable(captured(*MODELS[name]())))  # type: ignore[arg-type]
    for update, reads in readers.items():
        assert program.ops[update].target.startswith(PREFIX)
        for later in range(update + 1, len(program.ops)):
            assert not needs(program, later) & reads
    assert not check(program, unplanned_schedule(program))


def test_updates_stand_where_gradients_are_made() -> None:
    """In a chain each layer is updated before the gradients of the one below are made."""
    _, step = inside(*MODELS["chain"]())  # type: ignore[arg-type]
    made = [each.parameter for each in updates_in(step).values()]
    assert [name.split(".")[1] for name in made] == sorted((name.split(".")[1] for name in made), reverse=True)
    names = [op.name for op in step.program.ops]
    assert names.index("update_layers_3_weight") < len(names) - 8
    assert step.program.gradients == ()


def test_what_is_used_later_without_a_gradient_keeps_the_update_waiting() -> None:
    """``mask`` is read by the gradient of ``early``, and would be made again from the first layer's weights."""
    _, step = inside(*MODELS["detached"]())  # type: ignore[arg-type]
    program = step.program
    at = next(i for i, op in enumerate(program.ops) if op.name == "update_mask_weight")
    gradient = max(i for i, op in enumerate(program.ops) if i < at and set(op.outputs) & set(program.ops[at].inputs))
    assert at >= gradient
    assert not any(needs(program, later) & {0} for later in range(at + 1, len(program.ops)) if later != at)


@pytest.fixture(scope="module")
def with_adamw() -> tuple[AheadStep, int]:
    """A captured step with the optimizer in it, and its smallest budget."""
    model, *args = small_gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = capture_ahead(model, tuple(args), options=Options(optimizer=optimizer, step="inside", progress=None))
    return step, step.plan(Budget.parse("100%"), PlanningOptions()).smallest_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in planner_names() if not needs_tiers(each)])
def test_every_planner_gives_legal_schedules_of_steps_with_updates(
    name: str, with_adamw: tuple[AheadStep, int]
) -> None:
    step, least = with_adamw
    assert step.program.has_updates
    for share in (0.02, 0.4):
        budget = int(least + share * (step.unplanned_budget_bytes - least))
        try:
            plan = step.plan(Budget(bytes=budget), PlanningOptions(planner=name, effort=50, time_limit_seconds=1))
        except ebbtide.errors.BudgetError:
            continue
        assert not check(plan.program, plan.schedule)  # a head in slices, if that was cheaper
        assert plan.predicted_peak_bytes <= budget


def test_legality_sees_a_read_behind_an_update() -> None:
    _, step = inside(*MODELS["chain"]())  # type: ignore[arg-type]
    program = step.program
    reader = next(o for o, op in enumerate(program.ops) if op.until and op.rerunnable)
    actions = (*unplanned_schedule(program).actions, Compute(reader))
    assert any("has changed" in each.message for each in check(program, Schedule(actions)))


def test_a_program_with_updates_survives_its_json() -> None:
    _, step = inside(*MODELS["chain"]())  # type: ignore[arg-type]
    again = Program.from_json(step.program.to_json())
    assert again == step.program
    assert again.fingerprint == step.program.fingerprint
    op = replace(step.program.ops[0], until=(0,))
    with pytest.raises(ValueError, match="until"):
        replace(step.program, ops=(op, *step.program.ops[1:]))


# -- the proofs -----------------------------------------------------------------------------------------------


def test_the_proof_counts_the_updates() -> None:
    plain, step = inside(*MODELS["gpt"]())  # type: ignore[arg-type]
    assert prove_updates(plain, step) == len(updates_in(step)) > 10


def _swap(step: Captured) -> None:
    """Give two updates of one size each other's gradients."""
    nodes = [node for node, update in updates_in(step).items() if update.parameter.endswith("weight")]
    one, two = nodes[0].args[0], nodes[1].args[0]
    nodes[1].update_arg(0, one)
    nodes[0].update_arg(0, two)


def _another(step: Captured) -> None:
    node = next(n for n in step.graph.nodes if n.target is torch.ops.aten.tanh_backward.default)
    node.target = torch.ops.aten.sigmoid_backward.default


def _twice(step: Captured) -> None:
    node = next(iter(updates_in(step)))
    with step.graph.inserting_after(node):
        copy = step.graph.create_node("call_function", node.target, node.args, name="again")
    copy.meta = dict(node.meta)


@pytest.mark.parametrize("tamper", [_swap, _another, _twice])
def test_the_proof_sees_other_steps(tamper: Callable[[Captured], None]) -> None:
    plain, step = inside(*MODELS["chain"]())  # type: ignore[arg-type]
    tamper(step)
    with pytest.raises(RewriteError):
        prove_updates(plain, step)


def test_the_proof_of_lowered_graphs_sees_a_read_behind_an_update() -> None:
    """A product with a weight that runs once more at the end."""
    _, step = inside(*MODELS["chain"]())  # type: ignore[arg-type]
    lowered = lower(step, unplanned_schedule(step.program))
    assert prove(step, lowered)
    graph = lowered.backward.graph
    reader = next(node for node in graph.nodes if step.program.ops[_index(step, node)].until)
    with graph.inserting_before(graph.output_node()):
        again = graph.create_node("call_function", reader.target, reader.args)
    again.meta = dict(reader.meta)
    with pytest.raises(ProofError, match="reads what was updated before"):
        prove(step, lowered)


def _index(step: Captured, node: fx.Node) -> int:
    """Of the op that ``node`` runs; the first one, which reads nothing of the kind, where it runs none."""
    claim = node.meta.get(CLAIM)
    late = claim in step.op_nodes and node.op == "call_function"
    return step.op_nodes.index(claim) if late else len(step.op_nodes) - 1


def test_updates_are_told_apart_from_what_they_cost() -> None:
    """Ops of one signature cost the same: parameters of one shape are of one."""
    _, step = inside(*MODELS["chain"]())  # type: ignore[arg-type]
    signatures = {op.signature for op in step.program.ops if op.target.startswith(PREFIX)}
    assert len(signatures) == 2


def test_nothing_is_updated_that_gets_no_gradient() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.two(self.one(x))).mean()

    model = Frozen()
    assert set(updatable(captured(model, torch.randn(2, 4))).values()) == {"two.weight", "two.bias"}
    assert with_updates(captured(model, torch.randn(2, 4)), {}).program.gradients


# -- steps that take norms of their gradients -----------------------------------------------------------------


def with_norms_of(model: nn.Module, *args: Tensor) -> tuple[Captured, Captured]:
    """The step of ``model`` as captured, and with norms of its gradients."""
    plain = captured(model, *args)
    insertion = UpdateInsertion(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    return plain, insertion.with_norms(plain)


@pytest.mark.parametrize("name", MODELS)
def test_no_update_comes_before_the_norms_of_all_gradients(name: str) -> None:
    model, *args = MODELS[name]()
    plain, normed = with_norms_of(model, *args)  # type: ignore[arg-type]
    step = UpdateInsertion(torch.optim.SGD(model.parameters(), lr=0.1), model).with_updates(normed)
    ops = step.program.ops
    (total,) = [i for i, op in enumerate(ops) if op.target == "ebbtide.total_norm"]
    partials = [i for i, op in enumerate(ops) if op.target == "ebbtide.partial_norm"]
    updates = [i for i, op in enumerate(ops) if op.target.startswith(PREFIX)]
    assert len(partials) == len(updates) == len(updatable(plain))
    assert max(partials) < total < min(updates)
    assert all(ops[total].outputs[0] in ops[each].inputs for each in updates)


def _take_the_norm_of_another(step: Captured) -> None:
    partials = [node for node in step.op_nodes if isinstance(node.target, PartialNorm)]
    partials[0].update_arg(0, partials[1].args[0])


def _forget_one(step: Captured) -> None:
    total = total_norm_of(step)
    assert total is not None
    total.args = total.args[1:]
    total.target = TotalNorm(total.target.positions[1:])  # type: ignore[union-attr]


@pytest.mark.parametrize("tamper", [_take_the_norm_of_another, _forget_one, _another])
def test_the_proof_sees_other_norms(tamper: Callable[[Captured], None]) -> None:
    plain, step = with_norms_of(*MODELS["chain"]())  # type: ignore[arg-type]
    tamper(step)
    with pytest.raises(RewriteError):
        prove_norms(plain, step, updatable(plain))


# -- gradients that are made a second time --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "detached"])
def test_behind_the_total_norm_all_that_is_read_is_kept_or_made_again(name: str) -> None:
    """And more is made again the dearer memory is; nothing is kept where it costs everything."""
    model, *args = MODELS[name]()
    _, step = with_norms_of(model, *args)  # type: ignore[arg-type]
    program = step.program
    total = next(i for i, op in enumerate(program.ops) if op.target == "ebbtide.total_norm")
    cuts = list(cuts_of(step))
    assert len(cuts) > 1
    assert [len(each.again) for each in cuts] == sorted(len(each.again) for each in cuts)
    assert [each.kept_bytes for each in cuts] == sorted((each.kept_bytes for each in cuts), reverse=True)
    gradients = {b for op in program.ops if op.target == "ebbtide.partial_norm" for b in op.inputs}
    for cut in cuts:
        passed = with_recompute_pass(step, cut)
        assert prove_recompute_pass(step, passed) == len(cut.again)
        after = UpdateInsertion(torch.optim.SGD(model.parameters(), lr=0.1), model).with_updates(passed).program
        assert not check(after, unplanned_schedule(after))
        wanted = gradients | {b for i in cut.again for b in program.ops[i].inputs}
        made = {b for i in cut.again for b in program.ops[i].outputs}
        late = {
            b
            for b in wanted - made
            if (producer := program.buffers[b].producer) is not None and program.after_boundary[producer]
        }
        assert cut.kept_bytes == sum(program.buffers[b].bytes for b in late)
        assert min(i for i, op in enumerate(after.ops) if op.name.startswith("again_")) > total
    assert cuts[-1].kept_bytes == 0


def _another_again(step: Captured) -> None:
    node = next(n for n in step.op_nodes if n.name.startswith("again_") and n.target is torch.ops.aten.mm.default)
    node.args = (node.args[1], node.args[0])


def test_the_proof_sees_another_recompute_pass() -> None:
    _, step = with_norms_of(*MODELS["chain"]())  # type: ignore[arg-type]
    passed = with_recompute_pass(step, list(cuts_of(step))[-1])
    _another_again(passed)
    with pytest.raises(RewriteError):
        prove_recompute_pass(step, passed)


def test_what_is_made_again_is_held_against_what_was_made_first() -> None:
    _, step = with_norms_of(*MODELS["chain"]())  # type: ignore[arg-type]
    passed = with_recompute_pass(step, list(cuts_of(step))[-1])
    again, first = next(iter(likes_in(passed).items()))
    assert passed.program.buffers[again].name == f"again_{passed.program.buffers[first].name}"
    table = Fingerprints(passed.program, likes_in(passed))
    table.record(first, torch.ones(3))
    table.check(first, torch.ones(3))
    with pytest.raises(VerificationError):
        table.check(first, torch.zeros(3))
