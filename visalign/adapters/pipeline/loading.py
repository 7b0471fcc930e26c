# SPDX-License-Identifier: Apache-2.0
"""Load a classic pipeline of diffusers from the files that a model has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from visalign.adapters.model_folder import INDEX, explain_damage
from visalign.adapters.offload import place
from visalign.adapters.prompt_cache import PromptCache, text_encoders
from visalign.adapters.single_file import ModelSource
from visalign.errors import UserError

from .guidance import silent
from .quantization import BY_SHAPES

UNUSED = {"safety_checker", "feature_extractor", "image_encoder"}  # Parts of pipelines that no family here needs


def load_pipeline(
    source: ModelSource,
    index: Mapping[str, Any],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device | str,
    *,
    variant: str | None = None,
    absent: Iterable[str] = (),
    offload: bool = False,
    prompt_cache: PromptCache | None = None,
    **quantized: Any,
) -> Any:
    """Load the parts that the index lists, from the single file or else the folder, but those `absent`.

    `dtypes` maps parts to dtypes ("default": all others); `quantized` comes from `quantization_of`. A whole
    `prompt_cache` replaces the text encoders.
    """
    if prompt_cache is not None and prompt_cache.frees and prompt_cache.is_whole:
        absent = [*absent, *text_encoders(index)]
    kind, folder = str(index["_class_name"]), Path(source.folder)
    listed = {name for name, entry in index.items() if isinstance(entry, list) and any(entry)} - {*absent}
    loader: Any = getattr(diffusers, kind)  # of the base class no part would be optional
    # diffusers wants to be told of a part that is absent, such as SD3's T5
    empty = {name for name in {*loader._get_signature_keys(loader)[0], *absent} if name not in listed}
    if nulls := sorted(name for name in empty & index.keys() if index[name] is None):
        raise UserError(f"{folder / INDEX} lists {', '.join(nulls)} as null. Write [null, null], as diffusers does.")
    lost = {name for name in listed if folder.is_dir() and not (folder / name).is_dir()}
    options: dict[str, Any] = dict.fromkeys(empty | ({"safety_checker"} & listed) | (UNUSED & lost))
    options |= {"variant": source.variant(variant), "trust_remote_code": False, **quantized}
    if not BY_SHAPES.get():
        described = {name: entry for name, entry in index.items() if name in listed}
        with silent():
            options |= source.parts(described, dtypes, **quantized)
    if missing := sorted(lost - options.keys()):
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}. Copy them, or list a part that may be absent, such as T5, as "
            "[null, null]."
        )
    with explain_damage(source.folder, kind):
        pipe = loader.from_pretrained(str(source.folder), dtype=dtypes, **options)  # fails on missing weights
    if prompt_cache is not None:
        prompt_cache.attach(pipe)
    return place(pipe, device, offload=offload)
