"""Models whose training step is not one graph, at small sizes: what breaks it is what such models do.

A *subject* is built anew from a seed, called with keywords, and gives its loss. Those of ``transformers`` are its own
classes with random weights; the others are written here in plain torch.
"""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Subject"]

_logger = logging.getLogger("harness.broken_models")
WIDTH, LENGTH, BATCH, WORDS = 64, 64, 8, 256


@dataclass
class Subject:
    """A model, and what a step calls it with, drawn from the generators.

    Attributes:
        model: it.
        inputs: keywords of a call.
    """

    model: nn.Module
    inputs: Callable[[], dict[str, Any]]


MODELS: dict[str, Callable[[], Subject]] = {}
"""By name; each builds a model and tells its inputs."""


def _model(name: str) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    def keep(build: Callable[[], Subject]) -> Callable[[], Subject]:
        MODELS[name] = build
        return build

    return keep


def _tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (batch, length))


def _words(batch: int = BATCH, length: int = LENGTH) -> dict[str, Any]:
    tokens = _tokens(batch, length)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


class Block(nn.Module):
    """A transformer's block before its norm."""

    def __init__(self, width: int = WIDTH, heads: int = 4, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.read(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return self.write((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.first(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.second(x)))))


class Language(nn.Module):
    """A causal transformer; what runs its blocks is the subclass's."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))

    def through(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.through(self.embed(tokens))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# -- of transformers ------------------------------------------------------------------------------------------------


@_model("whisper, SpecAugment")
def _whisper() -> Subject:
    import transformers as hf

    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=40, max_source_positions=150,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        apply_spec_augment=True, mask_time_prob=0.2, mask_feature_prob=0.2, mask_feature_length=4, use_cache=False,
    )  # fmt: skip
    return Subject(
        hf.WhisperForConditionalGeneration(config),
        lambda: {"input_features": torch.randn(BATCH, 40, 300), "labels": _tokens(length=24)},
    )


def _speech_config(kind: str) -> dict[str, Any]:
    return {
        "vocab_size": 32, "hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 256, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4),
        "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.3, "mask_time_length": 4, "layerdrop": 0.1, "ctc_zero_infinity": True,
        "ctc_loss_reduction": "mean", "pad_token_id": 0, "name_or_path": kind,
    }  # fmt: skip


def _speech() -> dict[str, Any]:
    return {"input_values": torch.randn(4, 8000), "labels": torch.randint(1, 32, (4, 12))}


@_model("wav2vec2 ctc, masked by numpy")
def _wav2vec2() -> Subject:
    import transformers as hf

    return Subject(hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**_speech_config("wav2vec2"))), _speech)


@_model("hubert ctc, masked by numpy")
def _hubert() -> Subject:
    import transformers as hf

    return Subject(hf.HubertForCTC(hf.HubertConfig(**_speech_config("hubert"))), _speech)


@_model("mixtral, loop over experts")
def _mixtral() -> Subject:
    import transformers as hf

    config = hf.MixtralConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, use_cache=False,
        max_position_embeddings=LENGTH, experts_implementation="eager",
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        tokens = _tokens(16)
        return {"input_ids": tokens, "labels": tokens}

    return Subject(hf.MixtralForCausalLM(config), inputs)


@_model("switch transformer")
def _switch() -> Subject:
    import transformers as hf

    config = hf.SwitchTransformersConfig(
        vocab_size=WORDS, d_model=WIDTH, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4,
        num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=128,
        router_jitter_noise=0.0, pad_token_id=0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return Subject(
        hf.SwitchTransformersForConditionalGeneration(config), lambda: {"input_ids": _tokens(16), "labels": _tokens(16)}
    )


@_model("longformer")
def _longformer() -> Subject:
    import transformers as hf

    config = hf.LongformerConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        attention_window=16, max_position_embeddings=130, num_labels=4, pad_token_id=1,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        tokens = _tokens(length=128)
        globally = torch.zeros_like(tokens)
        globally[:, 0] = 1
        attention = torch.ones_like(tokens)
        labels = torch.randint(4, (BATCH,))
        return {
            "input_ids": tokens, "attention_mask": attention, "global_attention_mask": globally, "labels": labels,
        }  # fmt: skip

    return Subject(hf.LongformerForSequenceClassification(config), inputs)


@_model("reformer")
def _reformer() -> Subject:
    import transformers as hf

    config = hf.ReformerConfig(
        vocab_size=WORDS, hidden_size=WIDTH, attention_head_size=16, num_attention_heads=4, feed_forward_size=256,
        axial_pos_shape=[8, 16], axial_pos_embds_dim=[32, 32], attn_layers=["local", "lsh"], lsh_attn_chunk_length=32,
        local_attn_chunk_length=32, num_buckets=4, num_hashes=2, max_position_embeddings=128, is_decoder=True,
        hidden_dropout_prob=0.0, lsh_attention_probs_dropout_prob=0.0, local_attention_probs_dropout_prob=0.0,
        hash_seed=0, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        tokens = _tokens(length=128)
        return {"input_ids": tokens, "labels": tokens}

    return Subject(hf.ReformerModelWithLMHead(config), inputs)


@_model("big bird, blocks by numpy")
def _big_bird() -> Subject:
    import transformers as hf

    config = hf.BigBirdConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=256, attention_type="block_sparse", block_size=16, num_random_blocks=2,
        use_cache=False,
    )  # fmt: skip

    def inputs() -> dict[str, Any]:
        tokens = _tokens(4, 256)
        return {"input_ids": tokens, "labels": tokens}

    return Subject(hf.BigBirdForMaskedLM(config), inputs)


class MaskedBert(nn.Module):
    """BERT whose head sees only what is masked: as many rows as that are."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        config = hf.BertConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=LENGTH,
        )  # fmt: skip
        self.bert, self.head = hf.BertModel(config, add_pooling_layer=False), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, masked: Tensor) -> Tensor:
        hidden = self.bert(torch.where(masked, 1, tokens)).last_hidden_state
        return F.cross_entropy(self.head(hidden[masked]), tokens[masked])


