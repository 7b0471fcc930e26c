# SPDX-License-Identifier: Apache-2.0
"""A judged rollout as the core takes it: what policy, reference and value function say before the update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visalign.core import Objective, Trajectories, filter_overlong
from visalign.core.advantages.hidden_states import rank_dynamics
from visalign.core.objective.stages import ADVANTAGES
from visalign.core.surrogates.value import soft_minimum
from visalign.core.tokens.entropy_terms import nucleus_entropy
from visalign.core.tokens.selection_rules import discriminator_scores
from visalign.errors import UserError
from visalign.seeds import sample_seed
from visalign.text import Sampling, TextPolicy, TextRollout
from visalign.text.steps import StepReading, step_index
from visalign.training.loop.judging import reward_weights, score_samples
from visalign.training.policy.settings import needs_reference

from .answers import answer_likelihood
from .parts import Generates, TextParts
from .settings import TextRolloutSettings


def trajectories_of(
    parts: TextParts,
    rollout: TextRollout,
    reward: Tensor,
    valid: Tensor,
    settings: TextRolloutSettings,
    objective: Objective,
    records: Mapping[Hashable, Mapping[str, Any]],
) -> Trajectories:
    """This process's rollout as the core takes it, with whatever the objective asks for of single samples.

    Args:
        parts: who is asked.
        rollout: B completions.
        reward: [B], or [B, M] of a sum's terms.
        valid: [B] bool, False where the reward failed.
        settings: how the completions were made.
        objective: says what is needed.
        records: group label -> prompt record, with what PAR, ReMax and likelihoods ask of it.

    Raises:
        RewardFailure: the completions of ReMax or PAR came back with another number of scores.
    """
    policy, more = parts.policy, {}
    if needs_reference(objective):
        with parts.reference.applied():  # which sends tokens where its own router does
            more["ref_log_prob"] = policy.log_probs(replace(rollout, routes=None)).log_prob.cpu()
    recompute = settings.recompute or objective.importance_sampling is not None
    more |= _now(parts, rollout, objective, recompute)
    more |= _beside(parts, rollout, records, settings, objective)
    if parts.process is not None:
        more["process_reward"] = torch.zeros_like(rollout.loss_mask)
        if len(rollout):  # where no sample of this process is trained on, there is nothing to judge
            made = parts.process.score_rollout(rollout)
            more["process_reward"], valid = made.tokens("last").float().cpu(), valid & made.valid.cpu()
    if "step" in ADVANTAGES[objective.advantage].needs:
        usual = "</think>" if objective.advantage == "pear" else "\n"
        reading = StepReading(separator=settings.separator or usual)
        more["step"] = step_index(rollout, parts.tokenizer, reading)
    if objective.selection == "clip_v":
        found = policy.log_probs(rollout, statistic=_expected_score).statistic
        more["expected_score"] = None if found is None else found.cpu()
    if (nucleus := nucleus_of(objective)) is not None:
        found = policy.log_probs(rollout, statistic=nucleus).statistic
        more["nucleus_entropy"] = None if found is None else found.cpu()
    if settings.truncated == "mask":
        more["weight"] = filter_overlong(rollout.weight, rollout.truncated)
    if reward.ndim == 2:
        more["reward_weights"] = list(reward_weights(parts.reward).values())
    return rollout.trajectories(_of_the_whole(parts, reward), valid=valid, **more)


def _of_the_whole(parts: TextParts, reward: Tensor) -> Tensor:
    """The reward that is added to those of steps: 0 where they take its place; it was reported before."""
    return (
        torch.where(reward.isfinite(), 0.0, reward) if getattr(parts.process, "replaces", False) else reward
    )


def _now(parts: TextParts, rollout: TextRollout, objective: Objective, recompute: bool) -> dict[str, Tensor]:
    """What the policy's weights and the value function say before the update, as far as it is asked for."""
    more, has_value = dict[str, Tensor](), bool(objective.value) or objective.advantage == "gae"
    if recompute or (has_value and parts.value_model is None):
        now = parts.policy.log_probs(rollout)
        if recompute:
            more |= {"old_log_prob": now.log_prob.cpu(), "entropy": now.entropy.cpu()}
        if has_value and now.value is not None:
            more["value"] = now.value.cpu()
    if has_value and parts.value_model is not None:
        more["value"] = parts.value_model.values(rollout).cpu()
    if "value" in more and more["value"].ndim == 3:
        temperature = objective.advantage_options.get("temperature", 0.3)
        more["value"] = soft_minimum(more["value"], temperature=temperature)
    return more


