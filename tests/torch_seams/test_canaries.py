"""Every private name of torch does what Ebbtide relies on; a torch on which one does not is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.errors import CaptureError
from ebbtide.torch_seams import versions
from ebbtide.torch_seams.canaries import CANARIES, run
from ebbtide.torch_seams.patches import Setting, open_patches


@pytest.mark.parametrize("name", sorted(CANARIES))
def test_torch_does_what_is_relied_on(name: str) -> None:
    state = torch.get_rng_state()
    run(name)
    assert open_patches() == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", sorted(CANARIES))
def test_a_canary_says_what_is_relied_on(name: str) -> None:
    assert (CANARIES[name].__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("name", ["joint_graphs_are_ours_to_split", "fake_descriptions_can_be_corrected"])
def test_a_canary_does_not_depend_on_the_callers_modes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    ran: list[bool] = []
    check = CANARIES[name]

    def checked() -> None:
        ran.append(torch.is_grad_enabled() and not isinstance(torch.empty(1), FakeTensor))
        check()

    monkeypatch.setitem(CANARIES, name, checked)
    with torch.no_grad(), FakeTensorMode():
        run(name)
        assert not torch.is_grad_enabled()
        assert isinstance(torch.empty(1), FakeTensor), "the caller's mode is active again"
    assert ran == [True], "the canary runs with gradients and without modes"


_is_of_thread: Callable[[Setting], bool] = vars(Setting)["is_of_thread"].fget

BREAKS: dict[str, tuple[str, str, object]] = {
    "storages_have_an_identity": ("torch.UntypedStorage", "_cdata", property(lambda _: 0)),
    "fake_descriptions_can_be_corrected": (
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "dispatch",
        lambda self, func, types, args=(), kwargs=None: self.from_tensor(torch.ones(3, device="meta")),
    ),
    "boxed_code_empties_its_list": ("torch.fx.graph._BoxedCodeGen", "gen_fn_def", torch.fx.graph.CodeGen.gen_fn_def),
    "backwards_have_numbers": ("torch._C", "_current_graph_task_id", lambda: -1),
    "calls_of_zero_grad_are_seen": ("torch.optim.Optimizer", "zero_grad", lambda self, set_to_none=True: None),
    "saved_tensor_hooks_are_seen": ("torch._C._autograd", "_top_saved_tensors_default_hooks", lambda _: None),
    "ends_of_backwards_are_seen": ("torch.Tensor", "backward", lambda self: None),
    "marked_sizes_become_symbols": ("torch._dynamo", "maybe_mark_dynamic", lambda *_: None),
    "captures_log_no_error": ("torch._dynamo.utils", "add_compilation_metrics_to_chromium", lambda: "one argument"),
    "settings_are_told_apart": (
        "ebbtide.torch_seams.patches.Setting",
        "is_of_thread",
        property(lambda setting: not _is_of_thread(setting)),
    ),
    "compiled_code_can_be_forgotten": ("ebbtide.torch_seams.dynamo", "reset_code", lambda _: None),
    "numbers_of_python_are_not_drawn_in_traces": ("ebbtide.torch_seams.tracing", "_refuse_draw", lambda below: below),
    "gradients_of_results_may_be_asked_for": ("ebbtide.torch_seams.leaves", "_returns_leaf", lambda *_: False),
    "a_wrapper_is_known_while_its_forward_runs": (
        "torch.nn.parallel.DistributedDataParallel",
        "_get_active_ddp_module",
        classmethod(lambda _: None),
    ),
    "comparisons_with_draws_are_decided": ("ebbtide.torch_seams.tracing", "_is_drawn", lambda _: False),
    "checks_of_values_are_traced": ("ebbtide.torch_seams.checks", "_raised", lambda *_: None),
    "numbers_of_numpy_are_constants": ("ebbtide.torch_seams.numpy_numbers", "_wrapped_by_value", lambda below: below),
    "context_variables_have_values_in_traces": (
        "ebbtide.torch_seams.context_variables",
        "_of_context_variables",
        lambda below: below,
    ),
    "sequences_of_checkpoints_are_their_loop": ("torch.utils.checkpoint", "checkpoint", lambda function, x, **_: x),
    "functions_of_torch_can_be_traced_otherwise": (
        "torch._dynamo.variables.torch.TorchInGraphFunctionVariable",
        "_get_handlers",
        staticmethod(dict),
    ),
}
"""Per canary, where and how torch is made to differ, and the canary has to see it."""


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_canary_fails_where_torch_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, broken = BREAKS[name]
    module = __import__(where.split(".")[0])
    for part in where.split(".")[1:]:
        module = getattr(module, part)
    monkeypatch.setattr(module, attribute, broken)
    with pytest.raises(Exception):  # noqa: B017, PT011  whatever the difference leads to
        run(name)


@pytest.fixture
def unknown_torch(monkeypatch: pytest.MonkeyPatch) -> str:
    version = "2.99.0+cpu"
    monkeypatch.setattr(torch, "__version__", version)
    versions._run_canaries.cache_clear()
    return version


def test_each_seam_has_its_canaries() -> None:
    """A module of seams has a module of canaries under its name, or one says that it has its."""
    seams = Path(versions.__file__).parent
    homes = {path.stem: path.read_text(encoding="utf-8") for path in (seams / "canaries").glob("*.py")}
    without = {"__init__", "versions"}  # which use no name of torch's
    for path in seams.glob("*.py"):
        if path.stem not in without:
            assert path.stem in homes or any(f"``{path.stem}``" in text.partition("\n")[0] for text in homes.values())


def test_releases_that_were_tested() -> None:
    assert all(versions.is_tested(each) for each in ("2.11.0", "2.12.1", "2.14.1+cpu", "2.13.1.dev20260901+cu130"))
    assert not any(versions.is_tested(each) for each in ("2.1.0", "2.15.0", "2.110.0", "3.11.0", "1.13.0", ""))
    assert versions.is_tested(str(torch.__version__)), "this torch is tested right now: add its release to TESTED"


def test_a_tested_torch_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(versions, "_run_canaries", asked.append)
    versions.require_supported_torch()
    assert not asked, "canaries ran"
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    versions.require_supported_torch()
    assert asked == ["2.99.0"]


@pytest.mark.usefixtures("unknown_torch")
def test_on_an_unknown_torch_canaries_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    for name in CANARIES:
        monkeypatch.setitem(CANARIES, name, lambda: ran.append(1))
    versions.require_supported_torch()
    versions.require_supported_torch()
    assert len(ran) == len(CANARIES)


def test_an_unknown_torch_that_differs_is_refused_at_the_first_step(
    unknown_torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("it sings otherwise")

    for name in CANARIES:
        monkeypatch.setitem(CANARIES, name, lambda: None)
    monkeypatch.setitem(CANARIES, "backwards_have_numbers", broken)
    model = ebbtide.fit(torch.nn.Sequential(torch.nn.Linear(4, 4)), "100%")
    for _ in range(2):  # and at the second
        with pytest.raises(CaptureError, match="backwards_have_numbers") as caught:
            model(torch.ones(2, 4))
    message = str(caught.value)
    assert unknown_torch in message
    assert "it sings otherwise" in message
    assert all(release in message for release in versions.TESTED)


def test_importing_ebbtide_and_its_seams_imports_no_compiler() -> None:
    modules = sorted(p.stem for p in Path(versions.__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import ebbtide\n"
        + "".join(f"import ebbtide.torch_seams.{name}\n" for name in [*modules, "canaries"])
        + "print(sorted(m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', 'sympy'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\[\]\s*", done.stdout), done.stdout
