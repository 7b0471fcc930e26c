# SPDX-License-Identifier: Apache-2.0
"""Local page that samples images from a prompt, with a slider for the strength of the LoRA."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from PIL import Image

from visalign.adapters.catalogue import edits_of, index_source
from visalign.adapters.lora import ADAPTER
from visalign.data.sets.prompt_files import record_key
from visalign.errors import UserError
from visalign.flow.rollout import decode_images, middle_frames, rollout
from visalign.pipelines.shared.places import place_of, say_places
from visalign.rewards.base.images import to_pil
from visalign.seeds import sample_seed

from .job import SampleSettings, load_sampler


def build_demo(settings: SampleSettings) -> Any:
    """Return the page as a Gradio interface; its slider scales the layers of the denoising network alone."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when it is imported
    import gradio

    source = index_source(settings.model, settings.adapter, settings.options.get("config"))
    if edits_of(source, settings.adapter) == "needed":
        raise UserError(f"{settings.model} edits images, and the demo has prompts alone. Use visalign sample.")
    settings = settings.with_own_sampling()
    solver = settings.solver or "euler"
    policy: Any = load_sampler(settings)
    say_places({settings.model: place_of(policy)})
    layers = [module for module in policy.module.modules() if isinstance(module, LoraLayer)]
    scales = [layer.scaling[ADAPTER] for layer in layers]

    @torch.no_grad()
    def draw(prompt: str, seed: float, steps: float, strength: float) -> Image.Image:
        if not prompt.strip():
            raise gradio.Error("Write a prompt.")
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = strength * scale
        sigmas = replace(settings, steps=int(steps)).sigmas(policy)
        seeds = [sample_seed("sample", *record_key({"prompt": prompt}), int(seed), 0)]
        latents = rollout(policy, policy.encode([prompt]), sigmas=sigmas, seeds=seeds, solver=solver).latents
        return to_pil(middle_frames(decode_images(policy, latents, clips=True))[0])

    inputs = [
        gradio.Textbox("a red circle", label="Prompt"),
        gradio.Number(0, label="Seed", precision=0, minimum=0),
        gradio.Slider(1, 100, settings.steps, step=1, label="Steps"),
        gradio.Slider(0, 2, 1, step=0.05, label="LoRA strength", visible=bool(settings.lora)),
    ]
    output = gradio.Image(label="Image", format="png", type="pil")
    page: dict[str, Any] = {"title": "visalign demo", "flagging_mode": "never", "analytics_enabled": False}
    return gradio.Interface(draw, inputs, output, api_name="draw", **page)
