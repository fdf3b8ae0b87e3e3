"""A step in pieces against the same step as one graph: overhead, planning, and whether what is cut back fits.

1. A model is captured as one graph, and again as its blocks: front, blocks, head, each a graph of its own, a block of
   one shape once. The pieces are stitched to one program (``step.pieces``).
2. Costs are one machine's of the catalogue, by roofline, so that an overhead depends on nothing else.
3. Budgets are shares of the one graph's unplanned peak. Both are planned by ``auto`` without rewrites; the stitched
   plan's reruns are brought home and it is cut back to the pieces, each of whose schedules is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ebbtide._api.estimate import capture_program
from ebbtide.capture.pieces import piece_of
from ebbtide.planning.pieces import schedule_at_home
from ebbtide.step.legality import check
from ebbtide.step.machine import machine_named
from ebbtide.step.pieces import Occurrence, Piece, Stitched, stitch
from ebbtide.step.program import Program
from ebbtide.step.schedule import Schedule
from ebbtide.step.simulate import simulate
from ebbtide.step.unplanned import unplanned_schedule
from ebbtide.zoo.gpt import GPT, GPTConfig
from ebbtide.zoo.llama import LLAMA_SMALL, Llama
from ebbtide.zoo.unet import UNet
from harness.planned import Planned, plan_with
from harness.record import Row, at_most, holds

TITLE = "Steps in pieces, stitched, against one graph (auto, a100-80gb by roofline)"
MACHINE = "a100-80gb"
SHARES = (0.75, 0.6, 0.5, 0.4, 0.3, 0.2)
MOST_POINTS, MOST_TIMES = 0.3, 2.0
"""By how much the overhead may be above one graph's, and how many times as long planning may take."""
BATCH, LENGTH = 8, 256


@dataclass
class Part:
    """A module that is a piece, what it is called with, and where its inputs are from.

    Attributes:
        module: the piece.
        inputs: of a call; floating ones that are given take a gradient.
        sources: per input an earlier part and which of its outputs; ``None`` for what the step is called with.
        alike: an earlier part whose graph serves for it too.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    sources: tuple[tuple[int, int] | None, ...]
    alike: int | None = None


class Front(nn.Module):
    """A GPT's embeddings."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = model.tokens, model.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    """Norm, head and loss of a GPT or Llama."""

    def __init__(self, model: GPT | Llama) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _gpt() -> tuple[nn.Module, tuple[Tensor, ...], list[Part]]:
    model = GPT(GPTConfig(length=LENGTH, layers=12, width=256, tied=False))
    tokens, targets = (torch.randint(512, (BATCH, LENGTH)) for _ in range(2))
    x = torch.randn(BATCH, LENGTH, 256)
    blocks = [Part(each, (x,), ((index, 0),), 1 if index else None) for index, each in enumerate(model.blocks)]
    parts = [Part(Front(model), (tokens,), (None,)), *blocks]
    return model, (tokens, targets), [*parts, Part(Head(model), (x, targets), ((len(blocks), 0), None))]


class Rotary(nn.Module):
    """A Llama's embeddings, and the tables that every block reads."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.sizes, self.embedding = model.sizes, model.embedding

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head = self.sizes.width // self.sizes.heads
        powers = torch.arange(0, head, 2, device=tokens.device, dtype=torch.float32) / head
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), self.sizes.base**-powers)
        angles = torch.cat((angles, angles), dim=-1)
        x = self.embedding(tokens)
        return x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _llama() -> tuple[nn.Module, tuple[Tensor, ...], list[Part]]:
    model = Llama(LLAMA_SMALL)
    sizes = model.sizes
    tokens, targets = (torch.randint(sizes.vocabulary, (BATCH, LENGTH)) for _ in range(2))
    x = torch.randn(BATCH, LENGTH, sizes.width)
    tables = (torch.randn(LENGTH, sizes.width // sizes.heads), torch.randn(LENGTH, sizes.width // sizes.heads))
    blocks = [
        Part(each, (x, *tables), ((index, 0), (0, 1), (0, 2)), 1 if index else None)
        for index, each in enumerate(model.blocks)
    ]
    parts = [Part(Rotary(model), (tokens,), (None,)), *blocks]
    return model, (tokens, targets), [*parts, Part(Head(model), (x, targets), ((len(blocks), 0), None))]


class Step(nn.Module):
    """A function of modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.parts, *inputs)


