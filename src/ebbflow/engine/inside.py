"""The optimizer of one model, in its steps: what updates it takes, when it may, and what its own step finds then.

1. A backward of a training call *updates*: each parameter of the optimizer that gets a gradient of the step is stepped
   by it where the plan says so (``inside.updates``), and has none afterwards (``engine.applied``). Calls inside of
   :func:`accumulating` do not, and leave their gradients as ever.
2. Before the first update it is seen that nothing forbids one: a backward that retains its graph, another forward in
   flight, gradients of earlier steps that were not cleared, ``torch.autograd.grad``. Nothing has changed if it raises.
3. Options of the optimizer are what they are when the backward begins. If they are others at ``optimizer.step()``,
   eager would have stepped otherwise, and that raises.
4. A gradient that reaches an updated parameter from elsewhere in the same backward came too late to be added: at
   ``optimizer.step()`` that raises.
5. Where gradients are clipped by their norm, each is looked at when it is made, the norm is settled once all have been,
   and updates come after that. Gradients that are there already are added to first, and those of parameters that the
   step does not reach are in the norm and are scaled in place, as ``clip_grad_norm_`` does.
6. With a gradient scaler each is looked at for elements that are not finite, likewise. If one has some, nothing is
   updated, and the scaler is told so when it asks (``applied``); else each is multiplied by what the scale was when the
   backward began, inverted, before it is clipped and applied.
7. A backward that fails after its first update raises :class:`~ebbflow.errors.UpdateError`, which names what has been
   updated: those steps are made, the others are not.
8. Weights and state of the optimizer that somebody has written to, or put others in the place of, between the backward
   and the end of ``optimizer.step()`` have been used before, and not after as in eager: that raises as well, where
   version counters tell. So does a second ``optimizer.step()`` after one backward: what eager steps by again is gone.
9. Gradients of which no backward has updated anything (all of a round came inside of :func:`accumulating`) are clipped
   when ``optimizer.step()`` begins: nobody else does.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ebbflow.capture.joint import Captured
from ebbflow.clipping import Clipping
from ebbflow.engine.applied import Applied, State
from ebbflow.errors import CaptureError, UpdateError, UsageError
from ebbflow.inside.costs import settings_of
from ebbflow.inside.norms import coefficient_of, total_of
from ebbflow.inside.one_by_one import step_alone
from ebbflow.inside.step import WithOptimizer
from ebbflow.inside.updates import names_of
from ebbflow.measurement.optimizer_state import attributes_of, is_plain
from ebbflow.torch_seams.data_parallel import bucket_bytes
from ebbflow.torch_seams.gradient_norms import norm_of, scale_by
from ebbflow.torch_seams.optimizers import functions_of, gradient_of, has_gradient_hooks, set_gradient, will_accumulate
from ebbflow.torch_seams.scalers import inverse_scale_of, multiply_and_check
from ebbflow.torch_seams.stance import left_out_of_traces
from ebbflow.torch_seams.storages import version_of

__all__ = ["Inside", "Updating"]


class Inside:
    """Definitions 1 to 4, of one fitted model.

    Args:
        optimizer: whose step may be taken for one parameter at a time (``inside.alone``).
        clipping: by what gradients are clipped first.
        scaler: that scales losses, if it does.

    Attributes:
        optimizer: likewise.
        clipping: likewise.
        scaler: likewise; ``None`` if it is not enabled.
        total_norm: of the gradients of the last backward that has settled it, before they were clipped.
        applied: what has been updated and is not cleared.
        has_updated: whether a backward has updated anything, so that the optimizer's state is there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.clipping = clipping
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.total_norm: torch.Tensor | None = None
        self.applied = Applied(functions_of(optimizer), clips=clipping is not None, scales=self.scaler is not None)
        self.has_updated = False
        self._closed = False
        self._put_in: WithOptimizer | None = None
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._options: list[dict[str, Any]] = []
        self._attributes: dict[str, Any] = {}
        self._versions: dict[int, int] = {}
        self._state: dict[int, object] = {}
        self._with_state = {id(each) for each in optimizer.state}
        self._accumulating = threading.local()
        before, after = self._before_step, self._after_step
        why = "Ebbflow looks at what its steps have updated"
        self._hooks = (
            optimizer.register_step_pre_hook(left_out_of_traces(before, why)),
            optimizer.register_step_post_hook(left_out_of_traces(after, why)),
        )

    def close(self) -> None:
        """The model is not fitted any more, or has another optimizer."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self.applied.clear()

    # -- the step -------------------------------------------------------------------------------------------

    def inside(self, captured: Captured) -> Captured:
        """``captured``, looked at, with the updates of definition 1; itself where there are none."""
        assert self._put_in is not None
        return self._put_in(captured)

    def know(self, module: torch.nn.Module) -> None:
        """Whose parameters these are."""
        self._put_in = WithOptimizer(self.optimizer, module, clipping=self.clipping, scaled=self.scaler is not None)
        self._module = weakref.ref(module)

    def looked(self, captured: Captured) -> Captured:
        """``captured`` as it is before any rewrite: with looks at its gradients, where they are clipped."""
        assert self._put_in is not None
        return self._put_in.looked(captured)

    @property
    def settings(self) -> tuple[object, ...]:
        """What of the optimizer's options its updates' bytes depend on, group by group."""
        return tuple(settings_of(group) for group in self.optimizer.param_groups)

    @property
    def updated_and_not_stepped(self) -> set[int]:
        """Ids of the parameters that a backward has updated and of which ``optimizer.step()`` does not know yet."""
        return {id(each) for each in self.applied.parameters} if self.applied.state is State.UPDATED else set()

    def parameters(self) -> list[torch.Tensor]:
        """Of the model, in the order in which it gives them."""
        module = None if self._module is None else self._module()
        return [] if module is None else list(module.parameters())

    # -- a call ---------------------------------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether this thread is inside of :meth:`accumulating`."""
        return bool(getattr(self._accumulating, "depth", 0))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """While open, backwards of calls that this thread makes update nothing."""
        self._accumulating.depth = getattr(self._accumulating, "depth", 0) + 1
        try:
            yield
        finally:
            self._accumulating.depth -= 1

    def refuse_surroundings(self, module: torch.nn.Module, *, checkpointed: bool, hooked: bool) -> None:
        """Refuse a call whose gradients somebody else wants to see.

        Raises:
            CaptureError: naming who.
        """
        self._module = weakref.ref(module)  # also where no call updates, as gradients are clipped then too
        instead = 'fit without step="inside" here, or take that away'
        if checkpointed:
            raise CaptureError(
                'the optimizer is in the step (step="inside"), and this call is inside of a checkpoint or saved-tensor '
                "hooks of somebody else's, under which a backward cannot be told from another",
                remedy=instead,
            )
        if hooked:
            own = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
            name = next((n for n, p in module.named_parameters() if id(p) in own and has_gradient_hooks(p)), "")
            if name:
                raise CaptureError(
                    f'{name} has a hook for its gradient, which step="inside" applies where it is made, without one',
                    remedy=instead,
                )
        if bucket_bytes(module):
            raise CaptureError(
                "the model is inside of a DistributedDataParallel, which averages gradients over processes before they "
                'are applied, and step="inside" applies them before',
                remedy=instead,
            )

    def refuse_to_begin(self) -> None:
        """Refuse a backward to whose gradients eager would add (``applied``, definition 4).

        Raises:
            UsageError: saying what is to be called. This backward has changed nothing.
        """
        if self._closed:
            raise UsageError(
                "a backward begins whose forward ran with another optimizer in the step: set_optimizer or unfit was "
                "called since. Nothing has been updated; run the forward again"
            )
        if self.applied.state is State.UPDATED:
            raise UsageError(
                "a backward begins, and optimizer.step() has not been called since the last one, which has updated the "
                'weights (step="inside"): eager would add the gradients of both and step once. Call optimizer.step() '
                "and zero_grad() after each; to accumulate, run all forwards and backwards but the last in "
                "ebbflow.no_update(model)"
            )
        if self.applied.state is State.STEPPED:
            raise UsageError(
                f"a backward begins, and the gradients of the last step ({names_of(self.applied.names)}) have not been "
                'cleared: eager would add to them, and step="inside" has applied and freed them. Call '
                "optimizer.zero_grad() or model.zero_grad() before it"
            )

    # -- optimizer.step() -----------------------------------------------------------------------------------

    def snapshot_options(self) -> None:
        """Definition 3."""
        self._options = [_options(group) for group in self.optimizer.param_groups]
        self._attributes = attributes_of(self.optimizer)
        self._with_state = {id(each) for each in self.optimizer.state}

    def order_new_state(self) -> None:
        """State that has come as gradients came goes behind the rest, in the order in which ``step()`` makes it."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state and id(parameter) not in self._with_state:
                    state[parameter] = state.pop(parameter)

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Definitions 3, 4, 6, 8 and 9; returns what is called in place of a closure, whose gradients are to come."""
        again = None
        if self.applied.state is State.CLEARED and self.clipping is not None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                self._clip(self.clipping)
            else:
                again = args[:1], {**kwargs, "closure": functools.partial(self._clipped, closure, self.clipping)}
        self._allow_step()
        return again

    def _clipped(self, closure: Callable[[], Any], clipping: Clipping) -> Any:
        """What ``closure`` gives; its gradients are clipped where its backward has updated nothing."""
        result = closure()
        if self.applied.state is State.CLEARED:
            self._clip(clipping)
        return result

    def _allow_step(self) -> None:
        self.applied.stepping = True
        if self.applied.state is not State.UPDATED:
            return
        try:
            if self.applied.found:
                raise UsageError(
                    "gradients of this step are not finite, and nothing has been updated: scaler.step(optimizer) "
                    "leaves the step out, where optimizer.step() would make it",
                )
            self._refuse_late_gradients()
            self._refuse_other_options()
            self._refuse_other_weights()
            self._refuse_other_state()
        except BaseException:
            self.applied.stepping = False
            raise
        self.applied.state = State.STEPPED

    def _after_step(self, *_: object) -> None:
        self.applied.stepping = False
        if self.applied.state is not State.CLEARED:
            self.order_new_state()  # gradients that came inside of :func:`accumulating` are stepped by now
        self._with_state = {id(each) for each in self.optimizer.state}
        if self.applied.state is State.STEPPED:
            self._refuse_other_weights()  # written by a hook that came after ours
            if self.applied.stepped_round == self.applied.rounds:
                raise UsageError(
                    "optimizer.step() was called again after one backward: eager steps by the same gradients again, "
                    'and step="inside" has applied and freed them. This call has changed nothing; run another backward '
                    'before it, or leave step="inside" out'
                )
            self.applied.stepped_round = self.applied.rounds
        if self.applied.state is State.UPDATED:  # its closure has called the backward
            self._refuse_late_gradients()
            self.applied.state = State.STEPPED
            self.applied.stepped_round = self.applied.rounds

    def _clip(self, clipping: Clipping) -> None:
        """Definition 9."""
        parameters = self.parameters()
        if any(gradient_of(each) is not None for each in parameters):
            self.total_norm = torch.nn.utils.clip_grad_norm_(
                parameters,
                clipping.max_norm,
                norm_type=clipping.norm_type,
                error_if_nonfinite=clipping.error_if_nonfinite,
                foreach=clipping.foreach,
            )

    def _refuse_late_gradients(self) -> None:
        """Definition 4."""
        pairs = zip(self.applied.names, self.applied.parameters, strict=True)
        late = [name for name, each in pairs if gradient_of(each) is not None]
        if late:
            raise UpdateError(
                f"{names_of(late)} got gradients from outside of the planned step too (a penalty on weights, another "
                "model that shares them), after the step had applied its own: eager adds the two and steps once. "
                'Move what makes them into the model\'s forward, or leave step="inside" out. All of the updates of '
                "the step's own gradients have been made",
                updated=self.applied.names,
            )

    def note_weights(self) -> None:
        """The backward has ended: nobody is to write to what it has updated before ``optimizer.step()``."""
        self._versions = {id(each): version_of(each) for each in self.applied.parameters}
        self._state = {id(each): self._state_of(each) for each in self.applied.parameters}

    def _state_of(self, parameter: torch.Tensor) -> object:
        """Who asks for state that there is none of makes it empty."""
        return _value(self.optimizer.state.get(parameter) or {})

    def _refuse_other_state(self) -> None:
        """Definition 8."""
        pairs = zip(self.applied.names, self.applied.parameters, strict=True)
        known = self._state
        written = [name for name, each in pairs if id(each) in known and known[id(each)] != self._state_of(each)]
        if written:
            raise UpdateError(
                f"the optimizer's state of {names_of(written)} changed between loss.backward() and optimizer.step(), "
                'and step="inside" has updated by it in the backward: eager changes first and updates then. Change '
                "state (load_state_dict, state.clear()) before the forward or after optimizer.step()",
                updated=self.applied.names,
            )

    def _refuse_other_weights(self) -> None:
        """Definition 8."""
        pairs = zip(self.applied.names, self.applied.parameters, strict=True)
        written = [name for name, each in pairs if self._versions.get(id(each), version_of(each)) != version_of(each)]
        if written:
            self._versions = {}
            raise UpdateError(
                f"{names_of(written)} were written to between loss.backward() and the end of optimizer.step(), and "
                'step="inside" has updated them in the backward: eager writes first and updates what was written. '
                "Write to weights (decay, clamping, load_state_dict) before the forward or after optimizer.step()",
                updated=self.applied.names,
            )

    def _refuse_other_options(self) -> None:
        now, attributes = [_options(group) for group in self.optimizer.param_groups], attributes_of(self.optimizer)
        if now == self._options and attributes == self._attributes:
            return
        pairs = [*zip(self._options, now, strict=False), (self._attributes, attributes)]
        changed = sorted({key for a, b in pairs for key in {*a, *b} if a.get(key) != b.get(key)}) or ["groups"]
        raise UpdateError(
            f"{', '.join(changed)} of the optimizer changed between loss.backward() and optimizer.step(), and "
            'step="inside" has applied the gradients in the backward, with what was set before. Change options before '
            "loss.backward(), or after optimizer.step() as schedulers do",
            updated=self.applied.names,
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group as they are now; of a tensor which one and how often it was written to."""
    return {key: _value(value) for key, value in group.items() if key != "params"} | {
        "params": [id(each) for each in group["params"]]
    }


def _value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, Mapping):
        return {key: _value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_value, value))
    return value if is_plain(value) else id(value)


class Updating:
    """The updates of one flight; the :class:`~ebbflow.inside.current.Updater` of its backward.

    Args:
        inside: of its model.
        parameters: by position among the primals, with their names.
        entries: per position, its place among the tensors that go into the step's node.
    """

    def __init__(
        self, inside: Inside, parameters: Mapping[int, tuple[torch.Tensor, str]], entries: Mapping[int, int]
    ) -> None:
        self._inside = inside
        self._trained = dict(parameters)
        self._entries = entries
        self._groups: dict[int, dict[str, Any]] = {}
        self._left_out: set[int] = set()
        self._updated: list[tuple[torch.Tensor, str]] = []
        self._coefficient: torch.Tensor | None = None
        self._skipped: list[tuple[torch.Tensor, str]] = []
        self._found: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        self._skips = False

    def begin(self, node: Any, unused: frozenset[int]) -> None:
        """Its backward begins: definitions 2 and 3.

        Args:
            node: of the step.
            unused: positions whose gradients are none, for nothing that was used depends on them.
        """
        optimizer = self._inside.optimizer
        self._groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
        self._inside.snapshot_options()
        self._updated = []
        self._coefficient = None
        self._begin_scaled()
        self._left_out = set(unused)
        for position, (parameter, name) in self._trained.items():
            if id(parameter) not in self._groups or not parameter.requires_grad:
                raise UsageError(
                    f"{name} was trained by the optimizer when its step was planned, and is not any more; tell of "
                    "another optimizer (ebbflow.set_optimizer), and freeze parameters before the forward"
                )
            if position in self._left_out:
                continue
            wanted = will_accumulate(node, self._entries[position])
            if wanted is None:
                raise CaptureError(
                    'torch.autograd.grad was called on what a fitted model has computed, and step="inside" applies '
                    "gradients in a backward and hands none out. Nothing has been updated",
                    remedy='call loss.backward(), or leave step="inside" out',
                )
            if not wanted:
                self._left_out.add(position)

    def _begin_scaled(self) -> None:
        """Definition 6."""
        self._skipped, self._skips, self._inverse = [], False, None
        if (scaler := self._inside.scaler) is not None:
            self._inverse = inverse_scale_of(scaler)
            if self._inverse is None:
                raise UsageError(
                    "the model was fitted with a scaler, which has not scaled this loss: scaler.scale(loss).backward()"
                )
            self._found = torch.zeros_like(self._inverse)

    def _seen(self, gradient: torch.Tensor) -> torch.Tensor:
        """One number that is known of ``gradient``, which stays as it is: its norm, once it is unscaled."""
        clipping = self._inside.clipping
        if self._inverse is not None and self._found is not None:
            if gradient.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # as the scaler says it
            if clipping is None:
                multiply_and_check(gradient, self._found, torch.ones_like(self._inverse))
                return gradient.new_zeros(())
            gradient = gradient.clone()
            multiply_and_check(gradient, self._found, self._inverse)
        assert clipping is not None
        return norm_of(gradient, clipping.norm_type, clipping.foreach)

    def look(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """What is known of the gradient that the parameter at ``position`` has with this one (definitions 5 and 6)."""
        if position in self._left_out:
            return gradient.new_zeros(())
        with torch.no_grad():
            if (existing := gradient_of(self._trained[position][0])) is not None:
                existing += gradient
                gradient = existing
            return self._seen(gradient)

    def settle(self, looks: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What gradients are scaled by, of all that parameters have (definitions 5 and 6)."""
        clipping = self._inside.clipping
        made = {id(self._trained[i][0]): look for i, look in looks.items() if i not in self._left_out}
        norms: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in self._inside.parameters():
                if (norm := made.get(id(parameter))) is not None:
                    norms.append(norm)
                elif (gradient := gradient_of(parameter)) is not None:
                    norms.append(self._seen(gradient))
                    others.append(gradient)
            if self._found is not None and self._inverse is not None:
                self._skips = bool(self._found.item())
            if clipping is None:
                return next(iter(looks.values()))
            if others and self._inverse is not None:
                raise UsageError(
                    "a parameter has a gradient that this step does not add to, and the scaler unscales it after the "
                    "step has clipped: clear gradients before such a step, or leave max_norm out"
                )
            total = total_of(norms, clipping)
            self._inside.total_norm = total
            self._coefficient = coefficient_of(total, clipping)
            for gradient in others:
                scale_by(gradient, self._coefficient, clipping.foreach)
        return self._coefficient

    def update(self, position: int, gradient: torch.Tensor) -> None:
        """Step the parameter at ``position`` by ``gradient``."""
        if position in self._left_out:
            return
        parameter, name = self._trained[position]
        if self._skips:
            self._skipped.append((parameter, name))
            set_gradient(parameter, None)
            return
        clipping = self._inside.clipping
        if clipping is not None or self._inverse is not None:
            gradient = gradient if (existing := gradient_of(parameter)) is None else existing
            with torch.no_grad():
                if self._inverse is not None and self._found is not None:
                    multiply_and_check(gradient, self._found, self._inverse)
                if clipping is not None and self._coefficient is not None:
                    scale_by(gradient, self._coefficient, clipping.foreach)
        # In the list first: an update that is interrupted may have been made in part.
        self._updated.append((parameter, name))
        step_alone(self._inside.optimizer, self._groups[id(parameter)], parameter, gradient)

    def end(self) -> None:
        """Its backward has returned, or failed."""
        self._inside.applied.found = self._skips
        if self._skipped:
            self._inside.applied.add(self._skipped)
        if self._updated:
            self._inside.order_new_state()
            self._inside.has_updated = True
            self._inside.applied.add(self._updated)
        self._inside.note_weights()

    def failed(self, error: BaseException) -> BaseException:
        """What to raise in place of ``error`` (definition 7)."""
        if not self._updated:
            return error
        names = [name for _, name in self._updated]
        said = (
            f"the backward failed after it had updated {names_of(names)} ({len(names)} of {len(self._trained)} "
            f"parameters; .updated has all names): {type(error).__name__}: {error}. The others are as they were. Load "
            "a checkpoint, or go on: optimizer.step() and zero_grad() end this step as it is"
        )
        if not isinstance(error, Exception):
            error.add_note(said)
            return error
        return UpdateError(said, updated=names)
