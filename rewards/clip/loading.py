# SPDX-License-Identifier: Apache-2.0
"""Contrastive models by folder, packaged name or hub id, of open_clip's or transformers' making.

A fine-tuned one may be kept as what differs from its base. The folder then holds `clip_base.json`, {"base":
packaged name, hub id, or folder or file relative to this one, "changed": number of tensors}, and
`clip_changes.safetensors`, tensors under their names in the base's state dict. Tokenizer, sizes and
preprocessing are the base's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.model_files import read_object
from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import dtype_of, listed, read_tensors
from visalign.rewards.weights.hub import META, TRANSFORMERS_FILES, is_hub_id, local_folder
from visalign.vision.window import check_window

from .encoder import ClipEncoder, ClipParts
from .open_clip_folder import CONFIG, WEIGHTS, check_end_token, load_open_clip, open_clip_place
from .published_layouts import CLIP_VIT_H_14, load_transformers_clip

TRANSFORMERS = "transformers:"
"""Before a hub id: read it with transformers, not with open_clip."""

BASE = "clip_base.json"
CHANGES = "clip_changes.safetensors"

HUB_FILES = (*TRANSFORMERS_FILES, "mlp_pytorch_model.bin", CHANGES, "hp_head.safetensors", WEIGHTS)
"""Of transformers' models, of ICTHP's two parts, and of what is written here."""
OPEN_CLIP_FILES = (CONFIG, WEIGHTS, "open_clip_pytorch_model.bin", "*token*.json", "vocab.*", "merges.txt")
"""Of open_clip's models."""


def load_clip(model: str | Path, *, device: str | torch.device = "cpu", precision: str = "fp32") -> ClipParts:
    """Load a contrastive model in evaluation mode, without gradients, from wherever it lies.

    Args:
        model: a folder of open_clip (`open_clip_folder` describes it) or of transformers (config.json of model_type
            "clip"), or the weight file of the latter (without a config.json beside it CLIP ViT-H/14's); a name of the
            package's own models; a hub id "organisation/model", which is read as what it holds, open_clip's files
            first, or after "transformers:" as that alone; or what else `load_open_clip` takes.
        device: where the towers go; "meta": shapes alone, no weight is read or fetched.
        precision: of the towers: "fp32", "bf16" or "fp16".
    """
    dtype_of(precision)
    if Path(model).is_file():
        state, folder = _tensors(model, device), Path(model).parent
        return load_transformers_clip(folder, state=state, config=CLIP_VIT_H_14, device=device, precision=precision)
    if str(model).startswith(TRANSFORMERS):
        folder = local_folder(str(model).removeprefix(TRANSFORMERS), HUB_FILES, device)
        return load_transformers_clip(folder, device=device, precision=precision)
    folder = Path(str(model).removeprefix("local-dir:"))
    if not folder.is_dir() and is_hub_id(model):
        is_open_clip = (local_folder(model, (CONFIG,)) / CONFIG).is_file()
        folder = model = local_folder(model, OPEN_CLIP_FILES if is_open_clip else HUB_FILES, device)
    if folder.is_dir() and not (folder / CONFIG).is_file() and (folder / "config.json").is_file():
        return load_transformers_clip(folder, device=device, precision=precision)
    network, preprocess, tokenizer = load_open_clip(model, device=device, precision=precision)
    source = open_clip_place(model)
    model_cfg = None
    if source is not None:
        config = read_object(source / CONFIG)
        model_cfg, ours = config["model_cfg"], config.get("preprocess_cfg") or {}
        preprocess |= {"window": ours["window"]} if "window" in ours else {}
        check_window(preprocess.get("window", 0))
    return ClipParts(
        encoder=ClipEncoder(network).eval(),
        preprocess=preprocess,
        tokenizer=tokenizer,
        end=check_end_token(network, tokenizer),
        folder=source,
        model_cfg=model_cfg,
    )


def find_folder(model: str | Path, device: str | torch.device | None = None) -> Path:
    """Find the folder of a model: on disk, packaged, or a hub id's local copy (no weights for `META`)."""
    from visalign.data.assets import resolve_model

    folder = resolve_model(model)
    if isinstance(folder, Path):
        return folder
    return local_folder(folder.removeprefix(TRANSFORMERS), HUB_FILES, device)


