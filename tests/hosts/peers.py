# SPDX-License-Identifier: Apache-2.0
"""Public trainers' algorithms: their defaults as an `Objective`, and notes on what no objective can say.

Versions: TRL 1.16.0, verl 0.9.1, OpenRLHF 0.10, FlowRL and
Flow-GRPO as released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from visalign.core import Objective, named_objective


@dataclass(frozen=True)
class Preset:
    """Defaults of a peer's algorithm, and notes on its other differences from the paper."""

    objective: Objective
    notes: tuple[str, ...] = ()


def _preset(algorithm: str, *notes: str, **changes: Any) -> Preset:
    return Preset(named_objective(algorithm, **changes), notes)


_CLIP = {"eps_low": 0.2, "eps_high": 0.2}
_VERL_GROUP: dict[str, Any] = {"advantage_options": {"eps": 1e-6}}
_MICRO_BATCH = "Means and the top share are taken per micro-batch: with one sample each, Clip-Cov picks nothing."
_RECOMPUTED = (
    "The covariances are computed again at each update, from the log-probs of the policy as it then is; here "
    "they are settled before the first one, from those of the rollout."
)
_TRL = (
    "With vLLM the correction sequence_mask with C = 3 is on by default: the ratio of a whole sequence grows "
    "with its length, so long completions are the ones that are dropped.",
    "Rewards of a group that is all equal give rounding noise over eps, not 0.",
    "A KL term, off by default, is k3 times the live ratio.",
)
_TRL_TOKENS = (
    "Tokens are counted over the optimizer step only where steps_per_generation is the accumulation; "
    "else the expected count stands in (0.02387 against 0.02142 on one batch)."
)

