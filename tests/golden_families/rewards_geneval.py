# SPDX-License-Identifier: Apache-2.0
"""Golden families of GenEval's rules and of the OCR reward."""

from __future__ import annotations

from typing import Any

from tests.golden_families import Outputs, Row, family
from visalign.rewards.verifiers.geneval_rules import Detected, box_iou, judge, relative_position
from visalign.rewards.verifiers.ocr import text_score


def _boxes(case: Any) -> list[tuple[Any, Any]]:
    return list(zip(case.inputs["box_a"], case.inputs["box_b"], strict=True))


def _iou(case: Any) -> Outputs:
    return {"iou": [box_iou(a, b) for a, b in _boxes(case)]}


def _relations(case: Any) -> Outputs:
    threshold = case.params["position_threshold"]
    relations = [relative_position(a, b, threshold=threshold) for a, b in _boxes(case)]
    return {"relations": [sorted(names) for names in relations]}


def _evaluate(case: Any) -> Outputs:
    threshold = case.params["position_threshold"]
    verdicts = []
    for objects, record in zip(case.inputs["objects"], case.inputs["metadata"], strict=True):
        boxes = {
            kind: [Detected(tuple(item["box"]), item["score"], item["color"]) for item in items]
            for kind, items in objects.items()
        }
        verdicts.append(judge(boxes, record, position_threshold=threshold))
    return {"correct": [v.correct for v in verdicts], "strict_correct": [v.strict for v in verdicts]}


def _ocr(case: Any) -> Outputs:
    pairs = list(zip(case.inputs["target"], case.inputs["recognised"], strict=True))

    def column(rule: str, failure: Any) -> list[Any]:
        scores = [text_score(target, recognised, rule=rule) for target, recognised in pairs]
        return [failure if score is None else score for score in scores]

    # flow_grpo divides by the length of an empty target ("error"); ours has no score for it.
    return {
        "flow_grpo": column("flow_grpo", "error"),
        "verl_omni": column("verl_omni", "error"),
        "outputs_strict": {"without_substring_rule": column("plain", "error")},
    }


RULES: tuple[Row, ...] = (
    (".*", _iou, (), ("box_a", "box_b")),
    (".*", _relations, ("position_threshold",), ("box_a", "box_b")),
    (".*", _evaluate, ("position_threshold",), ("objects", "metadata")),
    (".*", _ocr, (), ("target", "recognised")),
)
FAMILIES = {"G_reward_rules": family(RULES, exact=True)}
