# SPDX-License-Identifier: Apache-2.0
"""Convert a scored rollout for the objective core, with what single algorithms need of policy and records."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from visalign.core import Objective, Trajectories, filter_overlong
from visalign.core.advantages.hidden_states import rank_dynamics
from visalign.core.objective.stages import ADVANTAGES
from visalign.core.rewards.likelihood import Likelihood, likelihood_reward
from visalign.core.surrogates.value import soft_minimum
from visalign.core.tokens.entropy_terms import nucleus_entropy
from visalign.core.tokens.fused_head import squared_mass
from visalign.core.tokens.selection_rules import discriminator_scores
from visalign.errors import UserError
from visalign.interfaces import policy_text, score_named
from visalign.seeds import sample_seed
from visalign.text import Sampling, TextRollout, ToolPolicy
from visalign.text.rollout import undrawn_rollout
from visalign.text.steps import StepReading, step_index
from visalign.text.tool_calls import score_generated
from visalign.training.loop.judging import reward_weights
from visalign.training.policy.settings import needs_reference

from .parts import CompletionGenerator, TextParts

GroupRecords = Mapping[Hashable, Mapping[str, Any]]  # group label -> prompt record


def build_trajectories(
    parts: TextParts, rollout: TextRollout, reward: Tensor, valid: Tensor, records: GroupRecords
) -> Trajectories:
    """Convert this process's rollout, with every input that the objective needs of single samples.

    The reward is [B], or [B, M] of a sum's terms, valid False where it failed. Prompt records are for PAR,
    ReMax and likelihoods.
    """
    policy, settings, objective = parts.policy, parts.rollout, parts.objective
    needs = ADVANTAGES[objective.advantage].needs
    columns: dict[str, Any] = {}
    if needs_reference(objective):
        with parts.reference.applied():  # which routes tokens by its own router
            columns["ref_log_prob"] = policy.log_probs(replace(rollout, routes=None)).log_prob.cpu()
    columns |= _policy_columns(parts, rollout)
    columns |= _record_columns(parts, rollout, records)
    if parts.process is not None:
        columns["process_reward"] = torch.zeros_like(rollout.loss_mask)
        columns |= {"step": torch.full(rollout.loss_mask.shape, -1)} if "step" in needs else {}
        if len(rollout):  # a process may hold no sample that is trained on
            steps = parts.process.score_rollout(rollout)
            columns["process_reward"], valid = steps.tokens("last").float().cpu(), valid & steps.valid.cpu()
            columns |= {"step": steps.step.cpu()} if "step" in needs else {}
        if getattr(parts.process, "replaces", False):  # the outcome was only to be reported
            reward = torch.where(reward.isfinite(), 0.0, reward)
    elif "step" in needs:
        default = "</think>" if objective.advantage == "pear" else "\n"
        columns["step"] = step_index(rollout, parts.tokenizer, StepReading(separator=settings.separator or default))
    expected_score = (lambda log_p: discriminator_scores(log_p).expected) if objective.selection == "clip_v" else None
    for name, statistic in (("expected_score", expected_score), ("nucleus_entropy", nucleus_of(objective))):
        if statistic is not None:
            values = policy.log_probs(rollout, statistic=statistic).statistic
            columns[name] = None if values is None else values.cpu()
    if settings.truncated == "mask":
        columns["weight"] = filter_overlong(rollout.loss_mask, rollout.truncated)
    if reward.ndim == 2:
        columns["reward_weights"] = list(reward_weights(parts.reward).values())
    return rollout.trajectories(reward, valid=valid, **columns)


def _policy_columns(parts: TextParts, rollout: TextRollout) -> dict[str, Tensor]:
    """Outputs of policy and value function before the update, where the objective needs them."""
    objective, recompute = parts.objective, parts.recomputes
    columns, has_value = dict[str, Tensor](), bool(objective.value) or objective.advantage == "gae"
    needs = ADVANTAGES[objective.advantage].needs
    if recompute or "sum_p2" in needs or (has_value and parts.value_model is None):
        output = parts.policy.log_probs(rollout, statistic=squared_mass if "sum_p2" in needs else None)
        columns |= {} if output.statistic is None else {"sum_p2": output.statistic.cpu()}
        if recompute:
            columns |= {"old_log_prob": output.log_prob.cpu(), "entropy": output.entropy.cpu()}
        if has_value and output.value is not None:
            columns["value"] = output.value.cpu()
    if has_value and parts.value_model is not None:
        columns["value"] = parts.value_model.values(rollout).cpu()
    if "value" in columns and columns["value"].ndim == 3:
        temperature = objective.advantage_options.get("temperature", 0.3)
        columns["value"] = soft_minimum(columns["value"], temperature=temperature)
    return columns


def _record_columns(parts: TextParts, rollout: TextRollout, records: GroupRecords) -> dict[str, Tensor]:
    """Rewards of other completions, ranks of hidden states, or the likelihood of the answer, by advantage."""
    settings, objective, options = parts.rollout, parts.objective, parts.objective.advantage_options
    if objective.advantage == "remax":
        greedy = Sampling(temperature=0.0)
        return {"greedy_reward": _prompt_rewards(parts, rollout, records, parts.generator, greedy, 1)[:, 0]}
    if objective.advantage == "par":
        generator: Any = parts.policy
        if isinstance(parts.generator, ToolPolicy):
            generator = ToolPolicy(generator, parts.generator.tokenizer, parts.generator.use)
        with parts.reference.applied():
            count = options.get("references", 1)
            rewards = _prompt_rewards(parts, rollout, records, generator, settings.sampling, count)
        return {"reference_reward": rewards}
    if objective.advantage == "rank_bonus":
        rank = torch.zeros(len(rollout), 3).double()
        for sample, states in cast("Any", parts.policy).hidden_states(rollout):
            rank[sample] = rank_dynamics(states[:, 0], stride=options.get("stride", 40)).cpu()
        return {"rank": rank}
    if objective.advantage == "copo":
        labels = answer_labels(parts.reward, rollout, [records[label] for label in rollout.group])
        return {} if labels is None else {"answer": labels}
    if "likelihood" in ADVANTAGES[objective.advantage].needs:
        kind = options.get("kind", "log_prob")
        return {"likelihood": answer_likelihood(parts, rollout, records, settings.answer_prefix, kind)}
    return {}


def _prompt_rewards(
    parts: TextParts,
    rollout: TextRollout,
    records: GroupRecords,
    generator: CompletionGenerator,
    sampling: Sampling,
    count: int,
) -> Tensor:
    """Rewards [B, count] of other completions to each group's prompt; NaN where scoring failed."""
    if not len(rollout):
        return torch.zeros(0, count)
    labels = list(dict.fromkeys(rollout.group))  # whose prompts an environment has not written into
    other = generator.generate(
        [records[label]["prompt"] for label in labels],
        seeds=[sample_seed(parts.seed, "beside", str(label), i) for label in labels for i in range(count)],
        num_generations=count,
        sampling=sampling,
        stopping=parts.rollout.stopping(),
        group=labels,
    )
    metadata = [records[label] for label in labels for _ in range(count)]
    scores = score_generated(other, metadata, partial(score_named, parts.reward, name=parts.reward.name))
    value = torch.where(scores.valid.cpu(), scores.value.cpu(), torch.nan).float().view(len(labels), count)
    return value[[labels.index(label) for label in rollout.group]]


