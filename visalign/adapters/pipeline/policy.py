# SPDX-License-Identifier: Apache-2.0
"""`PipelinePolicy`: any diffusers pipeline of a known family as a `DiffusionPolicy`.

The pipeline's scheduler is exchanged, and its own call is run for one step: so tokenisation, packing, ids,
masks, guidance and the embedding of time are the pipeline's, exactly. What this costs is the Python of that
call, 3 to 11 ms of processor time a velocity (`tests/benchmarks/pipeline_call.py`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers.guiders import ClassifierFreeGuidance
from PIL import Image
from torch import Tensor, nn

from visalign.adapters.lora import LoraSettings
from visalign.adapters.weights import TrainedWeights
from visalign.atomic import umask_permissions
from visalign.errors import UserError
from visalign.flow.parametrization import preserving_scale, velocity_of_prediction
from visalign.interfaces import Condition, ForwardCount, Prediction

from .arguments import (
    at_least_one,
    call_arguments,
    checked_guidance,
    checked_negative,
    checked_source,
    known_family,
)
from .condition import Encoded, PipelineCondition, Source, join, lengths, named, positive, rows_of
from .guidance import Halves, silent
from .loading import load_pipeline
from .lora import load_lora, make_trainable, save_lora, settings_of
from .modular import as_one_call
from .schedulers import handing_scheduler, time_of

TIMESTEP_SCHEDULES = ("diffusers", "plain")
"""The pipeline's own grid, and the paper's: a flow's shift applied once, or a noise schedule's times spaced
evenly from the last."""

EXCHANGED = ("scheduler", "guider", "ocr_guider")
"""Parts that a pipeline is given others for while a policy drives it. Of guiders only plain guidance is left:
others begin at a step's index, which one call has not."""

FINE = 1000
"""Steps of the grid between whose levels times are interpolated."""


