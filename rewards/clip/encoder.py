# SPDX-License-Identifier: Apache-2.0
"""Contrastive models behind one face: open_clip's and transformers' towers, and what belongs to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import fingerprint

from .open_clip_folder import save_open_clip


class ClipEncoder(nn.Module):
    """The two towers of a contrastive model, whichever library built it.

    Batch normalisation keeps its stored statistics also in training mode, so that an embedding never depends
    on its neighbours.
    """

    _no_split_modules = ("ResidualAttentionBlock",)  # open_clip's; transformers names its own

    def __init__(self, model: nn.Module) -> None:
        """Wrap an `open_clip.CLIP`, a `CustomTextCLIP`, or a `transformers.CLIPModel`."""
        super().__init__()
        self.model = model
        self.is_open_clip = hasattr(model, "encode_image")

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Compute projected embeddings [N, D] float32, not normalised, of normalised pixels [N, 3, H, W]."""
        pixels = pixels.to(self.device, self.dtype)
        model: Any = self.model
        if self.is_open_clip:
            return model.encode_image(pixels).float()
        return model.get_image_features(pixel_values=pixels).pooler_output.float()

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Compute projected embeddings [N, D] float32, not normalised, of token ids [N, L]."""
        tokens = tokens.to(self.device)
        model: Any = self.model
        if self.is_open_clip:
            return model.encode_text(tokens).float()
        return model.get_text_features(input_ids=tokens).pooler_output.float()

    @property
    def logit_scale(self) -> Tensor:
        """ln of the factor on the cosine, as the checkpoint holds it (a scalar parameter)."""
        scale: Any = self.model.logit_scale
        return scale

    @property
    def device(self) -> torch.device:
        return self.logit_scale.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the image tower's weights."""
        model: Any = self.model
        tower = model.visual if self.is_open_clip else model.vision_model
        # open_clip keeps embeddings and norms in float32 where it lowers the precision; not the patches.
        return next(p.dtype for p in tower.parameters() if p.ndim == 4)

    def train(self, mode: bool = True) -> ClipEncoder:
        """Set the training mode of all but batch normalisation."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self


@dataclass(frozen=True, kw_only=True)
class ClipParts:
    """A loaded contrastive model with all that stands between a user's input and its towers."""

    encoder: ClipEncoder
    preprocess: Mapping[str, Any]
    """size, mean, std, interpolation, resize_mode; and how the crop's odd pixel falls (`crop_rounding`)."""
    tokenizer: Callable[..., Tensor]  # Texts (and `context_length`) -> token ids [N, L], cut before the end token
    end: int | None  # Id of the token that the text tower pools at; None where it pools elsewhere
    folder: Path | None  # Folder of the weights, or None where open_clip keeps them itself
    model_cfg: Mapping[str, Any] | None = None  # open_clip's model_cfg, or None for transformers
    base: str = ""  # Fingerprint of the other weights, where `folder` holds only those that differ from them

    @property
    def weights(self) -> str:
        """Fingerprint of the weight files; "" where open_clip keeps them itself."""
        digest = "" if self.folder is None else fingerprint(self.folder)
        return f"{self.base}+{digest}" if self.base else digest

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config, weights and tokenizer into a folder that `load_clip` reads again."""
        model: Any = self.encoder.model
        tokenizer: Any = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        if self.encoder.is_open_clip:
            if self.model_cfg is None:
                raise RewardError("This open_clip model came by an architecture's name; load it from a folder.")
            options = {"preprocess_cfg": self.preprocess, "dtype": dtype}
            save_open_clip(folder, model, self.model_cfg, tokenizer, **options)
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(str(folder))
        processor = {
            "size": {"shortest_edge": self.preprocess["size"]},
            "crop_size": self.preprocess["size"],
            "image_mean": list(self.preprocess["mean"]),
            "image_std": list(self.preprocess["std"]),
            "resample": 3 if self.preprocess["interpolation"] == "bicubic" else 2,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n", "utf-8")
