# SPDX-License-Identifier: Apache-2.0
"""What a text run needs, from configuration files alone: memory by part, hours, tokens a second."""

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
"""Training prompts that are measured."""
NOT_COUNTED = "kernels' workspaces, the allocator's gaps, activations of generation and of judges"


def footprint(config: TextConfig, inputs: TextInputs) -> dict[str, Any]:
    """Memory in GB, operations, hours and tokens a second on each device, in groups.

    Completions are counted at their full length and every prompt at the longest one, so all of it is an upper
    bound but for what `not_counted` names. Empty where the model sees images.
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
        held, flops = _replayed(network, min(config.optimizer.micro_batch, completions), length, config)
    memory = _weights(config, network)
    generating = cache + 4 * rows * network.config.vocab_size
    world = int(os.environ.get("WORLD_SIZE", "1"))
    memory = on_each_device(memory, _shared(memory), world=world, sharding=config.run.sharding)
    memory["generation_or_activations_of_a_micro_batch"] = max(generating, held) / GB
    judges, later = judge_bytes({**inputs.rewards, "the sum": inputs.reward})
    memory["judges"] = judges / GB
    memory["in_all"] = math.fsum(memory.values())
    update = (3 + bool(config.model.gradient_checkpointing)) * config.objective.epochs
    before = config.rollout.recompute + config.rollout.routing_replay
    passes = bool(rows) + asks_reference(config) + before + update
    passes += (config.model.value == "separate") * (1 + update)
    again = 0 if config.self_imitation is None else config.self_imitation.batch or completions
    operations = flops * (completions * passes + again * update) * config.run.iterations
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
    """The run's, as a GPU has it."""
    name = config.model.autocast
    low = torch.bfloat16 if name == "auto" else autocast_dtype(name, torch.device("cpu"))
    return torch.autocast("cpu", low) if low else nullcontext()


def _cache_bytes(network: Any, rows: int, length: int) -> int:
    """Of the keys and values of completions that grow together."""
    from visalign.adapters.hollow import traced_network

    with torch.no_grad(), traced_network(network.base_model):
        out = network.base_model(input_ids=_tokens(rows, length), use_cache=True)
    pairs = [value for layer in out.past_key_values.layers for value in (layer.keys, layer.values)]
    return sum(value.numel() * value.element_size() for value in pairs)


def _replayed(network: Any, rows: int, length: int, config: TextConfig) -> tuple[int, float]:
    """(bytes that the backward of a micro-batch finds stored, operations of a completion's forward pass)."""
    from visalign.adapters.causal_lm.network import enable_recomputation, recomputed_layers
    from visalign.adapters.hollow import traced_network

    again = config.model.gradient_checkpointing
    if again:
        enable_recomputation(network)
    with recomputed_layers(network, again), traced_network(network.base_model) as trace:
        network.base_model(input_ids=_tokens(rows, length), attention_mask=_mask(length), use_cache=False)
    head = 2 * network.get_output_embeddings().weight.numel() * config.rollout.max_new_tokens
    return trace.held + trace.largest_block, trace.flops["network"] / rows + head


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device="meta")


def _mask(length: int) -> torch.Tensor:
    """A whole one, without which transformers looks at the positions' numbers."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device="meta")


def asks_reference(config: TextConfig) -> bool:
    """Whether the objective compares with the model before training."""
    from visalign.training.text.trajectories import needs_reference

    return needs_reference(config.objective.build(length=config.rollout.max_new_tokens))


def _weights(config: TextConfig, network: Any) -> dict[str, float]:
    """GB of what stays for a whole run, by part."""
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    found = _stays(network, trained, ema=bool(config.optimizer.ema_decay))
    kept = config.model.lora is None and asks_reference(config)
    found["reference"] = kept * sum(weight.numel() * weight.element_size() for weight in trained) / GB
    if config.model.value == "separate":
        whole = [weight for name, weight in network.base_model.named_parameters() if "lora_" not in name]
        found["value_network_and_its_optimizer"] = sum(trained_memory(whole, ema=False, copies=0).values())
    return found


def _stays(network: Any, trained: list[Any], *, ema: bool) -> dict[str, float]:
    """GB of a network and of what belongs to its training."""
    own = {id(weight) for weight in trained}
    found: dict[str, float] = {}
    if any(not weight.requires_grad for weight in network.parameters()):
        found[f"frozen_weights, {dtype_name(network, own)}"] = weight_bytes(network, own) / GB
    found |= trained_memory(trained, ema=ema, copies=0)
    del found["reference_and_old_policy"]
    return found


def _shared(memory: dict[str, float]) -> list[str]:
    """Of the parts those that are weights of the network."""
    return [name for name in memory if name.startswith("frozen_weights, ") or name == "trained_weights"]
