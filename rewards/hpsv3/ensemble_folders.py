# SPDX-License-Identifier: Apache-2.0
"""Folders of a LoRA ensemble: members read, checked to belong together and stacked; the one that is kept.

A member is a folder as `visalign train-reward` writes it for `model.kind=hpsv3 model.train=lora`. Of the
ensemble's own, `members.safetensors` holds every tensor as [M, ...], `judge.json` the template, positions,
name of the base, the adapters' scaling, bounds of the log-deviation, and sizes of images.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from visalign.atomic import umask_permissions
from visalign.data.assets import PACKAGED, assets_folder, resolve_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.loading import ADAPTER, base_of
from visalign.rewards.vlm.template import SETTINGS, JudgeSettings
from visalign.rewards.weights.hub import local_folder

from .ensemble_model import TOKEN, LoraEnsembleModel
from .model import CLAMP, HEAD_FILE, TEMPLATE

MEMBERS_FILE = "members.safetensors"
HEAD = "ranknet members"
"""The "type" of the head in the ensemble's judge.json; HPSv3's own is another."""
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "modules_to_save")),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices")),
}
"""Settings of peft that the stacked adapters have; what is None must be empty or false."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One trained judge."""

    name: str
    tensors: Mapping[str, Tensor]
    """As `LoraEnsembleModel` names them, without the axis of members."""
    scaling: float
    settings: JudgeSettings
    base: str | Path
    """Folder of the base, or its name."""
    named: str
    """The base as the member names it, for comparing."""

    def facts(self) -> dict[str, Any]:
        """What all members must have in common, by what it is called in a message."""
        rest = self.settings.rest
        layers = {
            key: value.shape[-1] if key.endswith("A") else value.shape[0]
            for key, value in sorted(self.tensors.items())
            if key[-7:] in (".lora_A", ".lora_B")
        }
        widths = [tuple(value.shape) for key, value in sorted(self.tensors.items()) if "rm_head" in key]
        return {
            "base": self.named,
            "adapted layers": layers,
            "template": self.settings.templates.get("hpsv3", TEMPLATE).text,
            "positions": self.settings.positions,
            "shapes of the head": widths,
            "bounds of the log-deviation": rest["head"].get("clamp", CLAMP),
            "pixels": rest.get("pixels", {}),
        }


def find_folder(place: str | Path) -> Path:
    """An existing folder; packaged names and hub ids are looked up."""
    found = resolve_model(place)
    return found if isinstance(found, Path) else local_folder(found, ("*",))


def read_member(place: str | Path, base: str | Path | None = None) -> Member:
    """One trained judge of a folder, packaged name or hub id; `base` replaces what its judge.json names."""
    folder = find_folder(place)
    settings = JudgeSettings.read(folder)
    head = settings.rest.get("head")
    kind = head.get("type") if isinstance(head, Mapping) else None
    if kind != "ranknet" or not (folder / ADAPTER).is_file():
        raise RewardError(
            f"{folder.name} is no member of a LoRA ensemble: it needs {ADAPTER} and a {SETTINGS} whose head "
            f"is 'ranknet' (it is {kind!r}). Train members with visalign train-reward, model.kind=hpsv3 "
            "model.train=lora; judges of other kinds go together in visalign.rewards.Ensemble."
        )
    for file in (_ADAPTER_WEIGHTS, HEAD_FILE):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} holds no {file}; copy the folder again.")
    tensors = {**adapters_of(folder), **load_file(folder / HEAD_FILE)}
    if TOKEN not in tensors:
        raise RewardError(f"{folder.name}/{HEAD_FILE} holds no {TOKEN}; save the member again.")
    named = base_of(folder, settings)
    return Member(
        name=folder.name,
        tensors=tensors,
        scaling=_scaling(folder),
        settings=settings,
        base=_resolved(named if base is None else base),
        named=str(_resolved(named)) if base is None else Path(str(named)).name,
    )


