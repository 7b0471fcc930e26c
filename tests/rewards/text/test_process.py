# SPDX-License-Identifier: Apache-2.0
"""Process rewards of text: steps of texts and tokens, a token classifier's probabilities, the log-ratio."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3ForTokenClassification

from tests.support.models.language import tiny_config, tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.interfaces import TextReward, ToolCompletion
from visalign.rewards import ImplicitProcessReward, ProcessRewardModel, RewardError, check_text_reward
from visalign.text import Sampling, StoppingCriteria, StopReason, TextRollout, TokenSets, ToolTrace
from visalign.text.step_tokens import StepEncoder, StepTokens, step_logits
from visalign.text.steps import StepReading, StepRewards, step_index

TOKENIZER = tiny_tokenizer()
PAIR = ["b\nc\nab\n", "a\n\n  b"]


def number_of(letter: str) -> int:
    """The id of a letter."""
    return TOKENIZER(letter)["input_ids"][0]


class CountingModel(nn.Module):
    """Log-odds of "right" at a token: the number of letters "a" up to it, minus that of "b"."""

    def __init__(self, labels: int = 2, longest: int = 40) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=labels, max_position_embeddings=longest)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        is_a, is_b = (input_ids.eq(number_of(letter)).float() for letter in "ab")
        odds = self.scale * (is_a - is_b).cumsum(1)
        return SimpleNamespace(logits=torch.stack([torch.zeros_like(odds), odds], -1)[..., 2 - self.labels :])

    @property
    def labels(self) -> int:
        return self.config.num_labels


def judge(**options: Any) -> ProcessRewardModel:
    return ProcessRewardModel(CountingModel(), **{"tokenizer": TOKENIZER, **options})


def sigmoid(*odds: float) -> list[float]:
    return [1 / (1 + math.exp(-z)) for z in odds]


def rollout(*texts: str, ids: list[list[int]] | None = None, **changes: Any) -> TextRollout:
    """Answers to the prompt "q", each closed by the end token unless ids are given."""
    tokens = ids or [[*TOKENIZER(text)["input_ids"], 1] for text in texts]
    size, length = len(texts), max(map(len, tokens))
    loss_mask = torch.zeros(size, length)
    completion = torch.zeros(size, length, dtype=torch.int64)
    for row, answer in enumerate(tokens):
        loss_mask[row, : len(answer)], completion[row, : len(answer)] = 1, torch.tensor(answer)
    stop: list[StopReason] = ["eos"] * size
    fields: dict[str, Any] = {
        "prompt_ids": torch.full((size, 1), number_of("q")),
        "prompt_mask": torch.ones(size, 1),
        "completion_ids": completion,
        "loss_mask": loss_mask,
        **{name: torch.zeros(size, length) for name in ("log_prob", "full_log_prob", "entropy")},
        "text": list(texts),
        "stop_reason": stop,
        "group": list(range(size)),
        "prompt": ["q"] * size,
        "seed": list(range(size)),
        "sampling": Sampling(),
    }
    return TextRollout(**{**fields, **changes})


def test_a_text_is_cut_at_the_separator_and_blanks_are_no_steps() -> None:
    assert StepReading().spans("a = 1\n\n  b\n") == [(0, 5), (7, 10)]
    assert StepReading().split("a = 1\n\n  b\n") == ["a = 1", "  b"]
    assert StepReading(separator="; ").spans("a; b") == [(0, 1), (3, 4)]
    assert StepReading().spans("whole") == [(0, 5)]
    assert StepReading().spans(" \n\n") == StepReading().spans("") == []
    for options in ({"separator": ""}, {"marker": ""}):
        with pytest.raises(UserError, match="Neither separator nor marker may be empty"):
            StepReading(**options)


def test_every_token_belongs_to_a_step() -> None:
    """Separators go with the step before them, the end token with the last, leading blanks with the first."""
    steps = step_index(rollout("\na1\n\nb", "c"), TOKENIZER, StepReading())
    assert steps.tolist() == [[0, 0, 0, 0, 0, 1, 1], [0, 0, -1, -1, -1, -1, -1]]
    blank = step_index(rollout("\n \n", "a\nb\nc"), TOKENIZER, StepReading())
    assert blank.tolist() == [[-1] * 6, [0, 0, 1, 1, 2, 2]]
    holes = rollout("a\nb")
    holes.loss_mask[0, 1] = 0
    assert step_index(holes, TOKENIZER, StepReading()).tolist() == [[0, -1, 1, 1]]


class Pieces:
    """A tokenizer of byte strings; half a letter is shown as the replacement character."""

    bos_token_id = eos_token_id = pad_token_id = None

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **_: Any) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_tokens_that_hold_an_end_and_a_beginning_or_half_a_letter() -> None:
    half = "é".encode()
    pieces = Pieces(b"a", b"\nb", b"c\n", half[:1], half[1:], b"x\ny\nz")
    batch = rollout("a\nbc\né", "ac\n", "x\ny\nz", ids=[[0, 1, 2, 3, 4], [0, 2], [5]])
    steps = step_index(batch, pieces, StepReading())
    assert steps.tolist() == [[0, 0, 1, 2, 2], [0, 0, -1, -1, -1], [0, -1, -1, -1, -1]]


def test_a_tokenizer_that_reads_the_tokens_otherwise_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer reads the tokens of completion 0"):
        step_index(rollout("a\nb"), Pieces(*[b"z"] * 64), StepReading())


def test_steps_are_of_what_the_policy_wrote() -> None:
    """A tool's answer of several lines moves no step of the tokens behind it."""
    text = ToolCompletion("a\nb\nc\na", [(1, 4)])
    drawn = torch.tensor([[1.0, 0, 0, 0, 1, 1, 1, 1]])
    batch = rollout(text, loss_mask=drawn, tools=[ToolTrace(calls=1)])
    assert step_index(batch, TOKENIZER, StepReading()).tolist() == [[0, -1, -1, -1, 0, 0, 1, 1]]
    assert judge().score_rollout(batch).tokens()[0].nonzero().flatten().tolist() == [5, 7]


