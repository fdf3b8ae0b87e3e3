"""Does Ebbtide hold on the torch of this environment? Canaries, what captures read, the numerics tier and the demo.

    python benchmarks/torch_versions.py [--only canaries state numerics demo] [--out benchmarks/results]

``make test-torch TORCH=2.12.0`` runs it in an environment of that release. Results are written after each part, to
``torch-<release>.json``; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.origin import Origin, origin_now

SEEDS = {"tests": 0}
NO_PEER = "It runs our own tests on every release of torch that we claim."

ROOT = Path(__file__).parent.parent
SUITES = {
    "canaries": ["tests/torch_seams"],
    "state": ["tests/capture/test_python_state.py", "tests/capture/test_context_variables.py"],
    "numerics": ["tests/numerics"],
}
DEMO = "demo"
PACKAGES = ("torch", "numpy", "transformers", "pytest")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=[*SUITES, DEMO], default=[*SUITES, DEMO])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in PACKAGES}
    release = versions["torch"].partition("+")[0]
    path = options.out / f"torch-{release}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record |= {"versions": {"python": platform.python_version(), **versions}}
    record["parts"] = {name: part for name, part in record.get("parts", {}).items() if name not in options.only}
    known = [Origin.from_json(each) for each in record.get("origins", ())]
    start = origin_now(Path(__file__).stem, record["versions"] | {"date": datetime.date.today().isoformat()})
    for name in options.only:
        record["parts"][name] = _demo() if name == DEMO else _suite(SUITES[name])
        known = [replace(each, cases=tuple(case for case in each.cases if case != name)) for each in known]
        known.append(replace(start, cases=(name,)))
        record["origins"] = [each.to_json() for each in known if each.cases]
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record["parts"], indent=2))
    return int(any(part["failed"] for part in record["parts"].values()))


def _suite(paths: list[str]) -> dict[str, Any]:
    """Counts of one pytest run; a run that does not come to its tests counts as one failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--quiet", f"--junit-xml={report}", *paths]
        seconds, done = _timed(command)
        if not report.exists():
            return {
                "passed": 0,
                "failed": 1,
                "skipped": 0,
                "seconds": seconds,
                "failures": [f"pytest ended with {done}"],
            }
        return counts(report.read_text(encoding="utf-8")) | {"seconds": seconds}


def counts(report: str) -> dict[str, Any]:
    """Passed, failed and skipped of a JUnit report, and the names of what failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    kinds = [{child.tag for child in case} for case in cases]
    bad = [case for case, kind in zip(cases, kinds, strict=True) if kind & {"failure", "error"}]
    skipped = sum("skipped" in kind for kind in kinds)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def _demo() -> dict[str, Any]:
    """The demo fails if a loss, a parameter or the random state differs in a bit, or the peak is above the budget."""
    seconds, done = _timed([sys.executable, "-m", "ebbtide.cli", "demo"])
    failures = [] if done == 0 else [f"the demo ended with {done}"]
    return {"passed": int(done == 0), "failed": int(done != 0), "skipped": 0, "seconds": seconds, "failures": failures}


def _timed(command: list[str]) -> tuple[float, int]:
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, check=False).returncode
    return round(time.perf_counter() - begin, 1), done


if __name__ == "__main__":
    sys.exit(main())
