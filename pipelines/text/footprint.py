# SPDX-License-Identifier: Apache-2.0
"""Memory, hours and tokens a second of a text run, from configuration files and shapes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from visalign.data.assets import resolve_model
from visalign.pipelines.shared.plan import (
    GB,
    per_device,
    tokens_by_device,
    trace_forward,
    trained_memory,
    training_memory,
    weight_bytes,
)
from visalign.precision import autocast_dtype
from visalign.training.text.trajectories import needs_reference

from .config import ProcessConfig, TextConfig
from .parts import TextInputs, lora_settings, planned_encoder

PROMPTS = 256  # Training prompts whose length is measured
NOT_COUNTED = "kernels' workspaces, the allocator's gaps, activations of generation and of judges"


def footprint(config: TextConfig, inputs: TextInputs) -> dict[str, Any]:
    """Bound memory, operations, hours and tokens a second at the greatest lengths; empty for images in prompts."""
    from visalign.adapters.causal_lm.loading import VISION_LANGUAGE, from_pretrained
    from visalign.adapters.causal_lm.lora import add_text_lora

    model, rollout, objective = config.model, config.rollout, config.built_objective
    loaded: Any = from_pretrained(AutoConfig, str(resolve_model(model.path)))
    if loaded.model_type in VISION_LANGUAGE:
        return {}
    with torch.device("meta"):
        options = {"dtype": getattr(torch, model.dtype), "trust_remote_code": False}
        network: Any = AutoModelForCausalLM.from_config(loaded, **options).eval()
    if model.lora is not None:
        add_text_lora(network, lora_settings(model, config.seed))
    prompts = planned_encoder(config).encode([record["prompt"] for record in inputs.records[:PROMPTS]])
    length = (longest_prompt := max(map(len, prompts))) + rollout.max_new_tokens
    completions = rollout.prompts_per_iteration * rollout.group_size
    rows = 0 if config.server is not None else min(model.generate_batch, completions)
    low = autocast_dtype("bfloat16" if model.autocast == "auto" else model.autocast, torch.device("cpu"))
    with torch.autocast("cpu", low, enabled=low is not None):  # as GPUs have it, but on meta tensors
        cache = _cache_bytes(network, rows, length) if rows else 0
        micro_batch = min(config.optimizer.micro_batch, completions)
        activations, flops = trace_forward(network, micro_batch, length, model.gradient_checkpointing)
    flops += 2 * network.get_output_embeddings().weight.numel() * rollout.max_new_tokens  # no head on prompts
    logits = 4 * rows * network.config.vocab_size  # float32
    memory, weights = training_memory(network, config.optimizer)
    has_reference = needs_reference(objective)
    memory["reference"] = 0.0 if model.lora and not model.lora_path else has_reference * memory["trained_weights"]
    if model.value == "separate":
        trunk = [w for name, w in network.base_model.named_parameters() if "lora_" not in name]
        copy = trained_memory(trunk, ema=False, copies=0, optimizer=config.optimizer.name)
        memory["value_network_and_its_optimizer"] = sum(copy.values())
    if config.process is not None:
        memory["process_reward"] = _process_memory(config.process, model.dtype)
    memory["generation_or_activations_of_a_micro_batch"] = max(cache + logits, activations) / GB
    update = (3 + model.gradient_checkpointing) * config.objective.epochs  # forward, twice that backward, again
    before = bool(rows) + has_reference + rollout.recompute + rollout.routing_replay
    passes = before + update + (model.value == "separate") * (1 + update)
    replayed = 0 if config.self_imitation is None else config.self_imitation.batch or completions
    speed = {"tokens_per_second_at_most": tokens_by_device(rows, weight_bytes(network) + cache / 2)} if rows else {}
    return {
        "model": {
            "trained_parameters": sum(w.numel() for w in network.parameters() if w.requires_grad),
            "operations_per_completion": flops,
            "longest_prompt": longest_prompt,
        },
        **per_device(
            memory,
            weights,
            {**inputs.rewards, "the sum": inputs.reward},
            flops * (completions * passes + replayed * update) * config.run.iterations,
            sharding=config.run.sharding,
            not_counted=NOT_COUNTED,
            details={"of_that_keys_and_values": cache / GB, "of_that_logits_of_a_step": logits / GB},
        ),
        **speed,
    }


def _process_memory(process: ProcessConfig, dtype: str) -> float:
    """Compute the GB of a process reward and its reference, and of AdamW where it goes on learning."""
    from visalign.adapters.causal_lm.loading import from_pretrained

    networks = list[Any]()
    for path in filter(None, (process.reference, process.model)):
        # a folder of adapters has the reference's size
        is_whole = (Path(resolve_model(path)) / "config.json").is_file()
        loaded: Any = from_pretrained(AutoConfig, str(resolve_model(path if is_whole else process.reference or path)))
        with torch.device("meta"):
            networks.append(AutoModel.from_config(loaded, dtype=getattr(torch, dtype), trust_remote_code=False))
    memory = sum(map(weight_bytes, networks)) / GB
    if process.online is not None:
        learning = trained_memory([*networks[-1].parameters()], ema=False, copies=0)
        memory += sum(learning.values()) - learning["trained_weights"]
    return memory


def _cache_bytes(network: Any, rows: int, length: int) -> int:
    """Size of the keys and values of completions that grow together."""
    from visalign.adapters.hollow import traced_network

    with torch.no_grad(), traced_network(network.base_model):
        tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
        layers = network.base_model(input_ids=tokens, use_cache=True).past_key_values.layers
    return sum(value.nbytes for layer in layers for value in (layer.keys, layer.values))
