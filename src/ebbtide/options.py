"""What a caller may ask of planning: one record for every function, trainer and command.

Each field stands here with its type, its check and its text; the texts of the command line and of the API's page are
these (:func:`texts`). No torch at import: the command line refuses a mistyped option without it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ebbtide.checks import flag, function, one_of, refusal, seconds, whole
from ebbtide.errors import UsageError
from ebbtide.names import with_known_keywords
from ebbtide.planners.base import DEFAULT_EFFORT, Interrupt, Progress, silent
from ebbtide.planners.narration import aloud
from ebbtide.planners.registry import require_planner, require_tiers
from ebbtide.tiers import parse_tiers

if TYPE_CHECKING:
    import torch

    from ebbtide.case import Case
    from ebbtide.report.plan import Plan
    from ebbtide.step.machine import Machine

    AnyOptimizer = torch.optim.Optimizer | Callable[[torch.nn.Module], torch.optim.Optimizer]

__all__ = ["DEFAULT_EFFORT", "REWRITES", "STEPS", "Options", "Rewrites", "no_optimizer", "texts"]

GRADIENTS = ("loss", "all")
Rewrites = Literal["exact", "in-place", "all", "none"]
"""What may take the place of parts of a step (:attr:`Options.rewrites`)."""
REWRITES: tuple[Rewrites, ...] = get_args(Rewrites)
_RULES: dict[Rewrites, tuple[str, ...]] = {
    "exact": ("linear-cross-entropy",),
    "in-place": ("linear-cross-entropy", "in-place"),
    "all": ("linear-cross-entropy", "feed-forward", "attention", "in-place"),
    "none": (),
}
"""Of ``rewrites``, by their names (``rewrites.choices``): those that are tried first."""
_FURTHER: tuple[str, ...] = ("feed-forward", "attention", "in-place")
_WITH_FURTHER: tuple[Rewrites, ...] = ("exact",)
"""Those of ``rewrites`` with which these are tried where the first ones give no plan, or a dear one."""
GRADIENT_RECOMPUTE = "gradient-recompute"
"""The one that is used whatever is asked for, where updates wait for all gradients."""
STEPS = ("outside", "inside")
_LARGEST_SEED = 2**31 - 1  # CP-SAT takes 31 bits (sat_parameters.proto: int32 random_seed)
_FROM_A_MODEL = "lambda model: torch.optim.AdamW(model.parameters())"


# -- checks of single fields that no other record has ------------------------------------------------------------


def _planner(_: str, value: object) -> None:
    require_planner(value)


def _optimizer(argument: str, value: object) -> None:
    if value is None:
        return
    forms = ("a torch.optim.Optimizer", f"a function that makes one from a model ({_FROM_A_MODEL})")
    if inspect.isclass(value):
        near = f"; {value.__name__} is a class: make an object of it, {value.__name__}(model.parameters())"
        raise refusal(argument, value, *forms, near=near)
    if not callable(value) and not _is_optimizer(value):
        raise refusal(argument, value, *forms)


def _is_optimizer(value: object) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)


def _machine(argument: str, value: object) -> None:
    from ebbtide.step.machine import Machine, machine_named

    if isinstance(value, str):
        machine_named(value)
    elif value is not None and not isinstance(value, Machine):
        raise refusal(argument, value, "an ebbtide.Machine", "the name of one in the catalogue, such as a100-80gb")


def _tiers(_: str, value: object) -> None:
    parse_tiers(value)


def _max_norm(argument: str, value: object) -> None:
    is_norm = isinstance(value, float | int) and not isinstance(value, bool) and value >= 0
    if value is not None and not is_norm:
        raise refusal(argument, value, "a number, 0 or more", "None, which clips nothing")


def _start(argument: str, value: object) -> None:
    if value is None:
        return
    from ebbtide.report.plan import Plan

    if not isinstance(value, Plan):
        near = "; read the file first: ebbtide.Plan.load(path)" if isinstance(value, str | os.PathLike) else ""
        raise refusal(argument, cast("object", value), "an ebbtide.Plan", near=near)


def _interrupt(argument: str, value: object) -> None:
    if not isinstance(value, Interrupt | None):
        raise refusal(argument, value, "an ebbtide.planners.Interrupt")


_loss = function("a function of what the model returns")
_progress = function("a function of one argument, such as print")

# -- the record --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to plan for, and how: ``options=ebbtide.Options(...)`` of every function that plans.

    A function that takes one of these by name as well takes it in one of the two places. What one field needs of
    another, as ``max_norm`` needs ``step="inside"``, is asked for where the options are used.

    Raises:
        UsageError: for a value that is none, naming the option and what it takes.
    """

    planner: str = field(default="auto", metadata={"check": _planner})
    """Name of the planner, with its settings if it takes any: ``"tflms:version=1,n_tensors=40"``."""
    effort: int = field(default=DEFAULT_EFFORT, metadata={"check": whole(1)})
    """Local-search moves per plan, 1 or more.

    The default is about a second on a 600-op program. Plans are reproducible for one effort and seed."""
    time_limit: float | None = field(default=None, metadata={"check": seconds})
    """Seconds per plan; the best so far is kept, if need be after a search for one.

    Its status is ``TIME_LIMIT`` then. ``None`` is no limit."""
    seed: int = field(default=0, metadata={"check": whole(0, _LARGEST_SEED)})
    """Of every random choice, from 0 to 2**31 - 1."""
    optimizer: AnyOptimizer | None = field(default=None, metadata={"check": _optimizer})
    """Whose state counts as resident, also before its first step makes it.

    The ``torch.optim.Optimizer`` that trains the model; where nothing runs, a function that makes one from the model
    will do. The state of one that is not given counts from its first step on."""
    tiers: str | Sequence[str] | None = field(default=None, metadata={"check": _tiers})
    """Slower memory that tensors may be moved to and fetched from: ``host``, ``disk``, ``disk:PATH``, or several.

    ``"host"`` for a model on a CUDA device, ``"disk"``, a directory below your cache directory, ``"disk:PATH"``, or a
    list of these, the preferred one first. Links to a machine's tiers are in the catalogue, those here are measured.
    ``None``: what does not fit is recomputed; a plan that is given brings its own."""
    step: Literal["outside", "inside"] | None = field(default=None, metadata={"check": one_of(*STEPS, None)})
    """Where the optimizer steps: ``outside``, after the backward, or ``inside`` of it, gradient by gradient.

    ``"outside"``, also meant by ``None``: by its own call, which every gradient waits for. ``"inside"``: in the
    backward, where each gradient is applied and freed as it comes; ``optimizer.step()`` stays where it is in the loop
    and does nothing more. With the same bits, for optimizers that step on each parameter for itself (all of torch's
    but LBFGS; others are tried out)."""
    max_norm: float | None = field(default=None, metadata={"check": _max_norm})
    """With the optimizer inside of the step: to what norm gradients are clipped before they are applied.

    As ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`` does between backward and step, which is taken
    out of the loop; :func:`ebbtide.total_norm` gives what it returns. ``None`` clips nothing."""
    offload_optimizer: bool = field(default=False, metadata={"check": flag})
    """With an optimizer and tiers: its state is in the first tier while a step runs.

    It is moved there before every training call, and back for ``optimizer.step()`` and ``state_dict()``; other reads
    are refused. It is not resident in the step then; the budget also holds at ``optimizer.step()``, with what that
    takes."""
    loss: Callable[[Any], Any] | None = field(default=None, metadata={"check": _loss})
    """Applied to what the model returns, as part of the step.

    For a model whose training call returns no loss. Such a plan tells what the step takes; to run it, put the loss
    into the model's forward. ``None``: the model's own call gives the loss."""
    gradients: Literal["loss", "all"] | None = field(default=None, metadata={"check": one_of(*GRADIENTS, None)})
    """Which outputs take gradients: ``loss`` or ``all``.

    ``"loss"``, also meant by ``None``: if a scalar that requires one is returned, scalars alone (a gradient that
    arrives at another output raises). ``"all"``: every output, counted whether used or not."""
    machine: str | Machine | None = field(default=None, metadata={"check": _machine})
    """A machine of the catalogue, e.g. ``a100-80gb``: costs are estimated.

    A :class:`Machine` or the name of one; costs are then estimated by roofline, and the plan says so. ``None`` is the
    device at hand, on which costs are measured."""
    rewrites: Rewrites | None = field(default=None, metadata={"check": one_of(*REWRITES, None)})
    """What may replace parts of the step: ``exact``, ``in-place`` or ``all`` (all with the same bits), or ``none``.

    ``"exact"``, also meant by ``None``: where the budget asks for it, a linear layer and the cross-entropy of what it
    gives are computed in slices, with the same bits, so that the logits never exist whole. Where that gives no plan, or
    one that takes half a step more, so are feed-forward layers and attention by products and a softmax, and results of
    elementwise ops go where an operand was that nobody else reads. Whether slices have the bits of the whole is
    measured first; for a machine that is not at hand it is assumed, and listed. ``"all"``: all of this wherever the
    step does not fit as it is. ``"in-place"``: there the loss and the results of elementwise ops alone.
    ``"none"``: the step is planned as it was captured."""
    start: Plan | None = field(default=None, metadata={"check": _start})
    """A plan of the same model, of any machine, from whose schedule the search starts too.

    The step is captured and priced here; the plan is never run as it is."""
    verify: bool | Literal["always"] = field(default=True, metadata={"check": one_of(True, False, "always")})
    """Whether the first step is proven and the next one measured.

    Proven: every buffer that comes back has the bits it had. ``"always"``: every step is, against memory that somebody
    rewrites behind torch's back; on CPU that reads every buffer that comes back once more. Ahead of time it says for
    which of these a plan has room."""
    on_violation: Literal["replan", "raise"] = field(default="replan", metadata={"check": one_of("replan", "raise")})
    """What follows where a step takes more than its budget: ``replan`` or ``raise``.

    ``"replan"``: a warning says once what grew, and the next step is planned with room for it; a budget that has none
    is refused with the least one that would do. ``"raise"``: :class:`ebbtide.errors.BudgetExceeded` when the backward
    of that step has returned. On a CUDA device every step is judged by the allocator's peak; on CPU, where a record
    costs as much as a small step, steps 1, 2, 4, 8, ... and every hundredth of each shape are."""
    pieces: Literal["none", "auto"] = field(default="none", metadata={"check": one_of("none", "auto")})
    """What follows where a training call is not one graph: ``none`` or ``auto``.

    ``"none"``: it is refused, with the line that breaks its graph. ``"auto"``: the parts that are graphs are planned
    together, under one budget for the whole step, and what lies between them runs as in eager. The first two
    steps keep as little as they can for their backward, since nothing is known of them before; their peak may be above
    a budget that is a share, and one in bytes refuses what cannot be within it."""
    refine: bool = field(default=True, metadata={"check": flag})
    """Whether :func:`fit` begins with a plan that is found quickly, and looks for a better one beside training.

    With planner ``"auto"``. A process of the lowest priority searches, and what it finds takes the place of the first
    plan between two steps, with the same bits. ``False``: the first step waits for the full search, as plans that are
    made ahead of time do, and those of several ranks."""
    interrupt: Interrupt | None = field(default=None, metadata={"check": _interrupt})
    """Set from elsewhere to end planning with the best plan so far."""
    progress: Callable[[Progress], None] | None = field(default=aloud, metadata={"check": _progress})
    """Called with what is known while capturing and planning; ``print`` will do.

    By default one line is logged after two seconds, or a bar moves on a terminal; ``None`` says nothing."""

    def __post_init__(self) -> None:
        for each in fields(self):
            each.metadata["check"](each.name, getattr(self, each.name))
        if self.inside and self.offload_optimizer:
            raise UsageError(
                'step="inside" and offload_optimizer=True are not accepted together: the state of the optimizer is '
                "needed in the step, wherever a gradient comes; leave one of them out",
                argument="step",
                value=self.step,
            )

    def set_fields(self) -> dict[str, object]:
        """The fields that are not as they are by default, by name."""
        plain = Options()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {each: value for each, value in values.items() if not _same(value, getattr(plain, each))}

    def require_complete(self) -> None:
        """Refuse a field that needs another one which nobody has given, here or in a case.

        Raises:
            UsageError: naming both.
        """
        self.require_tiers_for(self.planner)
        if self.max_norm is not None and not self.inside:
            raise UsageError(
                f"max_norm={self.max_norm!r} is not accepted: gradients are clipped in the step where the optimizer is "
                'in it; give step="inside" and optimizer= besides, or call torch.nn.utils.clip_grad_norm_ in the loop',
                argument="max_norm",
                value=self.max_norm,
            )

    def require_tiers_for(self, planner: str) -> None:
        """Refuse a planner that moves buffers where these options have no tier to move them to.

        Raises:
            UsageError: naming the machine.
        """
        target = None if self.machine is None else self.target
        name, links = (None, None) if target is None else (target.name, tuple(target.links))
        require_tiers(planner, parse_tiers(self.tiers), name, links)

    @property
    def inside(self) -> bool:
        """Whether the optimizer steps in the backward."""
        return self.step == "inside"

    @property
    def tell(self) -> Callable[[Progress], None]:
        """Who is told what is known while capturing and planning."""
        return self.progress or silent

    @property
    def target(self) -> Machine | None:
        """The machine planned for; ``None`` is the device at hand."""
        from ebbtide.step.machine import machine_named

        return machine_named(self.machine) if isinstance(self.machine, str) else self.machine

    @property
    def first_rules(self) -> tuple[str, ...]:
        """The names of the rules that are tried wherever the step does not fit as it is."""
        waits = (GRADIENT_RECOMPUTE,) if self.max_norm is not None else ()
        return (*_RULES[self.rewrites or "exact"], *waits)

    @property
    def rewrite_rules(self) -> tuple[str, ...]:
        """The names of all rules by which parts of the step may be replaced."""
        further = _FURTHER if (self.rewrites or "exact") in _WITH_FURTHER else ()
        return (*self.first_rules, *further)

    @property
    def every_output(self) -> bool:
        """Whether outputs beside a scalar loss take gradients too."""
        return self.gradients == "all"

    def for_case(self, case: Case) -> Options:
        """These options with what ``case`` says of its step, where they leave it open."""
        return replace(
            self,
            optimizer=case.optimizer if self.optimizer is None else self.optimizer,
            loss=case.loss if self.loss is None else self.loss,
            gradients=case.gradients if self.gradients is None else self.gradients,
            step=case.step if self.step is None else self.step,
            max_norm=case.max_norm if self.max_norm is None else self.max_norm,
        )

    def optimizer_of(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer of ``model``, made now if a function makes it.

        Raises:
            UsageError: if that function returns something else.
        """
        if self.optimizer is None or _is_optimizer(self.optimizer):
            return self.optimizer  # type: ignore[return-value]
        if self.optimizer is no_optimizer:
            return None
        assert callable(self.optimizer)
        try:
            made = self.optimizer(model)
        except TypeError as error:  # torch's, of a function that was written for parameters
            error.add_note(f"optimizer={_name(self.optimizer)} was called with the model; write {_FROM_A_MODEL}")
            raise
        if not _is_optimizer(made):
            raise UsageError(
                f"optimizer={_name(self.optimizer)} returned {type(made).__name__} for the model; "
                "return a torch.optim.Optimizer",
                argument="optimizer",
                value=made,
            )
        return made


def no_optimizer(_: torch.nn.Module) -> Any:
    """Given as ``optimizer``: none, whatever the case says."""
    return None


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


@functools.cache
def texts() -> dict[str, str]:
    """What stands below each field of :class:`Options`, by name: a sentence, and paragraphs that say more."""
    file = ast.parse(Path(__file__).read_text(encoding="utf-8"))  # Python keeps no text of a field
    (record,) = (each for each in file.body if isinstance(each, ast.ClassDef) and each.name == "Options")
    return {
        each.target.id: inspect.cleandoc(text.value.value)
        for each, text in pairwise(record.body)
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and value == default)


Options.__init__ = with_known_keywords(Options.__init__, name="Options")
