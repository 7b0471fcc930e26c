# SPDX-License-Identifier: Apache-2.0
"""ImageReward: BLIP with cross-attention from prompt to image; a head on [CLS] gives the score.

The network is built from transformers' BLIP classes, and published keys are renamed to theirs.

Source: Xu et al., arXiv 2304.05977 (NeurIPS 2023); checkpoint THUDM/ImageReward: ImageReward.pt and
    med_config.json. The raw score is standardised with the published constants, so its unit is one standard
    deviation over ImageReward's training set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.interfaces import Metadata, Scores
from visalign.model_files import read_object
from visalign.rewards.base.contract import (
    RewardError,
    check_counts,
    make_scores,
    prompt_problem,
    read_request,
    scatter,
)
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.clip.published_layouts import OPENAI_MEAN, OPENAI_STD
from visalign.rewards.weights.affine_head import AffineHead, standardise
from visalign.rewards.weights.checkpoint_files import dtype_of, load_strict, precision_on, read_tensors
from visalign.rewards.weights.feature_cache import FeatureCache, encode_once, image_key, text_key
from visalign.rewards.weights.hub import local_folder
from visalign.rewards.weights.resize import batch_levels, fitting_images, model_pixels, normalised

WEIGHTS = "ImageReward.pt"
CONFIG = "med_config.json"
MAX_TOKENS = 35
"""Prompt length of the published model in tokens, [CLS] and [SEP] included."""
TOKENIZER = "google-bert/bert-base-uncased"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json")


RENAMED = (
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.", "head."),
)
"""Published key -> ours; other keys are kept, and then refused by name."""

UNUSED = (
    "blip.text_encoder.embeddings.position_ids",
    "blip.vision_proj.weight",
    "blip.vision_proj.bias",
    "blip.text_proj.weight",
    "blip.text_proj.bias",
)
"""Keys of the file that no score needs: BLIP's contrastive projections, and the numbers 0-511."""

MED_CONFIG: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "vocab_size": 30524,
}
"""BLIP's med_config.json: BERT-base with cross-attention in each layer and two added tokens."""

HEAD_WIDTH = 64
"""Width of an attention head in ViT-B and ViT-L."""


