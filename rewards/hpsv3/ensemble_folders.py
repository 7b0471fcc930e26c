# SPDX-License-Identifier: Apache-2.0
"""Folders of a LoRA ensemble: reads members, checks that they belong together, stacks and writes them.

A member is a folder as `visalign train-reward` writes it for `model.kind=hpsv3 model.train=lora`. In the
ensemble's folder, `members.safetensors` holds every tensor as [M, ...], `judge.json` the template, positions,
name of the base, the adapters' scaling, bounds of the log-deviation, and sizes of images.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from visalign.atomic import umask_permissions
from visalign.data.assets import PACKAGED, assets_folder, resolve_model
from visalign.model_files import read_object
from visalign.rewards.base.contract import RewardError, check_counts
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.loading import ADAPTER, base_of
from visalign.rewards.vlm.template import JudgeSettings
from visalign.rewards.weights.checkpoint_files import read_tensors

from .ensemble_model import TOKEN, LoraEnsembleModel
from .loading import find_weights
from .model import HEAD_FILE, TEMPLATE, pixel_settings, read_clamp

MEMBERS_FILE = "members.safetensors"
HEAD = "ranknet members"
"""The "type" of the head in the ensemble's judge.json; HPSv3's own has another one."""
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "modules_to_save")),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices")),
}
"""peft's settings of a plain LoRA, which the stacked adapters implement; None means empty or false."""


@dataclass(frozen=True, kw_only=True)
class Member:
    name: str
    tensors: Mapping[str, Tensor]  # Tensors as `LoraEnsembleModel` names them, without the axis of members
    scaling: float  # α/r
    settings: JudgeSettings
    base: str | Path  # Folder of the base, or its name

    def shared_facts(self) -> dict[str, Any]:
        """Return what all members must share, by its name in a message."""
        rest = self.settings.rest
        widths = {
            key: value.shape[-1] if key.endswith("A") else value.shape[0]
            for key, value in sorted(self.tensors.items())
            if key.endswith((".lora_A", ".lora_B"))
        }
        head_shapes = [tuple(value.shape) for key, value in sorted(self.tensors.items()) if "rm_head" in key]
        return {
            "base": str(self.base),
            "adapted layers": widths,
            "template": self.settings.templates.get("hpsv3", TEMPLATE).text,
            "positions": self.settings.positions,
            "shapes of the head": head_shapes,
            "bounds of the log-deviation": read_clamp(rest["head"]),
            "pixels": rest.get("pixels", {}),
        }


def read_member(path_or_id: str | Path) -> Member:
    """Read a trained judge from a folder, packaged name or hub id."""
    folder = find_weights(path_or_id)
    settings = JudgeSettings.read(folder)
    head = settings.rest.get("head")
    kind = head.get("type") if isinstance(head, Mapping) else None
    if kind != "ranknet" or not (folder / ADAPTER).is_file():
        raise RewardError(
            f"{folder.name} is no member of a LoRA ensemble: it needs {ADAPTER} and a head 'ranknet' (not {kind!r}). "
            "Train members with visalign train-reward, model.kind=hpsv3 model.train=lora."
        )
    base = resolve_model(base_of(folder, settings))
    tensors, config = {**adapters_of(folder), **read_tensors(folder / HEAD_FILE)}, read_object(folder / ADAPTER)
    odd = [f"{key} {config[key]!r}" for key, plain in _PLAIN.items() if config.get(key) and config[key] != plain]
    if odd or not config.get("r") or not config.get("lora_alpha"):
        raise RewardError(
            f"The LoRA of {folder.name} has {', '.join(odd) or 'no rank or no alpha'}; members are LoRAs of one rank."
        )
    return Member(
        name=folder.name,
        tensors=tensors,
        scaling=float(config["lora_alpha"]) / int(config["r"]),
        settings=settings,
        base=base.resolve() if isinstance(base, Path) else base,
    )


