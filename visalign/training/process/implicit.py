# SPDX-License-Identifier: Apache-2.0
"""Training an implicit process reward model: outcome labels alone, through the log-ratio to the reference.

q = β Σ_t (log π_φ − log π_ref)(y_t) is the log-odds that a completion is right; cross-entropy on it moves
π_φ, and the terms of the sum become rewards of tokens (`visalign.rewards.text.implicit_process_reward`).
PRIME does so once per RL step on the rollout of the policy, with the same optimizer throughout: give
`trainer=label_trainer(policy.trainable_parameters(), FitSettings(epochs=1))` each time.

Sources: Yuan et al., "Free process rewards without process labels", arXiv 2412.01981, section 3; Cui et al.,
    PRIME, arXiv 2502.01456.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.core.rewards.steps import implicit_prm_loss
from visalign.errors import UserError
from visalign.text.log_ratio import model_log_prob, reference_log_prob
from visalign.text.policy_protocol import TextPolicy
from visalign.text.rollout import TextRollout
from visalign.training.loop.trainer import Trainer

from .label_fit import FitSettings, LabelFit, LabelOutputs, LabelReport, fit_labels, label_trainer


def train_implicit_process_reward(
    policy: TextPolicy,
    rollout: TextRollout,
    label: Tensor | Sequence[float],
    *,
    settings: FitSettings | None = None,
    beta: float = 0.05,
    reference: TextPolicy | None = None,
    trainer: Trainer[LabelFit] | None = None,
) -> list[LabelReport]:
    """Fit a language model to outcomes; it is changed in place.

    The reference's log-probs are computed once. Log-probs are those of the models themselves, at temperature
    1 over the full vocabulary, whatever the rollout was sampled with.

    Args:
        policy: π_φ, with the token ids of the rollout.
        rollout: B completions, the policy's own or another's.
        label: [B] 1 right, 0 wrong, or between; NaN where the outcome is not known. Completions without
            tokens are left out.
        settings: epochs, batches, learning rate, seed.
        beta: β > 0, reward per nat.
        reference: π_ref; `policy.reference()` when None.
        trainer: one to go on with, in place of a new one by the settings.

    Returns:
        Loss and accuracy of each epoch: a completion is judged right where q > 0.

    Raises:
        UserError: labels that do not fit, or none at all.
        ValueError: β is not positive and finite, or a loss is not finite.
    """
    known = torch.as_tensor(label, dtype=torch.float32).cpu()
    if known.shape != (len(rollout),):
        raise UserError(
            f"label has shape {tuple(known.shape)} for {len(rollout)} completions; give one number per "
            "completion, NaN where the outcome is not known."
        )
    bad = known[torch.isfinite(known) & ((known < 0) | (known > 1))]
    if len(bad):
        raise UserError(f"A label is {bad[0].item():g}; allowed are 1 (right), 0 (wrong), between, or NaN.")
    weight = (rollout.loss_mask != 0).float()
    with_tokens = (weight != 0).any(1) & torch.isfinite(known)
    ref = reference_log_prob(policy, rollout, reference=reference).cpu()

    def judge(rows: list[int]) -> LabelOutputs:
        chosen = torch.tensor(rows)
        ratio = model_log_prob(policy, rollout, chosen)
        ratio = ratio - ref[chosen].to(ratio.device)
        target, inside = known[chosen].to(ratio.device), weight[chosen].to(ratio.device)
        loss = implicit_prm_loss(ratio, target, inside, beta=beta)
        return LabelOutputs(odds=beta * (ratio.detach() * inside).sum(1), label=target, loss=loss)

    return fit_labels(
        judge,
        torch.nonzero(with_tokens)[:, 0].tolist(),
        trainer or label_trainer(policy.trainable_parameters(), settings),
    )
