# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: a policy learns which of two completions is better, without a reward model.

The policy is its own reward model, r(x, y) = β log π(y|x)/π_ref(y|x), and each row of `DIRECT` is a loss of
the lead m = r_w − r_l − γ of the chosen completion over the rejected one; that of `kto` is of single ones.

Row power, w = 1/|y|: m = β (w_w log π(y_w) − w_l log π(y_l) + w_w − w_l), and −η β w_w log π(y_w) is added to
the loss. From its paper's abstract (POWER, arXiv 2412.09544): Guiaşu's weighted entropy with a robust reward,
and labels that move to stationary ones. The rest was not read in it: m follows from the maximum of
E_π[r] + β H_w(π) (see `implicit_reward`); w, the last term, β = 2 and η = 0.0005 are from a summary by
memory, which had w_l − w_w in m, as no such maximum gives; the rule of `dynamic_labels` is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from visalign.core.checks import check_axes, check_choice, check_same
from visalign.core.precision import float32


def _logistic(m: Tensor, beta: float, eps: float) -> Tensor:
    return -(1 - eps) * logsigmoid(m) - eps * logsigmoid(-m)


@dataclass(frozen=True, kw_only=True)
class DirectRow:
    """A method of direct preference optimisation, with its published constants."""

    source: str
    """Paper, arXiv id, equation."""
    formula: str = "−(1 − ε) ln σ(m) − ε ln σ(−m)"
    """Loss in m, β and ε or the label l; of votes in r and z₀."""
    loss: Callable[[Tensor, float, float], Tensor] | None = _logistic
    """(m, β, ε) -> loss; None for votes without pairs."""
    beta: float = 0.1
    gamma: float = 0.0
    reference: bool = True
    """The reward is measured from a reference."""
    per_token: bool = False
    """The reward is divided by the tokens of the completion."""
    weighted_entropy: bool = False
    """The reward of a completion is that of weighted entropy, β (log π + 1) per token."""
    eta: float = 0.0
    """η, weight of the chosen completion's own likelihood."""
    smooths: bool = True
    """Knows wrong labels, ε > 0."""

    @property
    def labels(self) -> bool:
        """True if the loss is the cross-entropy of σ(m), which needs a label per pair."""
        return self.loss is _logistic


DIRECT = {
    "sigmoid": DirectRow(source="DPO, arXiv 2305.18290, eq. 7; ε > 0: cDPO, Mitchell 2023"),
    "robust": DirectRow(
        source="robust DPO, arXiv 2403.00409",
        formula="(−(1 − ε) ln σ(m) + ε ln σ(−m)) / (1 − 2ε)",
        loss=lambda m, beta, eps: (-(1 - eps) * logsigmoid(m) + eps * logsigmoid(-m)) / (1 - 2 * eps),
    ),
    "hinge": DirectRow(
        source="SLiC-HF, arXiv 2305.10425, from a reference as in RSO, 2309.06657",
        formula="max(0, 1 − m)",
        loss=lambda m, beta, eps: (1 - m).clamp(min=0),
        smooths=False,
    ),
    "ipo": DirectRow(
        source="IPO, arXiv 2310.12036, eq. 17, per token",
        formula="((m − 1/2)/β)²",
        loss=lambda m, beta, eps: ((m - 0.5) / beta).square(),
        per_token=True,
        smooths=False,
    ),
    "sigmoid_norm": DirectRow(source="length-normalised DPO, Tülu 3, arXiv 2411.15124", beta=5.0, per_token=True),
    "simpo": DirectRow(source="SimPO, arXiv 2405.14734, eq. 6", beta=2.0, gamma=1.0, reference=False, per_token=True),
    "power": DirectRow(
        source="POWER, arXiv 2412.09544, by its abstract",
        formula="−l ln σ(m) − (1 − l) ln σ(−m) − η β/|y_w| log π(y_w), l = 1 − ε or a label that moves",
        beta=2.0,
        reference=False,
        per_token=True,
        weighted_entropy=True,
        eta=0.0005,
    ),
    "kto": DirectRow(
        source="KTO, arXiv 2402.01306, section 4",
        formula="λ_D σ(β z₀ − r) of good completions, λ_U σ(r − β z₀) of bad ones",
        loss=None,
        smooths=False,
    ),
}
"""Row -> method; its β, γ and η hold where a call gives None."""


