# SPDX-License-Identifier: Apache-2.0
"""Train an implicit process reward model on outcome labels, through the log-ratio to the reference.

q = β Σ_t (log π_φ − log π_ref)(y_t) is the log-odds that a completion is right; cross-entropy on it moves
π_φ, and the terms of the sum become rewards of tokens (`visalign.rewards.text.implicit_process_reward`).
The job text_process does so on stored completions, `process.online` on those of a run.

Sources: Yuan et al., "Free process rewards without process labels", arXiv 2412.01981, section 3; Cui et al.,
    PRIME, arXiv 2502.01456.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from visalign.core.rewards.steps import implicit_prm_loss
from visalign.errors import UserError
from visalign.text.policy_protocol import TextPolicy, model_log_prob, reference_log_prob
from visalign.text.rollout import TextRollout

from .label_fit import LabelOutputs


class ImplicitTexts:
    """Completions with outcomes, and the loss of an implicit process reward on them, for `LabelFit`.

    Labels [B] are 1 right, 0 wrong, or between, NaN where the outcome is unknown; completions without tokens are
    left out. The reference's log-probs (None: `policy.reference()`'s) are computed once, here. Log-probs are those
    of the models themselves, at temperature 1 over the full vocabulary.
    """

    def __init__(
        self,
        policy: TextPolicy,
        rollout: TextRollout,
        label: Tensor | Sequence[float],
        *,
        beta: float = 0.05,
        reference: TextPolicy | None = None,
        form: Literal["cross_entropy", "nca", "kto"] = "cross_entropy",
    ) -> None:
        self.label = torch.as_tensor(label, dtype=torch.float32).cpu()
        if self.label.shape != (len(rollout),) or bool(((self.label < 0) | (self.label > 1)).any()):
            raise UserError(
                f"label is {self.label.tolist()[:8]} for {len(rollout)} completions; give one number per completion: "
                "1 (right), 0 (wrong), between, or NaN where the outcome is unknown."
            )
        self.model, self.policy, self.rollout, self.beta = policy.module, policy, rollout, beta
        self.form: Literal["cross_entropy", "nca", "kto"] = form
        self.weight = (rollout.loss_mask != 0).float()
        self.rows = torch.nonzero((self.weight != 0).any(1) & torch.isfinite(self.label))[:, 0].tolist()
        self._reference = reference_log_prob(policy, rollout, reference=reference).cpu()

    def length(self, row: int) -> int:
        return int(self.weight[row].sum() + self.rollout.prompt_mask[row].sum())

    def outputs(self, rows: Sequence[int]) -> LabelOutputs:
        """Evaluate the model on some completions, with gradient; one counts as right where q > 0."""
        index = torch.tensor(rows)
        log_prob = model_log_prob(self.policy, self.rollout, index)
        log_ratio = log_prob - self._reference[index].to(log_prob.device)
        target, mask = self.label[index].to(log_ratio.device), self.weight[index].to(log_ratio.device)
        loss = implicit_prm_loss(log_ratio, target, mask, beta=self.beta, form=self.form)
        return LabelOutputs(odds=self.beta * (log_ratio.detach() * mask).sum(1), label=target, loss=loss)
