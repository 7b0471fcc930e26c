# SPDX-License-Identifier: Apache-2.0
"""Contrastive models by folder, packaged name or hub id, of open_clip's or transformers' making."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from visalign.rewards.weights.checkpoint_files import dtype_of, local_folder, read_tensors

from .delta import BASE, load_changes
from .encoder import ClipEncoder, ClipParts
from .open_clip_folder import CONFIG, check_end_token, load_open_clip, open_clip_place
from .published_layouts import CLIP_VIT_H_14, load_transformers_clip

TRANSFORMERS = "transformers:"
"""Before a hub id: read it with transformers, not with open_clip."""

HUB_FILES = ("*.json", "*.txt", "*.safetensors", "pytorch_model*.bin")


def load_clip(model: str | Path, *, device: str | torch.device = "cpu", precision: str = "fp32") -> ClipParts:
    """Load a contrastive model in evaluation mode, without gradients, from wherever it lies.

    Args:
        model: a folder of open_clip (`open_clip_folder` describes it) or of transformers (config.json of
            model_type "clip"); a name of the package's own models; "transformers:organisation/model"; or what
            else `load_open_clip` takes.
        device: where the towers go.
        precision: of the towers: "fp32", "bf16" or "fp16".

    Raises:
        ValueError: unknown precision.
        FileNotFoundError: a folder lacks a part.
        RewardError: unknown name, not on disk and not to be fetched, weights that do not fit, or a tokenizer
            that loses the end token.
    """
    dtype_of(precision)
    if str(model).startswith(TRANSFORMERS):
        folder = local_folder(str(model).removeprefix(TRANSFORMERS), HUB_FILES)
        return load_transformers_clip(folder, device=device, precision=precision)
    folder = Path(str(model).removeprefix("local-dir:"))
    if folder.is_dir() and not (folder / CONFIG).is_file() and (folder / "config.json").is_file():
        return load_transformers_clip(folder, device=device, precision=precision)
    found, preprocess, tokenizer = load_open_clip(model, device=device, precision=precision)
    place = open_clip_place(model)
    model_cfg = None
    if place is not None:
        model_cfg = json.loads((place / CONFIG).read_text(encoding="utf-8"))["model_cfg"]
    return ClipParts(
        encoder=ClipEncoder(found).eval(),
        preprocess=preprocess,
        tokenizer=tokenizer,
        end=check_end_token(found, tokenizer),
        place=place,
        model_cfg=model_cfg,
    )


def find_folder(model: str | Path) -> Path:
    """The folder of a model: one on this disk, a packaged name's, or the local copy of a hub id."""
    from visalign.data.assets import resolve_model

    place = resolve_model(model)
    if isinstance(place, Path):
        return place
    return local_folder(place.removeprefix(TRANSFORMERS), HUB_FILES)


def load_fine_tuned_clip(
    model: str | Path,
    *,
    subfolder: str = "",
    device: str | torch.device = "cpu",
    precision: str = "fp32",
) -> ClipParts:
    """Load a fine-tuned contrastive model: as `ClipParts.save` wrote it, or as ICTHP published it.

    Args:
        model: what `find_folder` takes, also with the changes to a base alone (`clip_changes`); or a bare
            `pytorch_model.bin` of a CLIP ViT-H/14.
        subfolder: looked into where the folder has it ("hp_backbone").
        device: where the towers go.
        precision: "fp32", "bf16" or "fp16".

    Returns:
        The parts. A published folder without config.json is read as CLIP ViT-H/14.

    Raises:
        FileNotFoundError: weights are missing.
        RewardError: unknown name, or weights that do not fit (each key named).
    """
    file = Path(model)
    if file.is_file():
        return load_transformers_clip(
            file.parent, state=read_tensors(file), config=CLIP_VIT_H_14, device=device, precision=precision
        )
    folder = find_folder(model)
    if subfolder and (folder / subfolder).is_dir():
        folder = folder / subfolder
    if (folder / BASE).is_file():
        again = partial(load_fine_tuned_clip, subfolder=subfolder, device=device, precision=precision)
        return load_changes(folder, load=again)
    if (folder / CONFIG).is_file():
        return load_clip(folder, device=device, precision=precision)
    return load_transformers_clip(folder, config=CLIP_VIT_H_14, device=device, precision=precision)