def load_fine_tuned_clip(
    model: str | Path, *, subfolder: str = "", device: str | torch.device = "cpu", precision: str = "fp32"
) -> ClipParts:
    """Load a fine-tuned contrastive model.

    As `ClipParts.save` or `save_changes` wrote it, or as ICTHP published it, a bare `pytorch_model.bin` of a
    CLIP ViT-H/14 included. `subfolder` is looked into where the folder has it ("hp_backbone"); one without
    config.json is read as CLIP ViT-H/14, and its texts by open_clip's tokenizer, as ICTHP's evaluation does.
    """
    file = Path(model)
    icthp: dict[str, Any] = {"config": CLIP_VIT_H_14, "tokenizer": "open_clip"}
    if file.is_file():
        state = _tensors(file, device)
        return load_transformers_clip(file.parent, state=state, device=device, precision=precision, **icthp)
    folder = find_folder(model, device)
    if subfolder and (folder / subfolder).is_dir():
        folder = folder / subfolder
    if (folder / BASE).is_file():
        return _load_changes(folder, subfolder=subfolder, device=device, precision=precision)
    if (folder / CONFIG).is_file():
        return load_clip(folder, device=device, precision=precision)
    return load_transformers_clip(folder, device=device, precision=precision, **icthp)


def save_changes(folder: str | Path, parts: ClipParts, base: str, *, subfolder: str = "", dtype: torch.dtype) -> None:
    """Write a fine-tuned model as its base and the tensors that differ from it, a fraction of its size.

    `base` is a packaged name, a hub id, or a path relative to `folder`; `dtype` is that of the weights on disk.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    before = load_fine_tuned_clip(_place(folder, base), subfolder=subfolder).encoder.model.state_dict()
    after = parts.encoder.model.state_dict()
    wrong = sorted(set(before) ^ set(after)) or [k for k in after if after[k].shape != before[k].shape]
    if wrong:
        raise RewardError(
            f"The model does not come from {base!r}: {', '.join(wrong[:8])} differ. Name its base, or save it whole."
        )
    changes = {
        key: (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
        for key, value in after.items()
        if not torch.equal(value.cpu(), before[key].to(value.dtype).cpu())
    }
    about = {"base": base, "changed": len(changes)}
    (folder / BASE).write_text(json.dumps(about) + "\n", encoding="utf-8")
    if changes:
        save_file(changes, folder / CHANGES)
        (folder / CHANGES).chmod((folder / BASE).stat().st_mode)


def _load_changes(folder: Path, **options: Any) -> ClipParts:
    try:
        about = read_object(folder / BASE)
        base, count = str(about["base"]), int(about["changed"])
        if Path(_place(folder, base)).resolve() == folder.resolve():
            raise ValueError("it names its own folder")
    except (ValueError, KeyError, TypeError) as error:
        raise RewardError(
            f'{folder / BASE} is not {{"base": "...", "changed": number}} ({type(error).__name__}: {error}).'
        ) from error
    parts = load_fine_tuned_clip(_place(folder, base), **options)
    if str(options["device"]) == META:
        return parts
    state = parts.encoder.model.state_dict()
    changes = read_tensors(folder / CHANGES) if count else {}
    wrong = [k for k, value in changes.items() if k not in state or value.shape != state[k].shape]
    if wrong or len(changes) != count:
        raise RewardError(
            f"{folder / CHANGES} does not fit {BASE}: {len(changes)} of {count} tensors, base {base!r} has "
            f"no {listed(wrong)} of that shape. Copy the folder again, or name the base of the fine-tuning."
        )
    with torch.no_grad():
        for key, value in changes.items():
            state[key].copy_(value)
    return replace(parts, folder=folder, base=parts.weights)


def _tensors(file: str | Path, device: str | torch.device) -> dict[str, Tensor]:
    return {} if str(device) == META else read_tensors(file)


def _place(folder: Path, base: str) -> str | Path:
    beside = folder / base
    return beside.resolve() if beside.exists() else base
