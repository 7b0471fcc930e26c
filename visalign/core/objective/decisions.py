# SPDX-License-Identifier: Apache-2.0
"""Choices of an objective that mean something on tokens only, or on denoising steps only, with a substitute.

A denoising step x' ~ N(μ, σ² I) has one entropy for every sample and every μ, its on-policy log-prob depends
on the noise draw alone, all samples have one number of steps, and there is no vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from visalign.core.checks import check_choice

from . import stages
from .data import Decisions

NO_STEP_ENTROPY = "on denoising steps of fixed variance the entropy is one constant and the log-prob is the noise draw"
_NONZERO = object()
_DIVERSITY = "'dapo', or 'grpo' with a KL term, kl=0.04"
_NO_VOCABULARY = "binary divergences need the probability of a token; a density is none"
_GROUP_BASELINE = "'grpo' or 'reinforce_pp_baseline', whose baseline is the other samples of the prompt"

ON_STEPS: dict[tuple[str, Any], tuple[str, str]] = {
    ("entropy", _NONZERO): (NO_STEP_ENTROPY, _DIVERSITY),
    **{("selection", name): (NO_STEP_ENTROPY, _DIVERSITY) for name in stages.SELECTIONS if name != "entrocraft"},
    **dict.fromkeys(
        [("advantage", name) for name in ("aem", "entropy_aware", "empg", "perplexity", "pear", "ares")],
        (NO_STEP_ENTROPY, "'canon' with objective.metric=PART, another part of the reward, or 'grpo'"),
    ),
    ("advantage", "opo"): (
        "its baseline weighs rewards by the length of a completion, and all samples have one number of steps",
        "'dr_grpo' or 'gpg'",
    ),
    **{
        ("surrogate_options.divergence", name): (_NO_VOCABULARY, "'flow_dppo', with the exact divergence")
        for name in ("tv", "kl")
    },
    ("surrogate", "cppo"): (_NO_VOCABULARY, "'flow_dppo', with the exact divergence"),
    ("surrogate", "drpo"): ("its pull is the probability of a token; a density is none", "'spo', whose pull is 1"),
}
"""(field, value) -> why it means nothing on denoising steps, and the substitute."""

EXTRA: dict[str, tuple[str, str]] = {
    "value": ("it needs a value function of noisy latents", _GROUP_BASELINE),
    "greedy_reward": ("it needs the reward of a greedy completion, and an image has none", "'rloo'"),
    "reference_reward": ("it needs rewards of the reference's images of the same prompts", "'pref_grpo'"),
    "entropy": ("it needs a measure of the variety of samples in place of an entropy", _DIVERSITY),
    "likelihood": ("it needs a reference answer in words after each sample", "'grpo'"),
    "log_z": ("it needs a learned log Z of each prompt", "'grpo' with a KL term, kl=0.04"),
    "process_reward": ("it needs a reward of each step", "'flow_grpo' with objective.credit=turning_points"),
    "metric": (
        "it needs a second number of each sample",
        "objective.metric=PART, the name of a part of the reward (a term of weight 0 is one), or 'grpo'",
    ),
    "rank": ("it needs the hidden states of each token", "'grpo'"),
    "sum_p2": ("it needs the probability of each token; a density has none", "'gpg' or 'dr_grpo'"),
    "bundle": ("it needs bundles of samples of several prompts", "'copo', which compares prompts, or 'grpo'"),
    "ptx_weight": ("it needs pretraining tokens", "ptx=0"),
}
"""Field that policies of denoising steps rarely have -> why an objective needs it, and the substitute."""

ON_TOKENS: dict[tuple[str, Any], tuple[str, str]] = {
    ("ratio", "guard"): ("GRPO-Guard's ratio is made of the means of Gaussian steps", "ratio='log_prob'"),
    ("kl_form", "velocity"): ("tokens have no velocity v", "kl_form='divergence'"),
    **dict.fromkeys(
        [("step_weight", name) for name in ("inverse_dt", "std", "inverse_gradient")],
        ("tokens have no step size dt", "step_weight='uniform'"),
    ),
    ("advantage", "steps"): (
        "it compares the samples of a group at the same step, and completions have none in common",
        "'reinforce_pp', which takes rewards of single steps",
    ),
    ("decisions", "denoising_steps"): ("its clip range and its KL are those of Gaussian steps", "'grpo'"),
}
"""(field, value) -> why it means nothing on tokens, and the substitute."""

TOKEN_SUBSTITUTES = {
    "flow_grpo": "'grpo', with advantage_options={'scale': 'batch'} for its batch std",
    "flow_gspo": "'gspo'",
    "grpo_guard": "'grpo', or 'gspo' for ratios of one scale",
    "flow_dppo": "'dppo_kl'",
    "pref_grpo": "'grpo' on `win_rates` as rewards",
}
"""Algorithm of denoising steps -> algorithm of tokens to take instead."""


def check_decisions(objective: Any, decisions: Decisions, *, name: str = "", available: Collection[str] = ()) -> None:
    """Refuse an objective that means nothing on these decisions, with the substitute.

    `name` is the algorithm, for the message and for its substitute; `available` are the fields of `EXTRA`
    that a caller of denoising steps supplies.
    """
    check_choice("decisions", decisions, get_args(Decisions))
    on_steps = decisions == "denoising_steps"
    refused = []  # (choice, why, substitute)
    for (field, value), (why, substitute) in (ON_STEPS if on_steps else ON_TOKENS).items():
        field, _, option = field.partition(".")
        actual = getattr(objective, field)
        if option:
            actual = actual.get(option, "tv" if objective.surrogate == "dppo" else None)
        if actual == value or (value is _NONZERO and actual):
            substitute = substitute if on_steps else TOKEN_SUBSTITUTES.get(name, substitute)
            refused.append((f"{option or field}={actual!r}", why, substitute))
    if on_steps and objective.decisions == "tokens":
        refused.append(("decisions='tokens'", "the algorithm is for tokens", "'grpo'"))
    if on_steps:
        needs = {**objective.trajectory_needs(), **objective.output_needs()}
        missing = {field: choice for field, choice in needs.items() if field in EXTRA and field not in available}
        refused += [(choice, *EXTRA[field]) for field, choice in missing.items()]
    for choice, why, substitute in refused:
        label = f"The algorithm {name!r}" if name else "An objective"
        raise ValueError(
            f"{label} with {choice} has no meaning on {decisions.replace('_', ' ')} "
            f"(decisions={decisions!r}): {why}. Take {substitute}."
        )