@_model("bert, logits[mask]")
def _bert() -> Subject:
    return Subject(MaskedBert(), lambda: {"tokens": _tokens(16), "masked": torch.rand(16, LENGTH) < 0.15})


# -- language -------------------------------------------------------------------------------------------------------


class Items(Language):
    """Logs a value of every block."""

    def through(self, x: Tensor) -> Tensor:
        self.seen: list[float] = []
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.detach().abs().mean().item())
        return x


@_model("gpt, item()")
def _items() -> Subject:
    return Subject(Items(), lambda: _words(16))


class Prints(Language):
    """Prints in the middle."""

    def through(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                print("after two blocks", tuple(x.shape), file=io.StringIO())
                print(f"of norm {x.detach().norm():.3f}")
        return x


@_model("gpt, print")
def _prints() -> Subject:
    return Subject(Prints(), lambda: _words(16))


class EarlyExit(Language):
    """Leaves its last blocks out where it is sure."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.head(self.norm(x)).softmax(-1).amax(-1).mean() > 0.5:
                break
        return x


@_model("gpt, early exit")
def _early_exit() -> Subject:
    return Subject(EarlyExit(), lambda: _words(16))


class LayerDrop(Language):
    """Leaves blocks out by chance."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() > 0.2:
                x = block(x)
        return x


@_model("gpt, LayerDrop by random")
def _layer_drop() -> Subject:
    return Subject(LayerDrop(), lambda: _words(16))


class Experts(nn.Module):
    """A mixture: each expert takes its tokens, and adds what it makes of them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return out.view_as(x)


class Mixture(Language):
    """A mixture of experts in every block."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.experts = nn.ModuleList(Experts() for _ in self.blocks)

    def through(self, x: Tensor) -> Tensor:
        for block, experts in zip(self.blocks, self.experts, strict=True):
            x = block(x)
            x = x + experts(x)
        return x


@_model("gpt, nonzero and index_add")
def _mixture() -> Subject:
    return Subject(Mixture(), lambda: _words(16))


class TokenDropping(Language):
    """The blocks in the middle see only tokens that a router keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((self.blocks[0], self.blocks[-1]))
        self.router = nn.Linear(WIDTH, 1)
        self.middle = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in "123"
        )

    def through(self, x: Tensor) -> Tensor:
        first, *_, last = self.blocks
        x = first(x)
        score = self.router(x).squeeze(-1)
        keep = score > score.median()
        kept = x[keep] * score[keep].sigmoid()[:, None]
        for each in self.middle:
            kept = kept + each(kept)
        x = x.masked_scatter(keep[..., None].expand_as(x), kept)
        return last(x)


@_model("gpt, tokens dropped")
def _token_dropping() -> Subject:
    return Subject(TokenDropping(), lambda: _words(16))


class PackedLstm(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        x = nn.utils.rnn.pack_padded_sequence(
            self.tokens(tokens), lengths.tolist(), batch_first=True, enforce_sorted=False
        )
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(x)[0], batch_first=True)
        logits = self.head(out)
        return F.cross_entropy(logits.flatten(0, 1), targets[:, : logits.shape[1]].flatten())


@_model("lstm, packed")
def _packed() -> Subject:
    return Subject(PackedLstm(), lambda: {**_words(16), "lengths": torch.randint(32, LENGTH, (16,))})


class BreakingRnn(nn.Module):
    """Reads until its state is large."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(32, 256), nn.Linear(256, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 256)
        for step in range(x.shape[0]):
            state = self.cell(x[step], state)
            if state.norm(dim=-1).mean() > 8.0:
                break
        return F.cross_entropy(self.head(state), labels)


@_model("rnn, loop that breaks")
def _breaking_rnn() -> Subject:
    return Subject(BreakingRnn(), lambda: {"x": torch.randn(10, 512, 32), "labels": torch.randint(4, (512,))})


# -- images ---------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, given: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList((nn.BatchNorm2d(width), nn.BatchNorm2d(width)))
        self.past = nn.Conv2d(given, width, 1, stride) if stride > 1 or given != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.past(x))


