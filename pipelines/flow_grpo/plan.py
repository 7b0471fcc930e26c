# SPDX-License-Identifier: Apache-2.0
"""Plan of an image run: batch arithmetic, forward-equivalents, memory by part, timed or estimated hours."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visalign.adapters.catalogue import has_two_halves
from visalign.adapters.offload import ENCODERS, is_offloaded
from visalign.adapters.speed import COMPILED_FROM
from visalign.errors import UserError
from visalign.flow.rollout import encoder_inputs
from visalign.pipelines.shared.parts import Records, ends_by, evenly_spaced, run_device
from visalign.pipelines.shared.plan import GB, dtype_name, per_device, trained_memory, weight_bytes
from visalign.training.diffusion.cost import forward_equivalents_per_image, planned_passes
from visalign.training.diffusion.images import check_sizes
from visalign.training.loop.sampler import PromptSampler
from visalign.training.policy.settings import needs_reference_log_prob

from .config import FlowGRPOConfig, ModelConfig
from .inputs import Inputs, prepare
from .parts import build_policy

PROBE = 32  # Samples in the passes that are timed
NOT_COUNTED = "kernels' workspaces, the allocator's gaps, activations of sampling, of the autoencoder and of judges"
COMPILED_SAVES = ", a quarter of the activations, which compiled blocks do not keep"
"""Of SD3.5-medium at batch 16 on an H200: planned 41.9 GB, held 41.9 eagerly and 33.0 compiled."""


def plan(config: FlowGRPOConfig, *, measure: bool = True) -> dict[str, Any]:
    """Compute batch arithmetic and cost of a job, and with `measure` its seconds from timed passes."""
    config = config.with_batches()
    groups, inputs = _arithmetic(config)
    if measure:
        batch = groups["batch"]
        counts = batch["images_per_iteration"] / batch["processes"], batch.get("rounds_per_iteration_at_most", 1)
        drawn = batch.get("reference_images", 0) / batch["iterations"] / batch["processes"]
        evaluated = groups["evaluation"]["images"] / batch["processes"]
        groups["time"] = _timed_run(config, inputs.records, *counts, drawn, evaluated)
    return groups


def estimate(config: FlowGRPOConfig) -> dict[str, Any]:
    """Compute batch arithmetic, memory, forward-equivalents and hours by device without loading a model."""
    config = config.with_batches()
    groups, inputs = _arithmetic(config)
    return {**groups, **_footprint(config, inputs, groups)}


def _arithmetic(config: FlowGRPOConfig) -> tuple[dict[str, Any], Inputs]:
    rollout, optimizer, evaluation = config.rollout, config.optimizer, config.evaluation
    world, iterations = int(os.environ.get("WORLD_SIZE", "1")), config.run.iterations
    inputs = prepare(config, world)
    heldout, seeds = len(inputs.heldout), len(evaluation.seeds)
    images = rollout.prompts_per_iteration * rollout.group_size
    rounds = config.dynamic.max_rounds if config.dynamic.enabled else 1
    references, replay = _reference_images(config, inputs, rounds), config.self_imitation
    pairs = round(images * image_passes(config).trained)
    few_step = config.objective.few_step  # the updates of critic, surrogate and student count by themselves
    roles = 1 if few_step is None else few_step.critic_updates + len(few_step.roles)
    pairs_per_update = pairs / optimizer.updates_per_iteration / roles
    updates_of_role = config.objective.epochs * optimizer.updates_per_iteration
    warmup = 0 if few_step is None else few_step.warmup  # iterations in which the student waits
    updates = updates_of_role * roles
    during = len(evenly_spaced(inputs.heldout, evaluation.prompts_on_the_way))
    evaluations = iterations // evaluation.every if evaluation.every else 0
    groups: dict[str, Any] = {
        "batch": {
            "processes": world,
            "training_prompts": len(inputs.records),
            "images_per_iteration": images,
            **({"rounds_per_iteration_at_most": rounds} if config.dynamic.enabled else {}),
            "pairs_per_iteration": pairs,
            "updates_per_iteration": updates,
            "pairs_per_update": pairs_per_update,
            "micro_batches_per_update": math.ceil(pairs_per_update / world / int(optimizer.micro_batch)),
            "iterations": iterations,
            "images": images * rounds * iterations,
            **({"reference_images": references} if references else {}),
            "updates": updates * iterations - updates_of_role * warmup,
        },
        "cost": {
            "forward_equivalents_per_image": planned_cost(
                config,
                rounds=rounds,
                references=references / (images * rounds * iterations),
                replayed=0 if replay is None else (replay.batch or images) / (images * rounds),
            )
        },
        "evaluation": {
            "heldout_prompts": heldout,
            "heldout_prompts_trained_on": inputs.heldout_trained_on,
            "seeds": seeds,
            "evaluations_on_the_way": evaluations,
            "images": 2 * heldout * seeds + evaluations * during,
        },
    }
    return groups, inputs


def _reference_images(config: FlowGRPOConfig, inputs: Inputs, rounds: int) -> int:
    """Count the images that a run draws as references; of PAR the most, once for each prompt that it visits."""
    visited = min(len(inputs.records), config.rollout.prompts_per_iteration * config.run.iterations)
    start = 0
    if config.objective.is_policy_gradient and (row := config.objective.build(length=1)).advantage == "par":
        start = visited * row.advantage_options.get("references", 1)
    if inputs.references is None:
        return start
    size = config.rollout.prompts_per_iteration, config.rollout.group_size
    order: dict[str, Any] = {"strata": inputs.strata, "cycle": config.data.cycle}
    sampler = PromptSampler(len(inputs.records), *size, config.seed, **order)
    prompts = [str(record["prompt"]) for record in inputs.records]
    batches = (sampler.batch(number).prompt_index.tolist() for number in range(config.run.iterations * rounds))
    drawn = ((n // rounds, [prompts[i] for i in batch]) for n, batch in enumerate(batches))
    return start + inputs.references.planned(drawn)


def planned_cost(
    config: FlowGRPOConfig,
    trained_share: float = 1.0,
    *,
    rounds: float = 1,
    references: float = 0.0,
    replayed: float = 0.0,
) -> float:
    """Compute the forward-equivalents per image of a run in which `trained_share` of the samples train.

    Of `rounds` one is trained on; per image `references` are drawn besides, and `replayed` are trained on again.
    """
    rollout, objective, passes = config.rollout, config.objective, image_passes(config)
    measured = 0.0
    if objective.balance_every:
        rewards = sum(term.largest_weight > 0 for term in config.rewards.terms.values())
        measured = rewards / objective.balance_every / config.optimizer.updates_per_iteration
    drawn = references * rollout.steps * _halves(config.model, rollout.guidance)
    guided = _halves(config.model, None) > 1
    again = replayed * objective.epochs * passes.trained * (3 + guided)
    per_image = forward_equivalents_per_image(
        steps=passes.sampled,
        trained=passes.trained / rounds,
        guided=guided,
        reference=passes.other_policies,
        trained_share=trained_share,
        epochs=objective.epochs,
        asked_again=passes.before_update,
        guided_rollout=None if rollout.guidance is None else _halves(config.model, rollout.guidance) > 1,
        measured=measured,
    )
    return drawn + again + per_image


class ImagePasses(NamedTuple):
    """Velocities that one image costs, by kind."""

    sampled: float  # Steps without a gradient; none of a stored image, and steps that images share count once
    trained: float  # Steps, or noise levels, that train in an epoch; likewise
    other_policies: float  # Reference, old policy and expert, per trained step
    before_update: int  # Passes over all trained steps, see `FlowGRPO.collect`


def image_passes(config: FlowGRPOConfig) -> ImagePasses:
    rollout, settings = config.rollout, config.objective
    if (ascent := settings.ascent) is not None:  # its samples carry the gradient: no replay, no old policy
        sampled, trained = ascent.counted(rollout.steps)
        return ImagePasses(sampled * settings.epochs, trained, float(ascent.kl > 0), 0)  # each epoch draws anew
    if (few_step := settings.few_step) is not None:
        student = _halves(config.model, None)
        trained, untrained = few_step.planned(student, _halves(config.model, few_step.teacher_guidance))
        return ImagePasses(float(rollout.steps), trained, untrained / trained / student, 0)
    sampled = 0.0 if config.data.is_stored else rollout.sampled_per_image
    if settings.credit == "turning_points":
        sampled += rollout.completed_per_image
    if (regression := settings.regression) is None:
        objective = settings.build(length=1)
        before_update = needs_reference_log_prob(objective) + (objective.importance_sampling is not None)
        return ImagePasses(sampled, rollout.pairs_per_image, float(objective.kl > 0), before_update)
    other_policies = planned_passes(
        regression,
        settings.epochs * config.optimizer.updates_per_iteration,
        passes=_halves(config.model, None),
        reference=_halves(config.model, regression.reference_guidance),
        iterations=config.run.iterations,
    )
    trained = rollout.pairs_per_image if regression.visited else regression.level_count(rollout.steps)
    return ImagePasses(sampled, trained, other_policies, 0)


def _halves(model: ModelConfig, guidance: float | None) -> int:
    """Count the network's passes of a velocity at a guidance scale; None is the model's own."""
    scale = model.guidance if guidance is None else guidance
    return 1 + has_two_halves(model.described_by, model.adapter, scale)


# Seconds, from passes of the loaded model


def _timed_run(
    config: FlowGRPOConfig, records: Records, images: float, rounds: int, references: float, evaluated: float
) -> dict[str, Any]:
    """Time passes, and extrapolate to `rounds` of `images`, of which one is trained on, and to drawn `references`."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    policy: Any = build_policy(config.model, run_device(config.run), config.seed)
    check_sizes(policy, config.rollout.image_sizes)
    probe = records[:PROBE]
    by_size = [_seconds_per_sample(policy, probe)]
    sample, _, decode = by_size[0]
    # `sample` is a velocity under the model's own guidance
    halves = _halves(config.model, config.evaluation.guidance) / _halves(config.model, None)
    evaluation = evaluated * ((config.evaluation.steps or config.rollout.steps) * halves * sample + decode)
    if config.rollout.image_sizes:
        by_size = [_seconds_per_sample(policy, probe, size) for size in config.rollout.image_sizes]
    sample, train, decode = (sum(seconds) / len(by_size) for seconds in zip(*by_size, strict=True))
    passes = image_passes(config)
    epoch = train + passes.other_policies * sample
    per_step = passes.before_update * sample + config.objective.epochs * epoch
    drawn = passes.sampled * sample + (1 + config.rollout.scouts_per_image) * decode
    iteration = images * (rounds * drawn + passes.trained * per_step)
    iteration += references * (config.rollout.steps * sample + decode)
    total = min(config.run.iterations * iteration, config.run.max_seconds or math.inf)
    threads = f" with {torch.get_num_threads()} threads" if policy.device.type == "cpu" else ""
    return {
        "seconds_per_iteration_without_rewards": iteration,
        "seconds_of_evaluation_without_rewards": evaluation,
        "seconds_in_all_without_rewards": total + evaluation,
        "basis": f"fastest of 3 passes of {len(probe)} samples, just now on {policy.device.type}{threads}; "
        "rewards are not timed",
        "ends_by": ends_by(config.run, iteration),
    }