def answer_labels(reward: Any, rollout: TextRollout, records: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Number the answers [b] of completions to records; None where the reward names none."""
    if (read := reward.capabilities.read_answer) is None:
        return None
    answers = [read(policy_text(text), record) for text, record in zip(rollout.text, records, strict=True)]
    return torch.tensor([answer_label(answer) for answer in answers], dtype=torch.int64)


def answer_label(answer: str | None) -> int:
    """Number an answer, alike in every process; completions without one share 0."""
    if answer is None:
        return 0
    return int.from_bytes(blake2b(answer.encode(errors="surrogatepass"), digest_size=7).digest()) + 1


def nucleus_of(objective: Objective) -> Callable[[Tensor], Tensor] | None:
    """Return a function of log-probs [n, V] to nucleus entropies [n], where the objective needs them."""
    if not (objective.entropy and objective.entropy_term == "siren"):
        return None
    return partial(nucleus_entropy, p=objective.entropy_term_options.get("p", 0.8))


def engine_gap(trajectories: Trajectories, allowed: float) -> float:
    """Compute the mean |log π_old − log μ| per token, in nats, between the policy and the engine μ that sampled."""
    engine, present = trajectories.rollout_log_prob, trajectories.weight != 0
    assert engine is not None
    gap = float((trajectories.old_log_prob - engine)[present].abs().mean()) if bool(present.any()) else 0.0
    if not gap <= allowed:
        raise UserError(
            f"The log-probs of the engine that wrote the completions are {gap:.3g} nats per token away from the "
            f"policy's, allowed {allowed:.3g} (rollout.allowed_gap). Likely the server has other weights, another "
            "tokenizer, or reports other log-probs (start it with processed_logprobs)."
        )
    return gap


def check_answers(objective: Objective, records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records without an answer, if the objective uses its likelihood."""
    if "likelihood" not in ADVANTAGES[objective.advantage].needs:
        return
    for record in records:
        answer = record.get("answer")
        if not isinstance(answer, str) or not answer:
            raise UserError(
                f'The record of the prompt {str(record["prompt"])[:60]!r} has no text "answer" (it is {answer!r}), '
                "whose likelihood is the reward. Give every record one, or use 'grpo'."
            )


def answer_likelihood(
    parts: TextParts,
    rollout: TextRollout,
    records: Mapping[Hashable, Mapping[str, Any]],
    prefix: str,
    kind: Likelihood,
) -> Tensor:
    """Compute `likelihood_reward` [B] of each record's answer after the completion, by the present weights.

    The policy reads the prompt, the completion up to the first `prefix`, and `prefix`; the completion is
    tokenized again. The answer's tokens are scored at temperature 1, over the whole vocabulary. NaN where
    prompt, completion and answer are longer than the context.

    Likelihood-based reward designs, arXiv 2602.03979.
    """
    if not len(rollout):
        return torch.zeros(0)
    contexts, answers = [], []
    for row, label in enumerate(rollout.group):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] != 0].tolist()
        contexts.append(prompt + _ids(parts, rollout.text[row].split(prefix)[0] + prefix))
        answers.append(_ids(parts, records[label]["answer"]))
    limit = getattr(parts.policy, "context_length", None)
    fits = [limit is None or len(c) + len(a) <= limit for c, a in zip(contexts, answers, strict=True)]
    read = ([i if fit else i[:1] for i, fit in zip(ids, fits, strict=True)] for ids in (contexts, answers))
    scored = _with_tokens(rollout, *read)
    reward = likelihood_reward(parts.policy.log_probs(scored).log_prob.cpu(), scored.loss_mask, kind=kind)
    return torch.where(torch.tensor(fits), reward, torch.nan)


def _ids(parts: TextParts, text: str) -> list[int]:
    return list(parts.tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_tokens(rollout: TextRollout, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> TextRollout:
    """Put other prompts and completions in the form of the rollout, with its images; padded ids are 0."""

    def pad(rows: Sequence[list[int]], side: str) -> list[Tensor]:
        values = [torch.tensor(ids, dtype=torch.int64) for ids in rows], [torch.ones(len(ids)) for ids in rows]
        return [pad_sequence(value, batch_first=True, padding_side=side) for value in values]

    return replace(undrawn_rollout(*pad(prompts, "left"), *pad(completions, "right")), images=rollout.images)
