"""The optimizer of one model, in its steps: what updates it takes, when it may, and what its own step finds then.

1. A backward of a training call *updates*: each parameter of the optimizer that gets a gradient of the step is stepped
   by it where the plan says so (``in_step.updates``, ``in_step.backward_updates``), and has none afterwards
   (``in_step.gradient_guard``). Calls inside of :func:`accumulating` do not, and leave their gradients as ever.
2. Before the first update it is seen that nothing forbids one: a backward that retains its graph, another forward in
   flight, gradients of earlier steps that were not cleared, ``torch.autograd.grad``. Nothing has changed if it raises.
3. What updates have used is to be the same when ``optimizer.step()`` ends (``in_step.update_audit``); where it is not,
   eager would have stepped otherwise, and that raises.
4. A gradient that reaches an updated parameter from elsewhere in the same backward came too late to be added: at
   ``optimizer.step()`` that raises. So does a second ``optimizer.step()`` after one backward: what eager steps by again
   is gone.
5. Gradients of which no backward has updated anything (all of a round came inside of :func:`accumulating`) are clipped
   when ``optimizer.step()`` begins, or when its closure has made them: nobody else does.
6. They are stepped one parameter after the other, as in a backward, so that no more is taken than plans count for one
   (``cost.step_end``): in the place of a closure, when all hooks before the step have run, of which one may raise to
   leave the step out. The step itself finds no gradients, and whoever looks afterwards finds them again. An optimizer
   that is not torch's may do anything with a closure: it has its parameters stepped by our hook, if that is the last.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.capture.joint import Captured
from ebbtide.errors import CaptureError, UpdateError, UsageError
from ebbtide.optimizer.in_step.coupling import refuse_coupled_steps
from ebbtide.optimizer.in_step.gradient_guard import GradientGuard, GuardState
from ebbtide.optimizer.in_step.insertion import UpdateInsertion
from ebbtide.optimizer.in_step.scaled_losses import ScaledLosses
from ebbtide.optimizer.in_step.single_parameter import step_parameter
from ebbtide.optimizer.in_step.update_audit import UpdateAudit
from ebbtide.optimizer.in_step.updates import names_of
from ebbtide.optimizer.state.options import settings_of
from ebbtide.torch_seams.compile_mode import left_out_of_traces
from ebbtide.torch_seams.data_parallel import bucket_bytes
from ebbtide.torch_seams.optimizers import (
    closure_in,
    first_of_step_post_hooks,
    gradient_of,
    has_gradient_hooks,
    is_last_before_step,
    is_of_torch,
    set_gradient,
    with_closure,
)

__all__ = ["OptimizerInBackward"]


class OptimizerInBackward:
    """The optimizer of one fitted model, which steps in its backwards.

    Args:
        optimizer: whose step may be taken for one parameter at a time (``in_step.coupling``).
        max_norm: to what norm gradients are clipped first.

    Attributes:
        total_norm: of the gradients of the last backward that has taken it, before they were clipped.
        gradient_guard: what has been updated and is not cleared.
        update_audit: by the last updates, until ``optimizer.step()`` ends.
        scaled_losses: refuses scalers of losses.
        has_updated: whether a backward has updated anything, so that the optimizer's state is there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.total_norm: torch.Tensor | None = None
        self.gradient_guard = GradientGuard(clips=max_norm is not None)
        self.update_audit = UpdateAudit(optimizer, self.gradient_guard)
        self.has_updated = False
        self.scaled_losses = ScaledLosses()
        self._closed = False
        self._insertion: UpdateInsertion | None = None
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._with_state = {id(each) for each in optimizer.state}
        self._accumulating = Counter[int]()  # threads
        self._tried_settings = self._all_settings()
        self._stepped_by: list[tuple[torch.Tensor, torch.Tensor]] = []
        before, after = self._before_step, self._after_step
        why = "Ebbtide norms at what its steps have updated"
        self._hooks = (
            optimizer.register_step_pre_hook(left_out_of_traces(before, why)),
            first_of_step_post_hooks(optimizer, left_out_of_traces(after, why)),
        )

    def close(self) -> None:
        """The model is not fitted any more, or has another optimizer."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self.scaled_losses.close()
        self.gradient_guard.clear()

    # -- the step -------------------------------------------------------------------------------------------

    def with_updates(self, captured: Captured) -> Captured:
        """``captured`` with the updates of definition 1; itself where there are none."""
        assert self._insertion is not None
        return self._insertion.with_updates(captured)

    def bind(self, module: torch.nn.Module) -> None:
        """Learn whose parameters the optimizer steps; called before the module's steps get updates."""
        self._insertion = UpdateInsertion(self.optimizer, module, max_norm=self.max_norm)
        self._module = weakref.ref(module)

    def with_norms(self, captured: Captured) -> Captured:
        """``captured`` as it is before any rewrite: with norms of its gradients, where they are clipped."""
        assert self._insertion is not None
        return self._insertion.with_norms(captured)

    @property
    def settings(self) -> tuple[object, ...]:
        """What of the optimizer's options its updates' bytes depend on, group by group."""
        return settings_of(*self.optimizer.param_groups)

    def _all_settings(self) -> object:
        """What it depends on whether parameters are stepped for themselves: attributes and options."""
        return settings_of(vars(self.optimizer), *self.optimizer.param_groups)

    @property
    def updated_and_not_stepped(self) -> set[int]:
        """Ids of the parameters that a backward has updated and of which ``optimizer.step()`` does not know yet."""
        guard = self.gradient_guard
        return {id(each) for each in guard.parameters} if guard.state is GuardState.UPDATED else set()

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the model, in its own order."""
        module = None if self._module is None else self._module()
        return [] if module is None else list(module.parameters())

    # -- a call ---------------------------------------------------------------------------------------------

    @property
    def accumulates(self) -> bool:
        """Whether this thread is inside of :meth:`accumulating`."""
        return self.accumulates_in(threading.get_ident())

    def accumulates_in(self, thread: int) -> bool:
        """Whether another thread is: the backwards of a card run in their own."""
        return self._accumulating[thread] > 0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """While open, backwards of calls that this thread makes update nothing."""
        here = threading.get_ident()
        self._accumulating[here] += 1
        try:
            yield
        finally:
            self._accumulating[here] -= 1

    def refuse_surroundings(self, module: torch.nn.Module, *, checkpointed: bool, hooked: bool) -> None:
        """Refuse a call whose gradients somebody else wants to see.

        Raises:
            CaptureError: naming who.
            UsageError: if options have been changed, and the optimizer steps on parameters together by now.
        """
        if (settings := self._all_settings()) != self._tried_settings:
            refuse_coupled_steps(self.optimizer)
            self._tried_settings = settings
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
        """Refuse a backward to whose gradients eager would add (``gradient_guard``, definition 4).

        Raises:
            UsageError: saying what is to be called. This backward has changed nothing.
        """
        if self._closed:
            raise UsageError(
                "a backward begins whose forward ran with another optimizer in the step: set_optimizer or unfit was "
                "called since. Nothing has been updated; run the forward again"
            )
        if self.gradient_guard.state is GuardState.UPDATED:
            raise UsageError(
                "a backward begins, and optimizer.step() has not been called since the last one, which has updated the "
                'weights (step="inside"): eager would add the gradients of both and step once. Call optimizer.step() '
                "and zero_grad() after each; to accumulate, run all forwards and backwards but the last in "
                "ebbtide.no_update(model)"
            )
        if self.gradient_guard.state is GuardState.STEPPED:
            raise UsageError(
                f"a backward begins, and the gradients of the last step ({names_of(self.gradient_guard.names)}) have "
                'not been cleared: eager would add to them, and step="inside" has applied and freed them. Call '
                "optimizer.zero_grad() or model.zero_grad() before it"
            )

    # -- optimizer.step() -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward is about to update."""
        self.update_audit.note_options()
        self._with_state = {id(each) for each in self.optimizer.state}

    def order_new_state(self) -> None:
        """State that has come as gradients came goes behind the rest, in the order in which ``step()`` makes it."""
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in state and id(parameter) not in self._with_state:
                    state[parameter] = state.pop(parameter)

    def _before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip and step what no backward has, and refuse what comes too late (definitions 3 to 6).

        Returns what is called in place of a closure, whose gradients are to come.
        """
        self._stepped_by.clear()  # of a step that was interrupted
        closure = closure_in(args, kwargs)
        others = [*args[2:], *(value for name, value in kwargs.items() if name != "closure")]
        if any(each is not None for each in others) and (
            closure is not None or self.gradient_guard.state is GuardState.UPDATED
        ):
            raise UpdateError(
                'optimizer.step() was given more than a closure, and step="inside" updates in the backward, before '
                'there are arguments. Put options in the groups or attributes of the optimizer, or leave step="inside" '
                "out",
                updated=self.gradient_guard.names if self.gradient_guard.state is GuardState.UPDATED else [],
            )
        if closure is not None:
            self.gradient_guard.in_step = not is_of_torch(self.optimizer)
            return with_closure(args, kwargs, functools.partial(self._call_closure, closure, itertools.count()))
        self._clip()
        if is_of_torch(self.optimizer):
            why = "Ebbtide steps what is left to step"
            return with_closure(args, kwargs, left_out_of_traces(self._instead_of_a_closure, why))
        is_last = is_last_before_step(self.optimizer, self._hooks[0])
        if not is_last and self.gradient_guard.state is GuardState.UPDATED:
            raise UsageError(
                f"{type(self.optimizer).__name__} has hooks before its step that were registered after fit, and would "
                "be shown no gradients: register them before fit. The weights are updated; this step is not counted yet"
            )
        self.gradient_guard.in_step = True
        self._allow_step()
        if is_last:
            self._step_each()
        return None

    def _instead_of_a_closure(self) -> None:
        """All hooks before the step have run, and none of them has raised."""
        self.gradient_guard.in_step = True
        self._allow_step()
        self._step_each()

    def _with_gradients(self) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
        """Parameters of the optimizer that have a gradient, with group and gradient, in the order in which it steps."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := gradient_of(parameter)) is not None:
                    yield group, parameter, gradient

    def _step_each(self) -> None:
        """Step what has a gradient, one parameter after the other (definition 6)."""
        try:
            for group, parameter, gradient in list(self._with_gradients()):
                self._stepped_by.append((parameter, gradient))
                step_parameter(self.optimizer, group, parameter, gradient)
        except BaseException:
            self._show_gradients()
            raise

    def _show_gradients(self) -> None:
        """Put the gradients by which :meth:`_step_each` has stepped where they were."""
        while self._stepped_by:
            set_gradient(*self._stepped_by.pop())

    def _call_closure(self, closure: Callable[[], Any], calls: Iterator[int]) -> Any:
        """What ``closure`` gives. It is the user's own code, in which gradients are read as anywhere outside."""
        if next(calls) and self.gradient_guard.rounds != self.gradient_guard.stepped_round:
            raise UpdateError(
                f"{type(self.optimizer).__name__} calls its closure a second time, whose backward would update again "
                'what the first one has updated (step="inside"): leave step="inside" out',
                updated=self.gradient_guard.names,
            )
        self.gradient_guard.in_step = False
        result = closure()
        self._clip()
        self.gradient_guard.in_step = True
        self._allow_step()
        if is_of_torch(self.optimizer):
            self._step_each()
        return result

    def _allow_step(self) -> None:
        """Refuse a step that eager would take otherwise (definitions 3 and 4): nothing but it is to come."""
        if self.gradient_guard.state is not GuardState.UPDATED:
            return
        try:
            self._refuse_late_gradients()
            self.update_audit.refuse_changes()
        except BaseException:
            self.gradient_guard.in_step = False
            raise
        self.gradient_guard.state = GuardState.STEPPED

    def _after_step(self, *_: object) -> None:
        self._show_gradients()
        self._allow_step()  # where it has not called its closure
        self.gradient_guard.in_step = False
        if self.gradient_guard.state is not GuardState.CLEARED:
            self.order_new_state()  # gradients that came inside of :func:`accumulating` are stepped by now
        self._with_state = {id(each) for each in self.optimizer.state}
        if self.gradient_guard.state is GuardState.STEPPED:
            self.update_audit.refuse_other_weights()  # written by a hook that came after ours
            if self.gradient_guard.stepped_round == self.gradient_guard.rounds:
                raise UsageError(
                    "optimizer.step() was called again after one backward: eager steps by the same gradients again, "
                    'and step="inside" has applied and freed them. This call has changed nothing; run another backward '
                    'before it, or leave step="inside" out'
                )
            self.gradient_guard.stepped_round = self.gradient_guard.rounds

    def _clip(self) -> None:
        """Clip gradients of which no backward has updated anything (definition 5)."""
        if self.gradient_guard.state is not GuardState.CLEARED or self.max_norm is None:
            return
        parameters = self.parameters()
        if any(gradient_of(each) is not None for each in parameters):
            self.total_norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)

    def _refuse_late_gradients(self) -> None:
        """Refuse gradients from elsewhere, which came after the update (definition 4)."""
        pairs = zip(self.gradient_guard.names, self.gradient_guard.parameters, strict=True)
        late = [name for name, each in pairs if gradient_of(each) is not None]
        if late:
            raise UpdateError(
                f"{names_of(late)} got gradients from outside of the planned step too (a penalty on weights, another "
                "model that shares them), after the step had applied its own: eager adds the two and steps once. "
                'Move what makes them into the model\'s forward, or leave step="inside" out. All of the updates of '
                "the step's own gradients have been made",
                updated=self.gradient_guard.names,
            )
