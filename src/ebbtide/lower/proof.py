"""The static proof that two lowered graphs are the program: every node is congruent to one joint node.

Every lowered node claims a joint node. The claims hold by induction over the graphs if
1. the forward's placeholders are the primals, the backward's are the forward's saved values in order, then the
   tangents;
2. a call has the claimed node's target and constants, and each tensor argument claims the claimed node's
   argument, the same view of the same buffer, or what that argument is the transpose of the transpose of;
3. a replay runs the claimed random op under a state that was read right before that op's first run, and first
   runs of random ops are in captured order;
4. a folded view has the claimed node's sizes, strides, offset and dtype on the same buffer, with only strided
   views between;
5. the outputs claim the joint outputs;
6. no mutated input is read after its mutation: none is saved for the backward;
7. a rerun of a batch norm may call the form without running statistics with the remaining arguments, after the
   first run, and only outputs that this form has are taken from it;
8. an offload takes the whole of the buffer that its slot is for, whose size, strides and dtype are the slot's; no slot
   is filled twice, no buffer has two, and none overlap; a wait for the copy takes that buffer too;
9. a reload follows the offload of its slot, and nothing but one arrival reads it; the arrival claims the buffer of the
   slot.
10. every update of a parameter runs once, and no op reads the memory of that parameter after it.

Written from the graphs alone, so that a fault of the lowering cannot hide in it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ebbtide.capture.joint import Captured
from ebbtide.capture.rules.batch_norm import repeat_of, repeated_arguments
from ebbtide.errors import InternalError
from ebbtide.lower.emit import _STRIDED_VIEWS, CLAIM, is_whole, twice_transposed
from ebbtide.lower.lowering import STATE_OF, Lowered
from ebbtide.lower.targets import arrive, offload, read_state, reload, replay, settle
from ebbtide.optimizer.in_step.updates import updates_in
from ebbtide.torch_seams.dispatcher import schema_of
from ebbtide.torch_seams.storages import storage_key
from ebbtide.transfers.slots import Slot

__all__ = ["ProofError", "prove"]


class ProofError(InternalError):
    """A lowered graph is not the program: a fault of ours, never of the user's."""


def prove(joint: Captured, lowered: Lowered) -> int:
    """Check clauses 1-10; returns the number of nodes proven.

    Raises:
        ProofError: naming the first node that is not congruent.
    """
    proof = _Proof(joint, lowered.slots)
    forward = list(lowered.forward.graph.nodes)
    backward = list(lowered.backward.graph.nodes)
    proof.placeholders([n for n in forward if n.op == "placeholder"], joint.primals)
    proof.calls(forward)
    results = _results(forward)
    count = joint.forward_output_count
    proof.outputs(results[:count], joint.outputs[:count])
    inputs = [n for n in backward if n.op == "placeholder"]
    proof.saved(results[count:], inputs[: lowered.saved_count])
    proof.placeholders(inputs[lowered.saved_count :], joint.tangents)
    proof.calls(backward)
    proof.outputs(_results(backward), joint.outputs[count:])
    proof.updated()
    return len(forward) + len(backward)


def _results(nodes: Sequence[fx.Node]) -> Sequence[object]:
    (output,) = [n for n in nodes if n.op == "output"]
    (results,) = output.args
    assert isinstance(results, list | tuple)
    return results


