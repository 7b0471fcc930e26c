# SPDX-License-Identifier: Apache-2.0
"""The objective core: pure functions of tensors [B, T], alike for tokens and denoising steps. Torch only.

B samples, T decisions, `group` any labels, `weight` 0 for what is absent. Order of use: combine rewards,
advantage, log-ratio, surrogate, off-policy correction, selection, KL, aggregation; `Objective` composes them.
README.md here has the paper of each function. It needs torch; no model, no file, no configuration comes in.
"""

from visalign.core.advantages.baselines import (
    best_of_group_advantages,
    gpg_advantages,
    opo_advantages,
    pass_at_k_advantages,
)
from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum, weighted_mean, weighted_sum
from visalign.core.advantages.entropy import aem_advantages, aem_scale
from visalign.core.advantages.group import clamp_advantages, group_advantages, whiten
from visalign.core.advantages.process import aggregate_steps, process_advantages, span_index, span_rewards
from visalign.core.advantages.returns import (
    discounted_returns,
    gae,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
)
from visalign.core.advantages.rules import conditional_advantages, prl_advantages
from visalign.core.groups.labels import group_index
from visalign.core.objective.algorithms import NAMED, named_objective
from visalign.core.objective.data import Loss, PolicyOutput, Prepared, Trajectories
from visalign.core.objective.decisions import check_decisions
from visalign.core.objective.explain import Explanation, explain
from visalign.core.objective.invariance import InvarianceReport, check_invariance
from visalign.core.objective.loss_statistics import LossStatistics, loss_statistics, no_statistics
from visalign.core.objective.objective import Objective
from visalign.core.objective.peers import PEERS, diff_presets
from visalign.core.preference.bradley_terry import (
    average_pairs,
    bradley_terry_loss,
    margin_ranking_loss,
    outcome_loss,
    soft_labels,
    tie_log_prob,
    vote_shares,
    vote_weights,
)
from visalign.core.preference.fidelity import (
    answer_statistics,
    fidelity,
    fidelity_loss,
    fidelity_rewards,
    quality_preferences,
    thurstone_probability,
    thurstone_score,
)
from visalign.core.preference.heatmaps import (
    class_disagreement,
    ctrl_u_loss,
    ctrl_u_weight,
    fuse_heatmaps,
    laplace_loss,
    uncertainty_weight,
)
from visalign.core.preference.ict import (
    IctLabels,
    hp_loss,
    ict_hp_loss,
    ict_labels,
    ict_loss,
    truncated_score,
)
from visalign.core.preference.pairing import next_pairs
from visalign.core.preference.pairwise import group_pairs, win_rates
from visalign.core.preference.ranking import RankingFit, fit_ranking
from visalign.core.preference.uncertainty import (
    log_win_probability,
    mean_log_win,
    pair_deviation,
    soft_clamp,
    uncertain_preference_loss,
)
from visalign.core.preference.yes_no import YesNo, both_orders, yes_no_answer, yes_no_loss, yes_no_pair_loss
from visalign.core.rewards.best_of import (
    answer_counts,
    best_of_n_kl_bound,
    best_of_n_kl_estimate,
    expected_best_of_k,
    majority_at_k,
    pass_at_k,
)
from visalign.core.rewards.steps import (
    clip_step_rewards,
    delta_step_rewards,
    implicit_prm_loss,
    implicit_step_rewards,
    turning_point_rewards,
)
from visalign.core.rewards.terms import (
    adaptive_kl_coefficient,
    filter_overlong,
    kl_in_reward,
    penalty_kl_coefficient,
    place_terminal,
    soft_overlong,
)
from visalign.core.rewards.uncertainty import (
    bhattacharyya,
    bhattacharyya_overlap,
    combine_members,
    inverse_variance_weights,
    penalise,
    shrink_advantages,
)
from visalign.core.standalone.clip_losses import (
    listwise_choice_loss,
    paired_cosine,
    pickscore_loss,
    rank_margin_loss,
)
from visalign.core.standalone.copo import (
    between_group_advantages,
    consistency_entropy,
    copo_advantages,
    copo_weight,
)
from visalign.core.standalone.entropy_weights import (
    empg_advantages,
    empg_scale,
    tea_weights,
    weighted_entropy,
)
from visalign.core.standalone.gradient_balance import combine_gradients, min_norm_weights, smooth_weights
from visalign.core.standalone.groupwise import gdro_loss, soft_plackett_luce
from visalign.core.standalone.off_policy_pairs import off_policy_pair_weights, relative_log_density
from visalign.core.standalone.replay import replay_advantages, replay_weight
from visalign.core.standalone.risk import (
    conditional_value_at_risk,
    mixed_value_at_risk,
    range_value_at_risk,
    soft_minimum,
    track_quantile,
)
from visalign.core.standalone.shaping import (
    jepo_credit,
    likelihood_reward,
    neighbour_weights,
    preference_as_reward,
    reward_fusion,
    reward_probability,
)
from visalign.core.standalone.siren import anchored_entropy_loss, nucleus_entropy, nucleus_mask, siren_keep
from visalign.core.surrogates.aggregation import MODES, Counts, aggregate, count_step, row_tokens
from visalign.core.surrogates.balance import dro, flow_balance
from visalign.core.surrogates.forms import gmpo, gradient_keeping_clip, ppo_kl, sapo
from visalign.core.surrogates.kl import categorical_kl, gaussian_kl, kl_estimate, kl_penalty
from visalign.core.surrogates.off_policy import (
    ImportanceWeights,
    effective_sample_size,
    importance_weights,
    off_policy_mask,
)
from visalign.core.surrogates.ppo import (
    ppo_clip,
)
from visalign.core.surrogates.ratios import (
    LEVELS,
    gaussian_log_prob,
    guard_log_ratio,
    guard_step_weight,
    log_ratio,
    ratio_level,
    sequence_log_ratio,
)
from visalign.core.surrogates.value import explained_variance, value_clip_fraction, value_loss
from visalign.core.surrogates.weighted import (
    binary_kl,
    binary_tv,
    cispo,
    dppo,
    gamma_weight,
    reinforce,
    vespo,
)
from visalign.core.tokens.entropy import (
    adapt_entropy_coefficient,
    covariance_statistics,
    entrocraft_direction,
    entrocraft_keep,
    entropy_bonus,
    fit_entropy_curve,
    gated_entropy_coefficient,
    predicted_entropy_change,
    token_covariance,
)
from visalign.core.tokens.fused_head import fused_log_prob_entropy, log_prob_entropy
from visalign.core.tokens.selection import (
    clip_cov_keep,
    clip_cov_thresholds,
    kl_cov_penalty,
    kl_cov_select,
    kl_cov_thresholds,
    top_entropy_keep,
    top_entropy_thresholds,
)
from visalign.core.tokens.selection_rules import (
    clip_b_keep,
    clip_b_thresholds,
    clip_v_keep,
    clip_v_thresholds,
    discriminator_scores,
    entropy_discriminator,
)
from visalign.core.tokens.statistics import Decisions, ppo_clipped, require_tokens
from visalign.core.tokens.steer import steer_change, steer_thresholds, steer_weights

