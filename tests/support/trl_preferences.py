# SPDX-License-Identifier: Apache-2.0
"""Losses of direct preference optimisation as TRL's trainers compute them, frozen.

`python tests/support/trl_preferences.py`, in an environment with TRL 1.16.0 (visalign takes no part), writes
tests/golden/I_direct_preferences.json: the trainers' own `_compute_loss` (`cpo_loss` of CPO) on random
log-probs in float64, which a stand-in model returns, and the gradient with respect to each.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

trl = import_module("trl")  # by name: the project's own environment goes without it
CPO = import_module("trl.experimental.cpo").CPOTrainer

FROZEN = Path(__file__).parents[1] / "golden" / "I_direct_preferences.json"
ROWS = ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm")
FORMULA = {
    "sigmoid": "mean -ln s(beta d), d = chosen - rejected log-ratio of sums",
    "robust": "mean ((1-e)(-ln s(beta d)) + e ln s(-beta d))/(1-2e)",
    "hinge": "mean max(0, 1 - beta d)",
    "ipo": "mean (d - 1/(2 beta))^2, d of means per token",
    "sigmoid_norm": "mean -ln s(beta d), d of means per token",
    "cdpo": "mean -(1-e) ln s(beta d) - e ln s(-beta d), d handed in as log-probs",
    "simpo": "mean -ln s(beta (chosen - rejected mean log-prob) - gamma)",
    "kto": "mean of wD (1 - s(beta (r - z))) for good, wU (1 - s(beta (z - r))) for bad, z = max(0, mean kl)",
}
PAIRS, TOKENS = 4, 6


def draw(seed: int) -> dict[str, Tensor]:
    """Log-probs [2B, T] of 1 to 6 tokens, the chosen answers first, and sums of a reference."""
    random = torch.Generator().manual_seed(seed)
    count = torch.randint(1, TOKENS + 1, (2 * PAIRS,), generator=random)
    mask = (torch.arange(TOKENS) < count[:, None]).double()
    log_prob = -3 * torch.rand(2 * PAIRS, TOKENS, generator=random, dtype=torch.float64) * mask
    noise = torch.randn(2 * PAIRS, generator=random, dtype=torch.float64)
    return {"log_prob": log_prob, "mask": mask, "ref_log_prob": log_prob.sum(1) + 2 * noise}


def trainer(**settings: Any) -> Any:
    """What `_compute_loss` reads of a trainer."""
    return SimpleNamespace(
        accelerator=Accelerator(cpu=True), model=torch.nn.Identity(), precompute_ref_logps=True,
        ld_alpha=None, aux_loss_enabled=False, use_weighting=False, f_divergence_type="reverse_kl",
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1, **settings,
    )  # fmt: skip


class Answers(torch.nn.Module):
    """A model that returns the given log-probs."""

    def __init__(self, log_prob: Tensor) -> None:
        super().__init__()
        self.log_prob = log_prob

    def forward(self, **_: Any) -> SimpleNamespace:
        """As a fused head answers."""
        blank = torch.zeros_like(self.log_prob)
        return SimpleNamespace(log_probs=self.log_prob, entropy=blank, mean_logits=blank, is_top1=blank.bool())


def batch(mask: Tensor, **more: Tensor) -> dict[str, Tensor]:
    """Inputs of a trainer, a prompt of one token."""
    full_mask = torch.cat([torch.zeros(len(mask), 1), mask], 1).long()
    return {
        "input_ids": torch.ones_like(full_mask),
        "attention_mask": torch.ones_like(full_mask),
        "completion_mask": full_mask,
        **more,
    }


def plain(**tensors: Any) -> dict[str, Any]:
    """As JSON values."""
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in tensors.items()}


def record(variant: str, seed: int, function: str, params: Any, inputs: Any, outputs: Any) -> dict[str, Any]:
    """A case of the file."""
    return {
        "name": f"{variant}_s{seed}",
        "source": f"TRL {trl.__version__}, {function}",
        "formula": FORMULA[variant],
        "params": params,
        "inputs": plain(**inputs),
        "outputs": plain(**outputs),
    }


def pair_case(row: str, seed: int) -> dict[str, Any]:
    """`DPOTrainer._compute_loss`."""
    draws = draw(seed)
    leaf = draws["log_prob"].clone().requires_grad_()
    params = {"row": row, "beta": 0.1 + 0.2 * seed, "eps": 0.2 if row == "robust" else 0.0}
    own = trainer(loss_types=[row], loss_weights=[1.0], beta=params["beta"], label_smoothing=params["eps"])
    better, worse = draws["ref_log_prob"].chunk(2)
    inputs = batch(draws["mask"], ref_chosen_logps=better, ref_rejected_logps=worse)
    loss = trl.DPOTrainer._compute_loss(own, Answers(leaf), inputs, False)
    (slope,) = torch.autograd.grad(loss, leaf)
    outputs: dict[str, Any] = {"loss": loss, "grad_log_prob": slope}
    if row in ("sigmoid", "robust", "hinge"):
        logged = own._metrics["train"]
        for name in ("chosen", "rejected", "margins", "accuracies"):
            outputs[f"rewards_{name}"] = logged[f"rewards/{name}"][0]
    return record(row, seed, "DPOTrainer._compute_loss", params, draws, outputs)


def reference_free_case(row: str, seed: int) -> dict[str, Any]:
    """`CPOTrainer.cpo_loss`: SimPO, and cDPO where log-ratios are handed in."""
    draws = draw(seed)
    leaf = draws["log_prob"].clone().requires_grad_()
    simple = row == "simpo"
    params: dict[str, Any] = {"row": "simpo" if simple else "sigmoid", "beta": 0.5 + seed}
    params |= {"gamma": 0.5 + 0.3 * seed} if simple else {"eps": 0.1 + 0.1 * seed}
    count = draws["mask"].sum(1)
    log_probs = leaf.sum(1) / count if simple else leaf.sum(1) - draws["ref_log_prob"]
    own = SimpleNamespace(
        alpha=0.0, accelerator=Accelerator(cpu=True), loss_type=params["row"], beta=params["beta"],
        simpo_gamma=params.get("gamma"), label_smoothing=params.get("eps", 0.0),
    )  # fmt: skip
    losses, chosen, rejected = CPO.cpo_loss(own, *log_probs.chunk(2))
    (slope,) = torch.autograd.grad(losses.mean(), leaf)
    outputs = {
        "loss": losses.mean(),
        "grad_log_prob": slope,
        "rewards_chosen": chosen.mean(),
        "rewards_rejected": rejected.mean(),
    }
    return record(row, seed, "CPOTrainer.cpo_loss", params, draws, outputs)


def kto_case(seed: int) -> dict[str, Any]:
    """`KTOTrainer._compute_loss`; log-probs of mismatched pairs are handed in."""
    draws = draw(seed)
    leaf = draws["log_prob"].clone().requires_grad_()
    random = torch.Generator().manual_seed(100 + seed)
    draws["label"] = torch.tensor([True, False, True, True, False, False, True, False]).roll(seed)
    mismatched = -9 * torch.rand(2, 2 * PAIRS, generator=random, dtype=torch.float64)
    draws["kl_log_prob"], draws["ref_kl_log_prob"] = mismatched[0] + 2 * (seed != 1), mismatched[1]
    params = {"row": "kto", "beta": 0.1 + 0.2 * seed, "desirable": 1.0 + 0.3 * seed, "undesirable": 1.2}
    own = trainer(
        loss_type="kto",
        beta=params["beta"],
        calculate_KL=True,
        desirable_weight=params["desirable"],
        undesirable_weight=params["undesirable"],
        _compute_kl_logps=lambda model, inputs: draws["kl_log_prob"],
    )
    inputs = batch(
        draws["mask"], label=draws["label"], ref_logps=draws["ref_log_prob"], ref_KL_logps=draws["ref_kl_log_prob"]
    )
    loss = trl.KTOTrainer._compute_loss(own, Answers(leaf), inputs, False)
    (slope,) = torch.autograd.grad(loss, leaf)
    logged = own._metrics["train"]
    outputs = {
        "loss": loss,
        "grad_log_prob": slope,
        "kl": logged["kl"][0],
        "rewards_chosen": logged["rewards/chosen"][0],
        "rewards_rejected": logged["rewards/rejected"][0],
    }
    return record("kto", seed, "KTOTrainer._compute_loss", params, draws, outputs)


def main() -> None:
    """Write the file."""
    cases = [pair_case(row, seed) for row in ROWS for seed in range(3)]
    cases += [reference_free_case(row, seed) for row in ("cdpo", "simpo") for seed in range(3)]
    cases += [kto_case(seed) for seed in range(3)]
    head = {
        "format": "visalign-golden-1",
        "family": "I_direct_preferences",
        "about": "losses of direct preference optimisation, values and gradients",
        "count": len(cases),
    }
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    FROZEN.write_text(json.dumps(head, separators=(",", ":"))[:-1] + f',"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
