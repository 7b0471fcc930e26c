# SPDX-License-Identifier: Apache-2.0
"""Any diffusers SD3 or SD3.5 pipeline as a `DiffusionPolicy`, with LoRA or full fine-tuning.

Source: SD3, arXiv 2403.03206; guidance, arXiv 2207.12598: v = v(∅) + w (v(prompt) − v(∅)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn

from visalign.adapters.lora import LoraSettings, leave_casts_to_autocast
from visalign.adapters.pipeline.condition import check_condition
from visalign.adapters.pipeline.encoding import ImageEncoder
from visalign.adapters.pipeline.families import SD3_ATTENTION
from visalign.adapters.pipeline.lora import add_lora, load_lora, save_lora
from visalign.adapters.pipeline.quantization import quantization_of
from visalign.adapters.weights import TrainedWeights
from visalign.atomic import umask_permissions
from visalign.errors import UserError
from visalign.interfaces import Condition, ForwardCount, Prediction

from .joint_attention import use_weighted_attention
from .loading import check_parts, load_sd3_pipeline
from .text import SD3Condition, SD3TextEncoders
from .timesteps import latent_shape, sampling_sigmas


class SD3Policy:
    """An SD3 pipeline as the algorithms see it; see `visalign.interfaces.DiffusionPolicy`.

    Sampling with `velocity`, `sigmas` and Euler steps gives the images of `pipe(...)` at the same start
    noise. With LoRA the transformer is frozen but for float32 adapters, and the reference is the model
    without them. Without, all of the transformer is trained in float32 (weights of 16 bits are computed with
    under autocast in their
    dtype: AdamW's steps are smaller than their spacing), and the reference is a copy of it (one more
        transformer in
    memory). The transformer is changed in place (adapters, attention processor).

    Args:
        pipe: on its device, in its dtype.
        guidance: w; 1 is no guidance, as in diffusers.
        lora: adapters to add and train; None trains the whole transformer.
        max_sequence_length: of the T5 part of the context, the pipeline's argument of that name.
        autocast: run the transformer, and with bfloat16 the decoder, under autocast in this dtype.
        image_size: in pixels, a square's side or (height, width); None is the model's own.
        encode_batch: prompts per pass of the text encoders.
        decode_batch: latents per pass of the autoencoder.
    """

    prediction: Prediction = "velocity"

    def __init__(
        self,
        pipe: StableDiffusion3Pipeline,
        *,
        guidance: float = 1.0,
        lora: LoraSettings | None = None,
        max_sequence_length: int = 256,
        autocast: torch.dtype | None = None,
        image_size: int | tuple[int, int] | None = None,
        encode_batch: int = 64,
        decode_batch: int = 32,
    ) -> None:
        check_parts(pipe)
        if not math.isfinite(guidance) or guidance < 1:
            raise UserError(f"guidance is {guidance}; it must be at least 1, and 1 switches guidance off.")
        self.pipe = pipe
        self.transformer = pipe.transformer
        self.guidance = float(guidance)
        weights = self.transformer.dtype
        has_short_masters = lora is None and weights.itemsize < 4
        self.autocast = weights if autocast is None and has_short_masters else autocast
        if has_short_masters:
            self.transformer.float()
        self.decode_batch = decode_batch
        self._image_size, self.latent_shape = image_size, latent_shape(pipe, image_size)
        self.storage_dtype: torch.dtype = self.transformer.dtype
        self._text = SD3TextEncoders(pipe, max_sequence_length=max_sequence_length, batch=encode_batch)
        pipe.vae.requires_grad_(False).eval()
        self.transformer.eval()
        use_weighted_attention(self.transformer)
        self.lora = lora
        self._lora_layers = None if lora is None else add_lora(self.transformer, lora, SD3_ATTENTION)
        if self._lora_layers is None:
            self.transformer.requires_grad_(True)
        elif autocast is not None and self.storage_dtype == torch.float32:
            leave_casts_to_autocast(self._lora_layers)
        self._trained = TrainedWeights(self.transformer, self._lora_layers)
        self._forward_count = ForwardCount()

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        use_t5: bool = True,
        quantization: str | None = None,
        **options: Any,
    ) -> SD3Policy:
        """Load a pipeline from a folder or the hub and make it a policy.

        Args:
            folder_or_id: a folder as `save_pretrained` writes it, or `owner/name`.
            dtype: of the frozen weights; what is trained is always float32. In full fine-tuning the
                transformer is computed in it (see the class).
            device: of all parts.
            use_t5: False leaves the third text encoder out.
            quantization: of the frozen transformer under LoRA, "torchao_int8" or "bitsandbytes_4bit".
            **options: of the constructor: guidance, lora, max_sequence_length, ...

        Raises:
            FileNotFoundError: if the folder or a part of it is missing.
            UserError: if it is another kind of pipeline, or an option is out of range.
        """
        quantized = quantization_of(quantization, ["transformer"], dtype, adapters=options.get("lora") is not None)
        pipe = load_sd3_pipeline(folder_or_id, dtype=dtype, use_t5=use_t5, **quantized).to(device)
        return cls(pipe, **options)

    @property
    def module(self) -> nn.Module:
        """The transformer, never wrapped: `visalign.training` wraps the replay that calls it."""
        return self.transformer

    @property
    def image_size(self) -> int | tuple[int, int] | None:
        """Image size as passed to the constructor; setting it changes `latent_shape` and `sigmas`."""
        return self._image_size

    @image_size.setter
    def image_size(self, size: int | tuple[int, int] | None) -> None:
        self.latent_shape = latent_shape(self.pipe, size)
        self._image_size = size
        self.__dict__.pop("_encoder", None)  # what it measured was of the other size

    @property
    def device(self) -> torch.device:
        """Device of the transformer."""
        return self.transformer.device

    @property
    def forward_count(self) -> ForwardCount:
        """Transformer passes since the start, in latents; with backward if the output requires grad."""
        return self._forward_count

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the transformer's matrix products."""
        return self.autocast or self.transformer.dtype

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
        weights = encoded.log_multiplicity
        null = None
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
        """Images [B, 3, H, W] float32 in [0, 1] of latents [B, C, H, W], as the pipeline decodes them; in
        bfloat16 if that is the autocast.
        """
        vae, images = self.pipe.vae, []
        scale, shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0
        # float16 is left out: its range is too short for some autoencoders (diffusers' `force_upcast`).
        low = self.autocast == torch.bfloat16
        with torch.autocast(latents.device.type, torch.bfloat16) if low else nullcontext():
            for chunk in latents.split(self.decode_batch):
                scaled = (chunk.to(vae.dtype) / scale) + shift
                scaled = scaled.contiguous(memory_format=torch.channels_last)  # convolutions run faster so
                images.append(vae.decode(scaled, return_dict=False)[0].float())
        return (torch.cat(images) / 2 + 0.5).clamp(0, 1).contiguous()

    def encode_images(self, images: Sequence[Tensor]) -> Tensor:
        """Clean latents [B, C, H, W] of B images [3, h, w] in [0, 1] of any size, see `ImageEncoder`;
        `decode` is its inverse.
        """
        return self._encoder(images)

    @cached_property
    def _encoder(self) -> ImageEncoder:
        return ImageEncoder(self)

    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        """The timestep schedule [steps + 1], float32, from 1 down to 0: "diffusers" is what the pipeline's
        scheduler uses (shift applied twice); "plain" applies it once.
        """
        return sampling_sigmas(self.pipe, steps, timestep_schedule=timestep_schedule, shape=self.latent_shape)

    def reference(self) -> AbstractContextManager[None]:
        """Restore the model from before training inside the block; nestable. Call backward outside."""
        return self._trained.reference()

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves, in the order of the transformer."""
        return self._trained.named()

    def save(self, folder: Path) -> None:
        """Write what was trained, in float32: with LoRA the file that `pipe.load_lora_weights(folder)` reads; without,
        the whole pipeline as `pipe.save_pretrained` does (SD3.5 with T5: 21 GB, the transformer 10 of it).
        """
        if self.lora is not None:
            save_lora(type(self.pipe), {"transformer": self.transformer}, Path(folder))
        else:
            self.pipe.save_pretrained(folder)
        umask_permissions(Path(folder))

    def load(self, folder: Path) -> None:
        """Read what `save` of an equally built policy wrote; the reference stays what it was."""
        if self.lora is not None:
            load_lora({"transformer": self.transformer}, folder)
            return
        saved = type(self.transformer).from_pretrained(folder, subfolder="transformer", dtype=self.storage_dtype)
        self.transformer.load_state_dict(saved.state_dict())

    def _forward(
        self, x: Tensor, timestep: Tensor, embeds: Tensor, pooled: Tensor, log_multiplicity: Tensor | None
    ) -> Tensor:
        """Run the transformer once, float32 [B, C, H, W]."""
        dtype = self.storage_dtype
        weights = None if log_multiplicity is None else {"context_log_multiplicity": log_multiplicity}
        autocast = torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext()
        with autocast:
            out = self.transformer(
                hidden_states=x.to(dtype),
                timestep=timestep,
                encoder_hidden_states=embeds.to(dtype),
                pooled_projections=pooled.to(dtype),
                joint_attention_kwargs=weights,
                return_dict=False,
            )[0]
        if out.requires_grad:
            self._forward_count.forward_backward += len(x)
        else:
            self._forward_count.forward += len(x)
        return out.float()
