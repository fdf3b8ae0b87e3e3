"""The doctor: what it finds in programs, that its bytes add up, what it says, and what it advises."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner, Result

import ebbtide
from ebbtide.cli import app
from ebbtide.errors import CaptureError
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.bounds.floor_parts import floor_parts
from ebbtide.planning.alternatives import Alternative
from ebbtide.planning.rewriting import rewritings
from ebbtide.report.plan import Plan
from ebbtide.report.records.advice import Advice
from ebbtide.report.records.diagnosis import Break, Findings, break_of, find, place_of
from ebbtide.report.text.doctor import write_findings
from ebbtide.step.occupancy import moment_at
from ebbtide.step.program import Buffer, Op, Program
from ebbtide.step.rewrite import Rewrite
from ebbtide.step.simulate import simulate
from ebbtide.step.status import Status
from ebbtide.step.unplanned import unplanned_schedule
from random_schedule import random_schedule
from strategies import programs

# One of everything: x = up(); y, m = norm(x); z = drop(y); w = mine(z); loss | tangent; and back to two gradients.
PROGRAM = Program(
    name="tiny",
    ops=(
        Op("up", "aten.mm.default", (), (0,), seconds=2.0, source="net.py:7", module="blocks.0.up"),
        Op(
            "norm",
            "aten.norm.default",
            (0,),
            (1, 2),
            seconds=1.0,
            repeat="aten.norm.again",
            once=1,
            source="net.py:8",
            module="blocks.0.norm",
        ),
        Op("drop", "aten.drop.default", (1,), (3,), seconds=1.0, state_bytes=16, source="net.py:9", module="drop"),
        Op("up_1", "aten.mm.default", (3,), (4,), seconds=2.0, source="net.py:7", module="blocks.1.up"),
        Op("mine", "mine.fused.default", (4,), (5,), seconds=1.0, source="net.py:10"),
        Op("count", "aten.add.Tensor", (), (6,), seconds=1.0, reads_mutated=True, source="net.py:8"),
        Op("loss", "aten.mean.default", (5,), (7,), seconds=1.0, source="net.py:11"),
        Op("scatter", "aten.scatter_add.default", (5, 8), (9,), seconds=1.0, rerunnable=False, source="net.py:10"),
        Op("mm", "aten.mm.default", (3, 9), (10,), seconds=2.0, workspace_bytes=30, source="net.py:7"),
        Op("flow", "aten.mm.default", (9,), (11,), seconds=2.0, source="net.py:7"),
        Op("mm_1", "aten.mm.default", (0, 11), (12,), seconds=2.0, source="net.py:7"),
    ),
    buffers=(
        Buffer("up", 1000, 0),
        Buffer("norm[0]", 1000, 1),
        Buffer("norm[1]", 10, 1),
        Buffer("drop", 1000, 2),
        Buffer("up_1", 500, 3),
        Buffer("mine", 500, 4),
        Buffer("count", 8, 5),
        Buffer("loss", 4, 6),
        Buffer("tangent", 4, None),
        Buffer("scatter", 500, 7),
        Buffer("mm", 200, 8),
        Buffer("flow", 1000, 9),
        Buffer("mm_1", 200, 10),
    ),
    boundary=7,
    forward_outputs=(7,),
    gradients=(10, 12),
    mutations=(2, 6),
)
TYPES = {"": "Net", "blocks.0.up": "Linear", "blocks.1.up": "Linear", "blocks.0.norm": "Norm", "drop": "Dropout"}
GOLDEN = """\
tiny takes 3.04 KiB unplanned, down to 2.45 KiB with a plan
doctor for tiny: the step is one graph
  step       11 ops (7 forward, 4 backward), 13 buffers
  peak       3.04 KiB unplanned: 100 B resident, 2.94 KiB above
  resident   whatever the plan: 90 B (90 bytes) weights, 10 B (10 bytes) optimizer state
  smallest   2.45 KiB, 80.65 % of the peak: the least budget for which a plan was found
  floor      2.45 KiB, 80.65 % of the peak: no plan with PyTorch's op order and boundary has a budget below; pinned by mm_1 (aten.mm.default) at net.py:7
  counted    what the ops of the graph make; not parameters, inputs and optimizer, of which the graph says nothing
  random     1 x drop in drop at net.py:9: 16 B of generator state, so that reruns draw the same numbers
  run once   1 x scatter_add at net.py:10: 500 B kept until their last reader, since it sums with atomics, so that the last bits may differ; torch.use_deterministic_algorithms(True) makes it repeatable
  opaque     1 x mine.fused at net.py:10: 500 B made; each is planned as a whole
  mutations  1 x norm in blocks.*.norm at net.py:8: 10 B copied into parameters and inputs at the boundary
             1 x add at net.py:8: 8 B copied into parameters and inputs at the boundary
  rerun as   1 x norm in blocks.*.norm at net.py:8: aten.norm.again, which leaves out what goes to parameters and inputs
  early      1 x add at net.py:8: read an input that the boundary changes, so run before it only
  loss       inside the step: the backward starts from scalars

