# SPDX-License-Identifier: Apache-2.0
"""Tiny members of a LoRA ensemble: judges on one random base, as the trainer saves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.model import HPSv3Model
from visalign.rewards.vlm.engine import VisionLanguageEngine

MEMBERS = 3
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"


def save_member(folder: Path, base: Path, seed: int, **changes: Any) -> Path:
    """A judge with random adapters, token and head, as the trainer saves it."""
    options = {"rank": 2, "targets": LANGUAGE, "template": None, "positions": None} | changes
    engine = VisionLanguageEngine.from_pretrained(base, positions=options["positions"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = RanknetHead(32, hidden=options.get("hidden", (8, 4)))
        model = HPSv3Model(engine, head, template=options["template"])
        model.add_token(torch.randn(32))
        lora = LoraConfig(r=options["rank"], lora_alpha=8, target_modules=options["targets"], init_lora_weights=False)
        model.backbone.add_adapter(lora)  # type: ignore[operator]
    model.save_pretrained(folder, base=os.path.relpath(base, folder))
    for file in (folder / "adapter_model.safetensors", folder / "reward_head.safetensors"):
        save_file({key: value.half() for key, value in load_file(file).items()}, file)
    return folder


def save_members(folder: Path) -> Path:
    """A base and three members m0, m1, m2, the last of another rank."""
    save_tiny_seeing_model(folder / "base")
    for seed in range(MEMBERS):
        save_member(folder / f"m{seed}", folder / "base", seed, rank=3 if seed == 2 else 2)
    return folder


def joined(root: Path, members: int = 2, **options: Any) -> LoraEnsembleReward:
    """The first members as one judge."""
    return LoraEnsembleReward.from_members([root / f"m{m}" for m in range(members)], **options)
