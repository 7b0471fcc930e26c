# SPDX-License-Identifier: Apache-2.0
"""The prompt sampler: pure, complete, without repeats, the same for every world size; the batch algebra's messages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from visalign.training.loop.sampler import Batch, PromptSampler, check_batch_algebra

SIZES = {
    "num_prompts": st.integers(1, 13),
    "prompts": st.integers(1, 7),
    "group": st.integers(2, 5),
    "seed": st.integers(0, 2**40),
}


def _union(sampler: PromptSampler, iteration: int, world: int) -> Batch:
    parts = [sampler.batch(iteration, rank, world) for rank in range(world)]
    fields = ("prompt_index", "group_id", "sample_id")
    return Batch(**{name: torch.cat([getattr(p, name) for p in parts]) for name in fields})


@settings(deadline=None, max_examples=40)
@given(**SIZES, iteration=st.integers(0, 50), data=st.data())
def test_union_over_ranks_is_the_same_for_every_world_size(num_prompts, prompts, group, seed, iteration, data):
    sampler = PromptSampler(num_prompts, prompts, group, seed)
    divisors = [w for w in range(1, prompts * group + 1) if prompts * group % w == 0]
    split = _union(sampler, iteration, data.draw(st.sampled_from(divisors)))
    batch = sampler.batch(iteration)
    assert len(batch) == prompts * group
    for name in ("prompt_index", "group_id", "sample_id"):
        assert torch.equal(getattr(split, name), getattr(batch, name))


@settings(deadline=None, max_examples=40)
@given(**SIZES)
def test_every_epoch_visits_each_prompt_once(num_prompts, prompts, group, seed):
    sampler = PromptSampler(num_prompts, prompts, group, seed)
    iterations = -(-2 * num_prompts // prompts)
    visited = torch.cat([sampler.batch(i).prompt_index[::group] for i in range(iterations)])
    for epoch in range(2):
        assert sorted(visited[epoch * num_prompts : (epoch + 1) * num_prompts].tolist()) == list(range(num_prompts))


@settings(deadline=None, max_examples=20)
@given(**SIZES)
def test_ids_are_unique_in_the_run_and_a_group_has_one_prompt(num_prompts, prompts, group, seed):
    sampler = PromptSampler(num_prompts, prompts, group, seed)
    batches = [sampler.batch(i) for i in range(4)]
    samples = torch.cat([b.sample_id for b in batches])
    assert samples.unique().numel() == samples.numel()
    groups = torch.cat([b.group_id for b in batches])
    index = torch.cat([b.prompt_index for b in batches])
    labels, counts = groups.unique(return_counts=True)
    assert labels.numel() == 4 * prompts and (counts == group).all()
    assert all(index[groups == label].unique().numel() == 1 for label in labels)


def test_any_order_of_calls_gives_the_same_batches():
    """A prefetching loader asks ahead, a resumed run asks from the middle."""
    in_order = [PromptSampler(10, 3, 2, 7).batch(i).prompt_index for i in range(9)]
    late = PromptSampler(10, 3, 2, 7)
    for i in (8, 2, 5, 2, 0):
        assert torch.equal(late.batch(i).prompt_index, in_order[i])
    assert not torch.equal(PromptSampler(10, 3, 2, 8).batch(0).prompt_index, in_order[0])
    assert len({tuple(batch.tolist()) for batch in in_order}) > 5


def test_strata_share_the_groups_and_keep_their_own_epochs():
    strata = ["rare"] * 2 + ["common"] * 8
    sampler = PromptSampler(10, 6, 2, 3, strata=strata)
    visited = torch.cat([sampler.batch(i).prompt_index[::2] for i in range(4)])
    rare = visited[visited < 2]
    assert rare.numel() == 12
    assert all(sorted(pair.tolist()) == [0, 1] for pair in rare.split(2))
    assert sorted(visited[visited >= 2][:8].tolist()) == list(range(2, 10))


def test_cycle_weights_the_strata():
    sampler = PromptSampler(4, 6, 2, 0, strata=["a", "a", "b", "b"], cycle=["a", "b", "b"])
    visited = sampler.batch(5).prompt_index[::2]
    assert (visited < 2).sum() == 2
    assert sorted(visited[visited >= 2].tolist()) == [2, 2, 3, 3]


def test_bad_labels_are_refused():
    with pytest.raises(ValueError, match=r"There are 3 prompts and 2 strata\. Give prompts, one label each"):
        PromptSampler(3, 2, 2, 0, strata=["a", "b"])
    with pytest.raises(ValueError, match=r"cycle names \['z'\].*labels are \['a', 'b'\]"):
        PromptSampler(2, 2, 2, 0, strata=["a", "b"], cycle=["a", "z"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 1), r"group_size is 1; .*at least 2 samples.*rollout\.group_size"),
        ((3, 2, 7), r"7 processes were started for 6 samples.*raise prompts_per_iteration or group_size"),
    ],
)
def test_batch_algebra_says_what_would_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_batch_algebra(*arguments)
