# SPDX-License-Identifier: Apache-2.0
"""A fine-tuned contrastive model as its base and the tensors that differ from it: a fraction of its size.

The folder holds `clip_base.json`, {"base": packaged name, hub id, or folder or file relative to this one,
"changed": number of tensors}, and `clip_changes.safetensors`, tensors under their names in the base's state
dict. Tokenizer, sizes and preprocessing are the base's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from visalign.rewards.base.contract import RewardError
from visalign.rewards.weights.checkpoint_files import listed, read_tensors

from .encoder import ClipParts

BASE = "clip_base.json"
CHANGES = "clip_changes.safetensors"

Load = Callable[[str | Path], ClipParts]
"""Loads a base by its name, as `clip_loading.load_fine_tuned_clip` does."""


def save_changes(folder: str | Path, parts: ClipParts, base: str, *, load: Load, dtype: torch.dtype) -> None:
    """Write what `load_changes` reads. `base` is what the model came from: packaged name, hub id, or folder
    or file relative to `folder`; `load` loads it; `dtype` is that of floating-point weights on disk.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    before = load(_place(folder, base)).encoder.model.state_dict()
    after = parts.encoder.model.state_dict()
    wrong = sorted(set(before) ^ set(after)) or [k for k in after if after[k].shape != before[k].shape]
    if wrong:
        raise RewardError(
            f"The model does not come from {base!r}: {', '.join(wrong[:8])} differ in name or shape. "
            "Name the base that it was fine-tuned from, or save it whole."
        )
    changes = {
        key: (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
        for key, value in after.items()
        if not torch.equal(value.cpu(), before[key].to(value.dtype).cpu())
    }
    told = {"base": base, "changed": len(changes)}
    (folder / BASE).write_text(json.dumps(told) + "\n", encoding="utf-8")
    if changes:
        save_file(changes, folder / CHANGES)
        (folder / CHANGES).chmod((folder / BASE).stat().st_mode)


def load_changes(folder: Path, *, load: Load) -> ClipParts:
    """The base with the changed tensors in it, in evaluation mode, without gradients."""
    try:
        told = json.loads((folder / BASE).read_text(encoding="utf-8"))
        base, count = str(told["base"]), int(told["changed"])
    except (ValueError, KeyError, TypeError) as error:
        raise RewardError(
            f"{folder / BASE} names no base ({type(error).__name__}: {error}); it needs "
            '{"base": "...", "changed": number of tensors}.'
        ) from error
    if (folder / base).resolve() == folder.resolve():
        raise RewardError(
            f"{folder / BASE} names its own folder as base ({base!r}); name the model that was fine-tuned."
        )
    if count and not (folder / CHANGES).is_file():
        raise FileNotFoundError(f"The model folder {folder} lacks {CHANGES}; copy the folder again.")
    parts = load(_place(folder, base))
    state = parts.encoder.model.state_dict()
    changes = read_tensors(folder / CHANGES) if count else {}
    if len(changes) != count:
        raise RewardError(
            f"{folder / CHANGES} holds {len(changes)} tensors and {BASE} says {count}; copy the folder again."
        )
    unknown = sorted(set(changes) - set(state))
    other = [f"{k} {tuple(v.shape)}" for k, v in changes.items() if k in state and v.shape != state[k].shape]
    if unknown or other:
        raise RewardError(
            f"{folder / CHANGES} does not fit its base {base!r}: unexpected {listed(unknown)}; of another "
            f"shape {listed(other)}. Name the base that it was fine-tuned from."
        )
    with torch.no_grad():
        for key, value in changes.items():
            state[key].copy_(value)
    return replace(parts, place=folder, base=parts.weights)


def _place(folder: Path, base: str) -> str | Path:
    beside = folder / base
    return beside.resolve() if beside.exists() else base
