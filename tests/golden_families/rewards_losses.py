# SPDX-License-Identifier: Apache-2.0
"""Golden families of reward models: losses, heads, and the rules that are core functions.

A case is known by its parameters and inputs, not by its name. The published LAION weights are not here: a
case asks for its file in the folder that VISALIGN_GOLDEN_WEIGHTS names. The affine map that one of them
collapses to stands in `tests/golden/laion_affine.npz` (improved-aesthetic-predictor, Apache-2.0).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family, gradients
from visalign.core.preference.bradley_terry import average_pairs, bradley_terry_loss, outcome_loss, tie_log_prob
from visalign.core.preference.fidelity import fidelity_rewards
from visalign.core.preference.heatmaps import ctrl_u_loss, ctrl_u_weight
from visalign.core.preference.ict import IctLabels, hp_loss, ict_hp_loss, ict_loss
from visalign.core.preference.off_policy import off_policy_pair_weights
from visalign.core.preference.uncertainty import (
    log_win_probability,
    mean_log_win,
    pair_deviation,
    uncertain_preference_loss,
)
from visalign.core.preference.yes_no import yes_no_answer
from visalign.core.rewards.uncertainty import bhattacharyya, bhattacharyya_overlap, penalise
from visalign.core.standalone.clip_losses import listwise_choice_loss, paired_cosine, pickscore_loss, rank_margin_loss
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.weights.affine_head import AffineHead, standardise

COLLAPSED = Path(__file__).resolve().parent.parent / "golden" / "laion_affine.npz"


def _hpsv3(case: Any) -> Outputs | None:
    """The released trainer's losses; its tie mask is a weight over all pairs, its gradients are [B, 1]."""
    chosen, rejected = (case.tensor(name).requires_grad_() for name in ("chosen", "rejected"))
    params, untied = case.params, case.tensor("nontied")
    options = {
        "bt": {},
        "likelihood_displacement": {"displacement": params["tau"]},
        "constant_margin": {"margin": params["margin"]},
    }
    name = params["loss_type"]
    if name in options:
        loss = average_pairs(bradley_terry_loss(chosen, rejected, **options[name]), untied, over="pairs")
        return _columns(gradients(loss, chosen=chosen, rejected=rejected))
    if name == "btt":
        share = torch.stack([untied, 1 - untied, torch.zeros_like(untied)], -1)
        loss = outcome_loss(tie_log_prob(chosen, rejected, params["k"]), share).mean()
        return _columns(gradients(loss, chosen=chosen, rejected=rejected))
    if name == "hpsv2":
        loss = bradley_terry_loss(chosen, rejected).sum()
        shares = torch.stack([chosen, rejected]).softmax(0)
        twice = bradley_terry_loss(shares[0], shares[1]).sum()
        peer = _columns(gradients(twice, chosen=chosen, rejected=rejected))
        return {"loss": loss, "outputs_peer": peer}
    return None


def _columns(outputs: Outputs) -> Outputs:
    return {name: value[:, None] if value.ndim == 1 else value for name, value in outputs.items()}


def _uncertainty(case: Any) -> Outputs:
    moments = (
        *(case.tensor(f"mu_{side}") for side in ("chosen", "rejected")),
        *(case.tensor(f"log_sigma_{side}").exp() for side in ("chosen", "rejected")),
    )
    left, right, left_std, right_std = moments
    mu = (left - right).requires_grad_()
    s = pair_deviation(left_std, right_std).requires_grad_()
    nll, upstream = -log_win_probability(mu, s), -mean_log_win(mu, s)

    def loss(label: Tensor | None = None, **options: Any) -> Tensor:
        return uncertain_preference_loss(left, right, left_std, right_std, label, **options)

    slopes, peer = (torch.autograd.grad(value.sum(), (mu, s)) for value in (nll, upstream))
    return {
        "mu": mu,
        "s": s,
        "prob": torch.exp(-nll),
        "nll": loss(),
        "loss": nll.mean(),
        "nll_flipped": loss(torch.zeros_like(left)),
        "soft_nll": loss(case.tensor("soft_label")),
        "grad_mu": slopes[0],
        "grad_s": slopes[1],
        "outputs_peer": {
            "exact_mean_of_log": loss(mode="upstream"),
            "exact_loss": upstream.mean(),
            "grad_mu": peer[0],
            "grad_s": peer[1],
        },
    }


