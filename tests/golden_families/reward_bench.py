# SPDX-License-Identifier: Apache-2.0
"""Family N_reward_rules: SPCT's rule over n scores, and RewardBench's accuracies.

A section without results is 0 at the peer and undefined here; the peer's 0 is put in here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.golden_families import Outputs, Row, family
from visalign.core import best_response_reward
from visalign.evaluation.rewards.rewardbench import best_of_n_credit, ties_score
from visalign.evaluation.statistics.agreement import policy_credit
from visalign.evaluation.statistics.intervals import ratio


def _spct(case: Any) -> Outputs:
    return {"reward": int(best_response_reward(case.tensor("scores"), case.tensor("true_rewards")))}


def _spct_batch(case: Any) -> Outputs:
    rows = zip(case.inputs["scores"], case.inputs["true_rewards"], strict=True)
    return {"reward": [int(best_response_reward(torch.tensor(s), torch.tensor(r))) for s, r in rows]}


def _pairs(case: Any) -> Outputs:
    margin, label = np.subtract(case.inputs["chosen"], case.inputs["rejected"]), np.ones(len(case.inputs["chosen"]))
    strict, half = (policy_credit(name, margin, label)[0] for name in ("calc_ImageReward", "half_credit"))
    accuracies = {"accuracy_strict": strict.mean(), "accuracy_half": half.mean()}
    return {"correct": strict.astype(int), "ties": int((margin == 0).sum()), **accuracies}


def _sections(case: Any) -> Outputs:
    """Micro accuracy of a slice of `evaluate`: Σ credit / Σ pairs."""
    counts, accuracy = case.inputs["examples"], case.inputs["accuracy"]
    sections = {name: [s for s in subsets if s in accuracy] for name, subsets in case.inputs["sections"].items()}
    shares = {
        name: ratio(np.array(sum(accuracy[s] * counts[s] for s in subsets)), np.array(sum(counts[s] for s in subsets)))
        for name, subsets in sections.items()
    }
    return {"section_scores": {name: np.nan_to_num(share) for name, share in shares.items()}}


def _best_of_4(case: Any) -> Outputs:
    credit = [best_of_n_credit(np.subtract(row[0], row[1:])) for row in case.inputs["scores"]]
    return {"results": credit, "accuracy": np.mean(credit)}


def _ties(case: Any) -> Outputs:
    tables: dict[str, list[Any]] = {"tied": [], "ref": []}
    gap, spread = [], []
    for kind, right, scores in zip(*(case.inputs[k] for k in ("kind", "right_answers", "scores")), strict=True):
        table = np.subtract.outer(scores[:right], scores[right:])
        tables[kind].append(table)
        gap.append(table.min())
        spread.append(np.ptp(table[:, 0]) if kind == "tied" else np.nan)
    score = ties_score(tables["tied"], tables["ref"])
    return {"score": score, "accurate": [int(g > 0) for g in gap], "spread": spread, "gap": gap}


RULES: tuple[Row, ...] = (
    (r"spct_worked_\d+", _spct, ("length",), ("scores", "true_rewards")),
    (r"spct_batch", _spct_batch, (), ("scores", "true_rewards")),
    (r"rewardbench_pairs", _pairs, (), ("chosen", "rejected")),
    (r"rewardbench2_best_of_4", _best_of_4, ("length",), ("scores",)),
    (r"rewardbench2_ties", _ties, (), ("kind", "question", "right_answers", "scores")),
    (r"rewardbench_sections", _sections, (), ("examples", "accuracy", "sections")),
)
FAMILIES = {"N_reward_rules": family(RULES, exact=True)}
