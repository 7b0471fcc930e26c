# SPDX-License-Identifier: Apache-2.0
"""`data.cache`: prompt embeddings and clean latents of stored images on disk, for later steps and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.adapters.catalogue import has_two_halves
from visalign.adapters.model_folder import INDEX, MODULAR_INDEX, local_folder, pipeline_index
from visalign.adapters.pipeline.lora_files import has_encoder_layers, lora_file, parse_loras
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.adapters.prompt_cache import PromptCache, TensorCache, drop_encoders
from visalign.adapters.single_file import model_source
from visalign.data.sets.trained_images import image_print
from visalign.hub import hub_file
from visalign.pipelines.shared.parts import Records
from visalign.rewards.base.identity import fingerprint
from visalign.training.diffusion.merging import guidance_scale
from visalign.training.diffusion.samples import Stored

from .config import FlowGRPOConfig, ModelConfig

CHUNK = 32  # Prompts that are encoded at a time


def _context(model: ModelConfig, parts: tuple[str, ...], device: str) -> dict[str, Any]:
    """Return what an encoder's results depend on: files of the model's `parts`, settings, and the kind of device."""
    source = model_source(model.path, model.config)
    prints = {} if source.file is None else {"file": fingerprint(source.file)}
    if (folder := local_folder(source.folder, "is a pipeline")) is None:
        prints["revision"] = hub_file(str(source.folder), "model", INDEX, MODULAR_INDEX).parent.name
    else:
        folders = [folder / part for part in pipeline_index(folder) if part.startswith(parts)]
        prints |= {f"{f.parent.name}/{f.name}": fingerprint(f) for part in folders for f in sorted(part.glob("*"))}
    names = ("dtype", "variant", "use_t5", "guidance", "max_sequence_length", "options")
    return {"files": prints, "device": device, **{name: str(getattr(model, name)) for name in names}}


def open_prompts(config: FlowGRPOConfig, records: Records, device: str) -> PromptCache | None:
    """Open the cache of the records' prompts, None without `data.cache`."""
    if (folder := config.data.cache) is None:
        return None
    context = _context(config.model, ("text_encoder", "tokenizer"), device)
    context |= {} if added_guidance(config) is None else {"guided_evaluation": True}
    loras = parse_loras(config.model.lora_path)
    # layers of text encoders are fused into them, change the embeddings, and are saved with the result
    if fused := [(path, weight) for path, weight in loras if has_encoder_layers(path)]:
        context["loras"] = [(fingerprint(lora_file(path)), weight) for path, weight in fused]
    prompts, frees = [str(record["prompt"]) for record in records], config.model.lora is not None and not fused
    return PromptCache(Path(folder) / "prompts", context, prompts, frees=frees)


def added_guidance(config: FlowGRPOConfig) -> float | None:
    """Return the largest scale of evaluations or the reference that needs the negative prompt; None without one."""
    row, model = config.objective.regression, config.model
    scales = config.evaluation.guidance, None if row is None else row.reference_guidance
    return max((s for s in scales if has_two_halves(model.described_by, model.adapter, s)), default=None)


def fill_prompts(policy: Any, cache: PromptCache, accelerator: Any, guidance: float | None = None) -> str:
    """Encode the prompts that the cache lacks, each process its share, and free the encoders; return a note.

    Under `added_guidance` the negative prompt is encoded, too.
    """
    if guidance is not None and isinstance(policy, PipelinePolicy):
        with guidance_scale(policy, guidance):
            policy.encode_negative()
    was_whole = cache.is_whole
    start, step = accelerator.process_index * CHUNK, accelerator.num_processes * CHUNK
    for first in () if was_whole else range(start, len(cache.prompts), step):
        policy.encode(cache.prompts[first : first + CHUNK])
    accelerator.wait_for_everyone()  # also where the cache is whole: another run may have filled it meanwhile
    if accelerator.is_main_process and not was_whole:
        cache.mark_whole()
    if not cache.frees:
        return "data.cache: the text encoders stay, since they are saved; with a LoRA of the network alone they go."
    freed = drop_encoders(policy.pipe) / 1e9
    return f"data.cache: the text encoders are {'not loaded' if was_whole else f'freed: {freed:.3g} GB'}."


def cached_latents(encode: Stored, policy: Any, config: FlowGRPOConfig) -> Stored:
    """Return `encode` with its results kept on disk, by the content of an image and the size of its latent."""
    context = _context(config.model, ("vae",), policy.device.type)
    cache, prints = TensorCache(Path(str(config.data.cache)) / "latents", context), dict[str, str]()

    def latents(records: Sequence[Mapping[str, Any]]) -> Tensor:
        images = [record["image"] for record in records]
        prints.update({image: image_print(image) for image in images if image not in prints})
        size = f"{list(policy.latent_shape)} {policy.image_size} {policy.storage_dtype}"
        keys = [f"{prints[image]} {size}" for image in images]
        stored = {key: cache.get(key) for key in keys}
        if missing := {key: record for key, record in zip(keys, records, strict=True) if stored[key] is None}:
            # a lone image is encoded twice: convolutions round a batch of one otherwise than larger ones
            encoded = encode([*missing.values(), *[*missing.values()][: len(missing) == 1]])
            stored |= dict(zip(missing, encoded.cpu(), strict=False))
            for key in missing:
                cache.put(key, stored[key])
        return torch.stack([stored[key] for key in keys]).to(policy.device)

    return latents
