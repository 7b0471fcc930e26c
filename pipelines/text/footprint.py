# SPDX-License-Identifier: Apache-2.0
"""Plan a text run from configuration files alone: memory by part, hours, tokens a second."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from visalign.data.assets import resolve_model
from visalign.pipelines.shared.plan import (
    GB,
    dtype_name,
    hours_by_device,
    judge_bytes,
    on_each_device,
    tokens_by_device,
    trained_memory,
    weight_bytes,
)
from visalign.precision import autocast_dtype

from .config import TextConfig
from .parts import TextInputs, prompt_encoder, text_adapters

PROMPTS = 256
"""Training prompts whose length is measured."""
NOT_COUNTED = "kernels' workspaces, the allocator's gaps, activations of generation and of judges"


def footprint(config: TextConfig, inputs: TextInputs) -> dict[str, Any]:
    """Compute memory in GB, operations, hours and tokens a second on each device, in groups.

    Completions count at their full length and every prompt at the longest one, so all of it is an upper bound
    but for what `not_counted` names. Empty for a vision-language model.
    """
    from visalign.adapters.causal_lm.loading import VISION_LANGUAGE, from_pretrained

    name, dtype = str(resolve_model(config.model.path)), getattr(torch, config.model.dtype)
    loaded: Any = from_pretrained(AutoConfig, name)
    if loaded.model_type in VISION_LANGUAGE:
        return {}
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(loaded, dtype=dtype).eval()
    if config.model.lora is not None:
        text_adapters(config.model, network, config.seed)
    encoder = prompt_encoder(config.model, from_pretrained(AutoTokenizer, name))
    records = inputs.records[:PROMPTS]
    prompt = max(len(ids) for ids in encoder.encode([record["prompt"] for record in records]))
    length = prompt + config.rollout.max_new_tokens
    completions = config.rollout.prompts_per_iteration * config.rollout.group_size
    rows = 0 if config.server is not None else min(config.model.generate_batch, completions)
    with _autocast(config):
        cache = _cache_bytes(network, rows, length) if rows else 0
        activations, flops = _forward_cost(
            network, min(config.optimizer.micro_batch, completions), length, config
        )
    memory = _weights(config, network)
    generating = cache + 4 * rows * network.config.vocab_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    memory = on_each_device(memory, _shared(memory), world=world, sharding=config.run.sharding)
    memory["generation_or_activations_of_a_micro_batch"] = max(generating, activations) / GB
    judges, later = judge_bytes({**inputs.rewards, "the sum": inputs.reward})
    memory["judges"] = judges / GB
    memory["in_all"] = math.fsum(memory.values())
    update = (3 + bool(config.model.gradient_checkpointing)) * config.objective.epochs
    before = config.rollout.recompute + config.rollout.routing_replay
    passes = bool(rows) + asks_reference(config) + before + update
    passes += (config.model.value == "separate") * (1 + update)
    replayed = 0 if config.self_imitation is None else config.self_imitation.batch or completions
    operations = flops * (completions * passes + replayed * update) * config.run.iterations
    speed = tokens_by_device(rows, weight_bytes(network) + cache / 2) if rows else None
    return {
        "model": {
            "trained_parameters": sum(w.numel() for w in network.parameters() if w.requires_grad),
            "operations_per_completion": flops,
            "longest_prompt": prompt,
        },
        "memory_in_GB": {
            **memory,
            "of_that_keys_and_values": cache / GB,
            "of_that_logits_of_a_step": 4 * rows * network.config.vocab_size / GB,
            "not_counted": ", ".join([NOT_COUNTED, *later]),
        },
        "hours": hours_by_device(operations / world, memory["in_all"]),
        **({"tokens_per_second_at_most": speed} if rows else {}),
    }


def _autocast(config: TextConfig) -> AbstractContextManager[Any]:
    """Return the run's autocast on a GPU."""
    name = config.model.autocast
    low = torch.bfloat16 if name == "auto" else autocast_dtype(name, torch.device("cpu"))
    return torch.autocast("cpu", low) if low else nullcontext()


def _cache_bytes(network: Any, rows: int, length: int) -> int:
    """Size of the keys and values of completions that grow together."""
    from visalign.adapters.hollow import traced_network

    with torch.no_grad(), traced_network(network.base_model):
        out = network.base_model(input_ids=_tokens(rows, length), use_cache=True)
    pairs = [value for layer in out.past_key_values.layers for value in (layer.keys, layer.values)]
    return sum(value.numel() * value.element_size() for value in pairs)


def _forward_cost(network: Any, rows: int, length: int, config: TextConfig) -> tuple[int, float]:
    """Return (stored bytes of a micro-batch, operations of a completion's forward pass)."""
    from visalign.adapters.causal_lm.network import enable_recomputation, recomputed_layers
    from visalign.adapters.hollow import traced_network

    recompute = config.model.gradient_checkpointing
    if recompute:
        enable_recomputation(network)
    with recomputed_layers(network, recompute), traced_network(network.base_model) as trace:
        network.base_model(input_ids=_tokens(rows, length), attention_mask=_mask(length), use_cache=False)
    head = 2 * network.get_output_embeddings().weight.numel() * config.rollout.max_new_tokens
    return trace.held + trace.largest_block, trace.flops["network"] / rows + head


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device="meta")


def _mask(length: int) -> torch.Tensor:
    """A full mask; without one, transformers reads the values of positions, which a meta tensor lacks."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")


def asks_reference(config: TextConfig) -> bool:
    """Check if the objective needs the model before training."""
    from visalign.training.text.trajectories import needs_reference

    return needs_reference(config.built_objective)


def _weights(config: TextConfig, network: Any) -> dict[str, float]:
    """GB of the parts that stay for a whole run."""
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    memory = _training_memory(network, trained, ema=bool(config.optimizer.ema_decay))
    copied = config.model.lora is None and asks_reference(config)
    memory["reference"] = copied * sum(weight.numel() * weight.element_size() for weight in trained) / GB
    if config.model.value == "separate":
        weights = [weight for name, weight in network.base_model.named_parameters() if "lora_" not in name]
        memory["value_network_and_its_optimizer"] = sum(trained_memory(weights, ema=False, copies=0).values())
    return memory


def _training_memory(network: Any, trained: list[Any], *, ema: bool) -> dict[str, float]:
    """GB of a network, its gradients and its optimizer."""
    trained_ids = {id(weight) for weight in trained}
    memory: dict[str, float] = {}
    if any(not weight.requires_grad for weight in network.parameters()):
        name = f"frozen_weights, {dtype_name(network, trained_ids)}"
        memory[name] = weight_bytes(network, trained_ids) / GB
    memory |= trained_memory(trained, ema=ema, copies=0)
    del memory["reference_and_old_policy"]
    return memory


def _shared(memory: dict[str, float]) -> list[str]:
    """Names of the parts that are weights of the network."""
    return [name for name in memory if name.startswith("frozen_weights, ") or name == "trained_weights"]