PEERS: dict[str, Preset] = {
    "trl:grpo": _preset("grpo", *_TRL, kl=0.0, empty="keep"),
    "trl:dapo": _preset(
        "dapo",
        "There is no dynamic sampling; the overlong penalty is a reward function that one adds.",
        _TRL_TOKENS,
        *_TRL,
        surrogate_options={"eps_high": 0.2},
        drop_zero_signal=False,
    ),
    "trl:bnpo": _preset(
        "grpo",
        "The mean is taken over each device's micro-batch, and these are averaged.",
        *_TRL,
        kl=0.0,
        aggregation="token_mean",
        empty="keep",
    ),
    # importance_sampling_level='sequence' under its default loss_type
    "trl:gspo": _preset(
        "gspo",
        "Under token_mean every sequence is weighted by its length; the paper's mean is over sequences.",
        *_TRL,
        surrogate_options=_CLIP,
        aggregation="token_mean",
    ),
    "trl:cispo": _preset(
        "cispo",
        "epsilon_high is the bound itself, not its distance from 1: every weight is cut at 0.2.",
        _TRL_TOKENS,
        *_TRL,
        surrogate_options={"bound_low": 0.0, "bound_high": 0.2},
    ),
    "trl:sapo": _preset("sapo", *_TRL, surrogate_options={"tau_pos": 1.0, "tau_neg": 1.05}, empty="keep"),
    "trl:luspo": _preset(
        "luspo",
        "The level is 'token' unless it is set. Up to TRL 1.10 a KL term or that level made the mean "
        "one over padded positions.",
        *_TRL,
        surrogate_options=_CLIP,
        empty="keep",
    ),
    "trl:vespo": _preset(
        "vespo", "The rollout's importance ratio is folded into W instead of multiplying the loss.", _TRL_TOKENS, *_TRL
    ),
    "trl:dr_grpo": _preset("dr_grpo", "L is max_completion_length.", *_TRL, empty="keep"),
    "trl:top_entropy": _preset(
        "top_entropy",
        "The quantile is taken over a micro-batch of all devices, not over the step.",
        _TRL_TOKENS,
        *_TRL,
        surrogate_options={"eps_high": 0.2},
        drop_zero_signal=False,
    ),
    "trl:rloo": _preset(
        "rloo",
        "A clipped ratio of the whole sequence is used where the paper has none.",
        level="sequence_sum",
        surrogate="ppo_clip",
        surrogate_options=_CLIP,
        aggregation="seq_mean_token_mean",
    ),
    "verl:ppo": _preset(
        "ppo",
        "The advantages are whitened with ddof 1, here with 0: smaller by sqrt(1 − 1/n) of n tokens.",
        "The critic has its own optimizer and its loss no global token count: a mean per micro-batch.",
        surrogate_options={"dual_clip": 3.0},
        value_clip=0.5,
        advantage_options={"ddof": 1, "gamma": 1.0, "lam": 1.0},
        kl_in_reward=0.0,
    ),
    "verl:grpo": _preset(
        "grpo",
        "The vectorised group std is Σx² − (Σx)²/n in float32 with a floor of 1e-6 on the variance: "
        "rewards 1000 + {0, 1, 2, 3}e-3 give advantages of 0.01 instead of 1.16.",
        "Without global batch information the token mean is per micro-batch.",
        "A group of one keeps its raw reward; here its advantage is 0.",
        **_VERL_GROUP,
        kl=0.0,
        surrogate_options={"dual_clip": 3.0},
        aggregation="token_mean",
    ),
    "verl:gspo": _preset(
        "gspo", "The log-ratio is cut at 10.", **_VERL_GROUP, surrogate_options=_CLIP, level="sequence_token"
    ),
    "verl:cispo": _preset(
        "cispo",
        "The bounds are 1 − ε_low and 1 + ε_high with ε = 0.2.",
        **_VERL_GROUP,
        surrogate_options={"bound_low": 0.8, "bound_high": 1.2},
    ),
    "verl:sapo": _preset(
        "sapo",
        "The mean is over sequences whatever loss_agg_mode says.",
        **_VERL_GROUP,
        surrogate_options={"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    "verl:dr_grpo": _preset(
        "dr_grpo",
        "L is loss_scale_factor, else T. A completion without a token has reward 0 in its group.",
        surrogate_options={"dual_clip": 3.0},
    ),
    "verl:gmpo": _preset(
        "gmpo",
        "It ends in a mean over the micro-batch: uneven micro-batches are weighted wrongly.",
        **_VERL_GROUP,
        empty="keep",
    ),
    "verl:gpg": _preset(
        "gpg",
        "α counts rewards that are not 0, so it depends on where the reward has its zero.",
        advantage_options={"counted": "nonzero_reward"},
    ),
    "verl:reinforce_pp": _preset(
        "reinforce_pp", advantage_options={"ddof": 1}, kl_in_reward=0.0, surrogate_options={"dual_clip": 3.0}
    ),
    "verl:clip_cov": _preset(
        "clip_cov",
        _MICRO_BATCH,
        _RECOMPUTED,
        "The draw is from an unseeded generator.",
        "Decisions that PPO clips are not drawn.",
        **_VERL_GROUP,
    ),
    # the default of its config; that of the function is 1
    "verl:kl_cov": _preset("kl_cov", _MICRO_BATCH, _RECOMPUTED, selection_options={"coefficient": 0.1}, **_VERL_GROUP),
    "openrlhf:ppo": _preset("ppo", "GAE decays over masked decisions too: observations of a tool cost discount."),
    "flowrl:flowrl": _preset(
        "flowrl",
        "The clipped importance weight is computed and not used: the product enters unbounded.",
        "log Z is not detached from the policy.",
        surrogate_options={"eps_low": 1.0, "eps_high": float("inf")},
    ),
    "flow_grpo:flow_grpo": _preset(
        "flow_grpo", "The KL's variance leaves −dt out: early denoising steps count too little."
    ),
    # verl-omni 0.2.0
    "verl_omni:grpo_guard": _preset(
        "grpo_guard", "Scale and dt are means over the micro-batch: rows at different noise levels get each other's."
    ),
}
"""peer:algorithm -> its defaults."""
