# SPDX-License-Identifier: Apache-2.0
"""Modular pipelines of diffusers with the members of a classic one, by which `PipelinePolicy` drives both.

A modular pipeline is a row of blocks over a shared state: encoders, preparations, a loop over the times,
decoders. Here the row is run as one call that keeps the gradient of loop and decoders, takes embeddings in
the encoders' place, and asks `encode_prompt` and `prepare_latents` where a classic pipeline does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ModularPipeline
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.modular_pipelines import LoopSequentialPipelineBlocks, PipelineState
from torch import Tensor

from visalign.adapters.model_folder import stored_variants
from visalign.errors import UserError

from .families import Family
from .guidance import silent

WORKFLOW = "text2image"  # of the workflows that a pipeline's blocks declare, the one that is run


def load_modular(
    folder_or_id: str | Path,
    dtypes: Mapping[str, torch.dtype],
    *,
    without: Collection[str] = (),
    variant: str | None = None,
    quantization_config: Any = None,
) -> Any:
    """Load the parts of a modular pipeline that its text-to-image blocks need, in their `dtypes` ("default" is of
    all others); parts `without` are left out, and with them the blocks before the text encoder that need them.
    """
    with silent():
        pipe: Any = ModularPipeline.from_pretrained(str(folder_or_id), workflow=WORKFLOW, trust_remote_code=False)
    all_blocks = _row(pipe, ())
    text = _text_encoder(all_blocks)
    needed = {name for block in all_blocks[text:] for name in _needs(block)}
    free = {name for block in all_blocks[:text] for name in _needs(block)} - needed
    refused = [without] if isinstance(without, str) else [name for name in without if name not in free]
    if refused:
        names, can = ", ".join(refused), ", ".join(sorted(free)) or "nothing"
        raise UserError(
            f"without names {names}; give a list of what this {type(pipe).__name__} can do without: {can}."
        )
    required = {name for block in _row(pipe, without) for name in _needs(block)}
    rounded = {} if quantization_config is None else quantization_config.quant_mapping
    parts = {}
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        if name in required and spec.pretrained_model_name_or_path is not None:
            options = {"quantization_config": rounded[name]} if name in rounded else {}
            if spec.type_hint.__module__.startswith("transformers."):  # of diffusers' own parts it is the default
                options["trust_remote_code"] = False
            part_folder = Path(spec.pretrained_model_name_or_path) / (spec.subfolder or name)
            if variant in stored_variants(part_folder) or not part_folder.is_dir():
                options["variant"] = variant
            parts[name] = spec.load(dtype=dtypes.get(name, dtypes["default"]), **options)
    pipe.update_components(**parts)
    return pipe


def as_one_call(pipe: Any, family: Family) -> None:
    """Give a modular pipeline `encode_prompt`, `prepare_latents` and a call with gradient, in place.

    Blocks before the text encoder (FLUX.3's upsampler of prompts) whose parts were not loaded are left out.
    """
    if not family.modular:
        return
    kind, encodes, guider = type(pipe), family.encodes.split(), pipe.components.get("guider")
    problem, row = "", list[Any]()
    if not issubclass(kind, ModularPipeline):
        problem = "is driven by its blocks. Load its folder as a diffusers.ModularPipeline"
    elif guider is not None and type(guider) is not ClassifierFreeGuidance:
        problem = (
            f"has a {type(guider).__name__} as guider, which may go by the step's index. Set another: "
            "pipe.update_components(guider=ClassifierFreeGuidance())"
        )
    else:
        absent = [name for name, part in pipe.components.items() if part is None]
        row = _row(pipe, absent)
        if missing := sorted({name for block in row for name in _needs(block)} & {*absent}):
            problem = f"has no {', '.join(missing)}. Load its parts (pipe.load_components())"
    if problem:
        raise UserError(f"This {kind.__name__} {problem}, or use PipelinePolicy.from_pretrained.")
    text = _text_encoder(row)
    loop = next(i for i, block in enumerate(row) if isinstance(block, LoopSequentialPipelineBlocks))
    steps = [_with_gradient(block) for block in row[loop].sub_blocks.values()]

    def step(components: Any, state: Any, **at: Any) -> tuple[Any, Any]:
        for run in steps:
            components, state = run(components, state, **at)
        return components, state

    row[loop].set_progress_bar_config(disable=True)
    row[loop].loop_step = step
    taken = dict.fromkeys(encodes) | {p.name: p.kwargs_type for block in row for p in block.inputs if p.name}
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in taken]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    def call(self: Any, **arguments: Any) -> tuple[Any]:
        return self._run_blocks(arguments)

    call.__signature__ = inspect.Signature([self_parameter, *parameters])  # type: ignore[attr-defined]
    pipe.__class__ = type(kind.__name__, (_OneCall, kind), {"__call__": call, "__module__": kind.__module__})
    pipe._encodes, pipe._taken, pipe._captions = tuple(encodes), taken, {"": ""}
    pipe._upsampling, pipe._encoding = row[:text], row[text]
    pipe._preparing, pipe._denoising, pipe._decoding = row[text + 1 : loop], row[loop], row[loop + 1 :]


class _OneCall:
    """Mix-in that `as_one_call` adds to the class of a modular pipeline."""

    @property
    def _execution_device(self: Any) -> torch.device:
        """Device of all components; diffusers searches all layers for an offloaded one, twice a call."""
        return self.device

    def encode_prompt(self: Any, state: Any) -> tuple[Any, ...]:
        """Run the encoders on a state; a language model's rewriting of a prompt is cached, none is made of ""."""
        prompt = state.get("prompt")
        if prompt not in self._captions:
            for block in self._upsampling:
                block(self, state)
            self._captions[prompt] = state.get("prompt")
        state.set("prompt", self._captions[prompt])
        if not getattr(self, "requires_unconditional_embeds", False):
            state.set("negative_prompt", None)  # of which the encoders would say that it is ignored
        self._encoding(self, state)
        return tuple(state.get(name) for name in self._encodes)

    def prepare_latents(self, drawn: Tensor) -> Tensor:
        """Return the latents at which the loop starts, from what the blocks drew."""
        return drawn

    def save_pretrained(self: Any, folder: str | Path) -> None:
        """Write the parts, and an index that names the folder."""
        parent: Any = super()
        parent.save_pretrained(str(folder), overwrite_modular_index=True)

    def _run_blocks(self: Any, arguments: dict[str, Any]) -> tuple[Any]:
        """Return (images,), or (latents,) for the output type "latent"."""
        state, steps = PipelineState(), arguments["num_inference_steps"]
        shipped = self.config.get("sample_sigmas")
        if shipped and len(shipped) != steps:
            arguments["sigmas"] = np.linspace(1.0, 1 / steps, steps).tolist()
        for name, value in arguments.items():
            is_list = "prompt" in name and isinstance(value, list)  # FLUX.3 reads no list
            state.set(name, value[0] if is_list else value, self._taken.get(name))
        with torch.no_grad():
            if state.get("prompt_embeds") is None:
                self.encode_prompt(state)
            for block in self._preparing:
                block(self, state)
        state.set("latents", self.prepare_latents(state.get("latents")))
        if len(state.get("timesteps")):
            _with_gradient(self._denoising)(self, state)
        if arguments["output_type"] == "latent":
            return (state.get("latents"),)
        for block in self._decoding:  # a reward's gradient goes through them
            _with_gradient(block)(self, state)
        images: Any = state.get("images")
        if images.shape[1] == 4:  # over white, as Qwen-Image 2.1's encoder sees images with opacity
            images = images[:, :3] * images[:, 3:] + (1 - images[:, 3:])
        return (images,)


def _row(pipe: Any, absent: Collection[str]) -> list[Any]:
    """Return the leaves and the loop in order, without blocks before the text encoder that need what is absent."""
    blocks = pipe.blocks
    if not any(isinstance(block, LoopSequentialPipelineBlocks) for block in blocks.sub_blocks.values()):
        blocks = blocks.get_workflow(WORKFLOW)
    row = list(blocks.sub_blocks.values())
    text = _text_encoder(row)
    return [block for i, block in enumerate(row) if i >= text or not _needs(block) & {*absent}]


def _text_encoder(row: list[Any]) -> int:
    return next(i for i, block in enumerate(row) if "prompt_embeds" in block.intermediate_output_names)


def _needs(block: Any) -> set[str]:
    return {spec.name for spec in block.expected_components}


def _with_gradient(block: Any) -> Callable[..., Any]:
    """Return a block's call without its `torch.no_grad`."""
    call: Any = type(block).__call__
    return getattr(call, "__wrapped__", call).__get__(block)
