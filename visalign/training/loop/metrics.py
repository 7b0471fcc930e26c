# SPDX-License-Identifier: Apache-2.0
"""Table of all logged metrics with their meanings, and the JSON-lines file that accepts no other key."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS: dict[str, str] = {
    "iteration": "iterations finished; the first line says 1",
    "updates": "optimizer updates done so far in the run",
    "updates_skipped": "updates skipped so far because a gradient was not finite",
    "samples": "images or completions generated for training so far, all processes, those of groups that were dropped "
    "included; in supervised fine-tuning, demonstrations read so far, repeats included; in direct preference "
    "optimization, pairs or votes; in the training of a reward, labelled examples (pairs, triples, images)",
    "tokens": "tokens of these completions so far",
    "reward_mean": "mean reward of the valid samples of the iteration, in the reward's unit; "
    "with rewards.terms.LABEL.bound that of the optimized sum, which moves with its multiplier",
    "reward_std": "standard deviation of the reward over the valid samples, in the reward's unit",
    "reward_group_std": "mean over groups of the standard deviation within a group, in the reward's unit",
    "reward_part/*": "mean of one named part of the reward over the samples that have it; LABEL.std is the "
    "standard deviation that the reward itself gives",
    "agreement/*": "rank agreement of the optimized reward with one that is only recorded (a term of "
    "weight 0): Kendall's τ-b within groups, mean over groups, −1 to 1",
    "recorded/*": "mean of that reward over the samples, in its unit, higher is better",
    "recorded_std/*": "mean over groups of its standard deviation within a group",
    "agreement_change/*": "mean of agreement/LABEL over the latest `monitor.window` iterations less that "
    "over the first",
    "recorded_change/*": "the same of recorded/LABEL, divided by recorded_std/LABEL of the first iterations",
    "group_std_ratio": "mean of reward_group_std over the latest iterations over that of the first: a reward "
    "that no longer tells a prompt's samples apart",
    "judge_std_ratio/*": "the same for the reward's own standard deviation, reward_part/LABEL.std",
    "gradient_ratio": "mean of grad_norm over the latest iterations over that of the first",
    "image/*": "means over the images: brightness (luma), saturation, contrast (std of the luma), "
    "high_frequency (share of its energy above half of the Nyquist frequency), all 0 to 1",
    "diversity": "images: mean cosine distance of two of a group in the features of `monitor.features`; "
    "completions: distinct-2, different pairs of neighbouring tokens of a group over all of them",
    "diversity_ratio": "mean of diversity over the latest iterations over that of the first",
    "scout_agreement": "rank agreement of a sample's reward with its reward in the pool of `rollout.scout`: Kendall's "
    "τ-b within groups, mean over groups, −1 to 1; low where too few steps choose by chance",
    "reward_multiplier/*": "Lagrange multiplier of one reward that has a bound (rewards.terms.LABEL.bound)",
    "reward_weight/*": "weight of one reward in the sum of the advantages (objective.balance_every)",
    "valid_share": "share of samples that the reward could score, 0 to 1",
    "frac_reward_zero_std": "share of samples whose advantage is zero, 0 to 1: their group's rewards are all "
    "equal, or could not be scored",
    "trained_share": "share of samples that were back-propagated, 0 to 1; 1 whenever the KL weight is above zero",
    "advantage_abs": "mean absolute advantage over the valid samples; for a text policy over its tokens",
    "length_mean": "mean length of the iteration's completions, tokens",
    "repetition": "mean share of a completion's runs of four tokens that it had before (seq-rep-4), 0 to 1",
    "truncated_share": "share of completions that met the length limit, 0 to 1",
    "entropy": "mean over completions of the mean entropy of the distributions of their tokens, nats "
    "(arXiv 2505.22617, eq. 5)",
    "entropy_token": "mean entropy over all tokens alike: long completions count more, nats",
    "entropy_answer": "entropy of the answers to one prompt, mean over groups, nats; at most ln of the group's "
    "size. Of rewards that name answers (task_answer, verifiable ones)",
    "entropy_drop": "entropy of the iteration before less that of this one, −ΔH, nats; of other prompts",
    "entropy_drop_foreseen": "learning rate times covariance/mean, summed over the updates in between; of plain "
    "policy gradient it foresees entropy_drop, of AdamW up to a factor (arXiv 2505.22617)",
    "covariance/*": "covariance of a token's log π and advantage over the iteration's tokens (mean), and the mean "
    "over the tokens where it is largest, by their share in per cent (top_0.02 to top_50)",
    "engine_gap": "mean |log π_old - log μ| per token between the policy and the engine that sampled, nats",
    "groups/*": "dynamic sampling: rounds; groups generated, kept (with signal), dropped as all right, all "
    "wrong or without spread, and surplus",
    "loss/*": "share of one term in the loss, coefficient included, mean over updates: policy, kl, average, value, "
    "entropy, ptx, replay; of few-step training the loss of the critic and of the surrogate",
    "tools/*": "means over completions: a tool's answers (calls), of these cut short (cut), completions "
    "whose tool failed (failed)",
    "process_reward/*": "PRIME: loss and accuracy of its process reward, and updates skipped as not finite",
    "latent_flow/*": "RLFR: loss of flow matching on right completions, mean over its steps (loss)",
    "discriminator/*": "adversarial reward: loss on the iteration's samples and references, and the share of both "
    "that it told apart before it learnt from them (accuracy; 0.5: no better than chance)",
    "replay/*": "self-imitation: samples kept (size) and drawn to be learnt from again (samples), the "
    "baseline of their advantages, the weight of their loss",
    "kl_old": "mean k3 estimate of KL(π_old‖π) over trained tokens as they were trained, nats; with a "
    "target, over all tokens after the last step",
    "penalty": "coefficient of PPO-KL's penalty, or of SAFE's KL term, in the iteration",
    "value_explained": "share of the returns' variance that the value function explained before the update",
    "loss": "loss of the iteration's updates, mean over updates; includes the KL term",
    "perplexity": "exp of the mean −log π of the iteration's given tokens, before each update",
    "ratio_mean": "mean of the probability ratio r over trained (image, step) pairs; near 1",
    "ratio_std": "root mean square of r - 1 over trained pairs: how far the updates moved the policy",
    "ratio_max": "largest |log r| over trained pairs",
    "ratio_floor": "largest |log r| at the iteration's first update, where r should be 1: the numerical floor",
    "clip_range": "the smaller of the two clip bounds; the floor must be well below it",
    "clip_low": "share of trained decisions (denoising steps, tokens) with a negative advantage and no "
    "gradient, whatever rule took it: the clip at 1 - eps_low, a mask",
    "clip_high": "the same of decisions with a positive advantage: the clip at 1 + eps_high, a mask",
    "kl": "mean Gaussian KL to the reference over trained pairs, nats (per latent number with "
    "log_prob_reduction mean; with kl_form velocity mean |v − v_ref|²); of a text policy the k3 estimate per "
    "token; of KTO its reference point, per completion",
    "rewards/*": "direct preference optimization: mean implicit reward of chosen and rejected completions "
    "(of votes, good and bad ones) as the loss has it, β log π/π_ref, their margins, and accuracies: the "
    "share of pairs whose chosen completion has the higher one, of votes that are on the right side of kl",
    "logps/*": "direct preference optimization: mean log π of a whole completion, chosen and rejected, nats",
    "label_mean": "direct preference optimization whose labels move: their mean over the pairs as they were "
    "visited, 1 where each chosen completion is taken for the better one",
    "match_error": "regressions of images: mean |v − (ε − x0)|² per latent number over trained pairs, the "
    "pretraining loss on the policy's own samples",
    "anchor_distance": "regressions of images: mean |v − v_anchor|² over trained pairs, the anchor the old "
    "policy or the reference",
    "teacher_distance": "few-step training: mean |x̂0 - x̂_real| of the student's predictions and the teacher's",
    "surrogate_stopped": "few-step training: share of samples that move the surrogate no further",
    "reward_gradient": "training through the reward's gradient: its mean L2 norm in the pixels of an "
    "image, all terms together",
    "grad_norm": "L2 norm of the gradient before clipping, mean over updates",
    "lr": "learning rate of the iteration's last update",
    "adam_resolution": "median of √v̂/ε of AdamW over the trained numbers that had a gradient; below 10, ε "
    "takes a visible part of the steps",
    "loss_scale": "factor of the loss against float16's underflow, where the network computes in float16",
    "forward_equivalents_per_image": "transformer forwards per image counted as they ran; a backward counts two",
    "seconds": "wall-clock seconds of the iteration",
    "seconds/*": "wall-clock seconds of one phase: rollout, decode, reward, replay (log-probs before the "
    "update), update, sync, monitor, evaluation, checkpoint, other",
    "samples_per_second": "training samples per second of the iteration, evaluation and checkpoint not counted",
    "heldout/*": "evaluation on held-out prompts with the averaged weights, fixed seeds and ODE sampling; "
    "feature_distance, mean cosine distance of an image from that of the same prompt and seed before training, "
    "feature_frechet, squared Fréchet distance from these, feature_drift, the former over the mean distance of two of "
    "these; change/LABEL, the mean change since before training, in its standard errors, of the accuracy and of "
    "rewards of weight 0; REWARD.low and REWARD.high, the 95 % interval over prompts of the mean of an optimized "
    "reward, accuracy_low and accuracy_high that of the accuracy; for a reward on held-out labels: accuracy (where "
    "the truth is clear) with accuracy_low and accuracy_high, accuracy_shorter (of texts whose better one is the "
    "shorter one), accuracy_all, nll (nats per vote), ece, std_mean, std_auroc, std_auroc_votes, std_auroc_lead, "
    "mass_low; for ratings mae, srcc and mass_low; for boxes around faults mae and srcc of the plausibility and "
    "heat_auroc of the map; for answers to a checklist answer_accuracy and answer_nll; for critiques the share of "
    "right ones critique_right, critique_accuracy, critique_auroc, critique_nll; for a process reward loss, accuracy, "
    "accuracy_right and accuracy_wrong on right and wrong labels, and their number (labels)",
}
"""Key -> meaning and unit. A key that ends in `/*` stands for a family of keys."""


def check_keys(record: Mapping[str, Any]) -> None:
    """Refuse keys that the table does not list."""
    for key in record:
        family = key.split("/", 1)[0] + "/*" if "/" in key else key
        if family not in METRICS:
            raise KeyError(
                f"metric {key!r} is not in visalign.training.loop.metrics.METRICS; add it there with its "
                "meaning and unit."
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics file; a half-written last line of a killed run is ignored."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{path} line {number} is not JSON ({error}); the file was edited or damaged."
                ) from error
    return records


class MetricsFile:
    """Appends one JSON line per iteration, after removing lines of iterations later than `after`.

    So a resumed run leaves the same file as an uninterrupted one; 0 starts over.
    """

    def __init__(self, path: Path, *, after: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = [record for record in read_metrics(path) if record["iteration"] <= after]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(_line(record) for record in earlier), encoding="utf-8")
        os.replace(temporary, path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; values that are not finite become null."""
        check_keys(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"