def stack_members(members: Sequence[Member]) -> tuple[JudgeSettings, dict[str, Tensor]]:
    """Settings and tensors [M, ...] of an ensemble of two or more members; one in which they differ and must
    not is named.

    Adapters of a lower rank are filled up with zeros, and those of another scaling are multiplied by the
    ratio to the first one's: neither changes what a member says.
    """
    if len(members) < 2:
        raise RewardError(f"{len(members)} members were given; an ensemble needs at least two.")
    first = members[0]
    for member in members[1:]:
        mine, theirs = first.facts(), member.facts()
        for fact in mine:
            if mine[fact] != theirs[fact]:
                raise RewardError(
                    f"The members {first.name} and {member.name} differ in {fact}: {shown(mine[fact])} and "
                    f"{shown(theirs[fact])}. In one pass they must agree; else put them together as "
                    "visalign.rewards.Ensemble, which asks one after another."
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
    template = first.settings.templates.get("hpsv3", TEMPLATE)
    settings = JudgeSettings(templates={"hpsv3": template}, positions=first.settings.positions, rest=rest)
    return settings, stacked


def adapters_of(folder: Path) -> dict[str, Tensor]:
    """`<layer>.lora_A` and `<layer>.lora_B` of a member."""
    found: dict[str, Tensor] = {}
    for key, value in load_file(folder / _ADAPTER_WEIGHTS).items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise RewardError(
                f"{folder.name}/{_ADAPTER_WEIGHTS} holds {key}, which is no matrix A or B of a LoRA; members "
                "of an ensemble have these alone."
            )
        found[f"{match[1]}.lora_{match[2]}"] = value
    return found


def _scaling(folder: Path) -> float:
    """α/r of a plain LoRA."""
    try:
        config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    except ValueError as error:
        raise RewardError(f"{ADAPTER} of {folder.name} is no JSON: {error}.") from error
    odd = [
        f"{key} {config[key]!r}" for key, usual in _PLAIN.items() if config.get(key) and config[key] != usual
    ]
    if odd or not config.get("r") or not config.get("lora_alpha"):
        raise RewardError(
            f"The LoRA of {folder.name} has {', '.join(odd) or 'no rank or no alpha'}; members are plain "
            "LoRAs of one rank in all layers, α/r times B A and nothing else."
        )
    return float(config["lora_alpha"]) / int(config["r"])


def _resolved(base: str | Path) -> str | Path:
    """The folder of a base that is here, or its name."""
    found = resolve_model(base)
    return found.resolve() if isinstance(found, Path) else found


def shown(value: Any) -> str:
    """A value for a message, not too long."""
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def read_ensemble(folder: Path) -> tuple[JudgeSettings, dict[str, Tensor]]:
    """Settings and tensors [M, ...] of a folder that `write_ensemble` wrote."""
    settings = JudgeSettings.read(folder)
    head = settings.rest.get("head")
    if not isinstance(head, Mapping) or head.get("type") != HEAD or "scaling" not in settings.rest:
        raise RewardError(
            f"{folder.name} is no LoRA ensemble: its {SETTINGS} has the head {shown(head)}. Join trained "
            "judges: LoraEnsembleReward.from_members([folder, ...]).save(folder)."
        )
    if not (folder / MEMBERS_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {MEMBERS_FILE}; copy the folder again.")
    return settings, load_file(folder / MEMBERS_FILE)


def build_ensemble(
    settings: JudgeSettings,
    tensors: Mapping[str, Tensor],
    base: str | Path,
    *,
    max_tokens_per_batch: int = 8192,
    **options: Any,
) -> LoraEnsembleModel:
    """The module of what `read_ensemble` or `stack_members` gave, on the model that the members start from;
    all members count in `max_tokens_per_batch`, and `options` are those of
    `VisionLanguageEngine.from_pretrained`.
    """
    members = max(1, len(tensors.get(TOKEN, ())))
    options = {"settings": settings, "positions": settings.positions, **options}
    engine = VisionLanguageEngine.from_pretrained(
        base, max_tokens_per_batch=max(1, max_tokens_per_batch // members), **options
    )
    clamp = settings.rest["head"].get("clamp", CLAMP)
    return LoraEnsembleModel(
        engine,
        tensors,
        template=settings.templates.get("hpsv3"),
        scaling=float(settings.rest["scaling"]),
        clamp=None if clamp is None else (float(clamp[0]), float(clamp[1])),
    ).eval()


def write_ensemble(
    folder: Path, model: LoraEnsembleModel, base: str | Path, dtype: torch.dtype | None = None
) -> None:
    """Write what `read_ensemble` reads. A base that is a folder is named relative to this one; weights are
    float16 where that loses nothing, else float32, unless `dtype` says otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(base)
    named = str(base)
    if place.is_dir():
        packaged = place.name in PACKAGED and place.resolve().parent == assets_folder().resolve()
        named = place.name if packaged else os.path.relpath(place.resolve(), folder.resolve())
    tensors, engine = model.tensors(), model.engine
    exact = all(torch.equal(value.half().float(), value.float()) for value in tensors.values())
    dtype = dtype or (torch.float16 if exact else torch.float32)
    kept = {key: value.detach().to("cpu", dtype).contiguous() for key, value in tensors.items()}
    cutter, clamp = engine.network.images.settings(), model.clamp
    rest = {
        "head": {"type": HEAD, "clamp": None if clamp is None else list(clamp)},
        "pixels": {name: cutter[name] for name in ("min_pixels", "max_pixels", "window") if name in cutter},
        "scaling": model.scaling,
        "base": named,
    }
    JudgeSettings(templates={"hpsv3": model.template}, positions=engine.positions, rest=rest).write(folder)
    save_file(kept, folder / MEMBERS_FILE)
    umask_permissions(folder / MEMBERS_FILE)
