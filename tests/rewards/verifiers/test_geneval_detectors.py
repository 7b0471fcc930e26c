# SPDX-License-Identifier: Apache-2.0
"""GenEval's detectors of transformers: DETR, Mask2Former and OWLv2 with tiny random weights; bad folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from visalign.rewards import RewardError
from visalign.rewards.verifiers import geneval_detectors
from visalign.rewards.verifiers.geneval import GenEval
from visalign.rewards.verifiers.geneval_detectors import TransformersDetector, _mask_boxes

LIBRARY: Any = transformers
"""Its configurations take more than their signatures tell a type checker."""
CLASSES = {0: "cat", 1: "dog", 2: "motorbike"}
LABELS = {"id2label": CLASSES, "label2id": {name: number for number, name in CLASSES.items()}}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


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
        **LABELS,
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
        **LABELS,
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
            **SMALL,
            "max_position_embeddings": 32,
            "bos_token_id": len(vocabulary) - 2,
            "eos_token_id": len(vocabulary) - 1,
            "pad_token_id": 0,
        },
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    transformers.Owlv2ForObjectDetection(config).save_pretrained(folder)
    images: Any = transformers.Owlv2ImageProcessor(size={"height": 32, "width": 32})
    transformers.Owlv2Processor(images, tokenizer).save_pretrained(folder)
    return folder


CAT = {"class": "cat", "count": 1}
SIZES = [(40, 48), (40, 48), (56, 40)]
IMAGES = [torch.rand(3, *size, generator=torch.Generator().manual_seed(k)) for k, size in enumerate(SIZES)]
IMAGES = [image.mul(255).round() / 255 for image in IMAGES]


@pytest.mark.parametrize(
    ("save", "kind"), [(save_detr, "detection"), (save_mask2former, "segmentation"), (save_owlv2, "zero_shot")]
)
def test_detectors_of_transformers(save: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geneval_detectors, "MIN_SCORE", 0.001)
    detector = TransformersDetector(save(tmp_path / "model"))
    classes = [["cat", "dog"], ["cat", "motorcycle"], ["dog", "cat"]]
    detections = detector.detect(IMAGES, classes)
    assert detector._parts[2] == kind and [list(part) for part in detections] == classes
    total = 0
    for image, part in zip(IMAGES, detections, strict=True):
        for item in part.values():
            assert item.boxes.shape == (len(item.scores), 4)
            total += len(item.scores)
            if kind == "segmentation":
                assert item.masks is not None and item.masks.shape == (len(item.scores), *image.shape[1:])
                for box, mask in zip(item.boxes.long().tolist(), item.masks, strict=True):
                    assert bool(mask.any()) and int(mask[box[1] : box[3], box[0] : box[2]].sum()) == int(mask.sum())
    assert total > 0
    single = detector.detect(IMAGES[1:2], classes[1:2])[0]
    for name in classes[1]:
        torch.testing.assert_close(single[name].boxes, detections[1][name].boxes, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(single[name].scores, detections[1][name].scores, rtol=1e-5, atol=1e-6)
    assert (detector.problem("zebra") is None) == (kind == "zero_shot") and detector.problem("motorcycle") is None
    assert len(detector.fingerprint) == 32


def test_folders_that_hold_no_detector_are_refused(tmp_path: Path) -> None:
    record = [{"include": [CAT]}]
    image = torch.rand(1, 3, 8, 8)
    with pytest.raises(RewardError, match=r"the detector .*empty cannot be loaded"):
        GenEval(tmp_path / "empty").score(image, ["p"], record)
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(RewardError, match="its type 'bert' is neither a detector nor a segmenter"):
        GenEval(tmp_path / "bert").score(image, ["p"], record)
    folder = save_detr(tmp_path / "detr")
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop("class_labels_classifier.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardError, match=r"lacks weights: class_labels_classifier.weight"):
        GenEval(folder).score(image, ["p"], record)


def test_a_mask_that_vanished_is_no_object() -> None:
    masks = torch.zeros(2, 4, 6)
    masks[1, 1:3, 2:5] = 1
    info = [{"score": 0.9, "label_id": 0}, {"score": 0.8, "label_id": 1}]
    boxes, scores, labels, object_masks = _mask_boxes({"segmentation": masks, "segments_info": info}, (4, 6))
    assert boxes.tolist() == [[2.0, 1.0, 5.0, 3.0]] and labels.tolist() == [1]
    assert scores.tolist() == pytest.approx([0.8]) and object_masks is not None and len(object_masks) == 1
    none = _mask_boxes({"segmentation": masks[:1], "segments_info": info[:1]}, (4, 6))
    assert none[0].shape == (0, 4) and len(none[1]) == len(none[2]) == 0