class PipelinePolicy:
    """A diffusers pipeline as the algorithms see it; see `visalign.interfaces.DiffusionPolicy`.

    With LoRA the network is frozen but for float32 adapters, and the reference is the model without them (or,
    where training goes on from saved adapters, with those). Without, all of it is trained in float32, and the
    reference is a copy of it. A video is judged by its middle frame, by all where a reward `takes_clips`.
    """

    def __init__(
        self,
        pipe: Any,
        *,
        guidance: float | None = None,
        negative_prompt: str | None = None,
        lora: LoraSettings | None = None,
        lora_path: str | Path | None = None,
        autocast: torch.dtype | None = None,
        image_size: int | tuple[int, int] | None = None,
        num_frames: int | None = None,
        gradient_checkpointing: bool = False,
        decode_batch: int = 8,
        call: Mapping[str, Any] | None = None,
    ) -> None:
        """Take over a pipeline: its scheduler is exchanged, its networks get adapters.

        Args:
            pipe: of a class in `FAMILIES`, on its device, in its dtype.
            guidance: the scale; None is none, or the usual one of a network that takes it as an input.
            negative_prompt: of the unconditional half; None is the pipeline's own.
            lora: adapters to add and train; None trains the whole network.
            lora_path: saved adapters to go on from; their rank, alpha and places count.
            autocast: run the network under autocast in this dtype.
            image_size: in pixels, a square's side or (height, width); None is the pipeline's own.
            num_frames: of a video; 1 makes a picture. None is the pipeline's own.
            gradient_checkpointing: compute activations again in the backward instead of keeping them.
            decode_batch: latents per pass of the autoencoder.
            call: more arguments of the pipeline's call, such as max_sequence_length.

        Raises:
            UserError: a pipeline of no known family, or arguments that it cannot be used with.
        """
        self.pipe, self.family = pipe, known_family(type(pipe).__name__, "The pipeline")
        as_one_call(pipe, self.family)
        self._arguments = inspect.signature(type(pipe).__call__).parameters
        self._call = getattr(type(pipe).__call__, "__wrapped__", None) or type(pipe).__call__
        found = {name: getattr(pipe, name, None) for name in self.family.networks}
        self.networks: dict[str, Any] = {name: part for name, part in found.items() if part is not None}
        one_time = len(self.networks) > 1 or pipe.config.get("expand_timesteps")
        self._mixed = (
            self.family.mixed and not one_time
        )  # the time decides which network, or is laid on tokens
        self.guidance = checked_guidance(pipe, self.family, guidance)
        self.negative_prompt = checked_negative(pipe, self.family, negative_prompt)
        self._fixed = call_arguments(pipe, self.family, image_size, num_frames, call)
        if lora_path is not None:
            lora = settings_of(Path(lora_path), 0 if lora is None else lora.seed)
        network = next(iter(self.networks.values()))
        self.storage_dtype: torch.dtype = torch.float32 if lora is None else network.dtype
        self.autocast = network.dtype if lora is None and network.dtype.itemsize < 4 else autocast
        layers = make_trainable(pipe, self.family, lora, checkpointing=gradient_checkpointing)
        self.module: nn.Module = network if len(self.networks) == 1 else nn.ModuleDict(self.networks)
        self.lora, self.decode_batch = lora, at_least_one("decode_batch", decode_batch)
        if lora_path is not None:
            load_lora(self.networks, Path(lora_path))
        self._trained = TrainedWeights(self.module, layers if lora_path is None and layers else None)
        self._forward_count = ForwardCount()
        self._halves = Halves(self.networks, self.family, self._forward_count)
        self._take_over(pipe)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        encoder_dtype: torch.dtype | None = None,
        decoder_dtype: torch.dtype | None = None,
        quantization: str | None = None,
        without: Sequence[str] = (),
        **options: Any,
    ) -> PipelinePolicy:
        """Load a pipeline from a folder or the hub and make it a policy.

        Args:
            folder_or_id: a folder as `save_pretrained` writes it, or `owner/name`.
            dtype: of the frozen weights; what is trained is float32 always.
            device: where everything goes.
            encoder_dtype: of the text encoders; None is `dtype`.
            decoder_dtype: of the autoencoder; None is `dtype`.
            quantization: of the frozen network under LoRA, one of `QUANTIZATIONS`; None is none.
            without: parts of a modular pipeline that are not loaded, such as FLUX.3's prompt_upsampler.
            **options: of the constructor: guidance, lora, image_size, num_frames, ...

        Raises:
            FileNotFoundError: if the folder or a part of it is missing.
            UserError: if no family knows the pipeline, or an option is out of range.
        """
        pipe = load_pipeline(
            folder_or_id,
            dtype=dtype,
            encoder_dtype=encoder_dtype,
            decoder_dtype=decoder_dtype,
            quantization=quantization,
            adapters=options.get("lora") is not None or options.get("lora_path") is not None,
            without=without,
        )
        return cls(pipe.to(device), **options)

    @property
    def guided(self) -> bool:
        """Whether a velocity takes two halves."""
        return self.guidance > self.family.off and self.family.guidance in ("concatenated", "two calls")

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(iter(self.networks.values())).device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the network's matrix products."""
        return self.autocast or next(iter(self.networks.values())).dtype

    @property
    def forward_count(self) -> ForwardCount:
        """Passes of the network since the start, in latents; with backward if they carry gradient."""
        return self._forward_count

    @torch.no_grad()
    def encode(self, prompts: Sequence[str | Mapping[str, Any]]) -> PipelineCondition:
        """Encode B prompts by the pipeline's own `encode_prompt`, each unique one once and by itself, so that
        a prompt's encoding does not depend on its neighbours' lengths.

        Args:
            prompts: B texts; or records with "prompt" and "source", the picture to edit (a file, a PIL image
                or [3, H, W] in [0, 1]).

        Raises:
            UserError: a picture is missing where the pipeline edits one, or cannot be read.
        """
        asked = [(p, None) if isinstance(p, str) else (str(p["prompt"]), p.get("source")) for p in prompts]
        keys = [(text, source if isinstance(source, str) else id(source)) for text, source in asked]
        first = dict(zip(reversed(keys), reversed(asked), strict=True))
        places = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        sized = "height" in self._fixed
        given = {key[1]: first[key][1] for key in places}
        sources = {name: checked_source(self.pipe, self.family, each, sized) for name, each in given.items()}
        own = self.guided and self.family.source != "none"  # the null prompt may look at the picture
        unique = tuple(self._encode(first[key][0], guided=own, source=sources[key[1]]) for key in places)
        return PipelineCondition(unique, torch.tensor([places[key] for key in keys]))

    @property
    def takes_source(self) -> bool:
        """Whether `encode` is to be given records, with the picture to edit."""
        return self.family.source != "none"

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, time: Tensor | None = None) -> Tensor:
        """Guided velocity dx/dσ; with gradient, only the conditional half carries it.

        Args:
            x: [B, ...] latents.
            sigma: [B] noise levels in [0, 1].
            condition: of the B samples, from `encode`.
            time: [B] as `times` gives it; None computes it.

        Returns:
            [B, ...] float32.
        """
        rows = rows_of(x, sigma, condition)
        time = self.times(sigma) if time is None else time
        seen = x
        if self.prediction != "velocity":
            scale = preserving_scale(sigma).reshape(-1, *[1] * (x.ndim - 1))
            seen = x / scale.to(x.dtype)
        groups, found = self._groups(rows, time), []
        with torch.autocast(x.device.type, self.autocast) if self.autocast else nullcontext():
            for group in groups:
                at = torch.as_tensor(group, device=x.device)
                found.append(self._predict(seen[at], time[at], [rows[i] for i in group]))
        order = torch.argsort(torch.as_tensor([i for group in groups for i in group], device=x.device))
        output = torch.cat(found)[order]
        return velocity_of_prediction(output, x, sigma, self.prediction)

    def times(self, sigmas: Tensor) -> Tensor:
        """What the network is given at noise levels: those of the last grids exactly, others between them."""
        between = time_of(self._scheduler, sigmas, self._fine)
        exact = [
            self._times.get(level, other)
            for level, other in zip(sigmas.flatten().tolist(), between.flatten().tolist(), strict=True)
        ]
        return torch.tensor(exact, dtype=torch.float32, device=sigmas.device).view(sigmas.shape)

    @torch.no_grad()
    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        """The time grid [steps + 1], float32, down to 0.

        Args:
            steps: at least 1.
            timestep_schedule: "diffusers" is what the pipeline's scheduler uses, "plain" the paper's. A model
                that ships levels of its own has these at their number of steps.
        """
        if steps < 1 or timestep_schedule not in TIMESTEP_SCHEDULES:
            raise UserError(
                f"steps={steps}, timestep_schedule={timestep_schedule!r}: steps must be at least 1 and "
                f"timestep_schedule one of {TIMESTEP_SCHEDULES}."
            )
        shipped = self.pipe.config.get("sample_sigmas")
        if shipped and len(shipped) != steps and timestep_schedule == "diffusers":
            warnings.warn(
                f"This {type(self.pipe).__name__} was distilled for {len(shipped)} steps of its own, and "
                f"{steps} take levels that it does not ship. Set the steps to {len(shipped)}.",
                stacklevel=2,
            )
        self._run(self._inputs([self._any]), None, None, steps=steps)
        scheduler = self._scheduler
        sigmas, times = scheduler.grid if timestep_schedule == "diffusers" else scheduler.levels(steps)
        if timestep_schedule == "plain" and self.prediction == "velocity":
            times = time_of(scheduler, sigmas[:-1], self._fine)
        self._times |= dict(zip(sigmas.tolist(), times.tolist(), strict=False))
        return sigmas

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures of latents as the pipeline decodes them; of a video the middle frame.

        Args:
            latents: [B, ...].

        Returns:
            [B, 3, H, W] float32 in [0, 1].
        """
        images = self.decode_frames(latents)
        return images if images.ndim == 4 else images[:, images.shape[1] // 2].contiguous()

    def decode_frames(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, H, W], or videos [B, F, 3, H, W], float32 in [0, 1].

        Args:
            latents: [B, ...].
        """
        found = []
        for chunk in latents.split(self.decode_batch):
            inputs = self._inputs([self._any] * len(chunk))
            decoder = getattr(self.pipe.vae, "dtype", chunk.dtype)
            out = self._run(inputs, chunk.to(decoder), torch.empty(0), output_type="pt")
            images = torch.stack(list(out)) if isinstance(out, list) else out
            found.append(images.float().clamp(0, 1))
        return torch.cat(found)

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the policy is the model before training; may be nested. Call backward outside of it."""
        return self._trained.reference()

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves, in the order of the network."""
        return self._trained.named()

    def save(self, folder: Path) -> None:
        """Write what was trained, in float32.

        Args:
            folder: with LoRA it gets the file that `pipe.load_lora_weights(folder)` reads; without, the whole
                pipeline as `pipe.save_pretrained` writes it.
        """
        if self.lora is not None:
            save_lora(type(self.pipe), self.networks, Path(folder))
        else:
            with self._handed_back():
                self.pipe.save_pretrained(folder)
        umask_permissions(Path(folder))

    def load(self, folder: Path) -> None:
        """Read into this policy what `save` of an equally built one wrote; the reference stays what it was.

        Args:
            folder: as given to `save`.
        """
        if self.lora is not None:
            load_lora(self.networks, Path(folder))
            return
        for part, network in self.networks.items():
            saved = type(network).from_pretrained(folder, subfolder=part, dtype=self.storage_dtype)
            network.load_state_dict(saved.state_dict())

    @torch.no_grad()
    def _take_over(self, pipe: Any) -> None:
        """Stand where the pipeline makes its grid, its start and its embeddings; ask it once for each."""
        pipe.set_progress_bar_config(disable=True)
        self._own = {name: part for name, part in pipe.components.items() if name in EXCHANGED and part}
        self._scheduler = pipe.scheduler = handing_scheduler(pipe.scheduler)
        if "guider" in self._own:
            with silent():
                pipe.guider = pipe.ocr_guider = ClassifierFreeGuidance()
        self.prediction: Prediction = self._scheduler.prediction
        self._times: dict[float, float] = {}
        self._start: Tensor | None = None
        self._prepare, pipe.prepare_latents = pipe.prepare_latents, self._prepared
        self._ask_encoder, pipe.encode_prompt = pipe.encode_prompt, self._encoded
        self._returned: list[tuple[Any, ...]] = []
        blank = Image.new("RGB", (64, 64), "white")
        self._blank = Source(blank) if self.family.source == "needed" else None
        if self.takes_source:
            ask = pipe._encode_vae_image
            pipe._encode_vae_image = lambda *args, **kwargs: self._source.encoded(ask, *args, **kwargs)
        self._null: Encoded = {}
        self._any: Encoded = positive(self._encode("", guided=self.guided, source=self._blank))
        steps = FINE if self.prediction == "velocity" else 1
        self._run(self._inputs([self._any]), None, None, steps=steps)
        self._fine = self._scheduler.grid

    def _encode(self, prompt: str, *, guided: bool, source: Source | None = None) -> Encoded:
        """One prompt, by whatever the pipeline's call asks of its `encode_prompt`."""
        self._returned.clear()
        given = {} if source is None else {"image": source}
        inputs: dict[str, Any] = {"prompt": [prompt], **given, **self._scale(guided)}
        if "negative_prompt" in self._arguments and self.negative_prompt is not None:
            inputs["negative_prompt"] = [self.negative_prompt]
        try:
            self._run(inputs, None, None)
        except ValueError as error:
            raise UserError(f"{type(self.pipe).__name__} refuses its call: {error}") from error
        found = {**named(self._returned, self.family.encodes.split()), **given}
        return found if guided else positive(found)

    def _scale(self, guided: bool) -> dict[str, float]:
        family = self.family
        if family.scale == "-":  # its guider has it
            if "guider" in self._own:
                self.pipe.guider.guidance_scale = self.guidance if guided else family.off
            return {}
        return {family.scale: self.guidance if guided or family.guidance == "embedded" else family.off}

    def _inputs(self, rows: Sequence[Encoded], *, guided: bool = False) -> dict[str, Any]:
        """Arguments of the call for n samples."""
        axes = self.family.batch_axis
        inputs = join(rows, axes)
        if guided:
            inputs = {**join([self._negative()] * len(rows), axes), **inputs}
        else:
            inputs = positive(inputs)
        inputs |= self._scale(guided)
        if "negative_prompt" in self._arguments:
            inputs["negative_prompt"] = None  # some calls have a default of their own
        return inputs

    @torch.no_grad()
    def _negative(self) -> Encoded:
        """The unconditional half, encoded when first needed: the scale may be set later."""
        if not self._null:
            null = self._encode("", guided=True, source=self._blank)
            self._null = {name: value for name, value in null.items() if name.startswith("negative_")}
        return self._null

    def _groups(self, rows: Sequence[Encoded], time: Tensor) -> list[list[int]]:
        """The samples that one call of the pipeline can take, in order of appearance."""
        groups: dict[Any, list[int]] = {}
        alone = self.guided and self.family.alone
        for i, (row, t) in enumerate(zip(rows, time.tolist(), strict=True)):
            shared = lengths(row, self.family.batch_axis, padded=self.family.padded)
            key = (shared, None if self._mixed else t, i if alone else 0)
            groups.setdefault(key, []).append(i)
        return list(groups.values())

    def _predict(self, x: Tensor, time: Tensor, rows: Sequence[Encoded]) -> Tensor:
        """What the pipeline hands its scheduler, [n, ...]."""
        doubled = self.guided and self.family.guidance == "concatenated"
        if not self._mixed:
            time = time[0]
        elif doubled:
            time = time.repeat(2)
        with self._halves.velocity_of(len(x), self.guided):
            self._run(self._inputs(rows, guided=self.guided), x, time)
        taken, self._scheduler.taken = self._scheduler.taken, None
        assert taken is not None
        return taken

    def _run(
        self,
        inputs: Mapping[str, Any],
        latents: Tensor | None,
        at: Tensor | None,
        *,
        steps: int = 1,
        output_type: str = "latent",
    ) -> Any:
        """The pipeline's own call; `at` None makes the grid, an empty one takes no step.

        On given latents it is silent: Qwen-Image warns at every call of what its own encoder left out.
        """
        self._scheduler.at = at
        self._start = latents
        self._source: Any = inputs.get("image")
        shown = {} if self._source is None else {"image": self._source.picture}
        given = {**self._fixed, **inputs, **shown, "num_inference_steps": steps, "output_type": output_type}
        try:
            with nullcontext() if latents is None else silent():
                draw = torch.Generator().manual_seed(0)
                return self._call(self.pipe, **given, generator=draw, return_dict=False)[0]
        finally:
            self._start = None

    def _encoded(self, *args: Any, **kwargs: Any) -> Any:
        """What the pipeline's encoders return, kept for `_encode`."""
        out = self._ask_encoder(*args, **kwargs)
        self._returned.append(out)
        return out

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        """The pipeline's latents and ids; the latents replaced by those that are asked about."""
        bound = inspect.signature(self._prepare).bind(*args, **kwargs)
        bound.arguments.pop("latents", None)
        made = self._prepare(*bound.args, **bound.kwargs)
        whole = made[0] if isinstance(made, tuple) else made
        config = next(iter(self.networks.values())).config
        # Kandinsky 5 lays a condition and a mask behind the channels of its latents
        channels = config.in_visual_dim if getattr(config, "visual_cond", False) else whole.shape[-1]
        drawn, rest = whole[..., :channels], whole[..., channels:]
        self.latent_shape: tuple[int, ...] = tuple(drawn.shape[1:])
        if self._start is None:
            return made
        decoding = self._scheduler.at is not None and not self._scheduler.at.numel()
        given = self._start.to(drawn.device, None if decoding else drawn.dtype)
        if given.shape != drawn.shape:
            raise ValueError(
                f"The latents are {list(given.shape)}; the pipeline works on {list(drawn.shape)}."
            )
        given = given if decoding or not rest.shape[-1] else torch.cat([given, rest], -1)
        return (given, *made[1:]) if isinstance(made, tuple) else given

    @contextmanager
    def _handed_back(self) -> Iterator[None]:
        """Inside, the pipeline has its own parts."""
        given = {name: getattr(self.pipe, name) for name in self._own}
        try:
            for name, part in self._own.items():
                setattr(self.pipe, name, part)
            yield
        finally:
            for name, part in given.items():
                setattr(self.pipe, name, part)
