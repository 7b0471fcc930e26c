# SPDX-License-Identifier: Apache-2.0
"""Compare a trained text policy with the policy that it came from on the same held-out prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.evaluation.heldout.correctness import verdict
from visalign.evaluation.pages.report import summary_json
from visalign.evaluation.statistics import two_policies
from visalign.evaluation.statistics.diversity import starc_distance, support_metrics
from visalign.evaluation.statistics.intervals import share_interval
from visalign.interfaces import Scores, score_named
from visalign.pipelines.jobs import load_job
from visalign.pipelines.shared.job import result_folder
from visalign.pipelines.shared.parts import Records, evenly_spaced, no_loading_bars, run_device
from visalign.pipelines.shared.places import place_of, say_places
from visalign.pipelines.shared.reward_options import load_each
from visalign.pipelines.shared.run_folder import resume_command
from visalign.rewards.catalogue import load_text_reward
from visalign.seeds import sample_seed
from visalign.text import Sampling, TextRollout
from visalign.text.messages import prompt_text
from visalign.training.loop.metrics import read_metrics

from .parts import build_text_policy, heldout_inputs, text_sum, with_tool

__all__ = ["diagnose"]

TRAINED = ("text_dpo", "text_grpo", "text_ppo", "text_sft")  # Pipelines whose runs leave a text policy


class _Scored(NamedTuple):
    """P·n scored completions of one policy; the completions of a prompt are neighbours."""

    rollout: TextRollout
    reward: Tensor  # [P, n] float64; NaN where it failed
    solved: Tensor  # [P, n] float64 1 or 0; NaN where the reward failed, or nothing says what solves a prompt
    values: Mapping[str, Tensor]  # label -> [P, n] float64 of each reward, higher is better; NaN where it failed


def diagnose(
    run: Path,
    second: Path | None = None,
    *,
    samples: int = 32,
    prompts: int | None = None,
    rewards: Sequence[str] = (),
    options: Sequence[str] = (),
    right_at: float | None = None,
    margin: float = 0.1,
    noise: float = 0.1,
    seed: int = 0,
) -> dict[str, Any]:
    """Sample a trained text policy and the one that it is compared with, and compare their completions.

    Prompts, rewards and the sampled distribution are those of the held-out evaluation of the last run. With `second`,
    a later run, its policy is the tuned one, and that of `run` the base; without, the base is the model that `run`
    began with. The other keywords are the options of the command; `options` are those of the added `rewards`.
    """
    config, first_config = _config(second or run), _config(run)
    scorer = _Scorer(config, load_each(rewards, options, load_text_reward, None), prompts, right_at)
    base_run = None if second is None else run
    policies = {"base": _policy(first_config, base_run), "tuned": _policy(config, second or run)}
    say_places({name: place_of(policy) for name, policy in policies.items()})
    if policies["base"].tokenizer.get_vocab() != policies["tuned"].tokenizer.get_vocab():
        raise UserError(f"'{run}' and '{second}' are of models with different tokens: nothing to compare.")
    base, tuned = (scorer.sample(policy, samples, seed) for policy in policies.values())
    generator = torch.Generator().manual_seed(seed)
    result = {
        "base": first_config.model.path if second is None else str(run),
        "tuned": str(second or run),
        "prompts": len(scorer.records),
        "samples": samples,
        "correctness": scorer.right,
        "support": None if scorer.right is None else _support(base, tuned, scorer.records, generator),
        "best_of_n": _best_of_n(policies["base"], base, tuned, generator),
        "rewards": _distances(base, tuned, generator),
        "clip": _clip(second or run, base, generator),
        "greedy": {
            "margin": margin,
            "noise": noise,
            "policies": {name: _greedy(policy, scorer, margin, noise, seed) for name, policy in policies.items()},
        },
    }
    return json.loads(summary_json(result))


class _Scorer:
    """Held-out records of a run, the generation of completions to them, and the rewards of these."""

    def __init__(self, config: Any, more: Mapping[str, Any], prompts: int | None, right_at: float | None) -> None:
        if right_at is not None and not math.isfinite(right_at):
            raise UserError(f"--right-at is {right_at}; give a finite reward.")
        records, rewards = heldout_inputs(config, None)
        self.records, self.generation = evenly_spaced(records, prompts), config.generation
        self.rewards, self.correctness = {**rewards, **more, **rewards}, config.evaluation.correctness
        self.right_at = right_at
        self.right = self.correctness if right_at is None else f"a reward of {right_at:g} or better"  # in words
        is_optimized = hasattr(config, "rewards")  # a supervised run optimizes no reward
        label = self.correctness or next(iter(rewards))
        self.reward = text_sum(config.rewards, rewards) if is_optimized else rewards[label]

    @torch.no_grad()
    def generate(self, policy: Any, seeds: Sequence[int], sampling: Sampling) -> TextRollout:
        """Complete each record, as often as there are seeds for it."""
        return with_tool(self.generation, policy, policy, self.records).generate(
            [record["prompt"] for record in self.records],
            seeds=seeds,
            num_generations=len(seeds) // len(self.records),
            sampling=sampling,
            stopping=self.generation.stopping(),
        )

    def sample(self, policy: Any, samples: int, seed: int) -> _Scored:
        """Sample and score `samples` completions of a policy to each record; a seed for each."""
        seeds = [sample_seed(seed, prompt_text(r["prompt"]), i) for r in self.records for i in range(samples)]
        return self.score(self.generate(policy, seeds, self.generation.sampling))

    def score(self, rollout: TextRollout) -> _Scored:
        texts, prompts, samples = list(rollout.text), list(rollout.prompt), len(rollout.text) // len(self.records)
        records = [record for record in self.records for _ in range(samples)]
        rewards = self.rewards.items()
        scores = {label: score_named(reward, texts, prompts, records, name=label) for label, reward in rewards}
        total = score_named(self.reward, texts, prompts, records, name=self.reward.name)
        correct, right = total, torch.full((len(texts),), torch.nan, dtype=torch.float64)
        if self.right_at is not None:
            sign = 1 if self.reward.higher_is_better else -1
            is_right = (sign * total.value.cpu() >= sign * self.right_at).double()
            right = torch.where(total.valid.cpu(), is_right, torch.nan)
        elif self.correctness is not None:
            correct = scores[self.correctness]
            is_right = verdict(self.correctness, self.rewards[self.correctness], correct).double()
            right = torch.where(correct.valid.cpu(), is_right, torch.nan)

        def table(values: Tensor) -> Tensor:
            return torch.where(rollout.generated, values, torch.nan).reshape(-1, samples)

        judged = _value(total) + (0 if self.right is None else right)
        if not bool(judged.isfinite().any()):
            why = next(filter(None, correct.reason or total.reason or []), "no reason given")
            raise UserError(f"None of {len(records)} completions could be scored ({why}).")
        signs = {label: 1 if reward.higher_is_better else -1 for label, reward in self.rewards.items()}
        values = {label: table(signs[label] * _value(score)) for label, score in scores.items()}
        return _Scored(rollout, table(_value(total)), table(right), values)


def _value(scores: Scores) -> Tensor:
    """[B] float64, NaN where the reward failed."""
    return scores.value.cpu().double()


def _config(run: Path) -> Any:
    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"There is no run in '{run}': it has no config.yaml. Give a run folder.")
    config = load_job(str(path)).config
    if config.pipeline not in TRAINED:
        raise UserError(
            f"'{run}' is a run of {config.pipeline}, not of a text policy. Give one of {', '.join(TRAINED)}."
        )
    if not result_folder(config, run).is_dir():
        raise UserError(f"The run in '{run}' is not finished. Go on with {resume_command(str(path), [], run)}.")
    return config


def _policy(config: Any, run: Path | None) -> Any:
    """Load the policy that a run began with, or with `run` its result."""
    changes: dict[str, Any] = {"value": "none"} if hasattr(config.model, "value") else {}
    if run is None and config.model.lora_path is None:
        changes["lora"] = None
    model = replace(config.model, **changes)
    policy = build_text_policy(model, run_device(config.run), config.seed, reference=False)
    if run is not None:
        with no_loading_bars():
            policy.load(result_folder(config, run))
    return policy


def _support(base: _Scored, tuned: _Scored, records: Records, generator: torch.Generator) -> dict[str, Any]:
    """Compute pass@k of both, the crossing of the curves, and the prompts that only one of them solves."""
    points = two_policies.pass_at_k_curves(base.solved, tuned.solved, generator=generator)
    scored = base.solved.isfinite().all(1) & tuned.solved.isfinite().all(1)
    before, after = ((scores.solved == 1).any(1) & scored for scores in (base, tuned))
    crossing_k, is_shown = two_policies.crossing(points)
    only = {"tuned": after & ~before, "base": before & ~after}
    masks = {"preserved": before & after, "expanded": only["tuned"], "shrunk": only["base"]}
    counts = {name: int(mask.sum()) for name, mask in masks.items()}
    return {
        "pass_at_k": [
            {"k": p.k, **{name: getattr(p, name).to_dict() for name in ("base", "tuned", "change")}} for p in points
        ],
        "crossing": {"k": crossing_k, "shown": is_shown},
        "problems": int(scored.sum()),
        **counts,
        **asdict(support_metrics(**counts)),
        "solved_only_by": {
            name: [prompt_text(records[i]["prompt"]) for i in mask.nonzero()[:, 0].tolist()]
            for name, mask in only.items()
        },
    }


def _best_of_n(base: Any, before: _Scored, after: _Scored, generator: torch.Generator) -> dict[str, Any]:
    """Compute reward and KL of the best of n completions of the base, and of the tuned policy."""
    shape = before.reward.shape
    log_prob = before.rollout.full_log_prob.double().sum(1).reshape(shape)
    points = two_policies.best_of_n_curve(before.reward, log_prob, generator=generator)
    with torch.no_grad():
        base_log_prob = base.log_probs(after.rollout, distribution="full").log_prob
    log_ratio = (after.rollout.full_log_prob.double() - base_log_prob.double()).sum(1).reshape(shape)
    log_ratio[~after.rollout.generated.reshape(shape)] = torch.nan
    reward = two_policies.mean_interval(after.reward.nanmean(1), generator=generator)
    equal_n = next((point.n for point in points if point.reward.estimate >= reward.estimate), None)
    bound = {point.n: point.kl_bound for point in points}
    kl = two_policies.mean_interval(log_ratio.nanmean(1), generator=generator)
    rounding = 1e-4  # nats
    is_open = equal_n is None or kl.low - rounding <= bound[equal_n] <= kl.high + rounding
    is_cheaper = None if is_open else kl.high < bound[equal_n]
    return {
        "base": [{**asdict(point), "reward": point.reward.to_dict()} for point in points],
        "tuned": {"reward": reward.to_dict(), "kl": kl.to_dict()},
        "equal_n": equal_n,
        "cheaper_than_bound": is_cheaper,
    }


def _distances(before: _Scored, after: _Scored, generator: torch.Generator) -> list[dict[str, Any]]:
    """Compute the STARC distance of each pair of rewards on the completions of both policies, by prompt."""
    values = {label: torch.cat([before.values[label], after.values[label]], 1) for label in before.values}
    distances = []
    for first, second in combinations(values, 2):
        x, y = values[first], values[second]
        usable = (x + y).isfinite().all(1) & ((x.std(1) > 0) | (y.std(1) > 0))
        interval = two_policies.mean_interval(starc_distance(x[usable], y[usable]), generator=generator)
        prompts = int(usable.sum())
        distances.append({"first": first, "second": second, "prompts": prompts, **interval.to_dict()})
    return distances


@torch.no_grad()
def _greedy(policy: Any, scorer: _Scorer, margin: float, noise: float, seed: int) -> dict[str, Any]:
    """Measure near ties of greedy completions, and the effect of a little noise on the logits.

    The largest logit under Gumbel noise of scale β is a draw at temperature β, so the noisy completions are
    samples of that temperature (The Policy Cliff, arXiv 2507.20150, on argmax at ties).
    """
    names = [prompt_text(record["prompt"]) for record in scorer.records]
    seeds = [sample_seed(seed, name, "noise") for name in names]
    greedy, noisy = (scorer.generate(policy, seeds, Sampling(temperature=scale)) for scale in (0.0, noise))
    unmodified = replace(greedy, sampling=Sampling(), kept=None)  # the gap is of the logits at temperature 1
    gap = policy.log_probs(unmodified, distribution="full", statistic=two_policies.runner_up_gap).statistic
    near = ((gap < margin) & (greedy.loss_mask > 0)).any(1)
    changed = torch.tensor([a != b for a, b in zip(greedy.text, noisy.text, strict=True)])
    first, second = (scorer.score(rollout).reward[:, 0] for rollout in (greedy, noisy))
    shares = {"near_tie": near.double(), "changed": changed.double()}
    means = {"reward": first, "reward_change": second - first, "reward_change_abs": (second - first).abs()}
    generator = torch.Generator().manual_seed(seed)
    return {
        **{name: share_interval(value.numpy(), names).to_dict() for name, value in shares.items()},
        **{name: two_policies.mean_interval(value, generator=generator).to_dict() for name, value in means.items()},
    }


def _clip(run: Path, base: _Scored, generator: torch.Generator) -> dict[str, Any] | None:
    """Measure the bias of the clip in the run's updates, and the advantage at stake with random rewards."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "clip_low" in row]
    if not rows:
        return None
    sides = [torch.tensor([float(row[name]) for row in rows]) for name in ("clip_low", "clip_high")]
    solved, interval = base.solved[base.solved.isfinite().all(1)], None
    if len(solved):
        at_stake = two_policies.advantage_at_stake(solved.sum(1), base.solved.shape[1])
        interval = two_policies.mean_interval(at_stake, generator=generator).to_dict()
    return {**two_policies.clip_bias(*sides), "advantage_at_stake": interval}
