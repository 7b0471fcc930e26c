# SPDX-License-Identifier: Apache-2.0
"""Log-probs of language models on the tokens of a rollout, whatever the rollout was sampled with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .distribution import Sampling
from .policy_protocol import TextPolicy
from .rollout import TextRollout


def model_log_prob(policy: TextPolicy, rollout: TextRollout, rows: Tensor | slice | None = None) -> Tensor:
    """Compute log π(y_t | y_<t) [b, T] at temperature 1, full vocabulary, experts of the model's own router.

    Differentiable unless gradients are off; 0 where the loss mask is 0. Rows None is all samples.
    """
    unmodified = replace(rollout, sampling=Sampling(), kept=None, routes=None)
    return policy.log_probs(unmodified, rows).log_prob


@torch.no_grad()
def reference_log_prob(policy: TextPolicy, rollout: TextRollout, *, reference: TextPolicy | None = None) -> Tensor:
    """Compute `model_log_prob` [B, T] of the reference: another model, or `policy.reference()`."""
    if reference is not None:
        return model_log_prob(reference, rollout)
    with policy.reference():
        return model_log_prob(policy, rollout)
