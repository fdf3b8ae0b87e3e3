"""Classes of Hugging Face for images, sound, and images with text: class, configuration, settings and batch.

Sizes as in :mod:`suite.text`, images of 64 pixels a side, sound of a second. The masks that Wav2Vec2 draws with NumPy
(SpecAugment) are off, as ``layerdrop`` is: no program fixed in advance can hold them.
"""

from __future__ import annotations

from typing import Any

from suite.batches import (
    CLASSES,
    LENGTH,
    SIDE,
    VOCABULARY,
    captions,
    images,
    mel_words,
    paired,
    prefixed,
    segmented,
    sounds,
    spectrograms,
    waves,
)
from suite.text import ENCODER, Entry

__all__ = ["SENSES"]

_LABELLED = {"num_labels": CLASSES, "problem_type": "single_label_classification"}
_BLOCKS = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
_IMAGE = {**_LABELLED, "image_size": SIDE}
_PATCHES = {**_IMAGE, **_BLOCKS, "patch_size": 8}
_VISION = {**_BLOCKS, "image_size": SIDE, "patch_size": 8}
_WAVE = {
    **_BLOCKS, "vocab_size": 32, "conv_dim": (64, 64, 64, 64), "conv_kernel": (10, 3, 3, 3), "pad_token_id": 0,
    "conv_stride": (5, 4, 4, 2), "num_feat_extract_layers": 4, "num_conv_pos_embeddings": 16, "layerdrop": 0.0,
    "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "classifier_proj_size": 64,
}  # fmt: skip
_TWO_TOWERS: dict[str, Any] = {
    "text_config": {**ENCODER, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    "vision_config": _VISION,
}

SENSES: dict[str, Entry] = {
    "ViTForImageClassification": ("ViTConfig", _PATCHES, images),
    "DeiTForImageClassification": ("DeiTConfig", _PATCHES, images),
    "BeitForImageClassification": ("BeitConfig", _PATCHES, images),
    "Dinov2ForImageClassification": ("Dinov2Config", _PATCHES, images),
    "SwinForImageClassification": ("SwinConfig", {
        **_IMAGE, "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}, images),
    "ConvNextForImageClassification": ("ConvNextConfig", {
        **_IMAGE, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "num_stages": 3, "drop_path_rate": 0.1}, images),
    "ResNetForImageClassification": ("ResNetConfig", {
        **_LABELLED, "embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2]}, images),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {**_IMAGE, "depth_multiplier": 0.35}, images),
    "SegformerForSemanticSegmentation": ("SegformerConfig", {
        "num_labels": CLASSES, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128], "decoder_hidden_size": 64},
        segmented),
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", _WAVE, waves),
    "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", {**_WAVE, **_LABELLED}, sounds),
    "ASTForAudioClassification": ("ASTConfig", {
        **_LABELLED, **_BLOCKS, "max_length": 128, "num_mel_bins": 64}, spectrograms),
    "WhisperForConditionalGeneration": ("WhisperConfig", {
        "vocab_size": VOCABULARY, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512,
        "max_source_positions": 128, "max_target_positions": 64, "use_cache": False, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}, mel_words),
    "CLIPModel": ("CLIPConfig", {**_TWO_TOWERS, "projection_dim": 64}, paired),
    "SiglipModel": ("SiglipConfig", _TWO_TOWERS, paired),
    "GitForCausalLM": ("GitConfig", {
        **ENCODER, "vision_config": _VISION, "max_position_embeddings": LENGTH, "use_cache": False, "bos_token_id": 0,
        "eos_token_id": 2}, captions),
    "LlavaForConditionalGeneration": ("LlavaConfig", {
        "vision_config": {**_VISION, "model_type": "clip_vision_model"}, "image_token_index": 3, "image_token_id": 3,
        "text_config": {**ENCODER, "model_type": "llama", "num_key_value_heads": 2, "use_cache": False},
        "vision_feature_layer": -1}, prefixed),
}  # fmt: skip
