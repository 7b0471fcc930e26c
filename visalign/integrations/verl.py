# SPDX-License-Identifier: Apache-2.0
"""The rows of the core in verl's registries, and judges as its reward function and reward manager.

    export VERL_USE_EXTERNAL_MODULES=visalign.integrations.verl

registers `visalign:NAME` for every row of tokens. A row is named twice, and what verl computes outside a policy loss
(KL, the reference, the denominator of a fixed length) stands in verl's own options; `settings` writes all of them:

    python -c "from visalign.integrations.verl import settings; print(*settings('dapo'))"

verl hands a loss one micro-batch and the denominators of the step. What needs more of the step than that, or
what verl does not have, is registered too and refuses by its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.core import NAMED, Counts, Objective, PolicyOutput, Prepared, Trajectories, row_tokens
from visalign.core.objective.stages import ADVANTAGES
from visalign.rewards.base.contract import RewardError

from .hosts import host, required_inputs
from .judges import OnFailure, image_scores, text_scores

algorithms: Any = host("verl.trainer.ppo.core_algos")

PREFIX = "visalign:"

_MEANS = {
    "token_mean": "token-mean",
    "token_sum": "token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
"""Aggregation of a row -> verl's loss_agg_mode, which its own KL and entropy terms follow."""
_ESTIMATORS = {("k3", "k3"): "low_var_kl", ("k3", "k2"): "k3+", ("k1", "k2"): "k1+", ("k2", "k2"): "k2"}
"""(kl_value, kl_gradient) of a row -> verl's kl_loss_type."""


_STEPS = "it is a row of denoising steps; its decisions are no tokens"


