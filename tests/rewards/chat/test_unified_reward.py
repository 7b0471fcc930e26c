# SPDX-License-Identifier: Apache-2.0
"""Judges behind a server: UnifiedReward, LiFT, DeepSeek-GRM, yes/no; values by hand, failures masked."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.servers.chat import chat, sent_images, serving, words
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.rewards import load_reward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_judge
from visalign.rewards.chat.deepseek_grm import DeepSeekGRM
from visalign.rewards.chat.lift import Lift
from visalign.rewards.chat.server import ChatServer
from visalign.rewards.chat.unified_reward import UnifiedReward
from visalign.rewards.chat.unified_reward_pairs import UnifiedRewardPairs
from visalign.rewards.chat.yes_no import YesNoServer
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import listed_scores
from visalign.rewards.vlm.published import published_prompt

QUICK = {"retries": 0, "timeout": 5.0, "max_failure_rate": 1.0}


def bright(*levels: float) -> torch.Tensor:
    """Plain grey images [N, 3, 4, 4]."""
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).mul(255).round() / 255


def light(body) -> list[float]:
    return [float(image.mean()) / 255 for image in sent_images(body)]


def caption(body) -> str:
    captions = re.findall(r"Caption: \[(.*)\]", words(body))
    return captions[-1]


def aspects(a: float, c: float, s: float) -> str:
    return f"Alignment Score (1-5): {a}\nCoherence Score (1-5): {c}\nStyle Score (1-5): {s}"


def test_points_of_three_aspects():
    def answer(body):
        shade = light(body)[0]
        return chat(aspects(1 + 4 * shade, 2, 3) if caption(body) == "a cat" else "It is nice.")

    with serving(answer) as stub:
        judge = UnifiedReward(stub.url, "tiny", **QUICK)
        scores = judge.score(bright(0, 1, 0.2), ["a cat", "a cat", "a dog"])
    assert isinstance(judge, PointwiseReward)
    assert scores.value[:2].tolist() == pytest.approx([2, 10 / 3])
    assert scores.valid.tolist() == [True, True, False] and math.isnan(scores.value[2])
    assert scores.parts["alignment"][:2].tolist() == [1, 5] and scores.parts["alignment"][2].isnan()
    assert scores.reason == [None, None, "the judge's text gives no score for alignment, coherence, style"]
    assert scores.text is not None and scores.text[0].startswith("Alignment") and scores.text[2] == ""
    assert scores.std is None and scores.unit == "points from 1 to 5"


def test_final_score_its_spread_and_its_standard_error():
    with serving(lambda body: chat(f"Final Score: {(2, 3, 4, 9)[body['seed']]}")) as stub:
        judge = UnifiedReward(stub.url, "tiny", mode="final", answers=4, temperature=1.0, **QUICK)
        scores = judge.score(bright(0.5), ["a cat"])
        assert scores.value.tolist() == [3] and scores.parts["readable"].tolist() == [0.75]
        assert scores.parts["spread"].tolist() == [1], "of 2, 3 and 4"
        assert scores.std is not None and scores.std.tolist() == pytest.approx([1 / math.sqrt(3)])
        lonely = UnifiedReward(stub.url, "tiny", mode="final", answers=2, seed=2, temperature=1.0, **QUICK)
        lost = lonely.score(bright(0.5), ["a cat"])
    assert not lost.valid[0] and lost.std is not None and lost.std.isnan().all()
    assert lost.reason == ["1 of 2 answers failed, the first so: the judge's number 9 is outside [1, 5]"]


def test_unreadable_images_and_empty_prompts_are_not_sent(tmp_path):
    Image.new("L", (4, 4), 51).save(tmp_path / "a.png")
    with serving(lambda body: chat("Final Score: 2")) as stub:
        judge = UnifiedReward(stub.url, "tiny", mode="final", **QUICK)
        scores = judge.score([tmp_path / "a.png", tmp_path / "b.png", tmp_path / "a.png"], ["a", "a", " "])
    assert scores.valid.tolist() == [True, False, False]
    assert "no such image file" in str(scores.reason) and "empty" in str((scores.reason or [])[2])
    assert len(stub.asked) == 1


PIXELS = torch.randint(0, 256, (3, 3, 8, 8), generator=torch.Generator().manual_seed(1)).float() / 255
"""Three noisy images of different mean."""


def _hash(body) -> int:
    return int(sum(int(image.astype("int64").sum()) for image in sent_images(body)))


JUDGES = {
    "unified_reward": lambda body: chat(aspects(1 + _hash(body) % 5, 2, 3)),
    "lift": lambda body: chat(("Good", "Normal", "Bad")[_hash(body) % 3]),
    "deepseek_grm": lambda body: chat(rf"\boxed{{{1 + (_hash(body) + body['seed']) % 10}}}"),
    "yes_no_server": lambda body: chat("y", finish="length", logprobs={"yes": -1 - _hash(body) % 7 / 7, "no": -1.0}),
}


def test_identity_changes_with_everything_that_changes_a_score():
    base = UnifiedReward("http://a", "m").identity
    assert base == UnifiedReward("http://b", "m").identity
    variants = [
        UnifiedReward("http://a", "n").identity,
        UnifiedReward("http://a", "m", mode="final").identity,
        UnifiedReward("http://a", "m", template="Rate {prompt}").identity,
        UnifiedReward("http://a", "m", seed=1).identity,
        UnifiedReward("http://a", "m", extra={"top_k": 1}).identity,
    ]
    assert len({base.digest, *(variant.digest for variant in variants)}) == 6
    assert len({YesNoServer("http://a", "m", temperature=t).identity.digest for t in (0, 1)}) == 2


def prefer_brighter(body) -> str:
    first, second = light(body)
    return "Image 1 is better" if first > second else "Image 2 is better" if second > first else "Both are equal"


def page(body) -> str:
    first, second = light(body)
    side = "Image 1" if first > second else "Image 2"
    return json.dumps({"categories": [{"name": "look", "cat_winner": "Image 1"}], "winner": side})


PAIR_ANSWERS = {
    "rank": lambda body: chat(prefer_brighter(body)),
    "think": lambda body: chat(f"<think>Image 1 is better?</think><answer>{prefer_brighter(body)}</answer>"),
    "score": lambda body: chat(
        "Image 1: {:.3f}\nImage 2: {:.3f}".format(*(shade / (sum(light(body)) or 1) for shade in light(body)))
    ),
    "flex": lambda body: chat(page(body)),
}


@pytest.mark.parametrize(
    ("mode", "expected", "bias"),
    [
        ("rank", [1, 0, 0.5], [0, 0, 0]),
        ("think", [1, 0, 0.5], [0, 0, 0]),
        ("score", [0.75, 0.25, 0.5], [0, 0, 0]),
        # the category always goes to the first: half of its weight each way
        ("flex", [0.75, 0.25, 0.5], [0.25, 0.25, 0]),
    ],
)
def test_pairs_in_both_orders(mode, expected, bias):
    left, right = bright(0.6, 0.2, 0.4), bright(0.2, 0.6, 0.4)
    with serving(PAIR_ANSWERS[mode]) as stub:
        judge = load_judge("unified_reward_pairs", base_url=stub.url, model="tiny", mode=mode, **QUICK)
        assert isinstance(judge, PairwiseReward)
        preferences = judge.compare(left, right, ["a cat"] * 3)
    assert preferences.prob.tolist() == pytest.approx(expected, abs=2e-3) and preferences.valid.all()
    assert preferences.parts["position_bias"].tolist() == pytest.approx(bias, abs=2e-3)
    # the second row is the first one turned: two requests for both, and one of equals
    assert len(stub.asked) == 3


DIGESTS = {
    "aspects": "75d52d3ae771",
    "final": "f56f919ce3bc",
    "rank": "0fd2f5c43a06",
    "score": "828e9ab2f81c",
    "think": "342f6a4bd0ef",
    "think_qwen3": "a8a0d8081824",
    "flex": "bd0c2d5635a7",
    "edit_rank": "7677b54f3278",
    "edit_following": "b9c27cd06366",
    "edit_quality": "ddb40baa511d",
}
"""Of the texts in the repository's scripts, with {prompt} for their caption or instruction."""