largest buffers of the unplanned step, like modules and lines together (top 4)
   at once    in all  buffers  to the end  life in ops  what makes them
  1.47 KiB  1.47 KiB        2                  0 to 10  mm in blocks.*.up at net.py:7
  1.37 KiB  1.37 KiB        3           2      8 to 11  mm at net.py:7, backward
    1010 B    1010 B        2                   1 to 6  norm in blocks.*.norm at net.py:8
    1000 B    1000 B        1                   2 to 8  drop in drop at net.py:9

live at the unplanned peak, 2.94 KiB above, at drop (aten.drop.default) at net.py:9 in drop
   bytes    share  buffers  what made them
  1010 B  33.55 %        2  norm in blocks.*.norm at net.py:8
  1000 B  33.22 %        1  drop in drop at net.py:9
  1000 B  33.22 %        1  mm in blocks.*.up at net.py:7

the unplanned peak by kind, 3.04 KiB
     bytes    share  kind
      90 B   2.89 %  weights, resident
      10 B   0.32 %  optimizer state, resident
  2.94 KiB  96.78 %  feature maps

by type of layer: live of theirs at the unplanned peak, and their predicted time
   bytes    share  forward  backward    share  layers  type of layer
  1010 B  33.55 %   1.00 s      0 us   6.25 %       1  Norm
  1000 B  33.22 %   4.00 s      0 us  25.00 %       2  Linear
  1000 B  33.22 %   1.00 s      0 us   6.25 %       1  Dropout
     0 B   0.00 %   3.00 s    7.00 s  62.50 %       1  Net

the floor, 2.36 KiB above, pinned by mm_1 (aten.mm.default) at net.py:7
     bytes    share  why it is there under any plan with PyTorch's op order and boundary
       4 B   0.17 %  forward outputs made before it
     200 B   8.31 %  gradients made before it
       4 B   0.17 %  gradients of the forward's outputs (tangents)
  1.96 KiB  83.06 %  what it reads besides
     200 B   8.31 %  what it makes

what would lower the floor
  1.96 KiB are what one op reads and makes, 1000 B of it from up (aten.mm.default) at net.py:7: make the batch, the sequences or the images smaller, or split that line
