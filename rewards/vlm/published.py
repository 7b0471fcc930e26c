# SPDX-License-Identifier: Apache-2.0
"""Prompts that published judges were trained with, word for word, in the folder `prompts`.

Sources:

- unified_reward_*: the scripts of `inference_qwen`, `UnifiedReward-Think`, `-Flex` and `-Edit` in
  github.com/CodeGoat24/UnifiedReward, MIT licence, copyright (c) 2025 Yibin Wang;
- edit_score_*: github.com/VectorSpaceLab/EditScore, Apache-2.0; UnifiedReward-Edit's with another layout;
- rational_rewards_*: the cards of TIGER-Lab/RationalRewards-8B-T2I and -Edit, Apache-2.0;
- hpsv3: the package hpsv3 1.0.0, MIT licence, copyright (c) 2024 HPSv3 Team;
- edit_reward_*: github.com/TIGER-AI-Lab/EditReward, MIT licence, copyright (c) 2025 TIGER Lab;
- video_align: github.com/KwaiVGI/VideoAlign, MIT licence, copyright (c) 2025 Kling Team, Kuaishou Technology;
- visual_quality_r1: github.com/TianheWu/VisualQuality-R1, Apache-2.0.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "prompts"


def published_prompt(name: str) -> str:
    """Read the prompt of a name; {prompt} replaces the caption, or the instruction of an edit."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")
