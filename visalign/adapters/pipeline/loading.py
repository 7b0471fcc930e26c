# SPDX-License-Identifier: Apache-2.0
"""A pipeline from its folder or the hub: each part in its dtype, networks rounded while they are read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from visalign.adapters.model_folder import pipeline_index
from visalign.errors import UserError

from .arguments import known_family
from .modular import load_modular
from .quantization import quantization_of


def load_pipeline(
    folder_or_id: str | Path,
    *,
    dtype: torch.dtype,
    encoder_dtype: torch.dtype | None = None,
    decoder_dtype: torch.dtype | None = None,
    quantization: str | None = None,
    adapters: bool = False,
    without: Collection[str] = (),
) -> Any:
    """Load a pipeline of a known family, classic or modular; arguments as of
    `PipelinePolicy.from_pretrained`.

    Args:
        folder_or_id: a folder as `save_pretrained` writes it, or `owner/name`.
        dtype: of the parts without a dtype of their own.
        encoder_dtype: of the encoders of texts and images.
        decoder_dtype: of the autoencoder.
        quantization: of the networks.
        adapters: whether a LoRA is trained.
        without: parts of a modular one that are not loaded.
    """
    index = pipeline_index(folder_or_id)
    family = known_family(index.get("_class_name"), str(folder_or_id))
    quantized = quantization_of(quantization, family.present(index), dtype, adapters=adapters)
    dtypes = {"default": dtype}
    if encoder_dtype is not None:
        encoders = ("text_encoder", "image_encoder", "prompt_upsampler")
        dtypes |= {part: encoder_dtype for part in index if part.startswith(encoders)}
    if decoder_dtype is not None and "vae" in index:
        dtypes["vae"] = decoder_dtype
    if without and not family.modular:
        raise UserError(f"without is {without!r}, and a {index['_class_name']} is loaded whole. Leave without out.")
    # diffusers wants to be told of a part that is absent, such as SD3's T5
    bare = [part for part, entry in index.items() if isinstance(entry, list) and entry and not any(entry)]
    absent = dict.fromkeys([*bare, *({"safety_checker"} & index.keys())])
    try:
        if family.modular:
            return load_modular(folder_or_id, dtypes, without=without, **quantized)
        return DiffusionPipeline.from_pretrained(str(folder_or_id), dtype=dtypes, **absent, **quantized)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{folder_or_id} cannot be loaded as {index.get('_class_name')}: "
            f"{str(error).splitlines()[0]} Copy the missing folders, or save the pipeline again."
        ) from error
