"""Training loops as they are written: accumulation, clipping, schedules, averages, copies, exceptions."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ebbflow
from situations.parts import Attention, Chain, ConvNet, TokenModel
from situations.registry import situation, variants
from situations.run import Run


def _loss(model: Any, x: Any) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach()


@variants({"sum": 1, "mean": 4})
def accumulation(run: Run, divisor: Any) -> None:
    def step(model: Any, i: int) -> Any:
        if i % 4 == 0:
            model.zero_grad()
        loss = model(run.x(i)) / divisor
        loss.backward()
        return loss.detach()

    run.train(Chain(p=0.1), step, steps=8, zero=False)


@variants({"norm": "norm", "value": "value", "foreach": "foreach"})
def clipping(run: Run, how: Any) -> None:
    model = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run.fit(model, optimizer=sgd)
    for i in range(4):
        sgd.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        if how == "value":
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        else:
            run.see(f"norm {i}", nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=how == "foreach"))
        sgd.step()
        del loss
        run.see_model(model, f"step {i}")


SCHEDULES = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "warm_up": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: min(1.0, i / 3)),
}


@variants(SCHEDULES)
def schedule(run: Run, make: Any) -> None:
    model = Chain()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = make(adam)
    run.fit(model, optimizer=adam)
    for i in range(5):
        adam.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        adam.step()
        made.step()
        del loss
        run.see(f"rate {i}", made.get_last_lr())
        run.see_model(model, f"step {i}")


@variants({"average": None, "ema": 0.9}, share=0.85)
def averaged(run: Run, decay: Any) -> None:
    """``AveragedModel``: a copy of the fitted model, which is not fitted itself."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = run.fit(Chain())
    average = AveragedModel(model, multi_avg_fn=None if decay is None else get_ema_multi_avg_fn(decay))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        sgd.zero_grad()
        x = run.x(i)
        with run.step(beside=[average]):
            loss = model(x)
            loss.backward()
        sgd.step()
        average.update_parameters(model)
        del loss
        run.see_model(average, f"average {i}")


@situation(share=0.9)
def tied_weights(run: Run) -> None:
    model = TokenModel(p=0.1)
    model.head.weight = model.embed.weight

    def step(m: Any, i: int) -> Any:
        loss = m(run.tokens(i), run.tokens(i))
        loss.backward()
        return loss.detach()

    run.train(model, step, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))


@variants({"train": True, "eval": False}, share=0.9)
def batch_norm(run: Run, training: Any) -> None:
    def step(m: Any, i: int) -> Any:
        m.train(training)
        loss = F.cross_entropy(m(run.x(i, 8, 3, 24, 24)), torch.arange(8))
        loss.backward()
        return loss.detach()

    run.train(ConvNet(p=0.1), step, steps=5)


@situation(share=0.9)
def channels_last(run: Run) -> None:
    model = ConvNet(p=0.1).to(memory_format=torch.channels_last)

    def step(m: Any, i: int) -> Any:
        x = run.x(i, 8, 3, 24, 24).contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(m(x), torch.arange(8))
        loss.backward()
        return loss.detach()

    run.train(model, step, steps=4)


