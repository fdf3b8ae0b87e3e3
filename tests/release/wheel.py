"""Builds the wheel and runs it where nothing else of ours is: ``make wheel``; without the demo ``make wheel-build``.

1. The wheel and the source archive are built from the tree, and the wheel of the unpacked archive has the same files.
2. A *clean environment* is a new one with the wheel installed, in which only the packages are found that the wheel
   requires, and those that these require. They are links to what is installed here, so that nothing is downloaded.
3. What runs there runs in an empty folder, far from the repository: import and ``--version``, and if
   asked ``demo``, ``plan``, ``show`` and ``report``.
4. The archive has no git, and the pages that are made of result files are made without it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
IN_ARCHIVE = (
    "src/ebbtide/py.typed", "src/ebbtide/step/machines.toml", "conftest.py", "docs/api.md",
    "published/pyproject.toml", "published/src/ebbtide_published/py.typed", "published/tests",
    "benchmarks/path.py", "benchmarks/results/path.json", "README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md",
    "CITATION.cff", "CONTRIBUTING.md", "Makefile", "constraints.txt", "pyproject.toml",
)  # fmt: skip
NOT_IN_ARCHIVE = (".venv", "__pycache__", ".git/", "results/bench/", "build/")


def main(builder: str, *, demo: bool) -> None:
    """Build with the interpreter ``builder``, which has hatchling, and try what comes out, the demo if asked."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        archive, wheel = built(builder, ROOT, DIST)
        source = unpacked(archive, here / "source")
        _, again = built(builder, source, here / "again")
        assert contents(wheel) == contents(again), "the source archive gives another wheel"
        run([sys.executable, "-m", "publish"], source / "benchmarks", path="")
        python = clean_environment(here / "clean", wheel)
        imported(python, here / "empty")
        if demo:
            tried(python, here / "empty")
    print(f"{wheel.name} and {archive.name} are in dist, and run by themselves")


def built(builder: str, tree: Path, out: Path) -> tuple[Path, Path]:
    """The source archive and the wheel of ``tree``."""
    for old in [*out.glob("*.whl"), *out.glob("*.tar.gz")]:
        old.unlink()
    run([builder, "-m", "hatchling", "build", "-d", str(out)], tree)
    [archive], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


def unpacked(archive: Path, folder: Path) -> Path:
    """The archive's tree; it has all of a release and nothing of this checkout's own."""
    with tarfile.open(archive) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
        for each in IN_ARCHIVE:
            assert any(name.startswith(each) for name in names), f"{archive.name} lacks {each}"
        for name in names:
            assert not any(each in name for each in NOT_IN_ARCHIVE), f"{archive.name} has {name}"
        file.extractall(folder, filter="data")
    [tree] = folder.iterdir()
    return tree


def contents(wheel: Path) -> dict[str, str]:
    """Hashes of a wheel's files by name."""
    with zipfile.ZipFile(wheel) as file:
        return {name: hashlib.sha256(file.read(name)).hexdigest() for name in file.namelist()}


def required(name: str, known: dict[str, metadata.Distribution]) -> None:
    """Add what ``name`` requires here, extras left out, and what that requires, to ``known``."""
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        key = requirement.name.lower().replace("_", "-")
        if key not in known:
            known[key] = metadata.distribution(requirement.name)
            required(requirement.name, known)


def clean_environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of a clean environment (definition 2)."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    [packages] = (folder / "lib").glob("python*/site-packages")
    known: dict[str, metadata.Distribution] = {}
    required("ebbtide", known)
    for each in known.values():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(each.locate_file(top))))
    run([str(python), "-m", "pip", "check"], folder)
    return python


def imported(python: Path, empty: Path) -> None:
    """Import what is installed, in the folder ``empty`` (definition 3)."""
    empty.mkdir()
    where = run([str(python), "-c", "import ebbtide; print(ebbtide.__file__)"], empty)
    assert Path(where.strip()).is_relative_to(python.parents[1]), f"ebbtide is imported from {where}"
    assert run([str(python.with_name("ebbtide")), "--version"], empty).startswith("ebbtide ")


def tried(python: Path, empty: Path) -> None:
    """Train, plan and report with what is installed (definition 3)."""
    command = str(python.with_name("ebbtide"))
    said = json.loads(run([command, "demo", "--steps", "4", "--json"], empty).splitlines()[-1])
    assert said["losses_equal"], said
    assert said["measured_peak_bytes"] <= said["budget_bytes"], said
    run([command, "plan", "zoo:mlp_chain", "--size", "256", "--budget", "80%", "--out", "plan.json"], empty)
    assert "plan for" in run([command, "show", "plan.json"], empty)
    run([command, "report", "plan.json", "--out", "page.html"], empty)
    assert "<html" in (empty / "page.html").read_text(encoding="utf-8")


def run(command: Sequence[str], folder: Path, path: str | None = None) -> str:
    """What ``command`` prints; it has to succeed. No path of this checkout is in its environment, but ``path``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path is not None:
        environment["PYTHONPATH"] = path
    environment["XDG_CACHE_HOME"] = str(folder / ".cache")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1], demo="--demo" in sys.argv[2:])