def stack_members(members: Sequence[Member]) -> tuple[JudgeSettings, dict[str, Tensor]]:
    """Return settings and tensors [M, ...] of an ensemble of two or more members that fit together.

    Adapters of a lower rank are padded with zeros, and those of another scaling are multiplied by the ratio
    to the first one's: neither changes a member's output.
    """
    if len(members) < 2:
        raise RewardError(f"{len(members)} members were given; an ensemble needs at least two.")
    first = members[0]
    facts = first.shared_facts()
    for member in members[1:]:
        for name, value in member.shared_facts().items():
            if value != facts[name]:
                raise RewardError(
                    f"{first.name} and {member.name} differ in {name}: {facts[name]!s:.120} and {value!s:.120}. "
                    "In one pass they must agree; visalign.rewards.Ensemble asks one after another."
                )
    rank = max(value.shape[0] for m in members for key, value in m.tensors.items() if key.endswith("lora_A"))
    stacked: dict[str, Tensor] = {}
    for key in first.tensors:
        parts = [member.tensors[key].float() for member in members]
        if key.endswith(".lora_A"):
            parts = [torch.cat([part, part.new_zeros(rank - len(part), part.shape[1])]) for part in parts]
        elif key.endswith(".lora_B"):
            scaled = [p * (m.scaling / first.scaling) for p, m in zip(parts, members, strict=True)]
            parts = [torch.cat([p, p.new_zeros(len(p), rank - p.shape[1])], 1) for p in scaled]
        stacked[key] = torch.stack(parts)
    rest = {
        "head": {**first.settings.rest["head"], "type": HEAD},
        "pixels": first.settings.rest.get("pixels", {}),
        "scaling": first.scaling,
    }
    templates = {"hpsv3": first.settings.templates.get("hpsv3", TEMPLATE)}
    return JudgeSettings(templates=templates, positions=first.settings.positions, rest=rest), stacked


def adapters_of(folder: Path) -> dict[str, Tensor]:
    """Read `<layer>.lora_A` and `<layer>.lora_B` of a member."""
    adapters: dict[str, Tensor] = {}
    for key, value in read_tensors(folder / _ADAPTER_WEIGHTS).items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise RewardError(f"{folder.name}/{_ADAPTER_WEIGHTS} holds {key}, no matrix A or B of a LoRA.")
        adapters[f"{match[1]}.lora_{match[2]}"] = value
    return adapters


def read_ensemble(folder: Path) -> tuple[JudgeSettings, dict[str, Tensor]]:
    """Read settings and tensors [M, ...] of a folder of `write_ensemble`."""
    settings = JudgeSettings.read(folder)
    head = settings.rest.get("head")
    if not isinstance(head, Mapping) or head.get("type") != HEAD or "scaling" not in settings.rest:
        raise RewardError(
            f"{folder.name} is no LoRA ensemble (head {head!s:.120}). Join judges: LoraEnsembleReward.from_members."
        )
    return settings, read_tensors(folder / MEMBERS_FILE)


def build_ensemble(
    settings: JudgeSettings,
    tensors: Mapping[str, Tensor],
    base: str | Path,
    *,
    max_tokens_per_batch: int = 8192,
    **options: Any,
) -> LoraEnsembleModel:
    """Build the module from the settings and tensors [M, ...] of an ensemble, on the members' base.

    `max_tokens_per_batch` counts all members; `options` are those of `VisionLanguageEngine.from_pretrained`.
    """
    check_counts(str(base), max_tokens_per_batch=max_tokens_per_batch)  # auto would measure a single member
    options = {"settings": settings, "positions": settings.positions, **options}
    budget = max(1, max_tokens_per_batch // max(1, len(tensors.get(TOKEN, ()))))
    engine = VisionLanguageEngine.from_pretrained(base, max_tokens_per_batch=budget, **options)
    return LoraEnsembleModel(
        engine,
        tensors,
        template=settings.templates.get("hpsv3"),
        scaling=float(settings.rest["scaling"]),
        clamp=read_clamp(settings.rest["head"]),
    ).eval()


def write_ensemble(folder: Path, model: LoraEnsembleModel, base: str | Path) -> None:
    """Write the folder that `read_ensemble` reads; a base that is a folder is named relative to it."""
    folder.mkdir(parents=True, exist_ok=True)
    base_name = str(base)
    if (base_path := Path(base).resolve()).is_dir():
        is_packaged = base_path.name in PACKAGED and base_path.parent == assets_folder().resolve()
        base_name = base_path.name if is_packaged else os.path.relpath(base_path, folder.resolve())
    tensors = model.tensors()
    is_exact = all(torch.equal(value.half().float(), value.float()) for value in tensors.values())
    dtype = torch.float16 if is_exact else torch.float32
    state = {key: value.detach().to("cpu", dtype).contiguous() for key, value in tensors.items()}
    rest = {
        "head": {"type": HEAD, "clamp": None if model.clamp is None else list(model.clamp)},
        "pixels": pixel_settings(model.engine),
        "scaling": model.scaling,
        "base": base_name,
    }
    positions = model.engine.positions
    JudgeSettings(templates={"hpsv3": model.template}, positions=positions, rest=rest).write(folder)
    save_file(state, folder / MEMBERS_FILE)
    umask_permissions(folder / MEMBERS_FILE)
