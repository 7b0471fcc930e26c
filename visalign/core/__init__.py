# SPDX-License-Identifier: Apache-2.0
"""Objectives as pure functions of tensors [B, T], for tokens and denoising steps alike.

B samples, T decisions, `group` any labels, `weight` 0 for what is absent. An `Objective` is a set of choices;
`named_objective("dapo")` is one by name. `__all__` has the main names; `from visalign.core import NAME` finds
those of `MODULES` too: `advantages`, `rewards`, `surrogates` (ratios, losses, KL, averages), `tokens`
(log-probs, entropy, selection), `preference` (reward losses, DPO), `regression`. README.md lists the paper of
each function. It needs torch alone; no model, file or configuration comes in.

Everywhere: shapes that do not fit, and arguments outside their range, are a ValueError that says what was
given and what is allowed.
"""

from importlib import import_module
from typing import Any

from visalign.core.advantages.group import group_advantages
from visalign.core.advantages.returns import gae
from visalign.core.objective.algorithms import NAMED, named_objective
from visalign.core.objective.data import Loss, PolicyOutput, Prepared, Trajectories
from visalign.core.objective.decisions import check_decisions
from visalign.core.objective.explain import explain
from visalign.core.objective.invariance import check_invariance
from visalign.core.objective.loss_statistics import LossStatistics
from visalign.core.objective.objective import Objective
from visalign.core.surrogates.aggregation import aggregate, count_step
from visalign.core.surrogates.kl import gaussian_kl, kl_penalty
from visalign.core.surrogates.off_policy import importance_weights
from visalign.core.surrogates.ppo import ppo_clip
from visalign.core.surrogates.ratios import gaussian_log_prob, guard_log_ratio, log_ratio, ratio_level
from visalign.core.surrogates.value import value_loss
from visalign.core.tokens.causal_lm import token_log_probs
from visalign.core.tokens.fused_head import fused_log_prob_entropy, log_prob_entropy