def _bert() -> tuple[nn.Module, tuple[Tensor, ...], list[Part]]:
    """BERT's encoder of eight layers, embeddings of tokens, and its masked-language head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=2048, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048,
        tie_word_embeddings=False,
    )  # fmt: skip
    bert = BertForMaskedLM(config)
    tokens, targets = (torch.randint(2048, (BATCH, LENGTH)) for _ in range(2))
    x = torch.randn(BATCH, LENGTH, 512)

    def layer(each: nn.Module, hidden: Tensor) -> Tensor:
        out = each(hidden)
        return out[0] if isinstance(out, tuple) else out

    def head(each: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(each(hidden).flatten(0, 1), labels.flatten())

    def whole(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        x = model.bert.embeddings(tokens)
        for each in model.bert.encoder.layer:
            x = layer(each, x)
        return head(model.cls, x, labels)

    blocks = [
        Part(Step(layer, each), (x,), ((index, 0),), 1 if index else None)
        for index, each in enumerate(bert.bert.encoder.layer)
    ]
    parts = [Part(Step(lambda each, tokens: each(tokens), bert.bert.embeddings), (tokens,), (None,)), *blocks]
    parts.append(Part(Step(head, bert.cls), (x, targets), ((len(blocks), 0), None)))
    return Step(whole, bert), (tokens, targets), parts


def _unet() -> tuple[nn.Module, tuple[Tensor, ...], list[Part]]:
    """Levels down, levels up with what comes across, the head."""
    model = UNet(width=32, levels=4)
    images, labels = torch.randn(2, 3, 256, 256), torch.randint(2, (2, 256, 256))
    parts: list[Part] = []
    x = images
    for level, down in enumerate(model.down):
        run = (lambda pool, each, x: each(pool(x))) if level else (lambda pool, each, x: each(x))
        parts.append(Part(Step(run, model.pool, down), (x,), ((level - 1, 0) if level else None,)))
        x = torch.randn(2, 32 << level, 256 >> level, 256 >> level)
    lowest = len(parts) - 1
    for number, (up, merge) in enumerate(zip(model.up, model.merge, strict=True)):
        level = lowest - 1 - number
        across = torch.randn(2, 32 << level, 256 >> level, 256 >> level)
        first = model.dropout if number == 0 else nn.Identity()
        run = lambda first, up, merge, x, across: merge(torch.cat([across, up(first(x))], 1))  # noqa: E731
        parts.append(Part(Step(run, first, up, merge), (x, across), ((len(parts) - 1, 0), (level, 0))))
        x = across

    def head(each: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(each(x), labels)

    parts.append(Part(Step(head, model.head), (x, labels), ((len(parts) - 1, 0), None)))
    return model, (images, labels), parts


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...], list[Part]]]] = {
    "gpt, 14 pieces": _gpt,
    "llama, 10 pieces": _llama,
    "bert, 10 pieces": _bert,
    "unet, 10 pieces": _unet,
}
CASES = tuple(MODELS)
QUICK = CASES[:1]


def rows(name: str, quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    model, inputs, parts = MODELS[name]()
    whole, _ = _captured(model, inputs, ())
    stitched = _stitched(name, parts)
    peak = simulate(whole, unplanned_schedule(whole)).above_bytes
    took: list[tuple[float, float]] = []
    for share in SHARES[:2] if quick else SHARES:
        budget = int(share * peak)
        one, several = plan_with("auto", whole, budget), _in_pieces(stitched, budget)
        took.append((one.cpu_seconds, several.cpu_seconds))
        columns: dict[str, object] = {
            "case": name,
            "budget": f"{share:.0%} of the peak",
            "ops": len(whole.ops),
            "stitched_ops": len(stitched.program.ops),
            "one_graph_percent": None if one.overhead is None else 100 * one.overhead,
            "one_graph_bound_percent": 100 * (one.answer.bound or 0.0),
            "asked": several.asked,
        }
        if several.schedule is None:
            yield Row("stitched", columns, (holds("a plan where one graph has one", one.overhead is None),))
            continue
        timeline = simulate(stitched.program, several.schedule)
        overhead = 100 * (timeline.seconds / whole.seconds - 1)
        columns |= {
            "stitched_percent": overhead,
            "stitched_bound_percent": 100 * ((1 + several.bound) * stitched.program.seconds / whole.seconds - 1),
            "of_budget": timeline.above_bytes / budget,
        }
        cut = stitched.cut(several.schedule)
        legal = all(not check(each.piece.program, own) for each, own in zip(stitched.occurrences, cut, strict=True))
        checks = [
            holds("each piece's schedule is legal", legal),
            at_most("of budget", timeline.above_bytes / budget, 1),
        ]
        if one.overhead is not None:
            checks.append(at_most("points more", overhead - 100 * one.overhead, MOST_POINTS))
        yield Row("stitched", columns, tuple(checks))
    one_seconds, seconds = (sum(each) for each in zip(*took, strict=True))
    columns = {"case": name, "budget": "all", "one_graph_cpu_seconds": one_seconds, "cpu_seconds": seconds}
    yield Row("stitched", columns, (at_most("times as long", seconds / one_seconds, MOST_TIMES),))


@dataclass(frozen=True)
class InPieces:
    """A plan of the stitched program.

    Attributes:
        schedule: with its reruns at home; ``None`` if none was found.
        bound: of the first answer, as it came.
        asked: how many answers it took.
        cpu_seconds: of all.
    """

    schedule: Schedule | None
    bound: float
    asked: int
    cpu_seconds: float


def _in_pieces(stitched: Stitched, budget: int) -> InPieces:
    found: list[Planned] = []

    def answer(limit: int) -> Schedule | None:
        found.append(plan_with("auto", stitched.program, limit))
        return found[-1].answer.schedule

    begin = time.process_time()
    schedule = schedule_at_home(stitched, budget, answer)
    return InPieces(schedule, found[0].answer.bound or 0.0, len(found), time.process_time() - begin)


def _captured(model: nn.Module, inputs: tuple[Tensor, ...], given: Sequence[int]) -> tuple[Program, Piece]:
    """A module's graph with costs, and as a piece whose inputs at the positions ``given`` are other parts'."""
    machine = machine_named(MACHINE)
    joint, program, _ = capture_program(model, inputs, {}, machine=machine, name=type(model).__name__)
    joint = replace(joint, program=program)
    # Dynamo's order of primals is its own: what is called with is known by its shape and by being no parameter.
    parameters = {tuple(each.shape) for each in (*model.parameters(), *model.buffers())}
    places: list[int] = []
    for position in given:
        shape = tuple(inputs[position].shape)
        assert shape not in parameters
        places += [
            place
            for place, node in enumerate(joint.primals)
            if tuple(node.meta["val"].shape) == shape and place not in places
        ][:1]
    assert len(places) == len(given)
    piece = piece_of(joint, places)
    order = [sorted(places).index(place) for place in places]
    return program, replace(piece, inputs=tuple(piece.inputs[each] for each in order))


def _stitched(name: str, parts: Sequence[Part]) -> Stitched:
    """All parts as occurrences of a step."""
    known: list[Piece] = []
    for part in parts:
        if part.alike is not None:
            known.append(known[part.alike])
            continue
        given = [position for position, source in enumerate(part.sources) if source is not None]
        inputs = tuple(
            each.clone().requires_grad_(_takes_gradient(parts, source)) if each.is_floating_point() else each
            for each, source in zip(part.inputs, part.sources, strict=True)
        )
        known.append(_captured(part.module, inputs, given)[1])
    return stitch(
        name,
        [
            Occurrence(piece, tuple(source for source in part.sources if source is not None))
            for part, piece in zip(parts, known, strict=True)
        ],
    )


def _takes_gradient(parts: Sequence[Part], source: tuple[int, int] | None) -> bool:
    """Whether what an earlier part gives is differentiated: all but a Llama's tables."""
    return source is not None and source[1] == 0
