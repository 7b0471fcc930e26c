# SPDX-License-Identifier: Apache-2.0
"""The held-out evaluation of a text policy: counted by hand on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.training.text import RECORDS, Letters, toy_policy
from visalign.errors import UserError
from visalign.evaluation import joined
from visalign.evaluation.heldout.text import check_text_judge, evaluate_text
from visalign.interfaces import Scores
from visalign.seeds import sample_seed
from visalign.text import Sampling, StoppingCriteria

STOP = StoppingCriteria(max_new_tokens=4)


class HasVowel(Letters):
    """1 where a completion has a vowel; cannot judge the prompt "g"."""

    def score(self, completions, prompts, metadata=None):
        value = torch.tensor([float(any(c in "aeiou" for c in text)) for text in completions])
        valid = torch.tensor([prompt != "g" for prompt in prompts])
        return Scores(
            value=torch.where(valid, value, torch.nan),
            valid=valid,
            unit="1 = has one",
            text=["looked"] * len(completions),
            reason=[None if v else "not g" for v in valid.tolist()],
        )


def _evaluate(records=RECORDS, seeds=(0, 1, 2), policy=None, rewards=None, **options):
    settled = {"sampling": Sampling(), "stopping": STOP, "correctness": "vowel", **options}
    return evaluate_text(policy or toy_policy(), rewards or {"vowel": HasVowel()}, records, seeds=seeds, **settled)


@pytest.fixture(scope="module")
def result():
    return _evaluate()


def test_every_number_is_counted_again_by_hand(result):
    policy = toy_policy()
    for index, record in enumerate(RECORDS):
        rows = slice(3 * index, 3 * index + 3)
        seeds = [sample_seed("heldout", record["prompt"], s) for s in (0, 1, 2)]
        own = policy.generate([record["prompt"]], seeds=seeds, num_generations=3, stopping=STOP)
        has = [any(c in "aeiou" for c in text) for text in own.text]
        greedy = policy.generate([record["prompt"]], seeds=0, sampling=Sampling(temperature=0), stopping=STOP)
        if record["prompt"] == "g":
            assert not result.judged[rows].any() and set(result.reasons[rows]) == {"not g"}
            assert np.isnan(result.scores["greedy"][rows]).all()
            assert np.isnan(result.scores["any_of_samples"][rows]).all()
            continue
        assert result.correct[rows].tolist() == has and result.judged[rows].all()
        assert result.scores["any_of_samples"][rows].tolist() == [float(any(has))] * 3
        expected = float(any(c in "aeiou" for c in greedy.text[0]))
        assert result.scores["greedy"][rows].tolist() == [expected] * 3
        lengths = own.loss_mask.sum(1)
        assert result.scores["length"][rows].tolist() == lengths.tolist()
        mean = ((own.entropy * own.loss_mask).sum(1) / lengths).numpy()
        assert result.scores["token_entropy"][rows] == pytest.approx(mean, rel=1e-5)


def test_stretches_of_processes_make_the_whole_where_one_has_no_verdict(result):
    parts = [_evaluate(RECORDS[:2]), _evaluate(RECORDS[2:3]), _evaluate(RECORDS[3:])]
    assert "any_of_samples" not in parts[1].scores
    merged = joined(parts)
    assert merged.completions == result.completions and merged.correct.tolist() == result.correct.tolist()
    assert merged.units == result.units and merged.scores.keys() == result.scores.keys()
    for name, values in result.scores.items():
        assert merged.scores[name] == pytest.approx(values, rel=1e-4, nan_ok=True), name


def test_what_cannot_be_evaluated_is_refused():
    with pytest.raises(UserError, match=r"'vowels' is not among vowel\. Did you mean 'vowel'"):
        _evaluate(correctness="vowels")
    with pytest.raises(UserError, match="label 'length' is the name of a measure"):
        _evaluate(rewards={"length": Letters()}, correctness=None)


def test_a_reward_that_cannot_say_right_or_wrong_is_no_judge():
    class Grade(Letters):
        range = (0.0, 10.0)

    check_text_judge("letters", Letters(), RECORDS[0])
    with pytest.raises(UserError, match=r"cannot judge the first held-out record \(unreadable\)"):
        check_text_judge("letters", Letters(fail=lambda text, record: True), RECORDS[0])
    with pytest.raises(UserError, match="cannot say correct or wrong"):
        check_text_judge("grade", Grade(), RECORDS[0])


def test_a_prompt_that_was_too_long_has_no_verdict():
    judged: list[str] = []

    class Seen(HasVowel):
        def score(self, completions, prompts, metadata=None):
            judged.extend(prompts)
            return super().score(completions, prompts, metadata)

    policy = toy_policy(max_prompt_tokens=3, long_prompts="mask")
    result = _evaluate(seeds=[0], policy=policy, rewards={"vowel": Seen()})
    assert judged and max(map(len, judged)) <= 3, "an empty completion is not asked about"
    nothing = _evaluate([record for record in RECORDS if len(record["prompt"]) > 3], seeds=[0], policy=policy)
    assert not nothing.judged.any() and set(nothing.reasons) == {"prompt too long"}
    long = np.array([len(prompt) > 3 for prompt in result.prompts])
    assert long.sum() == 2 and not result.judged[long].any() and result.judged[~long].any()
    assert {result.reasons[i] for i in np.flatnonzero(long)} == {"prompt too long"}
    assert np.isnan(result.scores["length"][long]).all() and np.isnan(result.scores["greedy"][long]).all()