def no_loss(row: Objective) -> str | None:
    """Return the reason that a row's loss cannot be computed in verl; None where it can."""
    needs = required_inputs(row)
    absent = next((field for field in ("log_z", "divergence", "loss_weight") if field in needs), None)
    reasons = {
        _STEPS: row.decisions == "denoising_steps",
        "it takes the soft minimum of two critics and a KL term with a gate, and verl has neither": (
            row.advantage == "gae" and "temperature" in row.advantage_options
        ),
        f"selection={row.selection!r} needs thresholds over the whole optimizer step": row.selection,
        f"entropy_term={row.entropy_term!r} is settled over the whole optimizer step": (
            row.entropy and row.entropy_term != "bonus"
        ),
        "its mean is taken per group of samples, whose tokens lie in several micro-batches": (
            row.aggregation == "group_token_mean"
        ),
        "it learns on pretraining tokens, which verl does not hand to a policy loss": row.ptx,
        "its KL term is weighted by the ratio, and verl's KL term is not": row.kl_weighted,
        f"{needs.get(absent or '')} needs {absent}, which verl does not have": absent,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def no_advantage(row: Objective) -> str | None:
    """Return the reason that a row's advantages cannot be computed in verl; None where they can."""
    name = row.advantage
    needs = required_inputs(replace(row, surrogate="reinforce", surrogate_options={}, selection=None, kl=0, ptx=0))
    fields = "metric process_reward advantage entropy bundle reference_reward likelihood rank sum_p2".split()
    absent = next((field for field in fields if field in needs), None)
    log_prob = "ref_log_prob" if "ref_log_prob" in ADVANTAGES[name].needs else None
    log_prob = "old_log_prob" if name == "perplexity" else log_prob
    reasons = {
        _STEPS: row.decisions == "denoising_steps",
        "verl's own algorithm.adv_estimator=gae has the value function": name == "gae",
        f"advantage={name!r} needs several rewards apart, and verl hands on their sum": (
            name in ("gdpo", "normalise_then_sum")
        ),
        "verl generates greedy baselines only for its own algorithm.adv_estimator=remax": name == "remax",
        f"{needs.get(absent or '')} needs {absent}, which verl does not hand to an estimator": absent,
        f"advantage={name!r} needs {log_prob}, which verl does not hand on": log_prob,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def policy_loss(row: Objective) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A row's surrogate and mean (whatever `loss_agg_mode`) as a policy loss of verl; KL, entropy and value stay
    verl's.

    `rollout_is_weights` are importance weights. verl's `filter_groups` is `drop_zero_signal`.
    """
    row = replace(row, kl=0.0, entropy=0.0, value=0.0, value_clip=None, importance_sampling=None)

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        weight = response_mask.float()
        step = (None if config is None else config.global_batch_info) or {}
        length = step.get("loss_scale_factor") or row.length
        if row.aggregation == "dr_grpo" and length is None:
            raise ValueError(
                "This row divides by a fixed length. Set actor_rollout_ref.actor.loss_scale_factor to the longest "
                "response."
            )

        def count(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=torch.float64, device=weight.device)

        counts = Counts(
            tokens=count(step.get("batch_num_tokens", weight.sum())),
            sequences=count(step.get("global_batch_size", (weight != 0).any(1).sum())),
            length=count(length or weight.shape[1]),
        )
        prepared = Prepared(
            weight=weight,
            old_log_prob=old_log_prob.detach(),
            advantage=torch.where(weight != 0, advantages, 0.0),
            row_tokens=row_tokens(weight),
            counts=counts,
            importance_weight=rollout_is_weights,
        )
        result = row.loss(prepared, PolicyOutput(log_prob=log_prob))
        statistics = result.statistics
        metrics = {
            "actor/ppo_kl": (statistics.moved / statistics.decisions.clamp(min=1)).item(),
            "actor/log_ratio_max": statistics.largest.item(),
        }
        return result.total * step.get("dp_size", 1), metrics

    return loss


def advantage_estimator(row: Objective) -> Callable[..., tuple[Tensor, Tensor]]:
    """A row's advantages as an estimator of verl, over the whole batch; a NaN reward leaves its group, with advantage
    0. The reward of a masked token is its sample's.
    """
    zeros: dict[str, Any] = dict.fromkeys(("kl", "kl_in_reward", "entropy", "value", "ptx"), 0.0)
    choices: dict[str, Any] = {"selection": None, "selection_options": {}, "step_weight": "uniform"}
    row = replace(row, **zeros, **choices, drop_zero_signal=False, importance_sampling=None)

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        weight = response_mask.float()
        finite = torch.isfinite(token_level_rewards.sum(-1))
        # verl writes a sample's reward on its last token, which a tool may have written
        outside = torch.where(weight == 0, token_level_rewards, 0.0).sum(-1).float()
        prepared = row.prepare(
            Trajectories(
                weight=weight,
                old_log_prob=torch.zeros_like(weight),
                group=range(len(weight)) if index is None else list(index),
                reward=torch.where(finite, outside, torch.nan),
                process_reward=torch.where(finite[:, None], token_level_rewards, 0.0).float(),
            )
        )
        return prepared.advantage, prepared.advantage

    return estimate


def _refusal(name: str, why: str | None, what: str) -> ValueError:
    fitting = [key for key, row in NAMED.items() if no_loss(row) is None and no_advantage(row) is None]
    return ValueError(f"{PREFIX}{name} cannot be {what} in verl: {why}. Rows that can be both: {', '.join(fitting)}.")


def register(name: str, row: Objective) -> None:
    """Register a row as `visalign:NAME`, loss and advantage estimator; what verl cannot do raises in the call."""

    def or_refuse(build: Callable[[Objective], Callable[..., Any]], why: str | None, what: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise _refusal(name, why, what)

        return build(row) if why is None else refuse

    key = PREFIX + name
    algorithms.register_policy_loss(key)(or_refuse(policy_loss, no_loss(row), "a loss"))
    algorithms.ADV_ESTIMATOR_REGISTRY.pop(key, None)  # which refuses a second function of a name
    estimator = or_refuse(advantage_estimator, no_advantage(row), "an advantage estimator")
    algorithms.register_adv_est(key)(estimator)


def settings(name: str, *, length: int | None = None) -> list[str]:
    """Return verl's options that make it train a named row; `length` is the longest response in tokens, for
    rows that divide by a fixed length.
    """
    row = NAMED[name]
    if (why := no_loss(row)) is not None:
        raise _refusal(name, why, "a loss")
    estimator = row.advantage if row.advantage in ("gae", "remax") else None  # verl's own
    if estimator is None and (why := no_advantage(row)) is not None:
        raise _refusal(name, why, "an advantage estimator")
    actor = "actor_rollout_ref.actor"
    lines = [
        f"{actor}.policy_loss.loss_mode={PREFIX}{name}",
        f"algorithm.adv_estimator={estimator or PREFIX + name}",
        f"{actor}.loss_agg_mode={_MEANS[row.aggregation]}",
    ]
    if estimator == "gae":
        lines += [f"algorithm.{key}={row.advantage_options[key]:g}" for key in ("gamma", "lam")]
    if row.aggregation == "dr_grpo":
        if length is None and row.length is None:
            raise ValueError(f"{PREFIX}{name} divides by a fixed length: give length=, the longest response.")
        lines.append(f"{actor}.loss_scale_factor={length or row.length}")
    if row.kl:
        lines += [
            f"{actor}.use_kl_loss=True",
            f"{actor}.kl_loss_coef={row.kl:g}",
            f"{actor}.kl_loss_type={_ESTIMATORS[row.kl_value, row.kl_gradient]}",
        ]
    if row.kl_in_reward:
        lines += ["algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl.kl_coef={row.kl_in_reward:g}"]
    if row.drop_zero_signal:
        lines += ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    return lines


_JUDGES: dict[str, Any] = {}
_LOADING = threading.Lock()


def _judge(name: str, options: dict[str, Any], *, images: bool) -> Any:
    """Load a reward once, though verl scores samples in many threads."""
    from visalign.rewards.catalogue import load_reward, load_text_reward

    key = repr((name, images, sorted(options.items())))
    with _LOADING:
        if key not in _JUDGES:
            _JUDGES[key] = (load_reward if images else load_text_reward)(name, **options)
        return _JUDGES[key]


def compute_score(
    data_source: str,
    solution_str: str | None = None,
    ground_truth: Any = None,
    extra_info: Mapping[str, Any] | None = None,
    *,
    judge: str,
    solution_image: Tensor | None = None,
    on_failure: OnFailure = "raise",
    **options: Any,
) -> float:
    """Score a sample, larger is better, as verl's `custom_reward_function` and verl-omni's `reward_functions`.

    `data_source` is not read. `solution_str` is a text reward's response, `ground_truth` its `answer`, or the text of
    an image's prompt; `extra_info` further metadata, with the `prompt`. `judge` is as in `load_text_reward`, or for
    `solution_image` (uint8 or float [C, H, W]) `load_reward`, with `options`. `on_failure` "raise" stops the training,
    "nan" is for estimators of ours.
    """
    for name in ("reward_router_address", "reward_model_tokenizer", "model_name"):  # verl's own
        options.pop(name, None)
    reward = _judge(judge, options, images=solution_image is not None)
    record = dict(extra_info or {})
    if ground_truth is not None:  # data sets of verl keep a worked solution as extra_info["answer"]
        record["answer"] = ground_truth
    if solution_image is not None:
        prompt = record.get("prompt") or (ground_truth if isinstance(ground_truth, str) else "")
        if reward.capabilities.needs_prompt and not (prompt and str(prompt).strip()):
            raise RewardError(
                f"The sample has no prompt, which {judge!r} reads. Put the text that the image should show into "
                'extra_info["prompt"] of the data set, or into ground_truth of its reward_model.'
            )
        return image_scores(reward, solution_image[None], [prompt], [record], on_failure)[0]
    [value] = text_scores(reward, [solution_str], [record.get("prompt") or ""], [record], on_failure)
    return float("nan") if value is None else value


for _name, _row in NAMED.items():
    register(_name, _row)
