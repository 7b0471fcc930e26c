# SPDX-License-Identifier: Apache-2.0
"""Golden family of direct preference optimisation: `DPOTrainer`, `CPOTrainer` and `KTOTrainer` of TRL."""

from __future__ import annotations

from typing import Any

import torch

from visalign.core.preference.direct import (
    DIRECT,
    direct_preference_loss,
    implicit_reward,
    kto_loss,
    kto_reference_point,
)


def _family(case: Any) -> dict[str, Any] | None:
    params, leaf = case.params, case.tensor("log_prob").requires_grad_()
    row, beta, log_prob, length = params["row"], params["beta"], leaf.sum(1), case.tensor("mask").sum(1)
    if row not in DIRECT:
        return None
    ref = case.tensor("ref_log_prob") if DIRECT[row].reference else None
    reward = implicit_reward(log_prob, ref, length, row=row, beta=beta)
    if row == "kto":
        good = torch.tensor(case.inputs["label"])
        z = kto_reference_point(case.tensor("kl_log_prob"), case.tensor("ref_kl_log_prob"))
        weights = {f"{name}_weight": params[name] for name in ("desirable", "undesirable")}
        loss = kto_loss(log_prob, case.tensor("ref_log_prob"), good, z, beta=beta, **weights).mean()
        extra, better, worse = {"kl": z}, reward[good], reward[~good]
    else:
        refs = (None, None) if ref is None else ref.chunk(2)
        options = {"row": row, "beta": beta, "gamma": params.get("gamma"), "eps": params.get("eps", 0.0)}
        loss = direct_preference_loss(*log_prob.chunk(2), *refs, *length.chunk(2), **options).mean()
        better, worse = reward.chunk(2)
        extra = {"rewards_margins": (better - worse).mean(), "rewards_accuracies": (better > worse).float().mean()}
    return {
        **extra,
        "loss": loss,
        "grad_log_prob": torch.autograd.grad(loss, leaf)[0],
        "rewards_chosen": better.mean(),
        "rewards_rejected": worse.mean(),
    }


FAMILIES = {"I_direct_preferences": _family}
