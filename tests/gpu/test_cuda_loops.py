"""On a card, loops as people write them: optimizers inside and outside the step, trainers, adapters, full cards.

The oracle is the allocator's own counter over the whole step, the optimizer's included, and the bits of an eager run.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from device_steps import EFFORT, case_of, deterministic
from ebbtide.cost.cuda_workspace import cublas_bytes_here
from ebbtide.zoo import mlp_chain

STEPS = 5
MIB = 2**20


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic():
        yield


@dataclass
class Left:
    """What training left, and the allocator's highest level in every step from the first on."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    peaks: list[int] = field(default_factory=list[int])


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def train(
    case: ebbtide.Case,
    optimizer: torch.optim.Optimizer,
    *,
    micro: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    autocast: torch.dtype | None = None,
    whole: bool = False,
    set_to_none: bool = True,
    steps: int = STEPS,
) -> Left:
    left, model = Left(), case.model
    torch.manual_seed(11)
    for step in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(micro):
            with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(*case.args)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if not whole:  # without the optimizer's step
            torch.cuda.synchronize()
            left.peaks.append(torch.cuda.max_memory_allocated())
        if clip is not None:
            left.tensors[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).cpu()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=set_to_none)
        if whole:
            torch.cuda.synchronize()
            left.peaks.append(torch.cuda.max_memory_allocated())
        left.tensors[f"loss {step}"] = loss.detach().float().cpu()
        del loss
    left.tensors |= {name: value.cpu() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()["state"]
    left.tensors |= {f"{i} {k}": v.cpu() for i, each in state.items() for k, v in each.items() if hasattr(v, "cpu")}
    left.tensors["generator"] = torch.cuda.get_rng_state()
    return left


def assert_same(one: Left, other: Left) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        assert torch.equal(value, other.tensors[name]), name


def both(
    name: str, budget: str, make: Callable[..., torch.optim.Optimizer] = adamw, fitting: Any = None, **how: Any
) -> tuple[torch.nn.Module, Left]:
    """Train an eager copy, then the fitted model; both must leave the same, and the second keep its budget."""
    case = case_of(name, "cuda", large=True)
    plain = ebbtide.Case(copy.deepcopy(case.model), case.args)
    scaled = how.pop("scaled", False)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
    expected = train(plain, make(plain.model), scaler=scaler, **how)
    del plain
    optimizer = make(case.model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if scaled else None
    options = dict(fitting or {})
    whole = options.get("step") == "inside" or options.get("offload_optimizer", False)
    ebbtide.fit(
        case.model, budget, optimizer=optimizer, progress=None, options=ebbtide.Options(effort=EFFORT, **options)
    )
    found = train(case, optimizer, scaler=scaler, whole=whole, **how)
    assert_same(expected, found)
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert max(found.peaks) <= plan.budget_bytes, (found.peaks, plan.budget_bytes, max(expected.peaks))
    calls = ebbtide.calls_of(case.model)
    assert calls is not None
    assert not calls.unplanned
    return case.model, found


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"make": partial(adamw, fused=True)},
    "foreach off": {"make": partial(adamw, foreach=False)},
    "capturable": {"make": partial(adamw, capturable=True)},
    "accumulated": {"micro": 3},
    "clipped": {"clip": 0.5},
    "zeroed": {"set_to_none": False},
    "bf16": {"autocast": torch.bfloat16},
    "f16 scaled": {"autocast": torch.float16, "scaled": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_adam_of_the_loop(way: str) -> None:
    both("gpt", "75%", **WAYS[way])


OTHER_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "nesterov": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),  # writes to gradients on a card
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
}


@pytest.mark.parametrize("way", ["plain", "fused", "foreach off", "capturable", "bf16"])
def test_the_optimizer_inside(way: str) -> None:
    both("gpt", "75%", fitting={"step": "inside"}, **WAYS[way])


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_another_optimizer_inside(name: str) -> None:
    make = OTHER_OPTIMIZERS[name]
    both("gpt", "75%", lambda model: make(model.parameters()), {"step": "inside"})


@pytest.mark.parametrize("name", ["gpt", "chain"])
def test_the_optimizers_state_is_at_the_host(name: str) -> None:
    model, _ = both(name, "70%", fitting={"tiers": "host", "offload_optimizer": True})
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.tiers == ("host",)


