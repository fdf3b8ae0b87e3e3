"""Commands as a shell runs them, each in a fork of one process that has imported the script: an import is paid once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_RUN = """
import importlib, json, os, sys, tempfile
from ebbtide.cli import main
commands, watched, before = json.loads(sys.stdin.read())
for name in before:
    importlib.import_module(name)
for arguments in commands:
    files = [tempfile.TemporaryFile("w+") for _ in range(3)]
    child = os.fork()
    if child == 0:
        for descriptor in (1, 2):
            os.dup2(files[descriptor].fileno(), descriptor)
        code = 0
        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
        finally:
            files[0].write(json.dumps([code, sorted(set(watched) & set(sys.modules))]))
            for stream in (sys.stdout, sys.stderr, files[0]):
                stream.flush()
            os._exit(0)
    os.waitpid(child, 0)
    for each in files:
        each.seek(0)
    print(json.dumps([*json.loads(files[0].read()), files[1].read(), files[2].read()]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status, which of the watched modules it had imported, and what it printed."""

    status: int
    imported: list[str]
    output: str
    errors: str


def run_commands(
    commands: Sequence[Sequence[str]], *, watched: Sequence[str] = (), before: Sequence[str] = ()
) -> list[Ended]:
    """What each of ``commands`` does; modules ``before`` are imported once, for all of them."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps([commands, watched, before]),
        capture_output=True,
        text=True,
        check=True,
    )
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]
