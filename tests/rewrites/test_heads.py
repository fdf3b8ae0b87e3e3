"""Which linear layers with a cross-entropy are found in a captured step, and the proof of what replaces them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from ebbtide.capture.claims import RewriteError
from ebbtide.capture.joint import Captured, reread
from ebbtide.capture.offline import capture
from ebbtide.cost.attach import with_measured_costs, with_roofline_costs
from ebbtide.cost.profile import profile_calls
from ebbtide.cost.profiling_budget import ProfilingBudget, arguments_for, profiling_within
from ebbtide.cost.roofline import flops_of
from ebbtide.lower.lowering import lower
from ebbtide.lower.proof import prove
from ebbtide.rewrites import choices
from ebbtide.rewrites.choices import Choice, choice_of
from ebbtide.rewrites.facts import Fact
from ebbtide.rewrites.heads.costs import estimates
from ebbtide.rewrites.heads.find import find_heads
from ebbtide.rewrites.heads.forms import forms_of, rewritten
from ebbtide.rewrites.heads.proof import prove_rewritten
from ebbtide.rewrites.heads.rule import HeadRule
from ebbtide.step.machine import machine_named
from ebbtide.step.op_traits import NAMESPACE
from ebbtide.step.rewrite import Rewrite
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.torch_seams.dispatcher import OpOverload, schema_of
from ebbtide.torch_seams.trees import tree_leaves
from head_models import CLASSES, FORMS, LEFT, TOKENS, WIDTH, Tower, arguments


def captured_of(model: Tower) -> Captured:
    return capture(model, arguments(), {}, name="tower", granularity_bytes=64, context={"device": "cpu"})


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_found_and_every_form_is_proven(form: str) -> None:
    step = captured_of(FORMS[form]())
    (head,), left = find_heads(step)
    assert not left
    assert (head.sizes.rows, head.sizes.width, head.sizes.vocabulary) == (TOKENS, WIDTH, CLASSES)
    assert (head.weight_gradient is None) == ("frozen" in form)
    assert bool(head.sizes.cut) == ("cut" in form or form == "one sequence")
    kinds: set[str] = set()
    for each in forms_of(head):
        kinds.add(each.form)
        other = rewritten(step, each)
        replaced = prove_rewritten(step, other)
        assert len(replaced) == sum(op.target.startswith(NAMESPACE) for op in other.program.ops) > 0
        prove(other, lower(other, unplanned_schedule(other.program)))
        assert not [op for op in other.program.ops if op.target in ("aten.t.default", "aten.view.default")]
        assert Rewrite.from_json(each.to_json()) == each
    assert (head.row_sums is not None) == ("smoothed" in form)
    assert ("tanh" in head.sizes.logit_ops) == ("capped" in form)
    rows = {"kept", "rows"} if "no reduction" in form else {"kept", "guessed", "rows"}
    assert kinds == ({"kept"} if "smoothed" in form else rows)
    assert len(find_heads(step)[0]) == 1  # the captured graph is as it was


@pytest.mark.parametrize("form", LEFT)
def test_what_only_looks_alike_is_left_with_the_reason(form: str) -> None:
    make, why = LEFT[form]
    heads, left = find_heads(captured_of(make()))
    assert not heads
    assert why in left[0].why
    assert left[0].source.startswith("head_models.py:")


def test_a_rewrite_of_another_step_is_refused() -> None:
    step = captured_of(FORMS["plain"]())
    (head,), _ = find_heads(step)
    rewrite = next(forms_of(head))
    elsewhere = captured_of(LEFT["bent otherwise"][0]())
    with pytest.raises(LookupError, match="no linear layer"):
        choice_of(elsewhere, [rewrite])


def test_what_a_wrong_guess_takes_is_not_underestimated() -> None:
    for form in ("plain", "bias", "bfloat16, upcast"):
        step = captured_of(FORMS[form]())
        (head,), _ = find_heads(step)
        for each in forms_of(head):
            if each.form != "rows":
                continue
            other = rewritten(step, each)
            pairs = zip(other.program.ops, other.calls, strict=True)
            call = next(call for op, call in pairs if "backward_by_rows" in op.target)
            (cost,) = profile_calls([call], "cpu").values()
            settling = estimates(head, each, {})["settle_guess"]
            assert cost.workspace_bytes <= settling.workspace_bytes


def _product_flops(event: Any) -> int:
    if event.name == "aten::addmm_":  # of which the profiler does not tell
        _, (n, d), (_, m), *_ = event.input_shapes
        return 2 * n * d * m
    return event.flops if event.name in ("aten::mm", "aten::addmm") else 0


@pytest.mark.parametrize("form", ["plain", "frozen", "bias", "smoothed"])
def test_the_arithmetic_of_an_op_is_that_of_the_products_in_it(form: str) -> None:
    step = captured_of(FORMS[form]())
    (head,), _ = find_heads(step)
    seen: set[str] = set()
    for each in forms_of(head):
        for call in rewritten(step, each).calls:
            if not str(call.target).startswith(NAMESPACE):
                continue
            args, kwargs = arguments_for(call)
            if "backward_by_columns" in str(call.target) and args[1] is not None:
                args = [*args[:7], args[1], *args[8:]]  # a guess that was right
            with torch.profiler.profile(with_flops=True, record_shapes=True) as profile, torch.no_grad():
                call.target(*args, **kwargs)
            made = sum(map(_product_flops, profile.events() or ()))
            seen.add(str(call.target))
            assert flops_of(call) == made or "settle_guess" in str(call.target)
    assert seen


def test_made_up_hidden_states_make_logits_whose_softmax_is_all_normal_numbers() -> None:
    """Whatever weights are lent: for numbers below the least normal one, kernels would take up to ten times as long."""
    step = captured_of(FORMS["plain"]())
    (head,), _ = find_heads(step)
    large = torch.randn(WIDTH * CLASSES) * 20
    seen = 0
    for each in forms_of(head):
        for call in rewritten(step, each).calls:
            if not isinstance(call.target, OpOverload) or call.target.namespace != NAMESPACE:
                continue
            names = [each.name for each in schema_of(call.target).arguments]
            if "h" not in names:
                continue
            with profiling_within(ProfilingBudget(0, [large])):
                args, _ = arguments_for(call)
            h, wt = args[names.index("h")], args[names.index("wt")]
            assert wt.untyped_storage().data_ptr() == large.untyped_storage().data_ptr()
            assert h.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
            assert (h @ wt).log_softmax(1).min() > -80
            seen += 1
    assert seen


@pytest.mark.measured_seconds
def test_estimated_costs_are_of_the_same_order_as_measured_ones() -> None:
    step = captured_of(FORMS["plain"]())
    program = with_measured_costs(step.program, step.calls, "cpu")
    (head,), _ = find_heads(step)
    for each in forms_of(head):
        choice = choice_of(step, [each])
        estimated, measured = (
            choice.estimated(program),
            with_measured_costs(choice.captured.program, choice.captured.calls, "cpu"),
        )
        for mine, theirs in zip(estimated.ops, measured.ops, strict=True):
            if mine.target.startswith(NAMESPACE) and "settle" not in mine.target:
                assert mine.seconds > 0
                assert theirs.workspace_bytes <= 1.01 * mine.workspace_bytes + 4096
            elif not mine.target.startswith(NAMESPACE):
                assert mine.seconds == pytest.approx(theirs.seconds, rel=0.5, abs=1e-4)


@pytest.mark.parametrize("form", ["plain", "frozen with bias", "smoothed", "cut, tied"])
def test_one_graph_gives_the_estimates_of_all_forms_of_its_shape(form: str) -> None:
    step = captured_of(FORMS[form]())
    program = with_roofline_costs(step.program, step.calls, machine_named("a100-80gb"))
    (head,), _ = find_heads(step)
    made: dict[object, Choice] = {}
    shared = 0
    for each in forms_of(head):
        choice = choice_of(step, [each])
        alike = made.setdefault(HeadRule().shape(step, each), choice)
        shared += alike is not choice
        mine, theirs = choice.estimated(program), choice.estimated(program, alike)
        assert (theirs.buffers, theirs.boundary, theirs.gradients) == (mine.buffers, mine.boundary, mine.gradients)
        assert [replace(op, signature="", views=()) for op in theirs.ops] == [
            replace(op, signature="", views=()) for op in mine.ops
        ]
    assert shared
    assert (len(made) > 1) == (form != "smoothed")


# -- the proof sees what is wrong ---------------------------------------------------------------------------------


def _own(graph: fx.Graph, kind: str) -> fx.Node:
    return next(node for node in graph.nodes if NAMESPACE in str(node.target) and kind in str(node.target))


def _set(node: fx.Node, position: int, value: object) -> None:
    arguments_ = list(node.args)
    arguments_[position] = value  # type: ignore[call-overload]
    node.args = tuple(arguments_)


def _another_like(graph: fx.Graph, node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    return next(
        each
        for each in graph.nodes
        if each is not node
        and isinstance(each.meta.get("val"), torch.Tensor)
        and each.meta["val"].shape == value.shape
        and each.meta["val"].dtype == value.dtype
    )


def _swap_outputs(graph: fx.Graph) -> None:
    results = tree_leaves(graph.output_node().args)
    wanted = [i for i, each in enumerate(results) if isinstance(each, fx.Node) and each.meta["val"].dim() == 2]
    results[wanted[0]], results[wanted[1]] = results[wanted[1]], results[wanted[0]]
    graph.output_node().args = (tuple(results),)


MUTANTS: dict[str, tuple[str, Callable[[fx.Graph], None]]] = {
    "another ignored label": ("rows", lambda g: _set(_own(g, "forward"), 6, 3)),
    "another reduction": ("rows", lambda g: _set(_own(g, "backward_by_rows"), 6, 2)),
    "other numbers between": ("capped/rows", lambda g: _set(_own(g, "backward_by_rows"), 9, "div 2.0, tanh, mul 3.0")),
    "another cut": ("rows", lambda g: _set(_own(g, "backward_by_rows"), 8, [48, 0, 47])),
    "other hidden states": (
        "rows",
        lambda g: _set(_own(g, "backward_by_columns"), 2, _another_like(g, _own(g, "backward_by_columns").args[2])),  # type: ignore[arg-type]
    ),
    "another tangent": (
        "rows",
        lambda g: _set(_own(g, "backward_by_rows"), 4, _another_like(g, _own(g, "backward_by_rows").args[4])),  # type: ignore[arg-type]
    ),
    "loss and weight": (
        "kept",
        lambda g: _set(_own(g, "backward_over_kept"), 6, _own(g, "backward_over_kept").args[5]),
    ),
    "the loss for its tangent": (
        "kept",
        lambda g: _set(_own(g, "backward_over_kept"), 5, _own(g, "backward_over_kept").args[6]),
    ),
    "a frozen weight": ("kept", lambda g: _set(_own(g, "backward_over_kept"), 14, False)),
    "labels smoothed": ("kept", lambda g: _set(_own(g, "forward"), 10, True)),
    "numbers of none": (
        "kept",
        lambda g: _set(_own(g, "backward_over_kept"), 7, _own(g, "backward_over_kept").args[6]),
    ),
    "another type": ("kept", lambda g: _set(_own(g, "forward"), 8, torch.float64)),
    "the guess for the tangent": (
        "guessed",
        lambda g: _set(_own(g, "settle_guess"), 6, _own(g, "settle_guess").args[1]),
    ),
    "outputs swapped": ("rows", _swap_outputs),
    "another guess to settle": (
        "guessed",
        lambda g: _set(_own(g, "settle_guess"), 1, _another_like(g, _own(g, "settle_guess").args[1])),  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_proof_sees_mutants(name: str) -> None:
    where, mutate = MUTANTS[name]
    model, _, form = where.rpartition("/")
    step = captured_of(FORMS[model or "scaled"]())
    (head,), _ = find_heads(step)
    other = rewritten(step, next(each for each in forms_of(head) if each.form == form))
    mutate(other.graph)
    with pytest.raises(RewriteError):
        prove_rewritten(step, other)


@pytest.mark.parametrize("position", [7, 10])
def test_the_proof_sees_other_numbers_of_smoothed_labels(position: int) -> None:
    step = captured_of(FORMS["smoothed"]())
    (head,), _ = find_heads(step)
    other = rewritten(step, next(forms_of(head)))
    if position == 7:
        _set(_own(other.graph, "backward_over_kept"), 7, _own(other.graph, "backward_over_kept").args[6])
    else:
        _set(_own(other.graph, "forward"), 10, False)
    with pytest.raises(RewriteError):
        prove_rewritten(step, other)


def test_the_proof_sees_a_reader_of_what_is_written_over() -> None:
    step = captured_of(FORMS["plain"]())
    (head,), _ = find_heads(step)
    other = rewritten(step, next(each for each in forms_of(head) if each.form == "kept"))
    graph = other.graph
    kept = _own(graph, "backward_over_kept").args[0]
    assert isinstance(kept, fx.Node)
    with graph.inserting_before(graph.output_node()):
        extra = graph.call_function(torch.ops.aten.sum.default, (kept,))
    extra.meta = dict(kept.meta)
    with pytest.raises(RewriteError, match="writes over"):
        prove_rewritten(step, other)


def test_a_captured_step_is_itself() -> None:
    step = captured_of(FORMS["tied"]())
    assert not prove_rewritten(step, reread(step, step.graph))


def test_ops_of_a_head_that_were_there_before_are_ops_as_others_are() -> None:
    step = captured_of(FORMS["plain"]())
    (head,), _ = find_heads(step)
    before = rewritten(step, next(each for each in forms_of(head) if each.form == "kept"))
    assert not prove_rewritten(before, reread(before, before.graph))
    after = rewritten(step, next(each for each in forms_of(head) if each.form == "kept"))
    _set(_own(after.graph, "forward"), 5, 3)
    with pytest.raises(RewriteError):
        prove_rewritten(before, after)


@pytest.mark.parametrize("form", ["plain", "frozen"])
@pytest.mark.parametrize(("axis", "least"), [("rows", 96), ("columns", 150), ("rows", 1_000_000)])
def test_where_short_slices_do_not_hold_the_shortest_that_do_take_their_place(
    form: str, axis: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that sum otherwise for few rows than for many do not for few columns, and the other way round."""
    word = re.compile(r"(\d+) " + ("rows of the (logits|hidden)" if axis == "rows" else "(columns|rows of the weight)"))

    def measured(found: Iterable[Fact], _device: str) -> dict[str, bool | None]:
        sizes = {fact.signature: word.match(fact.says) for fact in found}
        return {key: match is None or int(match[1]) >= least for key, match in sizes.items()}

    monkeypatch.setattr(choices, "measured", measured)
    step = captured_of(FORMS[form]())
    (head,), _ = find_heads(step)
    seen = 0
    for each in forms_of(head):
        asked, holding = dict(each.settings), choice_of(step, [each]).holding("cpu")
        if holding is None:
            assert each.form != "kept"
            assert least > asked.get(axis, 0)
            continue
        (found,) = holding.rewrites
        settings = dict(found.settings)
        assert found.form == each.form
        assert {**settings, axis: 0} == {**asked, axis: 0}
        if each.form != "kept" and asked.get(axis):
            assert least <= settings[axis] < max(2 * least, asked[axis] + 1)
            seen += settings != asked
        assert not holding.not_held("cpu")
    assert seen or least == 1_000_000 or (axis, form) == ("columns", "frozen")