def test_the_published_questions_are_asked_word_for_word():
    texts = {name: published_prompt(f"unified_reward_{name}") for name in DIGESTS}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}
    assert digests == DIGESTS
    with serving(lambda body: chat("Image 1 is better")) as stub:
        UnifiedRewardPairs(stub.url, "tiny", both_orders=False, **QUICK).compare(bright(0.6), bright(0.2), ["a {cat}"])
        own = UnifiedRewardPairs(stub.url, "tiny", both_orders=False, template="Which? {prompt}", **QUICK)
        own.compare(bright(0.6), bright(0.2), ["a"])
    expected = (published_prompt("unified_reward_rank").replace("{prompt}", "a {cat}"), "Which? a")
    for body, text in zip(stub.asked, expected, strict=True):
        kinds = [part["type"] for part in body["messages"][0]["content"]]
        assert kinds == ["image_url", "image_url", "text"], "nothing between the images"
        assert words(body) == text


def test_version_2_scores_a_pair_by_aspects():
    names = ("Alignment", "Coherence", "Style")
    shares = dict(zip(names, (0.9, 0.1, 0.41), strict=True))
    text = "\n\n".join(f"{n} Score:\n Image 1: {v}\n Image 2: {1 - v}" for n, v in shares.items())
    with serving(lambda body: chat(text if "whole" in words(body) else text.split("\n\n")[0])) as stub:
        judge = UnifiedRewardPairs(stub.url, "tiny", mode="score", both_orders=False, **QUICK)
        preferences = judge.compare(bright(0.6, 0.6), bright(0.2, 0.2), ["whole", "part"])
    assert preferences.prob[0].item() == pytest.approx(1.41 / 3)
    assert [preferences.parts[name.lower()][0].item() for name in names] == pytest.approx([0.9, 0.1, 0.41])
    assert "gives no scores for coherence, style" in str((preferences.reason or [])[1])


