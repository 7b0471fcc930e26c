# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of a pipeline's call against what the pipeline supports."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from visalign.errors import UserError
from visalign.settings import MOST_COUNTED, MOST_PIXELS, refuse

from .condition import Source, image_of
from .families import FAMILIES, MEAN_VELOCITY, PIPELINES, REFUSED, Family

CUSTOM_ADAPTER = (
    "your own as 'package.module:Class' or 'path/to/file.py:Class' (model.adapter=...), a class with "
    "from_pretrained(folder_or_id, *, dtype, device, **options) whose objects are a "
    "visalign.interfaces.DiffusionPolicy; visalign.adapters.check_adapter(policy) tests it"
)


def known_family(kind: Any, what: str) -> Family:
    """Return the family of a pipeline's class name; `what` is the pipeline in the message."""
    if kind in PIPELINES:
        return FAMILIES[PIPELINES[kind]]
    supported = ", ".join(f"{pipeline} ({name})" for pipeline, name in PIPELINES.items())
    problem = REFUSED.get(kind, f"is of no family that is known: {supported}")
    raise UserError(
        f"{what} is a {kind}, which {problem}. Add a row to adapters/pipeline/families.py, or give {CUSTOM_ADAPTER}."
    )


def checked_guidance(pipe: Any, family: Family, guidance: float | None) -> float:
    """Return the guidance scale (None: the family's usual one) if the pipeline can be guided by it."""
    usual = family.off if family.usual is None else family.usual
    scale = usual if guidance is None else guidance
    config = getattr(pipe, family.networks[0]).config
    embeds = family.guidance != "embedded" or getattr(config, "guidance_embeds", True)
    guides = family.scale != "-" or pipe.components.get("guider") is not None
    is_distilled = pipe.config.get("is_distilled") or not embeds or not guides
    problems = {
        f"is guided by at least {family.off:g}, and {family.off:g} switches guidance off": (
            not family.off <= scale < math.inf
        ),
        MEAN_VELOCITY: getattr(config, "use_meanflow", False) or getattr(config, "flow_map", False),
        "is distilled: it takes no guidance. Leave model.guidance out": (
            is_distilled and guidance is not None and scale > family.off
        ),
    }
    refuse(
        f"This {type(pipe).__name__} {problem}; guidance is {guidance!r}."
        for problem, is_broken in problems.items()
        if is_broken
    )
    return float(family.off if is_distilled else scale)


def call_arguments(
    pipe: Any,
    family: Family,
    image_size: int | tuple[int, int] | None,
    num_frames: int | None,
    more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the arguments that every call gets, checked: size, frames and `more` of the user."""
    taken = list(inspect.signature(type(pipe).__call__).parameters)[1:]
    size = {} if image_size is None else _size(pipe, family, image_size)
    if size and "max_area" in taken:
        size["max_area"] = size["height"] * size["width"]
    if num_frames is not None:
        step = getattr(pipe, "vae_scale_factor_temporal", None)
        step = step or getattr(pipe, "vae_temporal_compression_ratio", 1)
        if family.frames is None or num_frames not in range(1, MOST_COUNTED, step):
            allowed = "images" if family.frames is None else f"1 + a multiple of {step} frames below {MOST_COUNTED}"
            raise UserError(f"num_frames is {num_frames}; {type(pipe).__name__} makes {allowed}.")
        size["num_frames"] = num_frames
    reserved = {*_RESERVED, *family.fixed, family.scale}
    allowed_names = [n for n in taken if n not in reserved and "prompt" not in n and not n.startswith("callback")]
    if refused := [name for name in more or () if name not in allowed_names]:
        raise UserError(
            f"call names {', '.join(refused)}, which {type(pipe).__name__} does not take, the policy sets itself, or "
            f"must be off in training; the call takes {', '.join(taken)}."
        )
    return {**size, **(more or {}), **family.fixed}


_RESERVED = (
    "latents generator output_type num_inference_steps return_dict height width num_frames image sigmas "
    "timesteps guidance_scale true_cfg_scale skip_guidance_layers cfg_truncation cfg_trunc_ratio"
).split()
"""Arguments of a call that the policy sets; guidance by the step's index, which a call of one step lacks."""


def _size(pipe: Any, family: Family, image_size: Any) -> dict[str, int]:
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    spatial = getattr(pipe, "vae_scale_factor_spatial", 8)
    unit = (getattr(pipe, "vae_scale_factor", None) or spatial) * family.unit
    pair = isinstance(sides, tuple | list) and len(sides) == 2 and all(isinstance(n, int) for n in sides)
    supported = [(height, width) for width, height in getattr(pipe, "resolutions", None) or ()]
    problem = ""
    if family.own_size:
        problem = f"{type(pipe).__name__} makes images of an area of its own. Leave image_size out"
    elif not pair or any(side not in range(unit, MOST_PIXELS + 1, unit) for side in sides):
        problem = f"this model makes multiples of {unit} pixels up to {MOST_PIXELS}, as one number or (height, width)"
    elif supported and tuple(sides) not in supported:
        problem = f"{type(pipe).__name__} makes these (height, width): {supported}"
    if problem:
        raise UserError(f"image_size is {image_size}; {problem}.")
    return {"height": sides[0], "width": sides[1]}


def checked_negative(pipe: Any, family: Family, negative_prompt: str | None) -> str | None:
    """Return the negative prompt (None: the family's own), if the call has a place for it."""
    if negative_prompt is None:
        return family.negative
    taken = inspect.signature(type(pipe).__call__).parameters
    if "negative_prompt" not in taken or family.guidance in ("embedded", "none"):
        raise UserError(
            f"negative_prompt is {negative_prompt!r}, and {type(pipe).__name__} is not guided by one. Leave it out."
        )
    return negative_prompt


def checked_source(pipe: Any, family: Family, source: Any, sized: bool) -> Source | None:
    """Return the images to edit, or None; without `sized` a source would decide the size of the result."""
    if source is None and family.source == "needed":
        raise UserError(
            f"{type(pipe).__name__} edits an image, and a record has no 'source'. Give each record one: a .jsonl file "
            "of {prompt, source}, source being an image file."
        )
    if source is None or family.source == "none":
        return None
    if not sized:
        raise UserError("An image is to be edited and a batch has one image_size. Set model.image_size.")
    images = list(source) if isinstance(source, list | tuple) else [source]
    if not images or (len(images) > 1 and not family.several):
        edits = f"{type(pipe).__name__} edits {'one or several' if family.several else 'one'}"
        raise UserError(f"The source of a record has {len(images)} images, and {edits}.")
    return Source(tuple(image_of(other) for other in images))
