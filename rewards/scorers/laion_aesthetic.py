# SPDX-License-Identifier: Apache-2.0
"""LAION aesthetic predictor: a head, trained on ratings, on the embedding of OpenAI's CLIP ViT-L/14.

Source: Schuhmann, christophschuhmann/improved-aesthetic-predictor (`sac+logos+ava1-l14-linearMSE.pth`,
    `ava+logos-l14-linearMSE.pth`, `ava+logos-l14-reluMSE.pth`), and LAION-AI/aesthetic-predictor
    (`sa_0_4_vit_l_14_linear.pth`, one linear layer). The embedding must be normalised first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.clip.loading import TRANSFORMERS
from visalign.rewards.clip.towers import ClipHeadJudge
from visalign.rewards.weights.affine_head import AffineHead
from visalign.rewards.weights.checkpoint_files import read_tensors
from visalign.rewards.weights.hub import is_hub_id, local_folder

PUBLISHED = TRANSFORMERS + "openai/clip-vit-large-patch14"
PUBLISHED_HEAD = "sac+logos+ava1-l14-linearMSE.pth"

Head = Callable[[Tensor], Tensor]
"""[N, D] normalised embeddings -> [N] ratings, float32."""


class LaionAesthetic(ClipHeadJudge):
    """Predicted mean rating of an image on 1 to 10, float32, unbounded; prompts are ignored.

    Args:
        model: see `load_clip`: clip-vit-large-patch14 as a folder, its weight file or its hub id, or
            "ViT-L-14:openai" of open_clip.
        head: the .pth file, or a folder or hub id that holds `PUBLISHED_HEAD`.
        preprocess: replaces entries of the preprocessing.
    """

    name = "laion_aesthetic"
    unit = "rating 1-10"
    range = (-math.inf, math.inf)

    def __init__(
        self,
        model: str | Path = PUBLISHED,
        *,
        head: str | Path = PUBLISHED_HEAD,
        device: str | torch.device = "cpu",
        preprocess: Mapping[str, Any] | None = None,
        **towers: Any,
    ) -> None:
        self._head_source = head
        self._head: tuple[int, Head] | None = None
        # Both repositories use OpenAI's transform, which crops as torchvision does.
        crop = {"crop_rounding": "nearest", **(preprocess or {})}
        super().__init__(model, device=device, preprocess=crop, **towers)

    @cached_property
    def head_file(self) -> Path:
        path = Path(self._head_source)
        if path.is_dir() or (not path.is_file() and is_hub_id(path) and path.suffix != ".pth"):
            return local_folder(path, (PUBLISHED_HEAD,)) / PUBLISHED_HEAD
        return path

    def rate(self, features: Tensor) -> Tensor:
        """Rate embeddings [n, D], which the head takes normalised."""
        if self._head is None:
            self._head = read_head(self.head_file)
        width, head = self._head
        if features.shape[1] != width:
            raise RewardError(
                f"The head {self.head_file.name} takes embeddings of {width} numbers, the tower "
                f"{self.towers.source!r} gives {features.shape[1]}; the heads *-l14-* and *_vit_l_14_* "
                "belong to CLIP ViT-L/14 of OpenAI."
            )
        return head(F.normalize(features, dim=-1))

    @property
    def identity(self) -> Identity:
        return self.towers.identity(self.name, head=fingerprint(self.head_file), file=self.head_file.name)


def read_head(file: str | Path) -> tuple[int, Head]:
    """Read a published head: (width of the embedding, map from normalised embeddings [N, D] to ratings [N]).

    It has five layers without or with ReLU between them (`layers.{0,2,4,6,7}.*`, `layers.{0,3,6,9,11}.*`), or
    one linear layer (`weight` and `bias`).
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no aesthetic head {str(file)!r}. Give {PUBLISHED_HEAD} of improved-aesthetic-predictor."
        )
    state = read_tensors(file)
    if set(state) == {"weight", "bias"}:
        weight, bias = state["weight"].float(), state["bias"].float()
        if weight.shape[:-1] != (1,) or bias.shape != (1,):
            raise RewardError(f"{file} is no linear head: weight must have shape (1, D) and bias (1,).")
        return weight.shape[1], lambda embedding: F.linear(embedding, weight, bias).squeeze(-1)
    layers = AffineHead.from_state_dict(state, str(file)).requires_grad_(False)
    width = int(layers.layers[0].in_features)  # type: ignore[arg-type]  # the first layer is linear
    if layers.activation == "relu":
        return width, layers
    affine_map = layers.collapse()
    return width, lambda embedding: affine_map(embedding).squeeze(-1)