_ROOMS = """
advantages.baselines: best_of_group_advantages decoupled_advantages gpg_advantages opo_advantages pass_at_k_advantages
advantages.combine: gdpo_advantages normalise_then_sum weighted_mean weighted_sum
advantages.copo: between_group_advantages consistency_entropy copo_advantages copo_weight
advantages.entropy: aem_advantages aem_scale empg_advantages empg_scale entropy_aware_advantages
    perplexity_advantages position_advantages step_entropy
advantages.gradient_balance: combine_gradients min_norm_weights smooth_weights
advantages.group: clamp_advantages whiten
advantages.hidden_states: effective_rank flow_deviation flow_rewards rank_average rank_bonus rank_dynamics
advantages.process: aggregate_steps prime_advantages process_advantages span_index span_rewards
advantages.returns: discounted_returns optimal_token_baseline reinforce_pp_advantages
    reinforce_pp_baseline_advantages remax_advantages
advantages.risk: bundle_groups bundle_scores conditional_value_at_risk mixed_value_at_risk range_value_at_risk
    riskpo_advantages track_quantile
advantages.rules: conditional_advantages prl_advantages replay_advantages replay_weight
groups.labels: group_index
objective.data: Decisions
objective.explain: Explanation
objective.loss_statistics: loss_statistics no_statistics
preference.bradley_terry: average_pairs bradley_terry_loss margin_ranking_loss outcome_loss plackett_luce_loss
    soft_labels tie_log_prob vote_shares
preference.direct: DIRECT DirectRow direct_preference_loss dynamic_labels implicit_reward kto_loss
    kto_reference_point
preference.fidelity: answer_statistics fidelity fidelity_loss fidelity_rewards quality_preferences rating_distribution
    thurstone_probability thurstone_score
preference.heatmaps: ctrl_u_loss ctrl_u_weight fuse_heatmaps laplace_loss
preference.ict: IctLabels hp_loss ict_hp_loss ict_labels ict_loss truncated_score
preference.diversity: nuclear_diversity
preference.off_policy: off_policy_pair_weights relative_log_density
preference.pairing: next_pairs
preference.pairwise: group_pairs win_rates
preference.ranking: RankingFit fit_ranking
preference.uncertainty: log_win_probability mean_log_win pair_deviation soft_clamp uncertain_preference_loss
preference.yes_no: YesNo both_orders yes_no_answer yes_no_loss yes_no_pair_loss
regression.ascents: ASCENTS Ascent named_ascent
regression.few_step: FEW_STEP FewStep named_few_step
regression.groupwise: dgpo_loss diffusion_kto_loss gdro_loss soft_plackett_luce
regression.losses: covariance_guidance crd_loss fdfo_loss level_weight matching_error matching_loss
    nft_loss pair_guidance preference_loss ram_loss reward_probability
regression.rows: LOSSES REGRESSIONS PairOutput Regression SIGNALS named_regression
regression.signals: best_and_worst best_share best_worst_pairs old_policy_decay soft_clip tilted_weights
rewards.best_of: best_of_n_kl_bound best_of_n_kl_estimate best_response_reward expected_best_of_k
    filtration_weights pass_at_k
rewards.entropy: difficulty_entropy_reward difficulty_of phase_entropy_reward window_entropy
rewards.fusion: convex_vertices neighbour_weights reward_fusion
rewards.likelihood: jepo_credit likelihood_reward
rewards.sets: contrast_sets frechet_closeness frechet_distance set_gains vendi_gains vendi_score
rewards.steps: branch_advantages branch_rewards clip_step_rewards delta_step_rewards implicit_prm_loss
    implicit_step_rewards progress_loss turning_point_rewards
rewards.terms: adaptive_kl_coefficient constraint_multiplier filter_overlong kl_in_reward
    penalty_kl_coefficient place_terminal preference_as_reward soft_overlong
rewards.uncertainty: bhattacharyya bhattacharyya_overlap combine_members inverse_variance_weights penalise
    relative_uncertainty_weight
standalone.clip_losses: listwise_choice_loss paired_cosine pickscore_loss rank_margin_loss
surrogates.aggregation: MODES Counts row_tokens
surrogates.balance: dro flow_balance
surrogates.forms: drpo gmpo gradient_keeping_clip ppo_kl sapo
surrogates.kl: categorical_kl kl_estimate velocity_kl
surrogates.kl_gate: KLGate gate_threshold gated_coefficient next_gate
surrogates.off_policy: ImportanceWeights effective_sample_size off_policy_mask
surrogates.ratios: LEVELS guard_step_weight
surrogates.value: explained_variance soft_minimum value_clip_fraction
surrogates.weighted: binary_kl binary_tv cispo dppo gamma_weight prefix_excess reinforce
    vespo
tokens.entropy: covariance_statistics entrocraft_direction entrocraft_keep entropy_bonus fit_entropy_curve
    token_covariance
tokens.entropy_terms: anchored_entropy_loss entropy_band_penalty nucleus_entropy nucleus_mask peak_entropy
    siren_keep tea_weights
tokens.selection: clip_cov_keep clip_cov_thresholds kl_cov_penalty kl_cov_select kl_cov_thresholds
    top_entropy_keep top_entropy_thresholds
tokens.selection_rules: clip_b_keep clip_b_thresholds clip_v_keep clip_v_thresholds discriminator_scores
    entropy_discriminator
tokens.statistics: ppo_clipped
tokens.steer: steer_change steer_thresholds steer_weights
"""
_LINES = _ROOMS.replace("\n    ", " ").strip().split("\n")
MODULES = {module: names for module, _, names in (line.partition(": ") for line in _LINES)}
"""Module -> further names that `visalign.core` offers."""

_MODULE_OF = {name: module for module, names in MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "MODULES", "NAMED", "Loss", "LossStatistics", "Objective", "PolicyOutput", "Prepared", "Trajectories",
    "aggregate", "check_decisions", "check_invariance", "count_step", "explain",
    "fused_log_prob_entropy", "gae", "gaussian_kl", "gaussian_log_prob", "group_advantages",
    "guard_log_ratio", "importance_weights", "kl_penalty", "log_prob_entropy", "log_ratio",
    "named_objective", "ppo_clip", "ratio_level", "token_log_probs", "value_loss",
]  # fmt: skip
