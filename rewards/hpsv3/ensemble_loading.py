# SPDX-License-Identifier: Apache-2.0
"""The one folder that a LoRA ensemble is kept in, and the module that is made of it.

`members.safetensors` holds every tensor as [M, ...], `judge.json` the template, positions, name of the base,
the adapters' scaling, bounds of the log-deviation, and sizes of pictures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import VisionLanguageJudge
from visalign.rewards.vlm.template import SETTINGS, JudgeSettings

from .ensemble_members import HEAD, shown
from .ensemble_model import TOKEN, LoraEnsembleModel
from .model import CLAMP

MEMBERS_FILE = "members.safetensors"


def read_ensemble(folder: Path) -> tuple[JudgeSettings, dict[str, Tensor]]:
    """Settings and tensors [M, ...] of an ensemble's folder.

    Args:
        folder: as `write_ensemble` wrote it.

    Raises:
        FileNotFoundError: the weights are missing.
        RewardError: it is another judge's folder.
    """
    from safetensors.torch import load_file

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
    """The module.

    Args:
        settings: of the ensemble.
        tensors: of its members, [M, ...].
        base: the model that they were trained from.
        max_tokens_per_batch: of one pass, all members counted.
        **options: of `VisionLanguageJudge.from_pretrained`.

    Raises:
        FileNotFoundError: the base is missing.
        RewardError: what does not fit.
    """
    members = max(1, len(tensors.get(TOKEN, ())))
    options = {**settings.rest.get("pixels", {}), "settings": settings, **options}
    options.setdefault("positions", settings.positions)
    engine = VisionLanguageJudge.from_pretrained(
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
    """Write what `read_ensemble` reads.

    Args:
        folder: is made.
        model: the ensemble.
        base: folder, which is named relative to this one, or name.
        dtype: of the weights; float16 where that loses nothing, else float32, when None.
    """
    from safetensors.torch import save_file

    from visalign.data.assets import PACKAGED, assets_folder

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
    cutter, clamp = engine.network.eye.settings(), model.clamp
    rest = {
        "head": {"type": HEAD, "clamp": None if clamp is None else list(clamp)},
        "pixels": {name: cutter[name] for name in ("min_pixels", "max_pixels") if name in cutter},
        "scaling": model.scaling,
        "base": named,
    }
    JudgeSettings(templates={"hpsv3": model.template}, positions=engine.positions, rest=rest).write(folder)
    save_file(kept, folder / MEMBERS_FILE)
    (folder / MEMBERS_FILE).chmod((folder / SETTINGS).stat().st_mode)
