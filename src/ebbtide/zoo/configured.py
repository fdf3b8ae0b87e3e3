"""Hugging Face's models as their configurations describe them: a ``config.json``, or a preset with its figures.

1. The *kind* of a model is the Auto class of transformers that has its architecture; it says what the call takes.
2. The model is transformers' own class, in training mode, with weights as that initialises them: nothing is
   downloaded, and no code that came beside a configuration is run.
3. The call has a batch of sequences or images, labels among them, so that the output has ``.loss``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ebbtide.case import Case
from ebbtide.errors import UsageError
from ebbtide.names import DTYPES, did_you_mean
from ebbtide.signals import raised_by_a_handler
from ebbtide.torch_seams.fake_tensors import DATA_DEPENDENT
from ebbtide.zoo.inputs import integers, noise
from ebbtide.zoo.packages import require_package

__all__ = ["Configuration", "model_of", "of_images", "of_text"]

LONGEST = 2048
"""Tokens of a sequence where nobody says how many, or fewer if the model has fewer positions."""
_LAYERS = ("encoder_layers", "decoder_layers", "num_decoder_layers")
"""What configurations of an encoder and a decoder call their layers, besides the name that all have."""
_HEADS = ("classifier", "score")
"""What transformers' classifiers call their heads; PEFT trains these whole."""


@dataclass(frozen=True)
class Configuration:
    """What a ``config.json`` says.

    Attributes:
        label: as users name it: ``hf:PATH`` or ``zoo:NAME``.
        name: for reports.
        values: of the file.
    """

    label: str
    name: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """An Auto class (1).

    Attributes:
        auto: its name.
        mapping: per type of model, the class or classes that it makes: a name in transformers.
        arguments: those of a call, from the model, its configuration, the batch and the length.
        types: the types of model whose call is known; ``None`` for all.
    """

    auto: str
    mapping: str
    arguments: Callable[[Any, Any, int, int], dict[str, Any]]
    types: tuple[str, ...] | None = None

    def classes(self, model_type: str) -> tuple[str, ...]:
        """The names of its classes for a type of model."""
        from transformers.models.auto import modeling_auto

        if self.types is not None and model_type not in self.types:
            return ()
        found = getattr(modeling_auto, self.mapping).get(model_type, ())
        return (found,) if isinstance(found, str) else tuple(found)


def model_of(configuration: Configuration) -> Callable[..., Case]:
    """The function that makes cases of ``configuration``: of its batch, and of its other sizes by name.

    Raises:
        UsageError: if transformers is missing, or makes no model of it that can be trained.
    """
    import transformers

    kind, architecture = _kind_of(configuration)
    getattr(transformers, architecture)  # imported here, before anybody asks for tensors without memory
    return partial(of_images if kind is _IMAGES else of_text, configuration)


def of_text(
    configuration: Configuration,
    batch: int = 1,
    *,
    length: int | None = None,
    layers: int | None = None,
    dtype: str | None = None,
    lora: int | None = None,
) -> Case:
    """A training call on ``batch`` sequences.

    Args:
        configuration: of a model of language or speech.
        batch: number of sequences.
        length: of each, tokens; those of the labels where speech is read.
        layers: how many; of an encoder and of a decoder where there are both.
        dtype: of :data:`DTYPES`; the configuration's own if ``None``.
        lora: rank of the adapters that are trained in place of the model.

    Raises:
        UsageError: for what the model cannot have.
    """
    kind, _ = _kind_of(configuration)
    model, config = _built(configuration, kind, dtype, layers=layers)
    most = _positions(model)
    if length is None:
        known = [getattr(config, each, None) for each in ("max_position_embeddings", "n_positions")]
        length = min(each for each in (LONGEST, most, *known) if isinstance(each, int) and each > 0)
    elif most is not None and length > most:
        raise UsageError(
            f"{configuration.label} has {most} positions, fewer than a length of {length}", argument="length"
        )
    arguments = kind.arguments(model, config, batch, length)
    return _case(configuration, kind, model, arguments, f"t{length}-b{batch}", lora)


