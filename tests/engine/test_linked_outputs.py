"""Outputs that others are computed from: a gradient that a step does not have is refused, others are eager's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as imported_grad
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import ebbtide
from ebbtide.engine import linked_outputs
from ebbtide.errors import CaptureError


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # whose new running statistics are outputs of the step as well
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)).tanh()


class Two(nn.Module):
    """A result and the features that it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        features = self.encoder(x)
        return self.head(features), features


class InDict(Two):
    def forward(self, x: Tensor) -> Any:
        result, features = super().forward(x)
        return {"logits": result, "hidden": [x, features]}


@dataclass
class Output:
    features: Tensor
    logits: Tensor


class InObject(Two):
    def forward(self, x: Tensor) -> Any:
        result, features = super().forward(x)
        return Output(features, result)


def parts(output: Any) -> tuple[Tensor, Tensor]:
    if isinstance(output, dict):
        return output["logits"], output["hidden"][1]
    return (output.logits, output.features) if isinstance(output, Output) else output


def hook(result: Tensor, features: Tensor) -> None:
    features.register_hook(lambda g: g * 0.5)
    (result.sum() + features.square().sum()).backward()


def retain(result: Tensor, features: Tensor) -> None:
    features.retain_grad()
    (result.sum() + features.square().sum()).backward()


def several(result: Tensor, features: Tensor) -> None:
    register_multi_grad_hook([result, features], lambda grads: None)
    (result.sum() + features.square().sum()).backward()


def path_length(result: Tensor, features: Tensor) -> None:
    torch.autograd.grad(result.sum(), features, create_graph=True)


def imported(result: Tensor, features: Tensor) -> None:
    imported_grad(outputs=result.sum() + features.sum(), inputs=[features])


def edge(result: Tensor, features: Tensor) -> None:
    torch.autograd.grad(result.sum(), [get_gradient_edge(features)])


def only_there(result: Tensor, features: Tensor) -> None:
    (result.sum() + features.sum()).backward(inputs=[features])


def fitted(model: nn.Module, **kwargs: Any) -> Any:
    return ebbtide.fit(copy.deepcopy(model), "100%", progress=None, **kwargs)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8)


@pytest.mark.parametrize("kind", [Two, InDict, InObject])
@pytest.mark.parametrize("use", [hook, retain, several, path_length, imported, edge, only_there])
def test_a_gradient_that_a_planned_step_does_not_have_is_refused(
    kind: type[Two], use: Callable[[Tensor, Tensor], None], x: Tensor
) -> None:
    model = fitted(kind())
    with pytest.raises(CaptureError, match=r"gradient of an output is read.*No gradient was handed out") as refused:
        use(*parts(model(x)))
    assert len(str(refused.value).split()) <= 80
    del refused  # whose frames hold the outputs, as cycles of hooks do
    gc.collect()
    assert all(each.grad is None for each in model.parameters())
    sum(each.sum() for each in parts(model(x))).backward()  # the next step has no such use, and trains