def states_of(policy: TextPolicy, who: str) -> Callable[..., Iterator[tuple[int, Tensor]]]:
    """The policy's `hidden_states`, see `CausalLMPolicy`.

    Raises:
        UserError: it has none; `who` asks.
    """
    found = getattr(policy, "hidden_states", None)
    if found is None:
        raise UserError(
            f"{who} looks at hidden states, and {type(policy).__name__} has no method hidden_states. Give it "
            "one as CausalLMPolicy has, or take 'grpo'."
        )
    return found


def bundle_index(group: Sequence[int], size: int) -> Tensor:
    """Bundles for RiskPO: the j-th samples of `size` prompts are one.

    Args:
        group: B labels.
        size: prompts in a bundle; N prompts make N // size bundles for each j, at least one, as even as can
            be.

    Returns:
        [B] int64.
    """
    seen, number = {label: 0 for label in group}, {label: n for n, label in enumerate(dict.fromkeys(group))}
    bundles, most, found = max(1, len(seen) // size), len(group), []
    for label in group:
        found.append(number[label] * bundles // len(seen) * most + seen[label])
        seen[label] += 1
    return torch.tensor(found)


def _expected_score(log_p: Tensor) -> Tensor:
    return discriminator_scores(log_p).expected


def nucleus_of(objective: Objective) -> Callable[[Tensor], Tensor] | None:
    """[n, V] log-probs -> [n] entropies of the nucleus, where the row asks for them."""
    if not (objective.entropy and objective.entropy_term == "siren"):
        return None
    return partial(nucleus_entropy, p=objective.entropy_term_options.get("p", 0.8))


def engine_gap(trajectories: Trajectories, allowed: float) -> float:
    """Mean |log π_old − log μ| per token, in nats, between the policy and who wrote the completions.

    Raises:
        UserError: more than that.
    """
    written, present = trajectories.rollout_log_prob, trajectories.weight != 0
    if written is None or not bool(present.any()):
        return 0.0
    gap = float((trajectories.old_log_prob - written)[present].abs().mean())
    if not gap <= allowed:
        raise UserError(
            f"The log-probs of who wrote the completions are {gap:.3g} nats per token away from the "
            f"policy's, allowed {allowed:.3g} (rollout.allowed_gap). Likely causes: the server still has "
            "other weights, other log-probs are reported (start it with processed_logprobs), or another "
            "tokenizer."
        )
    return gap


def _beside(
    parts: TextParts,
    rollout: TextRollout,
    records: Mapping[Hashable, Mapping[str, Any]],
    settings: TextRolloutSettings,
    objective: Objective,
) -> dict[str, Tensor]:
    """What the objective asks of the records: rewards of other completions, or how likely the answer is."""
    given = parts, rollout, records, settings
    if objective.advantage == "remax":
        return {"greedy_reward": _rewards(*given, parts.generator, Sampling(temperature=0.0), 1)[:, 0]}
    if objective.advantage == "par":
        count = objective.advantage_options.get("references", 1)
        with parts.reference.applied():
            return {"reference_reward": _rewards(*given, parts.own_writer, settings.sampling, count)}
    if objective.advantage == "rank_bonus":
        rank, stride = torch.zeros(len(rollout), 3).double(), objective.advantage_options.get("stride", 40)
        for sample, states in states_of(parts.policy, "rank_bonus")(rollout):
            rank[sample] = rank_dynamics(states[:, 0], stride=stride).cpu()
        return {"rank": rank}
    if "likelihood" in ADVANTAGES[objective.advantage].needs:
        kind = objective.advantage_options.get("kind", "log_prob")
        return {"likelihood": answer_likelihood(*given[:3], settings.answer_prefix, kind)}
    return {}


def _rewards(
    parts: TextParts,
    rollout: TextRollout,
    records: Mapping[Hashable, Mapping[str, Any]],
    settings: TextRolloutSettings,
    writer: Generates,
    sampling: Sampling,
    count: int,
) -> Tensor:
    """[B, count] rewards of as many completions by `writer` to each sample's prompt, the same for all samples
    of a group; NaN where one could not be judged."""
    if not len(rollout):
        return torch.zeros(0, count)
    first = {label: place for place, label in reversed(list(enumerate(rollout.group)))}
    asked = [records[label] for label in first for _ in range(count)]
    made = writer.generate(
        [rollout.prompt[i] for i in first.values()],
        seeds=[sample_seed(parts.seed, "beside", str(label), i) for label in first for i in range(count)],
        num_generations=count,
        sampling=sampling,
        stopping=settings.stopping(),
        group=list(first),
    )
    scores = score_samples(parts.reward, list(made.text), asked, what="completions")
    value = torch.where(scores.valid.cpu(), scores.value.cpu(), torch.nan).float().view(len(first), count)
    number = {label: n for n, label in enumerate(first)}
    return value[[number[label] for label in rollout.group]]