def test_step_rewards_as_tokens_and_as_one_number() -> None:
    rewards = StepRewards(
        reward=torch.tensor([[0.5, 0.25], [0.5, math.nan], [math.nan, math.nan]]),
        step=torch.tensor([[0, 0, 1], [0, 0, -1], [0, 1, 1]]),
        valid=torch.tensor([True, True, False]),
        reason=[None, None, "why"],
    )
    assert rewards.tokens().tolist() == [[0, 0.5, 0.25], [0, 0.5, 0], [0, 0, 0]]
    assert rewards.tokens("every").tolist() == [[0.5, 0.5, 0.25], [0.5, 0.5, 0], [0, 0, 0]]
    assert rewards.aggregate("product")[:2].tolist() == [0.125, 0.5]
    assert rewards.aggregate("last")[:2].tolist() == [0.25, 0.5] and rewards.aggregate()[2].isnan()


def test_a_prompt_its_steps_and_a_marker_after_each() -> None:
    def ids(text: str) -> list[int]:
        return TOKENIZER(text)["input_ids"]

    encoder = StepEncoder(TOKENIZER, StepReading())
    assert encoder.encode("q", ["ab", "c"]) == StepTokens(ids=ids("qab\nc\n"), ends=[3, 5])
    other = StepEncoder(TOKENIZER, StepReading(separator="; ", marker="<end>"))
    assert other.encode("q", ["ab", "c"]) == StepTokens(ids=ids("qab<end>c<end>"), ends=[3, 5])
    conversation = [{"role": "user", "content": "q"}]
    assert encoder.encode(conversation, ["c"]).ids == ids("<user>q<end><assistant>c\n")
    begun = tiny_tokenizer()
    begun.bos_token = "<system>"
    for prompt in ("q", "<system>q"):
        assert StepEncoder(begun, StepReading()).encode(prompt, ["c"]).ids == ids("<system>qc\n")
    with pytest.raises(UserError, match="this tokenizer has no chat template"):
        StepEncoder(tiny_tokenizer(template=None), StepReading()).encode(conversation, ["c"])
    illustrated = [{"role": "user", "content": [{"type": "image", "image": "x.png"}, {"type": "text", "text": "q"}]}]
    with pytest.raises(UserError, match="A prompt shows images, and a process reward model reads text alone"):
        StepEncoder(TOKENIZER, StepReading()).encode(illustrated, ["c"])
    with pytest.raises(UserError, match="no token for '§', so the ends of steps cannot be told"):
        StepEncoder(TOKENIZER, StepReading(separator="§"))


