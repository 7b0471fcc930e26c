# SPDX-License-Identifier: Apache-2.0
"""CLIP score: the cosine between an image's and its prompt's embedding, through open_clip or transformers.

Source: Radford et al., arXiv 2103.00020; as a metric Hessel et al., "CLIPScore", arXiv 2104.08718 (whose
    score is 2.5·max(cos, 0)). Here it is the plain cosine.
"""

from __future__ import annotations

from visalign.rewards.clip.towers import ClipJudge


class ClipScore(ClipJudge):
    """Cosine of image and prompt, float32; equal images and prompts are encoded once."""

    name = "clip_score"
