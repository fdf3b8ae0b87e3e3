"""What the doctor found, as text: a block of facts, tables of bytes and seconds, and what would lower the floor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from ebbtide.planners.base import AS_CAPTURED
from ebbtide.report.records.diagnosis import Break, Findings, OpGroup, Place
from ebbtide.report.text.plan import counted_of, origins_of, room_of
from ebbtide.step.resident_in_words import parts_in_words, parts_of
from ebbtide.units import format_allowed, format_bytes, format_count, format_percent, format_seconds, format_share

__all__ = ["write_break", "write_findings"]

_ONLY_IF_FOUND = ("rerun as", "early")
_PLACES = 3  # of one group of ops; the others are counted


def write_findings(findings: Findings, stream: TextIO) -> None:
    """Write ``findings`` to ``stream``."""
    for block in (
        _facts(findings),
        _largest(findings),
        _peak(findings),
        _kinds(findings),
        _layers(findings),
        _floor(findings),
        _rewrites(findings),
        _advice(findings),
    ):
        if block:
            print("\n".join(block), file=stream)


def write_break(case: str, brk: Break, stream: TextIO) -> None:
    """Write to ``stream`` why ``case`` is not one program."""
    print(f"doctor for {case}: the step is not one graph, so it cannot be planned", file=stream)
    for key, text in (("line", brk.source), ("break", brk.reason), ("to do", brk.remedy)):
        if text:
            print(_fact(key, text), file=stream)


def _fact(key: str, text: str) -> str:
    return f"  {key:<9}  {text}"


def _facts(findings: Findings) -> list[str]:
    peak = findings.baseline_peak_bytes
    backward = findings.ops - findings.forward_ops
    plain = findings.budget_bytes is None and findings.rewritten_floors
    as_captured = ", as captured, without rewrites" if plain else ""
    lines = [
        _verdict(findings),
        f"doctor for {findings.case}: the step is one graph",
        _fact(
            "step",
            f"{format_count(findings.ops, 'op')} ({findings.forward_ops} forward, {backward} backward), "
            f"{format_count(findings.buffers, 'buffer')}",
        ),
        _fact(
            "peak",
            f"{format_bytes(peak)} unplanned: {format_bytes(findings.resident_bytes)} resident, "
            f"{format_bytes(peak - findings.resident_bytes)} above",
        ),
        *_resident(findings),
        _fact(
            "smallest",
            f"{_with_share(findings, findings.smallest_bytes)}: the least budget for which a plan was found"
            f"{as_captured}",
        ),
        _fact(
            "floor",
            f"{_with_share(findings, findings.floor_bytes)}: no plan with {AS_CAPTURED} has a budget below; "
            f"pinned by {findings.floor.at}",
        ),
    ]
    if findings.budget_bytes is not None:
        verdict = (
            "too small" if findings.overhead is None else f"workable at {format_percent(findings.overhead)} more time"
        )
        share = format_percent(findings.budget_bytes / peak if peak else 0.0)
        lines.append(_fact("budget", f"{format_allowed(findings.budget_bytes)}, {share} of the peak: {verdict}"))
        lines += [_fact("rewritten", each) for each in findings.rewritten]
    lines += _little(findings)
    source = findings.provenance
    lines.append(_fact("counted", counted_of(source)))
    if source.offloaded:
        lines.append(_fact("offloaded", source.offloaded))
    if source.costs is not None:
        lines.append(_fact("costs", f"{source.costs.value} for {source.machine or 'this machine'}"))
    if source.memory_bytes is not None:
        lines.append(_fact("memory", f"unplanned: {room_of(source, peak)}"))
        lines.append(_fact("", f"smallest: {room_of(source, findings.smallest_bytes)}"))
    lines += [_fact(key, text) for key, text in origins_of(source)]
    for key, groups, text in (
        ("random", findings.random, "{bytes} of generator state, so that reruns draw the same numbers"),
        ("run once", findings.single_run, "{bytes} kept until their last reader, since {note}"),
        ("opaque", findings.opaque, "{bytes} made; each is planned as a whole"),
        ("mutations", findings.mutations, "{bytes} copied into parameters and inputs at the boundary"),
        ("rerun as", findings.rerun_forms, "{note}, which leaves out what goes to parameters and inputs"),
        ("early", findings.reads_mutated, "read an input that the boundary changes, so run before it only"),
    ):
        if groups or key not in _ONLY_IF_FOUND:
            lines += _groups_of_ops(key, groups, text)
    if findings.loss_outside:
        tangent = format_bytes(findings.tangent_bytes)
        lines.append(_fact("loss", f"outside the model: the backward starts from {tangent}; the loss is not counted"))
    elif findings.tangent_bytes:
        lines.append(_fact("loss", "inside the step: the backward starts from scalars"))
    return lines


def _verdict(findings: Findings) -> str:
    """Whether the budget is enough, or how far down one may go."""
    case, smallest = findings.case, format_bytes(findings.smallest_bytes)
    if findings.budget_bytes is None:
        less = f"down to {smallest} with a plan"
        if findings.is_small:
            less = "and planning takes next to nothing off it"
        elif min(findings.rewritten_floors, default=findings.smallest_bytes) < findings.smallest_bytes:
            less += ", and further with rewrites"
        return f"{case} takes {format_bytes(findings.baseline_peak_bytes)} unplanned, {less}"
    budget = format_allowed(findings.budget_bytes)
    if findings.overhead is None:
        return f"{case} does not fit {budget}: ask for at least {smallest}"
    if findings.budget_bytes >= findings.baseline_peak_bytes:
        return f"{case} fits {budget} as it is, no time added"
    return f"{case} fits {budget} with a plan that adds {format_percent(findings.overhead)} of time"


def _resident(findings: Findings) -> list[str]:
    """What every budget holds before the step."""
    if not findings.resident_parts:
        return []
    return [_fact("resident", f"whatever the plan: {parts_in_words(findings.resident_parts)}")]


def _little(findings: Findings) -> list[str]:
    """That planning gains next to nothing, and why, where that is so."""
    if not findings.is_small:
        return []
    peak = findings.baseline_peak_bytes
    kept = parts_of({"resident": findings.resident_bytes}, findings.resident_bytes, findings.reserve_bytes)
    floor = {f"of {words}" if words.startswith("what") else words: size for words, size in findings.floor.parts.items()}
    most = f"{format_bytes(findings.gain_bytes)} at most, {format_percent(findings.gain_bytes / peak if peak else 0.0)}"
    return [
        _fact("gain", f"{most} of the peak: the rest is there under any plan"),
        _fact("", parts_in_words({**kept, **floor})),
    ]


def _with_share(findings: Findings, part: int) -> str:
    """A budget, and what it is of the unplanned peak; of a small step it is more, because of the reserve."""
    peak = findings.baseline_peak_bytes
    reserved = (
        f" (with {format_bytes(findings.reserve_bytes)} in reserve)" if part > peak and findings.reserve_bytes else ""
    )
    return f"{format_bytes(part)}, {format_share(part, peak)} of the peak{reserved}"


def _groups_of_ops(key: str, groups: Sequence[OpGroup], text: str) -> list[str]:
    """A line per group, ``text`` filled in; one line that says so if there is none."""
    lines: list[str] = []
    for group in groups:
        places = ", ".join(group.places[:_PLACES])
        more = f" and {len(group.places) - _PLACES} more" if len(group.places) > _PLACES else ""
        what = f"{group.count} x {_short(group.target)}{' ' + places + more if places else ''}"
        filled = text.format(bytes=format_bytes(group.bytes), note=group.note)
        lines.append(_fact("" if lines else key, f"{what}: {filled}"))
    return lines or [_fact(key, "none")]


def _short(target: str) -> str:
    """``aten.mm.default`` as ``mm``; others keep their namespace."""
    words = target.removesuffix(".default").split(".")
    return ".".join(words[1:2] if words[0] == "aten" else words)


def _what(place: Place) -> str:
    module = f" in {place.module}" if place.module else ""
    source = f" at {place.source}" if place.source else ""
    return f"{_short(place.op)}{module}{source}{', backward' if place.backward else ''}"


def _largest(findings: Findings) -> list[str]:
    """Places with the most bytes at one time."""
    rows = [("at once", "in all", "buffers", "to the end", "life in ops", "what makes them")]
    rows += [
        (
            format_bytes(group.live_bytes),
            format_bytes(group.bytes),
            str(group.count),
            str(group.pinned) if group.pinned else "",
            f"{group.first_op} to {group.last_op}",
            _what(group.place),
        )
        for group in findings.largest
    ]
    return [
        "",
        f"largest buffers of the unplanned step, like modules and lines together (top {len(findings.largest)})",
        *_table(rows),
    ]


def _peak(findings: Findings) -> list[str]:
    """What is live at the unplanned peak."""
    total = findings.peak.above_bytes
    rows = [_share_row(group.bytes, total, str(group.count), _what(group.place)) for group in findings.peak.groups]
    if findings.peak.rest_bytes:
        rows.append(_share_row(findings.peak.rest_bytes, total, "", "in other places"))
    if findings.peak.other_bytes:
        rows.append(_share_row(findings.peak.other_bytes, total, "", "workspace and user code"))
    head = ("bytes", "share", "buffers", "what made them")
    title = f"live at the unplanned peak, {format_bytes(total)} above, at {findings.peak.at}"
    return ["", title, *_table([head, *rows])]


def _kinds(findings: Findings) -> list[str]:
    """The unplanned peak by kind."""
    total = findings.baseline_peak_bytes
    rows = [
        (
            format_bytes(kind.bytes),
            format_percent(kind.bytes / total if total else 0.0),
            f"{kind.name}{', resident' if kind.resident and kind.name != 'resident' else ''}",
        )
        for kind in findings.kinds
    ]
    return ["", f"the unplanned peak by kind, {format_bytes(total)}", *_table([("bytes", "share", "kind"), *rows])]


def _layers(findings: Findings) -> list[str]:
    """Bytes at the unplanned peak and seconds by type of layer; nothing where modules are not known."""
    if not findings.layers:
        return []
    total, seconds = findings.peak.above_bytes, sum(layer.seconds for layer in findings.layers)
    rows = [
        (
            format_bytes(layer.bytes),
            format_percent(layer.bytes / total if total else 0.0),
            format_seconds(layer.forward_seconds),
            format_seconds(layer.backward_seconds),
            format_percent(layer.seconds / seconds if seconds else 0.0),
            str(layer.layers),
            layer.name or "in no module",
        )
        for layer in findings.layers
    ]
    if rest := total - sum(layer.bytes for layer in findings.layers):
        share = format_percent(rest / total)
        rows.append((format_bytes(rest), share, "", "", "", "", "gradients of outputs, workspace, user code"))
    head = ("bytes", "share", "forward", "backward", "share", "layers", "type of layer")
    return [
        "",
        "by type of layer: live of theirs at the unplanned peak, and their predicted time",
        *_table([head, *rows]),
    ]


def _share_row(part: int, whole: int, count: str, text: str) -> tuple[str, ...]:
    return (format_bytes(part), format_percent(part / whole if whole else 0.0), count, text)


def _floor(findings: Findings) -> list[str]:
    """What the floor is made of."""
    total = findings.floor.above_bytes
    rows = [
        (format_bytes(size), format_percent(size / total if total else 0.0), words)
        for words, size in findings.floor.parts.items()
    ]
    title = f"the floor, {format_bytes(total)} above, pinned by {findings.floor.at}"
    return ["", title, *_table([("bytes", "share", f"why it is there under any plan with {AS_CAPTURED}"), *rows])]


def _rewrites(findings: Findings) -> list[str]:
    """What rewrites would do; nothing where there are none."""
    used = [each for each in findings.rewrites if each.floor_bytes is not None]
    left = [each for each in findings.rewrites if each.floor_bytes is None]
    if not findings.rewrites:
        return []
    rows = [("floor", "time", "what may take the place of parts of the step, with the same bits")]
    for each in used:
        assert each.floor_bytes is not None
        assert each.seconds is not None
        note = f"; NOT used: {each.why_not}" if each.why_not else ""
        rows.append((format_bytes(each.floor_bytes), _more_or_less(each.seconds), f"{each.what}{note}"))
    lines = ["", "rewrites, chosen where a budget asks for it", *(_table(rows) if used else ())]
    return [*lines, *(f"  left as it is: {each.what or 'a loss'}: {each.why_not}" for each in left)]


def _more_or_less(seconds: float) -> str:
    """A difference of times with its sign; none where it rounds to nothing."""
    size = format_seconds(abs(seconds))
    return size if size == format_seconds(0.0) else f"{'-' if seconds < 0 else '+'}{size}"


def _advice(findings: Findings) -> list[str]:
    lines = [f"  {advice.text}" for advice in findings.advice]
    lower = min(findings.rewritten_floors, default=findings.floor_bytes) < findings.floor_bytes
    besides = " besides the rewrites above" if lower else ""
    return ["", "what would lower the floor", *(lines or [f"  nothing stands out{besides}"])]


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Columns set to the right, the last one to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True)]
        yield "  " + "  ".join([*cells, row[-1]])