def of_images(
    configuration: Configuration,
    batch: int = 1,
    *,
    image: int | None = None,
    layers: int | None = None,
    dtype: str | None = None,
    lora: int | None = None,
) -> Case:
    """A training call on ``batch`` images.

    Args:
        configuration: of a classifier of images.
        batch: number of images.
        image: height and width, pixels; the configuration's own if ``None``.
        layers: as in :func:`of_text`.
        dtype: as in :func:`of_text`.
        lora: as in :func:`of_text`.

    Raises:
        UsageError: for what the model cannot have.
    """
    kind, _ = _kind_of(configuration)
    model, config = _built(configuration, kind, dtype, layers=layers, image=image)
    size = image or getattr(config, "image_size", None) or 224  # as convolutional networks are trained, of any size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = noise(batch, config.num_channels, height, width, seed=0)
    arguments = {"pixel_values": pixels.to(model.dtype), **_IMAGES.arguments(model, config, batch, 0)}
    return _case(configuration, kind, model, arguments, f"{height}x{width}-b{batch}", lora)


def _kind_of(configuration: Configuration) -> tuple[_Kind, str]:
    """Its kind, and the name of its class: the first of its architectures, else the first that there is.

    Raises:
        UsageError: if there is none.
    """
    require_package("transformers", configuration.label)
    from transformers import CONFIG_MAPPING

    values, label = configuration.values, configuration.label
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = did_you_mean(model_type, CONFIG_MAPPING.keys())
        raise UsageError(
            f"the transformers that is installed has no model_type {model_type!r} ({label}), and code that comes with "
            f"a model is not run{near}"
        )
    if values.get("quantization_config"):
        raise UsageError(
            f"{label} has a quantization_config, and a model without weights is not quantised; take that entry out to "
            "plan for the model in its dtype"
        )
    known = [(kind, name) for kind in _KINDS for name in kind.classes(model_type)]
    named = [str(each) for each in values.get("architectures") or ()]
    found = [(kind, name) for kind, name in known if not named or name == named[0]]
    if not found:
        can = ", ".join(dict.fromkeys(name for _, name in known))
        raise UsageError(
            f"{label} is of {named[0] if named else model_type}, of which no training call is known here; "
            + (f"its entry architectures may name: {can}" if can else f"known are: {', '.join(k.auto for k in _KINDS)}")
        )
    return found[0]


def _built(
    configuration: Configuration, kind: _Kind, dtype: str | None, *, layers: int | None, image: int | None = None
) -> tuple[Any, Any]:
    """The model with its configuration.

    Raises:
        UsageError: if transformers cannot make it.
    """
    import transformers

    asked = _dtype(configuration, dtype)
    try:
        config = _config(configuration, kind, layers, image)
        model = getattr(transformers, kind.auto).from_config(config, dtype=asked)
    except UsageError:
        raise
    except DATA_DEPENDENT as error:
        raise UsageError(
            f"{configuration.label} reads values of tensors while it is made, so it is not made without memory; plan "
            "for the machine at hand, or on the other one"
        ) from error
    except Exception as error:
        if raised_by_a_handler(error):
            raise
        raise UsageError(f"{configuration.label} makes no model: {type(error).__name__}: {error}") from error
    return model.train(), config


def _dtype(configuration: Configuration, dtype: str | None) -> torch.dtype:
    own = configuration.values.get("dtype") or configuration.values.get("torch_dtype") or "float32"
    name = dtype or str(own)
    if name not in DTYPES:
        said = f"dtype={name!r}" if dtype else f"{configuration.label} says dtype {name!r}, which"
        raise UsageError(
            f"{said} is none of {', '.join(DTYPES)}{'' if dtype else ': choose one of these'}",
            argument="dtype",
            value=name,
            accepted=DTYPES,
        )
    return getattr(torch, name)