class ImageReward:
    """(r − 0.16717) / 1.03334 with the head's raw output r, float32; roughly −2 to 2.

    The image tower runs once per image, whatever the number of its prompts. A truncated prompt gets a note
    in `text` and 1 in the part "cut"; special tokens in a prompt are read as plain text.

    Args:
        model: ImageReward.pt, its folder with med_config.json, or its hub id.
        tokenizer: folder or hub id of BERT's uncased tokenizer; the model's folder if it holds one, else
            google-bert/bert-base-uncased.
        max_tokens: length to which prompts are truncated; the model was trained with 35.
        vision_heads: attention heads of the image tower; width / 64 when None.
        precision: of the towers, as of `ClipTowers`; the head is always float32.
        batch_size: images, or (image, prompt) pairs, in one forward pass.
        cache_bytes: cache size for patch features (0.8 MB an image); 0 for no cache.
    """

    name = "image_reward"
    unit = "standard deviations"
    range = (-math.inf, math.inf)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path = "THUDM/ImageReward",
        *,
        tokenizer: str | Path | None = None,
        max_tokens: int = MAX_TOKENS,
        vision_heads: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        batch_size: int = 16,
        cache_bytes: int = 256 << 20,
    ) -> None:
        check_counts(self.name, batch_size=batch_size, max_tokens=max_tokens)
        precision = precision_on(device, precision)
        dtype_of(precision, "image_reward: ")
        self.source, self.precision, self.device = str(model), precision, torch.device(device)
        self.max_tokens, self.batch_size = max_tokens, batch_size
        self._tokenizer_source, self._vision_heads = tokenizer, vision_heads
        self._patches = FeatureCache(cache_bytes)

    @cached_property
    def file(self) -> Path:
        if Path(self.source).is_file():
            return Path(self.source)
        return local_folder(self.source, (WEIGHTS, CONFIG, *_TOKENIZER_FILES)) / WEIGHTS

    @cached_property
    def model(self) -> ImageRewardModel:
        """Network; the towers in the chosen precision, the head in float32."""
        file = self.file.parent / CONFIG
        med = read_object(file) if file.is_file() else {}
        model = build(read_tensors(self.file), str(self.file), med_config=med, vision_heads=self._vision_heads)
        towers: tuple[Any, ...] = (model.vision, model.text)
        for tower in towers:
            tower.to(dtype_of(self.precision))
        return model.to(self.device)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        folder = self.file.parent
        in_folder = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
        source = self._tokenizer_source or (folder if in_folder else TOKENIZER)
        return AutoTokenizer.from_pretrained(local_folder(source, _TOKENIZER_FILES), trust_remote_code=False)

    @cached_property
    def preprocess(self) -> dict[str, Any]:
        """Resize of the shorter edge by PIL's bicubic, centre crop, CLIP's mean and std."""
        config: Any = self.model.vision.config
        norm = {"mean": OPENAI_MEAN, "std": OPENAI_STD}
        return {"size": int(config.image_size), **norm, "interpolation": "bicubic", "resize_mode": "shortest"}

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score each (image, prompt), with the raw output among the parts; metadata is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        tokens, mask, notes = self._tokens(request.prompts)
        reasons = [
            reason or prompt_problem(prompt)
            for reason, prompt in zip(request.images.reasons, request.prompts, strict=True)
        ]
        rows, readable_images = fitting_images(request, reasons, self.preprocess)
        raw = self._raw(readable_images, [request.prompts[row] for row in rows], tokens[rows], mask[rows])
        raw = scatter(raw, rows, len(request))
        parts = {"raw": raw, "cut": torch.tensor([float(bool(note)) for note in notes])}
        return make_scores(standardise(raw), reasons, self.unit, parts=parts, text=notes)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [B] float32 of images [B, 3, H, W] in [0, 1], differentiable in the pixels."""
        tokens, mask, _ = self._tokens(prompts)
        patches = self.model.encode_image(self._normalised(model_pixels(images, self.preprocess)))
        return standardise(self.model(patches, tokens.to(self.device), mask.to(self.device)))

    @torch.no_grad()
    def _raw(self, images: list[Tensor], prompts: list[str], tokens: Tensor, mask: Tensor) -> Tensor:
        if not images:
            return torch.zeros(0)
        image_keys = [image_key(image) for image in images]

        def encode(positions: list[int]) -> Tensor:
            levels = batch_levels([images[i] for i in positions], self.preprocess, self.device)
            return self.model.encode_image(self._normalised(levels / 255)).cpu()

        def score(positions: list[int]) -> Tensor:
            patches = encode_once(
                [image_keys[i] for i in positions],
                lambda chunk: encode([positions[j] for j in chunk]),
                cache=self._patches,
                batch_size=self.batch_size,
            )
            text = (tokens[positions].to(self.device), mask[positions].to(self.device))
            return self.model(patches.to(self.device), *text).cpu()

        pair_keys = [key + text_key(prompt) for key, prompt in zip(image_keys, prompts, strict=True)]
        # Pairs of one image are neighbours, so that a small cache is enough.
        order = sorted(range(len(pair_keys)), key=lambda i: pair_keys[i])
        raw = torch.empty(len(pair_keys))
        raw[order] = encode_once(
            [pair_keys[i] for i in order],
            lambda chunk: score([order[i] for i in chunk]),
            cache=FeatureCache(0),
            batch_size=self.batch_size,
        )
        return raw

    def _tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor, list[str]]:
        """Ids and mask [N, max_tokens], and a note where a prompt was truncated."""
        texts = ["" if prompt_problem(prompt) else prompt for prompt in prompts]
        if not texts:
            empty = torch.zeros(0, self.max_tokens, dtype=torch.long)
            return empty, empty, []
        options = {"split_special_tokens": True, "truncation": True}  # "[SEP]" in a prompt is text
        cut = self.tokenizer(texts, padding="max_length", max_length=self.max_tokens, return_tensors="pt", **options)
        longer = self.tokenizer(texts, max_length=self.max_tokens + 1, **options)["input_ids"]
        note = f"the prompt was cut to {self.max_tokens} tokens"
        notes = [note if len(ids) > self.max_tokens else "" for ids in longer]
        return cut["input_ids"], cut["attention_mask"], notes

    def _normalised(self, pixels: Tensor) -> Tensor:
        return normalised(pixels.to(self.device), self.preprocess).to(dtype_of(self.precision))

    @property
    def identity(self) -> Identity:
        return Identity(
            judge=self.name,
            model=self.source,
            weights=fingerprint(self.file),
            preprocessing=self.preprocess,
            dtype=self.precision,
            options={
                "max_tokens": self.max_tokens,
                "tokenizer": self._tokenizer_source,
                "vision_heads": self._vision_heads,
            },
        )


class ImageRewardModel(nn.Module):
    """BLIP's image tower, its text tower with cross-attention, and the head on [CLS]."""

    def __init__(self, vision: Mapping[str, Any], text: Mapping[str, Any], widths: list[int]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        self.vision = BlipVisionModel(BlipVisionConfig(**vision))
        # is_decoder builds the cross-attention; the call below keeps the attention bidirectional.
        settings = BlipTextConfig(**text, encoder_hidden_size=vision["hidden_size"], is_decoder=True)
        self.text = BlipTextModel(settings, add_pooling_layer=False)
        self.head = AffineHead(int(text["hidden_size"]), widths=widths)

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Compute patch features [N, 1 + P, D] of normalised pixels [N, 3, h, w]."""
        return self.vision(pixel_values=pixels).last_hidden_state

    def forward(self, patches: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Raw scores [N] float32 of patches [N, 1 + P, D], token ids [N, L] ("[CLS]" first) and mask."""
        output = self.text(input_ids=tokens, attention_mask=mask, encoder_hidden_states=patches, is_decoder=False)
        return self.head(output.last_hidden_state[:, 0].float())


def build(
    state: Mapping[str, Tensor], where: str, *, med_config: Mapping[str, Any], vision_heads: int | None = None
) -> ImageRewardModel:
    """Build the network of a published state dict, in evaluation mode, with sizes from the weights.

    `where` is its path, for messages; `med_config` replaces numbers of BERT-base; `vision_heads` of the
    image tower are width / 64 when None.
    """
    from transformers.initialization import no_init_weights

    renamed = {rename(key): value for key, value in state.items() if key not in UNUSED}
    vision = _vision_settings(renamed, where, vision_heads)
    text = {key: med_config.get(key, default) for key, default in MED_CONFIG.items()}
    layers = sorted(int(key.split(".")[2]) for key in renamed if re.match(r"head\.layers\.\d+\.bias$", key))
    widths = [renamed[f"head.layers.{layer}.bias"].shape[0] for layer in layers]
    if layers != [0, 2, 4, 6, 7]:
        raise RewardError(f"{where}: the head has layers {layers}, needed are mlp.layers.0, 2, 4, 6 and 7.")
    with no_init_weights():
        model = ImageRewardModel(vision, text, widths)
    load_strict(model, renamed, where)
    return model.eval().requires_grad_(False)


def rename(key: str) -> str:
    """Translate a published key; other keys are returned unchanged."""
    for pattern, ours in RENAMED:
        renamed, count = re.subn(pattern, ours, key)
        if count:
            return renamed
    return key


def _vision_settings(state: Mapping[str, Tensor], where: str, heads: int | None) -> dict[str, Any]:
    try:
        positions, width = state["vision.embeddings.position_embedding"].shape[1:]
        patch = state["vision.embeddings.patch_embedding.weight"].shape[-1]
        intermediate = state["vision.encoder.layers.0.mlp.fc1.weight"].shape[0]
    except KeyError as error:
        raise RewardError(f"{where} is no ImageReward checkpoint: missing (by our names) {error}.") from error
    layers = {key.split(".")[3] for key in state if key.startswith("vision.encoder.layers.")}
    return {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads or max(1, width // HEAD_WIDTH),
        "image_size": round((positions - 1) ** 0.5) * patch,
        "patch_size": patch,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    }
