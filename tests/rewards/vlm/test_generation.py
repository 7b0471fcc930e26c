# SPDX-License-Identifier: Apache-2.0
"""Answers in words: the library's greedy text, draws by seed, neighbours, and what is refused."""

from typing import Any

import pytest
import torch

from tests.support.judges.vision_language import KINDS, ONE, TWO, noise, tiny_judge
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import Query
from visalign.rewards.vlm.generation import _draw

ASKS = [
    Query(images=[noise(16, 24, 1)], prompt="a cat"),
    Query(images=[noise(40, 8, 2)], prompt="a dog with a long tail"),
    Query(images=[noise(24, 24, 3)], prompt="x"),
]


def own_greedy(judge: Any, ask: Query, count: int) -> str:
    text = judge.processor.apply_chat_template(
        ONE.filled({"prompt": ask.prompt}), tokenize=False, add_generation_prompt=True
    )
    inputs = judge.processor(
        text=[text + ONE.answer_prefix],
        images=[(image * 255).round().to(torch.uint8) for image in ask.images],
        return_tensors="pt",
    )
    result = judge.model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return judge.processor.tokenizer.decode(result[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_librarys(kind) -> None:
    judge = tiny_judge(kind)
    result = judge.generate(ONE, ASKS, temperature=0, max_new_tokens=12)
    assert [len(texts) for texts in result.texts] == [1, 1, 1] and result.reasons == [None] * 3
    for texts, ask in zip(result.texts, ASKS, strict=True):
        assert texts[0] == own_greedy(judge, ask, 12)


@pytest.mark.parametrize("positions", ["mrope", "1d"])
def test_answers_depend_on_request_and_seed_alone(positions) -> None:
    judge = tiny_judge(positions=positions)
    options: dict[str, Any] = {"answers": 3, "max_new_tokens": 10}
    together = judge.generate(ONE, ASKS, seed=4, **options)
    for index, ask in enumerate(ASKS):
        single = tiny_judge(positions=positions).generate(ONE, [ask], seed=4, **options)
        assert single.texts[0] == together.texts[index] and single.finished[0] == together.finished[index]
    reverse = judge.generate(ONE, ASKS[::-1] + ASKS[:1], seed=4, **options)
    assert reverse.texts == [*together.texts[::-1], together.texts[0]]
    narrow = tiny_judge(positions=positions, max_tokens_per_batch=1).generate(ONE, ASKS, seed=4, **options)
    assert narrow.texts == together.texts
    assert judge.generate(ONE, ASKS, seed=5, **options).texts != together.texts
    assert len({text for texts in together.texts for text in texts}) > 3
    state = torch.random.get_rng_state()
    judge.generate(ONE, ASKS, seed=4, **options)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_draws_invert_the_cumulative_distribution() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(6, -1)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.999], dtype=torch.float64)
    assert _draw(logits, uniform, 1.0).tolist() == [0, 0, 1, 1, 2, 2]
    assert _draw(logits, uniform, 0).tolist() == [1] * 6
    assert _draw(logits[1:], uniform[1:], 0.05).tolist() == [1] * 5


def test_refused_requests_have_no_answers_and_options_are_checked() -> None:
    judge = tiny_judge()
    result = judge.generate(ONE, [ASKS[0], Query(images=[noise(2, 500)], prompt="a")], max_new_tokens=2)
    assert result.texts[1] == [] and result.finished[1] == [] and "200 times" in (result.reasons[1] or "")
    with pytest.raises(RewardError, match="answers is 0"):
        judge.generate(ONE, ASKS, answers=0)
    with pytest.raises(RewardError, match=r"temperature 0; allowed: .*\(one answer\)"):
        judge.generate(ONE, ASKS, answers=2, temperature=0)
    two = judge.generate(TWO, [Query(images=[noise(8, 8), noise(8, 16)], prompt="a", fields={"question": "b"})])
    assert len(two.texts[0]) == 1


def test_an_answer_that_ends_says_so() -> None:
    judge = tiny_judge()
    with torch.no_grad():
        judge.model.generation_config.eos_token_id = list(range(40))
    result = judge.generate(ONE, ASKS, answers=4, max_new_tokens=30)
    assert any(ended for row in result.finished for ended in row)
    short = judge.generate(ONE, ASKS, answers=4, max_new_tokens=1)
    assert all(len(text) <= 1 for row in short.texts for text in row)
    judge.model.generation_config.eos_token_id = judge.processor.tokenizer.eos_token = None
    with pytest.raises(RewardError, match="no end-of-sequence token"):
        judge.generate(ONE, ASKS)
