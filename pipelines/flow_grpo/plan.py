# SPDX-License-Identifier: Apache-2.0
"""What a Flow-GRPO job would do and cost, without doing it: batch arithmetic, forward-equivalents,
expected time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from visalign.adapters.catalogue import has_two_halves
from visalign.data.assets import resolve_model
from visalign.flow.rollout import asked_of
from visalign.pipelines.shared.parts import Records, ends_by, evenly_spaced
from visalign.training.diffusion.cost import forward_equivalents_per_image, planned_passes
from visalign.training.diffusion.images import check_sizes
from visalign.training.policy.settings import reads_reference_log_prob

from .config import FlowGRPOConfig
from .inputs import prepare
from .parts import build_policy

PROBE = 32
"""Samples in the passes that are timed."""


def plan(config: FlowGRPOConfig, *, measure: bool = True) -> dict[str, Any]:
    """Batch arithmetic, cost and expected seconds of a job, in groups; without `measure` no model is loaded
    and `time` is left out."""
    import os

    rollout, optimizer = config.rollout, config.optimizer
    world = int(os.environ.get("WORLD_SIZE", "1"))
    inputs = prepare(config, world)
    heldout = inputs.heldout
    images = rollout.prompts_per_iteration * rollout.group_size
    pairs = round(images * trained_per_image(config))
    updates = config.objective.epochs * optimizer.updates_per_iteration
    some = len(evenly_spaced(heldout, config.evaluation.prompts_on_the_way))
    visits = config.run.iterations // config.evaluation.every if config.evaluation.every else 0
    evaluation_images = 2 * len(heldout) * len(config.evaluation.seeds) + visits * some
    groups: dict[str, Any] = {
        "batch": {
            "processes": world,
            "training_prompts": len(inputs.records),
            "images_per_iteration": images,
            "pairs_per_iteration": pairs,
            "updates_per_iteration": updates,
            "pairs_per_update": pairs / optimizer.updates_per_iteration,
            "micro_batches_per_update": math.ceil(
                pairs / world / optimizer.updates_per_iteration / optimizer.micro_batch
            ),
            "iterations": config.run.iterations,
            "images": images * config.run.iterations,
            "updates": updates * config.run.iterations,
        },
        "cost": {"forward_equivalents_per_image": planned_cost(config)},
        "evaluation": {
            "heldout_prompts": len(heldout),
            "heldout_prompts_trained_on": inputs.seen,
            "seeds": len(config.evaluation.seeds),
            "evaluations_on_the_way": visits,
            "images": evaluation_images,
        },
    }
    if measure:
        groups["time"] = _expected(config, inputs.records, images / world, evaluation_images)
    return groups


def planned_cost(config: FlowGRPOConfig, trained_share: float = 1.0) -> float:
    """Forward-equivalents per image; what a run counts when `trained_share` of its samples have a signal."""
    ascent = config.objective.ascent
    free = _sampled(config) if ascent is None else ascent.counted(config.rollout.steps)[0]
    if config.objective.credit == "turning_points":
        free += config.rollout.completed_per_image
    terms, every = config.rewards.terms.values(), config.objective.balance_every
    rewards = 0 if every is None else sum(term.weight > 0 for term in terms)
    return forward_equivalents_per_image(
        steps=free,
        trained=trained_per_image(config),
        guided=_passes(config, None) > 1,
        reference=_others(config),
        trained_share=trained_share,
        epochs=config.objective.epochs,
        asked_again=_asked_again(config),
        guided_rollout=None
        if config.rollout.guidance is None
        else _passes(config, config.rollout.guidance) > 1,
        measured=rewards / (every or 1) / config.optimizer.updates_per_iteration,
    )


def _passes(config: FlowGRPOConfig, guidance: float | None) -> int:
    """Passes of the network under guidance of this scale; None is the model's own."""
    scale = config.model.guidance if guidance is None else guidance
    return 1 + has_two_halves(resolve_model(config.model.path), config.model.adapter, scale)


