# SPDX-License-Identifier: Apache-2.0
"""Golden families of newer text releases: verl's presets, UniRL's DPPO, process rewards, equality of answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.golden_families import Outputs, Row, family, gradients
from tests.hosts.peers import PEERS
from visalign.core import (
    PolicyOutput,
    Trajectories,
    binary_tv,
    discounted_returns,
    dppo,
    drpo,
    filtration_weights,
    optimal_token_baseline,
    pass_at_k_advantages,
    prefix_excess,
    process_advantages,
    reinforce_pp_advantages,
)
from visalign.core.surrogates.aggregation import aggregate, count_step
from visalign.rewards.text.symbolic import is_installed
from visalign.rewards.text.verifiable import VerifiableAnswer

VERL = {"seq-mean-token-sum-norm": "verl:dr_grpo", "token-mean": "verl:reinforce_pp"}


def _verl(case: Any) -> Outputs | None:
    preset = PEERS[VERL[case.params["aggregation"]]].objective
    if case.params["dual_clip"] != preset.surrogate_options.get("dual_clip"):
        return None
    clip = {name: case.params[name] for name in ("eps_low", "eps_high", "dual_clip")}
    row = replace(preset, surrogate_options=clip, length=case.params["length"], drop_zero_signal=False)
    new, weight = case.tensor("log_prob").requires_grad_(), case.tensor("mask")
    t = Trajectories(
        weight=weight,
        old_log_prob=case.tensor("old_log_prob"),
        group=case.inputs["group"],
        reward=case.tensor("rewards") * (weight != 0).any(1),  # verl keeps rewards on tokens: none, reward 0
    )
    prepared = row.prepare(t)
    loss = row.loss(prepared, PolicyOutput(log_prob=new)).total
    return {"advantages": prepared.advantage * weight, **gradients(loss, log_prob=new)}


def _packed(case: Any) -> Outputs:
    """Unpack the rows; a row without a token counts, and the mask is computed from float32 probabilities."""
    new, old = case.tensor("log_prob").requires_grad_(), case.tensor("old_log_prob")
    lengths = torch.tensor(case.inputs["lengths"])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    advantage = case.tensor("row_advantages").repeat_interleave(lengths)
    weight = case.tensor("mask") if "mask" in case.inputs else torch.ones_like(new)
    distance, log_ratio = binary_tv(new.float(), old.float()), (new - old).clamp(-20, 20)  # no gradient beyond

    def rows(value: Tensor) -> Tensor:
        return torch.zeros(inside.shape, dtype=value.dtype).masked_scatter(inside, value)

    if "epsilon" in case.params:
        likely = old if case.variant.startswith("unirl_drpo") else None
        token_loss = drpo(log_ratio, advantage, likely, epsilon=case.params["epsilon"])
    else:
        limit = {f"limit_{side}": case.params["delta"] for side in ("low", "high")}
        if "w_min" in case.params:  # positions count masked tokens too
            region = {"smallest": case.params["w_min"], "budget": case.params["delta_b"]}
            distance = prefix_excess(rows(distance), inside.float(), limit=case.params["delta"], **region)[inside]
            limit = dict.fromkeys(limit, 0.0)
        token_loss = dppo(log_ratio, advantage, distance.double(), cap=float("inf"), **limit)
    counts = count_step(rows(weight), length=case.params["horizon"], empty="keep")
    names: dict[str, Any] = {"token_mean": "token_mean", "seq_mean_token_mean": "seq_mean_token_mean"}
    result: Outputs = {"token_loss": token_loss}
    for name, mode in {**names, "seq_mean_token_sum_norm": "dr_grpo"}.items():
        loss = aggregate(rows(token_loss), rows(weight), mode, counts)
        result[f"loss_{name}"] = loss
        result[f"grad_log_prob_{name}"] = torch.autograd.grad(loss, new, retain_graph=True)[0]
    return result


def _process(case: Any) -> Outputs:
    mask, ends = case.tensor("mask"), case.inputs["step_last_token"]
    longest = max(map(len, ends))
    reward = torch.tensor([row + [0.0] * (longest - len(row)) for row in case.inputs["step_rewards"]]).double()
    step = torch.full(mask.shape, -1)
    for row, last in enumerate(ends):
        for number in reversed(range(len(last))):
            step[row, : last[number] + 1] = number
    both = [
        {"advantages": process_advantages(reward, step, [0] * len(ends), weight=mask, ddof=d, eps=case.params["eps"])}
        for d in (0, 1)
    ]
    return {**both[0], "outputs_sample_std": both[1]}


def _reinforce_pp(case: Any) -> Outputs:
    gain = reinforce_pp_advantages(case.tensor("token_rewards"), case.tensor("mask"), gamma=case.params["gamma"])
    return {"advantages": gain}


def _token_baseline(case: Any) -> Outputs:
    reward, mask, log_prob, squares = (
        case.tensor(name) for name in ("token_rewards", "mask", "log_prob", "sum_pi_squared")
    )
    options = {"multi_turn": "_tir_" in case.variant, "zero_tail": case.params["zero_tail"], "eps": case.params["eps"]}
    weight = case.tensor("rollout_weight") if "rollout_weight" in case.inputs else None
    gain = optimal_token_baseline(reward, mask, case.inputs["group"], log_prob, squares, weight, **options)
    return {"advantages": gain, "returns": discounted_returns(reward * mask)}  # at holes too


def _filtration(case: Any) -> Outputs:
    reward = case.tensor("token_scores").sum(-1)
    weight = filtration_weights(reward, method=case.params["method"], power=case.params["power"])
    return {"scores": reward, "weights": weight, "probability": weight / weight.sum()}


def _pass_at_k(case: Any) -> Outputs:
    options: Any = {"std": {"scale": "group"}, "none": {"scale": "none"}}[case.params["scale"]]
    spread = {"ddof": case.params["ddof"], "eps": case.params["eps"]}
    gain = pass_at_k_advantages(case.tensor("rewards"), case.inputs["group"], **options, **spread)
    return {"advantages": gain, "token_advantages": gain[:, None] * case.tensor("mask")}


def _equality(case: Any) -> Outputs | None:
    if not is_installed():
        return None
    judge = VerifiableAnswer(extract="whole", compare="math", normalise="latex")
    return {"equal": judge.judge(case.inputs["answer"], {"answer": case.inputs["truth"]}).value == 1}


_PACKED = ("log_prob", "old_log_prob", "lengths", "row_advantages")
LOSSES: tuple[Row, ...] = (
    (
        r"verl_\w+",
        _verl,
        ("eps_low", "eps_high", "dual_clip", "aggregation", "length"),
        ("log_prob", "old_log_prob", "rewards", "group", "mask"),
    ),
    (r"unirl_dppo_\w+", _packed, ("delta", "horizon"), _PACKED),
    (r"unirl_cppo_\w+", _packed, ("delta", "w_min", "delta_b", "horizon"), _PACKED),
    (r"unirl_(drpo|spo)_\w+", _packed, ("epsilon", "horizon"), _PACKED),
)
ADVANTAGES: tuple[Row, ...] = (
    (r"deepseekmath_process\w*", _process, ("std", "eps"), ("step_rewards", "step_last_token", "mask")),
    (r"verl_grpo_passk_\w+", _pass_at_k, ("scale", "ddof", "eps"), ("rewards", "group", "mask")),
    (
        r"verl_(tir_)?otb_\w+",
        _token_baseline,
        ("zero_tail", "eps"),
        ("token_rewards", "mask", "group", "log_prob", "sum_pi_squared"),
    ),
    (r"pf_ppo_[\w.]+", _filtration, ("method", "power"), ("token_scores",)),
    (r"verl_reinforce_pp\w*", _reinforce_pp, ("gamma",), ("token_rewards", "mask")),
)
EQUALITY: tuple[Row, ...] = ((r".*", _equality, (), ("answer", "truth")),)

FAMILIES = {"M_policy_losses": family(LOSSES), "M_advantages": family(ADVANTAGES), "N_math_equality": family(EQUALITY)}
