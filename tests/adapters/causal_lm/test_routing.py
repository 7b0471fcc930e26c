# SPDX-License-Identifier: Apache-2.0
"""Routing replay: tokens go to the experts that they went to, whatever the router has learnt since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.models.language import tiny_config, tiny_model, tiny_tokenizer
from tests.support.training.text import DEMONSTRATIONS, toy_text_trainer
from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.text import StoppingCriteria, TextRollout
from visalign.text.policy_protocol import model_log_prob

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None}
LATENT |= {name: 8 for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 6, "sliding_window": 16, "rope_parameters": ROPE},
    "deepseek_v3": {**GROUPS, **LATENT},
}
"""Softmax before and after the top-k, sigmoids with biases and groups of experts."""


def _mixture(family: str) -> PreTrainedModel:
    settings = {**tiny_config().to_dict(), **EXPERTS, **FAMILIES[family]}
    for key in ("model_type", "architectures", "transformers_version", "layer_types", "dtype"):
        settings.pop(key, None)
    if family == "deepseek_v3":
        settings |= {"num_key_value_heads": settings["num_attention_heads"]}
        settings.pop("head_dim")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()


def _policy(family: str = "qwen3_moe", **options: Any) -> CausalLMPolicy:
    return CausalLMPolicy(_mixture(family), tiny_tokenizer(), **options)


def _rollout(policy: CausalLMPolicy) -> TextRollout:
    stopping = StoppingCriteria(max_new_tokens=7)
    return policy.generate(["a", "bcd ef", "g h"], seeds=3, num_generations=2, stopping=stopping)


def _move_routers(policy: CausalLMPolicy) -> None:
    """Far enough that tokens go to other experts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "gate.weight" in name or "router" in name:
                weight.add_(torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_go_where_they_went(family: str) -> None:
    policy = _policy(family)
    rollout = _rollout(policy)
    before = policy.log_probs(rollout).log_prob
    routed = policy.with_routes(rollout)
    assert torch.equal(policy.log_probs(routed).log_prob, before), "the same weights, the same experts"
    assert torch.allclose(before, rollout.log_prob, atol=1e-5)
    _move_routers(policy)
    moved, replayed = policy.log_probs(rollout).log_prob, policy.log_probs(routed).log_prob
    assert not torch.allclose(moved, replayed, atol=1e-3)
    elsewhere, again = policy.with_routes(rollout).routes, policy.with_routes(routed).routes
    assert elsewhere is not None and routed.routes is not None and again is not None
    assert not torch.equal(elsewhere, routed.routes)
    assert torch.equal(again, elsewhere), "asked anew, they go where the router sends them"
    subset = policy.log_probs(routed, torch.tensor([4, 1])).log_prob
    assert torch.allclose(subset, replayed[[4, 1]], atol=1e-5), "whoever else is in the batch"


def test_routes_are_laid_out_like_prompt_and_completion() -> None:
    policy = _policy()
    rollout = _rollout(policy)
    routes = policy.with_routes(rollout).routes
    assert routes is not None and routes.shape[2:] == (2, 2) and routes.dtype == torch.int16
    length = rollout.prompt_mask.sum(1) + rollout.loss_mask.sum(1)
    assert torch.equal((routes[:, :, 0, 0] >= 0).sum(1), length.long()) and int(routes.max()) < 6
    silent = replace(rollout, loss_mask=rollout.loss_mask * torch.tensor([0, 1, 1, 1, 1, 1])[:, None])
    assert bool((policy.with_routes(silent).routes[0] == -1).all())  # type: ignore[index]


def _gradient(policy: CausalLMPolicy, rollout: TextRollout) -> dict[str, Tensor]:
    policy.model.zero_grad()
    policy.log_probs(rollout).log_prob.sum().backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def test_the_router_learns_through_the_weights_of_the_experts_that_are_given() -> None:
    policy, again = _policy(), _policy(gradient_checkpointing=True)
    routed = policy.with_routes(_rollout(policy))
    for mixture in (policy, again):
        _move_routers(mixture)
    gradients, recomputed = _gradient(policy, routed), _gradient(again, routed)
    assert float(gradients["model.layers.0.mlp.gate.weight"].abs().max()) > 1e-4
    for name, gradient in gradients.items():
        assert torch.allclose(recomputed[name], gradient, atol=1e-6), name
    free = _gradient(again, replace(routed, routes=None))
    assert not torch.allclose(free["model.layers.1.mlp.gate.weight"], gradients["model.layers.1.mlp.gate.weight"])
    with torch.no_grad():  # routes kept for the backward are not used without gradient
        routes = again.with_routes(routed).routes
    assert torch.equal(routes, policy.with_routes(routed).routes)  # type: ignore[arg-type]


def test_dense_models_and_demonstrations_are_refused(tmp_path: Path) -> None:
    policy = CausalLMPolicy(tiny_model(), tiny_tokenizer())
    with pytest.raises(UserError, match=r"layers with a module `experts`, and Qwen3ForCausalLM has none"):
        policy.with_routes(_rollout(policy))
    with pytest.raises(UserError, match=r"layers with a module `experts`, and Qwen3ForCausalLM has none"):
        toy_text_trainer(tmp_path, rollout={"routing_replay": True})  # before anything is written or measured
    mixture = _policy()
    batches = DemonstrationBatches(mixture, DEMONSTRATIONS, size=2, seed=0)
    replay: dict[str, Any] = {"rollout": {"routing_replay": True}, "policy": mixture}
    with pytest.raises(UserError, match=r"routing_replay goes without demonstrations \(ptx\)"):
        toy_text_trainer(tmp_path, **replay, demonstrations=batches, objective={"changes": {"ptx": 0.1}})


@pytest.mark.parametrize("on", [False, True])
def test_updates_replay_the_routes_of_their_rollout_and_the_reference_has_its_own(tmp_path: Path, on: bool) -> None:
    policy, calls = _policy(), list[tuple[bool, bool]]()
    scored = policy.log_probs

    def watched(rollout: TextRollout, rows: Any = None, **options: Any) -> Any:
        calls.append((torch.is_grad_enabled(), rollout.routes is not None))
        return scored(rollout, rows, **options)

    policy.log_probs = watched  # type: ignore[method-assign]
    settings = {"run": {"iterations": 2}, "objective": {"changes": {"kl": 0.04}}}
    trainer = toy_text_trainer(tmp_path, policy=policy, rollout={"routing_replay": on}, **settings)
    trainer.train()
    assert set(calls) == {(True, on), (False, False)}


def test_a_model_of_its_own_does_not_follow_the_policys_routes() -> None:
    policy, other = _policy(), _policy()
    routed = policy.with_routes(_rollout(policy))
    _move_routers(other)
    dense = CausalLMPolicy(tiny_model(), tiny_tokenizer())
    for model in (other, dense):
        with torch.no_grad():
            assert torch.equal(model_log_prob(model, routed), model_log_prob(model, replace(routed, routes=None)))
