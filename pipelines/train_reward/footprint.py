# SPDX-License-Identifier: Apache-2.0
"""What the training of a judge needs, from configuration files alone: memory by part, on each device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from visalign.pipelines.shared.memory import GB, dtype_name, on_each_device, trained_memory, weight_bytes

from .config import SeeingModel, TrainRewardConfig
from .examples import ExampleBatches, Examples
from .judges import SeeingJudge, TrainedJudge

NOT_COUNTED = (
    "kernels' workspaces, the allocator's gaps, activations of what is frozen and of measuring, examples "
    "that are larger than those of the first micro-batch"
)
META = torch.device("meta")


def footprint(
    config: TrainRewardConfig, examples: Examples, build: Callable[[TrainRewardConfig, torch.device], Any]
) -> dict[str, Any]:
    """Memory in GB of a run on each device, in groups; no weight is read or fetched.

    The judge reads its first micro-batch by shapes alone: what autograd stores is counted, not fitted. On
    tiny judges of every kind it is within 8 % of a CPU's own, up to 25 % less where rows share a beginning
    (the CPU's attention keeps the probabilities behind a mask), and half as much again where a tower is
    trained under autocast, which is counted in the dtype of its weights.

    Args:
        config: of the run.
        examples: what is learnt from.
        build: the judge of a configuration on a device.
    """
    model: Any = config.model
    changes: dict[str, Any] = {"autocast": "bfloat16"} if model.autocast == "auto" else {}  # as GPUs have it
    others = 0
    if isinstance(model, SeeingModel) and model.diversity is not None:
        others, changes["diversity"] = len(model.diversity.others), None  # whose files are not read
    judge: Any = build(replace(config, model=replace(model, **changes)), META)
    if getattr(getattr(judge.module, "config", None), "quantization_config", None):
        said = f"the weights of {model.path} are quantised"
        return {"memory_in_GB": {"in_all": None, "not_said": said}}
    world, trained = int(os.environ.get("WORLD_SIZE", "1")), [w for _, w in judge.trainable_parameters()]
    kept = judge.divide() if config.run.sharding else ()
    memory = _weights(judge, trained, kept)
    memory |= trained_memory(trained, ema=bool(config.optimizer.ema_decay), copies=others)
    beside = memory.pop("reference_and_old_policy")
    memory |= {"adapters_of_other_members": beside} if others else {}
    try:
        activations, features = _read(judge, config, examples, world)
    except (RuntimeError, TypeError) as error:
        said = f"{model.path} asks for numbers where shapes alone are known ({str(error).splitlines()[0]})"
        return {"memory_in_GB": {**memory, "in_all": None, "not_said": f"the rest: {said}"}}
    network = [name for name in memory if name.startswith("frozen_weights, ") or name == "trained_weights"]
    memory = on_each_device(memory, network, world=world, sharding=config.run.sharding, spare=activations)
    memory |= {"kept_features": features, "activations_of_a_micro_batch": activations}
    memory["in_all"] = math.fsum(memory.values())
    return {
        "model": {"trained_parameters": sum(weight.numel() for weight in trained)},
        "memory_in_GB": {**memory, "not_counted": NOT_COUNTED},
    }


def _weights(judge: Any, trained: list[Any], kept: Any) -> dict[str, float]:
    """GB of what is frozen: of the network, what of it stays whole in each process, and a teacher."""
    own, whole = {id(weight) for weight in trained}, {id(weight) for weight in kept}
    found = {f"frozen_weights, {dtype_name(judge.module, own)}": weight_bytes(judge.module, own | whole) / GB}
    if whole:
        found["frozen_tower"] = sum(weight.numel() * weight.element_size() for weight in kept) / GB
    if hasattr(judge, "teacher"):
        found["teacher"] = weight_bytes(judge.teacher) / GB
    return found


def _read(
    judge: TrainedJudge, config: TrainRewardConfig, examples: Examples, world: int
) -> tuple[float, float]:
    """GB of (what the backward of the first micro-batch finds stored, features of images that stay)."""
    from visalign.adapters.hollow import traced_network
    from visalign.training.loop.sharding import ModuleOfFunction

    data = config.data
    batches = ExampleBatches(
        examples, judge.encode, size=data.batch, micro=data.micro_batch, seed=config.seed
    )
    batch = next(iter(batches.batch(0, (0, world))))
    moved: dict[int, Any] = {}  # what is one tensor twice stays one
    inputs = tree_map(
        lambda v: moved.setdefault(id(v), v.to(META)) if isinstance(v, torch.Tensor) else v, batch.inputs
    )
    network, parts = ModuleOfFunction(judge.module, judge), []
    if isinstance(judge, SeeingJudge):
        language = judge.engine.network.trunk.language_model
        parts = [language]
        language.register_forward_pre_hook(_with_mask, with_kwargs=True)
    judge.train(True)
    with traced_network(network, *parts) as trace, judge.precision():
        network(inputs)
    features = 0.0
    if isinstance(judge, SeeingJudge):
        cache, seen = (
            judge.engine.network.cache,
            config.run.iterations * config.optimizer.updates_per_iteration,
        )
        times = min(seen * data.batch / world, len(examples)) / batch.size  # drawn anew in each epoch
        features = min(times * cache.bytes, cache.max_bytes) / GB
    return trace.held / GB, features


def _with_mask(_: Any, args: Any, given: dict[str, Any]) -> Any:
    """A whole mask where there is none, or transformers looks at the positions' numbers."""
    if given["attention_mask"] is None:
        length = given["inputs_embeds"].shape[1]
        given["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool, device=META)
    return args, given
