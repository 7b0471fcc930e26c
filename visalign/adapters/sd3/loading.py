# SPDX-License-Identifier: Apache-2.0
"""An SD3 pipeline from a folder or a hub name; what is wrong with a folder is said before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline

from visalign.adapters.model_folder import INDEX, pipeline_index
from visalign.errors import UserError

REQUIRED_PARTS = (
    "transformer",
    "vae",
    "scheduler",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
)
"""Parts of an SD3 pipeline that nothing works without; T5 (text_encoder_3, tokenizer_3) may be absent."""
T5_PARTS = ("text_encoder_3", "tokenizer_3")


def load_sd3_pipeline(
    folder_or_id: str | Path, *, dtype: torch.dtype, use_t5: bool = True, **more: Any
) -> StableDiffusion3Pipeline:
    """Load an SD3 or SD3.5 pipeline.

    Args:
        folder_or_id: a folder as `save_pretrained` writes it, or `owner/name` on the hub.
        dtype: of all weights.
        use_t5: False leaves the third text encoder out even where the model has one (9 GB less for SD3.5).
        **more: of diffusers' `from_pretrained`, such as quantization_config.

    Returns:
        The pipeline on the CPU, without progress bars.

    Raises:
        FileNotFoundError: if the folder, its index or one of its parts is missing.
        UserError: if it is another kind of pipeline.
    """
    index = pipeline_index(folder_or_id)
    _check_class(folder_or_id, index)
    if Path(folder_or_id).is_dir():
        _check_listed(Path(folder_or_id), index)
    has_t5 = use_t5 and all(_is_listed(index, part) for part in T5_PARTS)
    absent: dict[str, Any] = {} if has_t5 else dict.fromkeys(T5_PARTS)
    pipe = StableDiffusion3Pipeline.from_pretrained(str(folder_or_id), dtype=dtype, **absent, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check_parts(pipe: StableDiffusion3Pipeline) -> None:
    """Refuse a pipeline object that is no SD3 pipeline or lacks a part.

    Raises:
        UserError: naming the class or the missing parts.
    """
    if not isinstance(pipe, StableDiffusion3Pipeline):
        raise UserError(
            f"The SD3 adapter got a {type(pipe).__name__}; it needs a diffusers StableDiffusion3Pipeline. "
            "Load the model with StableDiffusion3Pipeline.from_pretrained."
        )
    missing = [part for part in REQUIRED_PARTS if getattr(pipe, part, None) is None]
    if missing:
        raise UserError(
            f"The pipeline has no {', '.join(missing)}; only T5 ({', '.join(T5_PARTS)}) may be None. "
            "Load the pipeline with these parts."
        )


def _check_listed(folder: Path, index: dict[str, Any]) -> None:
    """Every part that a local folder's index lists must exist."""
    listed_t5 = [part for part in T5_PARTS if _is_listed(index, part)]
    missing = [
        part for part in REQUIRED_PARTS if not _is_listed(index, part) or not _has_files(folder / part)
    ]
    missing += [part for part in listed_t5 if not _has_files(folder / part)]
    if missing:
        raise FileNotFoundError(
            f"The model folder {folder} lacks {', '.join(missing)}. An SD3 pipeline needs "
            f"{', '.join(REQUIRED_PARTS)}; T5 ({', '.join(T5_PARTS)}) may be absent when {INDEX} lists it as "
            "[null, null]. Copy the missing folders, or save the pipeline again."
        )


def _check_class(name: str | Path, index: dict[str, Any]) -> None:
    """Only SD3's pipeline class; a sibling would load with parts of other meaning."""
    class_name = index.get("_class_name")
    if class_name != StableDiffusion3Pipeline.__name__:
        raise UserError(
            f"{name} is a {class_name}; the SD3 adapter loads a {StableDiffusion3Pipeline.__name__} (SD3, "
            "SD3.5). Choose such a model, or name the adapter that loads it (model.adapter)."
        )


def _is_listed(index: dict[str, Any], part: str) -> bool:
    """Return True if the index names a class for this component."""
    entry = index.get(part)
    return isinstance(entry, list) and entry[0] is not None


def _has_files(folder: Path) -> bool:
    """Return True if the folder of a component exists and is not empty."""
    return folder.is_dir() and any(folder.iterdir())
