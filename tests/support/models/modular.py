# SPDX-License-Identifier: Apache-2.0
"""Tiny random modular pipelines of diffusers: real blocks, and text encoders that read."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.support.models.vision_language import TEMPLATE, tiny_seeing_model, tiny_seeing_tokenizer

diffusers: Any = importlib.import_module("diffusers")
GRID = [1.0, 0.7, 0.2]
"""The levels that the tiny Turbo model ships."""


def tiny_flux3(*, upsampler: bool = False, **changes: Any) -> Any:
    """FLUX.3 as its repository has it."""
    transformer = diffusers.Flux3Transformer2DModel(
        **{
            "in_channels": 16,
            "cond_in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 8 * 32,  # eight layers of the encoder beside each other
            "timestep_channels": 32,
            "axes_dims_rope": (4, 4, 4, 4),
            **changes,
        }
    )
    autoencoder = diffusers.AutoencoderKLFlux2(
        sample_size=32, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=1,
    ).eval()  # fmt: skip
    return _pipeline(
        "Flux3DistilledAutoBlocks" if changes.get("flow_map") else "Flux3AutoBlocks",
        text_encoder=tiny_seeing_model("qwen3_vl", num_hidden_layers=32), tokenizer=_processor(),
        transformer=transformer, vae=autoencoder, **(_upsampler() if upsampler else {}),
    )  # fmt: skip


def tiny_qwen_image_21(*, turbo: bool = False) -> Any:
    """Qwen-Image 2.1, whose images have an alpha channel."""
    parts = qwen_image_21_parts(turbo=turbo)
    pipe = _pipeline("QwenImage21TurboAutoBlocks" if turbo else "QwenImage21AutoBlocks", **parts)
    if turbo:
        pipe.update_components(sample_sigmas=GRID)
    return pipe


def qwen_image_21_parts(*, turbo: bool) -> dict[str, Any]:
    """The components of the classic pipeline, too."""
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        context_in_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, z_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1,
        temperal_downsample=[False, True], latents_mean=[0.1] * 8, latents_std=[1.5] * 8,
        scale_factor_spatial=4,
    ).eval()  # fmt: skip
    shift = {} if turbo else {"use_dynamic_shifting": True, "shift_terminal": 0.02}
    return {
        "text_encoder": tiny_seeing_model("qwen3_vl"),
        "processor": _processor(),
        "transformer": transformer,
        "vae": autoencoder,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**shift),
    }


def save_modular(pipe: Any, folder: Path) -> Path:
    """The folder, with the pipeline as diffusers writes it."""
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


def own_modular_run(
    pipe: Any, prompts: list[str], latents: torch.Tensor, guidance: float, **call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed latents, images) of a pipeline's own run, prompt by prompt; alpha stands over white."""
    if pipe.components.get("prompt_upsampler") is None:
        pipe._blocks.sub_blocks.pop("prompt_upsampler", None)
    if "guider" in pipe.components:
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=guidance))
    packed, images = [], []
    for prompt, start in zip(prompts, latents, strict=True):
        if type(pipe).__name__ == "Flux3ModularPipeline":  # its `latents` stand unpacked
            start = start.T.reshape(-1, call["height"] // 2, call["width"] // 2)
        run = pipe(prompt=prompt, latents=start[None].clone(), output_type="pt", output=["latents", "images"], **call)
        packed.append(run["latents"].flatten(2).mT)
        image = run["images"]
        alpha = image[:, 3:] if image.shape[1] == 4 else torch.ones_like(image[:, :1])
        images.append(image[:, :3] * alpha + 1 - alpha)
    return torch.cat(packed).float(), torch.cat(images).float()


def _pipeline(blocks: str, **parts: Any) -> Any:
    pipe = getattr(diffusers, blocks)().init_pipeline()
    pipe.update_components(**parts)
    return pipe


def _upsampler() -> dict[str, Any]:
    language = tiny_seeing_model("qwen3_vl").config.text_config.to_dict()
    own = {name: language[name] for name in language if "size" in name or "num_" in name or "token_id" in name}
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
    text = {**own, **linear, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
    tower = {"depth": 1, "num_heads": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    config = Qwen3_5Config(text_config=text, vision_config={**tower, "patch_size": 4})
    model = Qwen3_5ForConditionalGeneration(config).eval()
    return {"prompt_upsampler": model, "prompt_upsampler_processor": _processor()}


def _processor() -> Qwen3VLProcessor:
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=4, size={"shortest_edge": 64, "longest_edge": 4096}),
        tokenizer=tiny_seeing_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(patch_size=4),
        chat_template=TEMPLATE,
    )