def _seconds_per_sample(policy: Any, records: Records, size: Any = None) -> list[float]:
    """Time a forward, a forward with backward, and a decoding, per sample, at an image size or the present one."""
    if size is not None:
        policy.image_size = size
    condition = policy.encode(encoder_inputs(policy, records))
    count, seconds = len(condition), []
    for work in network_passes(policy, condition):
        times = []
        for _ in range(4):  # the first warms up
            begin = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds.append(min(times[1:]) / count)
    return seconds


def network_passes(policy: Any, condition: Any) -> tuple[Callable[[], Tensor], ...]:
    """Return functions that run a forward, a forward with backward, and a decoding of a condition's samples."""
    count, generator = len(condition), torch.Generator().manual_seed(0)
    x = torch.randn(count, *policy.latent_shape, generator=generator).to(policy.device, policy.storage_dtype)
    sigma = torch.full((count,), 0.5, device=policy.device)

    def forward() -> Tensor:
        with torch.no_grad():
            return policy.velocity(x, sigma, condition)

    def both() -> Tensor:
        v = policy.velocity(x, sigma, condition)
        v.square().mean().backward()
        for _, parameter in policy.trainable_parameters():
            parameter.grad = None
        return v.detach()

    return forward, both, partial(policy.decode, x)


# Memory and hours, from shapes only


