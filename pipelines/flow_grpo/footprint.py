# SPDX-License-Identifier: Apache-2.0
"""What an image run needs, from configuration files alone: memory by part, operations, hours by device."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from visalign.errors import UserError
from visalign.flow.rollout import asked_of
from visalign.pipelines.shared.devices import hours_by_device
from visalign.pipelines.shared.memory import (
    GB,
    dtype_name,
    judge_bytes,
    on_each_device,
    trained_memory,
    weight_bytes,
)
from visalign.training.diffusion.images import check_sizes

from .config import FlowGRPOConfig
from .inputs import Inputs, prepare
from .parts import build_policy
from .plan import plan, planned_cost, trained_per_image

NOT_COUNTED = (
    "kernels' workspaces, the allocator's gaps, activations of sampling, of the autoencoder and of judges"
)


def estimate(config: FlowGRPOConfig) -> dict[str, Any]:
    """Memory, forward-equivalents and hours by device beside the batch arithmetic; no model is loaded."""
    planned = plan(config, measure=False)
    inputs = prepare(config, planned["batch"]["processes"])
    return {**planned, **footprint(config, inputs, planned["evaluation"]["images"])}


def footprint(config: FlowGRPOConfig, inputs: Inputs, evaluated: int) -> dict[str, Any]:
    """Memory in GB, operations and hours of a run on each device, in groups.

    Operations and stored activations are those of the policy's own velocity on the meta device: counted, not
    fitted. On tiny pipelines of five families the operations are exactly those of a real velocity on a CPU,
    the bytes within 6 % of its own, and 20 % fewer where the CPU's attention keeps its probabilities. Under
    autocast they hold the cast copy of each weight too, by the CPU's list of operations; a GPU's has norms in
    float32 besides.
    """
    from visalign.adapters.hollow import hollow_pipelines
    from visalign.training.diffusion.merging import mergeable_adapters

    world, settings = int(os.environ.get("WORLD_SIZE", "1")), config.rollout
    images = settings.prompts_per_iteration * settings.group_size
    update = images * trained_per_image(config) / world / config.optimizer.updates_per_iteration
    pairs = min(config.optimizer.micro_batch, math.ceil(update))
    try:
        with hollow_pipelines() as trace:
            policy, own, trained = _passes(config, inputs.records[0], pairs, trace)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"visalign plan follows a model by shapes alone, and {config.model.path} asks for numbers there "
            f"({str(error).splitlines()[0]}). `visalign train CONFIG --dry-run` loads it and times passes."
        ) from error
    memory = _memory(config, policy, images / world)
    ascent = config.objective.ascent
    graphs = 1 if ascent is None or ascent.stop_range else min(ascent.last, settings.steps)
    held, block = (max(getattr(one, name) for one in trained) for name in ("held", "largest_block"))
    activations = memory["activations_of_a_micro_batch"] = (held * graphs + block) / GB
    if settings.merge_adapters:  # held while nothing is learnt
        merged = sum(layer.get_base_layer().weight.nbytes for layer in mergeable_adapters(policy.module))
        memory["merged_adapters"] = max(0.0, merged / GB - activations)
    own_parts = {*_networks(policy), "trained_weights"}
    network = [name for name in memory if name.partition(", ")[0] in own_parts]
    memory = on_each_device(memory, network, world=world, sharding=config.run.sharding, spare=activations)
    judges, later = judge_bytes({**inputs.rewards, "the sum": inputs.reward})
    memory["judges"] = judges / GB
    memory["in_all"] = math.fsum(memory.values())
    cost = planned_cost(config)
    run = cost * images * config.run.iterations
    again = trained_per_image(config) * images * config.run.iterations * config.objective.epochs
    steps = config.evaluation.steps or settings.steps
    measured = evaluated * steps * (1 + policy_guided(policy))
    flops = math.fsum(one.flops for one in trained) / len(trained)
    operations = (run + again * bool(block)) * flops + measured * own.flops
    return {
        "model": {
            "trained_parameters": sum(w.numel() for _, w in policy.trainable_parameters()),
            "operations_per_forward": flops,
            "latent": list(policy.latent_shape),
        },
        "memory_in_GB": {**memory, "not_counted": ", ".join([NOT_COUNTED, *later])},
        "forward_equivalents": {
            "per_image": cost,
            "per_iteration": cost * images,
            "of_the_run": run,
            "of_evaluation": measured,
        },
        "hours": hours_by_device(operations / world, memory["in_all"]),
    }


@dataclass(frozen=True, order=True)
class Pass:
    """A call of the hollow network."""

    flops: float
    """Operations of a pass for one sample."""
    held: int
    """Bytes of activations that its backward needs."""
    largest_block: int
    """Bytes of those that checkpointing makes again at once."""


def _passes(config: FlowGRPOConfig, record: Any, pairs: int, trace: Any) -> tuple[Any, Pass, list[Pass]]:
    """The hollow policy, at the largest size that it is trained at; a call for `pairs` at its own size, and
    one at each that it is trained at."""
    autocast = "bfloat16" if config.model.autocast == "auto" else config.model.autocast  # as GPUs have it
    plain = replace(config.model, compile=False, autocast=autocast)  # compiling changes no size
    policy: Any = build_policy(plain, torch.device("cpu"), config.seed)
    check_sizes(policy, config.rollout)
    own = _pass(policy, record, pairs, trace)
    if (sizes := config.rollout.image_sizes) is None:
        return policy, own, [own]
    found = {}
    for size in sizes:
        policy.image_size = size
        found[size] = _pass(policy, record, pairs, trace)
    policy.image_size = max(found, key=lambda size: found[size])
    return policy, own, [found[size] for size in sizes]


def _pass(policy: Any, record: Any, pairs: int, trace: Any) -> Pass:
    condition = policy.encode(asked_of(policy, [record] * pairs))
    trace.clear()
    count, x = policy.forward_count, torch.zeros(pairs, *policy.latent_shape, dtype=policy.storage_dtype)
    before = count.forward + count.forward_backward
    policy.velocity(x, torch.full((pairs,), 0.5), condition)
    flops = sum(n for part, n in trace.flops.items() if part in _networks(policy))
    passes = max(1, count.forward + count.forward_backward - before)
    return Pass(flops=flops / passes, held=trace.held, largest_block=trace.largest_block)


def _networks(policy: Any) -> list[str]:
    return list(getattr(policy, "networks", ["transformer"]))


def policy_guided(policy: Any) -> bool:
    """Whether a velocity takes two passes."""
    return policy.guided if hasattr(policy, "guided") else policy.guidance != 1


def _memory(config: FlowGRPOConfig, policy: Any, images: float) -> dict[str, float]:
    """GB of what stays for a whole run, on each device, by part."""
    trained = policy.trainable_parameters()
    own = {id(weight) for _, weight in trained}
    found: dict[str, float] = {}
    for name, part in policy.pipe.components.items():
        if isinstance(part, torch.nn.Module):
            size = weight_bytes(part, own)
            if size:
                found[f"{name}, {dtype_name(part, own)}"] = size / GB
    row = config.objective.regression
    updates = config.objective.epochs * config.optimizer.updates_per_iteration
    old = row is not None and row.anchor == "old" and (row.keeps_old or updates > 1)
    found |= trained_memory(
        [weight for _, weight in trained],
        ema=bool(config.optimizer.ema_decay),
        copies=(config.model.lora is None) + old + len(set((config.objective.experts or {}).values())),
    )
    numbers = math.prod(policy.latent_shape)
    width = policy.storage_dtype.itemsize
    scored = row.visited if row is not None else config.objective.ascent is None
    steps = (config.rollout.sde_window or len(config.rollout.stochastic)) if scored else 0
    # x, x' and the latents as stored, the mean in float32
    found["rollout_records"] = images * numbers * (width + steps * (2 * width + 4)) / GB
    return found