@torch.compiler.disable
def _whitened(x: Tensor) -> Tensor:
    """What nobody traces: its spectrum is flattened."""
    spectrum = torch.fft.rfft2(x)
    return torch.fft.irfft2(spectrum / (1 + 0.1 * spectrum.abs()), s=x.shape[-2:])


class Resnet(nn.Module):
    """A small one, with a function in its middle that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(Residual(3, 16), Residual(16, 16))
        self.high = nn.Sequential(Residual(16, 32, 2), Residual(32, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = _whitened(self.high(self.low(images)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _images(batch: int = 8, side: int = 32) -> dict[str, Any]:
    return {"images": torch.randn(batch, 3, side, side), "labels": torch.randint(10, (batch,))}


@_model("resnet, a disabled function")
def _resnet() -> Subject:
    return Subject(Resnet(), lambda: _images(16))


class LoggingUNet(nn.Module):
    """Down and up; tells a value of each level."""

    def __init__(self, given: int = 3, out: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList((Residual(given, 16), Residual(16, 32, 2), Residual(32, 48, 2)))
        self.up = nn.ModuleList((nn.ConvTranspose2d(48, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)))
        self.merge = nn.ModuleList((Residual(64, 32), Residual(32, 16)))
        self.head = nn.Conv2d(16, out, 1)
        self.seen: dict[int, float] = {}

    def told(self, level: int, x: Tensor) -> None:
        self.seen[level] = x.detach().std().item()

    def predict(self, x: Tensor) -> Tensor:
        across: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(x)
            self.told(level, x)
            across.append(x)
        for up, merge, other in zip(self.up, self.merge, reversed(across[:-1]), strict=True):
            x = merge(torch.cat((up(x), other), 1))
        return self.head(x)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.predict(images), labels)


@_model("unet, logging")
def _unet() -> Subject:
    return Subject(
        LoggingUNet(), lambda: {"images": torch.randn(4, 3, 32, 32), "labels": torch.randint(3, (4, 32, 32))}
    )


class Diffusion(LoggingUNet):
    """A U-Net that removes noise of a time that NumPy draws."""

    def __init__(self) -> None:
        super().__init__(given=4)

    def told(self, level: int, x: Tensor) -> None:
        """Nothing."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        time = torch.from_numpy(np.random.randint(1, 1000, images.shape[0])).float() / 1000
        kept, noise = (1 - time)[:, None, None, None], torch.randn_like(images)
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        return F.mse_loss(self.predict(torch.cat((noisy, kept.expand_as(images[:, :1])), 1)), noise)


