# SPDX-License-Identifier: Apache-2.0
"""Job of reinforcement learning of a text policy, and functions shared by the other text jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from visalign.data.assets import resolve_model
from visalign.evaluation import HeldoutResult
from visalign.evaluation.heldout.text import evaluate_text
from visalign.pipelines.shared.job import PolicyRun, policy_run, result_folder, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, ends_by, evenly_spaced, name_key, spread
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.training.loop.progress import POLICY_COLUMNS, SUPERVISED_COLUMNS
from visalign.training.loop.sampler import check_batch_reward

from .config import SupervisedConfig, TextConfig, TextGRPOConfig, TextPPOConfig
from .footprint import footprint
from .parts import (
    TextInputs,
    build_process,
    build_server,
    build_text_policy,
    build_value_model,
    planned_encoder,
    prepare,
    retokenized,
    syncing,
    with_tool,
)

__all__ = ["TextGRPOConfig", "TextPPOConfig", "estimate", "plan", "run"]


def _build(config: TextConfig, output: Path) -> PolicyRun:
    from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, fitting_demonstrations
    from visalign.adapters.causal_lm.log_partition import PromptLogPartition
    from visalign.training import TextRL
    from visalign.training.text.trajectories import needs_reference

    accelerator, seed, objective = build_accelerator(config, output), config.seed, config.built_objective
    inputs = prepare(config, str(accelerator.device))
    check_batch_reward(inputs.reward, accelerator.num_processes)
    has_reference = needs_reference(objective) or config.latent_flow is not None  # RLFR reads its hidden states
    policy = build_text_policy(config.model, accelerator.device, seed, reference=has_reference)
    with name_key("data.train"):
        policy.check_prompts([record["prompt"] for record in inputs.records])
    server, demonstrations = build_server(config, policy), None
    if inputs.demonstrations is not None:
        with name_key("data.demonstrations"):
            fitting = fitting_demonstrations(policy, inputs.demonstrations, too_long="refuse")
        demonstrations = DemonstrationBatches(policy, fitting, size=config.data.demonstrations_batch, seed=seed)
    algorithm = TextRL(
        policy,
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        objective=config.objective,
        seed=seed,
        accelerator=accelerator,
        dynamic=config.dynamic,
        self_imitation=config.self_imitation,
        latent_flow=config.latent_flow,
        generator=with_tool(config.rollout, server or policy, policy, inputs.records),
        after_update=syncing(config, policy, server, output, accelerator),
        value_model=build_value_model(config.model, accelerator.device),
        log_partition=PromptLogPartition(policy, seed=seed) if objective.surrogate == "flow_balance" else None,
        process=build_process(config, policy),
        demonstrations=demonstrations,
        strata=inputs.strata,
        cycle=config.data.cycle,
        sharding=config.run.sharding,
    )
    return text_run(config, output, config.objective.algorithm, policy, algorithm, inputs)


run = partial(run_job, build=_build)


def text_run(
    config: TextConfig | SupervisedConfig,
    output: Path,
    method: str,
    policy: Any,
    algorithm: Any,
    inputs: TextInputs,
    *,
    summary: Callable[[Any], Mapping[str, Any]] = lambda _: {},
    more_metrics: Callable[[], Mapping[str, float]] = dict,
) -> PolicyRun:
    """Build the run of a text policy; `method` is for its title, `summary` makes more entries of the counters."""
    generation = config.generation
    generator = with_tool(generation, policy, policy, inputs.heldout)

    def measure(records: Records, seeds: Any) -> HeldoutResult:
        def evaluate_part(share: tuple[int, int]) -> HeldoutResult:
            first, end = (len(records) * (share[0] + offset) // share[1] for offset in (0, 1))
            return evaluate_text(
                generator,
                inputs.rewards,
                records[first:end],
                seeds=seeds,
                sampling=generation.sampling,
                stopping=generation.stopping(),
                correctness=config.evaluation.correctness,
            )

        return spread(algorithm.accelerator, len(records), evaluate_part)

    reinforced = isinstance(config, TextConfig)
    return policy_run(
        config,
        output,
        algorithm,
        measure=measure,
        heldout=inputs.heldout,
        more=lambda *_: more_metrics(),
        notes=retokenized(inputs.rewards, policy.tokenizer),
        recorded=config.rewards.recorded if reinforced else (),
        optimized=config.rewards.optimized if reinforced else (),
        columns=POLICY_COLUMNS if reinforced else SUPERVISED_COLUMNS,
        fingerprints={key: fingerprint(source) for key, source in inputs.sources.items()},
        title=f"{method} on {config.model.path}",
        policy=policy,
        samples="completions",
        load_code=load_code(config, output, takes_images=policy.processor is not None),
        counts=lambda c: {**summary(c), "samples": c.samples, "tokens": c.tokens},
        heldout_trained_on=inputs.heldout_trained_on,
        next_command=_next_command(config, output),
    )


def _next_command(config: Any, output: Path) -> list[str]:
    if config.model.lora is not None:
        return ["visalign", "diagnose", str(output)]
    model = result_folder(config, output)
    if isinstance(config, TextConfig) and "rating" in config.rewards.terms:  # a judge that was trained to rate
        evaluated = [str(config.data.heldout), "-r", "visual_quality_r1", "--option", f"model={model}"]
        return ["visalign", "evaluate", *evaluated]
    return ["visalign", "train", "text_sample", f"model.path={model}"]


def load_code(config: Any, output: Path, *, takes_images: bool = False) -> str:
    """Write Python that loads the result into transformers, for the job's working directory."""
    folder, base = (json.dumps(str(name)) for name in (result_folder(config, output), config.model.path))
    kind, reader = "AutoModelForCausalLM", "AutoTokenizer"
    if takes_images:
        kind, reader = "AutoModelForImageTextToText", "AutoProcessor"
    imports, model = f"from transformers import {kind}, {reader}\n", f"model = {kind}.from_pretrained({folder})"
    if config.model.lora is not None:
        imports = f"from peft import PeftModel\n{imports}from visalign.data.assets import resolve_model\n"
        model = f"base = {kind}.from_pretrained(resolve_model({base}))\n"
        model += f"model = PeftModel.from_pretrained(base, {folder})"
    return f"{imports}\n{model}\n{reader.removeprefix('Auto').lower()} = {reader}.from_pretrained({folder})"


