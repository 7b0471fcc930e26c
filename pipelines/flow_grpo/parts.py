# SPDX-License-Identifier: Apache-2.0
"""The policy and the evaluator of an image run, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.interfaces import DiffusionPolicy, PointwiseReward
from visalign.pipelines.shared.parts import Records, no_loading_bars, spread
from visalign.precision import autocast_dtype
from visalign.training.diffusion.image_statistics import feature_drift
from visalign.training.diffusion.images import Features

from .config import EvaluationConfig, ModelConfig

if TYPE_CHECKING:
    from accelerate import Accelerator

    from visalign.evaluation import HeldoutResult


def build_policy(model: ModelConfig, device: torch.device, seed: int) -> DiffusionPolicy:
    """The model on its device, as the policy that `model.adapter` or its folder names."""
    from visalign.adapters.catalogue import load_policy
    from visalign.adapters.lora import LoraSettings
    from visalign.adapters.speed import speed_up

    def options(model: ModelConfig) -> dict[str, Any]:
        lora = None
        if model.lora is not None:
            targets = model.lora.target_modules
            chosen: dict[str, Any] = {} if targets is None else {"target_modules": tuple(targets)}
            lora = LoraSettings(rank=model.lora.rank, alpha=model.lora.alpha, seed=seed, **chosen)
        names = ("use_t5", "guidance", "max_sequence_length", "image_size", "decode_batch", "quantization")
        values = {name: getattr(model, name) for name in names}
        values |= {"lora": lora, "autocast": autocast_dtype(model.autocast, device)}
        values |= {k: _dtype(v) if k.endswith("dtype") else v for k, v in model.options.items()}
        return {name: value for name, value in values.items() if value is not None}

    with no_loading_bars():
        policy = load_policy(
            resolve_model(model.path),
            adapter=model.adapter,
            dtype=getattr(torch, model.dtype),
            device=device,
            defaults=options(ModelConfig()),
            **options(model),
        )
    speed_up(
        policy.module,
        compiled=model.compile,
        attention=model.attention,
        channels_last=model.channels_last,
    )
    return policy


def _dtype(name: Any) -> Any:
    """A dtype by its name, for options that are one."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"model.options has the dtype {name!r}; give float32, bfloat16 or float16.")
    return dtype


def build_evaluator(
    config: EvaluationConfig,
    policy: DiffusionPolicy,
    rewards: Mapping[str, PointwiseReward],
    *,
    steps: int,
    timestep_schedule: str,
    accelerator: Accelerator,
) -> Callable[..., HeldoutResult]:
    """A function of (records, seeds) that evaluates the policy with the weights it has, its images spread
    over the processes; all of them call it and get the whole result."""

    def measure(records: Records, seeds: Sequence[int]) -> HeldoutResult:
        from visalign.evaluation import evaluate

        sigmas = policy.sigmas(config.steps or steps, timestep_schedule=timestep_schedule)

        def stretch(rank: int, shares: int) -> HeldoutResult:
            return evaluate(
                policy,
                rewards,
                records,
                seeds=seeds,
                sigmas=sigmas,
                batch_size=config.batch_size,
                correctness=config.correctness,
                share=(rank, shares),
                solver=config.solver,
            )

        return spread(accelerator, len(records) * len(seeds), stretch)

    return measure


def build_drift(
    features: Features | None, before: Path, first: bool
) -> Callable[[HeldoutResult], dict[str, float]]:
    """Return a function that measures the feature drift of an evaluation's images since before training.

    Args:
        features: image features; None measures nothing.
        before: file of the evaluation before training, with the same prompts and seeds.
        first: whether this process has that file; the others measure nothing.
    """
    base: dict[tuple[Any, int], torch.Tensor] = {}

    def features_by_sample(result: HeldoutResult) -> dict[tuple[Any, int], torch.Tensor]:
        assert features is not None
        images = torch.from_numpy(np.ascontiguousarray(result.images.transpose(0, 3, 1, 2))).float() / 255
        samples = [(result.keys[row], int(result.seeds[row])) for row in result.image_index.tolist()]
        return dict(zip(samples, features(images), strict=True))

    def drift(result: HeldoutResult) -> dict[str, float]:
        from visalign.evaluation import load_heldout

        if features is None or not first:
            return {}
        if not base:
            base.update(features_by_sample(load_heldout(before)))
        now = {sample: value for sample, value in features_by_sample(result).items() if sample in base}
        if len(now) < 2:
            return {}
        return feature_drift(torch.stack([*now.values()]), torch.stack([base[sample] for sample in now]))

    return drift
