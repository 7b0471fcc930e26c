# SPDX-License-Identifier: Apache-2.0
"""Named algorithms: one objective each, with the defaults of its paper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from .objective import Objective
from .options import change_row

_CLIP = {"eps_low": 0.2, "eps_high": 0.2}
_PPO = Objective(
    source="Schulman et al., arXiv 1707.06347, eq. 7 and 9; KL in the reward: arXiv 2203.02155, eq. 2",
    advantage="gae",
    advantage_options={"gamma": 1.0, "lam": 0.95},
    kl_in_reward=0.02,
    surrogate_options=_CLIP,
    aggregation="token_mean",
    value=1.0,
    value_clip=0.2,
)
_GRPO = Objective(
    source="Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 and 4",
    surrogate_options=_CLIP,
    kl=0.04,
    kl_gradient="k3",
)
_WITHOUT_KL = replace(_GRPO, kl=0.0, kl_gradient="k2")
_FLOW = Objective(
    source="Liu et al., Flow-GRPO, arXiv 2505.05470; T denoising steps, log_prob_reduction='mean', exact KL",
    decisions="denoising_steps",
    advantage_options={"scale": "batch", "ddof": 0},
    advantage_clamp=5.0,
    surrogate_options={"eps_low": 1e-4, "eps_high": 1e-4},
    kl=0.04,
)


def _variant(source: str, **changes: Any) -> Objective:
    return replace(_WITHOUT_KL, source=source, **changes)


_token_variant = partial(_variant, aggregation="token_mean")


NAMED: dict[str, Objective] = {
    "ppo": _PPO,
    "ppo_kl": replace(
        _PPO,
        source="Schulman et al., arXiv 1707.06347, eq. 8; adapt β with `penalty_kl_coefficient`",
        surrogate="ppo_kl",
        surrogate_options={"beta": 1.0},
    ),
    "ppo_ptx": replace(_PPO, source="Ouyang et al., InstructGPT, arXiv 2203.02155, eq. 2 (γ = 27.8)", ptx=27.8),
    "safe": replace(
        _PPO,
        source="SAFE, arXiv 2602.04651, numbers of its code: soft minimum of two critics, gated KL",
        advantage_options={"gamma": 1.0, "lam": 0.95, "temperature": 0.3},
        kl_in_reward=0.0,
        kl=0.2,
        value_clip=None,
    ),
    "rloo": Objective(
        source="Ahmadian et al., arXiv 2402.14740, eq. 9: whole completions as single actions",
        advantage_options={"scale": "none", "baseline": "leave_one_out"},
        kl_in_reward=0.05,
        surrogate="reinforce",
        aggregation="seq_mean_token_sum",
    ),
    "remax": Objective(
        source="Li et al., arXiv 2310.10505, algorithm 1",
        advantage="remax",
        surrogate="reinforce",
        aggregation="seq_mean_token_sum",
    ),
    "da_pg": Objective(
        source="DA-PG, arXiv 2011.08827: approval of queries drawn apart from the actions taken",
        advantage="decoupled",
        surrogate="reinforce",
        aggregation="seq_mean_token_sum",
    ),
    "reinforce_pp": Objective(
        source="Hu et al., arXiv 2501.03262, version with the KL in the reward",
        advantage="reinforce_pp",
        advantage_options={"ddof": 0},
        kl_in_reward=0.01,
        surrogate_options=_CLIP,
        aggregation="token_mean",
    ),
    "reinforce_pp_baseline": Objective(
        source="Hu et al., arXiv 2501.03262, version with the group baseline and k2",
        advantage="reinforce_pp_baseline",
        advantage_options={"ddof": 0},
        surrogate_options=_CLIP,
        kl=0.01,
        kl_value="k2",
        aggregation="token_mean",
    ),
    "grpo": _GRPO,
    "dr_grpo": _variant(
        "Liu et al., arXiv 2503.20783, section 3.2; give `length`, else L is each step's padded T",
        advantage_options={"scale": "none"},
        aggregation="dr_grpo",
    ),
    "gdpo": _variant("Liu et al., arXiv 2601.05242", advantage="gdpo", advantage_options={"ddof": 0}),
    "optimal_token_baseline": _token_variant(
        "Li et al., arXiv 2602.07078, Σ π² of all tokens in place of gradient norms",
        advantage="optimal_token_baseline",
    ),
    "opo": _token_variant(
        "Hao et al., arXiv 2505.23585: exactly on-policy, no clip",
        advantage="opo",
        surrogate="reinforce",
        surrogate_options={},
    ),
    "gpg": _token_variant(
        "Chu et al., arXiv 2504.02546", advantage="gpg", surrogate="reinforce", surrogate_options={}
    ),
    "pass_at_k": _variant("Walder and Karkhanis, arXiv 2505.15201", advantage="pass_at_k", advantage_options={"k": 2}),
    "canon": _variant(
        "CANON, arXiv 2509.23962 (μ = 1, α = 1): halves by a second number of each sample", advantage="canon"
    ),
    "copo": _variant(
        "COPO, arXiv 2508.04138 (γ = 20, ρ = 1.5 nats over answers; 0.2 over rewards, where those name none)",
        advantage="copo",
    ),
    "prl": _variant("PRL, arXiv 2601.10201 (η = 100); its advantages hold the KL", advantage="prl"),
    "online_dpo": Objective(
        source="Online DPO, arXiv 2402.04792: best and worst of a group; exact with one update per iteration",
        advantage="online_dpo",
        surrogate="reinforce",
        aggregation="seq_mean_token_sum",
    ),
    "aem": _variant("AEM, arXiv 2605.00425 (λ = 1, range 0.1 nats)", advantage="aem"),
    "rank_bonus": _variant(
        "VERL, arXiv 2509.23808 (κ = 2, strides of 40 tokens, rate 0.3): ranks of hidden states",
        advantage="rank_bonus",
    ),
    "rlfr": _variant(
        "RLFR, arXiv 2510.10201; its token rewards come from a latent flow, their returns are ours",
        advantage="group_returns",
    ),
    "grpo_process": replace(
        _GRPO,
        source="Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.3: process rewards in place of the outcome",
        advantage="process",
    ),
    "prime": replace(
        _GRPO,
        source="Cui et al., PRIME, arXiv 2502.01456: leave-one-out returns of process rewards and of outcomes",
        advantage="prime",
        advantage_options={"ddof": 0},
        kl=0.0,
        aggregation="token_mean",
    ),
    "empg": _variant(
        "EMPG, arXiv 2509.09265 (k = k′ = 1, ζ = 0.1); the steps of a completion stand for turns", advantage="empg"
    ),
    "pear": _variant("PEAR, arXiv 2510.08026 (α = 1); rollout.separator ends the thinking", advantage="pear"),
    "ares": _variant("ARES, arXiv 2510.08457 (quantile 0.95), its reward alone; the window is ours", advantage="ares"),
    "perplexity": _variant(
        "Deng et al., arXiv 2508.02260: low perplexity counts more; α is ours", advantage="perplexity"
    ),
    "position": _variant("Deng et al., arXiv 2508.02260: late decisions count more; γ is ours", advantage="position"),
    "siren": _variant(
        "SIREN, arXiv 2509.25133 (p = 0.8, β = 0.005): anchored entropy of the nucleus at peak tokens",
        entropy=0.005,
        entropy_term="siren",
    ),
    "epo": _variant(
        "EPO, arXiv 2509.22576 (κ 0.8 and 1.2, λ_s 0.1; c is ours), its smoothing as a hinge",
        entropy=0.001,
        entropy_term="epo",
    ),
    "tea": _token_variant(
        "TEA in Light-IF, arXiv 2508.03178; τ, λ and the cap are a third party's", entropy=0.05, entropy_term="tea"
    ),
    "par": _variant(
        "PAR, arXiv 2502.18770 (k = 1, one completion of the reference, KL 0.005)",
        advantage="par",
        kl=0.005,
    ),
    "likelihood": _variant(
        "Likelihood-based reward designs, arXiv 2602.03979; without the gradient of the value itself",
        advantage="likelihood",
    ),
    "jepo": _variant(
        "JEPO, leave-one-out, in arXiv 2602.03979; without the gradient of the bound itself", advantage="jepo"
    ),
    "riskpo": _variant(
        "RiskPO, arXiv 2510.00911 (bundles of 5, levels 0.2 and 0.8, ω = 1.5, η = 0.1)", advantage="riskpo"
    ),
    "dapo": _token_variant(
        "Yu et al., arXiv 2503.14476, eq. 8 and 10, averaged as its code does",
        surrogate_options={"eps_low": 0.2, "eps_high": 0.28},
        drop_zero_signal=True,
    ),
    "dapo_as_written": _variant(
        "Yu et al., arXiv 2503.14476, eq. 8 to the letter: a token mean per group",
        surrogate_options={"eps_low": 0.2, "eps_high": 0.28},
        drop_zero_signal=True,
        aggregation="group_token_mean",
    ),
    "gspo": _variant(
        "Zheng et al., arXiv 2507.18071, eq. 5 to 7",
        level="sequence",
        surrogate_options={"eps_low": 3e-4, "eps_high": 4e-4},
    ),
    "gspo_token": _variant(
        "Zheng et al., arXiv 2507.18071, eq. 13 and 14",
        level="sequence_token",
        surrogate_options={"eps_low": 3e-4, "eps_high": 4e-4},
    ),
    "cispo": _token_variant(
        "MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; upper bound of ScaleRL, arXiv 2510.13786",
        surrogate="cispo",
        surrogate_options={"bound_low": 0.0, "bound_high": 5.0},
    ),
    "sapo": _variant("Gao et al., arXiv 2511.20347", surrogate="sapo", surrogate_options={}),
    "gmpo": _variant(
        "Zhao et al., arXiv 2507.20673", surrogate="gmpo", surrogate_options={"eps_low": 0.4, "eps_high": 0.4}
    ),
    "luspo": _variant(
        "Liu et al., arXiv 2602.05261",
        level="sequence",
        surrogate_options={"eps_low": 2e-3, "eps_high": 2.5e-3},
        aggregation="seq_mean_token_sum",
    ),
    "vespo": _token_variant(
        "Shen et al., arXiv 2602.10693", level="sequence_sum", surrogate="vespo", surrogate_options={}
    ),
    "dppo_tv": _token_variant(
        "Qi et al., arXiv 2602.04879, binary total variation",
        surrogate="dppo",
        surrogate_options={"divergence": "tv", "limit_low": 0.2, "limit_high": 0.2},
    ),
    "dppo_kl": _token_variant(
        "Qi et al., arXiv 2602.04879, binary KL",
        surrogate="dppo",
        surrogate_options={"divergence": "kl", "limit_low": 0.05, "limit_high": 0.05},
    ),
    "cppo": _token_variant(
        "CPPO, arXiv 2606.10968: DPPO's region over prefixes; δ of DPPO",
        surrogate="cppo",
        surrogate_options={"limit_low": 0.0, "limit_high": 0.0, "limit": 0.15, "smallest": 0.8, "budget": 0.02},
    ),
    "drpo": _token_variant("DRPO, arXiv 2606.09821", surrogate="drpo", surrogate_options={"epsilon": 12.5}),
    "spo": _variant(
        "Simple Policy Optimization, arXiv 2401.16025", surrogate="spo", surrogate_options={"epsilon": 0.2}
    ),
    "dro": _token_variant(
        "Richemond et al., arXiv 2405.19107, per token as public trainers have it",
        surrogate="dro",
        surrogate_options={"beta": 0.1},
    ),
    "aepo_clip": _token_variant(
        "Dong et al., arXiv 2510.14545, the gradient-keeping clip", surrogate="gradient_keeping_clip"
    ),
    "aepo": _token_variant(
        "AEPO, arXiv 2510.14545: the gradient-keeping clip and the entropy-aware advantage (a = 0.2)",
        advantage="entropy_aware",
        surrogate="gradient_keeping_clip",
    ),
    "top_entropy": _token_variant(
        "Wang et al., arXiv 2506.01939: DAPO on a fifth of the tokens",
        surrogate_options={"eps_low": 0.2, "eps_high": 0.28},
        selection="top_entropy",
    ),
    "clip_cov": _token_variant("Cui et al., arXiv 2505.22617, section 4", selection="clip_cov"),
    "kl_cov": _token_variant(
        "Cui et al., arXiv 2505.22617, section 4: no clip, a penalty on the highest covariances",
        surrogate_options={"eps_low": 1.0, "eps_high": float("inf")},
        selection="kl_cov",
    ),
    "clip_b": _token_variant("Entropy Dynamics in RFT, arXiv 2602.03392, Clip_B (μ = 2.5)", selection="clip_b"),
    "clip_v": _token_variant(
        "Entropy Dynamics in RFT, arXiv 2602.03392, Clip_V (μ = 8.5, 1e-4 of a step's tokens at most: "
        "none of fewer than 10,000)",
        selection="clip_v",
    ),
    "steer": _token_variant(
        "STEER, arXiv 2510.10150 (weights 0.8 to 1.2), under its dual clip at 10",
        surrogate_options={**_CLIP, "dual_clip": 10.0},
        selection="steer",
    ),
    "entrocraft": _variant(
        "Entrocraft, arXiv 2604.26326: target entropy 0.6 to 0.4 nats; width and pace are ours",
        selection="entrocraft",
        selection_options={"low": 0.5, "high": 0.7, "low_end": 0.3, "high_end": 0.5, "over": 200},
        kl=0.001,
    ),
    "deepseek_v3_2": replace(
        _GRPO,
        source="DeepSeek-V3.2, arXiv 2512.02556, section 3.1: r-weighted KL, off-policy mask",
        kl_gradient="k2",
        kl_weighted=True,
        off_policy_delta=0.1,
    ),
    "flowrl": _variant(
        "Zhu et al., arXiv 2509.15207; π_ref inside the residual, log Z learned",
        level="sequence_sum",
        surrogate="flow_balance",
        surrogate_options={"beta": 15.0, "eps_low": 0.2, "eps_high": 0.2},
    ),
    "flow_grpo": _FLOW,
    "flow_gspo": replace(_FLOW, source="Flow-GRPO with one ratio for all trained steps", level="sequence"),
    "grpo_guard": replace(
        _FLOW,
        source="Wang et al., arXiv 2510.22319; the loss of a step divided by its |dt|",
        ratio="guard",
        step_weight="inverse_dt",
        surrogate_options={"eps_low": 2e-6, "eps_high": 2e-6},
        kl=0.0,
    ),
    "flow_dppo": replace(
        _FLOW,
        source="DPPO, arXiv 2602.04879, with the exact Gaussian KL(π_old‖π) of a step",
        surrogate="dppo",
        surrogate_options={"divergence": "exact", "limit_low": 1e-6, "limit_high": 1e-6},
        kl=0.0,
    ),
    "pref_grpo": replace(
        _FLOW,
        source="Wang et al., Pref-GRPO, arXiv 2508.20751: the reward is `win_rates` of the group",
        advantage_options={"scale": "group", "ddof": 1, "eps": 1e-8},
        kl=0.0,
    ),
}
"""Name -> objective; options that a row leaves out are its stage's. Where a paper gives no number: the usual one."""


def named_objective(name: str, **changes: Any) -> Objective:
    """Look up an algorithm of `NAMED` and change fields of `Objective`; see `change_row`.

    >>> named_objective("dapo", surrogate_options={"eps_high": 0.3}).surrogate_options
    {'eps_low': 0.2, 'eps_high': 0.3}
    """
    return change_row("algorithm", NAMED, name, changes)
