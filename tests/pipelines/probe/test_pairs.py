# SPDX-License-Identifier: Apache-2.0
"""`visalign probe-reward` on judges that compare: planted weaknesses found, honesty not accused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.judges.brightness import BrightnessPairs, grey
from tests.support.judges.hackable import (
    AveragesBothOrders,
    ComparesBy,
    GoesInCircles,
    LooksAtNeighbours,
    PrefersTheLeft,
    Remembered,
)
from visalign.errors import UserError
from visalign.evaluation.probes.catalogue import PAIR_PROBES, Sample, select_probes
from visalign.interfaces import RewardCapabilities
from visalign.pipelines.cli.app import app
from visalign.pipelines.probe.job import probe_reward, probes_for, write_probe
from visalign.pipelines.probe.reference import Reference, read_reference, shapes_reference_set
from visalign.pipelines.score.image_rows import ImageRow
from visalign.rewards import as_pairwise
from visalign.rewards.verifiers.shapes_verifier import ShapesVerifier

OF_THE_JUDGE = ["identical", "position", "swap", "transitivity"]
SOME = [*OF_THE_JUDGE, "saturation", "white_border", "pasted_text", "other_prompt", "neighbours", "form"]
AMONG_REAL = ["empty_among_real", "changed_among_real"]


@cache
def world() -> Reference:
    """40 images of the shapes world with two others each."""
    return shapes_reference_set(40)


def tried(judge: Any, names: list[str], reference: Reference | None = None) -> dict[str, Any]:
    """The result of these probes."""
    result = probe_reward(judge, reference or world(), probes=select_probes(names, PAIR_PROBES))
    json.dumps(result, allow_nan=False)
    return result


def verdicts(result: Mapping[str, Any]) -> dict[str, str]:
    return {probe["name"]: probe["verdict"] for probe in result["probes"]}


def levels(result: Mapping[str, Any], probe: str) -> dict[str, Mapping[str, Any]]:
    [selected] = [entry for entry in result["probes"] if entry["name"] == probe]
    return {entry["label"]: entry for entry in selected["levels"]}


def test_an_honest_judge_is_not_accused() -> None:
    judge = as_pairwise(Remembered(ShapesVerifier("partial")))
    result = tried(judge, [*SOME, *AMONG_REAL, "blank", "mirror", "spelling"])
    by_probe = verdicts(result)
    assert "fails" not in by_probe.values(), by_probe
    surely = [*OF_THE_JUDGE, "empty_among_real", "blank", "mirror", "white_border", "neighbours", "form"]
    assert {by_probe[name] for name in surely} == {"holds"}
    [same] = levels(result, "identical").values()
    assert (same["judged"], same["failed"], same["largest"]) == (40, 0, 0.0), "between equal images: 0.5"
    [circles] = levels(result, "transitivity").values()
    assert circles["share"] == 0.0 and 0.1 < circles["chance"] <= 0.3
    [shuffled] = levels(result, "other_prompt").values()
    assert shuffled["mean"] < -0.5 and shuffled["turned"] > 0.2, "it looks at the prompt"
    assert all(level["win"] < 0.25 for level in levels(result, "empty_among_real").values())


def test_love_of_the_left_is_found() -> None:
    result = tried(PrefersTheLeft(1.5), SOME)
    by_probe = verdicts(result)
    assert {by_probe[name] for name in ("identical", "position", "swap")} == {"fails"}
    assert "fails" not in {by_probe[name] for name in set(SOME) - {"identical", "position", "swap"}}
    [same], [position] = levels(result, "identical").values(), levels(result, "position").values()
    spread = result["reference"]["spread"]
    assert same["mean"] == pytest.approx(1.5 / spread) and position["mean"] == pytest.approx(1.5 / spread)
    assert levels(result, "swap")["two real images"]["share"] < 0.5


def test_circles_are_found() -> None:
    result = tried(GoesInCircles(), OF_THE_JUDGE, shapes_reference_set(64))
    by_probe = verdicts(result)
    assert by_probe["transitivity"] == "fails" and by_probe["identical"] == by_probe["swap"] == "holds"
    [circles] = levels(result, "transitivity").values()
    assert circles["share"] == pytest.approx(0.25, abs=0.1) and circles["chance"] == pytest.approx(0.25, abs=0.02)
    assert circles["share_low"] < circles["share"] < circles["share_high"]


def test_a_look_at_the_neighbours_is_found() -> None:
    result = tried(ComparesBy(LooksAtNeighbours()), ["neighbours", "form"])
    assert verdicts(result) == {"neighbours": "fails", "form": "holds"}


def test_a_judge_that_averages_both_orders_itself_is_asked_once(tmp_path: Path) -> None:
    judge = AveragesBothOrders(1.5)
    result = tried(judge, ["identical", "position", "black_border"])
    assert result["reference"]["one_order"] and verdicts(result)["position"] == "holds"
    assert judge.asked == 2 * 40 * (2 + 1 + 3), "twice real pairs, then once each"
    result["reference"]["strangers"] = 7
    page = write_probe(tmp_path, result, world()).read_text()
    assert "It averages both orders itself" in page
    assert "7 of 40 reference samples are the only one of their prompt" in page

    class OnlySaysSo(PrefersTheLeft):
        capabilities = RewardCapabilities(both_orders=True)

    unproved = tried(OnlySaysSo(1.5), ["position"])
    assert not unproved["reference"]["one_order"] and verdicts(unproved)["position"] == "fails"


def by_hand(*brightness: float, rivals: tuple[float, ...] = ()) -> Reference:
    """Even grey images of one prompt, each with its rival, or with the next two, as others."""
    images = list(grey(list(brightness)).mul(255).round() / 255)
    samples = tuple(Sample(image, "grey") for image in images)
    others = tuple((samples[(k + 1) % len(samples)], samples[(k + 2) % len(samples)]) for k in range(len(samples)))
    if rivals:
        rival_images = grey(list(rivals)).mul(255).round() / 255
        others = tuple((Sample(image, "grey"),) for image in rival_images)
    return Reference("by hand", samples, (None,) * len(samples), others=others)


def test_responses_and_win_rates_by_hand() -> None:
    # ℓ = 10 (a − b) of 0.2, 0.4, 0.8 against 0.4, 0.8, 0.6: −2, −4 and 2; s = √((4 + 16 + 4) / 3 / 2) = 2.
    judge, own, rivals = BrightnessPairs(scale=10.0, bias=0.5), (0.2, 0.4, 0.8), (0.4, 0.8, 0.6)
    result = tried(judge, ["brightness", "blank", "position", "empty_among_real"], by_hand(*own, rivals=rivals))
    assert result["reference"]["spread"] == pytest.approx(2.0, rel=1e-3)
    assert result["reference"]["mean"] == pytest.approx(-4 / 3, rel=1e-3)
    [position] = levels(result, "position").values()
    assert position["mean"] == pytest.approx(0.5 / 2, rel=1e-3)
    darker = levels(result, "brightness")["× 0.6"]
    odds = [10 * -0.4 * level for level in own]
    assert darker["mean"] == pytest.approx(sum(odds) / 3 / 2, rel=2e-2), "the place cancels"
    assert darker["win"] == pytest.approx(mean_probability(odds), rel=2e-2)
    black = levels(result, "empty_among_real")["black"]
    # −4, −8 and −6 against the others, less −2, −4 and 2.
    assert black["mean"] == pytest.approx((-2 - 4 - 8) / 3 / 2, rel=1e-2)
    assert black["win"] == pytest.approx(mean_probability([-4, -8, -6]), rel=2e-2)
    assert black["win_before"] == pytest.approx(mean_probability([-2, -4, 2]), rel=1e-2)


def mean_probability(log_odds: Sequence[float]) -> float:
    """The mean of σ."""
    return sum(1 / (1 + math.exp(-value)) for value in log_odds) / len(log_odds)


def test_failures_are_counted_with_reasons_in_either_order() -> None:
    judge = BrightnessPairs(fails=lambda left, right: left > 0.99)
    result = tried(judge, ["blank", "brightness"], by_hand(0.2, 0.4, 0.6, 0.8))
    white, black = (levels(result, "blank")[name] for name in ("white", "black"))
    assert (white["judged"], white["failed"], white["win"]) == (0, 4, None)
    assert white["reasons"] == {"no answer": 4} and white["verdict"] == "not judged"
    assert (black["judged"], black["failed"]) == (4, 0)
    turned = tried(BrightnessPairs(fails=lambda left, right: right > 0.99), ["blank"], by_hand(0.2, 0.4, 0.6))
    assert levels(turned, "blank")["white"]["reasons"] == {"in the other order: no answer": 3}


def test_pairs_that_fail_are_left_out_everywhere() -> None:
    judge = BrightnessPairs(fails=lambda left, right: {left, right} == {0.2, 0.4})
    result = tried(judge, ["identical", "other_prompt", "transitivity"], by_hand(0.2, 0.4, 0.6, 0.8))
    reference = result["reference"]
    assert (reference["judged"], reference["failed"], reference["reasons"]) == (3, 1, {"no answer": 1})
    [same] = levels(result, "identical").values()
    assert same["judged"] == 3
    [shuffled] = levels(result, "other_prompt").values()
    assert (shuffled["judged"], shuffled["left_out"]) == (0, 3), "all have the same prompt"
    [circles] = levels(result, "transitivity").values()
    assert (circles["judged"], circles["failed"]) == (2, 1), "0.8, 0.2, 0.4 lacks its last side"


def test_what_cannot_be_probed_is_said() -> None:
    with pytest.raises(UserError, match="brightness_pairs gives all 3 pairs of reference samples the same answer, so"):
        probe_reward(BrightnessPairs(scale=0.0), by_hand(0.2, 0.4, 0.6))

    with pytest.raises(ValueError, match="There is no probe 'swap'"):  # it scores single images
        probes_for(ShapesVerifier(), ["blank", "swap"])


def test_the_others_of_ones_own_images(tmp_path: Path) -> None:
    prompts = ["three", "two", "three", "one", "three", "two"]
    rows = []
    for number, prompt in enumerate(prompts):
        Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append(ImageRow(image=str(tmp_path / f"{number}.png"), prompt=prompt))
    reference = read_reference("here", rows)
    rivals = [reference.rivals(row) for row in range(len(rows))]
    contents = [[(round(float(rival.image[0, 0, 0]) * 25.5), rival.prompt) for rival in row] for row in rivals]
    threes = [[(a, "three"), (b, "three")] for a, b in ((2, 4), (4, 0), (0, 2))]
    assert contents == [threes[0], [(5, "two")], threes[1], [(4, "one"), (5, "one")], threes[2], []]
    assert reference.strangers == 1
    with pytest.raises(UserError, match="judged 0 of 0 pairs of reference samples, and 2 are needed"):
        probe_reward(BrightnessPairs(), read_reference("here", rows[:1]))


JUDGE = """
import torch
from visalign.interfaces import Preferences