def _trl(case: Any) -> Outputs:
    chosen, rejected = (case.tensor(name).requires_grad_() for name in ("chosen", "rejected"))
    margin = 0.0 if case.inputs["margin"] is None else case.tensor("margin")
    centre = case.params["center_coefficient"] or 0.0
    loss = bradley_terry_loss(chosen, rejected, margin=margin, centre=centre).mean()
    return gradients(loss, chosen=chosen, rejected=rejected)


def _ict_hp(case: Any) -> Outputs:
    params = case.params
    images = torch.stack([case.tensor(f"image{number}") for number in (1, 2, 3)])
    hp = torch.stack([case.tensor(f"hp{number}") for number in (1, 2, 3)])
    easy, refined = case.tensor("text_easy"), case.tensor("text_refined")
    one = torch.ones_like(hp[0])
    first, second, third, fourth = (case.tensor(name) for name in ("E1", "E2", "R1", "R2"))
    labels = IctLabels(first, second, one, third, fourth, one)
    loss = peer = torch.zeros((), dtype=torch.float64)
    if params["loss_ict"]:
        both = [
            ict_loss(easy, refined, images, labels, negative_weight=params["neg_weight"], mode=mode)
            for mode in ("paper", "upstream")
        ]
        loss, peer = loss + params["ict_weight"] * both[0], peer + params["ict_weight"] * both[1]
    terms = torch.zeros((), dtype=torch.float64)
    if params["loss_hp"]:
        terms = terms + params["hp_weight"] * hp_loss(hp, margin=params["margin"])
    if params["loss_icthp"]:
        cosine = paired_cosine(images, easy.expand_as(images))
        product = ict_hp_loss(cosine, hp, margin=params["margin"], reduction="sum")
        terms = terms + params["icthp_weight"] * product
    return {"loss": loss + terms, "outputs_peer": {"loss": peer + terms}}


def _pickscore(case: Any) -> Outputs | None:
    label = case.tensor("label0")
    if not torch.equal(label + case.tensor("label1"), torch.ones_like(label)):
        return None
    text, image = case.tensor("text").requires_grad_(), case.tensor("image0").requires_grad_()
    other, count = case.tensor("image1"), case.tensor("n_per_prompt")
    loss = pickscore_loss(text, image, other, label, count, **case.params)
    return gradients(loss, text=text, image0=image)


def _hps_pairs(case: Any) -> Outputs | None:
    logits, labels = case.tensor("text_logits").requires_grad_(), case.tensor("labels")
    size = logits.shape[0]
    if not torch.equal(labels[:size] + labels[size:], torch.ones(size, dtype=torch.float64)):
        return None
    left, right = (logits[:, start : start + size].diagonal() for start in (0, size))
    loss = bradley_terry_loss(left, right, labels[:size]).sum()
    return gradients(loss, text_logits=logits)


def _hps_groups(case: Any) -> tuple[Tensor, Tensor, list[int]]:
    """(logits [N, P] as a leaf, each image's own score [N], prompt of each image)."""
    logits = case.tensor("logits_per_image").requires_grad_()
    group = [prompt for prompt, count in enumerate(case.inputs["num_images"]) for _ in range(count)]
    return logits, logits[torch.arange(len(group)), torch.tensor(group)], group


def _hps_best(case: Any) -> Outputs:
    logits, score, group = _hps_groups(case)
    share = torch.zeros_like(score)
    start = 0
    for count, best in zip(case.inputs["num_images"], case.inputs["best"], strict=True):
        share[start + best] = 1
        start += count
    loss = listwise_choice_loss(score, share.detach(), group).mean()
    return gradients(loss, logits=logits)


def _hps_ranks(case: Any) -> Outputs:
    logits, score, group = _hps_groups(case)
    loss = rank_margin_loss(score, case.tensor("ranks"), group, margin=case.params["margin"], mode="upstream").mean()
    return {"outputs_peer": gradients(loss, logits=logits)}


