# SPDX-License-Identifier: Apache-2.0
"""Families G_reward_rules and F_pairwise_multireward: judges' texts, P(yes) from a list, checklist, layout.

Our readers refuse what they cannot read; where a record holds a peer's numbers, the peer's filling (0, a
batch mean) is put in here, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.golden_families import Outputs, Row, family
from visalign.rewards.chat.yes_no import read_yes_no
from visalign.rewards.hpsv3.loading import current_key
from visalign.rewards.questions.checklist import ChecklistRule
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import (
    LIFT_VALUES,
    final_score,
    lift_label,
    quality_score,
    rational_mean,
    rational_scores,
)
from visalign.rewards.reading.verdicts import flex_answer, verdict
from visalign.vision.patches import smart_resize


def _or(read: Callable[[], Any], failure: Any) -> Any:
    """What is read, or what stands for a failure."""
    try:
        return read()
    except AnswerError:
        return failure


def _texts(case: Any) -> list[str]:
    return ["" if text is None else str(text) for text in case.inputs["text"]]


def _smart_resize(case: Any) -> Outputs:
    sizes = case.inputs["height_width"]
    return {"size": [list(smart_resize(height, width, whole_tokens=True, **case.params)) for height, width in sizes]}


def _keys(case: Any) -> Outputs:
    return {"new": [current_key(key) for key in case.inputs["old"]]}


def _quality(case: Any) -> Outputs:
    low, high = case.params["valid_range"]
    return {"value": [_or(lambda t=t: quality_score(t, low=low, high=high), math.nan) for t in _texts(case)]}


def _yes_no_list(case: Any) -> Outputs:
    answers = [_or(lambda row=row: read_yes_no(row), None) for row in case.inputs["top_logprobs"]]
    return {
        "prob": [math.nan if row is None else row.prob for row in answers],
        "log_odds": [math.nan if row is None else row.log_odds for row in answers],
        "mass": [0.0 if row is None else row.mass for row in answers],
    }


def _checklist(case: Any) -> Outputs:
    rule = ChecklistRule.from_dict(case.params)
    return {"score": rule.score(case.tensor("answers_yes"), case.tensor("alignment"))}


def _unified(case: Any) -> Outputs:
    """The record holds peers' numbers alone; those of verl-omni and Pref-GRPO guess where an aspect is missing."""
    return {"outputs_peer": {"flow_grpo_final": [_or(lambda t=t: final_score(t), 0.0) for t in _texts(case)]}}


def _lift(case: Any) -> Outputs:
    return {"score": [_or(lambda t=t: LIFT_VALUES[lift_label(t)], math.nan) for t in _texts(case)]}


def _rational(case: Any) -> Outputs:
    parsed = [rational_scores(text) for text in _texts(case)]
    return {"parsed": parsed, "reward": [_or(lambda p=p: rational_mean(p), "error") for p in parsed]}


def _judge_strings(case: Any) -> Outputs:
    options = case.params["sentences"]
    return {"verdict": [_or(lambda t=t: verdict(t, options=options), None) for t in _texts(case)]}


def _flex_strings(case: Any) -> Outputs:
    """A tie is no winner there."""
    return {"winner": [_or(lambda t=t: flex_answer(t).winner, None) or None for t in _texts(case)]}


RULES: tuple[Row, ...] = (
    (".*smart_resize.*", _smart_resize, ("factor", "min_pixels", "max_pixels"), ("height_width",)),
    (".*state_dict_keys.*", _keys, (), ("old",)),
    (".*answer_parsing.*", _quality, ("valid_range",), ("text",)),
    (".*p_yes_top_logprobs.*", _yes_no_list, (), ("top_logprobs",)),
    (
        ".*visionreward_checklist.*",
        _checklist,
        ("mask_questions", "masked_features", "coef", "intercept"),
        ("answers_yes", "alignment"),
    ),
    (".*unifiedreward_parse.*", _unified, (), ("text",)),
    (".*lift_labels.*", _lift, (), ("text",)),
    (".*rational_rewards_parse.*", _rational, (), ("text",)),
)
PAIRS: tuple[Row, ...] = (
    (".*flex_winner_strings.*", _flex_strings, (), ("text",)),
    (".*judge_strings.*", _judge_strings, ("sentences",), ("text",)),
)


FAMILIES = {"G_reward_rules": family(RULES, exact=True), "F_pairwise_multireward": family(PAIRS, exact=True)}
