"""The recurrent translation models of Echo's authors, as their scripts call Sockeye.

1. Sizes are those of the scripts ``sockeye-iwslt15_vi_en-{tbd,groundhog,best}.sh`` of UofT-EcoSystem/sockeye, branch
   bojian/EcoNMT-ISCA19, and where these say nothing the defaults of its ``arguments.py``: ``best`` has states and an
   attention of 1024. ``tbd`` translates from English (17,192 tokens) to Vietnamese (7,710), the other two back.
2. ``best`` shares one embedding (``src_trg``), for which Sockeye joins both vocabularies; what they have in common is
   not published, so all tokens of both are counted.
3. ``--layer-normalization`` is before the tanhs of attention and readout and not in the cells, as its help says. What
   is left out moves no byte that counts: masks of lengths, the previous word in groundhog's query, linear layers before
   a decoder's first states, separate dropouts for embeddings and readout.
"""

from __future__ import annotations

from dataclasses import replace

from ebbtide import Case
from ebbtide_published.zoo.nmt import NMTConfig, nmt

__all__ = ["BATCHES", "CONFIGS", "scaled_down", "sockeye"]

ENGLISH, VIETNAMESE = 17_192, 7_710  # tokens of IWSLT15, special ones among them

CONFIGS: dict[str, NMTConfig] = {
    "tbd": NMTConfig(
        mlp=True,
        layers=2,
        width=512,
        attention=512,
        length=100,
        source_vocabulary=ENGLISH,
        vocabulary=VIETNAMESE,
        dropout=0.0,
    ),
    "groundhog": NMTConfig(
        mlp=True,
        layers=1,
        width=1000,
        embedding=500,
        attention=512,
        length=50,
        source_vocabulary=VIETNAMESE,
        vocabulary=ENGLISH,
        dropout=0.3,
        normalised=True,
    ),
    "best": NMTConfig(
        mlp=True,
        layers=4,
        width=1024,
        embedding=512,
        length=100,
        vocabulary=ENGLISH + VIETNAMESE,
        dropout=0.2,
        normalised=True,
        tied=True,
        smoothing=0.1,
    ),
}
BATCHES = {"tbd": 128, "groundhog": 80, "best": 32}


def sockeye(name: str, batch: int | None = None, **changes: int) -> Case:
    """A training call of the model ``name``, with its own batch if none is given.

    Args:
        name: a key of :data:`CONFIGS`.
        batch: pairs of sentences.
        changes: fields of its config that are other.
    """
    return nmt(BATCHES[name] if batch is None else batch, config=replace(CONFIGS[name], **changes))


def scaled_down(name: str, batch: int = 16) -> Case:
    """The model with a tenth of its lengths, a quarter of its widths and an eighth of its tokens."""
    config = CONFIGS[name]
    small = replace(
        config,
        width=config.width // 8 * 2,
        embedding=None if config.embedding is None else config.embedding // 4,
        attention=None if config.attention is None else config.attention // 4,
        length=config.length // 10,
        source_vocabulary=None if config.source_vocabulary is None else config.source_vocabulary // 8,
        vocabulary=config.vocabulary // 8,
    )
    return nmt(batch, config=small)
