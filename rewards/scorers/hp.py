# SPDX-License-Identifier: Apache-2.0
"""HP, "high preference": preference for an image regardless of its prompt.

Source: Ba et al., arXiv 2507.19002 (ICCV 2025); checkpoint 8y/HP: a fine-tuned CLIP ViT-H/14 in
    `hp_backbone/pytorch_model.bin` and the head in `hp_scorer/mlp_pytorch_model.bin`. The head takes the
    projected embedding, not normalised, and has no nonlinearity, so it is one affine map in evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.atomic import umask_permissions
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.clip.encoder import ClipEncoder
from visalign.rewards.clip.loading import find_folder, load_fine_tuned_clip, save_changes
from visalign.rewards.clip.towers import ClipHeadJudge
from visalign.rewards.weights.affine_head import AffineHead
from visalign.rewards.weights.checkpoint_files import read_tensors
from visalign.rewards.weights.fingerprints import WeightPrint, weight_state

HEAD = "hp_head.safetensors"
"""File of the head in a folder that `Hp.save` wrote."""
PUBLISHED_HEAD = "hp_scorer/mlp_pytorch_model.bin"
BACKBONE = "hp_backbone"
"""Subfolder of the published towers."""


class HpModel(nn.Module):
    """Trainable network: the image tower and the layered head on its projected embedding."""

    def __init__(self, encoder: ClipEncoder, head: AffineHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, pixels: Tensor) -> Tensor:
        """[N] float32 HP scores of pixels [N, 3, h, w] as `ClipTowers.pixels` gives them."""
        return self.head(self.encoder.encode_image(pixels))


class Hp(ClipHeadJudge):
    """Output r of the HP head, float32, the scale of its training margins; prompts are ignored.

    ICTHP's evaluation script prints σ(r) instead; `IctHp(mode="upstream")` uses that.

    Args:
        model: a folder that `save` wrote, a packaged name, the folder of 8y/HP, or its hub id.
    """

    name = "hp"
    unit = "HP score"
    range = (-math.inf, math.inf)

    def __init__(self, model: str | Path = "shapes-hp", *, device: str | torch.device = "cpu", **towers: Any) -> None:
        self._model = model
        self._head: AffineHead | None = None
        self._collapsed: tuple[int, nn.Linear] | None = None
        super().__init__(
            model,
            device=device,
            load=lambda precision: load_fine_tuned_clip(model, subfolder=BACKBONE, device=device, precision=precision),
            **towers,
        )

    @classmethod
    def untrained(cls, model: str | Path = "shapes-clip", widths: Sequence[int] | None = None, **options: Any) -> Hp:
        """Create a reward to train: the towers of a contrastive model and a new head.

        `widths` are the output widths of the head's five layers, the last 1; the published ones when None.
        The head's weights come from torch's global generator.
        """
        reward = cls(model, **options)
        towers = reward.towers
        with torch.no_grad():
            width = towers.encoder.encode_image(towers.pixels([torch.zeros(3, 8, 8)])).shape[1]
        head = AffineHead(width) if widths is None else AffineHead(width, widths=widths)
        reward._head = head.to(towers.encoder.device).eval()
        reward._head_print = WeightPrint(reward._head, None)
        return reward

    @property
    def head(self) -> AffineHead:
        """Layered head, on the tower's device."""
        if self._head is None:
            folder = find_folder(self._model)
            where = next((file for name in (HEAD, PUBLISHED_HEAD) if (file := folder / name).is_file()), None)
            if where is None:
                raise FileNotFoundError(
                    f"The folder {folder} lacks the HP head {HEAD} or {PUBLISHED_HEAD}. Give the whole folder."
                )
            with torch.inference_mode(False):
                head = AffineHead.from_state_dict(read_tensors(where), str(where))
            self._head = head.requires_grad_(False).to(self.towers.encoder.device)
            self._head_print = WeightPrint(self._head, fingerprint(where))
        return self._head

    @property
    def module(self) -> HpModel:
        """Network for a trainer; it shares this reward's weights."""
        return HpModel(self.towers.encoder, self.head)

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float16, *, base: str | None = None) -> None:
        """Save towers (as `dtype`), config, tokenizer and head (float32) for `Hp`.

        With `base` (packaged name, hub id, or folder relative to `folder`), the model that the towers were
        trained from, only the tensors that differ from it are written.
        """
        from safetensors.torch import save_file

        parts = self.towers.parts
        if base is None:
            parts.save(folder, dtype)
        else:
            save_changes(folder, parts, base, subfolder=BACKBONE, dtype=dtype)
        file = Path(folder) / HEAD
        save_file({key: value.cpu().contiguous() for key, value in self.head.state_dict().items()}, file)
        umask_permissions(file)

    def rate(self, features: Tensor) -> Tensor:
        """Score embeddings [n, D] by the head as one affine map, which is cached until a layer changes."""
        state = weight_state(self.head)
        if self._collapsed is None or self._collapsed[0] != state:
            with torch.inference_mode(False):
                self._collapsed = (state, self.head.collapse().cpu())
        return self._collapsed[1](features).squeeze(-1)

    @property
    def identity(self) -> Identity:
        _ = self.head
        return self.towers.identity(self.name, head=str(self._head_print))


class Artefact(Hp):
    """Probability that an image is free of artefacts, by a small head on a CLIP tower; prompts are ignored.

    A regulariser next to a reward that can be hacked. `visalign train-reward model.kind=artefact objective.task=bce`
    trains it on rated images, 1 for an artefact and 5 for none.

    Hong et al., "Understanding Reward Hacking in Text-to-Image Reinforcement Learning", arXiv 2601.03468.

    Args:
        model: a folder that train-reward wrote.
    """

    name = "artefact"
    unit = "probability of no artefact"
    range = (0.0, 1.0)

    def __init__(self, model: str | Path, *, device: str | torch.device = "cpu", **towers: Any) -> None:
        super().__init__(model, device=device, **towers)

    def rate(self, features: Tensor) -> Tensor:
        return super().rate(features).sigmoid()