def test_flex_counts_three_categories_by_name():
    names = ("alignment", "quality", "art", "personal")
    winners = [{"name": name, "cat_winner": f"Image {1 + (name == 'personal')}"} for name in names]
    with serving(lambda body: chat(json.dumps({"categories": winners, "winner": "Image 1"}))) as stub:
        options = {"mode": "flex", "both_orders": False, **QUICK}
        judge = UnifiedRewardPairs(stub.url, "tiny", **options)
        published = UnifiedRewardPairs(stub.url, "tiny", flex_categories="first_three", **options)
        values = [j.compare(bright(0.6), bright(0.2), ["a"]).prob.item() for j in (judge, published)]
    assert values == pytest.approx([(1 + 3 / 4) / 2, 1])
    assert judge.identity.differences(published.identity) == ["options"]


def test_edits_are_shown_behind_their_source():
    def answer(body):
        shades = light(body)
        if len(shades) == 3:
            return chat(f"Image {1 + (shades[1] < shades[2])} is better" if shades[0] == 1 else "?")
        success = 25 if len(shades) == 2 and shades[0] == 1 else 0
        return chat(f'{{"reasoning": "short", "score": [{success}, 15]}}')

    source = {"source": Image.new("RGB", (4, 4), "white")}
    with serving(answer) as stub:
        pairs = UnifiedRewardPairs(stub.url, "tiny", mode="edit_rank", **QUICK)
        better = pairs.compare(bright(0.6, 0.6), bright(0.2, 0.2), ["darker"] * 2, [source, None])
        judge = UnifiedReward(stub.url, "tiny", mode="edit_following", **QUICK)
        missing = [source, {}, {"source": "nowhere.png"}]
        scores = judge.score(bright(0.6, 0.6, 0.6), ["darker"] * 3, missing)
        quality = UnifiedReward(stub.url, "tiny", mode="edit_quality", **QUICK).score(bright(0.6), [""])
    assert better.prob[0] == 1 and better.valid.tolist() == [True, False]
    assert scores.value[0] == 20 and scores.parts["success"][0] == 25 and scores.unit == "points from 0 to 25"
    assert scores.valid.tolist() == [True, False, False] and scores.reason is not None
    assert scores.reason[1] == 'its record has no "source", the image that was edited'
    assert str(scores.reason[2]).startswith("the source image: ")
    assert quality.value[0] == 7.5 and quality.parts["no_artifacts"][0] == 15
    with pytest.raises(AnswerError, match="asked for is a list of 2 numbers"):
        listed_scores('{"score": [3]}')


