# SPDX-License-Identifier: Apache-2.0
"""Catalogue of the jobs, and reading a configuration file as a job."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from visalign.config import PIPELINE_KEY, load_config, read_config, resolve_config
from visalign.errors import ConfigError, suggestion

PIPELINES = {
    "flow_grpo": "visalign.pipelines.flow_grpo.job:FlowGRPOConfig",
    "pref_grpo": "visalign.pipelines.flow_grpo.job:PrefGRPOConfig",
    "text_dpo": "visalign.pipelines.text.dpo:TextDPOConfig",
    "text_grpo": "visalign.pipelines.text.job:TextGRPOConfig",
    "text_ppo": "visalign.pipelines.text.job:TextPPOConfig",
    "text_process": "visalign.pipelines.text.process:TextProcessConfig",
    "text_sample": "visalign.pipelines.text.sample:TextSampleConfig",
    "text_sft": "visalign.pipelines.text.sft:TextSFTConfig",
    "train_reward": "visalign.pipelines.train_reward.job:TrainRewardConfig",
    "ugda": "visalign.pipelines.ugda.job:UGDAConfig",
}
"""`pipeline:` in a file -> module:dataclass; the module offers run(config, output, resume), plan(config)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A configuration with the functions that plan and run it."""

    config: Any
    run: Callable[..., Any]
    plan: Callable[[Any], Mapping[str, Any]]
    estimate: Callable[[Any], Mapping[str, Any]]
    """The plan without timed passes, with memory and hours where the job estimates them."""


def load_job(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """Read a configuration file, `key.sub=value` items over it, and find the pipeline that it is
    for; nothing of the job is run yet.

    Raises:
        ConfigError: the file names no pipeline or an unknown one, or `load_config` refuses it.
    """
    path = resolve_config(name_or_path)
    pipeline = read_config(path).get(PIPELINE_KEY)
    if pipeline not in PIPELINES:
        fault = f"names the pipeline '{pipeline}', which does not exist" if pipeline else "names no pipeline"
        raise ConfigError(
            f"'{path}' {fault}. {suggestion(str(pipeline or ''), PIPELINES)}Write a line "
            f"'pipeline: NAME' with one of: {', '.join(PIPELINES)}."
        )
    module_name, _, schema = PIPELINES[pipeline].partition(":")
    module = importlib.import_module(module_name)
    config = load_config(getattr(module, schema), path, overrides)
    return Job(
        config=config, run=module.run, plan=module.plan, estimate=getattr(module, "estimate", module.plan)
    )


def require_pipeline(name_or_path: str, pipeline: str) -> None:
    """Refuse a configuration of another job than a command's own.

    Raises:
        ConfigError: it is of another job.
    """
    path = resolve_config(name_or_path)
    actual = read_config(path).get(PIPELINE_KEY)
    if actual != pipeline:
        raise ConfigError(
            f"'{path}' is a configuration of the pipeline '{actual}', and this command runs '{pipeline}'. "
            f"Run it with visalign train, or write 'pipeline: {pipeline}' into it."
        )