"""  # noqa: E501


def a_plan(program: Program = PROGRAM, resident_bytes: int = 100) -> Plan:
    """The unplanned step as a plan; its floor is taken for workable."""
    floor, floor_op = floor_bytes(program)
    return Plan(
        program=program,
        schedule=unplanned_schedule(program),
        status=Status.OPTIMAL,
        case=program.name,
        planner="keep_all",
        budget_bytes=2**40,
        resident_bytes=resident_bytes,
        reserve_bytes=0,
        floor_bytes=resident_bytes + floor,
        floor_op=floor_op,
        smallest_bytes=resident_bytes + floor,
        bound=None,
        bound_class="",
        plan_seconds=0.0,
    )


def text_of(found: Findings) -> str:
    stream = StringIO()
    write_findings(found, stream)
    return stream.getvalue()


# -- bytes add up ---------------------------------------------------------------------------------------------


@given(programs())
def test_the_parts_of_the_floor_add_up_to_it(program: Program) -> None:
    floor = floor_parts(program)
    assert (floor.bytes, floor.op) == floor_bytes(program)
    assert sum(each.bytes for each in floor.parts) == floor.bytes
    named = [b for each in floor.parts for b in each.buffers]
    assert len(named) == len(set(named)), "no buffer is counted twice"
    for each in floor.parts:
        if each.buffers:
            assert each.bytes == sum(program.buffers[b].bytes for b in each.buffers)


@given(programs(), st.integers(0, 99))
def test_a_moment_holds_what_the_simulator_counts(program: Program, seed: int) -> None:
    for schedule in (unplanned_schedule(program), random_schedule(program, seed, drop=0.3)):
        peaks = simulate(program, schedule).peak_bytes
        assert [moment_at(program, schedule, index).bytes(program) for index in range(len(peaks))] == peaks.tolist()


@given(programs())
def test_the_findings_of_any_program_add_up(program: Program) -> None:
    found = find(a_plan(program), top=3)
    peak = found.peak
    assert peak.above_bytes == found.baseline_peak_bytes - found.resident_bytes
    assert peak.above_bytes == sum(group.bytes for group in peak.groups) + peak.rest_bytes + peak.other_bytes
    assert found.floor.above_bytes == sum(found.floor.parts.values())
    assert found.baseline_peak_bytes == sum(kind.bytes for kind in found.kinds)
    assert found.layers == (), "no class of a module is known"
    assert text_of(found)
    json.dumps(found.to_json())


# -- what is found and said -----------------------------------------------------------------------------------


def test_what_is_found_is_told() -> None:
    found = find(a_plan(), top=4, resident={"weights": 90, "optimizer state": 10}, types=TYPES)
    assert text_of(found) == GOLDEN


@given(programs())
def test_types_of_layers_have_all_seconds_and_what_ops_made_of_the_peak(program: Program) -> None:
    modules = {op.module for op in program.ops}
    types = {module: f"Kind{index % 2}" for index, module in enumerate(sorted(modules))}
    found = find(a_plan(program), types=types)
    assert sum(layer.seconds for layer in found.layers) == pytest.approx(program.seconds)
    assert sum(layer.layers for layer in found.layers) == len(modules)
    live = moment_at(program, unplanned_schedule(program), a_plan(program).baseline.peak_action).buffers
    made = sum(program.buffers[b].bytes for b in live if program.buffers[b].producer is not None)
    assert sum(layer.bytes for layer in found.layers) == made
    assert text_of(found)


def test_like_modules_and_lines_are_one_place() -> None:
    [group, *_] = find(a_plan()).largest
    assert (group.place.op, group.place.module, group.place.source) == ("aten.mm.default", "blocks.*.up", "net.py:7")
    assert (group.live_bytes, group.bytes, group.count, group.pinned) == (1500, 1500, 2, 0)
    assert (group.first_op, group.last_op) == (0, 10)


@given(programs())
def test_a_place_has_its_most_at_one_time_when_the_unplanned_step_does(program: Program) -> None:
    schedule = unplanned_schedule(program)
    found = find(a_plan(program), top=1000)
    moments = [moment_at(program, schedule, index).buffers for index in range(len(schedule.actions))]
    for group in found.largest:
        own = {b for b in range(len(program.buffers)) if place_of(program, b) == group.place}
        live = [sum(program.buffers[b].bytes for b in own.intersection(moment)) for moment in moments]
        assert group.live_bytes == max(live)


def test_ops_that_may_not_run_again_say_why() -> None:
    def why(target: str) -> str:
        op = Op("once", target, (), (0,), rerunnable=False)
        program = Program("one", (op,), (Buffer("b", 8, 0),), 1, forward_outputs=(0,))
        return find(a_plan(program)).single_run[0].note

    assert "collective" in why("_c10d_functional.all_reduce.default")
    assert "use_deterministic_algorithms" in why("aten.index_put.default")
    assert "effect" in why("mine.logs.default")
    assert "effect" in why("aten.fill_.Scalar")


# -- advice ---------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """A head over many classes: its scores are far larger than anything else."""

    def __init__(self, outside: bool = False, returns_scores: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 2000)
        self.outside, self.returns_scores = outside, returns_scores

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> object:
        scores = self.head(self.body(x).relu())
        if self.outside:
            return scores
        loss = F.cross_entropy(scores, labels)
        return (loss, scores) if self.returns_scores else loss


class Deep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def advice_for(model: nn.Module, *args: torch.Tensor) -> dict[str, Advice]:
    plan = ebbtide.plan(model, args, budget=2**40, machine="t4-16gb", options=ebbtide.Options(planner="keep_all"))
    return {advice.rule: advice for advice in find(plan).advice}


SCORES = (torch.zeros(512, 16), torch.zeros(512, dtype=torch.int64))


def test_scores_that_pin_the_floor_are_to_be_chunked() -> None:
    advice = advice_for(Scores(), *SCORES)
    assert advice["loss_in_chunks"].bytes == 3 * 512 * 2000 * 4  # log-softmax, its gradient, the scores' gradient
    assert "cross entropy" in advice["loss_in_chunks"].text
    assert "activation" not in advice
    assert "gradients" not in advice


def test_gradients_that_pin_the_floor_leave_room_for_a_larger_batch() -> None:
    advice = advice_for(Deep(256), torch.zeros(2, 256))
    assert advice["gradients"].bytes == 4 * (256 * 256 + 256) * 4
    assert "activation" not in advice


def test_one_large_activation_is_named() -> None:
    advice = advice_for(Deep(16), torch.zeros(4096, 16))
    assert advice["activation"].bytes >= 2 * 4096 * 16 * 4
    assert "test_doctor.py" in advice["activation"].text
    assert "gradients" not in advice


def test_a_loss_outside_the_model_belongs_inside() -> None:
    advice = advice_for(Scores(outside=True), *SCORES)
    assert advice["loss_outside"].bytes == 512 * 2000 * 4
    assert "outputs" not in advice


def test_scores_that_are_returned_are_held() -> None:
    advice = advice_for(Scores(returns_scores=True), *SCORES)
    assert advice["outputs"].bytes == 512 * 2000 * 4 + 512
    assert "loss_outside" not in advice


def test_workspace_and_single_run_results_are_named() -> None:
    ops = (
        Op("once", "mine.once.default", (), (0,), rerunnable=False),
        Op("conv", "aten.convolution.default", (), (1,), workspace_bytes=1000),
        Op("sum", "aten.sum.default", (0, 1), (2,)),
    )
    sizes = [Buffer("once", 300, 0), Buffer("conv", 100, 1), Buffer("sum", 8, 2)]
    found = find(a_plan(Program("hand", ops, tuple(sizes), 3, forward_outputs=(2,))))
    assert [(advice.rule, advice.bytes) for advice in found.advice] == [("workspace", 1000), ("single_run", 300)]


def test_a_resident_part_above_the_floor_is_said() -> None:
    assert [advice.rule for advice in find(a_plan(resident_bytes=10**6)).advice] == ["resident", "activation"]
    assert [advice.rule for advice in find(a_plan(resident_bytes=10)).advice] == ["activation"]
    plain = a_plan(resident_bytes=10**6)
    counted = dataclasses.replace(plain, provenance=dataclasses.replace(plain.provenance, optimizer="AdamW"))
    assert "offload_optimizer=True (--offload-optimizer) moves the state of AdamW" in find(counted).advice[0].text
    assert "offload" not in find(plain).advice[0].text


def test_where_nothing_dominates_there_is_nothing_to_advise() -> None:
    op = Op("a", "aten.a.default", (), (0,))
    found = find(a_plan(Program("empty", (op,), (Buffer("a", 0, 0),), 1), resident_bytes=0))
    assert found.advice == ()
    assert text_of(found).endswith("what would lower the floor\n  nothing stands out\n")


# -- breaks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text", "expected"),
    [
        (
            CaptureError("op index returns data", remedy="mask", op="index", source="net.py:9"),
            "Mask.\nWhy: op index returns data.",
            Break("op index returns data", "net.py:9", "mask"),
        ),
        (
            CaptureError("print(x)", remedy="take it out", source="net.py:8", message="no graph: print(x)"),
            "no graph: print(x)",
            Break("print(x)", "net.py:8", "take it out"),
        ),
        (CaptureError("no gradient"), "no gradient", Break("no gradient", "", "")),
    ],
)
def test_a_capture_error_is_a_finding(error: CaptureError, text: str, expected: Break) -> None:
    assert str(error) == text
    assert break_of(error) == expected


# -- the command ----------------------------------------------------------------------------------------------

CASES = """
    import torch
    import ebbtide
    from torch import nn

    class Model(nn.Module):
        def __init__(self, broken):
            super().__init__()
            self.broken = broken
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            x = nn.functional.dropout(self.norm(self.layer(x)), 0.5)
            if self.broken and x.sum() > 0:
                return x.mean()
            return x.square().mean()

    def good(batch: int = 4):
        return ebbtide.Case(Model(False), (torch.randn(batch, 8),))

    def broken(batch: int = 4):
        return ebbtide.Case(Model(True), (torch.randn(batch, 8),))
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *(str(argument) for argument in arguments)])


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "doctor_cases.py"
    path.write_text(textwrap.dedent(CASES))
    return path


