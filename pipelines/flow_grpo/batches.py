# SPDX-License-Identifier: Apache-2.0
"""Batches of an image run that are `auto`: measured before training, once; the run's folder keeps the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from visalign.errors import UserError
from visalign.flow.rollout import encoder_inputs
from visalign.interfaces import with_capabilities
from visalign.memory import LESS_MEMORY, BatchSize, fit_batch
from visalign.pipelines.shared.plan import GB, parts_of
from visalign.training.diffusion.images import check_sizes
from visalign.training.diffusion.merging import guidance_scale, mergeable_adapters, merged_adapters

from .config import FlowGRPOConfig
from .inputs import Inputs
from .plan import blank_latents, decoding_pass, forward_pass, image_passes, training_adds, training_pass


def find_batches(
    config: FlowGRPOConfig, policy: Any, inputs: Inputs, accelerator: Accelerator, known: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Return the number of each batch that is auto, judges' included: the known one, else measured on a GPU.

    All processes take the smallest. Without a GPU the numbers are the defaults.
    """
    visited, judges, plain = set[int](), dict[str, BatchSize](), config.with_batches()
    for label, judge in {**inputs.rewards, "the reward": inputs.reward}.items():
        for part in (part for part in parts_of(judge, BatchSize, visited) if part.is_auto):
            judges[f"judge {len(judges) + 1}, of {label}"] = part
    numbers: dict[str, int | None] = {key: part.default for key, part in judges.items()}
    for key in config.auto_batches:
        section, name = key.split(".")
        numbers[key] = getattr(getattr(plain, section), name)
    if accelerator.device.type == "cuda" and not numbers.keys() <= known.keys():
        with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):  # judges load and draw
            numbers |= _measured(config, policy, inputs, judges, accelerator.num_processes)
        for key, number in numbers.items():
            numbers[key] = None if number is None else min(gather_object([number]))
    numbers |= {key: known[key] for key in numbers if key in known}
    for key, part in judges.items():
        part.number = numbers[key]
    if (size := numbers.get("model.decode_batch")) is not None:
        policy.decode_batch = size
    if too_large := [key for key, number in numbers.items() if number == 0]:
        raise UserError(f"{too_large[0]} is auto, and not even one image fits the free memory. {LESS_MEMORY}")
    return numbers


def note_batches(numbers: Mapping[str, int | None], device: torch.device) -> list[str]:
    """Say what auto is in a run."""
    listed = ", ".join(f"{key}={'null' if number is None else number}" for key, number in numbers.items())
    why = "" if device.type == "cuda" else " These are the defaults, as there is no GPU to measure."
    return [f"auto: {listed}.{why}"] if numbers else []


def _measured(
    config: FlowGRPOConfig, policy: Any, inputs: Inputs, judges: Mapping[str, BatchSize], world: int
) -> dict[str, int | None]:
    """Measure batches on the GPU, of the image size that takes most; 0 where not even one image fits."""
    rollout = config.rollout
    samples = math.ceil(rollout.prompts_per_iteration * rollout.group_size / world)
    pairs = samples * image_passes(config).trained / config.optimizer.updates_per_iteration
    policy.module.eval()
    check_sizes(policy, rollout.image_sizes)
    longest = max(inputs.records, key=lambda record: len(str(record["prompt"])))
    record = {**longest, **longest.get("candidates", [{}])[0]}
    with torch.no_grad(), guidance_scale(policy, rollout.guidance):
        condition = policy.encode(encoder_inputs(policy, [record]))
    limits: dict[str, Any] = {"share": 0.5 if rollout.overlap > 1 or rollout.staleness else 1.0}  # judges beside it
    for part in judges.values():
        part.number = part.default
    own, numbers = getattr(policy, "image_size", None), dict[str, int | None]()
    for size in rollout.image_sizes or [own]:
        if rollout.image_sizes:
            policy.image_size = size
        image = _load_judges(config, policy, inputs, record)
        limits["reserved"] = _later_bytes(config, policy, inputs, condition, image, samples, world)
        for key in config.auto_batches:
            number = _fit(key, config, policy, condition, pairs if key == "optimizer.micro_batch" else samples, limits)
            earlier = numbers.get(key)
            numbers[key] = number if earlier is None or number is None else min(number, earlier)
    if rollout.image_sizes:
        policy.image_size = own
    return numbers | {key: part.measure(**limits) for key, part in judges.items()}


def _fit(
    key: str, config: FlowGRPOConfig, policy: Any, condition: Any, most: float, limits: Mapping[str, Any]
) -> int | None:
    """Measure one batch at the policy's image size; None where the policy has no such batch."""
    samples, has_chunks = key == "rollout.batch_size", hasattr(policy, "decode_batch")
    works = {
        "rollout.batch_size": [forward_pass] if has_chunks else [forward_pass, decoding_pass],
        "optimizer.micro_batch": [training_pass],
        "model.decode_batch": [decoding_pass] if has_chunks else [],
    }[key]

    def work(run: Callable[..., torch.Tensor], count: int) -> torch.Tensor:
        if key == "model.decode_batch":
            policy.decode_batch = count
        return run(policy, condition.select(torch.zeros(count, dtype=torch.int64)), blank_latents(policy, count))

    layers = mergeable_adapters(policy.module) if samples and config.rollout.merge_adapters else []
    merged = merged_adapters(layers) if layers else nullcontext()
    with guidance_scale(policy, config.rollout.guidance if samples else None), merged:
        numbers = [fit_batch(partial(work, run), max(1, math.ceil(most)), **limits) for run in works]
    return min((number for number in numbers if number is not None), default=None)


def _load_judges(config: FlowGRPOConfig, policy: Any, inputs: Inputs, record: Mapping[str, Any]) -> torch.Tensor:
    """Score two images, as judges load at their first score; return one of them."""
    with torch.no_grad():
        images = policy.decode(blank_latents(policy, 2)).float()
    records = [{**record, "group_id": 0}] * 2
    for judge in [*inputs.rewards.values(), *([] if config.learns_unrewarded else [inputs.reward])]:
        takes = with_capabilities(judge).capabilities.takes_gpu_images
        judge.score(images if takes else images.cpu(), [str(record["prompt"])] * 2, records)
    if inputs.features is not None:
        inputs.features(images)
    return images[0]


def _later_bytes(
    config: FlowGRPOConfig,
    policy: Any,
    inputs: Inputs,
    condition: Any,
    image: torch.Tensor,
    samples: int,
    world: int,
) -> float:
    """Sum the bytes that a trial does not see: AdamW and averages, and what is kept of each sample."""
    adds = training_adds(config, policy, samples)
    kept = sum(size for part, size in adds.items() if part not in ("trained_weights", "gradients")) * GB
    before = torch.cuda.memory_allocated(policy.device)
    rows = condition.select(torch.zeros(8, dtype=torch.int64))
    kept += samples * (torch.cuda.memory_allocated(policy.device) - before) / 8
    del rows
    if with_capabilities(inputs.reward).capabilities.takes_gpu_images:
        kept += samples * image.nbytes
    return kept + (world > 1) * adds["gradients"] * GB  # DDP exchanges them in buckets
