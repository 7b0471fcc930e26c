# SPDX-License-Identifier: Apache-2.0
"""Tiny random detectors in the formats of transformers, saved to a folder as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

LIBRARY: Any = transformers
"""Its configurations take more than their signatures tell a type checker."""
CLASSES = {0: "cat", 1: "dog", 2: "motorbike"}


def save_detr(folder: Path) -> Path:
    """A DETR with a ResNet backbone of a few channels."""
    torch.manual_seed(0)
    backbone = LIBRARY.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = LIBRARY.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=6,
        id2label=CLASSES,
        label2id={name: number for number, name in CLASSES.items()},
    )
    model = transformers.DetrForObjectDetection(config)
    with torch.no_grad():
        model.class_labels_classifier.weight.mul_(8)  # so that some queries are sure of something
    model.save_pretrained(folder)
    processor: Any = transformers.DetrImageProcessor(size={"shortest_edge": 48, "longest_edge": 64})
    processor.save_pretrained(folder)
    return folder


def save_mask2former(folder: Path) -> Path:
    """A Mask2Former with a tiny Swin."""
    torch.manual_seed(0)
    backbone = LIBRARY.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = LIBRARY.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=6,
        id2label=CLASSES,
        label2id={name: number for number, name in CLASSES.items()},
    )
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    with torch.no_grad():
        model.class_predictor.weight.mul_(20)
    model.save_pretrained(folder)
    processor: Any = transformers.Mask2FormerImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(folder)
    return folder


def save_owlv2(folder: Path) -> Path:
    """An OWLv2 with a byte tokenizer of CLIP's kind."""
    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    vocabulary = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(vocab={token: k for k, token in enumerate(vocabulary)}, merges=[])
    config = transformers.Owlv2Config(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "bos_token_id": len(vocabulary) - 2,
            "eos_token_id": len(vocabulary) - 1,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        },
        projection_dim=16,
    )
    transformers.Owlv2ForObjectDetection(config).save_pretrained(folder)
    images: Any = transformers.Owlv2ImageProcessor(size={"height": 32, "width": 32})
    transformers.Owlv2Processor(images, tokenizer).save_pretrained(folder)
    return folder