def test_a_pair_needs_both_orders_and_both_images():
    def answer(body):
        return chat(prefer_brighter(body)) if light(body)[0] > light(body)[1] else "!close"

    images_left = [Image.new("RGB", (4, 4), "white"), "nowhere.png", Image.new("RGB", (4, 4), "white")]
    with serving(answer) as stub:
        judge = UnifiedRewardPairs(stub.url, "tiny", **QUICK)
        preferences = judge.compare(images_left, [Image.new("RGB", (4, 4), "black")] * 3, ["a", "a", ""])
        with pytest.raises(ValueError, match="1 images and 2 prompts"):
            judge.compare(bright(0.1), bright(0.1), ["a", "b"])
    assert not preferences.valid.any() and preferences.prob.isnan().all()
    parts = ("with the right image first: .*broke off", "the left image: no such", "prompt is empty")
    for reason, part in zip(preferences.reason or [], parts, strict=True):
        assert re.search(part, str(reason))


def test_pairs_with_several_answers():
    with serving(lambda body: chat(f"Image {1 + (body['seed'] == 3)} is better")) as stub:
        judge = UnifiedRewardPairs(stub.url, "tiny", answers=4, temperature=1.0, **QUICK)
        preferences = judge.compare(bright(0.6), bright(0.2), ["a"])
    # 3 of 4 for the first image in each order
    assert preferences.prob.tolist() == [0.5] and preferences.parts["left_first"].tolist() == [0.75]
    assert preferences.std is not None and preferences.std.tolist() == pytest.approx([math.sqrt(2 * 0.25 / 4) / 2])


def test_lift():
    def answer(body):
        if "true to life" in words(body):
            return chat("Bad" if light(body)[0] < 0.5 else "hard to say")
        return chat("Good, not Bad")

    with serving(answer) as stub:
        scores = Lift(stub.url, "tiny", **QUICK).score(bright(0.2, 0.8), ["a", "b"])
        own = Lift(stub.url, "tiny", questions={"motion": "Is it smooth?"}, **QUICK).score(bright(0.8), ["a"])
    assert scores.value[0].item() == pytest.approx((0.9 + 0.05) / 2)
    assert scores.parts["fidelity"][0].item() == pytest.approx(0.05)
    assert not scores.valid[1] and scores.reason is not None
    assert str(scores.reason[1]).startswith("fidelity: the judge must state one of Good, Normal, Bad")
    assert own.value.item() == pytest.approx(0.9) and list(own.parts) == ["motion"]


def test_lift_spread():
    with serving(lambda body: chat(("Good", "Bad")[body["seed"]])) as stub:
        scores = Lift(stub.url, "tiny", answers=2, temperature=1.0, **QUICK).score(bright(0.2), ["a"])
    error = 0.85 / math.sqrt(2) / math.sqrt(2)  # of two answers to one question; the value is the mean of two
    assert scores.std is not None and scores.std.item() == pytest.approx(error * math.sqrt(2) / 2)


def test_grm_sums_votes_and_scales_for_those_that_fail():
    texts = {0: r"\boxed{4}", 1: r"\boxed{6}", 2: r"\boxed{8}", 3: "no score"}
    with serving(lambda body: chat(texts[body["seed"]])) as stub:
        judge = DeepSeekGRM(stub.url, "tiny", answers=4, **QUICK)
        scores = judge.score(bright(0.5), ["a"])
    assert judge.range == (4, 40) and judge.unit == "sum of 4 scores from 1 to 10"
    assert scores.value.tolist() == [24] and scores.parts["mean"].tolist() == [6]
    assert scores.parts["votes"].tolist() == [3]
    assert scores.std is not None and scores.std.tolist() == pytest.approx([4 * 2 / math.sqrt(3)])
    assert set(scores.parts) == {"mean", "votes", "readable", "spread"}


