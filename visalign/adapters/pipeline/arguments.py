# SPDX-License-Identifier: Apache-2.0
"""What a pipeline is asked for, checked against what it can do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from diffusers.guiders import ClassifierFreeGuidance

from visalign.errors import UserError

from .families import FAMILIES, PIPELINES, Family


def known_family(kind: Any, what: str) -> Family:
    """The family of a pipeline's class.

    Args:
        kind: name of the class.
        what: which is so, for the message.

    Raises:
        UserError: no family has it.
    """
    if kind not in PIPELINES:
        known = ", ".join(f"{pipeline} ({name})" for pipeline, name in PIPELINES.items())
        raise UserError(
            f"{what} is a {kind}, of no family that is known: {known}. Add a row to "
            "visalign/adapters/pipeline/families.py, or name your own adapter (model.adapter=file.py:Class)."
        )
    return FAMILIES[PIPELINES[kind]]


def checked_guidance(pipe: Any, family: Family, guidance: float | None) -> float:
    """The scale, if the pipeline can be guided by it; a guider that begins at a step's index is
    exchanged, for one-step calls have no index.

    Args:
        pipe: the pipeline.
        family: its family.
        guidance: as asked for; None is the usual one.

    Raises:
        UserError: out of range, or the model is distilled.
    """
    usual = family.off if family.usual is None else family.usual
    scale = usual if guidance is None else float(guidance)
    if not math.isfinite(scale) or scale < family.off:
        raise UserError(
            f"guidance is {guidance}; it must be at least {family.off:g}, and {family.off:g} switches "
            "guidance off."
        )
    network = getattr(pipe, family.networks[0])
    embeds = family.guidance != "embedded" or getattr(network.config, "guidance_embeds", True)
    if pipe.config.get("is_distilled") or not embeds:
        if guidance is not None and scale > family.off:
            raise UserError(
                f"This {type(pipe).__name__} is distilled: it takes no guidance, and guidance is {guidance}. "
                "Leave model.guidance out."
            )
        return family.off
    if family.scale == "-" and pipe.components.get("guider") is not None:
        pipe.guider = pipe.ocr_guider = ClassifierFreeGuidance(guidance_scale=scale)
    return scale


def call_arguments(
    pipe: Any,
    family: Family,
    image_size: int | tuple[int, int] | None,
    num_frames: int | None,
    more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Arguments that every call gets.

    Args:
        pipe: the pipeline.
        family: its family.
        image_size: in pixels, a square's side or (height, width); None is the pipeline's own.
        num_frames: of a video; None is the pipeline's own.
        more: the user's.

    Raises:
        UserError: a size that the patches do not divide, frames of a picture, an unknown argument.
    """
    size: dict[str, int] = {}
    if image_size is not None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        size = {"height": height, "width": width}
        spatial = getattr(pipe, "vae_scale_factor_spatial", 8)
        unit = (getattr(pipe, "vae_scale_factor", None) or spatial) * family.unit
        if any(side < unit or side % unit for side in (height, width)):
            raise UserError(
                f"image_size is {image_size}; this model makes multiples of {unit} pixels, height and width "
                "alike or apart (one number or a pair)."
            )
        if "max_area" in inspect.signature(type(pipe).__call__).parameters:
            size["max_area"] = height * width
    if num_frames is not None:
        if family.frames is None:
            raise UserError(f"num_frames is {num_frames}, and {type(pipe).__name__} makes pictures.")
        size["num_frames"] = num_frames
    taken = list(inspect.signature(type(pipe).__call__).parameters)[1:]
    unknown = sorted(set(more or ()) - set(taken))
    if unknown:
        raise UserError(
            f"The call of {type(pipe).__name__} takes no {', '.join(unknown)}. It takes {', '.join(taken)}."
        )
    return {**size, **(more or {}), **family.fixed}
