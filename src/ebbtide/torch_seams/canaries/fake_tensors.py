"""The canaries of ``fake_tensors``: results described without memory, and modes that are left."""

from __future__ import annotations

import torch

from ebbtide.torch_seams import fake_tensors
from ebbtide.torch_seams.canaries.registry import canary, expect

__all__: list[str] = []

_aten = torch.ops.aten


@canary
def fake_tensors_describe_results() -> None:
    """Shapes, strides, dtype and device of an op's result without running it, with a real tensor among its inputs."""
    mode = fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = torch.empty(1 << 40, 2, dtype=torch.bfloat16)
        result = fake.t() + torch.ones((), dtype=torch.bfloat16)
    assert isinstance(result, fake_tensors.FakeTensor)
    expect(tuple(result.shape) == (2, 1 << 40) and result.stride() == (1, 2), "shape or strides are others")
    expect(result.dtype == torch.bfloat16, "the dtype is another")
    expect(fake_tensors.fake_device(result) == torch.device("cpu"), "the device is another")
    expect(fake_tensors.mode_of(result) is mode, "the mode is another")
    expect(not fake_tensors.has_symbolic_sizes(result), "a size is a symbol")
    expect(isinstance(mode.from_tensor(torch.ones(1)), fake_tensors.FakeTensor), "no fake tensor of a real one")


@canary
def fake_descriptions_can_be_corrected() -> None:
    """Every op on fake tensors goes through ``_dispatch_impl`` unless its description is in the cache."""
    seen: list[object] = []

    def correct(described: fake_tensors.Dispatch) -> fake_tensors.Dispatch:
        def dispatch(*args: object) -> object:
            seen.append(args[1])
            return described(*args)  # type: ignore[arg-type]

        return dispatch

    mode = fake_tensors.FakeTensorMode()
    with mode:
        fake = torch.empty(3)
        with fake_tensors.described_by(correct):
            for _ in range(2):
                fake.exp()
        fake.exp()
    expect(seen == [_aten.exp.default], f"descriptions asked for: {seen}, not exp once")


@canary
def corrected_descriptions_are_kept_apart() -> None:
    """The cache is an attribute of the class, and its keys begin with the op: ours are kept, and torch's untouched."""
    asked: list[object] = []

    def correct(described: fake_tensors.Dispatch) -> fake_tensors.Dispatch:
        def dispatch(*args: object) -> object:
            asked.append(args[1])
            return described(*args)  # type: ignore[arg-type]

        return dispatch

    theirs, name = fake_tensors.FakeTensorMode.cache, object()
    mode = fake_tensors.FakeTensorMode()
    with mode:
        fake = torch.empty(3)
        fake.exp()
        known = dict(theirs)
        for _ in range(2):
            with fake_tensors.described_by(correct, name=name):
                fake.exp()
    expect(fake_tensors.FakeTensorMode.cache is theirs and dict(theirs) == known, "torch's own cache has changed")
    expect(_aten.exp.default in [key.key[0] for key in known], "a key of the cache does not begin with the op")
    expect(asked == [_aten.exp.default], f"descriptions asked for: {asked}, not exp once")


@canary
def fake_tensors_refuse_what_data_decides() -> None:
    """A value or a size that only data could tell raises one of ``LIMITS``, and the log of it has a known name."""
    from torch._subclasses import fake_tensor

    with fake_tensors.FakeTensorMode():
        fake = torch.empty(3)
        for question in (lambda: bool(fake.sum() > 0), fake.nonzero):
            try:
                question()
            except fake_tensors.LIMITS:
                continue
            raise RuntimeError("an answer that depends on data was given")
    with fake_tensors.FakeTensorMode(), fake_tensors.numbers_are(1):
        expect(torch.empty(3).sum().item() == 1.0, "a number that nobody knows is not answered")
        expect(bool(torch.empty(3).sum() > 0), "a truth that nobody knows is not answered")
        expect((torch.tensor(4.0) + 1).item() == 5.0, "a fake number forgets its value")
    with fake_tensors.quiet_log():
        expect(fake_tensor.log.disabled, "what goes wrong on fake tensors is logged elsewhere")


@canary
def modes_can_be_left() -> None:
    """Inside ``without_modes`` ops run on real memory, though a mode is active outside."""
    with fake_tensors.FakeTensorMode(), fake_tensors.without_modes():
        expect(torch.ones(2).sum().item() == 2, "a mode is active still")


@canary
def fake_storages_can_be_counted() -> None:
    """A fake tensor's storage is one object for all that share it, which goes with the last of them."""
    with fake_tensors.FakeTensorMode(), fake_tensors.fakes_are_counted() as counted:
        one = torch.empty(1000)
        view = one[:10]
        del one
        view.add_(1)
        two = torch.empty(500)
        del view, two
        torch.empty(1200)
    expect(counted.peak_bytes == 6000, f"{counted.peak_bytes} bytes are counted instead of 6000")


@canary
def optimizers_step_fakes_as_parameters() -> None:
    """On a card an optimizer that chooses for itself takes all parameters at once, which needs memory for all."""
    sizes: dict[str, int] = {}
    with fake_tensors.without_modes(), fake_tensors.FakeTensorMode(), fake_tensors.fakes_are_stepped_as_parameters():
        for device in ("cpu", "cuda"):
            parameters = [torch.nn.Parameter(torch.zeros(64, device=device)) for _ in range(8)]
            for each in parameters:
                each.grad = torch.zeros_like(each)
            optimizer = torch.optim.AdamW(parameters)
            optimizer.step()
            with fake_tensors.fakes_are_counted() as counted:
                optimizer.step()
            sizes[device] = counted.peak_bytes
    expect(sizes["cpu"] < 8 * 64 * 4, "on a CPU all parameters are stepped at once")
    expect(sizes["cuda"] >= 8 * 64 * 4, "on a card parameters are stepped one by one")


@canary
def modules_of_fake_tensors_are_converted() -> None:
    """``Module._apply(fn, recurse)`` is what converts a module, its children first, and is looked up on the class."""
    with fake_tensors.conversions_replace(), fake_tensors.sizes_only():
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2)).to(torch.bfloat16)
    kinds = {each.dtype for each in layers.parameters()}
    expect(kinds == {torch.bfloat16}, f"a module converted to bfloat16 has parameters of {kinds}")


@canary
def truncated_normals_ask_fakes_for_no_value() -> None:
    """``nn.init.trunc_normal_`` does what it does in a function that is looked up in its module."""
    with fake_tensors.initialisation_reads_no_values(), fake_tensors.sizes_only():
        weight = torch.nn.init.trunc_normal_(torch.nn.Parameter(torch.empty(4, 4)), std=0.02)
    expect(isinstance(weight, fake_tensors.FakeTensor), "a truncated normal is another tensor")