@_model("diffusion, time by numpy")
def _diffusion() -> Subject:
    return Subject(Diffusion(), lambda: _images(4))


class Detector(nn.Module):
    """Two stages: boxes that score highest are cut out, image by image, and judged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Residual(3, 16), Residual(16, 32, 2), Residual(32, 32))
        self.proposals = nn.Conv2d(32, 5, 1)
        self.judge = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10))

    def boxes(self, scores: Tensor) -> Tensor:
        best = scores.detach().flatten().topk(24).indices
        places = torch.stack((best // scores.shape[1], best % scores.shape[1]), 1)
        kept: list[int] = []
        for index, place in enumerate(places.tolist()):
            if all(max(abs(place[0] - y), abs(place[1] - x)) > 1 for y, x in (places[each].tolist() for each in kept)):
                kept.append(index)
        return places[kept]

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.body(images)
        proposed = self.proposals(features)
        losses = [F.softplus(proposed[:, 0]).mean()]
        for index in range(images.shape[0]):
            places = self.boxes(proposed[index, 0])
            cut = [
                F.adaptive_avg_pool2d(features[index, :, max(y - 2, 0) : y + 3, max(x - 2, 0) : x + 3], 4)
                for y, x in places.tolist()
            ]
            logits = self.judge(torch.stack(cut))
            sizes = proposed[index, 1:, places[:, 0], places[:, 1]]
            losses += [F.cross_entropy(logits, labels[index].expand(len(cut))), sizes.square().mean()]
        return torch.stack(losses).sum()


@_model("detector of two stages")
def _detector() -> Subject:
    return Subject(Detector(), lambda: _images(4))


class Matching(nn.Module):
    """A set is predicted; NumPy matches it with the truth, which the loss is taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Residual(3, 16), Residual(16, WIDTH, 2))
        self.queries, self.blocks = nn.Embedding(16, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.kind, self.place = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 4)

    def matched(self, cost: np.ndarray[Any, Any]) -> list[int]:
        free, chosen = cost.copy(), [0] * cost.shape[1]
        for _ in range(cost.shape[1]):
            row, column = np.unravel_index(free.argmin(), free.shape)
            chosen[int(column)] = int(row)
            free[row], free[:, column] = np.inf, np.inf
        return chosen

    def forward(self, images: Tensor, kinds: Tensor, places: Tensor) -> Tensor:
        x = self.body(images).flatten(2).transpose(1, 2)
        count = self.queries.num_embeddings
        x = torch.cat((self.queries.weight.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            x = block(x)
        x = x[:, :count]
        logits, found = self.kind(x), self.place(x)
        losses: list[Tensor] = []
        for each in range(len(images)):
            cost = torch.cdist(found[each], places[each]) - logits[each].softmax(-1)[:, kinds[each]]
            rows = torch.tensor(self.matched(cost.detach().numpy()))
            losses.append(F.cross_entropy(logits[each][rows], kinds[each]) + F.l1_loss(found[each][rows], places[each]))
        return torch.stack(losses).mean()


@_model("detr, matched by numpy")
def _matching() -> Subject:
    return Subject(
        Matching(),
        lambda: {
            "images": torch.randn(4, 3, 32, 32), "kinds": torch.randint(10, (4, 5)), "places": torch.rand(4, 5, 4),
        },
    )  # fmt: skip


class Quantised(nn.Module):
    """A VQ-VAE that puts codes back which nobody uses."""

    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(Residual(3, 16), Residual(16, 32, 2))
        self.decode = nn.Sequential(Residual(32, 16), nn.ConvTranspose2d(16, 3, 2, 2))
        self.codes = nn.Parameter(torch.randn(32, 32))
        self.register_buffer("used", torch.ones(32))

    def forward(self, images: Tensor) -> Tensor:
        x = self.encode(images)
        flat = x.permute(0, 2, 3, 1).flatten(0, 2)
        chosen = torch.cdist(flat, self.codes).argmin(1)
        self.used.mul_(0.9).add_(torch.bincount(chosen, minlength=32), alpha=0.1)
        if self.used.min() < 0.5:
            _logger.debug("%d codes are not used", int((self.used < 0.5).sum()))
        codes = self.codes[chosen]
        commit = F.mse_loss(codes, flat.detach()) + F.mse_loss(flat, codes.detach())
        straight = (flat + (codes - flat).detach()).unflatten(0, (len(images), *x.shape[2:])).permute(0, 3, 1, 2)
        return F.mse_loss(self.decode(straight), images) + commit


@_model("vq-vae, codes counted")
def _quantised() -> Subject:
    return Subject(Quantised(), lambda: {"images": torch.randn(8, 3, 32, 32)})


class Queue(nn.Module):
    """Contrast against a queue of earlier keys, at a place that is read as a number."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Residual(3, 16), Residual(16, 32, 2), Residual(32, 32))
        self.head = nn.Linear(32, 32)
        self.register_buffer("queue", F.normalize(torch.randn(64, 32), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def embed(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.body(images).mean((2, 3))), dim=1)

    def forward(self, images: Tensor) -> Tensor:
        query = self.embed(images)
        with torch.no_grad():
            key = self.embed(images.flip(-1))
        near = (query * key).sum(1, keepdim=True)
        logits = torch.cat((near, query @ self.queue.clone().T), 1) / 0.2
        place = int(self.place)
        self.queue[place : place + len(key)] = key
        self.place[0] = (place + len(key)) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(images), dtype=torch.long))


@_model("moco, queue at int(place)")
def _queue() -> Subject:
    return Subject(Queue(), lambda: {"images": torch.randn(8, 3, 32, 32)})


class Spectral(nn.Module):
    """Weighs its loss by singular values that NumPy takes of detached features."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Sequential(Residual(3, 16), Residual(16, 32, 2)), Residual(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.low(images)
        values = np.linalg.svd(x.detach().mean((2, 3)).numpy(), compute_uv=False)
        x = self.high(x * float(values[0] / values.sum()))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@_model("resnet, svd by numpy")
def _spectral() -> Subject:
    return Subject(Spectral(), lambda: _images(16))


# -- speech, graphs, dynamics ---------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Convolutions over sound with noise of NumPy, and a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(1, 32, 10, 5), nn.GELU(), nn.Conv1d(32, WIDTH, 8, 4), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 4, 4)
        )
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 10)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        x = self.front(sound + torch.from_numpy(np.random.normal(0, 0.1, sound.shape).astype(np.float32)))
        x = x.transpose(1, 2)
        for block in self.blocks:
            scale = float(np.random.uniform(0.9, 1.1))
            x = block(x * scale)
        return F.cross_entropy(self.head(x.mean(1)), labels)