def test_probabilities_by_hand() -> None:
    step_scores = judge(batch_size=1).steps(PAIR, ["aa", "q"])
    assert step_scores.span == [[(0, 1), (2, 3), (4, 6)], [(0, 1), (3, 6)]] and step_scores.valid.all()
    assert step_scores.prob[0].tolist() == pytest.approx(sigmoid(1, 1, 1))
    assert step_scores.prob[1].tolist() == pytest.approx(sigmoid(1, 0))
    wrong_way = judge(right_label=0).steps(PAIR[1:], ["q"])
    assert wrong_way.prob[0].tolist() == pytest.approx(sigmoid(-1, 0))
    assert step_scores.padded()[1, 2].isnan() and step_scores.padded().shape == (2, 3)


def test_aggregates_by_hand() -> None:
    low, mid = sigmoid(-1, 0)
    by_hand = {"min": low, "product": low * mid, "mean": (low + mid) / 2, "last": mid}
    for how, expected in by_hand.items():
        scores = judge(aggregate=how).score(["b\na"], ["q"])
        assert scores.value.item() == pytest.approx(expected)
        assert {name: scores.parts[name].item() for name in by_hand} == pytest.approx(by_hand)
        assert scores.parts["steps"].item() == 2 and scores.text == ["0.269, 0.500"]


def test_a_transformers_classifier_at_the_separators() -> None:
    torch.manual_seed(0)
    model = Qwen3ForTokenClassification(tiny_config(num_labels=2)).eval()
    reward = ProcessRewardModel(model, tokenizer=TOKENIZER, batch_size=3)
    step_scores = reward.steps(["3+4=7\n7*2=14", "1", "2\n3\n4"], ["2?\n"] * 3)
    ids = torch.tensor([TOKENIZER("2?\n3+4=7\n7*2=14\n")["input_ids"]])
    with torch.no_grad():
        expected = model(ids).logits[0, [8, 15]].softmax(-1)[:, 1]
    assert torch.allclose(step_scores.prob[0], expected, atol=1e-6) and step_scores.prob[0].dtype == torch.float32
    assert isinstance(reward, TextReward)
    texts = ["3+4=7\n7*2=14", "1", "2\n3\n4", ""]
    assert len(check_text_reward(reward, completions=texts, tolerance=1e-5)) == 9


def test_contributions_add_up_to_the_outcome_that_is_expected() -> None:
    """A progress estimator: one label, whose values are rewards of steps as they are."""
    reward = ProcessRewardModel(CountingModel(labels=1), tokenizer=TOKENIZER)
    assert reward.range == (-math.inf, math.inf) and reward.unit == "outcome" and isinstance(reward, TextReward)
    assert ProcessRewardModel.range == (0.0, 1.0)
    scores = reward.score(["aa\nb\na", " "], ["q"] * 2)
    assert scores.value[0].item() == 2 + 1 + 2 and scores.valid.tolist() == [True, False]
    assert set(scores.parts) == {"sum", "steps"} and scores.text is not None
    assert scores.text[0] == "2.000, 1.000, 2.000"
    step_scores = reward.score_rollout(rollout("aa\nb\na"))
    assert step_scores.tokens()[0].tolist() == [0, 0, 2, 0, 1, 0, 2]
    with pytest.raises(ValueError, match="aggregate is 'min'; allowed are sum"):
        ProcessRewardModel(CountingModel(labels=1), tokenizer=TOKENIZER, aggregate="min")


