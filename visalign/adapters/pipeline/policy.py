# SPDX-License-Identifier: Apache-2.0
"""`PipelinePolicy`: any diffusers pipeline of a known family as a `DiffusionPolicy`.

The pipeline's scheduler is exchanged, and its own call is run for one step: so tokenisation, packing, ids,
masks, guidance and the embedding of time are the pipeline's, exactly. What this costs is the Python of that
call, 1 to 3 ms of processor time (`tests/benchmarks/images/pipeline_call.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.adapters.lora import LoraSettings
from visalign.adapters.model_folder import explain_damage, pipeline_index
from visalign.adapters.offload import ENCODERS, place
from visalign.adapters.prompt_cache import PromptCache
from visalign.adapters.single_file import model_source
from visalign.adapters.weights import TrainedWeights
from visalign.errors import UserError
from visalign.flow.parametrization import preserving_scale, velocity_of_prediction
from visalign.interfaces import Condition, ForwardCount, Prediction

from .arguments import checked_source, known_family
from .base import DiffusersPolicy
from .call import PipelineCall
from .condition import Encoded, PipelineCondition, check_condition, lengths, source_key
from .guidance import Halves
from .loading import load_pipeline
from .lora import LoraPaths, make_trainable, start_from_loras
from .modular import load_modular
from .quantization import dtype_of, quantization_of
from .schedulers import time_of

FINE = 1000  # steps of the schedule between whose levels times are interpolated


class PipelinePolicy(DiffusersPolicy):
    """A diffusers pipeline as the algorithms see it; see `visalign.interfaces.DiffusionPolicy`.

    With LoRA the network is frozen but for float32 adapters, and the reference is the model without them (or,
    where training goes on from saved adapters, with those). Without, all of it is trained in float32, and the
    reference is a copy of it. A video is judged by its middle frame, by all where a reward `takes_clips`. The
    pipeline is changed: its scheduler is exchanged, its networks get adapters.

    `pipe` is of a class in `FAMILIES`, on its device, in its dtype. Guidance None is none, or the usual one of a
    network that takes the scale as an input. `lora_path` are LoRAs to continue from, each PATH or PATH:WEIGHT, whose
    rank, alpha and layers count. `image_size` is a square's side or (height, width), `num_frames` 1 makes an image,
    and None is the pipeline's own. `call` has more arguments of the pipeline's call, such as max_sequence_length.
    """

    def __init__(
        self,
        pipe: Any,
        *,
        guidance: float | None = None,
        negative_prompt: str | None = None,
        lora: LoraSettings | None = None,
        lora_path: LoraPaths | None = None,
        autocast: torch.dtype | None = None,
        image_size: int | tuple[int, int] | None = None,
        num_frames: int | None = None,
        gradient_checkpointing: bool = False,
        decode_batch: int = 8,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        self._call = PipelineCall(pipe, image_size, num_frames, guidance, negative_prompt, call)
        self.pipe, self.family, self.networks = pipe, self._call.family, self._call.networks
        self.latent_shape: tuple[int, ...] = self._call.latent_shape
        self.prediction: Prediction = self._call.scheduler.prediction
        # the time decides which network, or is laid on tokens
        one_time = len(self.networks) > 1 or pipe.config.get("expand_timesteps")
        self._mixed = self.family.mixed and not one_time
        self._start = None if lora_path is None else start_from_loras(pipe, [*self.networks], lora_path, lora)
        lora = lora if self._start is None else self._start.settings
        network = next(iter(self.networks.values()))
        self.storage_dtype: torch.dtype = torch.float32 if lora is None else dtype_of(network)
        self.autocast = network.dtype if lora is None and network.dtype.itemsize < 4 else autocast
        layers = make_trainable(pipe, self.family, lora, checkpointing=gradient_checkpointing)
        self.module: nn.Module = network if len(self.networks) == 1 else nn.ModuleDict(self.networks)
        self.lora, self.decode_batch, self._image_size = lora, decode_batch, image_size
        if self._start is not None:
            self._start.fill(self.networks)
        self._trained = TrainedWeights(self.module, layers if self._start is None and layers else None)
        self.forward_count = ForwardCount()  # Since the start, in latents; with backward if they carry gradient
        self._halves = Halves(self.networks, self.family, self.forward_count)
        self._times: dict[float, float] = {}
        self._fine = self._own_schedule(FINE if self.prediction == "velocity" else 1)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        variant: str | None = None,
        config: str | Path | None = None,
        encoder_dtype: torch.dtype | None = None,
        decoder_dtype: torch.dtype | None = None,
        quantization: str | None = None,
        without: Sequence[str] = (),
        offload: bool = False,
        prompt_cache: PromptCache | None = None,
        **options: Any,
    ) -> PipelinePolicy:
        """Load a pipeline from a folder, a file or the hub, networks rounded while they are read; make it a policy.

        `dtype` is of the frozen weights, of encoders and autoencoder unless they have their own; trained weights are
        always float32. `config`, a folder or hub name, describes a checkpoint of one file (see `model_source`), and
        `variant` is that of the weights' files, such as fp16. `quantization` is one of `QUANTIZATIONS`. Parts of a
        modular pipeline that are not loaded, such as FLUX.3's prompt_upsampler, are named in `without`. With `offload`
        encoders and autoencoder stay in CPU memory, and are copied to `device` while they are used. A `prompt_cache`
        keeps what the text encoders of a classic pipeline return.
        """
        source = model_source(folder_or_id, config)
        index = pipeline_index(source.folder)
        kind = index.get("_class_name")
        family = known_family(kind, str(folder_or_id))
        if without and not family.modular:
            raise UserError(f"without is {without!r}, and a {kind} is loaded whole. Leave without out.")
        adapters = options.get("lora") is not None or options.get("lora_path") is not None
        quantized = quantization_of(quantization, family.present(index), dtype, adapters=adapters)
        dtypes = {"default": dtype}
        if encoder_dtype is not None:
            dtypes |= {part: encoder_dtype for part in index if part.startswith(ENCODERS)}
        if decoder_dtype is not None and "vae" in index:
            dtypes["vae"] = decoder_dtype
        if family.modular:
            files = {"variant": source.variant(variant), **quantized}
            with explain_damage(source.folder, str(kind)):
                modular = load_modular(source.folder, dtypes, without=without, **files)
            pipe: Any = place(modular, device, offload=offload)
        else:
            more = {"variant": variant, "prompt_cache": prompt_cache, **quantized}
            pipe = load_pipeline(source, index, dtypes, device, offload=offload, **more)
        return cls(pipe, **options)

    @property
    def guidance(self) -> float:
        """The scale, which may be set."""
        return self._call.guidance

    @guidance.setter
    def guidance(self, scale: float) -> None:
        self._call.guidance = scale

    @property
    def guided(self) -> bool:
        """Return True if a velocity needs two halves."""
        return self._call.guided

    def encode_negative(self) -> None:
        """Encode the negative prompt, as the first velocity under guidance would."""
        self._call.inputs([self._call.nothing], guided=self.guided)

    def _resize(self, size: int | tuple[int, int] | None) -> None:
        self._call.resize(size)
        self.latent_shape, self._times = self._call.latent_shape, {}
        self._fine = self._own_schedule(FINE if self.prediction == "velocity" else 1)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Mapping[str, Any]]) -> PipelineCondition:
        """Encode B prompts by the pipeline's own `encode_prompt`, each unique one once and by itself, so that
        a prompt's encoding does not depend on its neighbours' lengths.

        A prompt is a text, or a record with "prompt" and "source", the image to edit (a file, a PIL image or
        [3, H, W] in [0, 1]) or, of a family that joins `several`, a list of them.
        """
        prompt_sources = [(p, None) if isinstance(p, str) else (str(p["prompt"]), p.get("source")) for p in prompts]
        keys = [(text, source_key(source)) for text, source in prompt_sources]
        first = dict(zip(reversed(keys), reversed(prompt_sources), strict=True))
        row_of = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        sources = {
            name: checked_source(self.pipe, self.family, source, "height" in self._call.fixed)
            for name, source in {key[1]: first[key][1] for key in row_of}.items()
        }
        null_per_source = self.guided and self.takes_source  # the null prompt may look at the image
        with self._call.encoding():  # once for all prompts
            unique = tuple(
                self._call.encode(first[key][0], guided=null_per_source, source=sources[key[1]]) for key in row_of
            )
        return PipelineCondition(unique, torch.tensor([row_of[key] for key in keys]))

    @property
    def takes_source(self) -> bool:
        """Return True if `encode` needs records with the images to edit."""
        return self.family.source != "none"

    @property
    def frame_rate(self) -> float:
        """Frames per second of its videos: the call's `frame_rate`, else the family's."""
        return float(self._call.fixed.get("frame_rate", self.family.frame_rate))

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, time: Tensor | None = None) -> Tensor:
        """Guided velocity dx/dσ [B, ...] float32, gradient in the conditional half; `time` [B] as `times` gives it."""
        rows = check_condition(PipelineCondition, x, sigma, condition).rows()
        time = self.times(sigma) if time is None else time
        network_input = x
        if self.prediction != "velocity":
            scale = preserving_scale(sigma).reshape(-1, *[1] * (x.ndim - 1))
            network_input = x / scale.to(x.dtype)
        groups, velocities = self._groups(rows, time), []
        with torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext():
            if len(groups) == 1:  # the usual case, without copies or indices that wait for a GPU
                return velocity_of_prediction(self._predict(network_input, time, rows), x, sigma, self.prediction)
            for group in groups:
                at = torch.as_tensor(group, device=x.device)
                velocities.append(self._predict(network_input[at], time[at], [rows[i] for i in group]))
        order = torch.argsort(torch.as_tensor([i for group in groups for i in group], device=x.device))
        return velocity_of_prediction(torch.cat(velocities)[order], x, sigma, self.prediction)

    def times(self, sigmas: Tensor) -> Tensor:
        """Return the network's times at noise levels: exact for the last schedules, interpolated elsewhere."""
        between = time_of(self._call.scheduler, sigmas, self._fine)
        exact = [
            self._times.get(level, other)
            for level, other in zip(sigmas.flatten().tolist(), between.flatten().tolist(), strict=True)
        ]
        return torch.tensor(exact, dtype=torch.float32, device=sigmas.device).view(sigmas.shape)

    @torch.no_grad()
    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        """The timestep schedule [steps + 1], float32, down to 0: "diffusers" is what the pipeline's scheduler
        uses, "plain" the paper's. A model that ships levels of its own has these at their number of steps.
        """
        shipped = self.pipe.config.get("sample_sigmas")
        if shipped and len(shipped) != steps and timestep_schedule == "diffusers":
            warnings.warn(
                f"This {type(self.pipe).__name__} was distilled for {len(shipped)} steps of its own, and "
                f"{steps} take levels that it does not ship. Set the steps to {len(shipped)}.",
                stacklevel=2,
            )
        cached, scheduler = self._own_schedule(steps), self._call.scheduler
        sigmas, times = cached if timestep_schedule == "diffusers" else scheduler.levels(steps)
        if timestep_schedule == "plain" and self.prediction == "velocity":
            times = time_of(scheduler, sigmas[:-1], self._fine)
        self._times |= dict(zip(sigmas.tolist(), times.tolist(), strict=False))
        return sigmas

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, H, W] float32 in [0, 1] as the pipeline decodes them; of a video the middle frame."""
        return self._call.images(latents, self.decode_batch)

    def decode_frames(self, latents: Tensor) -> Tensor:
        """Images [B, 3, H, W], or videos [B, F, 3, H, W], float32 in [0, 1]."""
        return self._call.frames(latents, self.decode_batch)

    def _own_parts(self) -> AbstractContextManager[None]:
        return self._call.handed_back()

    @torch.no_grad()
    def _own_schedule(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return the pipeline's own (σ [steps + 1], time [steps])."""
        self._call.run(self._call.inputs([self._call.nothing]), None, None, steps=steps)
        return self._call.scheduler.schedule

    def _groups(self, rows: Sequence[Encoded], time: Tensor) -> list[list[int]]:
        """Group the samples that one call of the pipeline can take, in order of appearance."""
        groups: dict[Any, list[int]] = {}
        one_by_one = self.family.alone == "always" or (self.guided and self.family.alone == "guided")
        times = [None] * len(rows) if self._mixed else time.tolist()
        for i, (row, t) in enumerate(zip(rows, times, strict=True)):
            shared = lengths(row, self.family.batch_axis, padded=self.family.padded)
            groups.setdefault((shared, t, i if one_by_one else 0), []).append(i)
        return list(groups.values())

    def _predict(self, x: Tensor, time: Tensor, rows: Sequence[Encoded]) -> Tensor:
        """Return the prediction that the pipeline passes to its scheduler, [n, ...]."""
        doubled = self.guided and self.family.guidance == "concatenated"
        if not self._mixed:
            time = time[0]
        elif doubled:
            time = time.repeat(2)
        with self._halves.velocity_of(len(x), self.guided):
            self._call.run(self._call.inputs(rows, guided=self.guided), x, time)
        taken, self._call.scheduler.taken = self._call.scheduler.taken, None
        assert taken is not None
        return taken