class Pass(NamedTuple):
    """Velocity of the network without weights."""

    flops: float  # Operations of a pass for one sample
    activations: int  # Bytes of activations that its backward needs
    largest_block: int  # Bytes of those that checkpointing computes again at once


def _footprint(config: FlowGRPOConfig, inputs: Inputs, groups: Mapping[str, Any]) -> dict[str, Any]:
    """Compute memory in GB, operations and hours of a run on each device, in groups.

    Operations and stored activations are counted on the policy's own velocity on the meta device. Of tiny pipelines
    the operations equal those of a real velocity, and the bytes are within 6 %, or 20 % less where attention on the
    CPU keeps its probabilities. Autocast's copies are those of a CPU; a GPU has norms in float32 besides.
    """
    from visalign.adapters.hollow import hollow_pipelines

    batch, evaluated = groups["batch"], groups["evaluation"]["images"]
    world, all_images = batch["processes"], batch["images"]
    images = all_images / batch["iterations"]
    pairs = min(int(config.optimizer.micro_batch), math.ceil(batch["pairs_per_update"] / world))
    try:
        with hollow_pipelines() as trace:
            policy, own_size, passes = _hollow_passes(config, inputs.records[0], pairs, trace)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"visalign plan follows a model by shapes alone, and {config.model.path} asks for numbers there "
            f"({str(error).splitlines()[0]}). `visalign train CONFIG --dry-run` loads it and times passes."
        ) from error
    memory, network, offloaded = _memory(config, policy, images / world, passes)
    details = {"in_CPU_memory": offloaded} if offloaded else {}
    if (references := inputs.references) is not None:  # at most, uint8; those of prompts that came long ago go
        visits = images / config.rollout.group_size * min(references.every or math.inf, batch["iterations"])
        stored = references.keep * min(len(inputs.records), visits) * _image_numbers(policy)
        details["reference_images_in_CPU_memory_and_a_checkpoint"] = stored / GB
    cost, trained = groups["cost"]["forward_equivalents_per_image"], image_passes(config).trained
    trained_images = batch["images_per_iteration"] * batch["iterations"]
    recomputed = trained * trained_images * config.objective.epochs * any(p.largest_block for p in passes)
    evaluation = evaluated * (config.evaluation.steps or config.rollout.steps)
    evaluation *= _halves(config.model, config.evaluation.guidance)
    flops = math.fsum(p.flops for p in passes) / len(passes)
    size = sum(weight.numel() for weight in policy.module.parameters())
    kind = _kind(config) if config.model.compile is not False and size >= COMPILED_FROM else "eager"
    return {
        "model": {
            "trained_parameters": sum(w.numel() for _, w in policy.trainable_parameters()),
            "operations_per_forward": flops,
            "latent": list(policy.latent_shape),
        },
        "forward_equivalents": {
            "per_image": cost,
            "per_iteration": cost * images,
            "of_the_run": cost * all_images,
            "of_evaluation": evaluation,
        },
        **per_device(
            memory,
            network,
            {**inputs.rewards, "the sum": inputs.reward},
            (cost * all_images + recomputed) * flops + evaluation * own_size.flops,
            sharding=config.run.sharding,
            not_counted=NOT_COUNTED + COMPILED_SAVES * (kind != "eager"),
            spare=memory["activations_of_a_micro_batch"],
            details=details,
            kind=kind,
        ),
    }