def test_what_cannot_be_judged_is_invalid_with_its_reason() -> None:
    texts = ["a\nb", " \n", "a" * 40, "a\n<end>b", "b"]
    scores = judge(min_steps=1).score(texts, ["q"] * 5)
    assert scores.valid.tolist() == [True, False, False, False, True] and scores.value[1:4].isnan().all()
    assert scores.reason == [
        None,
        r"it has 0 steps, cut at '\n'; at least 1 are needed",
        "prompt and steps have 42 tokens; the model reads at most 40",
        "the completion spells out the special token '<end>'",
        None,
    ]
    single = judge().score(texts[:1], ["q"])
    assert scores.value[0] == single.value[0]
    no_separator = judge(min_steps=2).score(["a b", "a\nb"], ["q"] * 2)
    assert no_separator.reason == [r"it has 1 steps, cut at '\n'; at least 2 are needed", None]
    broken = judge()
    with torch.no_grad():
        broken.model.scale.fill_(math.nan)
    assert broken.score(["a"], ["q"]).reason == ["the process reward model gave [nan] for its steps"]
    assert len(judge().score([], [])) == 0


def test_a_rollout_gets_rewards_on_the_last_tokens_of_its_steps() -> None:
    stop: list[StopReason] = ["eos", "eos", "prompt too long"]
    batch = rollout("a\nab", "b", "", stop_reason=stop)
    batch.loss_mask[2] = 0
    step_rewards = judge().score_rollout(batch)
    one, two, minus = sigmoid(1, 1, -1)
    assert step_rewards.valid.tolist() == [True, True, False]
    assert step_rewards.reason[2] == "it was not generated: the prompt is too long"
    by_hand = torch.tensor([[0, one, 0, 0, two], [0, minus, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert torch.allclose(step_rewards.tokens(), by_hand)
    assert torch.allclose(step_rewards.tokens("every")[0], torch.tensor([one, one, two, two, two]))
    assert torch.allclose(step_rewards.aggregate("min")[:2], torch.tensor([one, minus]))
    batch.trajectories(step_rewards.aggregate(), process_reward=step_rewards.tokens(), valid=step_rewards.valid)


def test_clip_and_delta_bound_what_the_steps_of_an_answer_can_earn() -> None:
    nan = math.nan
    step_rewards = StepRewards(
        reward=torch.tensor([[0.2, 0.9, 0.6, 0.8], [0.3, 0.7, nan, nan], [nan, nan, nan, nan]]),
        step=torch.tensor([[0, 0, 1, 2, 3], [0, 1, 1, -1, -1], [-1] * 5]),
        valid=torch.tensor([True, True, False]),
        reason=[None, None, "nothing"],
    )
    delta = step_rewards.bounded(delta=True).tokens()
    torch.testing.assert_close(delta[0], torch.tensor([0, -0.7, 0.3, 0.6, 0]))
    torch.testing.assert_close(delta[1:, :3], torch.tensor([[0.3, 0, 0], [0, 0, 0]]))
    clipped = step_rewards.bounded(clip=0.5)
    assert_close = torch.testing.assert_close
    assert_close(clipped.reward, torch.tensor([[-0.3, 0, 0, 0], [-0.2, 0, nan, nan], [nan] * 4]), equal_nan=True)
    both = step_rewards.bounded(clip=0.75, delta=True).tokens()
    assert_close(both[0], torch.tensor([0, -0.55, 0.15, -0.15, 0]))
    assert torch.equal(step_rewards.bounded().tokens(), step_rewards.tokens())


def test_models_and_options_that_cannot_serve() -> None:
    with pytest.raises(RewardError, match=r"has 3 labels; needed are two, wrong and right"):
        ProcessRewardModel(CountingModel(labels=3), tokenizer=TOKENIZER)
    with pytest.raises(UserError, match=r"gave logits \(1, 2, 0\) for tokens \(1, 2\); needed are two per"):
        step_logits(CountingModel(labels=0), [StepTokens(ids=[5, 6], ends=[1])])
    with pytest.raises(ValueError, match="aggregate is 'sum'; allowed are min, product, mean, last"):
        judge(aggregate="sum")


def trained_and_not() -> tuple[CausalLMPolicy, TextRollout]:
    """A policy that has moved away from its reference, and a rollout of sharpened, truncated sampling."""
    policy = CausalLMPolicy(tiny_model(), TOKENIZER)
    sampling = Sampling(temperature=0.7, top_p=0.9)
    samples = policy.generate(
        ["q", "a b"], seeds=3, num_generations=2, sampling=sampling, stopping=StoppingCriteria(max_new_tokens=12)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy, samples


def test_the_log_ratio_of_the_models_themselves() -> None:
    """At temperature 1 over the whole vocabulary, though the rollout was sampled otherwise."""
    policy, batch = trained_and_not()
    assert isinstance(batch.kept, TokenSets)
    scores = ImplicitProcessReward(policy, tokenizer=TOKENIZER, beta=0.5).score_rollout(batch)
    for row in range(len(batch)):
        answer = batch.completion_ids[row, batch.loss_mask[row] != 0]
        prompt = batch.prompt_ids[row, batch.prompt_mask[row] != 0]
        ids = torch.cat((prompt, answer))[None]
        with torch.no_grad():
            both = [
                model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, answer[:, None])[:, 0]
                for model in (policy.model, tiny_model())
            ]
        expected = 0.5 * (both[0] - both[1])
        assert torch.allclose(scores.token[row, : len(answer)], expected, atol=1e-5)
        assert scores.total[row].item() == pytest.approx(expected.sum().item(), abs=1e-5)
    with_reference = ImplicitProcessReward(
        policy, tokenizer=TOKENIZER, beta=0.5, reference=CausalLMPolicy(tiny_model(), TOKENIZER)
    ).score_rollout(batch)
    assert torch.allclose(with_reference.token, scores.token, atol=1e-5)


def test_steps_sum_their_tokens_and_all_steps_the_answer() -> None:
    policy, _ = trained_and_not()
    batch = rollout("\na1\n\nb", "c")
    scores = ImplicitProcessReward(policy, tokenizer=TOKENIZER).score_rollout(batch)
    token = scores.token[0]
    assert torch.allclose(scores.steps.reward[0], torch.stack([token[:5].sum(), token[5:].sum()]), atol=1e-6)
    assert torch.allclose(scores.steps.aggregate("sum"), scores.total, atol=1e-6)
    assert torch.allclose(scores.steps.tokens().sum(1), scores.total, atol=1e-6)
    assert torch.equal(scores.prefix, scores.token.cumsum(1)) and token.abs().min() > 0
    assert not scores.token.requires_grad and (scores.token[1, 2:] == 0).all()


def test_answers_without_tokens_or_steps() -> None:
    policy, _ = trained_and_not()
    stop: list[StopReason] = ["prompt too long", "eos"]
    batch = rollout("", " \n", stop_reason=stop)
    batch.loss_mask[0] = 0
    scores = ImplicitProcessReward(policy, tokenizer=TOKENIZER).score_rollout(batch)
    assert scores.valid.tolist() == [False, True] and scores.reason == ["no token was generated", None]
    assert scores.total[0].isnan() and scores.total[1].isfinite() and (scores.token[0] == 0).all()
    assert scores.steps.valid.tolist() == [False, False]
    assert scores.steps.reason[1] == "it has no step: blanks alone"


class Certain:
    """A policy that gives its first answer probability 0."""

    def log_probs(self, rollout: TextRollout, rows: Any = None) -> Any:
        log_prob = torch.zeros(rollout.loss_mask.shape)
        log_prob[0, 0] = -math.inf
        return SimpleNamespace(log_prob=log_prob)


def test_an_answer_of_probability_zero_is_invalid_alone() -> None:
    policy: Any = Certain()
    other = CausalLMPolicy(tiny_model(), TOKENIZER)
    reward = ImplicitProcessReward(policy, tokenizer=TOKENIZER, reference=other)
    scores = reward.score_rollout(rollout("a\nb", "c"))
    assert scores.valid.tolist() == scores.steps.valid.tolist() == [False, True]
    assert scores.reason == ["a log-prob is not finite", None] and scores.total[0].isnan()
    assert scores.steps.reward[0].isnan().all() and (scores.token[0] == 0).all()
    with pytest.raises(ValueError, match="beta is 0; it must be positive and finite"):
        ImplicitProcessReward(other, tokenizer=TOKENIZER, beta=0)