@_model("speech, noise by numpy")
def _noisy() -> Subject:
    return Subject(Noisy(), lambda: {"sound": torch.randn(8, 1, 8000), "labels": torch.randint(10, (8,))})


def _monotonic(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The best path along which letters follow each other, per utterance."""
    paths = np.zeros_like(scores)
    for each, (score, path) in enumerate(zip(scores, paths, strict=True)):
        letters, frames = score.shape
        best = np.full((letters, frames), -np.inf, dtype=np.float32)
        best[0] = np.cumsum(score[0])
        for frame in range(1, frames):
            before = np.concatenate(([-np.inf], best[:-1, frame - 1]))
            best[1:, frame] = np.maximum(best[1:, frame - 1], before[1:]) + score[1:, frame]
        letter = letters - 1
        for frame in reversed(range(frames)):
            paths[each, letter, frame] = 1
            if letter and frame and best[letter - 1, frame - 1] >= best[letter, frame - 1]:
                letter -= 1
        del path
    return paths


class Aligned(nn.Module):
    """Text and sound, aligned as VITS does."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.text = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.sound, self.encode = nn.Conv1d(40, WIDTH, 5, 1, 2), nn.ModuleList(Block() for _ in range(2))
        self.decode = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 40))

    def forward(self, tokens: Tensor, mel: Tensor) -> Tensor:
        text, latent = self.letters(tokens), self.sound(mel).transpose(1, 2)
        for block in self.text:
            text = block(text)
        for block in self.encode:
            latent = block(latent)
        scores = -torch.cdist(text, latent).detach()
        path = torch.from_numpy(_monotonic(scores.numpy()))
        told = path.transpose(1, 2) @ text
        return F.mse_loss(told, latent) + F.mse_loss(self.decode(latent), mel.transpose(1, 2))


