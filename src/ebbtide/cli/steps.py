"""From what a command was asked to a captured step: a model is captured, a graph file is a step already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ebbtide.cli.cases import blame, check_case, is_graph, load_case, refuse_for_graphs, refuse_to_offload_nothing
from ebbtide.cli.options import SEARCH
from ebbtide.step.machine import is_elsewhere

if TYPE_CHECKING:
    from ebbtide._api.estimate import AheadStep
    from ebbtide.case import Case
    from ebbtide.options import Options
    from ebbtide.report.text.progress import ProgressDisplay

__all__ = ["captured_step", "check_request"]


def check_request(case: str, size: int | None, options: Options, *, run: bool = False) -> None:
    """Refuse what cannot be planned as far as that shows at once, without torch.

    Args:
        case: as it was typed.
        size: of ``--size``.
        options: checked already by itself.
        run: of ``--run``.

    Raises:
        UsageError: for a case that is none, and for options that a graph file has no use for.
    """
    check_case(case, size)
    options.require_tiers_for(options.planner)
    if is_graph(case):
        given = ["size"] * (size is not None) + ["run"] * run
        given += [name for name in options.set_fields() if name not in SEARCH]
        refuse_for_graphs(case, [f"--{name.replace('_', '-')}" for name in given])


def captured_step(
    text: str,
    size: int | None,
    options: Options,
    display: ProgressDisplay,
    sizes: Mapping[str, int | str] | None = None,
) -> tuple[AheadStep, Case | None]:
    """The step that ``text`` names with what it needs to be planned, and the case if it is no graph file.

    Args:
        text: as it was typed.
        size: of ``--size``.
        options: checked already.
        display: told what is done.
        sizes: others by name, as :func:`load_case` takes them.

    Raises:
        UsageError: if ``text`` names nothing.
        CaptureError: if the case is not one graph.
    """
    from dataclasses import replace

    from ebbtide._api.estimate import AheadStep, capture_ahead
    from ebbtide.case import Case

    display.stage("reading the case")
    loaded = load_case(text, size, fake=is_elsewhere(options.target), sizes=sizes)
    if not isinstance(loaded, Case):
        return AheadStep(loaded, 0, 0), None
    asked = options.for_case(loaded)
    case = replace(loaded, optimizer=asked.optimizer_of(loaded.model), gradients=asked.gradients)
    if asked.offload_optimizer and case.optimizer is None:
        refuse_to_offload_nothing(text)
    settled = replace(asked, optimizer=case.optimizer)
    with blame(text):
        return capture_ahead(case.model, case.args, case.kwargs, options=settled, name=case.name), case