def test_the_meta_judge_keeps_the_best_samples():
    odds = {"4": 2.0, "6": -1.0, "8": 1.0, "9": None}

    def answer(body):
        if "A judge wrote" not in words(body):
            return chat(rf"critique \boxed{{{(4, 6, 8, 9)[body['seed']]}}}")
        score = re.findall(r"boxed\{(\d)\}", words(body))[0]
        shift = odds[score]
        listed = {"Maybe": -0.1} if shift is None else {"yes": shift - 3, "no": -3.0}
        return chat("y", finish="length", logprobs=listed)

    with serving(answer) as stub:
        judge = DeepSeekGRM(stub.url, "tiny", answers=4, k_meta=2, **QUICK)
        scores = judge.score(bright(0.5), ["a"])
        odds |= {"4": None, "6": None, "8": None}
        lost = judge.score(bright(0.5), ["a"])
    assert scores.value.tolist() == [12] and scores.parts["votes"].tolist() == [2]
    assert scores.parts["meta"].tolist() == [1.5] and scores.text == [r"critique \boxed{4}"]
    assert not lost.valid[0] and lost.reason is not None
    assert str(lost.reason[0]).startswith("the meta judge rated none of 4 samples: 4 of 4 answers failed")


def test_yes_no_of_a_server():
    log_probs = {
        "cat": {" Yes": math.log(0.6), "no": math.log(0.2), "Maybe": math.log(0.1)},
        "dog": {"yes": math.log(0.9), "The": math.log(0.05)},
        "cow": {"The": -0.1},
        "pig": {"yes": math.log(0.02), "no": math.log(0.03), "The": -0.1},
        "hen": {},
    }
    with serving(
        lambda body: chat("", finish="length", logprobs=log_probs[words(body).split("Text: ")[1].split("\n")[0]])
    ) as stub:
        sent_images = bright(0.5).repeat(5, 1, 1, 1)
        scores = YesNoServer(stub.url, "tiny", **QUICK).score(sent_images, list(log_probs))
    assert scores.valid.tolist() == [True, False, False, False, False]
    assert scores.value[0] == pytest.approx(math.log(3)) and scores.parts["prob"][0] == pytest.approx(0.75)
    parts = ("no is not among 2", "neither yes nor no is among", "probability 0.05", "no top_logprobs")
    for reason, part in zip((scores.reason or [])[1:], parts, strict=True):
        assert part in str(reason)
    body = stub.asked[0]
    assert body["max_tokens"] == 1 and body["logprobs"] is True and body["top_logprobs"] == 20


def test_the_command_line_finds_the_server_in_the_environment(tmp_path: Path, monkeypatch):
    from typer.testing import CliRunner

    from visalign.pipelines.cli.app import app

    Image.new("L", (4, 4), 51).save(tmp_path / "a.png")
    command = ["score", str(tmp_path / "a.png"), "-p", "a cat", "-r", "yes_no_server", "-f", "json"]
    with serving(lambda body: chat("y", finish="length", logprobs={"yes": -1.0, "no": -2.0})) as stub:
        for name, value in (("URL", stub.url), ("MODEL", "tiny"), ("KEY", "secret")):
            monkeypatch.setenv(f"VISALIGN_JUDGE_{name}", value)
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and stub.keys == ["Bearer secret"]
    assert json.loads(result.stdout)[0]["value"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UnifiedReward(), "base_url is None and model None; give the address"),
        (lambda: load_reward("unified_reward", mode="points"), "mode is 'points'; allowed are aspects, final"),
        (lambda: UnifiedReward("http://a", "m", template="Rate it"), r"the template has no \{prompt\}"),
        (lambda: UnifiedReward("http://a", server=ChatServer("http://a", "m")), "not both"),
        (lambda: Lift("http://a", "m", template="{prompt}"), r"no \{question\}"),
        (lambda: YesNoServer("http://a", "m", top_logprobs=1), "top_logprobs is 1"),
        (lambda: load_reward("unified_reward_pairs", base_url="http://a", model="m"), "compares two images"),
    ],
)
def test_options_refused(make, message):
    with pytest.raises((RewardError, ValueError), match=message):
        make()
