# SPDX-License-Identifier: Apache-2.0
"""What a build of the packaged models can be told, and the machine that it ran on."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Length of each stage."""

    autoencoder_steps: int = 3300
    autoencoder_batch: int = 16
    generator_steps: int = 5000
    generator_batch: int = 192
    clip_steps: int = 1000
    clip_batch: int = 192
    language_steps: int = 1200
    language_batch: int = 128
    language_per_task: int = 15
    """Held-out problems of each kind that the language model's card is measured on."""
    judge_vision_steps: int = 900
    judge_steps: int = 1800
    judge_batch: int = 48
    judge_check: int = 1000
    """Held-out pictures and pairs that the vision-language model's card is measured on."""
    heie_pictures: int = 3000
    heie_steps: int = 800
    heie_check: int = 600
    """Held-out pictures that the heatmap heads' card is measured on."""
    seed: int = 1


def machine() -> str:
    """Processor and library versions, for the cards."""
    threads = torch.get_num_threads()
    number = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{number} of {platform.machine()}, torch {torch.__version__.split('+')[0]}"
