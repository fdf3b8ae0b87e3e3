"""What pins a step once its head is in slices, and how far below that feed-forward layers in slices get.

Models of some layers at full width are captured for a card of the catalogue; nothing runs. *Ideal* is the step with a
rewritten head whose hidden values take a sixteenth of what they do, at no cost: no way of tiling them gets below what
is found for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ebbtide import Case
from ebbtide._api.estimate import capture_program
from ebbtide.capture.joint import Captured
from ebbtide.capture.without_memory import without_memory
from ebbtide.planners.bounds.floor import floor_bytes
from ebbtide.planners.search.smallest import smallest_of
from ebbtide.rewrites.choices import Choice
from ebbtide.rewrites.rules import RULES
from ebbtide.rewrites.sliced.feed_forward import FeedForward
from ebbtide.rewrites.sliced.regions import find_regions
from ebbtide.step.machine import machine_named
from ebbtide.step.program import Program
from ebbtide.step.unplanned import unplanned_bytes
from ebbtide.zoo import hf_bert, llama_8b, llama_70b_lora
from ebbtide.zoo.gpt import GPTConfig, gpt
from harness.record import Row, at_most

TITLE = (
    "What pins a step whose head is in slices, and what feed-forward layers in slices lower (catalogue, 4 layers each)"
)


def _vit(batch: int, layers: int) -> Case:
    """ViT-Base on ``batch`` images of 224 x 224."""
    import transformers

    config = transformers.ViTConfig(num_hidden_layers=layers)
    images, labels = torch.zeros(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
    return Case(
        transformers.ViTForImageClassification(config).train(), kwargs={"pixel_values": images, "labels": labels}
    )


@dataclass(frozen=True)
class _Model:
    """A case, whether it can be built without memory, and what is asked of it.

    Attributes:
        build: it.
        real: whether it needs memory to be built.
        most: for the smallest peak with the rule, of that without; ``None`` where nothing is to be won.
    """

    build: Callable[[], Case]
    real: bool = False
    most: float | None = None


MODELS = {
    "gpt2, 8 x 256": _Model(
        partial(gpt, 8, GPTConfig(vocabulary=50257, length=256, layers=4, width=768, heads=12)),
    ),
    "bert-base, 16 x 512": _Model(
        partial(hf_bert, 16, vocabulary=30522, length=512, layers=4, width=768, heads=12),
    ),
    "vit-base, 64 images": _Model(partial(_vit, 64, 4), real=True),
    "llama-70b, lora, 8k": _Model(partial(llama_70b_lora, 8192, layers=4), most=0.7),
    "llama-8b, all weights, 16k": _Model(partial(llama_8b, 16_384, layers=4)),
}
CASES = tuple(MODELS)
QUICK = ("llama-70b, lora, 8k",)
MACHINE = "h100-80gb"
EFFORT = 300
IDEAL = 16
"""Of the hidden values, what is left of them."""


def rows(case: str, quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    asked = MODELS[case]
    begin = time.process_time()
    if asked.real:
        made = asked.build()
    else:
        with without_memory():
            made = asked.build()
    step, program, _ = capture_program(made.model, made.args, dict(made.kwargs), machine=machine_named(MACHINE))
    head = _least(step, program, ("linear-cross-entropy",)) or Choice(step, ())
    yield _row(case, "as captured", Choice(step, ()), program, program)
    without = _row(case, "head in slices", head, head.estimated(program), program)
    yield without
    yield _row(case, "and hidden values / 16 (ideal)", head, _ideal(head, program), program)
    tiled = _least(step, program, ("linear-cross-entropy", "feed-forward"), needs="feed-forward")
    if tiled is None:
        columns = {"case": case, "way": "and feed-forward in slices", "not_run": "hidden values pin nothing: not tried"}
        yield Row("pins", columns, ())
    else:
        row = _row(case, "and feed-forward in slices", tiled, tiled.estimated(program), program)
        share = row.columns["smallest_mib"] / without.columns["smallest_mib"]
        checks = () if asked.most is None else (at_most("smallest with / without", share, asked.most),)
        columns = {**row.columns, "of_head_alone": share, "cpu_seconds": time.process_time() - begin}
        yield Row("pins", columns, checks)


def _least(step: Captured, program: Program, rules: tuple[str, ...], needs: str = "") -> Choice | None:
    """Of the ways of one rule after the other the one of the least floor; of equal ones the fastest."""
    best: list[tuple[int, float, Choice]] = []

    def visit(choice: Choice, left: list[str]) -> None:
        if not left:
            if choice.rewrites and (not needs or any(each.rule == needs for each in choice.rewrites)):
                estimated = choice.estimated(program)
                best.append((floor_bytes(estimated)[0], estimated.seconds, choice))
            return
        rule = next(each for each in RULES if each.name == left[0])
        visit(choice, left[1:])
        for way in rule.candidates(choice.rewritten):
            visit(choice.with_rewrites(rule, way), left[1:])

    visit(Choice(step, ()), list(rules))
    return min(best, key=lambda each: each[:2])[2] if best else None


def _ideal(head: Choice, program: Program) -> Program:
    """The step with a rewritten head whose hidden values are small, at no cost."""
    step, estimated = head.rewritten, head.estimated(program)
    members = {member.name for region in find_regions(step, FeedForward)[0] for member in region.members}
    small = {b for op in estimated.ops if op.name in members for b in op.outputs}
    buffers = tuple(
        replace(each, bytes=-(-each.bytes // IDEAL)) if index in small else each
        for index, each in enumerate(estimated.buffers)
    )
    return replace(estimated, buffers=buffers)


def _row(case: str, way: str, choice: Choice, program: Program, captured: Program) -> Row:
    floor, at = floor_bytes(program)
    pin = "the gradients, at the end" if at == len(program.ops) else f"{program.ops[at]}"
    columns = {
        "case": case,
        "way": way,
        "unplanned_mib": unplanned_bytes(program) / 2**20,
        "floor_mib": floor / 2**20,
        "smallest_mib": smallest_of(program, effort=EFFORT)[0] / 2**20,
        "gradients_mib": sum(program.buffers[each].bytes for each in set(program.gradients)) / 2**20,
        "pinned_by": pin,
        "seconds_of_captured": program.seconds / captured.seconds,
        "rewrites": "; ".join(dict.fromkeys(f"{each.rule}: {each.form}" for each in choice.rewrites)),
    }
    return Row("pins", columns, ())
