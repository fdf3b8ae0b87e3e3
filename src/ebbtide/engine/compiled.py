"""One call of a model, captured: the function of torch.compile that runs it, and the joint graph that it gave.

1. A *capture* is made at the first call. Its joint graph is kept (``traced_graph``).
2. A *symbolic* capture has the sizes that change as symbols and serves many shapes. Its joint graph is written out at
   each shape's sizes (``symbolic.sizes``), and from there on all is as for a capture of its own: read, planned,
   lowered, proven and verified, with nothing symbolic left.
3. What torch guards are the conditions under which a capture is the step, and so is what a call answers to the
   questions of its branches (``torch_seams.input_branches``). A call that breaks one is :class:`StaleCapture`, and
   nothing has run; another capture has to serve it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ebbtide.capture.attempts import attempted
from ebbtide.capture.numbers import Numbers
from ebbtide.capture.trace import (
    compile_step,
    forget_step,
    inputs_by_name,
    translated_errors,
)
from ebbtide.engine.executor import (
    NothingToTrain,
    Unplanned,
    looking,
    note_results,
    run_forward,
    run_nothing,
    running_as,
)
from ebbtide.engine.pending_steps import PendingStep
from ebbtide.engine.traced_graph import StaleCapture, TracedGraph
from ebbtide.errors import CaptureError, InternalError
from ebbtide.measurement.peak import StepGauge
from ebbtide.ranks.member import ALONE, Alone
from ebbtide.signals import signals_wait
from ebbtide.torch_seams.aot import boxed
from ebbtide.torch_seams.compile_mode import NO_FRAMES, NotCompiled, OwnCompileMode
from ebbtide.torch_seams.dynamo import sizes_as_symbols
from ebbtide.torch_seams.eager_answers import Answers
from ebbtide.torch_seams.input_branches import Question, other_answer
from ebbtide.torch_seams.trees import tree_leaves
from ebbtide.user_objects import is_a

__all__ = ["Call", "Capture"]


@dataclass(frozen=True, slots=True)
class Call:
    """One training call.

    Attributes:
        module: whose call it is.
        forward: its class's forward, which takes the module first.
        args: positional arguments.
        kwargs: keyword arguments.
        device: ``"cpu"`` or ``"cuda"``.
        every_output: whether outputs beside a scalar loss take gradients too.
        ranks: the others that train with this process.
    """

    module: torch.nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: str
    every_output: bool = False
    ranks: Alone = ALONE


def _arguments(call: Call) -> tuple[Any, ...]:
    """What the compiled function is called with."""
    return (call.module, call.forward, call.args, call.kwargs, call.every_output)


class Capture(TracedGraph):
    """A capture of one model; the :class:`~ebbtide.capture.trace.Partitioner` of its compiled function.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        name: of the case.
        changing: of a symbolic capture, per tensor argument in the order of ``pytree``, the dimensions that are
            symbols; ``None`` for a capture of one signature.
        answers: of a symbolic capture, what those of one signature gave to code that asks whether it is compiled.
        numbers: what is known of the model's numbers, if it has been captured before.

    Attributes:
        answers: what code is told that asks whether it is compiled (``capture.branches``).
    """

    def __init__(
        self,
        *,
        device: str,
        name: str,
        changing: Sequence[tuple[int, ...]] | None = None,
        answers: Answers | None = None,
        numbers: Numbers | None = None,
    ) -> None:
        super().__init__(device=device, name=name, symbolic=changing is not None)
        self.answers = answers or Answers()
        self._numbers = numbers or Numbers()
        self._changing = changing
        self._stance = OwnCompileMode()
        self.asked_bytes = 0
        """What answering one of its questions takes at the most, before anything else of a step, as far as seen."""
        self._begin()

    def _begin(self) -> None:
        """Nothing is captured."""
        self.forget_graph()
        self._compiled = compile_step(self, symbolic=self.symbolic, numbers=self._numbers)
        self._forget = weakref.finalize(self, forget_step, self._compiled)
        self._forget.atexit = False

    def __call__(self, call: Call, pending: PendingStep) -> tuple[Any, list[torch.Tensor]]:
        """Run ``call`` as ``pending``: what it returns, and what of that was detached (``capture.loss``).

        Raises:
            NothingToTrain: if nothing of it takes a gradient; nothing has run.
            Unplanned: if ``pending`` has no executable; the joint graph is at hand then, and nothing has run.
            StaleCapture: if the model has changed since the first call; nothing has run.
            CaptureError: if it is not one graph.
            InternalError: if the planned graphs were not what ran.
        """
        arguments = _arguments(call)
        try:
            with running_as(pending):
                if not self.is_made:
                    outputs, detached = self._first(call, arguments)
                else:
                    if (other := self.other_answer(call)) is not None:
                        raise StaleCapture(f"values of its inputs are others than when its step was captured: {other}")
                    outputs, detached = self._guarded(arguments, pending)
        except RuntimeError as error:
            if NO_FRAMES not in str(error):
                raise
            raise CaptureError(
                "a torch dispatch mode (FlopCounterMode, allow_mutation_on_saved_tensors, ...) is active, under which "
                "torch compiles nothing, so this call cannot be planned",
                remedy="exit the mode before training calls; count or trace under torch.no_grad(), or on a copy of "
                "the model (copy.deepcopy), which is a plain one",
            ) from None
        if not pending.ran:
            raise InternalError("the planned step did not run: this torch build bypassed the compiled function")
        return outputs, detached

    def inputs_of(self, call: Call, pending: PendingStep) -> list[Any] | None:
        """The inputs of the captured step, flat, as ``call`` gives them; ``None`` if nothing of it takes a gradient.

        The call is captured if it was not yet. Nothing of the model has run. ``pending`` has no executable: the
        compiler runs what it has compiled, and only an exception ends that before it computes anything.

        Raises:
            StaleCapture: if the model has changed since the first call.
            CaptureError: if the call is not one graph.
        """
        assert pending.executable is None
        try:
            self(call, pending)
        except Unplanned as asked:
            return asked.inputs
        except NothingToTrain:
            return None
        raise AssertionError("a step without a plan ran")

    def _first(self, call: Call, arguments: tuple[Any, ...]) -> Any:
        """The call that is captured, which ends once the joint graph is at hand, or once it is known that none is."""

        def attempt() -> Unplanned | NothingToTrain:
            over = False
            try:
                errors = translated_errors(call.module, call.args, call.kwargs, answers=self.answers)
                marked, noticed = self._marked((call.args, call.kwargs)), self._numbers.noticed()
                with signals_wait(), errors as self._taken, marked, noticed:
                    try:
                        self._stance.compiling(self._compiled, *arguments)
                    except (Unplanned, NothingToTrain):
                        over = True
                        raise
            except (Unplanned, NothingToTrain) as found:
                return found
            except BaseException:
                if not over:  # else a signal that has waited raises this, and what was captured until then stays
                    self.is_made = False
                    self._forget()
                    self._begin()
                raise
            raise InternalError("a step ran while it was captured")

        answers = None if self.symbolic else self.answers
        raise attempted(attempt, call.module, answers=answers, numbers=self._numbers)

    def _guarded(self, arguments: tuple[Any, ...], pending: PendingStep) -> Any:
        # A capture holds one program: Dynamo must not compile another one into it behind our back.
        try:
            with looking():
                return self._stance.only_compiled(self._compiled, *arguments)
        except NotCompiled as error:
            if pending.ran:
                raise
            raise StaleCapture(f"the model has changed since its step was captured: {error}") from None

    @property
    def branches(self) -> tuple[str, ...]:
        """What was answered where it branches on values of its inputs."""
        return tuple(map(str, self._taken.questions))

    def weigh_questions(self, call: Call) -> None:
        """Find out what answering takes for a call of these sizes (:attr:`asked_bytes`)."""
        if self._taken.questions:
            arguments = inputs_by_name(call.module, call.args, call.kwargs)
            self.asked_bytes = max(self.asked_bytes, _answered_within(self._taken.questions, arguments, call.device))

    def other_answer(self, call: Call) -> Question | None:
        """What the values of its inputs make ``call`` answer otherwise than when this was captured, if anything."""
        return other_answer(self._taken.questions, inputs_by_name(call.module, call.args, call.kwargs))

    def changed_for(self, call: Call) -> str:
        """What is another than when this was captured, for a call that it has just not served; may be empty."""
        other = self.other_answer(call)
        if other is not None:
            return str(other)
        with looking():
            why = self._stance.why_not_compiled(self._compiled, *_arguments(call))
        return why.replace("module.", "self.", 1)

    def _marked(self, call: Any) -> AbstractContextManager[None]:
        """While open, Dynamo takes the changing dimensions of a call's tensors as symbols."""
        if self._changing is None:
            return nullcontext()
        tensors = [leaf for leaf in tree_leaves(call) if is_a(leaf, torch.Tensor)]
        return sizes_as_symbols(tensors, self._changing)

    # -- the partitioner ------------------------------------------------------------------------------------

    def take_inputs(self, inputs: Sequence[object]) -> None:
        """Who they are is seen at the first run (``Step.look_at_inputs``)."""

    def take_results(self, results: Sequence[object], inputs: Sequence[object]) -> None:
        """Watch those from which others are computed."""
        note_results(results)

    def forward_callable(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Runs the forward of the step that this thread runs."""
        return boxed(run_forward)

    def nothing_to_train(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """Says at every call whose guards hold that nothing takes a gradient."""
        self.is_made = True
        return boxed(run_nothing)


def _answered_within(questions: Sequence[Question], arguments: Mapping[str, Any], device: str) -> int:
    """What answering takes at its peak, kernels' own memory with it; where a profiler runs, all that is computed."""
    gauge = StepGauge(device)
    gauge.begin()
    try:
        state = torch.get_rng_state()  # of which Dynamo keeps a copy where the first answer is given
        for each in questions:
            each.holds(arguments)
        del state
    finally:
        gauge.end()
    return max(each.bytes for each in questions) if gauge.disturbed else gauge.above_bytes
