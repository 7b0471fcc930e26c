# SPDX-License-Identifier: Apache-2.0
"""The rollout: shapes, selection, joining, the way into the objective core, stop strings."""

from dataclasses import replace

import pytest
import torch

from visalign.core import PolicyOutput, filter_overlong, named_objective
from visalign.errors import UserError
from visalign.text import Sampling, StopStrings, TextRollout, TokenSets, join_rollouts


def rollout(count: int = 4, length: int = 3, **changes) -> TextRollout:
    number = torch.arange(count * length, dtype=torch.float32).view(count, length)
    loss_mask = torch.ones(count, length)
    loss_mask[0, -1] = 0
    settled = {
        "prompt_ids": torch.arange(count * 2).view(count, 2),
        "prompt_mask": torch.ones(count, 2),
        "completion_ids": number.long(),
        "loss_mask": loss_mask,
        "log_prob": -number / 10 * loss_mask,
        "full_log_prob": -number / 9 * loss_mask,
        "entropy": number / 20 * loss_mask,
        "text": [f"answer {i}" for i in range(count)],
        "stop_reason": ["eos", *["length"] * (count - 1)],
        "group": [i // 2 for i in range(count)],
        "prompt": [f"prompt {i // 2}" for i in range(count)],
        "seed": list(range(count)),
        "sampling": Sampling(),
    }
    return TextRollout(**{**settled, **changes})


def test_rows_take_everything_along() -> None:
    token_sets = TokenSets.from_lists([[torch.tensor([i])] * 3 for i in range(4)], 3)
    part = rollout(kept=token_sets).rows(torch.tensor([2, 0]))
    assert part.text == ["answer 2", "answer 0"] and part.seed == [2, 0] and part.group == [1, 0]
    assert part.completion_ids[0].tolist() == [6, 7, 8]
    assert part.kept is not None and part.kept.ids.tolist() == [2, 2, 2, 0, 0, 0]
    assert len(rollout().rows(slice(1, 3))) == 2
    assert rollout().rows(torch.tensor([True, False, False, True])).seed == [0, 3]


def test_joined_rollouts_are_padded_on_the_right_side() -> None:
    short = rollout(2, 2, sampling=Sampling(top_k=2), kept=TokenSets.from_lists([[torch.tensor([5])]] * 2, 2))
    long = replace(
        rollout(2, 3, prompt_ids=torch.ones(2, 4, dtype=torch.int64), prompt_mask=torch.ones(2, 4)),
        sampling=Sampling(top_k=2),
        kept=TokenSets.from_lists([[torch.tensor([6, 7])]] * 2, 3),
    )
    joined = join_rollouts([short, long])
    assert joined.loss_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert joined.prompt_mask[0].tolist() == [0, 0, 1, 1] and joined.prompt_ids[1].tolist() == [0, 0, 2, 3]
    assert joined.kept is not None and joined.kept.ids.tolist() == [5, 5, 6, 7, 6, 7]
    assert joined.kept.count[:, 0].tolist() == [1, 1, 2, 2]
    assert joined.text == ["answer 0", "answer 1"] * 2 and joined.images is None
    seeing = join_rollouts([rollout(1), rollout(1, images=[["image"]])])
    assert seeing.images == [(), ["image"]]
    with pytest.raises(ValueError, match="needs rollouts sampled in one way"):
        join_rollouts([])
    with pytest.raises(ValueError, match="needs rollouts sampled in one way"):
        join_rollouts([rollout(), short])


def test_trajectories_feed_an_objective() -> None:
    text_rollout = rollout()
    step = text_rollout.trajectories(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(step.old_log_prob, text_rollout.log_prob)
    torch.testing.assert_close(step.entropy, text_rollout.entropy)
    assert step.group == [0, 0, 1, 1] and step.rollout_log_prob is None
    objective = named_objective("dapo")
    leaf = text_rollout.log_prob.clone().requires_grad_()
    loss = objective.loss(objective.prepare(step), PolicyOutput(log_prob=leaf)).total
    loss.backward()
    assert leaf.grad is not None and leaf.grad[0, 2] == 0 and leaf.grad[0, 0] < 0 < leaf.grad[1, 0]


def test_recomputed_log_probs_leave_the_sampled_ones_for_the_correction() -> None:
    text_rollout, other = rollout(), torch.zeros(4, 3)
    step = text_rollout.trajectories(torch.zeros(4), old_log_prob=other)
    assert step.old_log_prob is other and step.rollout_log_prob is text_rollout.log_prob
    weight = filter_overlong(text_rollout.loss_mask, text_rollout.truncated)
    assert text_rollout.trajectories(torch.zeros(4), weight=weight).weight.sum() == 2


def test_a_greedy_rollout_is_no_training_data() -> None:
    with pytest.raises(UserError, match=r"greedy rollout \(temperature 0\) has no probabilities"):
        rollout(sampling=Sampling(temperature=0)).trajectories(torch.zeros(4))


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3\) as in loss_mask; got .*\(4, 2\)"):
        rollout(log_prob=torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"got .*'text': 1"):
        rollout(text=["a"])


def test_stop_strings_are_found_across_tokens() -> None:
    words = ["x", "</", "ans", "wer", "> and", "more"]
    strings = StopStrings(("</answer>",), lambda ids: "".join(words[i] for i in ids))
    assert [strings.found(list(range(n + 1))) for n in range(5)] == [False, False, False, False, True]
    assert strings.found([0] * 500 + [1, 2, 3, 4]) and not strings.found([0] * 500)
    assert not StopStrings((), lambda ids: "").found([1])