@pytest.mark.parametrize("rewrites", ["none", "all", "in-place"])
def test_rewrites_have_the_same_bits(rewrites: str) -> None:
    both("gpt", "70%", fitting={"rewrites": rewrites})


def test_images_in_channels_last() -> None:
    case = case_of("images", "cuda", large=True)
    case.model.to(memory_format=torch.channels_last)
    args = tuple(a.to(memory_format=torch.channels_last) for a in case.args)
    case = ebbtide.Case(case.model, args)
    plain = ebbtide.Case(copy.deepcopy(case.model), args)
    expected = train(plain, adamw(plain.model))
    del plain
    optimizer = adamw(case.model)
    ebbtide.fit(case.model, "75%", optimizer=optimizer, progress=None, options=ebbtide.Options(effort=EFFORT))
    found = train(case, optimizer)
    assert_same(expected, found)
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert max(found.peaks) <= plan.budget_bytes


class Classifier(torch.nn.Module):
    """Convolutions and batch norms, every second one of them frozen as in fine-tuning."""

    def __init__(self, width: int, *, frozen: bool, halves: bool = False) -> None:
        super().__init__()
        kinds = [torch.nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(6)]
        self.convolutions = torch.nn.ModuleList(kinds)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(width, track_running_stats=i != 4) for i in range(6))
        self.frozen, self.halves = frozen, halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.frozen:
            for norm in self.norms[::2]:
                norm.eval()
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
            if self.halves:
                x = torch.nn.functional.instance_norm(x)
        return x.square().mean()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("way", ["trained", "frozen", "instance norms", "f16", "bf16"])
