# SPDX-License-Identifier: Apache-2.0
"""Value heads: which state a value belongs to, where its gradient goes, what is saved."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.models.language import save_tiny_language_model, tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.adapters.causal_lm.value_head import ValueHead, ValueModel
from visalign.errors import UserError
from visalign.text import StoppingCriteria

PROMPTS = ["a", "hello there you", "1+2="]


def shared(**options) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(), tiny_tokenizer(), value_head=ValueHead(32), **options)


def completions(policy: CausalLMPolicy):
    return policy.generate(PROMPTS, seeds=1, num_generations=2, stopping=StoppingCriteria(max_new_tokens=8))


def turn(head: ValueHead) -> None:
    with torch.no_grad():
        head.linear.weight.copy_(torch.linspace(-1, 1, 32)[None])
        head.linear.bias.fill_(0.25)


def test_values_start_at_zero() -> None:
    policy = shared()
    rollout = completions(policy)
    with torch.no_grad():
        value = policy.log_probs(rollout).value
    assert value is not None and value.shape == rollout.loss_mask.shape and value.abs().max() == 0


@torch.no_grad()
def test_a_value_is_of_the_state_before_its_token() -> None:
    policy = shared()
    assert policy.value_head is not None
    turn(policy.value_head)
    rollout = completions(policy)
    value = policy.log_probs(rollout).value
    assert value is not None
    for row in range(6):
        prompt = rollout.prompt_ids[row, rollout.prompt_mask[row] > 0]
        completion = rollout.completion_ids[row, rollout.loss_mask[row] > 0]
        for position in range(len(completion)):
            state = torch.cat((prompt, completion[:position]))[None]
            hidden = policy.model.base_model(state).last_hidden_state[0, -1]
            expected = (hidden * torch.linspace(-1, 1, 32)).sum() + 0.25
            assert value[row, position].item() == pytest.approx(expected.item(), abs=1e-4)
    assert value[rollout.loss_mask == 0].abs().sum() == 0


def test_where_the_gradient_of_the_value_goes() -> None:
    policy = shared(lora=text_lora(rank=2, alpha=2))
    assert policy.value_head is not None
    turn(policy.value_head)
    value = policy.log_probs(completions(policy)).value
    assert value is not None
    value.sum().backward()
    parameters = dict(policy.trainable_parameters())
    assert list(parameters)[-2:] == ["value_head.linear.weight", "value_head.linear.bias"]
    moved = {name for name, p in parameters.items() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {"value_head.linear.weight", "value_head.linear.bias"} <= moved
    assert any("lora_B" in name for name in moved)
    assert {id(p) for p in parameters.values()} <= {id(p) for p in policy.module.parameters()}


def test_the_head_is_saved_beside_the_model(tmp_path) -> None:
    policy = shared()
    assert policy.value_head is not None
    turn(policy.value_head)
    policy.save(tmp_path)
    again = shared()
    again.load(tmp_path)
    assert again.value_head is not None
    torch.testing.assert_close(again.value_head.linear.weight, policy.value_head.linear.weight)
    with pytest.raises(UserError, match=r"\(critics, hidden size\) \(1, 32\), this one \(1, 16\)"):
        ValueHead(16).load(tmp_path)


def test_a_head_without_hidden_states_shares_nothing() -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head = nn.Sequential(model.lm_head)
    model.get_output_embeddings = lambda: model.lm_head
    with pytest.raises(UserError, match="Qwen3ForCausalLM is not linear, so no value head"):
        CausalLMPolicy(model, tiny_tokenizer(), value_head=ValueHead(32))


def test_a_separate_value_model(tmp_path) -> None:
    base = save_tiny_language_model(tmp_path / "base")
    critic = ValueModel.from_pretrained(base)
    turn(critic.head)
    policy = shared()
    assert policy.value_head is not None
    turn(policy.value_head)
    rollout = completions(policy)
    values = critic.values(rollout)
    expected = policy.log_probs(rollout).value
    assert expected is not None
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(critic.values(rollout, torch.tensor([4, 1])), values[[4, 1]], rtol=0, atol=1e-4)
    values.sum().backward()
    assert all(p.grad is not None for p in critic.parameters())
    critic.save(tmp_path / "critic")
    again = ValueModel.from_pretrained(tmp_path / "critic")
    torch.testing.assert_close(again.values(rollout), values, rtol=0, atol=1e-5)
    dead = replace(rollout, loss_mask=torch.zeros_like(rollout.loss_mask))
    nothing = critic.values(dead)
    nothing.sum().backward()
    assert nothing.abs().max() == 0