class LikesTheFirst:
    name = "likes_<the>_first"

    def compare(self, left, right, prompts, metadata=None):
        odds = 20 * (left.mean((1, 2, 3)) - right.mean((1, 2, 3))) + 2
        return Preferences(prob=odds.sigmoid(), valid=torch.ones(len(odds), dtype=torch.bool))
"""


def test_the_command_takes_ones_own_judge(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(JUDGE)
    names = [*OF_THE_JUDGE, "brightness", "empty_among_real"]
    arguments = ["probe-reward", "mine.py:LikesTheFirst", "--count", "12", "-o", "out"]
    outcome = CliRunner().invoke(app, [*arguments, *(part for name in names for part in ("--only", name))])
    output = " ".join(outcome.output.split())
    assert outcome.exit_code == 1, outcome.output
    assert "of 6 probes move it: an image against itself, left and right exchanged" in output
    assert "12 of 12 pairs of reference samples (shapes world)" in output
    assert "50.0 %" in output and "by chance" in output
    result = json.loads(Path("out/probe.json").read_text())
    assert result["judge"]["kind"] == "comparisons" and list(verdicts(result)) == names
    page = Path("out/probe.html").read_text()
    assert "likes_<the>" not in page and "likes_&lt;the&gt;_first" in page
    for words in ("the very same answer", "by chance 50.0", "<small>wins ", "the same winner: at least", "Share"):
        assert words in page, words
    assert page.count("<img") == page.count('alt="') == 1 + 6 + 6
    refused = CliRunner().invoke(app, ["probe-reward", "saturation", "--only", "transitivity"])
    assert refused.exit_code == 2 and "There is no probe 'transitivity'" in " ".join(refused.output.split())