__all__ = [
    "LEVELS", "MODES", "NAMED", "PEERS", "Counts", "Decisions", "Explanation", "IctLabels",
    "ImportanceWeights", "InvarianceReport", "Loss", "LossStatistics", "Objective",
    "PolicyOutput", "Prepared", "RankingFit",
    "Trajectories", "YesNo", "adapt_entropy_coefficient", "adaptive_kl_coefficient",
    "aem_advantages", "aem_scale", "aggregate", "aggregate_steps", "anchored_entropy_loss", "answer_counts",
    "answer_statistics", "average_pairs", "best_of_group_advantages", "best_of_n_kl_bound",
    "best_of_n_kl_estimate", "between_group_advantages", "bhattacharyya", "bhattacharyya_overlap",
    "binary_kl", "binary_tv", "both_orders", "bradley_terry_loss", "categorical_kl", "check_decisions",
    "check_invariance",
    "cispo", "clamp_advantages", "class_disagreement", "clip_b_keep", "clip_b_thresholds", "clip_cov_keep",
    "clip_cov_thresholds", "clip_step_rewards", "clip_v_keep", "clip_v_thresholds",
    "combine_gradients", "combine_members", "conditional_advantages", "conditional_value_at_risk",
    "consistency_entropy", "copo_advantages", "copo_weight", "count_step", "covariance_statistics",
    "ctrl_u_loss", "ctrl_u_weight", "delta_step_rewards", "diff_presets", "discounted_returns",
    "discriminator_scores", "dppo", "dro", "effective_sample_size", "empg_advantages", "empg_scale",
    "entrocraft_direction", "entrocraft_keep", "entropy_bonus", "entropy_discriminator", "expected_best_of_k",
    "explain", "explained_variance", "fidelity", "fidelity_loss", "fidelity_rewards", "filter_overlong",
    "fit_entropy_curve", "fit_ranking", "flow_balance", "fuse_heatmaps", "fused_log_prob_entropy", "gae",
    "gamma_weight", "gated_entropy_coefficient", "gaussian_kl", "gaussian_log_prob", "gdpo_advantages",
    "gdro_loss", "gmpo", "gpg_advantages", "gradient_keeping_clip", "group_advantages", "group_index",
    "group_pairs", "guard_log_ratio", "guard_step_weight", "hp_loss", "ict_hp_loss", "ict_labels", "ict_loss",
    "implicit_prm_loss", "implicit_step_rewards", "importance_weights", "inverse_variance_weights",
    "jepo_credit", "kl_cov_penalty", "kl_cov_select", "kl_cov_thresholds", "kl_estimate", "kl_in_reward",
    "kl_penalty", "laplace_loss", "likelihood_reward", "listwise_choice_loss", "log_prob_entropy",
    "log_ratio", "log_win_probability", "loss_statistics",
    "majority_at_k", "margin_ranking_loss", "mean_log_win",
    "min_norm_weights", "mixed_value_at_risk", "named_objective", "neighbour_weights", "next_pairs",
    "no_statistics",
    "normalise_then_sum", "nucleus_entropy", "nucleus_mask", "off_policy_mask", "off_policy_pair_weights",
    "opo_advantages", "outcome_loss", "pair_deviation", "paired_cosine", "pass_at_k", "pass_at_k_advantages",
    "penalise", "penalty_kl_coefficient", "pickscore_loss", "place_terminal", "ppo_clip", "ppo_clipped",
    "ppo_kl", "predicted_entropy_change", "preference_as_reward", "prl_advantages", "process_advantages",
    "quality_preferences", "range_value_at_risk", "rank_margin_loss", "ratio_level",
    "reinforce", "reinforce_pp_advantages", "reinforce_pp_baseline_advantages", "relative_log_density",
    "remax_advantages", "replay_advantages", "replay_weight", "require_tokens", "reward_fusion",
    "reward_probability", "row_tokens", "sapo", "sequence_log_ratio", "shrink_advantages", "siren_keep",
    "smooth_weights", "soft_clamp", "soft_labels", "soft_minimum", "soft_overlong", "soft_plackett_luce",
    "span_index", "span_rewards", "steer_change", "steer_thresholds", "steer_weights", "tea_weights",
    "thurstone_probability", "thurstone_score", "tie_log_prob", "token_covariance", "top_entropy_keep",
    "top_entropy_thresholds", "track_quantile", "truncated_score", "turning_point_rewards",
    "uncertain_preference_loss", "uncertainty_weight", "value_clip_fraction", "value_loss", "vespo",
    "vote_shares", "vote_weights", "weighted_entropy", "weighted_mean", "weighted_sum", "whiten", "win_rates",
    "yes_no_answer", "yes_no_loss", "yes_no_pair_loss",
]  # fmt: skip
