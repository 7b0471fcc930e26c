# SPDX-License-Identifier: Apache-2.0
"""Families N_preprocess and N_ocr_wanted_text: images as the judges' towers take them, wanted texts of prompts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.golden_families import Outputs
from tests.support.models.clip import save_tiny_transformers_clip, tiny_clip_config
from tests.support.models.published_layouts import open_clip_vit, random_state
from visalign.rewards.base.contract import read_request
from visalign.rewards.clip.towers import ClipTowers
from visalign.rewards.scorers.hps_v2 import FILES, HpsV2
from visalign.rewards.scorers.laion_aesthetic import LaionAesthetic
from visalign.rewards.scorers.pick_score import PickScore
from visalign.rewards.verifiers.ocr import quoted_texts

SIZE, WORDS = 224, 49408


@cache
def judge(kind: str, resampling: str = "float") -> ClipTowers:
    """Towers of the judge of that kind, of random weights at the published size of images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "clip"
        if kind == "hpsv2":
            text: dict[str, Any] = {"context_length": 8, "vocab_size": WORDS, "width": 8, "heads": 1, "layers": 1}
            vision = {"image_size": SIZE, "layers": 1, "width": 8, "head_width": 8, "patch_size": 32}
            sizes: dict[str, Any] = {"text": (8, 32, 1), "vision": (8, 32, 1), "embed": 8, "context": 8}
            state = random_state(open_clip_vit(**sizes, vocabulary=WORDS, patch=32, image=SIZE))
            folder.mkdir()
            torch.save({"state_dict": state}, folder / FILES["2.1"])
            architecture = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": text}
            towers = HpsV2(folder, architecture=architecture, resampling=resampling).towers
        else:
            save_tiny_transformers_clip(folder, patch=32, image=SIZE)
            config = tiny_clip_config()
            config["vision_config"] |= {"patch_size": 32, "image_size": SIZE}
            (folder / "config.json").write_text(json.dumps(config))
            scorer: Any = PickScore if kind == "pickscore_pil" else LaionAesthetic
            towers = scorer(folder).towers
        _ = towers.preprocess
    return towers


def picture(inputs: Any) -> Image.Image:
    """The image of a case's integer formula."""
    y, x, i = np.mgrid[: inputs["height"], : inputs["width"], : 1 if inputs["mode"] == "L" else 3]
    waves = inputs["a"] * y + inputs["b"] * x + inputs["c"] * i + inputs["k"] + inputs["d"] * (x * y // 16)
    levels = (waves % 256).astype(np.uint8)
    return Image.fromarray(levels[..., 0] if inputs["mode"] == "L" else levels)


def preprocess(case: Any) -> Outputs | None:
    """Summary of the normalised tensor."""
    if case.params["kind"] not in ("hpsv2", "openai_clip", "pickscore_pil") or case.params["size"] != SIZE:
        return None
    request = read_request("golden", [picture(case.inputs)], [""], None)

    def summary(towers: ClipTowers) -> Outputs:
        pixels = towers.pixels([image for _, image in request.images.readable()])[0].double()
        values = [float(pixels[tuple(position)]) for position in case.inputs["positions"]]
        mean, squares = pixels.mean((1, 2)), pixels.square().sum()
        return {"shape": list(pixels.shape), "mean": mean, "sum_of_squares": squares, "values": values}

    outputs = summary(judge(case.params["kind"]))
    if "outputs_without_antialias" in case.record:
        outputs["outputs_without_antialias"] = summary(judge("hpsv2", "aliased"))
    return outputs


def wanted(case: Any) -> Outputs:
    """Texts in quotation marks."""
    return {"wanted": quoted_texts(case.inputs["prompt"])}


def stated(case: Any, _: str) -> tuple[float, float, str]:
    """The case's own tolerance."""
    return case.record["tolerance"]["rtol"], case.record["tolerance"]["atol"], "element"


FAMILIES: dict[str, Callable[[Any], Outputs | None]] = {"N_preprocess": preprocess, "N_ocr_wanted_text": wanted}
TOLERANCES = {"N_preprocess": stated}