@pytest.mark.parametrize("use", [hook, retain])
def test_what_the_refusal_advises_has_eagers_numbers(use: Callable[[Tensor, Tensor], None], x: Tensor) -> None:
    eager, planned = Two(), Two()
    planned.load_state_dict(eager.state_dict())
    planned.encoder = ebbtide.fit(planned.encoder, "100%", progress=None)
    planned.head = ebbtide.fit(planned.head, "100%", progress=None)
    for model in (eager, planned):
        use(*parts(model(x)))
    for a, b in zip(eager.parameters(), planned.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def in_a_function(result: Tensor, features: Tensor) -> Tensor:
    """The loss of a helper, behind which nobody has the outputs any more."""
    features.register_hook(lambda g: g * 0.5)
    return result.sum() + (features * 2).sum()


def test_a_hook_outlives_its_output(x: Tensor) -> None:
    model = fitted(Two())
    with pytest.raises(CaptureError, match="register_hook"):
        in_a_function(*model(x)).backward()
    assert all(each.grad is None for each in model.parameters())


class Keeps(Two):
    """Features stay on the model, as for maps of what it looks at."""

    def forward(self, x: Tensor) -> Any:
        self.features = self.encoder(x)
        return self.head(self.features)


class Loss(Two):
    def forward(self, x: Tensor) -> Any:
        features = self.encoder(x)
        return {"loss": self.head(features).square().mean(), "features": features}


@pytest.mark.parametrize("use", [hook, retain, several, path_length, imported])
def test_so_is_one_of_what_the_model_keeps_for_itself(use: Callable[[Tensor, Tensor], None], x: Tensor) -> None:
    model = fitted(Keeps())
    result = model(x)
    with pytest.raises(CaptureError, match=r"gradient of an output is read"):
        use(result, model.features)
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("gradients", ["loss", "all"])
def test_so_is_one_of_what_is_returned_beside_a_loss(gradients: str, x: Tensor) -> None:
    model = fitted(Loss(), options=ebbtide.Options(gradients=gradients))
    for read in (lambda each: each.retain_grad(), lambda each: each.register_hook(lambda g: g * 0.5)):
        outputs = model(x)
        read(outputs["features"])
        with pytest.raises(CaptureError, match=r"gradient of an output is read"):
            outputs["loss"].backward()
        del outputs
        gc.collect()
    outputs = model(x)
    with pytest.raises(CaptureError, match=r"gradient of an output is read"):
        torch.autograd.grad(outputs["loss"], outputs["features"])
    outputs["loss"].backward()  # nothing of it has run
    assert all(each.grad is not None for each in model.parameters())


def test_nothing_is_watched_once_the_outputs_are_gone(x: Tensor) -> None:
    for kind in (Two, Keeps, Loss):
        model = fitted(kind())
        output = model(x)
        for each in output if isinstance(output, tuple) else ():
            each.register_hook(lambda g: g * 0.5)
        del output, model
    del each
    gc.collect()
    assert not linked_outputs._watched
    assert not linked_outputs._watch.is_open


def only_outside(result: Tensor, features: Tensor) -> Tensor:
    features.register_hook(lambda g: g * 0.5)
    return features.square().sum()


def of_the_result(result: Tensor, features: Tensor) -> Tensor:
    result.register_hook(lambda g: g * 0.5)
    return result.sum() + features.square().sum()


def removed(result: Tensor, features: Tensor) -> Tensor:
    features.register_hook(lambda g: g * 0.5).remove()
    return result.sum() + features.square().sum()


def on_what_follows(result: Tensor, features: Tensor) -> Tensor:
    following = features * 2
    following.register_hook(lambda g: g * 0.5)
    return result.sum() + following.sum()


class Detached(Two):
    def forward(self, x: Tensor) -> Any:
        features = self.encoder(x)
        return self.head(features.detach()), features


class ByNumber(Two):
    """The other output depends on the features by an index alone."""

    def forward(self, x: Tensor) -> Any:
        features = self.encoder(x)
        return self.head.weight[:, features.argmax(1)], features


class Apart(Two):
    def forward(self, x: Tensor) -> Any:
        return self.head(x), self.encoder(x)


class View(Two):
    """The features leave as a view, which the other output is not computed from."""

    def forward(self, x: Tensor) -> Any:
        features = self.encoder(x)
        return self.head(features), features.view(2, 2, 8)


def on_both(result: Tensor, features: Tensor) -> Tensor:
    features.retain_grad()
    features.register_hook(lambda g: g * 0.5)
    return result.square().sum() + features.square().sum()


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        *((Two, use) for use in (only_outside, of_the_result, removed, on_what_follows)),
        *((kind, on_both) for kind in (Detached, ByNumber, Apart, View)),
    ],
)
def test_a_gradient_that_a_planned_step_has_is_eagers(
    kind: type[Two], use: Callable[[Tensor, Tensor], Tensor], x: Tensor
) -> None:
    eager = kind()
    planned = fitted(eager)
    for model in (eager, planned):
        use(*parts(model(x))).backward()
    for a, b in zip(eager.parameters(), planned.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_backward_that_does_not_come_by_is_not_refused(x: Tensor) -> None:
    model, other = fitted(Two()), nn.Linear(8, 1)
    result, features = model(x)
    features.retain_grad()
    other(features.detach()).sum().backward()  # a discriminator's, say
    assert other.weight.grad is not None
    with pytest.raises(CaptureError, match="retain_grad"):
        result.sum().backward()
