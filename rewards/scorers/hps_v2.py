# SPDX-License-Identifier: Apache-2.0
"""HPSv2 and v2.1: the cosine of a CLIP ViT-H/14 fine-tuned on human preferences, read from upstream's file.

Source: Wu et al., "Human Preference Score v2", arXiv 2306.09341; files HPS_v2_compressed.pt and
    HPS_v2.1_compressed.pt of xswu/HPSv2: open_clip's keys under "state_dict". The benchmark's tables show the
    cosine × 100.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from visalign.rewards.base.contract import RewardError, check_choices
from visalign.rewards.base.identity import Identity
from visalign.rewards.clip.encoder import ClipEncoder, ClipParts
from visalign.rewards.clip.loading import load_clip
from visalign.rewards.clip.open_clip_folder import CONFIG, check_end_token
from visalign.rewards.clip.published_layouts import OPENAI_MEAN, OPENAI_STD
from visalign.rewards.clip.towers import ClipJudge
from visalign.rewards.weights.checkpoint_files import dtype_of, load_strict, read_tensors
from visalign.rewards.weights.hub import local_folder

FILES = {"2.0": "HPS_v2_compressed.pt", "2.1": "HPS_v2.1_compressed.pt"}
"""version -> name of the published file."""
RESAMPLING = ("float", "aliased", "pil")


class HpsV2(ClipJudge):
    """Cosine of image and prompt, float32; about 0.2 to 0.35 with the published checkpoints.

    The longest edge is resized to 224 pixels and the rest is filled with black, as upstream's `score` and its
    benchmark do. Upstream resizes tensors, so its input depends on torchvision: antialiased without rounding
    from 0.17 on ("float", the default), not antialiased before ("aliased"); "pil" rounds as CLIP's training did.
    An open_clip folder keeps its own `resize_mode`.

    Deviations: upstream keeps the fourth channel of RGBA images, and does not pad an image whose longest edge
    is 224 already; its model takes neither.

    Args:
        model: the published .pt file, a folder that holds it, the hub id, an open_clip folder, or a packaged name.
        version: "2.0" or "2.1", the file of a folder or hub id.
        resampling: "float", "aliased" or "pil", as above.
        architecture: of the .pt file: a name of open_clip, or its model_cfg.
        preprocess: replaces entries of the preprocessing, e.g. {"resize_mode": "shortest"} to crop instead.
    """

    name = "hps_v2"

    def __init__(
        self,
        model: str | Path = "xswu/HPSv2",
        *,
        version: str = "2.1",
        resampling: str = "float",
        architecture: str | Mapping[str, Any] = "ViT-H-14",
        device: str | torch.device = "cpu",
        preprocess: Mapping[str, Any] | None = None,
        **towers: Any,
    ) -> None:
        check_choices(self.name, version=(version, FILES), resampling=(resampling, RESAMPLING))
        self._options = {"version": version, "architecture": architecture}
        super().__init__(
            model,
            device=device,
            load=lambda precision: _load(model, version, architecture, device, precision),
            preprocess={"resampling": resampling, **(preprocess or {})},
            **towers,
        )

    @property
    def identity(self) -> Identity:
        return self.towers.identity(self.name, **self._options)


def _load(
    model: str | Path, version: str, architecture: str | Mapping[str, Any], device: str | torch.device, precision: str
) -> ClipParts:
    from visalign.data.assets import resolve_model

    path = Path(resolve_model(model))
    if (path / CONFIG).is_file():
        return load_clip(path, device=device, precision=precision)
    if not path.is_file():
        path = local_folder(model, (FILES[version],)) / FILES[version]
    import open_clip

    config = open_clip.get_model_config(architecture) if isinstance(architecture, str) else architecture
    if config is None or not path.is_file():
        raise RewardError(
            f"{path} or {architecture!r} is unknown; needed are {FILES[version]}, and 'ViT-H-14' or a model_cfg."
        )
    network = open_clip.CLIP(**{key: config[key] for key in ("embed_dim", "vision_cfg", "text_cfg")})
    load_strict(network, read_tensors(path, "state_dict"), str(path))
    network.to(device=torch.device(device), dtype=dtype_of(precision)).eval().requires_grad_(False)
    tokenizer = open_clip.SimpleTokenizer(context_length=network.context_length)
    return ClipParts(
        encoder=ClipEncoder(network).eval(),
        preprocess={
            "size": config["vision_cfg"]["image_size"],
            "mean": OPENAI_MEAN,
            "std": OPENAI_STD,
            "interpolation": "bicubic",
            "resize_mode": "longest_max",
        },
        tokenizer=tokenizer,
        end=check_end_token(network, tokenizer),
        folder=path,
        model_cfg=config,
    )
