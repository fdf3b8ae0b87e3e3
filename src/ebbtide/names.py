"""Names that users type: what they may have meant, which keywords a function and which models the zoo has."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from ebbtide.errors import EbbtideError, UnknownArgument, UsageError, without_frames

__all__ = [
    "DTYPES",
    "PUBLISHED_PLANNERS",
    "PUBLISHED_ZOO",
    "ZOO",
    "ZOO_GROUP",
    "brought",
    "did_you_mean",
    "how_to_install_published",
    "require_zoo_name",
    "with_known_keywords",
    "zoo_names",
]

ZOO = (
    "gpt",
    "gpt2_small",
    "gpt2_xl",
    "hf_bert",
    "hf_gpt2",
    "hf_llama",
    "hf_t5",
    "llama",
    "llama3_70b",
    "llama3_8b",
    "llama_70b",
    "llama_70b_lora",
    "llama_8b",
    "llama_small",
    "mistral_7b",
    "mlp_chain",
    "qwen3_32b",
    "qwen3_8b",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet50",
    "unet",
    "vit_l",
    "whisper_large",
)
"""What ``zoo:NAME`` may name; here, so that who mistypes one is answered without importing the models and torch."""
DTYPES = ("float32", "bfloat16", "float16")
"""Of parameters and activations, where a case has them to choose."""
ZOO_GROUP = "ebbtide.zoo"
"""The group of entry points by which other installed packages bring models: per name the function of its case."""
PUBLISHED_ZOO = (
    "dcgan",
    "deepspeech2",
    "densenet121",
    "fcn8",
    "inception_v3",
    "lstm_lm",
    "mobilenet",
    "nmt",
    "nmt_luong",
    "resnet1001",
    "resnet2000",
    "segnet",
    "transformer_base",
    "vgg16",
    "vgg19",
)
PUBLISHED_PLANNERS = (
    "anneal",
    "ap_greedy",
    "ap_sqrt",
    "capuchin",
    "chain",
    "checkmate",
    "checkmate_free",
    "checkmate_lp",
    "checkmate_lp_pure",
    "chen_greedy",
    "chen_sqrt",
    "echo",
    "libra",
    "linearized_greedy",
    "linearized_sqrt",
    "min_cut",
    "per_block",
    "retention",
    "revolve",
    "swap",
    "tflms",
)
"""What the package ``ebbtide-published`` brings, so that who lacks it is told."""


@functools.cache
def brought(group: str) -> dict[str, str]:
    """What other installed packages bring, by name: the values of their entry points of ``group``."""
    from importlib.metadata import entry_points  # takes a tenth of a second

    return {each.name: each.value for each in entry_points(group=group)}


def how_to_install_published() -> str:
    """How to get the published planners and the papers' models."""
    return "they are the package ebbtide-published; from a checkout of Ebbtide: pip install ./published"


def zoo_names() -> tuple[str, ...]:
    """All that ``zoo:NAME`` may name here."""
    return tuple(sorted({*ZOO, *brought(ZOO_GROUP)}))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` with known names that begin or end so, else the nearest one, if any."""
    listed = list(names)
    near = [each for each in listed if len(name) > 2 and (each.startswith(name) or each.endswith(name))][:2]
    near = near or difflib.get_close_matches(name, listed, n=1)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_known_keywords(
    function: _Function,
    *,
    name: str = "",
    near: Iterable[str] = (),
    otherwise: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> _Function:
    """``function``, which refuses a keyword that it does not have with the nearest that it has.

    It says as well what goes by name where more is given by place than it takes.

    Args:
        function: any.
        name: as users know it; its own if empty.
        near: what else may have been meant.
        otherwise: called first, with that name and the keywords that it does not have: raises if it knows more.

    Raises:
        UnknownArgument: when it is called; what else is wrong with a call, Python says.
    """
    name = name or function.__name__
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    known = tuple(each.name for each in parameters)
    places = tuple(each.name for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY)
    takes = len(inspect.signature(function).parameters) - len(known) + len(places)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        unknown = {each: value for each, value in kwargs.items() if each not in known}
        if unknown and otherwise is not None:
            otherwise(name, unknown)
        for each, value in unknown.items():
            meant = did_you_mean(each, known) or did_you_mean(each, near)
            raise UnknownArgument(
                f"{name} has no argument {each!r}{meant or ';'} it has: {', '.join(known)}",
                argument=each,
                value=value,
                accepted=known,
            )
        if len(args) > takes:
            raise UnknownArgument(
                f"{name} takes {' and '.join(places) or 'nothing'} by place, and {len(args)} arguments "
                f"were given so; by name it takes {', '.join(each for each in known if each not in places)}",
                argument=places[-1] if places else "",
                value=args,
                accepted=known,
            )
        try:
            return function(*args, **kwargs)
        except EbbtideError as error:
            raise without_frames(error) from error.__cause__

    return cast("_Function", checked)


def require_zoo_name(name: str) -> None:
    """Refuse a name that no model of the zoo has.

    Raises:
        UsageError: listing those there are.
    """
    if name in ZOO or name in brought(ZOO_GROUP):
        return
    known = zoo_names()
    if name in PUBLISHED_ZOO:
        why = f"{name!r} is one of the papers' models, which are not installed: {how_to_install_published()}"
    else:
        near = did_you_mean(name, (*known, *PUBLISHED_ZOO))
        why = f"the zoo has no model {name!r}{near or ';'} it has: {', '.join(known)}"
    raise UsageError(why, argument="case", value=name, accepted=known)
