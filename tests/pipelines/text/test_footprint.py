# SPDX-License-Identifier: Apache-2.0
"""`visalign plan` of text runs against the network itself: weights, keys and values, stored bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.operations import counted_operations
from visalign.config import load_config, resolve_config
from visalign.pipelines.shared.plan import GB
from visalign.pipelines.text.config import TextGRPOConfig, TextPPOConfig
from visalign.pipelines.text.footprint import footprint
from visalign.pipelines.text.job import estimate
from visalign.pipelines.text.parts import TextInputs, build_text_policy, prepare
from visalign.training.loop.optimizer import TrainedWeights

SMALL = (
    "rollout={prompts_per_iteration: 2, group_size: 3, max_new_tokens: 8}",
    "optimizer={lr: 1e-4, updates_per_iteration: 2, micro_batch: 3}",
    "run={iterations: 2, device: cpu}",
)


def configured(*changes: str, kind: Any = TextGRPOConfig, name: str = "text_grpo") -> Any:
    return load_config(kind, resolve_config(name), [*SMALL, *changes])


@pytest.fixture(scope="module")
def inputs() -> TextInputs:
    return prepare(configured())


@pytest.mark.parametrize("changes", [(), ("model.lora={}", "model.gradient_checkpointing=true")], ids=str)
def test_a_plan_is_what_the_network_takes(inputs, changes):
    config = configured(*changes, "objective.changes.kl=0.01")
    planned = footprint(config, inputs)
    memory, network = planned["memory_in_GB"], planned["model"]
    policy = build_text_policy(config.model, torch.device("cpu"), 0)
    parameters = policy.trainable_parameters()
    weights = TrainedWeights(parameters, config.optimizer)
    for _, weight in parameters:
        weight.grad = torch.ones_like(weight)
    weights.step()
    moments = [s[k] for s in weights.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert memory["adamw_moments"] * GB == pytest.approx(sum(m.numel() * 4 for m in moments))
    assert network["trained_parameters"] == sum(weight.numel() for _, weight in parameters)
    assert bool(memory["reference"]) == (config.model.lora is None)
    prompts = [record["prompt"] for record in inputs.records[:256]]
    longest = max(map(len, policy.prompts.encode(prompts)))
    assert network["longest_prompt"] == longest
    model: Any = policy.model
    ids = torch.zeros(6, longest + 8, dtype=torch.long)
    with torch.no_grad():
        layers = model.base_model(input_ids=ids, use_cache=True).past_key_values.layers
    cache = sum(v.numel() * v.element_size() for layer in layers for v in (layer.keys, layer.values))
    assert memory["of_that_keys_and_values"] * GB == pytest.approx(cache)
    with counted_operations() as counter:
        model.base_model(input_ids=ids[:1], use_cache=False)
    head = 2 * 8 * model.get_output_embeddings().weight.numel()
    assert network["operations_per_completion"] == counter.get_total_flops() + head
    activations = memory["generation_or_activations_of_a_micro_batch"] * GB
    generation = cache + 4 * 6 * model.config.vocab_size
    if config.model.gradient_checkpointing:
        assert activations < _stored(model, ids[:3])
    else:
        assert 0.8 <= activations / max(generation, _stored(model, ids[:3])) <= 1.1
    parts = {k: v for k, v in memory.items() if not k.startswith(("in_all", "of_that", "not_"))}
    assert memory["in_all"] == pytest.approx(sum(parts.values()))
    assert config.model.lora is not None or estimate(config)["memory_in_GB"] == memory


def _stored(model: Any, ids: torch.Tensor) -> int:
    """Bytes that the backward of the trunk finds stored, without weights."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        alive.append(value)
        if value.untyped_storage()._cdata not in weights:
            sizes[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        model.base_model(input_ids=ids, use_cache=False)
    return sum(sizes.values())


def test_tokens_a_second_and_a_value_network(inputs):
    planned = footprint(configured("model.generate_batch=2"), inputs)
    more = footprint(configured("model.generate_batch=4"), inputs)
    speed, faster = planned["tokens_per_second_at_most"], more["tokens_per_second_at_most"]
    assert speed["H100 SXM"] < faster["H100 SXM"] < 2 * speed["H100 SXM"]
    assert "bandwidth" in speed["basis"]
    ppo = configured("model.value=separate", kind=TextPPOConfig, name="text_ppo")
    memory = footprint(ppo, inputs)["memory_in_GB"]
    trained = sum(memory[name] for name in ("trained_weights", "gradients", "adamw_moments"))
    assert memory["value_network_and_its_optimizer"] == pytest.approx(trained)
    corrected = "objective.changes={importance_sampling: {level: token, mode: truncate, high: 2.0}}"
    served = configured("server={base_url: 'http://localhost:1/v1', model: m}", "model.lora={}", corrected)
    assert "tokens_per_second_at_most" not in footprint(served, inputs)


def test_a_process_reward_and_its_learning_are_counted(inputs):
    """An implicit one is two trunks; PRIME's adds gradients and two moments of one of them."""
    row = "objective={algorithm: prime}"
    process = "process={model: tasks-qwen3, reference: tasks-qwen3, unit: token}"
    plain = footprint(configured(), inputs)["memory_in_GB"]
    fixed = footprint(configured(row, process), inputs)["memory_in_GB"]
    online = footprint(configured(row, process, "process.online={}"), inputs)["memory_in_GB"]
    trunk = fixed["process_reward"] / 2
    assert "process_reward" not in plain and trunk == pytest.approx(plain["trained_weights"], rel=1e-3)
    assert online["in_all"] - fixed["in_all"] == pytest.approx(3 * trunk, rel=1e-3)