def planned_evaluation(config: Any, heldout: Records) -> dict[str, int]:
    """Count the completions of the evaluations; with a verdict, one of each prompt's is greedy."""
    evaluation = config.evaluation
    greedy = isinstance(config, SupervisedConfig) or evaluation.correctness is not None
    prompts = len(evenly_spaced(heldout, evaluation.prompts_on_the_way))
    visits = config.run.iterations // evaluation.every if evaluation.every else 0
    before_and_after = 2 * len(heldout) * (len(evaluation.seeds) + greedy)
    return {
        "heldout_prompts": len(heldout),
        "evaluations_on_the_way": visits,
        "completions": before_and_after + visits * prompts * (1 + greedy),
    }


def plan(config: TextConfig, inputs: TextInputs | None = None) -> dict[str, Any]:
    """Plan the batches of a job, in groups of entries."""
    from visalign.adapters.causal_lm.loading import CONTENT
    from visalign.adapters.model_folder import local_folder

    local_folder(str(resolve_model(config.model.path)), CONTENT)  # a dry run reads nothing else of the model
    inputs = inputs or prepare(config)
    if config.rollout.environment is not None:
        planned_encoder(config)  # refuses a template without tools
    rollout, per_iteration = config.rollout, config.optimizer.updates_per_iteration
    completions = rollout.prompts_per_iteration * rollout.group_size
    return {
        "batch": {
            "training_prompts": len(inputs.records),
            "completions_per_iteration": completions,
            "rounds_per_iteration_at_most": config.dynamic.max_rounds if config.dynamic.enabled else 1,
            "updates_per_iteration": config.objective.epochs * per_iteration,
            "completions_per_update": completions / per_iteration,
            "iterations": config.run.iterations,
            "completions": completions * config.run.iterations,
            "ends_by": ends_by(config.run),
        },
        "objective": {"algorithm": config.objective.algorithm, "source": config.built_objective.source},
        "evaluation": planned_evaluation(config, inputs.heldout),
    }


def estimate(config: TextConfig) -> dict[str, Any]:
    """Extend the plan by memory, operations, hours and tokens a second by device; no model is loaded."""
    inputs = prepare(config)  # once: it loads the rewards
    return {**plan(config, inputs), **footprint(config, inputs)}
