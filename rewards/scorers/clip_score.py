# SPDX-License-Identifier: Apache-2.0
"""CLIP score: the cosine between an image's and its prompt's embedding, through open_clip or transformers.

Source: Radford et al., arXiv 2103.00020; as a metric Hessel et al., "CLIPScore", arXiv 2104.08718 (whose
    score is 2.5·max(cos, 0)). Here it is the plain cosine; `units` has the scales of the peers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from visalign.rewards.clip.towers import ClipJudge


class ClipScore(ClipJudge):
    """Cosine of image and prompt, float32; equal images and prompts are encoded once."""

    name = "clip_score"

    def __init__(
        self, model: str | Path = "shapes-clip", *, device: str | torch.device = "cpu", **towers: Any
    ) -> None:
        super().__init__(model, device=device, **towers)
