"""What a caller may ask of planning: one record for every entry point and the command line, checked in one place.

No torch at import: the command line refuses a mistyped option without it.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ebbtide.clipping import Clipping, clipping_of
from ebbtide.errors import UsageError
from ebbtide.names import did_you_mean
from ebbtide.planners.base import DEFAULT_EFFORT, Interrupt, Progress, require_planner, require_tiers, silent
from ebbtide.planners.narration import aloud
from ebbtide.tiers import parse_tiers

if TYPE_CHECKING:
    import torch

    from ebbtide.case import Case
    from ebbtide.report.plan import Plan
    from ebbtide.step.machine import Machine

    AnyOptimizer = torch.optim.Optimizer | Callable[[torch.nn.Module], torch.optim.Optimizer]

__all__ = [
    "DEFAULT_EFFORT",
    "REWRITES",
    "STEPS",
    "Options",
    "Rewrites",
    "no_optimizer",
    "require_flag",
    "require_gradients",
    "require_text",
]

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
SECOND_PASS = "second-pass"
"""The one that is used whatever is asked for, where updates wait for all gradients."""
STEPS = ("outside", "inside")
_LARGEST_SEED = 2**31 - 1  # CP-SAT takes 31 bits (sat_parameters.proto: int32 random_seed)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to plan for, and how. An instance holds no value that an entry point would have to refuse.

    Raises:
        UsageError: for a value that is none, naming the option and what it takes.
    """

    planner: str = "auto"
    """Name of the planner, and its settings if it takes any: ``"tflms:version=1,n_tensors=40"``."""
    effort: int = DEFAULT_EFFORT
    """Local-search moves, 1 or more; plans are reproducible for one effort and seed."""
    time_limit: float | None = None
    """Seconds after which the best plan so far is taken, with status ``TIME_LIMIT``; ``None`` is no limit."""
    seed: int = 0
    """Of every random choice, from 0 to 2**31 - 1."""
    optimizer: AnyOptimizer | None = None
    """Whose state counts as resident, also what it does not hold yet; or a function that makes it from the model."""
    loss: Callable[[Any], Any] | None = None
    """Applied to what the model returns, as part of the step; ``None`` if the model's own call gives the loss."""
    machine: str | Machine | None = None
    """A machine or the name of one in the catalogue; ``None`` is the device at hand."""
    gradients: Literal["loss", "all"] | None = None
    """Which outputs take gradients. ``"loss"``, also meant by ``None``: scalars alone where one is returned that
    requires a gradient; ``"all"``: every output."""
    tiers: str | Sequence[str] | None = None
    """Slower memory that buffers may be moved to: ``"host"``, ``"disk"``, ``"disk:PATH"`` or a list of these, the
    preferred one first; ``None`` moves nothing."""
    rewrites: Rewrites | None = None
    """What may take the place of parts of the step. ``"exact"``, also meant by ``None``: what gives the same bits in
    less memory, where the budget asks for it; ``"in-place"``: that, and elementwise ops that write over what dies;
    ``"all"``: both, and feed-forward layers in slices; ``"none"``: nothing."""
    offload_optimizer: bool = False
    """Whether the state of ``optimizer`` is in the first of ``tiers`` while a step runs."""
    step: Literal["outside", "inside"] | None = None
    """Where ``optimizer`` steps. ``"inside"``: in the backward, where each gradient is applied and freed as it comes;
    ``"outside"``, also meant by ``None``: by its own call after the step, which every gradient waits for."""
    max_norm: float | Clipping | None = None
    """To what norm gradients are clipped before the optimizer in the step applies them; ``None`` clips nothing."""
    scaler: torch.amp.GradScaler | None = None
    """That scales losses: updates in the step wait until all gradients are known to be finite."""
    start: Plan | None = None
    """A plan, of any machine, at whose schedule the search starts; it is never run as it is."""
    verify: bool | Literal["always"] = True
    """Whether the first step is proven and a later one measured; ``"always"``: every step is proven."""
    interrupt: Interrupt | None = None
    """Set from elsewhere to end planning with the best plan so far."""
    progress: Callable[[Progress], None] | None = aloud
    """Called with what is known while capturing and planning. The default says so once that has taken two seconds;
    ``None`` says nothing."""

    def __post_init__(self) -> None:
        require_planner(self.planner)
        _check_whole("effort", self.effort, 1, None)
        _check_whole("seed", self.seed, 0, _LARGEST_SEED)
        _check_seconds("time_limit", self.time_limit)
        _check_optimizer(self.optimizer)
        _check_callable("loss", self.loss, "a function of what the model returns")
        _check_machine(self.machine)
        _check_gradients(self.gradients)
        _check_start(self.start)
        self.require_tiers_for(self.planner)
        require_flag("offload_optimizer", self.offload_optimizer)
        self._check_step()
        if self.rewrites is not None and self.rewrites not in REWRITES:
            raise _refusal("rewrites", self.rewrites, *(f'"{each}"' for each in REWRITES))
        if not isinstance(self.verify, bool) and self.verify != "always":  # pyright: ignore[reportUnnecessaryComparison]
            raise _refusal("verify", self.verify, "True", "False", "'always'")
        if not isinstance(self.interrupt, Interrupt | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _refusal("interrupt", self.interrupt, "an ebbtide.planners.Interrupt")
        _check_callable("progress", self.progress, "a function of one argument, such as print")

    def _check_step(self) -> None:
        if self.step is not None and self.step not in STEPS:  # pyright: ignore[reportUnnecessaryContains]
            near = did_you_mean(self.step, STEPS) if isinstance(self.step, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _refusal("step", self.step, '"outside"', '"inside"', near=near)
        if self.inside and self.offload_optimizer:
            raise UsageError(
                'step="inside" and offload_optimizer=True are not accepted together: the state of the optimizer is '
                "needed in the step, wherever a gradient comes; leave one of them out",
                argument="step",
                value=self.step,
            )
        if self.scaler is not None and not self.inside:
            raise UsageError(
                "scaler is not accepted: gradients are unscaled in the step where the optimizer is in it; give "
                'step="inside" and optimizer= besides, or leave the scaler to the loop',
                argument="scaler",
                value=self.scaler,
            )
        if self.clipping is not None and not self.inside:
            raise UsageError(
                f"max_norm={self.max_norm!r} is not accepted: gradients are clipped in the step where the optimizer is "
                'in it; give step="inside" and optimizer= besides, or call torch.nn.utils.clip_grad_norm_ in the loop',
                argument="max_norm",
                value=self.max_norm,
            )

    @property
    def clipping(self) -> Clipping | None:
        """By what gradients are clipped in the step.

        Raises:
            UsageError: for a ``max_norm`` that is none.
        """
        return clipping_of(self.max_norm)

    @property
    def inside(self) -> bool:
        """Whether the optimizer steps in the backward."""
        return self.step == "inside"

    def require_tiers_for(self, planner: str) -> None:
        """Refuse a planner that moves buffers where these options have no tier to move them to.

        Raises:
            UsageError: naming the machine; or for tiers that are none.
        """
        tiers = parse_tiers(self.tiers)
        target = None if self.machine is None else self.target
        name, links = (None, None) if target is None else (target.name, tuple(target.links))
        require_tiers(planner, tiers, name, links)

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
    def may_rewrite(self) -> bool:
        """Whether something may take the place of parts of the step."""
        return self.rewrites != "none"

    @property
    def first_rules(self) -> tuple[str, ...]:
        """The names of the rules that are tried wherever the step does not fit as it is."""
        waits = (SECOND_PASS,) if self.clipping is not None or self.scaler is not None else ()
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
            scaler=case.scaler if self.scaler is None else self.scaler,
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


_FROM_A_MODEL = "lambda model: torch.optim.AdamW(model.parameters())"


def no_optimizer(_: torch.nn.Module) -> Any:
    """Given as ``optimizer``: none, whatever the case says."""
    return None


def require_gradients(value: object) -> None:
    """Refuse ``None`` besides what :class:`Options` refuses, where no case could say what is meant.

    Raises:
        UsageError: saying what ``gradients`` takes.
    """
    if value is None:
        raise _refusal("gradients", value, '"loss"', '"all"')
    _check_gradients(value)


def require_flag(argument: str, value: object) -> None:
    """Refuse what is neither ``True`` nor ``False``.

    Raises:
        UsageError: naming the argument.
    """
    if not isinstance(value, bool):
        raise _refusal(argument, value, "True", "False")


def require_text(argument: str, value: object) -> None:
    """Refuse what is no text.

    Raises:
        UsageError: naming the argument.
    """
    if not isinstance(value, str):
        raise _refusal(argument, value, "a str")


def _refusal(argument: str, value: object, *accepted: str, near: str = "") -> UsageError:
    forms = " or ".join(accepted)
    return UsageError(
        f"{argument}={_shown(value)} is not accepted; {argument} takes {forms}{near}",
        argument=argument,
        value=value,
        accepted=accepted,
    )


def _shown(value: object) -> str:
    """A value as it was typed; of an object with a long text, its type."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"


def _name(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _check_whole(argument: str, value: object, least: int, most: int | None) -> None:
    if (
        type(value) is bool
        or not isinstance(value, Integral)
        or int(value) < least
        or (most or int(value)) < int(value)
    ):
        raise _refusal(argument, value, f"an int from {least}" + (f" to {most}" if most is not None else " on"))


def _check_seconds(argument: str, value: object) -> None:
    if value is None:
        return
    if type(value) is bool or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise _refusal(argument, value, "seconds, 0 or more", "None for no limit")


def _check_callable(argument: str, value: object, what: str) -> None:
    if value is None:
        return
    if inspect.isclass(value):
        raise _refusal(argument, value, what, near=f"; {value.__name__} is a class: make an object of it first")
    if not callable(value):
        raise _refusal(argument, value, what)


def _check_gradients(value: object) -> None:
    if value is None or (isinstance(value, str) and value in GRADIENTS):
        return
    near = did_you_mean(value, GRADIENTS) if isinstance(value, str) else ""
    raise _refusal("gradients", value, '"loss"', '"all"', near=near)


def _check_machine(value: object) -> None:
    from ebbtide.step.machine import Machine, machine_named

    if isinstance(value, str):
        machine_named(value)
    elif value is not None and not isinstance(value, Machine):
        raise _refusal("machine", value, "an ebbtide.Machine", "the name of one in the catalogue, such as a100-80gb")


def _check_start(value: object) -> None:
    if value is None:
        return
    from ebbtide.report.plan import Plan

    if not isinstance(value, Plan):
        near = "; read the file first: ebbtide.Plan.load(path)" if isinstance(value, str | os.PathLike) else ""
        raise _refusal("start", cast("object", value), "an ebbtide.Plan", near=near)


def _is_optimizer(value: object) -> bool:
    import torch

    return isinstance(value, torch.optim.Optimizer)


def _check_optimizer(value: object) -> None:
    if value is None:
        return
    forms = ("a torch.optim.Optimizer", f"a function that makes one from a model ({_FROM_A_MODEL})")
    if inspect.isclass(value):
        near = f"; {value.__name__} is a class: make an object of it, {value.__name__}(model.parameters())"
        raise _refusal("optimizer", value, *forms, near=near)
    if not callable(value) and not _is_optimizer(value):
        raise _refusal("optimizer", value, *forms)