def test_batch_norm_is_that_of_eager(way: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Classifier(48, frozen=way == "frozen", halves=way == "instance norms").cuda().to(memory_format=layout)
    case = ebbtide.Case(model, (torch.randn(16, 3, 64, 64, device="cuda").to(memory_format=layout),))
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(way)
    plain = ebbtide.Case(copy.deepcopy(case.model), case.args)
    expected = train(plain, adamw(plain.model), autocast=dtype)
    del plain
    optimizer = adamw(model)
    ebbtide.fit(model, "75%", optimizer=optimizer, progress=None, options=ebbtide.Options(effort=EFFORT))
    found = train(case, optimizer, autocast=dtype)
    assert_same(expected, found)
    plan = ebbtide.plan_of(model)
    assert plan is not None
    assert plan.overhead > 0
    assert max(found.peaks) <= plan.budget_bytes
    assert plan.predicted_peak_bytes == pytest.approx(max(found.peaks[2:]), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_that_share_keys(dtype: torch.dtype) -> None:
    from ebbtide.zoo import LlamaSizes, llama

    sizes = LlamaSizes(vocabulary=512, layers=4, width=512, hidden=1376, heads=8, key_heads=2, dtype=dtype)
    given = llama(8, length=256, sizes=sizes)
    case = ebbtide.Case(given.model.cuda(), tuple(a.cuda() for a in given.args))
    plain = ebbtide.Case(copy.deepcopy(case.model), case.args)
    expected = train(plain, adamw(plain.model))
    del plain
    optimizer = adamw(case.model)
    ebbtide.fit(case.model, "70%", optimizer=optimizer, progress=None, options=ebbtide.Options(effort=EFFORT))
    found = train(case, optimizer)
    assert_same(expected, found)
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert max(found.peaks) <= plan.budget_bytes


def test_the_first_step_counts_what_cublas_takes_in_it() -> None:
    """On the caller's thread and on autograd's, as in a process that has multiplied nothing yet."""
    case = case_of("chain", "cuda", large=True)
    plan = ebbtide.plan(copy.deepcopy(case.model), case.args, budget="1000%", options=ebbtide.Options(effort=EFFORT))
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    smallest = plan.smallest_bytes - plan.resident_bytes - plan.reserve_bytes
    above = int(smallest + 0.3 * (plan.baseline.above_bytes - smallest))
    budget = before + 2 * 33 * MIB + plan.reserve_bytes + above
    ebbtide.fit(case.model, budget, progress=None, options=ebbtide.Options(effort=EFFORT))
    found = train(case, torch.optim.SGD(case.model.parameters(), lr=0.01))
    assert max(found.peaks) <= budget
    fitted = ebbtide.plan_of(case.model)
    assert fitted is not None
    assert fitted.predicted_peak_bytes == pytest.approx(max(found.peaks[2:]), rel=0.01)


def test_attention_as_eager_chooses_it_by_default() -> None:
    """Without deterministic algorithms a card of today takes cuDNN's; its bits are eager's where eager repeats them."""
    torch.use_deterministic_algorithms(False)
    case = case_of("gpt", "cuda", large=True)
    case = ebbtide.Case(case.model.to(torch.bfloat16), case.args)
    plains = [ebbtide.Case(copy.deepcopy(case.model), case.args) for _ in range(2)]
    first, second = (train(plain, adamw(plain.model)) for plain in plains)
    del plains
    optimizer = adamw(case.model)
    ebbtide.fit(case.model, "75%", optimizer=optimizer, progress=None, options=ebbtide.Options(effort=EFFORT))
    found = train(case, optimizer)
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert max(found.peaks) <= plan.budget_bytes
    if all(torch.equal(value, second.tensors[name]) for name, value in first.tensors.items()):
        assert_same(first, found)


def test_steady_steps_do_not_wait_for_the_card() -> None:
    case = case_of("gpt", "cuda", large=True)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    ebbtide.fit(
        case.model, "75%", optimizer=optimizer, tiers="host", progress=None, options=ebbtide.Options(effort=EFFORT)
    )

    def step() -> None:
        case.model(*case.args).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tiers", [None, "host"])
def test_a_step_fits_in_a_card_of_its_budget(tiers: str | None) -> None:
    """1.05 times the budget is all that the process may have of the card, segments and cuBLAS included.

    Segments can grow, as :attr:`Reserved.advice` says: without, a small tensor may be cut from a block that a large
    one wants next.
    """
    case = case_of("chain", "cuda", large=True)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    wide = ebbtide.Case(case.model, tuple(torch.cat([a] * 16) for a in case.args))
    (wide.args[0] @ wide.args[0].T[:, :8]).sum().item()
    torch.cuda.empty_cache()
    ebbtide.fit(
        case.model, "45%", optimizer=optimizer, tiers=tiers, progress=None, options=ebbtide.Options(effort=EFFORT)
    )
    train(wide, optimizer, steps=2)
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_per_process_memory_fraction(1.05 * plan.budget_bytes / total)
    try:
        found = train(wide, optimizer)
        held = torch.cuda.max_memory_reserved()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert max(found.peaks) <= plan.budget_bytes
    assert held <= 1.05 * plan.budget_bytes + 32 * MIB


def test_a_steady_step_is_captured_in_a_graph() -> None:
    given = mlp_chain(8192, layers=8, width=512)
    case = ebbtide.Case(given.model.cuda(), tuple(a.cuda() for a in given.args))
    plain = copy.deepcopy(case.model)
    plain(*case.args).backward()
    expected = [each.grad.clone() for each in plain.parameters() if each.grad is not None]
    del plain
    ebbtide.fit(case.model, "75%", progress=None, options=ebbtide.Options(effort=EFFORT))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            case.model.zero_grad()
            case.model(*case.args).backward()
    torch.cuda.current_stream().wait_stream(side)
    case.model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        case.model(*case.args).backward()
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert plan.overhead > 0
    for _ in range(2):
        for each in case.model.parameters():
            assert each.grad is not None
            each.grad.fill_(-1.0)
        graph.replay()
        found = [each.grad for each in case.model.parameters() if each.grad is not None]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_failed_backward_leaves_nothing() -> None:
    case = case_of("gpt", "cuda", large=True)
    optimizer = adamw(case.model)
    ebbtide.fit(
        case.model, "75%", optimizer=optimizer, tiers="host", progress=None, options=ebbtide.Options(effort=EFFORT)
    )
    train(case, optimizer, steps=3)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    def stop(_: torch.Tensor) -> None:
        raise RuntimeError("stopped on purpose")

    handle = next(iter(case.model.parameters())).register_hook(stop)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="stopped on purpose"):
            case.model(*case.args).backward()
    handle.remove()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2 * MIB, "blocks are up to 1 MiB larger than asked for"
    plan = ebbtide.plan_of(case.model)
    assert plan is not None
    assert max(train(case, optimizer).peaks) <= plan.budget_bytes


def test_the_largest_batch_of_a_budget_fits() -> None:
    narrow = case_of("chain", "cuda", large=True)

    def make(batch: int) -> ebbtide.Case:
        (given,) = narrow.args
        return ebbtide.Case(narrow.model, (given.repeat(-(-batch // len(given)), 1)[:batch].clone(),))

    weights = sum(p.nbytes for p in narrow.model.parameters())
    budget = 4 * weights + 300 * MIB
    found = ebbtide.max_batch(
        make, budget=budget, options=ebbtide.Options(optimizer=adamw, effort=EFFORT, progress=None)
    )
    assert found.batch >= 1
    wide, optimizer = make(found.batch), adamw(narrow.model)
    counted = weights + sum(each.nbytes for each in wide.args)
    gc.collect()
    libraries = cublas_bytes_here()  # in the batch's budget; here they are there already
    budget += torch.cuda.memory_allocated() - counted - libraries
    ebbtide.fit(wide.model, budget, optimizer=optimizer, progress=None, options=ebbtide.Options(effort=EFFORT))
    assert max(train(wide, optimizer, steps=3).peaks) <= budget


# -- trainers ------------------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(512, (256,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def _gpt2(adapted: bool) -> Any:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = hf.GPT2Config(n_layer=6, n_embd=384, n_head=6, n_positions=256, vocab_size=512, use_cache=False)
    model = hf.GPT2LMHeadModel(config)
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True),
        )
    return model


@pytest.mark.parametrize("way", ["plain", "bf16", "accumulated", "lora", "checkpointed"])
def test_transformers_trainer(way: str, tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ebbtide.integrations.hf import MemoryBudget

    known = {each.name for each in dataclasses.fields(hf.TrainingArguments)}
    checkpointing = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in known)
    given: dict[str, Any] = {
        "bf16": {"bf16": True},
        "accumulated": {"gradient_accumulation_steps": 2},
        "checkpointed": {checkpointing: True},
    }.get(way, {})

    class Peaks(hf.TrainerCallback):
        def __init__(self) -> None:
            self.peaks: list[int] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.peaks.append(torch.cuda.max_memory_allocated())

    def run(*callbacks: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
        peaks = Peaks()
        arguments = hf.TrainingArguments(
            output_dir=str(tmp_path), report_to=[], logging_steps=1, disable_tqdm=True, seed=0, max_steps=4,
            save_strategy="no", per_device_train_batch_size=8, **given,
        )  # fmt: skip
        trainer = hf.Trainer(
            model=_gpt2(way == "lora"), args=arguments, train_dataset=Tokens(), callbacks=[*callbacks, peaks]
        )
        trainer.train()
        assert next(trainer.model.parameters()).is_cuda
        return {key: value.cpu() for key, value in trainer.model.state_dict().items()}, peaks.peaks

    expected, _ = run()
    torch.cuda.empty_cache()
    budget = MemoryBudget("80%", options=ebbtide.Options(progress=None))
    found, peaks = run(budget)
    assert budget.plan is not None
    assert max(peaks) <= budget.plan.budget_bytes
    assert budget.calls is not None
    assert not budget.calls.unplanned
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


def test_lightning_and_its_precision(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from ebbtide.integrations.lightning import MemoryBudget

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _gpt2(False)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    def run(*callbacks: Any) -> dict[str, torch.Tensor]:
        lightning.seed_everything(3)
        module = Module()
        trainer = lightning.Trainer(
            max_steps=4, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, callbacks=[*callbacks],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, deterministic=True,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=8))
        return {key: value.cpu() for key, value in module.state_dict().items()}

    expected = run()
    budget = MemoryBudget("80%", options=ebbtide.Options(progress=None))
    found = run(budget)
    assert budget.plan is not None
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key


@pytest.mark.parametrize("first", ["fit", "prepare"])
def test_accelerate_in_both_orders(first: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of another test's trainer

    def run(fitted: bool) -> dict[str, torch.Tensor]:
        accelerator = accelerate.Accelerator(mixed_precision="bf16")
        torch.manual_seed(1)
        model = case_of("gpt", "cpu", large=True).model
        args = case_of("gpt", "cuda", large=True).args
        if fitted and first == "fit":
            ebbtide.fit(model.cuda(), "80%", progress=None, options=ebbtide.Options(effort=EFFORT))
        optimizer = adamw(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        if fitted and first == "prepare":
            ebbtide.fit(model, "80%", progress=None, options=ebbtide.Options(effort=EFFORT))
        torch.manual_seed(2)
        for _ in range(4):
            loss = model(*args)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return {key: value.cpu() for key, value in accelerator.unwrap_model(model).state_dict().items()}

    expected, found = run(False), run(True)
    for key, value in expected.items():
        assert torch.equal(value, found[key]), key