def test_a_zoo_model_for_a_machine_as_json() -> None:
    result = run("zoo:mlp_chain", "--size", 64, "--machine", "a100-80gb", "--top", 3, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1, "progress belongs on standard error"
    data = json.loads(result.stdout)
    assert set(data) == {field.name for field in dataclasses.fields(Findings)} | {"captured", "breaks"}
    assert data["captured"] is True
    assert data["breaks"] == []
    assert len(data["largest"]) == 3
    assert data["provenance"]["machine"] == "a100-80gb"
    assert {group["place"]["source"].partition(":")[0] for group in data["largest"]} == {"mlp_chain.py"}


def test_dropout_and_batch_norm_are_found(cases: Path) -> None:
    result = run(f"{cases}:good", "--size", 16)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[1] == "doctor for good: the step is one graph"
    for words in (
        "  costs      measured for cpu",
        "  random     1 x bernoulli at doctor_cases.py:13: ",
        "  opaque     none",
        "  mutations  1 x add in norm at doctor_cases.py:13: ",
        "  rerun as   1 x _native_batch_norm_legit_functional in norm at doctor_cases.py:13: ",
        "  loss       inside the step",
    ):
        assert any(line.startswith(words) for line in lines), words


def test_a_graph_break_is_a_finding_and_exit_code_2(cases: Path) -> None:
    result = run(f"{cases}:broken")
    assert result.exit_code == 2
    assert "  line       doctor_cases.py:14\n" in result.stdout
    assert "  to do      " in result.stdout
    result = run(f"{cases}:broken", "--json")
    assert result.exit_code == 2
    data = json.loads(result.stdout)
    assert set(data) == {"case", "captured", "breaks"}
    assert data["captured"] is False
    [found] = data["breaks"]
    assert found["source"] == "doctor_cases.py:14"
    assert "x.sum() > 0" in found["reason"]
    assert found["remedy"]


def test_a_graph_file_gives_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    nodes = [{"id": i, "cost_cpu": 1.0, "cost_ram": 100.0 * i, "backward": i > 2} for i in range(6)]
    path.write_text(json.dumps({"nodes": nodes, "links": [{"source": i, "target": i + 1} for i in range(5)]}))
    result = run(path)
    assert result.exit_code == 0, result.stderr
    assert "  opaque     none" in result.stdout
    [row] = [line for line in result.stdout.splitlines() if "5 to 6" in line]
    assert row.split() == ["500", "B", "500", "B", "1", "1", "5", "to", "6", "5,", "backward"]
    assert "  nothing stands out" in result.stdout


def test_bad_input_is_one_message_and_exit_code_2() -> None:
    for arguments in (["zoo:nobody"], ["zoo:gpt", "--machine", "abacus"], ["missing.json"]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1].startswith("ebbtide: ")
        assert not result.stdout


# -- by kind and by type of layer -----------------------------------------------------------------------------


class Rows(nn.Module):
    """A buffer, a tensor that is no buffer, two layers of one type, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.ones(100))
        self.kept = torch.ones(30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.gelu(self.first(self.norm(x))))
        return (self.second(x) * self.kept.sum() * self.get_buffer("mask").sum()).square().mean()


def test_what_is_resident_is_told_by_kind() -> None:
    model, x = Rows(), torch.randn(50, 8)
    adam = torch.optim.Adam(model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    found = ebbtide.doctor(model, (x,), options=ebbtide.Options(optimizer=adam, progress=None))
    resident = {kind.name: kind.bytes for kind in found.kinds if kind.resident}
    steps = 4 * len(list(model.parameters()))
    assert resident == {
        "weights": weights,
        "buffers of modules": 400,
        "optimizer state": 2 * weights + steps,
        "arguments of the call": x.nbytes,
        "other tensors of modules": 120,
    }
    assert sum(resident.values()) == found.resident_bytes
    assert sum(kind.bytes for kind in found.kinds) == found.baseline_peak_bytes
    model(x).backward()
    kinds = {
        kind.name: kind.bytes for kind in ebbtide.doctor(model, (x,), options=ebbtide.Options(progress=None)).kinds
    }
    assert kinds["gradients of earlier steps"] == weights


def test_layers_are_told_by_their_class() -> None:
    found = ebbtide.doctor(Rows(), (torch.randn(50, 8),), machine="t4-16gb", options=ebbtide.Options(progress=None))
    layers = {layer.name: layer for layer in found.layers}
    assert {name: layer.layers for name, layer in layers.items()} == {"Rows": 1, "Linear": 2, "LayerNorm": 1}
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in layers.values())
    assert "LayerNorm" in text_of(found)


def test_a_published_graph_has_no_layers_to_tell_by_type() -> None:
    found = find(a_plan())
    assert [kind.name for kind in found.kinds if kind.resident] == ["resident"]
    assert "type of layer" not in text_of(found)


def test_rewrites_that_lower_nothing_are_not_offered_and_nothing_has_no_sign() -> None:
    def other(name: str, **changed: object) -> Alternative:
        program = dataclasses.replace(PROGRAM, **changed)  # type: ignore[arg-type]
        return Alternative((Rewrite("rule", name, "net.py:7", name, ()),), lambda: program, lambda: None)

    bigger = tuple(dataclasses.replace(each, bytes=3 * each.bytes) for each in PROGRAM.buffers)
    smaller = tuple(dataclasses.replace(each, bytes=each.bytes // 2) for each in PROGRAM.buffers)
    ops = tuple(dataclasses.replace(each, seconds=(1 - 1e-9) * each.seconds) for each in PROGRAM.ops)
    others = [other("higher", buffers=bigger), other("lower", buffers=smaller, ops=ops)]
    told = rewritings(PROGRAM, others, [], 0)
    assert [each.what for each in told] == ["rule at net.py:7: lower ()"]
    assert told[0].seconds is not None
    assert -1e-6 < told[0].seconds < 0
    stream = StringIO()
    write_findings(dataclasses.replace(find(a_plan(), 3), rewrites=told), stream)
    assert "-0 us" not in stream.getvalue()
    assert "+0 us" not in stream.getvalue()
    assert " 0 us  rule at net.py:7: lower" in stream.getvalue()
    assert "for which a plan was found, as captured, without rewrites\n" in stream.getvalue()
    bare = dataclasses.replace(find(a_plan(), 3), rewrites=told, advice=())
    assert text_of(bare).endswith("nothing stands out besides the rewrites above\n")
