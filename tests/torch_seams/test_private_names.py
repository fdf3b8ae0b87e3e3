"""No private name of torch is used outside of ``torch_seams``: its importers see what its modules offer."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import ebbtide

ROOT = Path(ebbtide.__file__).parent

EXEMPT = ("torch_seams", "zoo")

OTHERS = {
    "_compiler_ctx",
    "_data_fetcher",
    "_fields",
    "_hf_hook",
    "_output_capturing_hooks_installed",
    "_signal",
    "_skip_backward",
    "_trainer",
}
"""Private names that are not torch's: a named tuple's, accelerate's, Lightning's, Python's, transformers'."""

HALF_PRIVATE_MODULES = ("torch.fx.experimental", "torch.utils.flop_counter", "torch.autograd.profiler", "functorch")
HALF_PRIVATE = {
    "BackwardCFunction",
    "aot_autograd",
    "cache_clear",
    "device_hint",
    "donated_buffer",
    "experimental_event_tree",
    "fake_device",
    "fake_mode",
    "fw_nn_module_stack",
    "has_kernel_for_dispatch_key",
    "ignore_logger_methods",
    "inner_exception",
    "kineto_results",
    "maybe_mark_dynamic",
    "nn_module_stack",
    "py_kernels",
    "stack_trace",
}
"""Names without an underscore that torch promises as little about."""


def _files() -> list[str]:
    names = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))
    return sorted(name for name in names if not name.startswith(EXEMPT))


@functools.cache
def _own_names() -> frozenset[str]:
    """Private names that Ebbtide's own modules define."""
    names: set[str] = set()
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in EXEMPT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return frozenset(names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every private name of torch in ``source``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    if _is_private_module(alias.name):
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] in ("torch", "functorch"):
                for alias in aliases:
                    full = f"{module}.{alias.name}"
                    if _is_private_module(full) or alias.name in HALF_PRIVATE:
                        yield node.lineno, full
            case ast.Attribute(value=value, attr=name):
                text = ast.unparse(value)
                # operators of torch.ops are no names of torch's Python
                operator = text.endswith(("aten", "prims")) or ".ops." in text
                foreign = _is_private(name) and name not in _own_names() | OTHERS and text not in ("self", "cls", "os")
                if not operator and (foreign or name in HALF_PRIVATE):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, *_]) if ast.unparse(owner).startswith("torch"):
                yield node.lineno, ast.unparse(node)  # a patch
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr")):
                for argument in node.args[1:2]:
                    name = getattr(argument, "value", "")
                    if isinstance(name, str) and (
                        (_is_private(name) and name not in _own_names() | OTHERS) or name in HALF_PRIVATE
                    ):
                        yield node.lineno, name
            case ast.Constant(value="stack_trace" | "nn_module_stack" | "fwd_nn_module_stack" | "desc" as key):
                yield node.lineno, key


def _is_private_module(name: str) -> bool:
    parts = name.split(".")
    return (parts[0] == "torch" and any(map(_is_private, parts))) or name.startswith(HALF_PRIVATE_MODULES)


@pytest.mark.parametrize("name", _files())
def test_private_names_of_torch_are_used_in_one_place(name: str) -> None:
    found = list(private_names((ROOT / name).read_text(encoding="utf-8")))
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._dynamo.config as config",
        "from torch._C import DispatchKey",
        "from torch.utils import _pytree",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._python_dispatch import _disable_current_modes",
        "from torch import _meta_registrations, fx",
        "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
        "from torch.fx.graph import _BoxedCodeGen",
        "from torch.autograd import profiler\nprofiler._is_profiler_enabled",
        "torch._C._current_graph_task_id()",
        "def f(): return torch._dynamo.maybe_mark_dynamic(t, 0)",
        "tensor.untyped_storage()._cdata",
        "module._parameters['weight']",
        "op._schema.is_mutable",
        "hasattr(t, '_dynamo_weak_dynamic_indices')",
        "fx.graph._BoxedCodeGen()",
        "torch.autograd.function.BackwardCFunction",
        "node.meta.get('stack_trace')",
        "t.fake_mode",
        "setattr(torch.autograd, name, entry)",
    ],
)
def test_the_scan_finds(source: str) -> None:
    assert list(private_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.ops.aten._softmax.default",
        "_aten._neg_view.default(t)",
        "self._plan",
        "torch.__version__",
        "node.meta['val']",
    ],
)
def test_the_scan_passes(source: str) -> None:
    assert not list(private_names(source))
