# SPDX-License-Identifier: Apache-2.0
"""Ensembles and the use of uncertainty: every aggregation by hand, directions, failures, pools."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.judges.brightness import Brightness, grey
from visalign.interfaces import RewardCapabilities, Scores
from visalign.rewards import RewardError, check_reward, load_images
from visalign.rewards.base.identity import Identity
from visalign.rewards.combine.calibrated import Calibrated
from visalign.rewards.combine.ensemble import Ensemble
from visalign.rewards.combine.uncertainty import UncertaintyUsed

NAN = float("nan")


class Fixed:
    """Brightness times a factor; cannot judge images darker than a limit."""

    range = (0.0, 3.0)

    def __init__(
        self, factor: float, *, unit: str = "u", std: float | None = None, better: bool = True, limit: float = 0.0
    ) -> None:
        self.name = f"fixed_{factor}"
        self.factor, self.unit, self.std, self.higher_is_better, self.limit = factor, unit, std, better, limit

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        level = torch.tensor([NAN if im is None else float(im.mean()) for im in load_images(images).images])
        valid = level >= self.limit
        value = torch.where(valid, level * self.factor, NAN)
        std = None if self.std is None else torch.full_like(value, self.std)
        reason = [None if ok else "too dark" for ok in valid.tolist()]
        return Scores(value=value, valid=valid, unit=self.unit, std=std, reason=reason)


def _score(how: str = "mean", **options: Any) -> Scores:
    members = {"a": Fixed(1), "b": Fixed(2), "c": Fixed(3)}
    return Ensemble(members, how=how, **options).score(grey([0.5]), ["p"])


def test_a_deviation_that_is_not_known_is_no_certainty() -> None:
    members = {"a": Fixed(1, std=0.3), "b": Fixed(2, std=NAN), "c": Fixed(3)}
    scores = Ensemble(members).score(grey([0.5]), ["p"])
    assert scores.value.tolist() == [1] and bool(scores.valid[0])
    assert scores.std is not None and bool(scores.std.isnan()[0])
    assert bool(scores.parts["aleatoric"].isnan()[0]) and scores.parts["epistemic"].tolist() == [0.5]
    complete = Ensemble({"a": Fixed(1, std=0.3), "c": Fixed(3)}).score(grey([0.5]), ["p"])
    assert complete.parts["aleatoric"].tolist() == pytest.approx([0.3 / math.sqrt(2)])


def test_aggregations_by_hand() -> None:
    # members 0.5, 1.0, 1.5: mean 1, variance 0.25 (ddof 1)
    assert float(_score().value) == pytest.approx(1) and float(_score("min").value) == pytest.approx(0.5)
    assert float(_score("lower_bound", strength=2.0).value) == pytest.approx(1 - 2 * 0.5)
    assert float(_score("uwo", strength=2.0).value) == pytest.approx(1 - 2 * 0.25)
    assert float(_score("uwo", strength=3.0, ddof=0).value) == pytest.approx(1 - 3 / 6)
    scores = _score()
    assert float(scores.parts["epistemic"]) == pytest.approx(0.5) and float(scores.parts["members"]) == 3
    assert [float(scores.parts[key]) for key in "abc"] == pytest.approx([0.5, 1.0, 1.5])
    assert float(_score(ddof=0).parts["epistemic"]) == pytest.approx((1 / 6) ** 0.5)


def test_total_variance_adds_the_members_own() -> None:
    scores = Ensemble({"a": Fixed(1, std=0.3), "b": Fixed(2, std=0.4), "c": Fixed(3)}).score(grey([0.5]), ["p"])
    aleatoric = (0.09 + 0.16 + 0) / 3
    assert float(scores.parts["aleatoric"]) == pytest.approx(aleatoric**0.5)
    assert scores.std is not None and float(scores.std) == pytest.approx((aleatoric + 0.25) ** 0.5)


def test_where_lower_is_better_careful_is_larger() -> None:
    members = {"a": Fixed(1, better=False), "b": Fixed(3, better=False)}
    reward = Ensemble(members, how="min")
    assert not reward.higher_is_better and float(reward.score(grey([0.5]), ["p"]).value) == pytest.approx(1.5)
    bound = Ensemble(members, how="lower_bound", ddof=0)
    assert float(bound.score(grey([0.5]), ["p"]).value) == pytest.approx(1 + 0.5)
    assert bound.range == (0.0, math.inf)


def test_calibration_makes_units_and_directions_one() -> None:
    members = {"a": Fixed(1, unit="u"), "b": Fixed(2, unit="v", better=False, std=0.5)}
    reward = Ensemble(members, calibration={"a": (0.25, 0.5), "b": (2.0, 0.25)})
    scores = reward.score(grey([0.5]), ["p"])
    assert [float(scores.parts[key]) for key in "ab"] == pytest.approx([0.5, 4.0])
    assert float(scores.value) == pytest.approx(2.25) and float(scores.parts["aleatoric"]) == pytest.approx(2**0.5)
    assert reward.unit == "reference standard deviations" and reward.higher_is_better
    assert reward.range == (-4.0, 8.0)


def test_a_member_that_fails() -> None:
    members = {"a": Fixed(1), "b": Fixed(2), "c": Fixed(3, limit=0.3)}
    strict = Ensemble(members).score(grey([0.2, 0.5]), ["p"] * 2)
    assert strict.valid.tolist() == [False, True] and strict.reason is not None
    assert strict.reason[0] == "2 of 3 members judged it: c: too dark" and bool(strict.value[:1].isnan())
    assert strict.parts["a"].tolist() == pytest.approx([0.2, 0.5]) and bool(strict.parts["epistemic"][:1].isnan())
    lenient = Ensemble(members, min_members=2).score(grey([0.2, 0.5]), ["p"] * 2)
    assert lenient.value.tolist() == pytest.approx([0.3, 1.0]) and lenient.parts["members"].tolist() == [2, 3]
    one = Ensemble(members, min_members=2).score(["no.png", grey([0.5])[0]], ["p"] * 2)
    assert one.reason is not None and one.reason[0] == "no such image file: no.png"


class Named(Brightness):
    def __init__(self, model: str, std: float | None = None) -> None:
        super().__init__(std=std)
        self.identity = Identity(judge="brightness", model=model)


def test_identities_follow_members_and_rules() -> None:
    members = {"a": Named("m"), "b": Named("n")}
    first = Ensemble(members).identity
    assert first is not None and first == Ensemble(dict(members)).identity
    for other in (
        Ensemble(members, how="min"),
        Ensemble({**members, "b": Named("o")}),
        Ensemble(members, min_members=1),
        Ensemble(members, calibration={"a": (0.0, 1.0), "b": (0.0, 2.0)}),
    ):
        assert other.identity is not None and other.identity.digest != first.digest
    assert Ensemble({**members, "b": Brightness()}).identity is None
    used = [
        UncertaintyUsed(Named("m", std=0.1)),
        UncertaintyUsed(Named("n", std=0.1)),
        UncertaintyUsed(Named("m", std=0.1), strength=2.0),
    ]
    assert len({reward.identity.digest for reward in used if reward.identity is not None}) == 3
    bhattacharyya = UncertaintyUsed(Named("m", std=0.1), how="bhattacharyya")
    assert bhattacharyya.identity is None and bhattacharyya.capabilities.needs_batch


def test_ensembles_keep_the_contract() -> None:
    members = {"a": Brightness(std=0.1), "b": Brightness(std=0.2), "c": Brightness()}
    for how in ("mean", "min", "lower_bound", "uwo"):
        assert check_reward(Ensemble(members, how=how))


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ({"a": Fixed(1)}, {}, "1 members; an ensemble needs at least two"),
        ({"a": Fixed(1), "b": Fixed(2, unit="v")}, {}, "different units .a: 'u', b: 'v'.*calibration="),
        ({"a": Fixed(1), "b": Fixed(2, better=False)}, {}, "different directions"),
        ({"a": Fixed(1), "b": Fixed(2)}, {"how": "max"}, "how is 'max'; allowed are mean, min"),
        ({"a": Fixed(1), "b": Fixed(2)}, {"min_members": 3}, "min_members is 3; allowed are 1 to 2"),
        (
            {"a": Fixed(1), "b": Fixed(2)},
            {"min_members": 1, "how": "lower_bound"},
            "min_members is 1; allowed are 2 to 2, the members, as one alone has no spread",
        ),
        ({"a": Fixed(1), "b": Fixed(2)}, {"calibration": {"a": (0, 1)}}, "calibration has no .* for b"),
        ({"a": Fixed(1), "b": Fixed(2)}, {"calibration": {key: (0, 1) for key in "abc"}}, "names c; the members are"),
        ({"a": Fixed(1), "b": Fixed(2)}, {"calibration": {"a": (0, 1), "b": (0, 0)}}, r"ion\['b'\] is \(0, 0\)"),
    ],
)
def test_what_cannot_be_averaged_is_refused(members: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ensemble(members, **options)


# uncertainty in use


def test_bound_and_weight_by_hand() -> None:
    reward = Fixed(2, std=0.25)
    bound = UncertaintyUsed(reward, strength=2.0).score(grey([0.5]), ["p"])
    assert float(bound.value) == pytest.approx(1 - 0.5) and float(bound.parts["mean"]) == 1
    weight = UncertaintyUsed(reward, how="weight", strength=4.0, reference=0.2).score(grey([0.5]), ["p"])
    assert float(weight.value) == pytest.approx(0.2 + 0.8 * math.exp(-1))
    assert float(weight.parts["weight"]) == pytest.approx(math.exp(-1))
    assert float(weight.parts["uncertainty"]) == 0.25 and weight.std is not None


def test_doubt_never_raises_a_reward_below_the_reference_above_it() -> None:
    value = {}
    for std in (0.1, 2.0):
        wrapped = UncertaintyUsed(Fixed(1, std=std), how="weight", reference=0.5)
        value[std] = wrapped.score(grey([0.2, 0.8]), ["p"] * 2).value
    assert value[0.1][0] < value[2.0][0] < 0.5 < value[2.0][1] < value[0.1][1]
    lower = UncertaintyUsed(Fixed(1, std=0.25, better=False)).score(grey([0.5]), ["p"])
    assert float(lower.value) == pytest.approx(0.75)
    for strength in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"strength is {strength}; allowed are finite numbers from 0"):
            UncertaintyUsed(Fixed(1, std=0.25), strength=strength)


def test_the_overlap_is_with_the_other_samples() -> None:
    reward = UncertaintyUsed(Fixed(2, std=0.5), how="bhattacharyya", strength=0.5)
    scores = reward.score([*grey([0.5, 1.0]), "no.png"], ["p"] * 3)
    overlap = math.exp(-1 / (8 * 0.25))  # BC of N(1, .25) and N(2, .25)
    assert scores.parts["uncertainty"][:2].tolist() == pytest.approx([overlap] * 2, abs=5e-3)
    assert scores.value[:2].tolist() == pytest.approx([1 - 0.5 * overlap, 2 - 0.5 * overlap], abs=1e-2)
    assert not scores.valid[2]


def test_uncertainty_keeps_the_contract_and_needs_a_std() -> None:
    for how in ("lower_bound", "weight", "bhattacharyya"):
        assert check_reward(UncertaintyUsed(Brightness(std=0.2), how=how))
    members = {"a": Fixed(1), "b": Fixed(2)}
    assert float(UncertaintyUsed(Ensemble(members)).score(grey([0.5]), ["p"]).value) == pytest.approx(0.75 - 0.5**1.5)
    with pytest.raises(RewardError, match="'brightness' gives no standard deviation"):
        UncertaintyUsed(Brightness()).score(grey([0.5]), ["p"])
    compares: Any = Fixed(1, std=0.1)
    compares.capabilities = RewardCapabilities(needs_group=True, needs_batch=True)
    pair = {"a": compares, "b": Fixed(2)}
    for reward in (UncertaintyUsed(compares), Ensemble(pair), Calibrated(compares, [0.0, 1.0])):
        assert reward.capabilities.needs_group and reward.capabilities.needs_batch
    assert not UncertaintyUsed(Fixed(1)).capabilities.needs_batch


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="how is 'entropy'; allowed are lower_bound, weight, bhattacharyya"):
        UncertaintyUsed(Brightness(std=0.1), how="entropy")
