# SPDX-License-Identifier: Apache-2.0
"""What judges on the vision-language engine share: finding the engine, requests of images and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from visalign.rewards.base.contract import Request, prompt_problem

from .template import Template

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def engine_of(model: Any, *, device: str | torch.device = "cpu", precision: str = "fp32") -> Any:
    """The vision-language engine that a judge was given, or that of a model folder.

    Args:
        model: a `rewards.vlm.VisionLanguageJudge`, which several judges may share; or a folder, hub id or
            packaged name.
        device: where a model that is loaded runs.
        precision: of its weights: "fp32", "bf16" or "fp16"; log-odds and scores are float32 always.

    Raises:
        ValueError: an unknown precision.
        RewardError: the model cannot be loaded.
    """
    if not isinstance(model, str | Path):
        return model
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; allowed are {', '.join(PRECISIONS)}.")
    from .engine import VisionLanguageJudge

    return VisionLanguageJudge.from_pretrained(model, device=device, dtype=PRECISIONS[precision])


def requests(
    request: Request, template: Template, reasons: list[str | None], fields: Mapping[str, str] | None = None
) -> tuple[list[int], list[Any]]:
    """One ask per image that can be judged; the others get a reason.

    Args:
        request: images and prompts.
        template: what is asked; a prompt without a visible character is refused where it asks for the prompt.
        reasons: per image, filled in place.
        fields: further names that the template fills.

    Returns:
        (their rows, the asks).
    """
    from .engine import Ask

    rows, asks = [], []
    for row, image in request.images.readable():
        if reasons[row] is not None:
            continue
        prompt = request.prompts[row]
        if "prompt" in template.fields and (reason := prompt_problem(prompt)):
            reasons[row] = reason
            continue
        rows.append(row)
        asks.append(Ask(images=[image], prompt=prompt, fields=dict(fields or {})))
    return rows, asks


def check_fields(template: Template, *, instruction: str = "") -> dict[str, str]:
    """The fields that a template's own names need.

    Args:
        template: that is asked.
        instruction: of the user, for the template's `{instruction}`.

    Raises:
        ValueError: an instruction for which the template has no place, or a {question} that nobody fills.
    """
    if "question" in template.fields:
        raise ValueError(
            f"The template {template.name!r} has {{question}}, which this judge does not fill; write the "
            "question itself into its text. Judges with several questions, such as vision_reward, fill it."
        )
    if instruction and "instruction" not in template.fields:
        raise ValueError(
            f"The template {template.name!r} has no place for an instruction; write {{instruction}} into its "
            "text."
        )
    if "instruction" not in template.fields:
        return {}
    return {"instruction": f"\n{instruction}" if instruction else ""}
