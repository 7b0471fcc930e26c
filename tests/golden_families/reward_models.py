# SPDX-License-Identifier: Apache-2.0
"""Golden families of reward models for text: pairs, rankings, labels of steps, implicit process rewards.

Not offered: records of steps that are cut to a length (TRL's max_length; ours are refused or dropped).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.golden_families import Outputs, family, gradients
from visalign.core.advantages.process import prime_advantages
from visalign.core.preference.bradley_terry import average_pairs, bradley_terry_loss, plackett_luce_loss
from visalign.core.preference.yes_no import yes_no_answer, yes_no_loss
from visalign.core.rewards.steps import implicit_prm_loss, implicit_step_rewards
from visalign.text.step_tokens import StepEncoder, StepLimits
from visalign.text.steps import StepReading
from visalign.training.process.trainer import step_label_loss


def _pairs(case: Any) -> Outputs:
    chosen, rejected = (case.tensor(name).requires_grad_() for name in ("chosen", "rejected"))
    margin = case.tensor("margin") if case.params["margin"] else 0.0
    centre = case.params.get("centre_coefficient", 0.0)
    loss = bradley_terry_loss(chosen, rejected, margin=margin, centre=centre).mean()
    return gradients(loss, chosen=chosen, rejected=rejected)


def _ranking(case: Any) -> Outputs:
    scores, loss = case.tensor("scores").requires_grad_(), torch.zeros((), dtype=torch.float64)
    inputs = case.inputs
    if "winner" in inputs:
        order, ranks = [inputs["winner"], *inputs["losers"]], [0, *([1] * len(inputs["losers"]))]
        loss = plackett_luce_loss(scores[order][None], torch.tensor([ranks], dtype=torch.float64)).sum()
    for order in inputs.get("rankings_best_first", [inputs.get("ranking_best_first", [])]):
        rank = torch.arange(len(order), dtype=torch.float64)
        loss = loss + plackett_luce_loss(scores[order][None], rank[None]).sum()
    return gradients(loss, scores=scores)


def _kwise(case: Any) -> Outputs:
    scores, ranks = case.tensor("scores").requires_grad_(), case.tensor("ranks_0_best")
    prompt, better, worse = (ranks[:, :, None] < ranks[:, None, :]).nonzero().T
    losses = bradley_terry_loss(scores[prompt, better], scores[prompt, worse])
    share = 1 / prompt.bincount(minlength=len(scores)).double()[prompt]
    return {**gradients(average_pairs(losses, share), scores=scores), "pairs": len(prompt)}


def _two_tokens(case: Any) -> Outputs:
    good, bad = case.params["reward_tokens"]
    logits, labels = case.tensor("logits").requires_grad_(), case.tensor("labels")
    read = (torch.tensor(case.inputs["input_ids"]) == case.params["placeholder"]) & (labels != -100)
    label = (labels[read] == good).double() if case.params["label_kind"] == "token" else labels[read]
    loss = yes_no_loss(yes_no_answer(logits[read], [good], [bad]), label).mean()
    return gradients(loss, logits=logits)


class _Numbers(SimpleNamespace):
    """Tokenizer of texts that are token ids."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [*map(int, text.split())]}


def _steps(case: Any) -> Outputs | None:
    params, inputs = case.params, case.inputs
    limits = StepLimits(**{f: params[f] for f in ("max_length", "max_prompt_length", "max_completion_length")})
    written = {"chat_template": None, "bos_token": None, "eos_token": None, "added_tokens_decoder": {}}
    tokenizer = _Numbers(bos_token_id=params["bos"], unk_token_id=None, **written)
    marker = " ".join(map(str, params["separator"]))
    encoder = StepEncoder(tokenizer, StepReading(separator=marker), limits)
    tokens = encoder.encode(*(" ".join(map(str, inputs["prompt"])), [" ".join(map(str, s)) for s in inputs["steps"]]))
    label = torch.tensor(inputs["labels"], dtype=torch.float64)[: len(tokens.ends)]
    if params["train_on_last_step_only"] and not params["is_eval"]:
        label[:-1] = torch.nan
    logits = case.tensor("logits").requires_grad_()
    odds = logits[tokens.ends] @ torch.tensor([-1.0, 1.0], dtype=torch.float64)
    placed = dict(zip(tokens.ends, label.nan_to_num(-100).tolist(), strict=True))
    loss = step_label_loss(odds, label).sum() / label.isfinite().sum()
    columns = {"input_ids": tokens.ids, "labels": [placed.get(i, -100) for i in range(len(tokens.ids))]}
    return {**gradients(loss, logits=logits), **columns}


def _implicit(case: Any) -> Outputs:
    log_prob, mask = case.tensor("log_prob").requires_grad_(), case.tensor("mask")
    log_ratio = log_prob - case.tensor("ref_log_prob")
    loss = implicit_prm_loss(log_ratio, case.tensor("correct"), mask, beta=case.params["beta"]).mean()
    token = implicit_step_rewards(log_ratio.detach(), mask, beta=1.0).step
    return {**gradients(loss, log_prob=log_prob), "token_score": token, "whole_score": token.sum(1)}


def _prime(case: Any) -> Outputs | None:
    params, size = case.params, case.params["group_size"]
    if params["gamma_verifier"] != 1:
        return None
    group = [row // size for row in range(len(case.inputs["verifier"]))]
    inputs = case.tensor("verifier"), case.tensor("process_score"), group, case.tensor("mask")
    return {"advantages": prime_advantages(*inputs, gamma=params["gamma_process"])}


ROWS = (
    (r"trl_(bt|margin|centre|margin_centre)_\w+", _pairs, ("margin", "centre_coefficient"), ("chosen", "rejected")),
    (r"openrlhf_(pairwise|logexp)_\w+", _pairs, ("margin",), ("chosen", "rejected")),
    (r"openrlhf_prm_\w+", _two_tokens, ("reward_tokens", "placeholder"), ("logits", "labels")),
    (r"trl_prm_\w+", _steps, ("separator", "bos"), ("steps", "labels", "logits")),
    (r"plackett_luce_\w+", _ranking, (), ("scores",)),
    (r"instructgpt_kwise", _kwise, (), ("scores", "ranks_0_best")),
    (r"prime_rloo", _prime, ("group_size", "gamma_process", "gamma_verifier"), ("process_score", "verifier", "mask")),
    (r"prime_implicit", _implicit, ("beta",), ("log_prob", "ref_log_prob", "correct", "mask")),
)


def _tolerance(case: Any, key: str) -> tuple[float, float, str]:
    """TRL computes its loss on float32 logits of steps."""
    if case.variant == "prime_rloo":  # the peer's float32
        return 1e-6, 1e-8, "element"
    return (1e-5, 1e-6, "element") if case.variant.startswith("trl_prm") else (1e-8, 1e-10, "element")


FAMILIES = {"N_reward_model_losses": family(ROWS)}
TOLERANCES = {"N_reward_model_losses": _tolerance}