def _config(configuration: Configuration, kind: _Kind, layers: int | None, image: int | None) -> Any:
    """The configuration as transformers has it, with what a training call needs and the sizes that were asked for."""
    from transformers import CONFIG_MAPPING

    values = dict(configuration.values)
    make = CONFIG_MAPPING[values["model_type"]].from_dict
    config = make(dict(values))
    if layers is not None:
        values |= _layers(configuration, config, layers)
    if image is not None and hasattr(config, "image_size"):
        values["image_size"] = image
    config = make(values)
    config.use_cache = False  # training reads no cache of keys and values
    if kind is _CLASSES and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders look for it behind each sequence
    if kind in (_CLASSES, _IMAGES) and not getattr(config, "problem_type", None):
        config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
    if kind is _PAIRS and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _layers(configuration: Configuration, config: Any, layers: int) -> dict[str, Any]:
    """What says in ``config`` how many layers there are and of which type each is, for ``layers`` of them."""
    now = getattr(config, "num_hidden_layers", None)
    if not isinstance(now, int):
        raise UsageError(f"{configuration.label} has no layers to choose", argument="layers", value=layers)
    names = ["num_hidden_layers", config.attribute_map.get("num_hidden_layers")]
    names += [each for each in _LAYERS if hasattr(config, each)]
    found: dict[str, Any] = {each: layers for each in names if each in config.to_dict() or each in _LAYERS}
    for name, value in configuration.values.items():
        if "layer" in name and isinstance(value, list) and len(value) == now:
            found[name] = list(itertools.islice(itertools.cycle(value), layers))
    return found


def _positions(model: nn.Module) -> int | None:
    """How many tokens the tables of positions have room for; ``None`` where there is none."""
    tables = [
        each.num_embeddings - (0 if each.padding_idx is None else each.padding_idx + 1)
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    return min(tables, default=None)


def _case(
    configuration: Configuration, kind: _Kind, model: Any, arguments: dict[str, Any], sizes: str, lora: int | None
) -> Case:
    name = f"{configuration.name}-{sizes}"
    if lora is not None:
        model, name = _adapted(configuration, kind, model, lora), f"{name}-lora{lora}"
    return Case(model, kwargs=arguments, name=name)


def _adapted(configuration: Configuration, kind: _Kind, model: Any, rank: int) -> Any:
    """The model frozen, with adapters on its linear layers but the head; a classifier's head is trained whole."""
    require_package("peft", f"lora={rank} of {configuration.label}")
    from peft import LoraConfig, PeftModel, TaskType

    classifier = kind in (_CLASSES, _IMAGES)
    heads = [each for each in _HEADS if classifier and isinstance(getattr(model, each, None), nn.Module)]
    settings = LoraConfig(
        r=rank,
        target_modules="all-linear",
        task_type=TaskType.SEQ_CLS if classifier else None,  # says what all-linear leaves out
        modules_to_save=heads or None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that PEFT asks transformers for, and of layers stored transposed
        try:
            return PeftModel(model, settings).train()
        except ValueError as error:
            raise UsageError(
                f"{configuration.label} takes no adapters: {error}", argument="lora", value=rank
            ) from error


def _tokens(model: Any, batch: int, length: int, *, seed: int = 1) -> torch.Tensor:
    return integers(model.get_input_embeddings().num_embeddings, batch, length, seed=seed)


def _causal(model: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    """Whole sequences without padding: the model shifts its labels itself."""
    tokens = _tokens(model, batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _pairs(model: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": _tokens(model, batch, length), "labels": _tokens(model, batch, length, seed=2)}


def _masked(model: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    return {**_pairs(model, config, batch, length), "attention_mask": mask}


def _labels(model: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    """Of classes, one or several, or of a number to be found."""
    if config.problem_type == "single_label_classification":
        return {"labels": integers(config.num_labels, batch, seed=2)}
    shape = (batch,) if config.num_labels == 1 else (batch, config.num_labels)
    return {"labels": noise(*shape).abs().clamp(max=1).to(model.dtype)}


def _classified(model: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    return {
        "input_ids": _tokens(model, batch, length),
        "attention_mask": mask,
        **_labels(model, config, batch, length),
    }


def _heard(model: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    """Whisper's: spectra of 30 s, two frames to a position of the encoder."""
    features = noise(batch, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features.to(model.dtype), "labels": _tokens(model, batch, length, seed=2)}


_PAIRS = _Kind("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _pairs)
_CLASSES = _Kind("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _classified)
_IMAGES = _Kind("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _labels)
_KINDS = (
    _Kind("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _causal),
    _PAIRS,
    _Kind("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", _masked),
    _CLASSES,
    _IMAGES,
    _Kind("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", _heard, ("whisper",)),
)