def _layered(case: Any) -> Outputs | None:
    """HP's head: layered in float32 and float64, and collapsed to one affine map."""
    keys = set(case.params["state_dict_keys"])
    if not keys <= set(case.arrays):
        return None
    x = case.tensor("x")
    head = AffineHead.from_state_dict({key: torch.tensor(case.arrays[key]) for key in keys})
    exact = head.collapse()
    score = head(x.float())
    for name in ("weight", "bias"):
        if f"affine_{name}" in case.arrays:
            affine = torch.tensor(case.arrays[f"affine_{name}"])
            torch.testing.assert_close(getattr(exact, name).double(), affine, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(exact(x.float())[:, 0], score, rtol=1e-5, atol=1e-6)
    doubled = head.double()(x)
    return {"score": score, "score_float64": doubled, "sigmoid": torch.sigmoid(doubled)}


def _laion(case: Any) -> Outputs | None:
    """Unit vectors through a published file, or through the affine map it collapses to; else not known."""
    name, x = case.params["weights_file"], case.tensor("x")
    folder = os.environ.get("VISALIGN_GOLDEN_WEIGHTS")
    file = Path(folder, name) if folder else None
    if file is not None and file.is_file():
        head = AffineHead.from_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        assert set(head.state_dict()) == set(case.params["state_dict_keys"])
        assert (head.activation == "relu") == case.params["relu"]
        return {"score": head(x.float()), "score_float64": head.double()(x)}
    with np.load(COLLAPSED, allow_pickle=False) as archive:
        if case.params["relu"] or name not in archive.files:
            return None
        affine = torch.tensor(archive[name])
    score = x @ affine[:-1] + affine[-1]
    return {"score": score, "score_float64": score}


def _cosine(case: Any) -> Outputs:
    return {"score": paired_cosine(case.tensor("text"), case.tensor("image"))}


def _standardise(case: Any) -> Outputs:
    return {"score": standardise(case.tensor("raw"))}


def _hpsv3_pooling(case: Any) -> Outputs:
    state = {name: torch.tensor(value) for name, value in case.inputs["state_dict"].items()}
    head = RanknetHead.from_state_dict(state).double()
    hidden, ids = case.tensor("hidden"), case.tensor("input_ids", torch.int64)
    rows, outputs = torch.arange(len(hidden)), head(hidden)
    valid = (ids == case.params["pad_token_id"]).cumsum(1) == 0
    ends = {"special": (ids == case.params["special_token_id"]).int().argmax(1), "last": valid.sum(1) - 1}
    mean = (outputs * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    return {"mean": mean, "outputs": {pooling: outputs[rows, end] for pooling, end in ends.items()}}


def _fidelity(case: Any) -> Outputs:
    params = case.params
    answers, truth = case.tensor("predictions"), case.tensor("ground_truth")

    def rewards(**changes: Any) -> Tensor:
        options = {"ddof": params["ddof"], "floor": params["gamma"], **changes}
        return fidelity_rewards(answers, truth, **options)

    return {
        "reward": rewards(),
        "reward_variance_floor_0_0025": rewards(floor=0.0025),
        "reward_ddof0": rewards(ddof=0),
        "outputs_peer": {"reward": rewards(mode="upstream")},
    }


def _logits(case: Any) -> Outputs:
    answer = yes_no_answer(case.tensor("logits"), case.params["yes_ids"], case.params["no_ids"])
    return {"log_odds": answer.log_odds, "prob": answer.prob, "mass": answer.mass, "prob_vocab": answer.log_yes.exp()}


def _off_policy(case: Any) -> Outputs:
    log_probs = (case.tensor(f"logp_{name}") for name in ("chosen", "rejected", "ref_chosen", "ref_rejected"))
    parts = list(log_probs)
    options = {name: case.params[name] for name in ("alpha", "multiplier")}
    weights = off_policy_pair_weights(*parts, **options, normalise=False)
    return {"weights": weights, "normaliser": weights.mean(), "normalised": off_policy_pair_weights(*parts, **options)}


def _overlap(case: Any) -> Outputs:
    mu, sigma = case.tensor("mu"), case.tensor("sigma")
    uncertainty = bhattacharyya_overlap(mu, sigma)
    return {
        "BC": bhattacharyya(mu, sigma, mu, sigma),
        "uncertainty": uncertainty,
        "penalised": penalise(mu, uncertainty, strength=case.params.get("lambda", 0.5)),
    }


def _ctrl_u(case: Any) -> Outputs:
    params = case.params
    primary, auxiliary = (case.tensor(f"logits_{name}").requires_grad_() for name in ("primary", "auxiliary"))
    losses = ctrl_u_loss(
        primary,
        auxiliary,
        case.tensor("labels", torch.int64),
        counted=case.tensor("timestep_valid"),
        weight=ctrl_u_weight(params["step"], scale=params["grad_scale"], warmup=params["warmup"]),
        scale=params["u_scale"],
        ignore_index=params["ignore_index"],
    )
    slopes = torch.autograd.grad(losses.total, (primary, auxiliary))
    return {
        "loss": params["pretrain_loss"] + losses.total,
        "reward_loss": losses.reward,
        "uncertainty": losses.uncertainty,
        "grad_logits": torch.cat(slopes),
    }


TERMS = ("ict", "hp", "icthp")
LOSSES: tuple[Row, ...] = (
    (".*", _hpsv3, ("loss_type", "k", "tau", "margin"), ("chosen", "rejected", "nontied")),
    (
        ".*",
        _uncertainty,
        ("?mc",),
        ("mu_chosen", "log_sigma_chosen", "mu_rejected", "log_sigma_rejected", "soft_label"),
    ),
    (".*", _trl, ("center_coefficient",), ("chosen", "rejected", "margin")),
    (
        ".*",
        _ict_hp,
        ("neg_weight", "margin", *(f"{loss}_weight" for loss in TERMS), *(f"loss_{loss}" for loss in TERMS)),
        ("text_easy", "text_refined", "image1", "image2", "image3", "hp1", "hp2", "hp3", "E1", "E2", "R1", "R2"),
    ),
    (
        ".*",
        _pickscore,
        ("logit_scale", "in_batch_negatives"),
        ("text", "image0", "image1", "label0", "label1", "n_per_prompt"),
    ),
    (".*", _hps_pairs, (), ("text_logits", "labels")),
    (".*", _hps_best, (), ("logits_per_image", "num_images", "best")),
    (".*", _hps_ranks, ("margin",), ("logits_per_image", "num_images", "ranks")),
)
HEADS: tuple[Row, ...] = (
    (".*", _layered, ("?input_dim", "?hidden_dim", "state_dict_keys"), ("x",)),
    (".*", _laion, ("weights_file", "state_dict_keys", "relu"), ("x",)),
    (".*", _cosine, (), ("text", "image")),
    (".*", _standardise, (), ("raw",)),
    (
        ".*",
        _hpsv3_pooling,
        ("special_token_id", "pad_token_id", "?state_dict_keys"),
        ("hidden", "input_ids", "state_dict"),
    ),
)
RULES: tuple[Row, ...] = (
    (".*", _fidelity, ("gamma", "ddof", "?eps_inside_roots_peer", "?dtype"), ("predictions", "ground_truth")),
    (".*", _logits, ("yes_ids", "no_ids"), ("logits",)),
    (
        ".*",
        _off_policy,
        ("alpha", "multiplier", "?dtype"),
        ("logp_chosen", "logp_rejected", "logp_ref_chosen", "logp_ref_rejected"),
    ),
    (".*", _overlap, ("?lambda",), ("mu", "sigma")),
    (
        ".*",
        _ctrl_u,
        ("u_scale", "grad_scale", "warmup", "step", "pretrain_loss", "ignore_index"),
        ("logits_primary", "logits_auxiliary", "labels", "timestep_valid"),
    ),
)


def _loss_tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """The released criterion works in bfloat16 throughout, ours rounds the cosines alone."""
    if "text_easy" in case.inputs and key.startswith("outputs_peer"):
        return 3e-2, 1e-6, "element"
    return None


def _head_tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """`score` is float32 through five layers, there and here."""
    return (1e-5, 1e-6, "element") if key == "score" and "x" in case.inputs else None


def _rule_tolerance(case: Any, key: str) -> tuple[float, float, str] | None:
    """The released fidelity is float32."""
    return (1e-4, 1e-5, "element") if key == "outputs_peer.reward" else None


FAMILIES = {"G_reward_losses": family(LOSSES, exact=True), "G_reward_heads": family(HEADS, exact=True)}
FAMILIES["G_reward_rules"] = family(RULES, exact=True)
TOLERANCES = {"G_reward_losses": _loss_tolerance, "G_reward_heads": _head_tolerance}
TOLERANCES["G_reward_rules"] = _rule_tolerance