def _kind(config: FlowGRPOConfig) -> str:
    """Return the kind of `PEAK_SHARES` that iterations with compiled blocks are of."""
    if config.objective.regression or config.objective.ascent or config.objective.few_step:
        return "compiled blocks, regression"
    is_window = config.rollout.pairs_per_image <= config.rollout.steps / 2
    return f"compiled blocks, {'a window of steps' if is_window else 'steps'} replayed"


def _hollow_passes(config: FlowGRPOConfig, record: Any, pairs: int, trace: Any) -> tuple[Any, Pass, list[Pass]]:
    """Trace velocities without weights: (policy at its largest size, its own pass, one pass per training size)."""
    autocast = "bfloat16" if config.model.autocast == "auto" else config.model.autocast  # as GPUs have it
    model = replace(config.model, compile=False, autocast=autocast)  # compiling changes no size
    policy: Any = build_policy(model, torch.device("cpu"), config.seed)
    check_sizes(policy, config.rollout.image_sizes)

    def velocity() -> Pass:
        condition = policy.encode(encoder_inputs(policy, [record] * pairs))
        trace.clear()
        count, x = policy.forward_count, torch.zeros(pairs, *policy.latent_shape, dtype=policy.storage_dtype)
        before = count.forward + count.forward_backward
        policy.velocity(x, torch.full((pairs,), 0.5), condition)
        flops = sum(n for part, n in trace.flops.items() if part in _networks(policy))
        passes = max(1, count.forward + count.forward_backward - before)
        return Pass(flops=flops / passes, activations=trace.held, largest_block=trace.largest_block)

    own_size = velocity()
    if (sizes := config.rollout.image_sizes) is None:
        return policy, own_size, [own_size]
    passes = []
    for size in sizes:
        policy.image_size = size
        passes.append(velocity())
    policy.image_size = sizes[passes.index(max(passes))]
    return policy, own_size, passes


