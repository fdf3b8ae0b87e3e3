"""The dynamic proof: a buffer that comes back must have the bytes it had when it was first computed.

A fingerprint covers the whole storage and depends on the position of every byte (sums and xors would not see
two values exchanged). On CPU it is CRC-32 (ISO 3309), which reads the storage in place and takes no allocator
bytes. On CUDA every 32-bit word is multiplied by an odd weight that depends on its position and the products
are summed modulo 2**64, in chunks of fixed scratch (``SCRATCH_BYTES_CUDA``, which the plan counts).
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Mapping

import torch
from torch import fx

from ebbtide.errors import VerificationError
from ebbtide.lower.emit import MAKES
from ebbtide.step.program import Program
from ebbtide.torch_seams.graphs import uncompiled_module

__all__ = ["SCRATCH_BYTES_CUDA", "Fingerprints", "fingerprint", "fingerprint_of_values", "with_fingerprints"]

_CHUNK_WORDS = 2**18
# int64 products, their weights and the widened words of one chunk, and a few scalars.
SCRATCH_BYTES_CUDA = 3 * 8 * _CHUNK_WORDS + 4096
_WEIGHT_STEP = 0x9E3779B1  # odd, so that position -> weight is a bijection modulo 2**32 (Knuth, TAOCP 3, 6.4)


def fingerprint(tensor: torch.Tensor) -> int:
    """A position-dependent hash of the whole storage of ``tensor``, whatever its strides."""
    storage = tensor.untyped_storage()
    return _fingerprint(storage, 0, storage.nbytes())


def fingerprint_of_values(tensor: torch.Tensor) -> int:
    """The fingerprint of what ``tensor`` reaches of its storage, all of which it has to be."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return _fingerprint(tensor.untyped_storage(), begin, tensor.numel() * tensor.element_size())


def _fingerprint(storage: torch.UntypedStorage, begin: int, size: int) -> int:
    if size == 0:
        return 0
    if storage.device.type == "cpu":
        return zlib.crc32((ctypes.c_char * size).from_address(storage.data_ptr() + begin))
    return _fingerprint_on_device(storage, size, begin)


def _fingerprint_on_device(storage: torch.UntypedStorage, size: int, first: int = 0) -> int:
    device = storage.device
    raw = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, first, (size,))  # type: ignore[call-overload]
    if first % 4:  # words start at a multiple of four
        raw = raw.clone()
    words, tail = raw[: size // 4 * 4].view(torch.int32), raw[size // 4 * 4 :]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for begin in range(0, len(words), _CHUNK_WORDS):
        chunk = words[begin : begin + _CHUNK_WORDS].to(torch.int64)
        weights = torch.arange(begin, begin + len(chunk), dtype=torch.int64, device=device)
        weights.mul_(_WEIGHT_STEP).bitwise_or_(1)
        total.add_(chunk.mul_(weights).sum())
    for position, value in enumerate(tail.tolist()):
        total.add_(value * (_WEIGHT_STEP + 2 * position))
    return int(total.item())


class Fingerprints:
    """The fingerprints of one step: recorded at the first run, held against at every later one.

    A second forward that starts before this step's backward cancels it: the two would share buffers' names.

    Args:
        program: of the step.
        likes: by buffer another one, made before it, whose bytes it has to have.
    """

    def __init__(self, program: Program, likes: Mapping[int, int] | None = None) -> None:
        self._program = program
        self._likes = likes or {}
        self._values: dict[int, int] = {}
        self.checked = 0
        self.cancelled = False

    def of(self, buffer: int) -> int:
        """The buffer whose bytes ``buffer`` has to have: itself, but for what is made a second time as another."""
        return self._likes.get(buffer, buffer)

    def restart(self) -> None:
        """Forget everything: a new step begins."""
        self._values.clear()
        self.checked = 0
        self.cancelled = False

    def record(self, buffer: int, tensor: torch.Tensor) -> None:
        """``tensor`` is the first copy of ``buffer`` in this step."""
        if not self.cancelled:
            self._values[buffer] = fingerprint(tensor)

    def check(self, buffer: int, tensor: torch.Tensor) -> None:
        """``tensor`` is a later copy of ``buffer``.

        Raises:
            VerificationError: if its bytes are not those of the first.
        """
        if self.cancelled:
            return
        self.checked += 1
        if fingerprint(tensor) != self._values[buffer]:
            producer = self._program.buffers[buffer].producer
            op = self._program.ops[producer] if producer is not None else None
            raise VerificationError(
                f"buffer {self._program.buffers[buffer].name} came back with other bits when {op} ran again. "
                "No gradient of this step was handed out. Either memory of an input was rewritten between forward and "
                "backward (a NumPy view, a prefetcher: write after the backward), or the op is not reproducible on "
                "this device: use torch.use_deterministic_algorithms(True), or report the op so that it is kept.",
                buffer=self._program.buffers[buffer].name,
                op=str(op or ""),
            )


def with_fingerprints(
    forward: fx.GraphModule, backward: fx.GraphModule, table: Fingerprints
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Copies of the two lowered graphs that record and check every buffer made more than once."""
    made: dict[int, int] = {}
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        if MAKES in node.meta:
            buffer = table.of(node.meta[MAKES])
            made[buffer] = made.get(buffer, 0) + 1
    seen: set[int] = set()
    copies: list[fx.GraphModule] = []
    for module in (forward, backward):
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        output = graph.graph_copy(module.graph, environment)
        for node in module.graph.nodes:
            if MAKES not in node.meta:
                continue
            buffer = table.of(node.meta[MAKES])
            if made[buffer] < 2:
                continue
            call = table.check if buffer in seen else table.record
            seen.add(buffer)
            copy = environment[node]
            with graph.inserting_after(copy):
                graph.call_function(call, (buffer, copy))
        graph.output(output)
        copies.append(uncompiled_module(module, graph))  # takes the constants along
    return copies[0], copies[1]
