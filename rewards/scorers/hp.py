# SPDX-License-Identifier: Apache-2.0
"""HP, "high preference": how much an image is preferred for itself, from the image alone.

Source: Ba et al., arXiv 2507.19002 (ICCV 2025); checkpoint 8y/HP: a fine-tuned CLIP ViT-H/14 in
    `hp_backbone/pytorch_model.bin` and the head in `hp_scorer/mlp_pytorch_model.bin`. The head takes the
    projected embedding, not normalised, and has no nonlinearity, so it is one affine map in evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from visalign.atomic import umask_permissions
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.clip.encoder import ClipEncoder
from visalign.rewards.clip.loading import find_folder, load_fine_tuned_clip, save_changes
from visalign.rewards.clip.towers import ClipJudge
from visalign.rewards.weights.affine_head import AffineHead
from visalign.rewards.weights.checkpoint_files import read_tensors
from visalign.rewards.weights.fingerprints import WeightPrint, weight_state

from .units import INFINITE

HEAD = "hp_head.safetensors"
"""The head in a folder that `Hp.save` wrote."""
PUBLISHED_HEAD = "hp_scorer/mlp_pytorch_model.bin"
BACKBONE = "hp_backbone"
"""Subfolder of the published towers."""


class HpModel(nn.Module):
    """The network that is trained: the image tower and the layered head on its projected embedding."""

    def __init__(self, encoder: ClipEncoder, head: AffineHead) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, pixels: Tensor) -> Tensor:
        """[N] float32 HP scores of pixels [N, 3, h, w] as `ClipTowers.pixels` gives them."""
        return self.head(self.encoder.encode_image(pixels))


class Hp(ClipJudge):
    """The head's output r, float32: what the margins of its training are on; prompts are not looked at.

    ICTHP's evaluation script prints σ(r) instead; `IctHp(mode="upstream")` uses that.
    """

    name = "hp"
    unit = "HP score"
    range = INFINITE

    def __init__(
        self,
        model: str | Path = "shapes-hp",
        *,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        **towers: Any,
    ) -> None:
        """Note the model, which is loaded at the first score.

        Args:
            model: a folder that `save` wrote, a packaged name, the folder of 8y/HP, or its hub id.
            device: where the tower runs.
            precision: of the tower: "fp32", "bf16" or "fp16"; the head is float32 always.
            **towers: of `ClipJudge`.
        """
        self._model = model
        self._head: AffineHead | None = None
        self._collapsed: tuple[int, nn.Linear] | None = None
        super().__init__(
            model,
            device=device,
            precision=precision,
            load=lambda: load_fine_tuned_clip(model, subfolder=BACKBONE, device=device, precision=precision),
            **towers,
        )

    @classmethod
    def from_pretrained(cls, model: str | Path, **options: Any) -> Self:
        """The judge of that folder or name, loaded at once, which shows a broken folder here."""
        judge = super().from_pretrained(model, **options)
        _ = judge.head
        return judge

    @classmethod
    def untrained(
        cls, model: str | Path = "shapes-clip", widths: Sequence[int] | None = None, **options: Any
    ) -> Hp:
        """A judge to be trained: the towers of any contrastive model and a new head.

        Args:
            model: what `load_fine_tuned_clip` takes.
            widths: output widths of the head's five layers, the last 1; the published ones when None.
            **options: as in the constructor. The head's weights come from torch's global generator.
        """
        judge = cls(model, **options)
        towers = judge.towers
        with torch.no_grad():
            width = towers.encoder.encode_image(towers.pixels([torch.zeros(3, 8, 8)])).shape[1]
        head = AffineHead(width) if widths is None else AffineHead(width, widths=widths)
        judge._head = head.to(towers.encoder.device).eval()
        judge._head_print = WeightPrint(judge._head, None)
        return judge

    @property
    def head(self) -> AffineHead:
        """The layered head, on the tower's device."""
        if self._head is None:
            try:
                with torch.inference_mode(False):
                    state, where = _read_head(self._model)
                    head = AffineHead.from_state_dict(state)
            except ValueError as error:
                raise RewardError(f"{where}: {error}") from error
            self._head = head.requires_grad_(False).to(self.towers.encoder.device)
            self._head_print = WeightPrint(self._head, fingerprint(where))
        return self._head

    @property
    def module(self) -> HpModel:
        """The network for a trainer; it holds the judge's own weights."""
        return HpModel(self.towers.encoder, self.head)

    def save(
        self, folder: str | Path, dtype: torch.dtype = torch.float16, *, base: str | None = None
    ) -> None:
        """Write towers, config, tokenizer and head (float32), which `from_pretrained` reads again. `dtype` is
        that of the towers' weights on disk; with `base` (packaged name, hub id, or folder relative to
        `folder`), from which they were trained, only what differs of them is written.
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

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score each image; prompts and metadata are not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, features = self.towers.image_features(request, reasons)
        values = self._one_map()(features).squeeze(-1) if rows else features
        return make_scores(scatter(values, rows, len(request)), reasons, self.unit)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str] | None = None) -> Tensor:
        """[B] float32 scores of images [B, 3, H, W] in [0, 1], differentiable in the pixels."""
        features = self.towers.image_features_with_gradient(images)
        return self._one_map().to(features.device)(features).squeeze(-1)

    def _one_map(self) -> nn.Linear:
        """The head as one affine map on the CPU, multiplied out anew when a layer changed."""
        seen = weight_state(self.head)
        if self._collapsed is None or self._collapsed[0] != seen:
            with torch.inference_mode(False):
                self._collapsed = (seen, self.head.collapse())
        return self._collapsed[1].cpu()

    @property
    def identity(self) -> Identity:
        """What the numbers depend on."""
        _ = self.head
        return self.towers.identity(self.name, head=str(self._head_print))


def _read_head(model: str | Path) -> tuple[dict[str, Tensor], Path]:
    """The head's published keys, and the file they came from."""
    folder = find_folder(model)
    for name in (HEAD, PUBLISHED_HEAD):
        if (folder / name).is_file():
            return read_tensors(folder / name), folder / name
    raise FileNotFoundError(
        f"The folder {folder} lacks the HP head; needed is {HEAD} or {PUBLISHED_HEAD}. Give the whole folder "
        "of 8y/HP, or one that Hp.save wrote."
    )
