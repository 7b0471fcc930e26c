# SPDX-License-Identifier: Apache-2.0
"""Any diffusers SD3 or SD3.5 pipeline as a `DiffusionPolicy`, with LoRA or full fine-tuning.

Source: SD3, arXiv 2403.03206; guidance, arXiv 2207.12598: v = v(∅) + w (v(prompt) − v(∅)).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from torch import Tensor, nn

from visalign.adapters.lora import LoraSettings
from visalign.adapters.model_folder import pipeline_index
from visalign.adapters.offload import AUTOENCODER, on_device
from visalign.adapters.pipeline.base import DiffusersPolicy
from visalign.adapters.pipeline.condition import check_condition
from visalign.adapters.pipeline.families import SD3_ATTENTION
from visalign.adapters.pipeline.loading import load_pipeline
from visalign.adapters.pipeline.lora import LoraPaths, add_lora, start_from_loras
from visalign.adapters.pipeline.quantization import quantization_of
from visalign.adapters.prompt_cache import PromptCache, has_prompt_cache
from visalign.adapters.single_file import model_source
from visalign.adapters.speed import gradient_mode
from visalign.adapters.weights import TrainedWeights
from visalign.errors import UserError
from visalign.flow.schedules import timestep_sigmas
from visalign.interfaces import Condition, ForwardCount, Prediction

from .joint_attention import use_weighted_attention
from .text import SD3Condition, SD3TextEncoders

REQUIRED_PARTS = "transformer vae scheduler text_encoder text_encoder_2 tokenizer tokenizer_2".split()
"""Parts of an SD3 pipeline that nothing works without; T5 (text_encoder_3, tokenizer_3) may be absent."""
T5_PARTS = ("text_encoder_3", "tokenizer_3")


class SD3Policy(DiffusersPolicy):
    """An SD3 pipeline as the algorithms see it; see `visalign.interfaces.DiffusionPolicy`.

    `velocity`, `sigmas` and Euler steps give the images of `pipe(...)` at the same noise. Training is as in
    `PipelinePolicy`, whose arguments it has; full fine-tuning of 16-bit weights is in float32 under autocast.
    `guidance` is w, 1 for none, `max_sequence_length` that of T5. With bfloat16 the decoder, too, runs under
    `autocast`.
    """

    prediction: Prediction = "velocity"

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
        *,
        guidance: float = 1.0,
        lora: LoraSettings | None = None,
        lora_path: LoraPaths | None = None,
        max_sequence_length: int = 256,
        autocast: torch.dtype | None = None,
        image_size: int | tuple[int, int] | None = None,
        gradient_checkpointing: bool = False,
        decode_batch: int = 32,
    ) -> None:
        # a cache of prompts may stand in for the text encoders
        needed = [part for part in REQUIRED_PARTS if not has_prompt_cache(pipe) or "encoder" not in part]
        missing = [part for part in needed if getattr(pipe, part, None) is None]
        if not isinstance(pipe, StableDiffusion3Pipeline) or missing:
            raise UserError(
                f"The SD3 adapter got a {type(pipe).__name__}{' without ' if missing else ''}{', '.join(missing)}; it "
                f"needs a StableDiffusion3Pipeline, of which only T5 ({', '.join(T5_PARTS)}) may be None."
            )
        if not math.isfinite(guidance) or guidance < 1:
            raise UserError(f"guidance is {guidance}; it must be at least 1, and 1 switches guidance off.")
        self.pipe = pipe
        self.transformer = pipe.transformer
        self.networks = {"transformer": self.transformer}
        self.guidance = float(guidance)
        self._start = None if lora_path is None else start_from_loras(pipe, ["transformer"], lora_path, lora)
        lora = lora if self._start is None else self._start.settings
        weights = self.transformer.dtype
        has_short_masters = lora is None and weights.itemsize < 4
        self.autocast = weights if autocast is None and has_short_masters else autocast
        if has_short_masters:
            self.transformer.float()
        self.decode_batch = decode_batch
        self._image_size, self.latent_shape = image_size, _latent_shape(pipe, image_size)
        self.storage_dtype: torch.dtype = self.transformer.dtype
        self._text = SD3TextEncoders(pipe, max_sequence_length=max_sequence_length)
        pipe.vae.requires_grad_(False).eval()
        self.transformer.eval()
        use_weighted_attention(self.transformer)
        if gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.lora = lora
        self._lora_layers = None if lora is None else add_lora(self.transformer, lora, SD3_ATTENTION)
        if self._lora_layers is None:
            self.transformer.requires_grad_(True)
        if self._start is not None:
            self._start.fill(self.networks)
        self._trained = TrainedWeights(self.transformer, None if self._start else self._lora_layers)
        self.forward_count = ForwardCount()  # Since the start, in latents; with backward if they carry gradient

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        variant: str | None = None,
        config: str | Path | None = None,
        use_t5: bool = True,
        quantization: str | None = None,
        offload: bool = False,
        prompt_cache: PromptCache | None = None,
        **options: Any,
    ) -> SD3Policy:
        """Load a pipeline from a folder, a file or the hub as a policy; another pipeline's are refused before.

        Arguments are `PipelinePolicy.from_pretrained`'s, and `use_t5`: False saves 9 GB of SD3.5's.
        """
        adapters = options.get("lora") is not None or options.get("lora_path") is not None
        quantized = quantization_of(quantization, ["transformer"], dtype, adapters=adapters)
        source = model_source(folder_or_id, config)
        index = pipeline_index(source.folder)
        class_name = index.get("_class_name")
        if class_name != StableDiffusion3Pipeline.__name__:  # a sibling would load with parts of other meaning
            raise UserError(
                f"{folder_or_id} is a {class_name}; the SD3 adapter loads a {StableDiffusion3Pipeline.__name__}. Name "
                "another adapter (model.adapter)."
            )
        parts_of_t5 = [part for part in T5_PARTS if (index.get(part) or [None])[0] is not None]
        if use_t5 and 0 < len(parts_of_t5) < len(T5_PARTS):
            raise UserError(
                f"{folder_or_id} has only {', '.join(parts_of_t5)} of T5's {', '.join(T5_PARTS)}. Save the pipeline "
                "again, or leave T5 out by model.use_t5=false."
            )
        absent = () if use_t5 and parts_of_t5 else T5_PARTS
        parts: dict[str, Any] = {"variant": variant, "absent": absent, "offload": offload, **quantized}
        parts["prompt_cache"] = prompt_cache
        pipe = load_pipeline(source, index, {"default": dtype}, device, **parts)
        pipe.set_progress_bar_config(disable=True)
        return cls(pipe, **options)

    @property
    def module(self) -> nn.Module:
        """The transformer, never wrapped: `visalign.training` wraps the replay that calls it."""
        return self.transformer

    def _resize(self, size: int | tuple[int, int] | None) -> None:
        self.latent_shape = _latent_shape(self.pipe, size)

    def encode(self, prompts: Sequence[str]) -> SD3Condition:
        """Encode B prompts, each unique one once, in order of first appearance, without gradient."""
        return self._text.encode(prompts)

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, time: Tensor | None = None) -> Tensor:
        """Guided velocity dx/dσ [B, C, H, W] float32; with gradient, only the conditional half carries it.

        The halves run one after the other with gradient and without: joined in one batch, a rollout in 16 bits is not
        the function that its replay is (|log r| up to 3e-4). `time` [B] is as `times` gives it; None computes it.
        """
        count = len(x)
        encoded = check_condition(SD3Condition, x, sigma, condition)
        timestep = self.times(sigma) if time is None else time
        weights, null = encoded.log_multiplicity, None
        if self.guidance != 1:
            with torch.no_grad():
                null = self._forward(x, timestep, *self._text.null(count), weights)
        embeds, pooled = encoded.embeds[encoded.index], encoded.pooled[encoded.index]
        prompted = self._forward(x, timestep, embeds, pooled, weights)
        # v(∅) + w (v(prompt) − v(∅))
        return prompted if null is None else null + self.guidance * (prompted - null)

    def times(self, sigmas: Tensor) -> Tensor:
        """Timesteps of noise levels: 1000 σ, or as many as the scheduler was trained with."""
        return sigmas.float() * self.pipe.scheduler.config.num_train_timesteps

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, H, W] to float32 [B, 3, H, W] in [0, 1], in bfloat16 if that is the autocast."""
        vae, images = self.pipe.vae, []
        scale, shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0
        # float16 is left out: its range is too short for some autoencoders (diffusers' `force_upcast`).
        low = self.autocast == torch.bfloat16
        autocast = torch.autocast(latents.device.type, torch.bfloat16) if low else nullcontext()
        with autocast, on_device(self.pipe, AUTOENCODER, self.device):
            for chunk in latents.split(self.decode_batch):
                scaled = (chunk.to(vae.dtype) / scale) + shift
                scaled = scaled.contiguous(memory_format=torch.channels_last)  # convolutions run faster so
                images.append(vae.decode(scaled, return_dict=False)[0].float())
        return (torch.cat(images) / 2 + 0.5).clamp(0, 1).contiguous()

    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        """The timestep schedule [steps + 1], 1 down to 0; "diffusers" applies the shift twice, "plain" once."""
        scheduler = self.pipe.scheduler
        if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            raise UserError(
                f"The pipeline samples with {type(scheduler).__name__}, which is no plain flow. Set pipe.scheduler = "
                "FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)."
            )
        config: Any = scheduler.config
        dynamic: dict[str, Any] = {}
        if config.use_dynamic_shifting:
            patch, (_, height, width) = self.transformer.config.patch_size, self.latent_shape
            lengths = config.base_image_seq_len, config.max_image_seq_len
            shifts = config.base_shift, config.max_shift
            dynamic["mu"] = calculate_shift((height // patch) * (width // patch), *lengths, *shifts)
        if timestep_schedule == "plain":
            return timestep_sigmas(steps, shift=math.exp(dynamic["mu"]) if dynamic else scheduler.shift)
        scheduler = copy.deepcopy(scheduler)
        scheduler.set_timesteps(steps, device="cpu", **dynamic)
        return torch.as_tensor(scheduler.sigmas, dtype=torch.float32)

    def _forward(
        self, x: Tensor, timestep: Tensor, embeds: Tensor, pooled: Tensor, log_multiplicity: Tensor | None
    ) -> Tensor:
        dtype = self.storage_dtype
        weights = None if log_multiplicity is None else {"context_log_multiplicity": log_multiplicity}
        autocast = torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext()
        learning = torch.is_grad_enabled()
        with autocast, gradient_mode(self.transformer, learning):
            out = self.transformer(
                hidden_states=x.to(dtype),
                timestep=timestep,
                encoder_hidden_states=embeds.to(dtype),
                pooled_projections=pooled.to(dtype),
                joint_attention_kwargs=weights,
                return_dict=False,
            )[0]
        if learning and out.requires_grad:
            self.forward_count.forward_backward += len(x)
        else:
            self.forward_count.forward += len(x)
        return out.float() if learning else out.detach().float()


def _latent_shape(pipe: StableDiffusion3Pipeline, image_size: int | tuple[int, int] | None) -> tuple[int, int, int]:
    """Return C, H, W of the latents of an image of `image_size` pixels; None is the size the model was made for."""
    config, scale = pipe.transformer.config, pipe.vae_scale_factor
    size = config.sample_size * scale if image_size is None else image_size
    height, width = (size, size) if isinstance(size, int) else size
    unit, largest = scale * config.patch_size, config.pos_embed_max_size * config.patch_size * scale
    if any(side < unit or side % unit or side > largest for side in (height, width)):
        raise UserError(
            f"image_size is {image_size}; this model makes multiples of {unit} up to {largest}, or such a pair."
        )
    return config.in_channels, height // scale, width // scale
