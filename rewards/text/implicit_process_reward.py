# SPDX-License-Identifier: Apache-2.0
"""The implicit process reward: what a language model that was trained on outcomes says of single tokens.

r_t = β (log π_φ(y_t | y_<t) − log π_ref(y_t | y_<t)). The reward of a step is the sum over its tokens, and
the sum over all is the outcome reward that π_φ was trained with
(`visalign.training.process.implicit`), so no label of a step was ever needed.

Sources: Yuan et al., "Free process rewards without process labels", arXiv 2412.01981, section 3; Cui et al.,
    PRIME, arXiv 2502.01456.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.steps import implicit_step_rewards
from visalign.text.log_ratio import model_log_prob, reference_log_prob
from visalign.text.policy_protocol import TextPolicy
from visalign.text.rollout import TextRollout
from visalign.text.steps import StepReading, StepRewards, step_index


@dataclass(frozen=True, kw_only=True)
class ImplicitScores:
    """What the log-ratio says of B completions; float32, no gradient."""

    token: Tensor
    """[B, T] r_t; 0 where the loss mask is 0, and in invalid completions."""
    prefix: Tensor
    """[B, T] Σ_{s≤t} r_s, the value of the prefix that ends with token t."""
    total: Tensor
    """[B] Σ_t r_t, the outcome reward; NaN in invalid completions."""
    steps: StepRewards
    """[B, K], the sums over the tokens of each step. A completion of blanks is invalid here alone."""
    valid: Tensor
    """bool [B]."""
    reason: list[str | None]
    """Why a completion is invalid; None for the valid ones."""


class ImplicitProcessReward:
    """Process rewards from the log-ratio of a model to its reference.

    The log-probs are those of the models themselves, at temperature 1 over the full vocabulary, whatever the
    rollout was sampled with. The end token counts, as part of the last step.
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
        """Take a trained model.

        Args:
            policy: π_φ, with the token ids of the rollouts that it will judge.
            tokenizer: of the policy that writes the rollouts, to find their steps.
            reference: π_ref; `policy.reference()`, the model before training, when None.
            beta: β > 0, reward per nat, as it was trained with; 0.05 in PRIME.
            separator: what ends a step.
            name: for messages and logs.

        Raises:
            UserError: an empty separator.
            ValueError: β is not positive and finite.
        """
        if not 0 < beta < float("inf"):
            raise ValueError(f"{name}: beta is {beta}; it must be positive and finite, 0.05 in PRIME.")
        self.name, self.policy, self.reference_policy = name, policy, reference
        self.tokenizer, self.beta = tokenizer, beta
        self.reading = StepReading(separator=separator)

    @torch.no_grad()
    def score_rollout(self, rollout: TextRollout) -> ImplicitScores:
        """Judge each token and step; `steps.tokens("last")` puts the sum of a step on its last token."""
        own = model_log_prob(self.policy, rollout).cpu()
        other = reference_log_prob(self.policy, rollout, reference=self.reference_policy).cpu()
        finite = torch.isfinite(own - other).all(1)
        there = (rollout.loss_mask != 0).any(1) & rollout.generated
        reasons: list[str | None] = [
            None if ok and known else ("a log-prob is not finite" if ok else "no token was generated")
            for ok, known in zip(there.tolist(), finite.tolist(), strict=True)
        ]
        valid = there & finite
        ratio = torch.where(valid[:, None] & (rollout.loss_mask != 0), own - other, 0.0)
        made = implicit_step_rewards(ratio, (rollout.loss_mask != 0).float(), beta=self.beta)
        return ImplicitScores(
            token=made.step,
            prefix=made.prefix,
            total=torch.where(valid, made.total, torch.nan),
            steps=self._steps(rollout, made.step, valid, reasons),
            valid=valid,
            reason=reasons,
        )

    def _steps(
        self, rollout: TextRollout, token: Tensor, valid: Tensor, reasons: list[str | None]
    ) -> StepRewards:
        """The sums over the tokens of each step."""
        step = step_index(rollout, self.tokenizer, self.reading)
        count = int(step.max()) + 1 if step.numel() else 0
        target = torch.where(step >= 0, step, count)
        blank = torch.zeros(len(rollout), count + 1)
        total = blank.scatter_add(1, target, token)
        exists = blank.scatter_add(1, target, torch.ones_like(token)) > 0
        stepped = (step >= 0).any(1)
        known = valid & stepped
        shown = torch.where(exists & known[:, None], total, torch.nan)[:, :count]
        told = [
            reason if reason is not None or ok else "it has no step: blanks alone"
            for reason, ok in zip(reasons, stepped.tolist(), strict=True)
        ]
        return StepRewards(reward=shown, step=step, valid=known, reason=told)
