# SPDX-License-Identifier: Apache-2.0
"""Catalogue of the jobs, and reading a configuration file as a job."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from visalign.config import PIPELINE_KEY, load_config, read_config, resolve_config
from visalign.errors import ConfigError, UserError, suggestion
from visalign.settings import MOST_COUNTED

from .shared.learning_rate import FIND, KEY, plan_search, run_with_found_rate, split_search

PIPELINES = {
    "flow_grpo": "visalign.pipelines.flow_grpo.job:FlowGRPOConfig",
    "pref_grpo": "visalign.pipelines.flow_grpo.job:PrefGRPOConfig",
    "sft_images": "visalign.pipelines.flow_grpo.job:SFTImagesConfig",
    "text_dpo": "visalign.pipelines.text.supervised:TextDPOConfig",
    "text_grpo": "visalign.pipelines.text.job:TextGRPOConfig",
    "text_ppo": "visalign.pipelines.text.job:TextPPOConfig",
    "text_process": "visalign.pipelines.text.process:TextProcessConfig",
    "text_reward": "visalign.pipelines.train_reward.text:TextRewardConfig",
    "text_sample": "visalign.pipelines.text.sample:TextSampleConfig",
    "text_sft": "visalign.pipelines.text.supervised:TextSFTConfig",
    "train_reward": "visalign.pipelines.train_reward.job:TrainRewardConfig",
    "ugda": "visalign.pipelines.ugda.job:UGDAConfig",
}
"""`pipeline:` in a file -> module:dataclass; the module offers run(config, output, resume), plan(config)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    config: Any
    run: Callable[..., Any]
    plan: Callable[[Any], Mapping[str, Any]]
    estimate: Callable[[Any], Mapping[str, Any]]
    """The plan without timed passes, with memory and hours where the job estimates them."""


def load_job(name_or_path: str, overrides: Sequence[str] = (), *, pipelines: Sequence[str] = ()) -> Job:
    """Read a configuration file, with `key.sub=value` items over it, of any job or of some pipelines'."""
    path = resolve_config(name_or_path)
    name = read_config(path).get(PIPELINE_KEY)
    if name not in PIPELINES:
        raise ConfigError(
            f"'{path}' names {f'the pipeline {name!r}, which does not exist' if name else 'no pipeline'}. "
            f"{suggestion(str(name or ''), PIPELINES)}Write a line 'pipeline: NAME' with one of: "
            f"{', '.join(PIPELINES)}."
        )
    if name not in (pipelines or PIPELINES):
        needed = " or ".join(f"'{pipeline}'" for pipeline in pipelines)
        raise ConfigError(f"'{path}' is of the pipeline '{name}', not {needed}; visalign train runs any.")
    module_name, _, schema = PIPELINES[name].partition(":")
    module = importlib.import_module(module_name)
    kind, run = getattr(module, schema), module.run
    plans = {"plan": module.plan, "estimate": getattr(module, "estimate", module.plan)}
    finds, overrides = split_search(overrides)
    try:
        config = load_config(kind, path, overrides)
    except ConfigError as error:
        hint = f" Or let short runs find it: {KEY}={FIND}." if f"'{KEY}'" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from error
    if getattr(getattr(config, "run", None), "sharding", False) and config.optimizer.name == "adamw_8bit":
        raise ConfigError("optimizer.name is adamw_8bit, and run.sharding divides the moments already. Leave one out.")
    if finds:
        run = partial(run_with_found_rate, run=run)
        plans = {name: partial(plan_search, plan=plan) for name, plan in plans.items()}
    return Job(config=config, run=run, **plans)


def until_images(job: Job, images: int) -> Job:
    """Return the job with as many iterations as draw `images` images."""
    from visalign.training.diffusion.rollout_settings import RolloutSettings

    rollout = getattr(job.config, "rollout", None)
    if not isinstance(rollout, RolloutSettings):
        pipelines = "flow_grpo, pref_grpo and sft_images"
        raise UserError(f"--images is for {pipelines}, and the pipeline here is {job.config.pipeline}. Leave it out.")
    rounds = job.config.dynamic.max_rounds if job.config.dynamic.enabled else 1  # at most, as the plan counts
    iterations = math.ceil(images / (rollout.prompts_per_iteration * rollout.group_size * rounds))
    if iterations > MOST_COUNTED:
        raise UserError(f"--images {images} takes {iterations} iterations, and a run has at most {MOST_COUNTED}.")
    return replace(job, config=replace(job.config, run=replace(job.config.run, iterations=iterations)))