def implicit_reward(
    log_prob: Tensor,
    ref_log_prob: Tensor | None = None,
    length: Tensor | None = None,
    *,
    row: str = "sigmoid",
    beta: float | None = None,
) -> Tensor:
    """The reward [B] that a policy gives a completion, r = β log π(y|x)/π_ref(y|x), per token where the row
    says. `length` [B] counts the tokens of the completions.

    Row power: β w (log π + 1) with w = 1/|y|, the reward under which π maximises E_π[r] + β H_w(π), H_w(π) =
    −Σ_y w(y) π(y) log π(y) Guiaşu's weighted entropy. DPO, arXiv 2305.18290, eq. 5; per token without a
    reference: SimPO, arXiv 2405.14734, eq. 4; POWER, arXiv 2412.09544.
    """
    check_choice("row", row, DIRECT)
    chosen = DIRECT[row]
    check_axes(log_prob=(log_prob, "B"), ref_log_prob=(ref_log_prob, "B"), length=(length, "B"))
    reward = float32(log_prob)
    if chosen.reference:
        if ref_log_prob is None:
            raise ValueError(f"row {row} measures from a reference; give ref_log_prob, or take simpo.")
        reward = reward - ref_log_prob.detach()
    if chosen.per_token:
        if length is None:
            raise ValueError(f"row {row} divides by the tokens of a completion; give their number as length.")
        reward = (reward + float(chosen.weighted_entropy)) / length.clamp(min=1)
    return (chosen.beta if beta is None else beta) * reward


def direct_preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    *,
    row: str = "sigmoid",
    beta: float | None = None,
    gamma: float | None = None,
    eps: float = 0.0,
    eta: float | None = None,
    label: Tensor | None = None,
) -> Tensor:
    """Loss [B] of each pair by a row of `DIRECT`, of the lead m = r_w − r_l − γ; sigmoid: ℓ = −ln σ(m).

    IPO is divided by the tokens, as its authors' results are; its eq. 17 has sums. `eps` is the share of wrong labels,
    in [0, 1/2). With labels l (None is 1 − ε), ℓ = −l ln σ(m) − (1 − l) ln σ(−m), whose derivative σ(m) − l vanishes
    at the stationary label σ(m). The rows' sources; cDPO: Mitchell 2023, "A note on DPO with noisy preferences".
    """
    check_choice("row", row, (name for name, variant in DIRECT.items() if variant.loss is not None))
    entry = DIRECT[row]
    assert entry.loss is not None
    beta, gamma = entry.beta if beta is None else beta, entry.gamma if gamma is None else gamma
    eta = entry.eta if eta is None else eta
    ignored = {"eps": eps and not entry.smooths, "eta": eta and not entry.weighted_entropy}
    ignored["label"] = label is not None and (eps or not entry.labels)
    if unused := [option for option, refused in ignored.items() if refused]:
        raise ValueError(f"row {row} with eps={eps} has no use for {', '.join(unused)}; leave it out.")
    better = implicit_reward(chosen, ref_chosen, chosen_length, row=row, beta=beta)
    worse = implicit_reward(rejected, ref_rejected, rejected_length, row=row, beta=beta)
    check_axes(chosen=(better, "B"), rejected=(worse, "B"), label=(label, "B"))
    lead = better - worse - gamma
    if label is None:
        loss = entry.loss(lead, beta, eps)
    else:
        loss = binary_cross_entropy_with_logits(lead, label.detach().to(lead), reduction="none")
    if eta and chosen_length is not None:
        loss = loss - eta * beta * float32(chosen) / chosen_length.clamp(min=1)
    return loss


def dynamic_labels(label: Tensor, lead: Tensor, *, rate: float) -> Tensor:
    """Labels [B] of pairs after a visit, l + γ (σ(m) − l), γ = `rate`: they drift to where the pair's
    gradient vanishes; one whose lead m is NaN stays.

    A pair whose lead the policy does not learn loses its pull, however often it is seen. That labels move to
    stationary ones is of the paper's abstract, this rule is ours. POWER-DL, arXiv 2412.09544.
    """
    check_same(label=label, lead=lead)
    stationary = torch.sigmoid(lead.detach()).to(label)
    return torch.where(stationary.isnan(), label, label + rate * (stationary - label))


def kto_loss(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float | None = None,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO, completions with a vote each: ℓ = λ_D σ(β z₀ − r) for good ones, λ_U σ(r − β z₀) for bad ones.

    `desirable` bool [B] holds the votes, `reference_point` is z₀. With n_D and n_U votes, λ_D n_D / (λ_U n_U)
    should lie in [1, 4/3]. Ethayarajh et al., arXiv 2402.01306, section 4.
    """
    check_axes(log_prob=(log_prob, "B"), desirable=(desirable, "B"))
    reward = implicit_reward(log_prob, ref_log_prob, row="kto", beta=beta)
    z = (DIRECT["kto"].beta if beta is None else beta) * reference_point.detach()
    good = desirable.bool()
    return torch.where(
        good, desirable_weight * torch.sigmoid(z - reward), undesirable_weight * torch.sigmoid(reward - z)
    )


def kto_reference_point(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """KTO's z₀ = max(0, mean log π(y'|x)/π_ref(y'|x)), a number without gradient in nats.

    y' are completions to other prompts, all of an optimizer step: an estimate of KL(π‖π_ref) of low variance,
    biased. Ethayarajh et al., arXiv 2402.01306, section 4.
    """
    check_axes(log_prob=(log_prob, "B"), ref_log_prob=(ref_log_prob, "B"))
    return (float32(log_prob) - ref_log_prob).detach().mean().clamp(min=0)
