# SPDX-License-Identifier: Apache-2.0
"""Cost of a configuration in forward-equivalents: one transformer forward on one latent; a backward counts two."""

from __future__ import annotations

from visalign.core.regression.rows import Regression


def forward_equivalents_per_image(
    *,
    steps: float,
    trained: float,
    guided: bool,
    reference: float,
    trained_share: float = 1.0,
    epochs: int = 1,
    asked_again: int = 0,
    guided_rollout: bool | None = None,
    measured: float = 0.0,
) -> float:
    """Compute the least cost of a configuration per image.

    T·g + a·S·g + m·q·S·(g + 2) + E·q·S·(g − 1 + 3 + r·g) with g = 2 under guidance and 1 without: sampling;
    passes over all trained steps before the update; gradients of single rewards; per epoch and trained step
    one forward and one backward of the conditional half, one forward of the unconditional half, and the other
    policies. Old log-probabilities come from the rollout and cost nothing.

    T = `steps` are those of the sampling that carry no gradient and S = `trained` those trained on; shared ones
    count once. r = `reference`: other policies evaluated at each trained step (reference, anchor, old policy), or
    their mean. q = `trained_share` of the samples are back-propagated, in E = `epochs`. a = `asked_again`: passes
    over every trained step before the update (KL in the reward, off-policy correction). `guided_rollout` None is as
    `guided`. m = `measured`: gradients of single rewards in which an image takes part, for their balance.

    Flow-GRPO on SD3.5 (10 steps, 9 trained, guidance 4.5, β > 0), where the published code spends 92:

    >>> forward_equivalents_per_image(steps=10, trained=9, guided=True, reference=True)
    74.0
    """
    passes = 2 if guided else 1
    pair = passes - 1 + 3 + reference * passes
    sampling = steps * (passes if guided_rollout is None else 1 + guided_rollout)
    balance = measured * trained_share * trained * (passes + 2)
    return float(sampling + asked_again * trained * passes + balance + epochs * trained_share * trained * pair)


def planned_passes(row: Regression, updates: int, *, passes: int, reference: int, iterations: int = 1) -> float:
    """Compute r of `forward_equivalents_per_image` in own passes, averaged over the iterations of the run.

    `passes` are those of the policy itself (2 under guidance), `reference` those of the reference or an
    expert, `updates` those of an iteration in all epochs.
    """
    until = None if row.anchor == "reference" else row.kl_until
    kl_share = 1.0 if until is None else min(1.0, until / iterations)
    # an iteration's first update is on-policy where the old policy is the current one, bit for bit
    on_policy = sum(not row.keeps_old or i == 0 or row.decay_at(i - 1) == 0 for i in range(iterations))
    old = 1 - on_policy / iterations / updates if row.asks_old else 0.0
    other_policies = row.asks_reference * kl_share + (row.anchor == "expert")
    return other_policies * reference / passes + old + (row.average_kl > 0)
