# SPDX-License-Identifier: Apache-2.0
"""Scores by ImageReward's own classes, at the sizes of a checkpoint: run where they can be imported.

`python image_reward_official.py CODE FOLDER` with transformers 4.40, timm 0.6, fairscale and torchvision:
CODE is a copy of github.com/THUDM/ImageReward, FOLDER what `tests.support.judges.official.image_reward` made.
None of our code is imported. The packages' `__init__` files, which import CLIP and diffusers, are skipped.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image


def official_model(code: Path, folder: Path) -> Any:
    """ImageReward with smaller towers, the folder's weights, and BERT's tokenizer on its vocabulary."""
    for name in ("ImageReward", "ImageReward.models"):
        package = ModuleType(name)
        package.__path__ = [str(code / name.replace(".", "/"))]
        sys.modules[name] = package
    module: Any = import_module("ImageReward.ImageReward")
    pretrain: Any = import_module("ImageReward.models.BLIP.blip_pretrain")
    blip: Any = import_module("ImageReward.models.BLIP.blip")
    tower: Any = import_module("ImageReward.models.BLIP.vit").VisionTransformer
    sizes = json.loads((folder / "sizes.json").read_text())
    own, read = sizes.pop("width"), blip.BertTokenizer.from_pretrained
    blip.BertTokenizer.from_pretrained = lambda _: read(str(folder))
    pretrain.create_vit = lambda *_: (tower(**sizes), sizes["embed_dim"])
    head = module.MLP
    module.MLP = lambda _: head(own)
    model = module.ImageReward(med_config=str(folder / "med_config.json"))
    model.preprocess = module._transform(sizes["img_size"])
    model.load_state_dict(torch.load(folder / "ImageReward.pt"), strict=False)
    return model.eval()


def main(code: str, folder: str) -> None:
    """Print the scores of the folder's images under its prompts."""
    model, path = official_model(Path(code), Path(folder)), Path(folder)
    with torch.no_grad():
        prompts = json.loads((path / "prompts.json").read_text())
        files = sorted((path / "images").iterdir())
        scores = [model.score(p, Image.open(file)) for p, file in zip(prompts, files, strict=True)]
    print(json.dumps(scores))


if __name__ == "__main__":
    main(*sys.argv[1:])
