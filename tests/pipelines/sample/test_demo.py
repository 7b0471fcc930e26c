# SPDX-License-Identifier: Apache-2.0
"""The demo page draws what `visalign sample` draws; its slider scales the LoRA."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.models.sd3 import build_tiny_sd3
from visalign.adapters import LoraSettings, load_policy
from visalign.pipelines.sample.demo import build_demo
from visalign.pipelines.sample.job import SampleSettings, sample_images


@pytest.mark.filterwarnings("ignore")  # sockets and event loops that Gradio leaves open
def test_the_slider_goes_from_the_model_to_its_lora(tmp_path):
    pytest.importorskip("gradio", reason="the extra demo is not installed")
    client: Any = pytest.importorskip("gradio_client")
    folder = build_tiny_sd3(tmp_path / "model")
    policy: Any = load_policy(folder, lora=LoraSettings(rank=2, alpha=4))
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.3)
    policy.save(tmp_path / "lora")
    settings = SampleSettings(model=str(folder), lora=[tmp_path], steps=2, seeds=[3])
    page = build_demo(settings)
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        ask = client.Client(address, verbose=False, download_files=tmp_path)
        drawn = [pixels(ask.predict("a red circle", 3, 2, strength, api_name="/draw")) for strength in (0, 1, 1)]
        with pytest.raises(Exception, match="Write a prompt"):
            ask.predict(" ", 3, 2, 1.0, api_name="/draw")
    finally:
        page.close()
        del page, ask
        gc.collect()  # while warnings of what Gradio leaves open are ignored
    for lora, image in (([], drawn[0]), ([tmp_path], drawn[1])):
        output = tmp_path / f"own{len(lora)}"
        sample_images(
            [{"prompt": "a red circle"}], SampleSettings(model=str(folder), lora=lora, steps=2, seeds=[3]), output
        )
        assert np.array_equal(pixels(output / "0000_3.png"), image)
    assert np.array_equal(drawn[1], drawn[2]) and not np.array_equal(drawn[0], drawn[1])


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