@variants({"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}, share=0.9, captures=2)
def copied_in_mid_training(run: Run, copied: Any) -> None:
    """A copy is a plain model; fitted again it trains on as the first would."""
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        if i == 3:
            model = copied(model)
            model._forward_pre_hooks.clear()
            run.fit(model)
        model.zero_grad()
        x = run.x(i)
        if i == 3:
            continue
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        run.see_model(model, f"step {i}")


@situation(share=1.5, captures=1, calls=3)
def copy_is_plain(run: Run) -> None:
    """The copy's own steps are not planned, the first model's are."""
    model = run.fit(Chain())
    for i in range(3):
        model.zero_grad()
        loss = model(run.x(i))
        loss.backward()
        other = copy.deepcopy(model)
        other.zero_grad()
        other(run.x(i)).backward()
        run.see_model(other, f"copy {i}")
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def saved_and_loaded(run: Run) -> None:
    model = Chain()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.fit(model, optimizer=sgd)
    file = io.BytesIO()
    for i in range(6):
        if i == 4:
            file.seek(0)
            loaded = torch.load(file)
            model.load_state_dict(loaded["model"])
            sgd.load_state_dict(loaded["optimizer"])
            del loaded
        sgd.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        sgd.step()
        del loss
        if i == 2:
            torch.save({"model": model.state_dict(), "optimizer": sgd.state_dict()}, file)
        run.see_model(model, f"step {i}")


@situation(share=0.9, captures=-1)
def moved_to_bfloat16_and_back(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        dtype = torch.bfloat16 if i in (2, 3) else torch.float32
        model.to(dtype)
        model.zero_grad()
        return _loss(model, run.x(i).to(dtype))

    run.train(Chain(), step, steps=6)


@situation(share=0.9)
def optimizer_in_the_backward(run: Run) -> None:
    """A step per parameter in a hook, after which its gradient is gone."""
    model = Chain()
    for p in model.parameters():
        sgd = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, sgd=sgd: (sgd.step(), sgd.zero_grad()) and None)
    run.train(model, lambda m, i: _loss(m, run.x(i)))


@situation(share=0.9)
def lbfgs(run: Run) -> None:
    """A closure that is called several times a step."""
    model = run.fit(Chain(depth=4))
    made = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=2)
    held = [0]

    for i in range(2):
        x = run.x(i)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            model.zero_grad()
            held[0] = 20 * sum(p.nbytes for p in model.parameters())
            with run.step(bytes_beside=held[0]):
                loss = model(x)
                loss.backward()
            return loss.detach()

        run.see(f"loss {i}", made.step(closure))
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def two_optimizers(run: Run) -> None:
    model = run.fit(Chain())
    parameters = list(model.parameters())
    made = [torch.optim.SGD(parameters[:8], lr=0.1), torch.optim.SGD(parameters[8:], lr=0.01)]
    for i in range(4):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        made[i % 2].step()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def noise_between(run: Run) -> None:
    """Random numbers drawn by the loop: states of generators go on as eager's."""

    def step(model: Any, i: int) -> Any:
        x = run.x(i) + torch.randn(1024, 64) * 0.1
        return _loss(model, x), torch.rand(3)

    run.train(Chain(p=0.2), step)


@situation(share=0.9)
def seeds_set_between(run: Run) -> None:
    """A seed between forward and backward, as loops with several workers have it."""

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i))
        torch.manual_seed(i)
        loss.backward()
        return loss.detach(), torch.rand(3)

    run.train(Chain(p=0.2), step)


# -- exceptions -----------------------------------------------------------------------------------------------------


