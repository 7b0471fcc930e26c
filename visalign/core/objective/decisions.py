# SPDX-License-Identifier: Apache-2.0
"""Which choices of an objective mean something on tokens only, on denoising steps only, and what to take
instead.

A denoising step x' ~ N(μ, σ² I) has one entropy for every sample and every μ, its on-policy log-prob depends
on the noise draw alone, all samples have one number of steps, and there is no vocabulary. Everything else of
an objective is alike on both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from . import stages
from .data import Decisions

NO_STEP_ENTROPY = (
    "on denoising steps of fixed variance the entropy is one constant and the log-prob is the noise draw"
)
_NONZERO = object()
_DIVERSITY = (
    "the row 'dapo'; to keep images diverse, watch a spread that is measured on samples, the feature spread "
    "inside a group or the reward variance (either can be the monitor of entrocraft_direction), or train "
    "with FlowRL"
)
_GROUP_ROWS = "'grpo' or 'reinforce_pp_baseline', whose baseline is the other samples of the prompt"

ON_STEPS: dict[tuple[str, Any], tuple[str, str]] = {
    ("entropy", _NONZERO): (NO_STEP_ENTROPY, _DIVERSITY),
    **{("selection", name): (NO_STEP_ENTROPY, _DIVERSITY) for name in stages.SELECTIONS},
    **dict.fromkeys(
        [("advantage", name) for name in ("aem", "entropy_aware", "empg", "perplexity", "pear", "ares")],
        (NO_STEP_ENTROPY, "'canon' with another measure of the samples, or 'grpo'"),
    ),
    ("advantage", "opo"): (
        "its baseline weighs rewards by the length of a completion, and all samples have one number of steps",
        "'dr_grpo' or 'gpg', which is what it comes down to",
    ),
    ("surrogate_options.divergence", "tv"): (
        "binary divergences need the probability of a token; a density is none",
        "'flow_dppo', with the exact Gaussian divergence of a step",
    ),
    ("surrogate_options.divergence", "kl"): (
        "binary divergences need the probability of a token; a density is none",
        "'flow_dppo', with the exact Gaussian divergence of a step",
    ),
}
"""(field, value) -> why it means nothing on denoising steps, and what to take instead."""

EXTRA: dict[str, tuple[str, str]] = {
    "value": ("it needs a value function of noisy latents", _GROUP_ROWS),
    "greedy_reward": (
        "it needs the reward of a greedy completion, and an image has none: its initial noise is drawn",
        "'rloo', whose baseline is the other samples of the prompt",
    ),
    "reference_reward": (
        "it needs rewards of what the reference makes of the same prompts",
        "'pref_grpo', which compares the images of a group",
    ),
    "likelihood": ("it needs a reference answer in words after each sample", "'grpo'"),
    "log_z": ("it needs a learned log Z of each prompt", "'grpo' with a KL term, kl=0.04"),
    "process_reward": ("it needs a reward of each step", "objective.credit=turning_points or one_step"),
    "metric": (
        "it needs a second number of each sample",
        "objective.metric=PART, the name of a part of the reward (a term of weight 0 is one), or 'grpo'",
    ),
    "rank": ("it needs the hidden states of each token", "'grpo'"),
    "bundle": ("it needs bundles of samples of several prompts", "'copo', which compares prompts, or 'grpo'"),
    "ptx_weight": ("it needs tokens to go on learning by heart", "ptx=0"),
}
"""What a policy of denoising steps rarely has, why a row asks for it, and what to take instead."""

ON_TOKENS: dict[tuple[str, Any], tuple[str, str]] = {
    ("ratio", "guard"): ("GRPO-Guard's ratio is made of the means of Gaussian steps", "ratio='log_prob'"),
    ("kl_form", "velocity"): ("tokens have no velocity v", "kl_form='divergence'"),
    ("step_weight", "inverse_dt"): ("tokens have no step size dt", "step_weight='uniform'"),
    ("advantage", "steps"): (
        "it compares the samples of a group at the same step, and completions have none in common",
        "'reinforce_pp', which takes rewards of single steps",
    ),
    ("decisions", "denoising_steps"): ("its clip range and its KL are those of Gaussian steps", "'grpo'"),
}
"""(field, value) -> why it means nothing on tokens, and what to take instead."""

TEXT_ROW = {
    "flow_grpo": "'grpo', with advantage_options={'scale': 'batch'} for its batch std",
    "flow_gspo": "'gspo'",
    "grpo_guard": "'grpo', or 'gspo' for ratios of one scale",
    "flow_dppo": "'dppo_kl'",
    "pref_grpo": "'grpo' on `win_rates` as rewards",
}
"""Row of denoising steps -> row of tokens to take instead."""


def check_decisions(
    objective: Any, decisions: Decisions, *, name: str = "", given: Collection[str] = ()
) -> None:
    """Refuse an objective that means nothing on these decisions.

    Args:
        objective: an `Objective`, the row.
        decisions: what T counts.
        name: of the row, for the message and for its substitute.
        given: which of `EXTRA` the caller of denoising steps supplies; `Objective.prepare` looks at the
            trajectories instead.

    Raises:
        ValueError: with the field that does not fit, why, and what to take instead.
    """
    if decisions not in get_args(Decisions):
        raise ValueError(f"decisions must be one of {', '.join(get_args(Decisions))}; got {decisions!r}.")
    steps = decisions == "denoising_steps"
    for (field, value), (why, instead) in (ON_STEPS if steps else ON_TOKENS).items():
        found = _value(objective, field)
        if found == value or (value is _NONZERO and found):
            _refuse(
                name, decisions, f"{field}={found!r}", why, instead if steps else TEXT_ROW.get(name, instead)
            )
    if objective.decisions == "tokens" and steps:
        _refuse(name, decisions, "decisions='tokens'", "the row is made for tokens", "'grpo'")
    asked = {
        **dict.fromkeys(stages.ADVANTAGES[objective.advantage].needs, f"advantage={objective.advantage!r}"),
        **dict.fromkeys(stages.SURROGATES[objective.surrogate].needs, f"surrogate={objective.surrogate!r}"),
        **({"ptx_weight": f"ptx={objective.ptx}"} if objective.ptx else {}),
    }
    for need, choice in asked.items() if steps else ():
        if need in EXTRA and need not in given:
            _refuse(name, decisions, choice, *EXTRA[need])


def _value(objective: Any, field: str) -> Any:
    """A field, or an option with its default."""
    name, _, option = field.partition(".")
    value = getattr(objective, name)
    if not option:
        return value
    default = "tv" if option == "divergence" and objective.surrogate == "dppo" else None
    return value.get(option, default)


def _refuse(name: str, decisions: str, choice: str, why: str, instead: str) -> None:
    what = f"The row {name!r}" if name else "An objective"
    raise ValueError(
        f"{what} with {choice} has no meaning on {decisions.replace('_', ' ')} (decisions={decisions!r}): "
        f"{why}. Take {instead}."
    )
