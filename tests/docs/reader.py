"""Runs the files that it is told of, each as a script in a process of its own that has torch imported already.

1. A line of standard input is a JSON list: a file of the working directory, where its output and its errors go, and the
   effort of searches that name none, and of those for the smallest budget (0: the default). The line that answers it is
   the exit status.
2. Each file runs in a fork of a process that has imported modules and done nothing else; which ones a first step needs
   is told by another fork, which trains a toy model and ends. What files import of libraries of trainers is imported
   before the first of them.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import os
import runpy
import sys
import tempfile
import traceback

import torch

import ebbtide

_TRAINERS = {"accelerate", "lightning", "peft", "transformers", "trl"}
_LOADED = {"torch", "ebbtide", "numba", "llvmlite", "highspy", "sympy", "mpmath", "functorch", "networkx", "filelock"}


def forked(run: object, *arguments: object) -> int:
    """The exit status of ``run(*arguments)`` in a fork."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        run(*arguments)  # type: ignore[operator]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def import_what_a_step_needs() -> None:
    """Definition 2."""
    importlib.import_module("torch._dynamo")
    told = tempfile.TemporaryFile("w+")  # one open file for both processes

    def scout() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        model = ebbtide.fit(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), "1MiB", options=ebbtide.Options(effort=10)
        )
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        told.write("\n".join(name for name in sys.modules if name.partition(".")[0] in _LOADED))
        told.flush()

    with told:
        assert forked(scout) == 0
        told.seek(0)
        for name in told.read().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def import_trainers_of(name: str) -> None:
    """Run the imports of the file ``name`` that take seconds: each is paid once, not by every file."""
    with open(name, encoding="utf-8") as file:
        found = ast.parse(file.read()).body
    for node in found:
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(each.partition(".")[0] in _TRAINERS for each in names):
            with contextlib.suppress(ImportError):
                exec(compile(ast.Module([node], []), name, "exec"), {})


def script(name: str, output: str, errors: str, effort: int) -> None:
    """Run ``name`` as ``python name`` would."""
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    beside = importlib.import_module("ebbtide.planning.beside")
    beside.Search.begin = staticmethod(lambda *_: None)  # when it finds something depends on the machine
    if effort:
        inspect.unwrap(ebbtide.Options.__init__).__kwdefaults__["effort"] = effort
        importlib.import_module("ebbtide.planners.search.smallest").FIRST_EFFORT = effort
    sys.argv[:] = [name]
    sys.path[0] = os.getcwd()
    runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    torch.set_num_threads(1)
    import_what_a_step_needs()
    for line in sys.stdin:
        request = json.loads(line)
        import_trainers_of(request[0])
        print(forked(script, *request), flush=True)