def _image_numbers(policy: Any) -> int:
    """Count the numbers of an image, 3 H W, by its latent and the autoencoder's scale."""
    config = policy.pipe.vae.config
    scale = getattr(policy.pipe, "vae_scale_factor", None) or policy.pipe.vae_scale_factor_spatial
    return 3 * scale**2 * math.prod(policy.latent_shape) // (config.get("latent_channels") or config["z_dim"])


def _networks(policy: Any) -> list[str]:
    return list(getattr(policy, "networks", ["transformer"]))


def _memory(config: Any, policy: Any, images: float, passes: list[Pass]) -> tuple[dict[str, float], list[str], float]:
    """Compute (GB of a process by part, the parts that are weights of the trained network, GB in CPU memory)."""
    from visalign.training.diffusion.merging import mergeable_adapters

    objective, rollout = config.objective, config.rollout
    weights = [weight for _, weight in policy.trainable_parameters()]
    trained_ids = {id(weight) for weight in weights}
    memory, network, offloaded = dict[str, float](), ["trained_weights"], dict[bool, float]()
    for name, part in policy.pipe.components.items():
        unloaded = config.data.cache is not None and config.model.lora is not None and name.startswith("text_encoder")
        if isinstance(part, torch.nn.Module) and not unloaded and (size := weight_bytes(part, trained_ids)):
            if config.model.offload and is_offloaded(name):  # encoders are in use together, the autoencoder later
                used = name.startswith(ENCODERS)
                offloaded[used] = offloaded.get(used, 0.0) + size / GB
                continue
            key = f"{name}, {dtype_name(part, trained_ids)}"
            memory[key] = size / GB
            network += [key] * (name in _networks(policy))
    memory |= training_adds(config, policy, images)
    ascent = objective.ascent
    graphs = 1 if ascent is None or ascent.stop_range else min(ascent.last, rollout.steps)
    largest, block = max(p.activations for p in passes), max(p.largest_block for p in passes)
    activations = memory["activations_of_a_micro_batch"] = (largest * graphs + block) / GB
    if offloaded:  # in use while no activations are held
        memory["offloaded_parts_in_use"] = max(0.0, max(offloaded.values()) - activations)
    if objective.teacher is not None:
        memory["teacher"] = sum(memory[key] for key in network)
    if rollout.merge_adapters:  # merged weights exist only while sampling, when no activations are held
        merged = sum(layer.get_base_layer().weight.nbytes for layer in mergeable_adapters(policy.module))
        memory["merged_adapters"] = max(0.0, merged / GB - activations)
    return memory, network, sum(offloaded.values())


def training_adds(config: FlowGRPOConfig, policy: Any, images: float) -> dict[str, float]:
    """Compute the GB of `trained_memory` and of the records of sampled images, by part."""
    objective, rollout, optimizer = config.objective, config.rollout, config.optimizer
    weights = [weight for _, weight in policy.trainable_parameters()]
    row, ascent, few_step = objective.regression, objective.ascent, objective.few_step
    updates = objective.epochs * optimizer.updates_per_iteration  # in the first of them the policy is the old one
    keeps_old = row is not None and row.anchor == "old" and (row.keeps_old or updates > 1)
    copies = (config.model.lora is None) + keeps_old + len(set((objective.experts or {}).values()))
    weights *= 1 if few_step is None else 1 + len(few_step.roles)
    memory = trained_memory(weights, ema=bool(optimizer.ema_decay), copies=copies, optimizer=optimizer.name)

    # rollout records: the latents as stored, and per recorded step x and x' as stored and the mean in float32
    recorded = (ascent or few_step) is None if row is None else row.visited
    steps = (rollout.sde_window or len(rollout.stochastic)) if recorded else 0
    steps = rollout.steps if few_step is not None else steps  # x before each, and the velocity in float32
    width = policy.storage_dtype.itemsize
    numbers = images * math.prod(policy.latent_shape)
    return memory | {"rollout_records": numbers * (width + steps * (2 * width + 4)) / GB}
