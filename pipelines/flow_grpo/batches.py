# SPDX-License-Identifier: Apache-2.0
"""Batches of an image run that are `auto`: measured before training, once; the run's folder keeps the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.rollout import encoder_inputs
from visalign.interfaces import with_capabilities
from visalign.memory import LESS_MEMORY, BatchSize, fit_batch
from visalign.pipelines.shared.plan import GB, parts_of
from visalign.training.diffusion.images import check_sizes
from visalign.training.diffusion.merging import guidance_scale, mergeable_adapters, merged_adapters

from .config import FlowGRPOConfig
from .inputs import Inputs
from .plan import image_passes, network_passes, training_adds

Numbers = Mapping[str, int | None]


def find_batches(
    config: FlowGRPOConfig, policy: Any, inputs: Inputs, accelerator: Accelerator, stored: Numbers
) -> dict[str, int | None]:
    """Return the number of each batch that is auto, judges' included: the stored one, else measured on a GPU.

    All processes take the smallest. Without a GPU the numbers are the defaults.
    """
    visited, judges, plain = set[int](), dict[str, BatchSize](), config.with_batches()
    for label, judge in {**inputs.rewards, "the reward": inputs.reward}.items():
        for part in parts_of(judge, BatchSize, visited):
            if part.is_auto:
                judges[f"judge {len(judges) + 1}, of {label}"] = part
    numbers: dict[str, int | None] = {key: attrgetter(key)(plain) for key in config.auto_batches}
    numbers |= {key: part.default for key, part in judges.items()}
    if accelerator.device.type == "cuda" and not numbers.keys() <= stored.keys():
        with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):  # judges load and draw
            measured = _measure(config, policy, inputs, judges, accelerator.num_processes)
        everyone = gather_object([measured])
        numbers |= {key: min(other[key] for other in everyone) for key in measured}
    numbers |= {key: stored[key] for key in numbers if key in stored}
    for key, part in judges.items():
        part.number = numbers[key]
    if (size := numbers.get("model.decode_batch")) is not None:
        policy.decode_batch = size
    if too_large := [key for key, number in numbers.items() if number == 0]:
        raise UserError(f"{too_large[0]} is auto, and not even one image fits the free memory. {LESS_MEMORY}")
    return numbers


def note_batches(numbers: Numbers, *, measured: bool) -> list[str]:
    """Say what auto is in a run: sizes that were measured, now or when the run began, or defaults."""
    listed = ", ".join(f"{key}={'null' if number is None else number}" for key, number in numbers.items())
    why = "" if measured else " These are the defaults, as there is no GPU to measure."
    return [f"auto: {listed}.{why}"] if numbers else []


def _measure(
    config: FlowGRPOConfig, policy: Any, inputs: Inputs, judges: Mapping[str, BatchSize], world: int
) -> dict[str, int]:
    """Measure batches on the GPU, at the largest image size; 0 where not even one image fits."""
    rollout, sizes = config.rollout, config.rollout.image_sizes
    samples = math.ceil(rollout.prompts_per_iteration * rollout.group_size / world)
    pairs = math.ceil(samples * image_passes(config).trained / config.optimizer.updates_per_iteration)
    longest = max(inputs.records, key=lambda record: len(str(record["prompt"])))
    record = {**longest, **longest.get("candidates", [{}])[0]}
    policy.module.eval()
    check_sizes(policy, sizes)
    size_before, has_chunks = getattr(policy, "image_size", None), hasattr(policy, "decode_batch")
    if sizes:
        policy.image_size = max(sizes, key=lambda size: math.prod(size) if isinstance(size, tuple) else size**2)
    with torch.no_grad(), guidance_scale(policy, rollout.guidance):
        condition = policy.encode(encoder_inputs(policy, [record]))
    for part in judges.values():
        part.number = part.default  # for the scores by which judges load
    limits: dict[str, Any] = {"share": 0.5 if rollout.overlap > 1 or rollout.staleness else 1.0}  # judges run beside

    def rows_of(count: int) -> Any:
        return condition.select(torch.zeros(count, dtype=torch.int64))

    with torch.no_grad():
        images = network_passes(policy, rows_of(2))[2]().float()
    _load_judges(config, inputs, images, record)
    adds, before = training_adds(config, policy, samples), torch.cuda.memory_allocated(policy.device)
    later = GB * sum(size for part, size in adds.items() if part not in ("trained_weights", "gradients"))
    later += (world > 1) * adds["gradients"] * GB  # DDP exchanges them in buckets
    rows = rows_of(8)
    later += samples * (torch.cuda.memory_allocated(policy.device) - before) / len(rows)
    later += samples * images[0].nbytes * with_capabilities(inputs.reward).capabilities.takes_gpu_images
    limits["reserved"] = later  # bytes that no trial sees: AdamW's, and of each sample

    def trial(key: str, count: int) -> Tensor:
        if key == "model.decode_batch":
            policy.decode_batch = count
        forward, both, decode = network_passes(policy, rows_of(count))
        runs = {"optimizer.micro_batch": [both], "model.decode_batch": [decode]}
        outputs = [run() for run in runs.get(key, [forward] if has_chunks else [forward, decode])]
        return outputs[0]

    numbers = dict[str, int]()
    for key in (key for key in config.auto_batches if has_chunks or key != "model.decode_batch"):
        trains, sampled = key == "optimizer.micro_batch", key == "rollout.batch_size"
        layers = mergeable_adapters(policy.module) if sampled and rollout.merge_adapters else []
        scale = guidance_scale(policy, rollout.guidance if sampled else None)
        with torch.set_grad_enabled(trains), scale, merged_adapters(layers) if layers else nullcontext():
            numbers[key] = fit_batch(partial(trial, key), pairs if trains else samples, **limits) or 0
    if sizes:
        policy.image_size = size_before
    return numbers | {key: part.measure(**limits) for key, part in judges.items()}


def _load_judges(config: FlowGRPOConfig, inputs: Inputs, images: Tensor, record: Mapping[str, Any]) -> None:
    """Score images, as judges load at their first score."""
    prompts, records = [str(record["prompt"])] * len(images), [{**record, "group_id": 0}] * len(images)
    for judge in [*inputs.rewards.values(), *([] if config.learns_unrewarded else [inputs.reward])]:
        capabilities = with_capabilities(judge).capabilities
        if not capabilities.discriminators:  # they are loaded, and score nothing before a run
            judge.score(images if capabilities.takes_gpu_images else images.cpu(), prompts, records)
    if inputs.features is not None:
        inputs.features(images)
