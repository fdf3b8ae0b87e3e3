"""The page of the API has every public name, as its docstring tells it; ``dir`` and import know the same names."""

from __future__ import annotations

import re
import subprocess
import sys

import api_page
from pages import read

import ebbtide


def test_every_public_name_stands_on_both_pages() -> None:
    headings = re.findall(r"^##+ (\w+)$", api_page.page(), re.MULTILINE)
    names = re.findall(r"^- `(\w+)`: ", api_page.index(), re.MULTILINE)
    assert {*headings, "errors"} >= set(ebbtide.__all__)
    assert set(names) >= set(ebbtide.__all__)


def test_every_argument_is_told() -> None:
    """A signature on the page has no argument that the page does not explain."""
    page = api_page.page()
    for name in (*api_page.TRAINING, *api_page.AHEAD):
        entry = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        shown = entry.split("```")[1]
        arguments = re.findall(r"[(,]\s+?\*?(\w+)|\((\w+)|, (\w+)", shown)
        for argument in {each for group in arguments for each in group if each}:
            single = name in ("unfit", "plan_of", "step_of", "calls_of", "metrics_of")  # of a model, as they say
            assert single or re.search(rf"^- `\*?{argument}`", entry, re.MULTILINE), f"{name}({argument}=)"


def test_the_page_is_what_the_docstrings_say() -> None:
    assert read(api_page.INDEX) == api_page.index(), "run python tests/docs/api_page.py"


def test_marks_become_markdown() -> None:
    assert (
        api_page.marked(":func:`ebbtide.plan` of a\n ``Plan``, :attr:`~a.b.C.size`")
        == "`ebbtide.plan` of a `Plan`, `size`"
    )


def test_dir_shows_public_names_before_any_is_used() -> None:
    code = (
        "import ebbtide; shown = {each for each in dir(ebbtide) if not each.startswith('_')}; "
        "modules = {name for name in shown if isinstance(vars(ebbtide).get(name), type(ebbtide))}; "
        "print(sorted(shown - modules) == sorted(set(ebbtide.__all__) - {'errors'}), 'errors' in modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
