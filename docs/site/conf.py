"""The documentation site: ``make docs``. Its source is the repository, so that links between pages work as they are.

Result files, the licence and sources that pages link to become downloads; they are no pages of their own.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Ebbtide"
author = "The Ebbtide developers"
copyright = "the Ebbtide developers"
release = _PROJECT["version"]

extensions = ["myst_parser"]
root_doc = "docs/site/index"
include_patterns = [
    "docs/**",
    "build/pages/*.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/notes/*.md",
]
exclude_patterns = [".*", "src", "tests", "build/site", "dist", "benchmarks/results"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

html_theme = "furo"
html_title = f"Ebbtide {release}"
html_show_sourcelink = False
html_copy_source = False
html_extra_path = ["root"]
pygments_style = "default"
pygments_dark_style = "monokai"
nitpicky = True

# A result file in Markdown is shown as it is, not built: hundreds of rows.
_RESULT = re.compile(r"\]\(((?:\.\./)*(?:benchmarks/)?results/[^)#]+\.md)\)")


def _download_results(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to result files lead to the files."""
    source[0] = _RESULT.sub(r"](path:\1)", source[0])


def _search_pages_for_users(app: Sphinx, doctree: nodes.document) -> None:
    """Decision records and notes are linked from pages, and not what a search should find before these."""
    if app.env.docname.startswith(("docs/adr/", "benchmarks/notes/")):
        app.env.metadata[app.env.docname]["nosearch"] = "true"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _download_results)
    app.connect("doctree-read", _search_pages_for_users)
