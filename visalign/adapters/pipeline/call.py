# SPDX-License-Identifier: Apache-2.0
"""A pipeline's own call, made to begin at latents that it is given and to hand over what its network says.

Its scheduler, `prepare_latents` and `encode_prompt` are exchanged; no weight is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from diffusers.guiders import ClassifierFreeGuidance
from PIL import Image
from torch import Tensor

from visalign.adapters.offload import AUTOENCODER, ENCODERS, on_device
from visalign.errors import UserError
from visalign.flow.rollout import middle_frames

from .arguments import call_arguments, checked_guidance, checked_negative, known_family
from .condition import Encoded, Source, join, named, positive
from .guidance import silent
from .modular import as_one_call
from .quantization import dtype_of
from .schedulers import handing_scheduler

EXCHANGED = ("scheduler", "guider", "ocr_guider")
"""Parts that are exchanged while a pipeline is driven; of guiders only plain guidance is left."""
LOOKED_UP = ("dtype", "device", "_execution_device")
"""Properties of a pipeline and of its networks whose values are cached."""


class PipelineCall:
    """Stands in for the parts in which a pipeline makes its timesteps, its start and its embeddings."""

    latent_shape: tuple[int, ...]  # Of one sample, as the pipeline's `prepare_latents` makes it

    @torch.no_grad()
    def __init__(
        self,
        pipe: Any,
        image_size: int | tuple[int, int] | None,
        num_frames: int | None,
        guidance: float | None = None,
        negative_prompt: str | None = None,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        """Exchange the pipeline's parts and run it once for the shapes; arguments as of `PipelinePolicy`."""
        self.pipe, self.family = pipe, known_family(type(pipe).__name__, "The pipeline")
        as_one_call(pipe, self.family)
        self._arguments = inspect.signature(type(pipe).__call__).parameters
        self._call = getattr(type(pipe).__call__, "__wrapped__", None) or type(pipe).__call__
        networks = {name: getattr(pipe, name, None) for name in self.family.networks}
        self.networks: dict[str, Any] = {name: part for name, part in networks.items() if part is not None}
        self.guidance = checked_guidance(pipe, self.family, guidance)
        self.negative_prompt = checked_negative(pipe, self.family, negative_prompt)
        self._size_options = num_frames, call
        self.fixed = call_arguments(pipe, self.family, image_size, *self._size_options)
        pipe.set_progress_bar_config(disable=True)
        self._own_parts = {name: part for name, part in pipe.components.items() if name in EXCHANGED and part}
        self.scheduler = pipe.scheduler = handing_scheduler(pipe.scheduler)
        if "guider" in self._own_parts:
            with silent():
                pipe.guider = pipe.ocr_guider = ClassifierFreeGuidance()
        self._start: Tensor | None = None
        self._lookups = CachedLookups(pipe, self.networks)
        self._prepares = inspect.signature(pipe.prepare_latents)
        self._prepare, pipe.prepare_latents = pipe.prepare_latents, self._prepared
        self._own_encode_prompt, pipe.encode_prompt = pipe.encode_prompt, self._encoded
        if conditioned := [net for net in self.networks.values() if getattr(net.config, "visual_cond", False)]:
            # Kandinsky 5's pipeline writes into the latents whose gradient the first layer's weights need
            conditioned[0].visual_embeddings.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
        self._returned: list[tuple[Any, ...]] = []
        self._blank = Source((Image.new("RGB", (64, 64), "white"),)) if self.family.source == "needed" else None
        if self.family.source != "none":
            self._own_encode_source, pipe._encode_vae_image = pipe._encode_vae_image, self._source_encoded
        self._forget()

    def _forget(self) -> None:
        """Encode again what may depend on the size: an image to edit is encoded at it."""
        self._null: dict[str, Any] = {}
        self.nothing: Encoded = positive(self.encode("", guided=self.guided, source=self._blank))
        """The empty prompt, for calls whose prompt does not matter."""
        config = next(iter(self.networks.values())).config
        if (longest := 2 * config.get("rope_max_seq_len", 2**30)) < max(self.latent_shape[-2:]):  # Wan's, in patches
            scale = self.pipe.vae_scale_factor_spatial
            raise UserError(
                f"image_size is {' x '.join(str(n * scale) for n in self.latent_shape[-2:])} pixels, and the rotary "
                f"table of this {type(self.pipe).__name__} ends at {longest * scale} a side. Take a smaller size."
            )

    @torch.no_grad()
    def resize(self, image_size: int | tuple[int, int] | None) -> None:
        """Make images of another size from now on; a refused size leaves the present one."""
        previous, done = self.fixed, False
        self.fixed = call_arguments(self.pipe, self.family, image_size, *self._size_options)
        if self._blank is not None:
            self._blank = Source(self._blank.images)
        try:
            self._forget()
            done = True
        finally:  # some pipelines refuse a size themselves
            if not done:
                self.fixed = previous
                self._forget()

    @property
    def guided(self) -> bool:
        """Return True if a velocity needs two halves."""
        return self.guidance > self.family.off and self.family.has_halves

    def encode(self, prompt: str, *, guided: bool, source: Source | None = None) -> Encoded:
        """Encode a prompt, and the negative one if `guided`, as the pipeline's call does; `source`: images to edit."""
        self._returned.clear()
        image_input = {} if source is None else {"image": source}
        inputs: dict[str, Any] = {"prompt": [prompt], **image_input, **self._scale(guided)}
        if guided and "negative_prompt" in self._arguments and self.negative_prompt is not None:
            inputs["negative_prompt"] = [self.negative_prompt]
        try:
            with self.encoding():
                self.run(inputs, None, None)
        except ValueError as error:
            raise UserError(f"{type(self.pipe).__name__} refuses its call: {error}") from error
        encoded = {**named(self._returned, self.family.encodes.split()), **image_input}
        return encoded if guided else positive(encoded)

    def encoding(self) -> AbstractContextManager[None]:
        """Have the encoders on the network's device inside the block, and what encodes images to edit."""
        return on_device(self.pipe, ENCODERS if self.family.source == "none" else ENCODERS + AUTOENCODER, self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.networks.values())).device

    def _scale(self, guided: bool) -> dict[str, float]:
        family = self.family
        if family.scale == "-":  # its guider has it
            if "guider" in self._own_parts:
                self.pipe.guider.guidance_scale = self.guidance if guided else family.off
            return {}
        return {family.scale: self.guidance if guided or family.guidance == "embedded" else family.off}

    def inputs(self, rows: Sequence[Encoded], *, guided: bool = False) -> dict[str, Any]:
        """Return the arguments of the call for n samples, of both halves if `guided`."""
        axes = self.family.batch_axis
        inputs = join(rows, axes)
        if not guided:
            inputs = positive(inputs)
        elif len(positive(inputs)) == len(inputs):
            inputs |= join([self._negative(rows[0].get("image"))] * len(rows), axes)
        inputs |= self._scale(guided)
        if "negative_prompt" in self._arguments:
            inputs["negative_prompt"] = None  # some calls have a default of their own
        return inputs

    @torch.no_grad()
    def _negative(self, source: Source | None) -> Encoded:
        """The unconditional half beside images to edit, encoded when first needed: the scale may be set later."""
        null = self._null if source is None else source.null
        if not null:
            with torch.autocast(self._device.type, enabled=False):  # a velocity's own is not that of its prompts
                encoded = self.encode("", guided=True, source=source)
            null |= {name: value for name, value in encoded.items() if name.startswith("negative_")}
        return null

    def frames(self, latents: Tensor, batch_size: int) -> Tensor:
        """Decode images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1], `batch_size` latents at a time."""
        frames = []
        for chunk in latents.split(1 if self.family.alone == "always" else batch_size):
            inputs = self.inputs([self.nothing] * len(chunk))
            decoder = getattr(self.pipe.vae, "dtype", chunk.dtype)
            with on_device(self.pipe, AUTOENCODER, self._device):
                out = self.run(inputs, chunk.to(decoder), torch.empty(0), output_type="pt")
            images = torch.stack(list(out)) if isinstance(out, list) else out
            frames.append(images.float().clamp(0, 1))
        return torch.cat(frames)

    def images(self, latents: Tensor, batch_size: int) -> Tensor:
        """Decode images [B, 3, H, W], of videos their middle frames; see `frames`."""
        return middle_frames(self.frames(latents, batch_size))

    def run(
        self,
        inputs: Mapping[str, Any],
        latents: Tensor | None,
        at: Tensor | None,
        *,
        steps: int = 1,
        output_type: str = "latent",
    ) -> Any:
        """Run the pipeline's own call from `latents` [n, ...] (None: its own) with arguments as of `inputs`.

        `at` is the time of the one step; None makes the timesteps of `steps` steps, an empty one takes no step.
        """
        self.scheduler.at = at
        self._start = latents
        self._source: Any = inputs.get("image")
        image_input = {}
        if self._source is not None:
            self._source.used, image_input = 0, {"image": self._source.image}
        arguments = {**self.fixed, **inputs, **image_input, "num_inference_steps": steps, "output_type": output_type}
        try:
            # Qwen-Image warns at every call of what its own encoder left out; encoders warn of a cut prompt
            with nullcontext() if "prompt" in inputs else silent(self.pipe), self._lookups.cached():
                draw = torch.Generator().manual_seed(0)
                return self._call(self.pipe, **arguments, generator=draw, return_dict=False)[0]
        finally:
            self._start = None

    def _encoded(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the results of the pipeline's encoders for `encode`."""
        out = self._own_encode_prompt(*args, **kwargs)
        self._returned.append(out)
        return out

    def _source_encoded(self, image: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Encode an image to edit in the autoencoder's dtype; the pipeline has it in that of its text encoders."""
        return self._source.encoded(
            lambda: self._own_encode_source(image.to(self.pipe.vae.dtype), *args, **kwargs).to(image.dtype)
        )

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pipeline's latents and ids, with the latents replaced by `_start`."""
        bound = self._prepares.bind(*args, **kwargs)
        bound.arguments.pop("latents", None)
        prepared = self._prepare(*bound.args, **bound.kwargs)
        latents = prepared[0] if isinstance(prepared, tuple) else prepared
        config = next(iter(self.networks.values())).config
        # Kandinsky 5 lays a condition and a mask behind the channels of its latents
        channels = config.in_visual_dim if getattr(config, "visual_cond", False) else latents.shape[-1]
        drawn, rest = latents[..., :channels], latents[..., channels:]
        self.latent_shape = tuple(drawn.shape[1:])
        if self._start is None:
            return prepared
        decoding = self.scheduler.at is not None and not self.scheduler.at.numel()
        start = self._start.to(drawn.device, None if decoding else drawn.dtype)
        if start.shape != drawn.shape:  # would broadcast
            raise ValueError(f"The latents are {list(start.shape)}; the pipeline works on {list(drawn.shape)}.")
        start = start if decoding or not rest.shape[-1] else torch.cat([start, rest], -1)
        return (start, *prepared[1:]) if isinstance(prepared, tuple) else start

    def handed_back(self) -> AbstractContextManager[Any]:
        """Give the pipeline its own components back inside the block."""
        return patch.multiple(self.pipe, **self._own_parts)


class CachedLookups:
    """Caches properties that walk through all modules for hooks, five to ten times a call.

    Values are diffusers' own, but the dtype of a network in 4 bits (`dtype_of`), until the weights move or change
    dtype. Hooks must be there before the pipeline becomes a policy.
    """

    def __init__(self, pipe: Any, networks: Mapping[str, Any]) -> None:
        self._networks = list(networks.values())
        self._parts = [pipe, *self._networks]
        self._kinds: dict[type, type] = {}
        self._values: dict[tuple[int, str], Any] = {}
        self._weights: Any = None

    @contextmanager
    def cached(self) -> Iterator[None]:
        """Keep the first value of each cached property inside the block."""
        weight = next(self._networks[0].parameters())
        if self._weights != (weight.dtype, weight.device):
            self._values = {(id(network), "dtype"): dtype_of(network) for network in self._networks}
            # the first part of the pipeline may be in CPU memory
            device = self._networks[0].device
            self._values |= {(id(self._parts[0]), name): device for name in ("device", "_execution_device")}
            self._weights = weight.dtype, weight.device
        kinds = [type(part) for part in self._parts]
        try:
            for part, kind in zip(self._parts, kinds, strict=True):
                if kind not in self._kinds:
                    self._kinds[kind] = self._caching_class(kind)
                part.__class__ = self._kinds[kind]
            yield
        finally:
            for part, kind in zip(self._parts, kinds, strict=True):
                part.__class__ = kind

    def _caching_class(self, kind: Any) -> type:
        def cached_property(name: str) -> property:
            original = getattr(kind, name)

            def value(part: Any) -> Any:
                key = id(part), name
                if key not in self._values:
                    self._values[key] = original.fget(part)
                return self._values[key]

            return property(value)

        def free(pipe: Any) -> None:
            """Skip the end-of-call hook where no component is offloaded and no feature cache is on."""
            has_cache = any(getattr(network, "is_cache_enabled", False) for network in self._networks)
            if has_cache or getattr(pipe, "_all_hooks", None):
                kind.maybe_free_model_hooks(pipe)

        members: dict[str, Any] = {name: cached_property(name) for name in LOOKED_UP if hasattr(kind, name)}
        if hasattr(kind, "maybe_free_model_hooks"):
            members["maybe_free_model_hooks"] = free
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), {**names, **members})
