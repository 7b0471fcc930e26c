# SPDX-License-Identifier: Apache-2.0
"""Public trainers' algorithms: their defaults as an `Objective`, and notes on what no objective can say.

Versions: TRL 1.16.0, verl 0.8.0.dev (and main of August 2026 where stated), OpenRLHF 0.10, FlowRL and
Flow-GRPO as released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from visalign.core import Objective, named_objective


@dataclass(frozen=True)
class Preset:
    """Defaults of a peer's algorithm, and notes on its other differences from the paper."""

    objective: Objective
    notes: tuple[str, ...] = ()


_VERL_GROUP = {"eps": 1e-6}
_MICRO_BATCH = (
    "Means and the top share are taken per micro-batch: with one sample each, Clip-Cov picks nothing."
)
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
_VERL_GAE = {"ddof": 1, "gamma": 1.0, "lam": 1.0}

PEERS: dict[str, Preset] = {
    "trl:grpo": Preset(
        replace(named_objective("grpo", kl=0.0), source="TRL 1.16.0, loss_type='grpo'", empty="keep"), _TRL
    ),
    "trl:dapo": Preset(
        replace(
            named_objective("dapo", surrogate_options={"eps_high": 0.2}),
            source="TRL 1.16.0, its default loss_type='dapo'",
            drop_zero_signal=False,
        ),
        (
            "epsilon_high is epsilon unless it is set; there is no dynamic sampling, and the overlong "
            "penalty is a reward function that one adds.",
            _TRL_TOKENS,
            *_TRL,
        ),
    ),
    "trl:bnpo": Preset(
        replace(
            named_objective("grpo", kl=0.0),
            source="TRL 1.16.0, loss_type='bnpo'",
            aggregation="token_mean",
            empty="keep",
        ),
        ("The mean is taken over each device's micro-batch, and these are averaged.", *_TRL),
    ),
    "trl:gspo": Preset(
        replace(
            named_objective("gspo", surrogate_options={"eps_low": 0.2, "eps_high": 0.2}),
            source="TRL 1.16.0, importance_sampling_level='sequence' under its default loss_type",
            aggregation="token_mean",
        ),
        (
            "Under token_mean every sequence is weighted by its length; the paper's mean is over sequences.",
            *_TRL,
        ),
    ),
    "trl:cispo": Preset(
        replace(
            named_objective("cispo", surrogate_options={"bound_low": 0.0, "bound_high": 0.2}),
            source="TRL 1.16.0, loss_type='cispo' with the default epsilon",
        ),
        (
            "epsilon_high is the bound itself, not its distance from 1: every weight is cut at 0.2.",
            _TRL_TOKENS,
            *_TRL,
        ),
    ),
    "trl:sapo": Preset(
        replace(
            named_objective("sapo", surrogate_options={"tau_pos": 1.0, "tau_neg": 1.05}),
            source="TRL 1.16.0, loss_type='sapo'",
            empty="keep",
        ),
        _TRL,
    ),
    "trl:luspo": Preset(
        replace(
            named_objective("luspo", surrogate_options={"eps_low": 0.2, "eps_high": 0.2}),
            source="TRL 1.16.0, loss_type='luspo' with importance_sampling_level='sequence'",
            empty="keep",
        ),
        (
            "The level is 'token' unless it is set. Up to TRL 1.10 a KL term or that level made the mean "
            "one over padded positions.",
            *_TRL,
        ),
    ),
    "trl:vespo": Preset(
        replace(named_objective("vespo"), source="TRL 1.16.0, loss_type='vespo'"),
        (
            "The rollout's importance ratio is folded into W instead of multiplying the loss.",
            _TRL_TOKENS,
            *_TRL,
        ),
    ),
    "trl:dr_grpo": Preset(
        replace(
            named_objective("dr_grpo"),
            source="TRL 1.16.0, loss_type='dr_grpo', scale_rewards='none'",
            empty="keep",
        ),
        ("L is max_completion_length.", *_TRL),
    ),
    "trl:top_entropy": Preset(
        replace(
            named_objective("top_entropy", surrogate_options={"eps_high": 0.2}),
            source="TRL 1.16.0, top_entropy_quantile=0.2 under its default loss_type",
            drop_zero_signal=False,
        ),
        ("The quantile is taken over a micro-batch of all devices, not over the step.", _TRL_TOKENS, *_TRL),
    ),
    "trl:rloo": Preset(
        replace(
            named_objective("rloo"),
            source="TRL, RLOOTrainer",
            level="sequence_sum",
            surrogate="ppo_clip",
            surrogate_options={"eps_low": 0.2, "eps_high": 0.2},
            aggregation="seq_mean_token_mean",
        ),
        ("A clipped ratio of the whole sequence is used where the paper has none.",),
    ),
    "verl:ppo": Preset(
        replace(
            named_objective("ppo", surrogate_options={"dual_clip": 3.0}, value_clip=0.5),
            source="verl 0.8.0.dev, adv_estimator=gae and the vanilla policy loss",
            advantage_options=_VERL_GAE,
            kl_in_reward=0.0,
        ),
        (
            "The advantages are whitened with ddof 1, here with 0: smaller by sqrt(1 − 1/n) of n tokens.",
            "The critic has its own optimizer and its loss no global token count: a mean per micro-batch.",
        ),
    ),
    "verl:grpo": Preset(
        replace(
            named_objective(
                "grpo", kl=0.0, advantage_options=_VERL_GROUP, surrogate_options={"dual_clip": 3.0}
            ),
            source="verl 0.8.0.dev, adv_estimator=grpo and the vanilla policy loss",
            aggregation="token_mean",
        ),
        (
            "The vectorised group std is Σx² − (Σx)²/n in float32 with a floor of 1e-6 on the variance: "
            "rewards 1000 + {0, 1, 2, 3}e-3 give advantages of 0.01 instead of 1.16.",
            "Without global batch information the token mean is per micro-batch.",
            "A group of one keeps its raw reward; here its advantage is 0.",
        ),
    ),
    "verl:gspo": Preset(
        replace(
            named_objective("gspo", surrogate_options={"eps_low": 0.2, "eps_high": 0.2}),
            source="verl 0.8.0.dev, policy loss gspo",
            level="sequence_token",
            advantage_options=_VERL_GROUP,
        ),
        ("The log-ratio is cut at 10.",),
    ),
    "verl:cispo": Preset(
        replace(
            named_objective("cispo", surrogate_options={"bound_low": 0.8, "bound_high": 1.2}),
            source="verl 0.8.0.dev, policy loss cispo",
            advantage_options=_VERL_GROUP,
        ),
        ("The bounds are 1 − ε_low and 1 + ε_high with ε = 0.2.",),
    ),
    "verl:sapo": Preset(
        replace(
            named_objective("sapo", surrogate_options={"tau_pos": 1.0, "tau_neg": 1.05}),
            source="verl 0.8.0.dev, policy loss sapo",
            advantage_options=_VERL_GROUP,
        ),
        ("The mean is over sequences whatever loss_agg_mode says.",),
    ),
    "verl:dr_grpo": Preset(
        replace(named_objective("dr_grpo"), source="verl 0.8.0.dev, seq-mean-token-sum-norm"),
        ("1/B is missing: duplicating the batch doubles the loss (fixed in verl 0.10).",),
    ),
    "verl:gmpo": Preset(
        replace(named_objective("gmpo"), source="verl, policy loss geo_mean", advantage_options=_VERL_GROUP),
        ("It ends in a mean over the micro-batch: uneven micro-batches are weighted wrongly.",),
    ),
    "verl:gpg": Preset(
        replace(
            named_objective("gpg", advantage_options={"counted": "nonzero_reward"}),
            source="verl 0.8.0.dev, adv_estimator=gpg",
        ),
        ("α counts rewards that are not 0, so it depends on where the reward has its zero.",),
    ),
    "verl:reinforce_pp": Preset(
        replace(named_objective("reinforce_pp", advantage_options={"ddof": 1}), source="verl 0.8.0.dev"),
        ("Rewards do not reach the decisions before a masked span (fixed in verl 0.10).",),
    ),
    "verl:clip_cov": Preset(
        replace(named_objective("clip_cov"), source="verl 0.8.0.dev", advantage_options=_VERL_GROUP),
        (
            _MICRO_BATCH,
            _RECOMPUTED,
            "The draw is from an unseeded generator.",
            "Decisions that PPO clips are not drawn.",
        ),
    ),
    "verl:kl_cov": Preset(
        replace(
            named_objective("kl_cov", selection_options={"coefficient": 0.1}),
            source="verl 0.8.0.dev, its config's default (the function's own is 1)",
            advantage_options=_VERL_GROUP,
        ),
        (_MICRO_BATCH, _RECOMPUTED),
    ),
    "openrlhf:ppo": Preset(
        replace(named_objective("ppo"), source="OpenRLHF 0.10"),
        ("GAE decays over masked decisions too: observations of a tool cost discount.",),
    ),
    "flowrl:flowrl": Preset(
        replace(
            named_objective("flowrl", surrogate_options={"eps_low": 1.0, "eps_high": float("inf")}),
            source="FlowRL as released",
        ),
        (
            "The clipped importance weight is computed and not used: the product enters unbounded.",
            "log Z is not detached from the policy.",
        ),
    ),
    "flow_grpo:flow_grpo": Preset(
        replace(named_objective("flow_grpo"), source="Flow-GRPO as released"),
        ("The KL's variance leaves −dt out: early denoising steps count too little.",),
    ),
    "verl_omni:grpo_guard": Preset(
        replace(named_objective("grpo_guard"), source="verl-omni 0.2.0"),
        ("Scale and dt are means over the micro-batch: rows at different noise levels get each other's.",),
    ),
}
"""peer:algorithm -> its defaults."""
