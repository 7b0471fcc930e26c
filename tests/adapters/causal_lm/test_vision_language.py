# SPDX-License-Identifier: Apache-2.0
"""Policies that see: log-probs against the model's own, positions, neighbours, what images change."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models.vision_language import (
    IMAGE,
    IMAGES,
    KINDS,
    NUCLEUS,
    SLOT,
    drawn,
    make_image,
    own_logits,
    policy,
    sampled,
    tiny_seeing_model,
    user,
)
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import Sampling
from visalign.vision.images import PatchedImage
from visalign.vision.positions import rotary_positions

SAMPLINGS = [Sampling(), NUCLEUS, Sampling(temperature=1.4, top_k=9)]


@pytest.fixture(scope="module", params=KINDS)
def shared(request) -> CausalLMPolicy:
    return policy(request.param, generate_batch=7, score_batch=5)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@torch.no_grad()
def test_log_probs_equal_a_recomputation_and_the_models_own(shared, sampling) -> None:
    rollout = sampled(shared, sampling)
    output = shared.log_probs(rollout)
    torch.testing.assert_close(output.log_prob, rollout.log_prob, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, rollout.entropy, rtol=0, atol=1e-4)
    full = shared.log_probs(rollout, distribution="full").log_prob
    torch.testing.assert_close(full, rollout.full_log_prob, rtol=0, atol=1e-4)
    compared = 0
    for row in range(len(rollout)):
        completion = drawn(rollout, row)
        if IMAGE in completion:  # the library takes it for one more image and fails
            continue
        log_p = (own_logits(shared, row // 3, completion) / sampling.temperature).log_softmax(-1)
        own = log_p.gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(rollout.full_log_prob[row, : len(completion)], own, rtol=0, atol=1e-4)
        if sampling.top_k:
            own = own - log_p.topk(sampling.top_k).values.logsumexp(-1)
            torch.testing.assert_close(rollout.log_prob[row, : len(completion)], own, rtol=0, atol=1e-4)
        compared += 1
    assert compared >= 6 and len(set(rollout.text)) > 6


@torch.no_grad()
def test_what_is_shown_and_in_which_order_matters(shared) -> None:
    rollout = sampled(shared)
    other = [[make_image(24, 16, 7), IMAGES[0][1]], [make_image(24, 16, 1), make_image(8, 40, 8)]]
    for images in other:
        changed = replace(rollout, images=[images] * 3 + [IMAGES[row // 3] for row in range(3, 12)])
        moved = (shared.log_probs(changed).log_prob - rollout.log_prob).abs()
        assert moved[:3].max() > 0.01 and moved[3:].max() < 1e-4
    prompt = user(SLOT, SLOT)
    two = [make_image(16, 16, 1), make_image(16, 16, 2)]
    pair = sampled(shared, prompts=[prompt, prompt], images=[two, two[::-1]], seeds=[1, 1], num_generations=1)
    assert not torch.equal(pair.log_prob[0], pair.log_prob[1])


@torch.no_grad()
def test_image_tokens_that_a_completion_draws_are_text(shared) -> None:
    rollout = sampled(shared, Sampling(temperature=20), num_generations=32)
    rows = ((rollout.completion_ids == IMAGE) & (rollout.loss_mask > 0)).any(1)
    assert all(rows[32 * prompt : 32 * prompt + 32].any() for prompt in range(3))
    log_prob = shared.log_probs(rollout, rows).log_prob
    torch.testing.assert_close(log_prob, rollout.log_prob[rows], rtol=0, atol=1e-4)


def test_each_image_is_read_once(shared, monkeypatch) -> None:
    trunk, grids = shared.model.base_model, []
    read = trunk.get_image_features
    monkeypatch.setattr(
        trunk,
        "get_image_features",
        lambda pixels, grid, **more: (grids.append(grid.tolist()), read(pixels, grid, **more))[1],
    )
    shared.generate_batch = 64
    rollout = sampled(shared, images=[[IMAGES[2][0], IMAGES[0][0]], [], IMAGES[2], []])
    shared.generate_batch = 7
    assert grids == [[[1, 10, 10], [1, 4, 6]]]
    shared.log_probs(rollout, torch.tensor([0, 1, 7]))
    shared.log_probs(rollout, torch.tensor([4, 5]))
    assert grids == [[[1, 10, 10], [1, 4, 6]]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_those_of_the_library(kind) -> None:
    trunk: Any = tiny_seeing_model(kind).base_model
    sizes = [[(2, 3), (5, 1)], [], [(4, 4)], [(1, 1), (3, 2), (2, 2)]]
    images = [[PatchedImage(f"{h}x{w}", (1, 2 * h, 2 * w), h * w, torch.zeros(0)) for h, w in row] for row in sizes]
    rows = [[7, 8, *(token for p in row for token in (*[IMAGE] * p.tokens, 9, 9))] for row in images]
    width = max(map(len, rows)) + 2
    token_types, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        first = (0, 2, width - len(row), 1)[number]
        mask[number, first : first + len(row)] = 1
        token_types[number, first : first + len(row)] = torch.tensor([token == IMAGE for token in row])
    theirs, offset = trunk.get_rope_index(
        torch.zeros_like(mask),
        mm_token_type_ids=token_types,
        image_grid_thw=torch.tensor([p.grid for row in images for p in row]),
        attention_mask=mask,
    )
    ours, own = rotary_positions(token_types.bool(), mask, images, 2)
    assert torch.equal(ours, theirs) and torch.equal(own, offset)
