# SPDX-License-Identifier: Apache-2.0
"""Implicit process reward: token rewards from the log-ratio of a model trained on outcomes to its reference.

r_t = β (log π_φ(y_t | y_<t) − log π_ref(y_t | y_<t)). Their sum is the outcome reward that π_φ was trained with
(`visalign.training.process.implicit`), so no step needs a label. Sources: Yuan et al., "Free process rewards without
process labels", arXiv 2412.01981, section 3; Cui et al., PRIME, arXiv 2502.01456.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.steps import implicit_step_rewards
from visalign.rewards.base.contract import check_rules
from visalign.text.policy_protocol import TextPolicy, model_log_prob, reference_log_prob
from visalign.text.rollout import TextRollout
from visalign.text.steps import StepReading, StepRewards, step_index


@dataclass(frozen=True, kw_only=True)
class ImplicitScores:
    """Log-ratio rewards of B completions; float32, no gradient."""

    token: Tensor  # [B, T] r_t; 0 where the loss mask is 0, and in invalid completions
    prefix: Tensor  # [B, T] Σ_{s≤t} r_s, the value of the prefix that ends with token t
    total: Tensor  # [B] Σ_t r_t, the outcome reward; NaN in invalid completions
    steps: StepRewards  # [B, K], the sums over the tokens of each step. A completion of blanks is invalid here alone
    valid: Tensor  # bool [B]
    reason: list[str | None]  # Why a completion is invalid; None for the valid ones


class ImplicitProcessReward:
    """Process rewards from the log-ratio of a model to its reference, at temperature 1 over the full vocabulary.

    Args:
        policy: π_φ, with the token ids of the rollouts that it scores.
        tokenizer: of the policy that writes the rollouts, to find their steps.
        reference: π_ref; `policy.reference()`, the model before training, when None.
        beta: reward per nat, as in its training; 0.05 in PRIME.
        separator: text that ends a step; the end token is part of the last one.
    """

    higher_is_better = True
    unit = "nats × β"

    def __init__(
        self,
        policy: TextPolicy,
        *,
        tokenizer: Any,
        reference: TextPolicy | None = None,
        beta: float = 0.05,
        separator: str = "\n",
        name: str = "implicit_process_reward",
    ) -> None:
        check_rules(name, {f"beta is {beta}; it must be positive and finite, 0.05 in PRIME": 0 < beta < math.inf})
        self.name, self.policy, self.reference_policy = name, policy, reference
        self.tokenizer, self.beta = tokenizer, beta
        self.reading = StepReading(separator=separator)

    @torch.no_grad()
    def score_rollout(self, rollout: TextRollout) -> ImplicitScores:
        """Score each token and step; `steps.tokens("last")` puts the sum of a step on its last token."""
        log_ratio = (
            model_log_prob(self.policy, rollout).cpu()
            - reference_log_prob(self.policy, rollout, reference=self.reference_policy).cpu()
        )
        in_loss = rollout.loss_mask != 0
        has_tokens = in_loss.any(1) & rollout.generated
        valid = has_tokens & torch.isfinite(log_ratio).all(1)
        log_ratio = torch.where(valid[:, None] & in_loss, log_ratio, 0.0)
        rewards = implicit_step_rewards(log_ratio, in_loss.float(), beta=self.beta)
        reasons: list[str | None] = [
            "no token was generated" if empty else None if ok else "a log-prob is not finite"
            for empty, ok in zip((~has_tokens).tolist(), valid.tolist(), strict=True)
        ]
        return ImplicitScores(
            token=rewards.step,
            prefix=rewards.prefix,
            total=torch.where(valid, rewards.total, torch.nan),
            steps=self._sum_steps(rollout, rewards.step, valid, reasons),
            valid=valid,
            reason=reasons,
        )

    def _sum_steps(self, rollout: TextRollout, token: Tensor, valid: Tensor, reasons: list[str | None]) -> StepRewards:
        step = step_index(rollout, self.tokenizer, self.reading)
        count = int(step.max()) + 1 if step.numel() else 0
        column = torch.where(step >= 0, step, count)  # tokens outside the steps: a column that is cut off
        zeros = torch.zeros(len(rollout), count + 1)
        total = zeros.scatter_add(1, column, token)
        exists = zeros.scatter_add(1, column, torch.ones_like(token)) > 0
        has_steps = (step >= 0).any(1)
        valid = valid & has_steps
        blank = "it has no step: blanks alone"
        return StepRewards(
            reward=torch.where(exists & valid[:, None], total, torch.nan)[:, :count],
            step=step,
            valid=valid,
            reason=[why or (None if ok else blank) for why, ok in zip(reasons, has_steps.tolist(), strict=True)],
        )
