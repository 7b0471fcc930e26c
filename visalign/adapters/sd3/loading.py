# SPDX-License-Identifier: Apache-2.0
"""An SD3 pipeline from a folder or a hub name; what is wrong with a folder is said before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from visalign.adapters.model_folder import INDEX, pipeline_index
from visalign.errors import UserError

REQUIRED_PARTS = "transformer vae scheduler text_encoder text_encoder_2 tokenizer tokenizer_2".split()
"""Parts of an SD3 pipeline that nothing works without; T5 (text_encoder_3, tokenizer_3) may be absent."""
T5_PARTS = ("text_encoder_3", "tokenizer_3")


def load_sd3_pipeline(
    folder_or_id: str | Path, *, dtype: torch.dtype, use_t5: bool = True, **more: Any
) -> StableDiffusion3Pipeline:
    """Load an SD3 or SD3.5 pipeline on the CPU, without progress bars.

    Args:
        folder_or_id: a folder as `save_pretrained` writes it, or `owner/name` on the hub.
        dtype: of all weights.
        use_t5: False leaves the third text encoder out even where the model has one (9 GB less for SD3.5).
        **more: of diffusers' `from_pretrained`, such as quantization_config.
    """
    index, folder = pipeline_index(folder_or_id), Path(folder_or_id)
    class_name = index.get("_class_name")
    if class_name != StableDiffusion3Pipeline.__name__:  # a sibling would load with parts of other meaning
        raise UserError(
            f"{folder_or_id} is a {class_name}; the SD3 adapter loads a {StableDiffusion3Pipeline.__name__} "
            "(SD3, SD3.5). Choose such a model, or name the adapter that loads it (model.adapter)."
        )
    listed = {part for part in (*REQUIRED_PARTS, *T5_PARTS) if (index.get(part) or [None])[0] is not None}
    missing = [part for part in REQUIRED_PARTS if part not in listed]
    if folder.is_dir():
        missing += [part for part in sorted(listed) if not any((folder / part).glob("*"))]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}. An SD3 pipeline needs {', '.join(REQUIRED_PARTS)}; T5 "
            f"({', '.join(T5_PARTS)}) may be absent when {INDEX} lists it as [null, null]. Copy the missing "
            "folders, or save the pipeline again."
        )
    has_t5 = use_t5 and listed.issuperset(T5_PARTS)
    absent: dict[str, Any] = {} if has_t5 else dict.fromkeys(T5_PARTS)
    pipe = StableDiffusion3Pipeline.from_pretrained(str(folder_or_id), dtype=dtype, **absent, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check_parts(pipe: StableDiffusion3Pipeline) -> None:
    """Refuse a pipeline object that is no SD3 pipeline or lacks a part."""
    is_sd3 = isinstance(pipe, StableDiffusion3Pipeline)
    missing = [part for part in REQUIRED_PARTS if getattr(pipe, part, None) is None]
    if not is_sd3 or missing:
        raise UserError(
            f"The SD3 adapter got a "
            f"{type(pipe).__name__}{' without ' if missing else ''}{', '.join(missing)}; it needs a "
            f"diffusers StableDiffusion3Pipeline, of which only T5 ({', '.join(T5_PARTS)}) may be None. Load "
            "it with StableDiffusion3Pipeline.from_pretrained."
        )
