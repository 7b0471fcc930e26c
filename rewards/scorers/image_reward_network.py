# SPDX-License-Identifier: Apache-2.0
"""ImageReward's network built from transformers' BLIP classes, and its published keys mapped to theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.affine_head import AffineHead
from visalign.rewards.weights.checkpoint_files import load_strict

RENAMED = (
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (
        r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.",
        r"vision.encoder.layers.\1.self_attn.projection.",
    ),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.", "head."),
)
"""Published key -> ours; a key that none of them matches is kept, and then refused by name."""

UNUSED = (
    "blip.text_encoder.embeddings.position_ids",
    "blip.vision_proj.weight",
    "blip.vision_proj.bias",
    "blip.text_proj.weight",
    "blip.text_proj.bias",
)
"""May be in the file, but no score reads them: BLIP's contrastive projections, and the numbers 0-511."""

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
"""med_config.json of BLIP: BERT-base with cross-attention in each layer and two added tokens."""

HEAD_WIDTH = 64
"""Numbers per attention head in ViT-B and ViT-L."""


class ImageRewardModel(nn.Module):
    """BLIP's image tower, its text tower that looks at the picture, and the head on [CLS]."""

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
        """Patch features [N, 1 + P, D] of normalised pixels [N, 3, h, w]."""
        return self.vision(pixel_values=pixels).last_hidden_state

    def forward(self, patches: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Raw scores [N] float32 of patches [N, 1 + P, D] and token ids [N, L], "[CLS]" first, with a mask
        that is 0 for padding.
        """
        seen = self.text(
            input_ids=tokens,
            attention_mask=mask,
            encoder_hidden_states=patches,
            is_decoder=False,
        )
        return self.head(seen.last_hidden_state[:, 0].float())


def build(
    state: Mapping[str, Tensor],
    where: str,
    *,
    med_config: Path | None = None,
    vision_heads: int | None = None,
) -> ImageRewardModel:
    """The network of a published state dict, its sizes read off the weights.

    Args:
        state: ImageReward.pt.
        where: its path, for messages.
        med_config: BLIP's med_config.json; BERT-base when None.
        vision_heads: attention heads of the image tower; width / 64 when None.

    Returns:
        The network in evaluation mode, float32, without gradients.

    Raises:
        RewardError: names each missing, unexpected or ill-shaped key.
    """
    from transformers.initialization import no_init_weights

    renamed = {rename(key): value for key, value in state.items() if key not in UNUSED}
    vision = _vision_settings(renamed, where, vision_heads)
    text = _text_settings(med_config)
    places = sorted(int(key.split(".")[2]) for key in renamed if re.match(r"head\.layers\.\d+\.bias$", key))
    widths = [renamed[f"head.layers.{place}.bias"].shape[0] for place in places]
    if places != [0, 2, 4, 6, 7]:
        raise RewardError(
            f"{where}: the head has layers {places}, needed are mlp.layers.0, 2, 4, 6 and 7 with weight and "
            "bias."
        )
    with no_init_weights():
        model = ImageRewardModel(vision, text, widths)
    load_strict(model, renamed, where)
    return model.eval().requires_grad_(False)


def rename(key: str) -> str:
    """Our name of a published key; the key itself where there is none."""
    for pattern, ours in RENAMED:
        found, count = re.subn(pattern, ours, key)
        if count:
            return found
    return key


def _vision_settings(state: Mapping[str, Tensor], where: str, heads: int | None) -> dict[str, Any]:
    needed = [
        "vision.embeddings.position_embedding",
        "vision.embeddings.patch_embedding.weight",
        "vision.encoder.layers.0.mlp.fc1.weight",
    ]
    missing = [key for key in needed if key not in state]
    if missing:
        raise RewardError(
            f"{where} is no ImageReward checkpoint: missing (by transformers' names) {', '.join(missing)}."
        )
    positions, width = state[needed[0]].shape[1:]
    patch = state[needed[1]].shape[-1]
    layers = {key.split(".")[3] for key in state if key.startswith("vision.encoder.layers.")}
    return {
        "hidden_size": width,
        "intermediate_size": state[needed[2]].shape[0],
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads or max(1, width // HEAD_WIDTH),
        "image_size": round((positions - 1) ** 0.5) * patch,
        "patch_size": patch,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
    }


def _text_settings(file: Path | None) -> dict[str, Any]:
    if file is None:
        return dict(MED_CONFIG)
    said = json.loads(file.read_text(encoding="utf-8"))
    return {key: said.get(key, default) for key, default in MED_CONFIG.items()}