def _sampled(config: FlowGRPOConfig) -> float:
    """Denoising steps that an image costs; stored ones none."""
    return config.rollout.sampled_per_image if config.data.pairs is None else 0.0


def trained_per_image(config: FlowGRPOConfig) -> float:
    """Steps, or noise levels, of an image that are trained on in an epoch; what images have in common counts
    once."""
    row, ascent, steps = config.objective.regression, config.objective.ascent, config.rollout.steps
    if ascent is not None:
        return ascent.counted(steps)[1]
    return config.rollout.pairs_per_image if row is None or row.visited else row.level_count(steps)


def _others(config: FlowGRPOConfig) -> float:
    """Other policies that each pair costs a pass of."""
    row, ascent = config.objective.regression, config.objective.ascent
    if ascent is not None:
        return float(ascent.kl > 0)
    if row is None:
        return float(config.objective.build(length=1).kl > 0)
    updates = config.objective.epochs * config.optimizer.updates_per_iteration
    return planned_passes(
        row,
        updates,
        own=_passes(config, None),
        reference=_passes(config, row.reference_guidance),
        iterations=config.run.iterations,
    )


def _asked_again(config: FlowGRPOConfig) -> int:
    """Passes over all trained steps before the update, see `FlowGRPO.collect`."""
    if config.objective.regression is not None or config.objective.ascent is not None:
        return 0
    row = config.objective.build(length=1)
    return bool(row.kl_in_reward or reads_reference_log_prob(row)) + (row.importance_sampling is not None)


def _expected(
    config: FlowGRPOConfig, records: Records, images: float, evaluation_images: int
) -> dict[str, Any]:
    """Seconds from timed passes with their basis, and which limit ends the run; rewards come on top."""
    import torch

    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    cuda = config.run.device == "auto" and torch.cuda.is_available()
    policy: Any = build_policy(config.model, torch.device("cuda" if cuda else "cpu"), config.seed)
    check_sizes(policy, config.rollout)
    some = records[:PROBE]
    sample, _, decode = own = _timed(policy, some)
    evaluation = evaluation_images * ((config.evaluation.steps or config.rollout.steps) * sample + decode)
    found = []
    for size in config.rollout.image_sizes or []:
        policy.image_size = size
        found.append(_timed(policy, some))
    sample, train, decode = (sum(each) / len(each) for each in zip(*(found or [own]), strict=True))
    per_step = _asked_again(config) * sample + config.objective.epochs * (train + _others(config) * sample)
    per_image = _sampled(config) * sample + decode + trained_per_image(config) * per_step
    iteration = images * per_image
    total = config.run.iterations * iteration
    if config.run.max_seconds is not None:
        total = min(total, config.run.max_seconds)
    basis = f"fastest of 3 passes of {len(some)} samples, just now on {policy.device.type}"
    if not cuda:
        basis += f" with {torch.get_num_threads()} threads"
    return {
        "seconds_per_iteration_without_rewards": iteration,
        "seconds_of_evaluation_without_rewards": evaluation,
        "seconds_in_all_without_rewards": total + evaluation,
        "basis": f"{basis}; rewards are not timed",
        "ends_by": ends_by(config.run, iteration),
    }


def _timed(policy: Any, records: Records) -> tuple[float, float, float]:
    """Seconds that a sample takes of a pass, of one with backward, and of decoding."""
    import torch

    condition = policy.encode(asked_of(policy, records))
    count = len(condition)
    x = torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    x = x.to(policy.device, policy.storage_dtype)
    sigma = torch.full((count,), 0.5, device=policy.device)

    def forward() -> None:
        with torch.no_grad():
            policy.velocity(x, sigma, condition)

    def both() -> None:
        policy.velocity(x, sigma, condition).square().mean().backward()
        for _, parameter in policy.trainable_parameters():
            parameter.grad = None

    sample, train, decode = (_seconds(f) / count for f in (forward, both, lambda: policy.decode(x)))
    return sample, train, decode


def _seconds(work: Callable[[], object]) -> float:
    """Seconds of one call: the fastest of three after a first one that warms up."""
    import torch

    times = []
    for _ in range(4):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
