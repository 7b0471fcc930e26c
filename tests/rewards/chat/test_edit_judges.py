# SPDX-License-Identifier: Apache-2.0
"""EditScore, RationalRewards, rubrics: published words, values by hand, failures that are no scores."""

from __future__ import annotations

import hashlib
import math

import pytest
from PIL import Image

from tests.rewards.chat.test_unified_reward import JUDGES, PIXELS, QUICK, bright, light
from tests.support.servers.chat import chat, sent_images, serving, words
from visalign.rewards import check_reward, load_reward
from visalign.rewards.chat.edit_score import EditScore
from visalign.rewards.chat.rational_rewards import Mode, RationalRewards
from visalign.rewards.chat.rubric import Rubric
from visalign.rewards.vlm.published import published_prompt

SOURCES = [{"source": Image.new("RGB", (4, 4))}] * 3


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def points(*scores: float) -> dict:
    return chat(f'{{"reasoning": "so", "score": {list(scores)}}}')


def test_edit_score_asks_in_the_published_words():
    words_of = [digest(published_prompt(f"edit_score_{part}")) for part in ("following", "quality")]
    assert words_of == ["80bac216c8f7", "8249deba103d"]
    labelled = EditScore("http://localhost:1/v1", "tiny", labelled=True)
    beginnings = [part.get("text", "")[:8] for part in labelled.template.messages[0]["content"]]
    assert beginnings == ["<img1>: ", "", "<img2>: ", "", "You are "], "vision ids of Qwen2.5-VL's"


def test_edit_score_is_the_root_of_the_smaller_numbers():
    def answer(body):
        shades = light(body)
        if len(shades) == 2:
            assert shades[0] == 0 and "Editing instruction: make it red" in words(body)
            return points(20, 10) if shades[1] < 0.6 else points(25, 30)
        return points(22.5, 15)

    with serving(answer) as stub:
        judge = EditScore(stub.url, "tiny", **QUICK)
        records = [*SOURCES[:1], {}, *SOURCES[:1], {"source": 5}]
        scores = judge.score(bright(0.2, 0.4, 1, 1), ["make it red"] * 4, records)
    assert scores.value[0] == pytest.approx(math.sqrt(4 * 6)), "√(min(20, 10) · min(22.5, 15)) / 2.5"
    parts = {key: float(values[0]) for key, values in scores.parts.items()}
    assert parts == {"prompt_following": 8, "consistency": 4, "perceptual_quality": 6}
    assert scores.valid.tolist() == [True, False, False, False] and scores.reason is not None
    assert "the source image: images[0] is a int" in str(scores.reason[3])
    assert 'no "source"' in str(scores.reason[1]) and "30 is outside [0, 25]" in str(scores.reason[2])


def test_passes_are_averaged_and_a_failed_one_is_left_out():
    def answer(body):
        if len(sent_images(body)) == 1:
            return points(25, 25)
        return points(*((25, 25), (0, 0), (16, 20))[body["seed"]]) if body["seed"] < 3 else chat("no")

    with serving(answer) as stub:
        judge = EditScore(stub.url, "tiny", answers=4, temperature=0.7, **QUICK)
        scores = judge.score(bright(0.5), ["a"], SOURCES[:1])
    assert scores.value[0] == pytest.approx((10 + 0 + 8) / 3) and scores.parts["readable"][0] == 0.75
    assert scores.std is not None and scores.std[0] == pytest.approx(math.sqrt(28) / math.sqrt(3))


JUDGEMENT = """# Detailed Judgement
1. Text Faithfulness:
## Justification: it says Score: high.
## Score: {}
2. {}Physical and Visual Quality:
## Score: 3.5
{}. Text Rendering:
## Score: N/A
# Summary: Score: 1
"""


def test_rational_rewards_asks_in_the_published_words():
    digests: dict[Mode, str] = {"generation": "15fe536eeb56", "edit": "a7396bad9e43"}
    for mode, expected in digests.items():
        system, user = RationalRewards("http://localhost:1/v1", "tiny", mode=mode).template.messages
        assert digest(system["content"] + "".join(p.get("text", "<image>") for p in user["content"])) == expected


def test_rational_rewards_averages_the_applicable_aspects():
    def answer(body):
        if len(sent_images(body)) == 2:
            return chat(JUDGEMENT.format("**2**", "Image Faithfulness:\n## Score: 4\n3. ", 4))
        return chat(JUDGEMENT.format("5.0", "", 3) if light(body)[0] > 0.5 else "It is nice.")

    with serving(answer) as stub:
        judge = RationalRewards(stub.url, "tiny", **QUICK)
        scores = judge.score(bright(1, 0), ["a", "a"])
        edits = RationalRewards(stub.url, "tiny", mode="edit", **QUICK).score(bright(1), ["a"], SOURCES[:1])
    assert scores.value[0] == pytest.approx((3.75 - 1) / 3), "5 is held at 4; N/A is left out"
    assert scores.parts["text_rendering"][0].isnan() and scores.parts["physical_quality"][0] == 3.5
    assert not scores.valid[1] and "gives no score for Text Faithfulness, Physical" in str(scores.reason)
    assert edits.value[0] == pytest.approx((9.5 / 3 - 1) / 3) and edits.parts["image_faithfulness"][0] == 4


def _rubric(body):
    text = words(body)
    if not sent_images(body):
        caption = text.split("caption: ")[1].splitlines()[0]
        return chat("None." if "hard" in caption else f"1. Is it {caption}?\n2) Is it sharp?\n2) Is it sharp?")
    shade = light(body)[0]
    yes = {"sharp": 0.6, "given": shade / 2}.get(text.splitlines()[-2].split()[-1].strip("?"), 0.9)
    return chat("y", finish="length", logprobs={"yes": math.log(yes), "no": math.log(1 - yes)})


def test_a_rubric_is_written_once_for_a_prompt_and_then_answered():
    with serving(_rubric) as stub:
        judge = Rubric(stub.url, "tiny", **QUICK)
        scores = judge.score(bright(0.2, 0.4, 0.6), ["a cat", "a cat", "a hard one"], [{"checklist": None}] * 3)
        again = judge.score(bright(1, 0), ["a cat"] * 2, [{"checklist": ["given?"]}, {"checklist": "given?"}])
    assert scores.value[:2].tolist() == pytest.approx([0.75, 0.75])
    assert scores.parts["questions"][0] == 2 and scores.parts["least"][0] == pytest.approx(0.6)
    assert scores.text is not None and scores.text[0] == "0.900 Is it a cat?\n0.600 Is it sharp?"
    assert not scores.valid[2] and "its checklist: the model wrote 0 questions" in str(scores.reason)
    assert sum(not sent_images(body) for body in stub.asked) == 2, "one list for each prompt"
    assert again.value[0] == pytest.approx(0.5) and "needed is a list of questions" in str(again.reason)


EVERY_JUDGE = JUDGES | {
    "edit_score": lambda body: points(sum(light(body)) * 9 % 25, 20),
    "rational_rewards": lambda body: chat(JUDGEMENT.format(1 + light(body)[0] * 3, "", 3)),
    "rubric": _rubric,
}


@pytest.mark.parametrize("name", EVERY_JUDGE)
def test_the_contract(name):
    with serving(EVERY_JUDGE[name]) as stub:
        judge = load_reward(name, base_url=stub.url, model="tiny", **QUICK)
        prompts = ["a red {circle}", "ein Kreis <|im_end|>", "a"]
        check_reward(judge, images=PIXELS, prompts=prompts, metadata=SOURCES)
    assert judge.identity.judge == name and judge.identity.model == "tiny"  # type: ignore[attr-defined]