class Failing(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 7:
            raise ValueError("seven rows")
        return super().forward(x)


@situation(share=0.9, captures=-1, calls=-1)
def exception_in_the_forward(run: Run) -> None:
    """The model's own exception, unchanged; the next step is as if nothing had been."""
    model = run.fit(Failing(p=0.1))
    for i in range(5):
        model.zero_grad()
        if i in (0, 2):
            try:
                model(run.x(i, 7, 64))
            except ValueError as error:
                run.see(f"caught {i}", str(error))
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def exception_in_the_loss(run: Run) -> None:
    """Between forward and backward; the traceback keeps the outputs alive for a while."""
    model, caught = run.fit(Chain(loss=False)), []
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            try:
                out = model(x)
                if i in (1, 3):
                    raise KeyError("in the loss")
                out.square().mean().backward()
            except KeyError as error:
                caught.append(error)
        out = None
        caught.clear()
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def exception_in_the_backward(run: Run) -> None:
    """A hook on a parameter raises."""

    def step(model: Any, i: int) -> Any:
        handle = None
        if i in (1, 2):
            handle = model.layers[1].weight.register_hook(lambda grad: 1 / 0)
        try:
            _loss(model, run.x(i))
        except ZeroDivisionError as error:
            return str(error)
        finally:
            if handle is not None:
                handle.remove()
        return "well"

    model = run.fit(Chain(p=0.1))
    for i in range(5):
        model.zero_grad()
        with run.step():
            said = step(model, i)
        run.see(f"said {i}", said)
        model.zero_grad()
        run.see("random state", torch.get_rng_state())
    with run.step():
        model(run.x(9)).backward()
    run.see_model(model)


@situation(share=0.9, captures=-1, calls=-1)
def wrong_input_then_right(run: Run) -> None:
    """Inputs of a width that no layer takes."""
    model = run.fit(Chain(p=0.1))
    for i in range(4):
        model.zero_grad()
        try:
            model(run.x(i, 8, 63))
        except Exception as error:
            run.see(f"caught {i}", type(error).__name__)
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def interrupted(run: Run) -> None:
    """Ctrl-C between forward and backward, and in the loop."""
    model = run.fit(Chain(p=0.1))
    for i in range(5):
        model.zero_grad()
        x = run.x(i)
        try:
            with run.step():
                loss = model(x)
                if i == 2:
                    raise KeyboardInterrupt
                loss.backward()
        except KeyboardInterrupt:
            pass
        loss = None
        run.see_model(model, f"step {i}")


@situation(share=0.9, calls=-1, captures=2)
def interrupted_while_planning(run: Run) -> None:
    """The first call is stopped as it plans; the second one trains."""
    model, stops = Chain(p=0.1), [3]

    def progress(_: Any) -> None:
        stops[0] -= 1
        if stops[0] == 0:
            raise KeyboardInterrupt

    run.fit(model, progress=progress)
    if not run.eager:
        state = torch.get_rng_state()
        try:
            model(run.x(0))
            run.expect("the interrupt was swallowed", False)
        except KeyboardInterrupt:
            pass
        run.expect("the interrupted call drew random numbers", torch.equal(state, torch.get_rng_state()))
    for i in range(3):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def anomaly_detection(run: Run) -> None:
    def step(model: Any, i: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=True):
                return _loss(model, run.x(i))

    run.train(Chain(), step)


@situation(share=1.2)
def deterministic_algorithms(run: Run) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        run.train(Chain(p=0.1), lambda m, i: _loss(m, run.x(i)))
    finally:
        torch.use_deterministic_algorithms(False)


@situation(share=0.9)
def profiled(run: Run) -> None:
    """Under the user's own profiler."""

    def step(model: Any, i: int) -> Any:
        with torch.profiler.profile(profile_memory=True):
            return _loss(model, run.x(i))

    run.train(Chain(), step)


@variants({"offloaded": True, "cloned": False}, share=1.6, captures=-1)
def saved_tensor_hooks(run: Run, offloaded: Any) -> None:
    def hooks() -> Any:
        if offloaded:
            return torch.autograd.graph.save_on_cpu()
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())

    def step(model: Any, i: int) -> Any:
        with hooks():
            loss = model(run.x(i))
        loss.backward()
        return loss.detach()

    run.train(Chain(p=0.1), step)


@situation(share=0.9)
def budget_changed(run: Run) -> None:
    """``set_budget`` in mid-training, between forward and backward as well: no capture more."""
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        with run.step():
            loss = model(x)
            if i == 2 and not run.eager:
                ebbflow.set_budget(model, int((run._budget or 0) * 0.85))
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9, calls=4)
def unfitted_in_the_end(run: Run) -> None:
    """``unfit`` gives the plain model back."""
    model = run.fit(Chain(p=0.1))
    for i in range(6):
        model.zero_grad()
        x = run.x(i)
        if i == 4 and not run.eager:
            ebbflow.unfit(model)
        if i < 4:
            with run.step():
                loss = model(x)
                loss.backward()
        else:
            loss = model(x)
            loss.backward()
        del loss
        run.see_model(model, f"step {i}")


@situation(share=0.9)
def inference_between(run: Run) -> None:
    """``no_grad`` and ``inference_mode`` between steps."""

    def step(model: Any, i: int) -> Any:
        loss = _loss(model, run.x(i))
        return loss

    model = run.fit(Chain(p=0.1))
    for i in range(4):
        model.zero_grad()
        with run.step():
            loss = step(model, i)
        model.eval()
        with torch.inference_mode():
            run.see(f"inferred {i}", model(run.x(i)).clone())
        with torch.no_grad():
            run.see(f"validated {i}", model(run.x(i)))
        model.train()
        run.see(f"loss {i}", loss)
        run.see_model(model, f"step {i}")


@situation(share=0.9, captures=2)
def multi_task_in_turns(run: Run) -> None:
    """Which head is used depends on an argument."""

    class Tasks(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(64, 4) for _ in range(2))

        def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
            return self.heads[task](self.features(x)).square().mean()

    def step(model: Any, i: int) -> Any:
        loss = model(run.x(i), i % 2)
        loss.backward()
        return loss.detach()

    run.train(Tasks(), step, steps=6)


@situation(share=0.9)
def encoder_of_attention(run: Run) -> None:
    run.train(Attention(p=0.1), lambda m, i: _loss(m, run.x(i, 8, 32, 32)), optimizer=lambda p: torch.optim.AdamW(p))
