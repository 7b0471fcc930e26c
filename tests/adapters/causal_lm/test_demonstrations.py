# SPDX-License-Identifier: Apache-2.0
"""Demonstrations as rollouts, and log Z of a prompt."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.language import TEMPLATE, tiny_model, tiny_tokenizer
from tests.support.training.text import DEMONSTRATIONS, toy_policy
from visalign.adapters.causal_lm.demonstrations import (
    DemonstrationBatches,
    demonstration_lengths,
    demonstration_rollout,
    with_mismatched,
)
from visalign.adapters.causal_lm.log_partition import PromptLogPartition
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.text import StoppingCriteria
from visalign.text.chat import PromptEncoder


def test_a_demonstration_has_the_log_prob_of_the_models_own_forward():
    policy = toy_policy()
    rollout = demonstration_rollout(policy, ["b c", "g"], ["zz", "abc"])
    output = policy.log_probs(rollout)
    for row, (prompt, completion) in enumerate((("b c", "zz"), ("g", "abc"))):
        before = policy.tokenizer(prompt)["input_ids"]
        after = [*policy.tokenizer(completion, add_special_tokens=False)["input_ids"], 1]
        with torch.no_grad():
            logits = policy.model(torch.tensor([before + after])).logits[0]
        log_prob = logits.log_softmax(-1)[len(before) - 1 : -1]
        expected = log_prob[torch.arange(len(after)), torch.tensor(after)]
        assert output.log_prob[row, : len(after)].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert rollout.loss_mask[row].sum() == len(after)
    assert rollout.stop_reason == ["eos", "eos"]


def test_completions_that_cannot_be_learnt_are_refused():
    with pytest.raises(UserError, match=r"have 1 \+ 71 tokens; the model reads 64"):
        demonstration_rollout(toy_policy(), ["g"], ["a" * 70])


def test_an_epoch_visits_every_record_once_and_a_batch_is_always_the_same():
    policy = toy_policy()
    stream = DemonstrationBatches(policy, DEMONSTRATIONS, size=1, seed=4)
    visited = [[stream.batch(3 * epoch + i).prompt[0] for i in range(3)] for epoch in range(6)]
    assert all({*epoch} == {r["prompt"] for r in DEMONSTRATIONS} for epoch in visited)
    assert len({tuple(map(str, epoch)) for epoch in visited}) > 1
    again = DemonstrationBatches(policy, DEMONSTRATIONS, size=1, seed=4).batch(7)
    assert torch.equal(again.completion_ids, stream.batch(7).completion_ids)


def test_what_a_tool_wrote_is_read_and_not_learnt():
    policy = toy_policy()
    record = {"prompt": "g", "completion": "1+2=3. a", "tool_answers": [[4, 6]]}
    rollout = DemonstrationBatches(policy, [record], size=1, seed=0).batch(0)
    assert rollout.loss_mask[0].tolist() == [1.0] * 4 + [0.0] * 2 + [1.0] * 3
    assert policy.tokenizer.decode(rollout.completion_ids[0, :8]) == record["completion"]
    (length,) = demonstration_lengths(policy, [record])
    assert length == 1 + 9
    log_prob = policy.log_probs(rollout).log_prob[0]
    assert log_prob[4:6].tolist() == [0.0, 0.0] and bool((log_prob[[0, 1, 2, 3, 6, 7, 8]] < 0).all())
    log_prob.sum().backward()
    plain = demonstration_rollout(policy, ["g"], [record["completion"]])
    assert policy.log_probs(plain).log_prob[0, 6].item() == pytest.approx(log_prob[6].item(), abs=1e-6)


def test_of_pairs_and_votes_too_what_a_tool_wrote_is_not_learnt():
    pair = {"prompt": "g", "chosen": "a=b c", "rejected": "1+2=3. a", "rejected_tool_answers": [[4, 6]]}
    rollout = DemonstrationBatches(toy_policy(), [pair], size=1, seed=0, field=("chosen", "rejected")).batch(0)
    assert [rollout.loss_mask[row].sum().item() for row in (0, 1)] == [6, 7]
    assert rollout.loss_mask[1, 4:6].tolist() == [0, 0]
    votes = [
        {"prompt": "g", "completion": "1+2=3. a", "tool_answers": [[4, 6]]},
        {"prompt": "b c", "completion": "a=b c", "tool_answers": None},
    ]
    votes = with_mismatched(toy_policy(), votes)
    rows = DemonstrationBatches(toy_policy(), votes, size=2, seed=0, field=("completion", "mismatched")).rows([0, 1])
    assert rows.loss_mask.sum(1).tolist() == [7, 6, 6, 7]


@pytest.mark.parametrize(("begun", "answer"), [("", "a b"), (" a", " b")])
def test_the_answer_of_a_transcript_has_the_tokens_of_the_chat_template(begun, answer):
    tokenizer = tiny_tokenizer(template=TEMPLATE)
    policy = CausalLMPolicy(tiny_model(seed=3), tokenizer, prompts=PromptEncoder(tokenizer, plain_as_chat=True))
    transcript, turns = f"\n\nHuman: g\n\nAssistant:{begun}", [{"role": "user", "content": "g"}]
    turns += [{"role": "assistant", "content": begun.strip()}] if begun else []
    rollout = demonstration_rollout(policy, [transcript, turns], [f" {answer.strip()}\n", answer])
    assert torch.equal(rollout.completion_ids[0], rollout.completion_ids[1])
    assert demonstration_lengths(policy, [{"prompt": transcript, "completion": f" {answer.strip()}"}]) == [
        int(rollout.prompt_mask[0].sum() + rollout.loss_mask[0].sum())
    ]


@pytest.mark.parametrize("spans", [[[0, 9]], [[2, 4], [3, 5]], [4, 6]])
def test_spans_that_are_none_of_the_completion_are_refused(spans):
    record = {"prompt": "g", "completion": "1+2=3. a", "tool_answers": spans}
    message = r"Record 0 has tool_answers .*; give a list of \[begin, end\], .* \(it has 8\)"
    with pytest.raises(UserError, match=message):
        DemonstrationBatches(toy_policy(), [record], size=1, seed=0)


def test_the_features_of_log_z_are_the_mean_hidden_state_of_the_prompt():
    policy = toy_policy()
    rollout = policy.generate(["b c", "g", "b c"], seeds=0, stopping=StoppingCriteria(max_new_tokens=3))
    partition = PromptLogPartition(policy)
    features = partition.features(rollout)
    for row, prompt in enumerate(("b c", "g", "b c")):
        ids = torch.tensor([policy.tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            hidden = policy.model(ids, output_hidden_states=True).hidden_states[-1][0]
        assert torch.allclose(features[row], hidden.mean(0), atol=1e-5)
    assert not features.requires_grad and torch.equal(features[0], features[2])


def test_log_z_starts_at_zero_and_its_gradient_stays_in_the_head():
    policy = toy_policy()
    rollout = policy.generate(["b c", "g"], seeds=0, stopping=StoppingCriteria(max_new_tokens=3))
    partition = PromptLogPartition(policy, seed=1)
    log_z = partition.head(partition.features(rollout))
    assert log_z.tolist() == [0.0, 0.0] and log_z.requires_grad
    log_z.sum().backward()
    assert all(p.grad is None for _, p in policy.trainable_parameters())
    assert any(p.grad is not None and bool(p.grad.any()) for p in partition.head.parameters())
