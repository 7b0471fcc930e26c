# SPDX-License-Identifier: Apache-2.0
"""The policy and the evaluator of an image run, built from its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from visalign.atomic import write_atomic
from visalign.errors import UserError
from visalign.evaluation import HeldoutResult, evaluate, load_heldout
from visalign.flow.rollout import middle_frames
from visalign.interfaces import DiffusionPolicy, PointwiseReward
from visalign.pipelines.shared.grids import image_samples
from visalign.pipelines.shared.parts import Records, no_loading_bars, spread
from visalign.precision import autocast_dtype, check_dtype
from visalign.rewards.base.images import to_pil
from visalign.training.diffusion.image_statistics import feature_drift
from visalign.training.diffusion.merging import guidance_scale
from visalign.training.diffusion.samples import Features

from .config import EvaluationConfig, ModelConfig

if TYPE_CHECKING:
    from visalign.adapters.prompt_cache import PromptCache


def build_policy(
    model: ModelConfig, device: torch.device, seed: int, prompt_cache: PromptCache | None = None
) -> DiffusionPolicy:
    """Load the model on its device, as the policy that `model.adapter` or its folder names."""
    from visalign.adapters.catalogue import load_policy
    from visalign.adapters.speed import speed_up

    for name in ("dtype", "autocast"):
        check_dtype(getattr(model, name), device, f"model.{name}")
    with no_loading_bars():
        policy = load_policy(
            model.path,
            adapter=model.adapter,
            dtype=getattr(torch, model.dtype),
            device=device,
            defaults=_adapter_options(ModelConfig(), device, seed),
            **_adapter_options(model, device, seed),
            **({} if prompt_cache is None else {"prompt_cache": prompt_cache}),
        )
    vae = getattr(getattr(policy, "pipe", None), "vae", None)  # of adapters on diffusers' pipelines
    chosen = {"attention": model.attention, "channels_last": model.channels_last}
    speed_up(policy.module, compiled=model.compile, vae=vae, **chosen)
    return policy


def load_teacher(model: str, policy: Any) -> dict[str, torch.Tensor]:
    """Read the network weights of a few-step student's teacher, by the names in `policy.module`."""
    from visalign.adapters.model_folder import explain_damage
    from visalign.data.assets import resolve_model

    weights, several = dict[str, torch.Tensor](), len(policy.networks) > 1
    with no_loading_bars(), explain_damage(source := resolve_model(model), "teacher"):
        for part, network in policy.networks.items():
            loaded = type(network).from_pretrained(source, subfolder=part, torch_dtype=network.dtype)
            weights |= {f"{part}.{name}" if several else name: w for name, w in loaded.named_parameters()}
    if policy.pipe.config.get("is_distilled"):
        policy.pipe.register_to_config(is_distilled=False)  # else its call leaves out the teacher's guidance
    return {name: weight.detach() for name, weight in weights.items()}


def _adapter_options(model: ModelConfig, device: torch.device, seed: int) -> dict[str, Any]:
    """Collect the options of the adapter, without those that are null."""
    from visalign.adapters.lora import LoraSettings

    names = ("config", "variant", "use_t5", "guidance", "max_sequence_length", "image_size", "decode_batch")
    names += ("quantization", "lora_path", "gradient_checkpointing", "offload")
    values = {name: getattr(model, name) for name in names}
    values["autocast"] = autocast_dtype(model.autocast, device)
    if (lora := model.lora) is not None:
        chosen: dict[str, Any] = {"rank": lora.rank, "alpha": lora.alpha, "seed": seed}
        if lora.target_modules is not None:
            chosen["target_modules"] = tuple(lora.target_modules)
        values["lora"] = LoraSettings(**chosen)
    for name, value in model.options.items():
        if name.endswith("dtype"):
            value = getattr(torch, str(value), None)
            if not isinstance(value, torch.dtype):
                raise UserError(f"model.options.{name} is no dtype; give float32, bfloat16 or float16.")
        values[name] = value
    return {name: value for name, value in values.items() if value is not None}


def build_evaluator(
    config: EvaluationConfig,
    policy: DiffusionPolicy,
    rewards: Mapping[str, PointwiseReward],
    *,
    steps: int,
    timestep_schedule: str,
    accelerator: Accelerator,
) -> Callable[..., HeldoutResult]:
    """Return a function of (records, seeds) that evaluates the policy; all processes call it and share the images."""

    def measure(records: Records, seeds: Sequence[int]) -> HeldoutResult:
        with guidance_scale(policy, config.guidance):
            return drawn(records, seeds)

    def drawn(records: Records, seeds: Sequence[int]) -> HeldoutResult:
        share_of = partial(
            evaluate,
            policy,
            rewards,
            records,
            seeds=seeds,
            sigmas=policy.sigmas(config.steps or steps, timestep_schedule=timestep_schedule),
            batch_size=config.batch_size,
            correctness=config.correctness,
            solver=config.solver,
        )
        return spread(accelerator, len(records) * len(seeds), share_of)

    return measure


def write_images(folder: Path, name: str, images: torch.Tensor, records: Records) -> None:
    """Write images and their table into a subfolder, as `visalign sample` has them."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = [{"image": f"{index:04d}.png", "prompt": record["prompt"]} for index, record in enumerate(records)]
    for row, image in zip(rows, middle_frames(images).cpu(), strict=True):
        to_pil(image).save(folder / name / row["image"])
    write_atomic(folder / name / "images.jsonl", "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def build_drift(features: Features, before: Path) -> Callable[[HeldoutResult], dict[str, float]]:
    """Return a function that measures the feature drift of an evaluation's images since that in the file `before`."""
    base: dict[tuple[Any, int], torch.Tensor] = {}

    def features_by_sample(result: HeldoutResult) -> dict[tuple[Any, int], torch.Tensor]:
        images = torch.from_numpy(np.ascontiguousarray(result.images.transpose(0, 3, 1, 2))).float() / 255
        return dict(zip(image_samples(result), features(images), strict=True))

    def drift(result: HeldoutResult) -> dict[str, float]:
        if not base:  # not at once: a new run writes the file after this function is made
            base.update(features_by_sample(load_heldout(before)))
        now = {sample: value for sample, value in features_by_sample(result).items() if sample in base}
        if len(now) < 2:
            return {}
        return feature_drift(torch.stack([*now.values()]), torch.stack([base[sample] for sample in now]))

    return drift