@_model("vits, aligned by numpy")
def _aligned() -> Subject:
    return Subject(Aligned(), lambda: {"tokens": _tokens(length=24), "mel": torch.randn(BATCH, 40, 96)})


class GraphAttention(nn.Module):
    """A GAT: edges to itself are taken out and put in anew, and as many nodes as edges name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scores = nn.ModuleList(nn.Linear(2 * WIDTH, 1) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        itself = torch.arange(int(edges.max()) + 1)
        source, target = torch.cat((edges, torch.stack((itself, itself))), 1)
        for layer, scores in zip(self.layers, self.scores, strict=True):
            x = layer(x)
            given = x[source]
            weight = F.leaky_relu(scores(torch.cat((given, x[target]), 1)), 0.2).exp()
            total = x.new_zeros(len(x), 1).index_add(0, target, weight)
            x = F.elu(torch.zeros_like(x).index_add(0, target, given * (weight / total[target].clamp_min(1e-6))))
        return F.cross_entropy(self.head(x), labels)


def _graph() -> dict[str, Any]:
    edges = torch.randint(256, (2, 2048))
    return {"x": torch.randn(256, WIDTH), "edges": edges, "labels": torch.randint(4, (256,))}


@_model("gat, self loops")
def _graph_attention() -> Subject:
    return Subject(GraphAttention(), _graph)


class GraphConvolution(nn.Module):
    """A GCN that drops edges in every layer and scales by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            source, target = edges[:, torch.rand(edges.shape[1]) > 0.2]
            degree = x.new_ones(len(x)).index_add(0, target, x.new_ones(len(target)))
            scale = degree.rsqrt()
            message = layer(x)[source] * (scale[source] * scale[target])[:, None]
            x = F.relu(torch.zeros_like(x).index_add(0, target, message)) + x
        return F.cross_entropy(self.head(x), labels)


@_model("gcn, edges dropped")
def _graph_convolution() -> Subject:
    return Subject(GraphConvolution(), _graph)


class Adaptive(nn.Module):
    """A neural ODE by steps as long as their error allows."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        time, step = 0.0, 0.5
        while time < 1.0:
            step = min(step, 1.0 - time)
            slope = self.field(x)
            euler = x + step * slope
            heun = x + step / 2 * (slope + self.field(euler))
            if (heun - euler).detach().abs().max().item() > 0.2 and step > 0.1:
                step /= 2
                continue
            x, time = heun, time + step
        return F.cross_entropy(self.head(x), labels)


@_model("ode, adaptive steps")
def _adaptive() -> Subject:
    return Subject(Adaptive(), lambda: {"x": torch.randn(512, 32), "labels": torch.randint(4, (512,))})


class Tree(nn.Module):
    """A Tree-LSTM: levels as wide as the parents say."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.gates, self.head = nn.Linear(32, WIDTH), nn.Linear(2 * WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, leaves: Tensor, pairs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.leaf(leaves)
        cell = torch.zeros_like(hidden)
        for count in pairs.tolist():
            left, right = hidden[:, : 2 * count : 2], hidden[:, 1 : 2 * count : 2]
            i, f, o, g = self.gates(torch.cat((left, right), -1)).chunk(4, -1)
            joined = f.sigmoid() * (cell[:, : 2 * count : 2] + cell[:, 1 : 2 * count : 2]) + i.sigmoid() * g.tanh()
            cell = torch.cat((joined, cell[:, 2 * count :]), 1)
            hidden = torch.cat((o.sigmoid() * joined.tanh(), hidden[:, 2 * count :]), 1)
        return F.cross_entropy(self.head(hidden.mean(1)), labels)


def _trees() -> Iterator[dict[str, Any]]:
    while True:
        count, pairs = 32, list[int]()
        for _ in range(4):
            pairs.append(random.choice((count // 2, count // 2 - 1)))
            count -= pairs[-1]
        yield {"leaves": torch.randn(64, 32, 32), "pairs": torch.tensor(pairs), "labels": torch.randint(4, (64,))}


@_model("tree-lstm, tolist")
def _tree() -> Subject:
    return Subject(Tree(), lambda: next(_trees()))