class _Proof:
    def __init__(self, joint: Captured, slots: Sequence[Slot]) -> None:
        self.joint = joint
        self.slots = slots
        self.away: set[int] = set()
        _require_apart(slots)
        self.claims: dict[fx.Node, fx.Node] = {}
        self.states: dict[fx.Node, int] = {}
        self.index_of = {node: i for i, node in enumerate(joint.op_nodes)}
        self.last_random = -1
        self.ran: set[int] = set()
        self.pending: tuple[fx.Node, int] | None = None
        self.updates = updates_in(joint)
        self.changed: dict[fx.Node, int] = {}  # per update that has run, the storage that it has changed

    def placeholders(self, nodes: Sequence[fx.Node], expected: Sequence[fx.Node]) -> None:
        _require(len(nodes) == len(expected), f"{len(nodes)} placeholders stand for {len(expected)}")
        for node, joint_node in zip(nodes, expected, strict=True):
            _require(node.name == node.target, f"placeholder {node.name} is not named as its target")
            _require(node.meta.get(CLAIM) is joint_node, f"placeholder {node} does not claim {joint_node}")
            self.claims[node] = joint_node

    def saved(self, values: Sequence[object], placeholders: Sequence[fx.Node]) -> None:
        _require(len(values) == len(placeholders), "what is saved and what is taken differ in number")
        for value, placeholder in zip(values, placeholders, strict=True):
            assert isinstance(value, fx.Node)
            _require(placeholder.name == placeholder.target, f"{placeholder.name} is not named as its target")
            if value in self.states:
                _require(placeholder.meta.get(STATE_OF) == self.states[value], f"{placeholder}: another state")
                self.states[placeholder] = self.states[value]
                continue
            claim = self.claims[value]
            _require(placeholder.meta.get(CLAIM) is claim, f"{placeholder} claims another value than it holds")
            _require(claim not in self.joint.mutated, f"{claim} is mutated and saved for the backward")
            self.claims[placeholder] = claim

    def calls(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._constant(node)
            else:
                _require(node.op in {"placeholder", "output"}, f"{node} is a {node.op}")

    def _constant(self, node: fx.Node) -> None:
        claim = node.meta.get(CLAIM)
        same = isinstance(claim, fx.Node) and claim.op == "get_attr" and claim.target == node.target
        _require(same, f"constant {node} does not claim a constant of that name")
        assert isinstance(claim, fx.Node)
        ours, theirs = (getattr(n.graph.owning_module, str(n.target)) for n in (node, claim))
        _require(ours is theirs, f"constant {node} is another tensor than {claim}")
        self.claims[node] = claim

    def _call(self, node: fx.Node) -> None:
        if node.target in {offload, settle, reload}:
            self._leave(node)
            return
        if node.target is arrive:
            self._arrive(node)
            return
        if node.target is read_state:
            self.pending = (node, node.meta[STATE_OF])
            self.states[node] = node.meta[STATE_OF]
            return
        claim = node.meta.get(CLAIM)
        _require(isinstance(claim, fx.Node), f"{node} claims nothing")
        assert isinstance(claim, fx.Node)
        self._update(node, claim)
        if node.target is replay:
            self._replay(node, claim)
        elif self._has_repeat(claim) and node.target is repeat_of(claim):
            self._repeat(node, claim)
        elif node.target is claim.target and not self._folds(node, claim):
            self._same_arguments(node, claim, node.args, node.kwargs)
            self._first_run(node, claim)
        else:
            self._folded(node, claim)
        self.claims[node] = claim

    def _update(self, node: fx.Node, claim: fx.Node) -> None:
        """Clause 10."""
        if self.changed:
            for source in node.all_input_nodes:
                value = source.meta.get("val")
                resident = self.joint.buffer_of.get(self.claims.get(source, source), 0) is None
                if resident and isinstance(value, torch.Tensor):
                    _require(storage_key(value) not in self.changed.values(), f"{node} reads what was updated before")
        if (update := self.updates.get(claim)) is not None:
            _require(claim not in self.changed, f"{claim} updates a second time")
            self.changed[claim] = storage_key(self.joint.primals[update.position].meta["val"])

    def updated(self) -> None:
        """Check, of clause 10, that every update runs; the graphs are read."""
        for claim in self.updates:
            _require(claim in self.changed, f"{claim} never runs")

    def _leave(self, node: fx.Node) -> None:
        """Clause 8, and of clause 9 what concerns the reload."""
        index = self._slot_of(node)
        if node.target is reload:
            _require(index in self.away, f"{node} comes back from slot {index}, which is empty")
            users = list(node.users)
            _require(len(users) == 1 and users[0].target is arrive, f"{node} is read before it arrives")
            return
        _, tensor = node.args
        assert isinstance(tensor, fx.Node)
        _require(self.claims.get(tensor) is self._base(index), f"{node} moves {tensor}, not what slot {index} is for")
        if node.target is offload:
            _require(index not in self.away, f"{node} fills slot {index} a second time")
            self.away.add(index)
        else:
            _require(index in self.away, f"{node} waits for a copy that nobody has issued")

    def _arrive(self, node: fx.Node) -> None:
        """Clause 9."""
        index = self._slot_of(node)
        _, coming = node.args
        assert isinstance(coming, fx.Node)
        same = coming.target is reload and coming.args == (index,)
        _require(same, f"{node} arrives from {coming}, which does not come from slot {index}")
        base = self._base(index)
        _require(node.meta.get(CLAIM) is base, f"{node} does not claim what slot {index} is for")
        self.claims[node] = base

    def _slot_of(self, node: fx.Node) -> int:
        index = node.args[0]
        assert isinstance(index, int)
        _require(0 <= index < len(self.slots), f"{node} names slot {index} of {len(self.slots)}")
        return index

    def _base(self, index: int) -> fx.Node:
        """The joint node of a slot, which is what the slot says."""
        slot = self.slots[index]
        base = self.joint.base_nodes[slot.buffer]
        assert base is not None
        _require(is_whole(base), f"{base}, which slot {index} is for, is not the whole of its storage")
        value = base.meta["val"]
        said = (slot.shape, slot.stride, slot.dtype, slot.device, slot.bytes)
        size = value.numel() * value.element_size()
        is_so = (tuple(value.shape), tuple(value.stride()), value.dtype, value.device, size)
        _require(said == is_so, f"slot {index} is for {said}, {base} is {is_so}")
        return base

    def _folds(self, node: fx.Node, claim: fx.Node) -> bool:
        """Whether ``node`` stands for a chain of views that ends in an ``as_strided`` of the user's own."""
        strided = claim.target is torch.ops.aten.as_strided.default
        return strided and not self._congruent((node.args, node.kwargs), (claim.args, claim.kwargs))

    def _first_run(self, node: fx.Node, claim: fx.Node) -> None:
        index = self.index_of.get(claim)
        if index is None:
            return
        pending, self.pending = self.pending, None
        if pending is not None and pending[1] != index:
            # Views of the op's arguments may stand between; any other op may not.
            raise ProofError(f"the state of op {pending[1]} is read before op {index}")
        if self.joint.program.ops[index].random:
            _require(index not in self.ran, f"random op {index} runs again without a replay")
            _require(index > self.last_random, f"random op {index} runs after op {self.last_random}")
            self.last_random = index
        self.ran.add(index)

    def _replay(self, node: fx.Node, claim: fx.Node) -> None:
        _device, state, target, args, kwargs = node.args
        index = self.index_of[claim]
        assert isinstance(state, fx.Node)
        _require(target is claim.target, f"{node} replays {target}")
        _require(self.states.get(state) == index, f"{node} replays under the state of another op")
        _require(index in self.ran or state.op == "placeholder", f"{node} replays before the first run")
        self._same_arguments(node, claim, args, kwargs)

    def _has_repeat(self, claim: fx.Node) -> bool:
        index = self.index_of.get(claim)
        return index is not None and bool(self.joint.program.ops[index].repeat)

    def _repeat(self, node: fx.Node, claim: fx.Node) -> None:
        _require(self.index_of[claim] in self.ran, f"{node} repeats {claim} before its first run")
        args, kwargs = repeated_arguments(claim)
        _require(self._congruent((node.args, node.kwargs), (args, kwargs)), f"{node} repeats {claim} otherwise")
        elements = len(schema_of(node.target).returns)  # type: ignore[union-attr]
        for user in node.users:
            taken = user.args[1] if user.target is operator.getitem else None
            _require(isinstance(taken, int) and taken < elements, f"{user} takes {taken} from {node}")

    def _same_arguments(self, node: fx.Node, claim: fx.Node, args: Any, kwargs: Any) -> None:
        given, wanted = (args, kwargs), (claim.args, claim.kwargs)
        if not self._congruent(given, wanted):
            raise ProofError(f"{node} is called with {given}, {claim} with {wanted}")

    def _congruent(self, value: Any, wanted: Any) -> bool:
        if isinstance(wanted, fx.Node):
            if not isinstance(value, fx.Node) or value not in self.claims:
                return False
            return self._same_value(self.claims[value], wanted)
        if isinstance(wanted, list | tuple):
            return (
                isinstance(value, list | tuple)
                and len(value) == len(wanted)
                and all(self._congruent(g, w) for g, w in zip(value, wanted, strict=True))
            )
        if isinstance(wanted, dict):
            return (
                isinstance(value, dict)
                and value.keys() == wanted.keys()
                and all(self._congruent(value[k], wanted[k]) for k in wanted)
            )
        return type(value) is type(wanted) and (value == wanted or value is wanted or repr(value) == repr(wanted))

    def _same_value(self, claim: fx.Node, wanted: fx.Node) -> bool:
        """Whether the two joint nodes are one tensor (clause 2)."""
        if claim in (wanted, twice_transposed(wanted)):
            return True
        buffer = self.joint.buffer_of.get(wanted)
        if buffer is None or self.joint.buffer_of.get(claim) != buffer:
            return False
        base = self.joint.base_nodes[buffer]
        if base is None or claim is not base or not is_whole(base):
            return False
        return self._strided(wanted, base) and _layout(claim) == _layout(wanted)

    def _strided(self, node: fx.Node, base: fx.Node) -> bool:
        while node is not base:
            if node.target not in _STRIDED_VIEWS or not node.all_input_nodes:
                return False
            node = node.all_input_nodes[0]
        return True

    def _folded(self, node: fx.Node, claim: fx.Node) -> None:
        _require(node.target is torch.ops.aten.as_strided.default, f"{node} calls {node.target} for {claim}")
        source, sizes, strides, offset = node.args
        assert isinstance(source, fx.Node)
        buffer = self.joint.buffer_of.get(claim)
        _require(buffer is not None, f"{node} folds a view of a forward input")
        assert buffer is not None
        base = self.joint.base_nodes[buffer]
        assert base is not None
        _require(self.claims.get(source) is base, f"{node} folds a view of another buffer than {claim}")
        _require(self._strided(claim, base), f"{claim} is no strided view of {base}")
        _require(is_whole(base), f"{base} is not the whole of its storage")
        layout = (tuple(sizes), tuple(strides), offset, base.meta["val"].dtype)  # type: ignore[arg-type]
        _require(layout == _layout(claim), f"{node} has {layout}, {claim} has {_layout(claim)}")

    def outputs(self, outputs: Sequence[object], wanted: Sequence[object]) -> None:
        _require(len(outputs) == len(wanted), f"{len(outputs)} outputs stand for {len(wanted)}")
        for g, w in zip(outputs, wanted, strict=True):
            _require(self._congruent(g, w), f"output {g} stands for {w}")


def _layout(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return (node.target is operator.getitem, node)
    return (tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype)


def _require_apart(slots: Sequence[Slot]) -> None:
    """No buffer has two slots, and no two slots of a tier overlap."""
    _require(len({slot.buffer for slot in slots}) == len(slots), "a buffer has two slots")
    ends: dict[str, int] = {}
    for slot in sorted(slots, key=lambda each: each.offset):
        _require(slot.offset >= ends.get(slot.tier, 0), f"the slot of {slot.name} overlaps the one before it")
        ends[slot.tier] = slot.offset + slot.bytes


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProofError(message)
