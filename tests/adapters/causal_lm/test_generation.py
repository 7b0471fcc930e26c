# SPDX-License-Identifier: Apache-2.0
"""Generation: log-probs that equal a recomputation, samples that ignore their neighbours, ends and limits."""

import pytest
import torch

from tests.support.models.language import tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.text import Sampling, StoppingCriteria, TextRollout, draw_seeds

PROMPTS = ["a", "hello there you", "1+2=", [{"role": "user", "content": "hi"}], "1+2="]
EVERY = StoppingCriteria(max_new_tokens=14, strings=("b", "7"))
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=0),
]


def policy(**options) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_model(), tiny_tokenizer(), **options)


@pytest.fixture(scope="module")
def shared() -> CausalLMPolicy:
    return policy(generate_batch=7)


def sampled(shared, sampling=SAMPLINGS[0], stopping=EVERY, prompts=PROMPTS, **options) -> TextRollout:
    return shared.generate(
        prompts, **{"seeds": 4, "num_generations": 3, "sampling": sampling, "stopping": stopping, **options}
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_probs_equal_a_recomputation(shared, sampling) -> None:
    rollout = sampled(shared, sampling)
    assert rollout.log_prob.dtype == torch.float32 and len(rollout) == 15
    output = shared.log_probs(rollout)
    torch.testing.assert_close(output.log_prob, rollout.log_prob, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, rollout.entropy, rtol=0, atol=1e-4)
    full = shared.log_probs(rollout, distribution="full").log_prob
    torch.testing.assert_close(full, rollout.full_log_prob, rtol=0, atol=1e-4)
    if sampling.truncates:
        assert (rollout.log_prob - rollout.full_log_prob)[rollout.loss_mask > 0].max() > 0.05
    assert (rollout.log_prob[rollout.loss_mask == 0] == 0).all() and output.value is None


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
@torch.no_grad()
def test_log_probs_are_those_of_the_models_own_logits(shared, sampling) -> None:
    rollout = sampled(shared, sampling)
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, rollout.prompt_mask[row] > 0]
        completion = rollout.completion_ids[row, rollout.loss_mask[row] > 0]
        logits = shared.model(torch.cat((prompt, completion))[None]).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / sampling.temperature).log_softmax(-1)
        own = log_p.gather(-1, completion[:, None])[:, 0]
        torch.testing.assert_close(rollout.full_log_prob[row, : len(completion)], own, rtol=0, atol=1e-4)
        if sampling.top_k:
            own = own - log_p.topk(sampling.top_k).values.logsumexp(-1)
            torch.testing.assert_close(rollout.log_prob[row, : len(completion)], own, rtol=0, atol=1e-4)


def test_greedy_completions_are_those_of_transformers(shared) -> None:
    rollout = sampled(shared, Sampling(temperature=0), StoppingCriteria(max_new_tokens=14), num_generations=1)
    for row, prompt in enumerate(shared.prompts.encode(PROMPTS)):
        theirs = shared.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=14, do_sample=False
        )[0, len(prompt) :]
        ours = rollout.completion_ids[row, rollout.loss_mask[row] > 0]
        assert ours.tolist() == theirs.tolist()


def test_a_sample_does_not_depend_on_its_batch(shared) -> None:
    # completions that end early make rows leave the batch
    sampling = Sampling(temperature=0.9, top_p=0.95)
    stopping = StoppingCriteria(max_new_tokens=14, strings=tuple("bcdefghi"))
    all_at_once = sampled(shared, sampling, stopping)
    seeds, own = draw_seeds(4, 15), shared.generate_batch
    shared.generate_batch = 4
    try:
        subset = sampled(shared, sampling, stopping, PROMPTS[1:3], seeds=seeds[3:9])
    finally:
        shared.generate_batch = own
    width = subset.loss_mask.shape[1]
    assert subset.text == all_at_once.text[3:9] and subset.stop_reason == all_at_once.stop_reason[3:9]
    torch.testing.assert_close(subset.log_prob, all_at_once.log_prob[3:9, :width], rtol=0, atol=1e-5)
    assert all_at_once.seed == seeds and len(set(all_at_once.text)) > 7


def test_every_completion_says_why_it_ended(shared) -> None:
    rollout = sampled(shared, num_generations=12)
    assert set(rollout.stop_reason) == {"eos", "stop string", "length"}
    for row, reason in enumerate(rollout.stop_reason):
        ids = rollout.completion_ids[row, rollout.loss_mask[row] > 0].tolist()
        text = shared.tokenizer.decode(ids)
        assert text.count("<end>") == (reason == "eos") and (reason == "eos") == (ids[-1] == 1)
        assert (reason == "stop string") == (text[-1] in "b7")
        assert not set(text[:-1]) & set("b7") or reason == "eos"
        assert (reason == "length") == (len(ids) == 14 and ids[-1] != 1 and text[-1] not in "b7")
        assert rollout.text[row] == text.replace("<end>", "").replace("<pad>", "")
    assert "<user>" in "".join(rollout.text), "special tokens that are no start, end or padding stay"
    special = sampled(
        shared, num_generations=12, stopping=StoppingCriteria(max_new_tokens=14, strings=("<end>",), eos_ids=())
    )
    ended = [row for row, reason in enumerate(special.stop_reason) if reason == "stop string"]
    assert ended and all(special.completion_ids[row, special.loss_mask[row] > 0][-1] == 1 for row in ended)
    assert rollout.truncated.tolist() == [reason == "length" for reason in rollout.stop_reason]


def test_seeds_groups_and_prompts_stand_in_order(shared) -> None:
    rollout = sampled(shared, prompts=["a", "b"], seeds=[1, 2, 1, 1, 2, 9], group=["x", "y"])
    assert rollout.group == ["x"] * 3 + ["y"] * 3 and rollout.prompt == ["a"] * 3 + ["b"] * 3
    assert rollout.text[0] == rollout.text[2] != rollout.text[1]
    assert sampled(shared, prompts=["a", "b"]).group == [0, 0, 0, 1, 1, 1]
    one = sampled(shared, prompts=["a"], num_generations=1, stopping=StoppingCriteria(max_new_tokens=1))
    assert one.loss_mask.tolist() == [[1.0]]


def test_equal_prompts_are_read_once_and_ended_completions_leave(monkeypatch) -> None:
    actor = policy()
    sizes, features = [], actor._network.features

    def counted(ids, mask, **options):
        sizes.append(tuple(ids.shape))
        return features(ids, mask, **options)

    monkeypatch.setattr(actor._network, "features", counted)
    rollout = sampled(actor, num_generations=8)
    assert sizes[0][0] == 4, "five prompts, two of them equal"
    growing = [(rollout.loss_mask.sum(1) > step).sum().item() for step in range(1, len(sizes))]
    assert all(rows >= alive for (rows, _), alive in zip(sizes[1:], growing, strict=True))
    assert all(alive >= 0.8 * rows for (rows, _), alive in zip(sizes[1:], growing, strict=True))
    assert sizes[-1][0] < 40


def test_completions_end_where_the_context_does(shared) -> None:
    rollout = sampled(shared, prompts=["b" * 60, "b"], stopping=StoppingCriteria(max_new_tokens=9, eos_ids=()))
    assert rollout.loss_mask.sum(1).tolist() == [4, 4, 4, 9, 9, 9] and set(rollout.stop_reason) == {"length"}
    log_prob = shared.log_probs(rollout).log_prob
    torch.testing.assert_close(log_prob, rollout.log_prob, rtol=0, atol=1e-4)


def test_prompts_that_are_too_long(shared) -> None:
    with pytest.raises(UserError, match=r"Prompt 1 has 64 tokens, and at most 63 .*context is 64\); 1 of 2"):
        sampled(shared, prompts=["b", "b" * 64])
    actor = policy(max_prompt_tokens=5, long_prompts="mask")
    rollout = sampled(actor, Sampling(top_p=0.9), prompts=["abcdef", "abc"])
    assert rollout.stop_reason[:3] == ["prompt too long"] * 3 and "prompt too long" not in rollout.stop_reason[3:]
    assert rollout.loss_mask[:3].sum() == 0 and rollout.text[:3] == [""] * 3
    assert rollout.generated.tolist() == [False] * 3 + [True] * 3
    log_prob = actor.log_probs(rollout).log_prob
    torch.testing.assert_close(log_prob, rollout.log_prob, rtol=0, atol=1e-4)
    dead = actor.log_probs(rollout, slice(0, 3))
    (dead.log_prob + dead.entropy).sum().backward()
    with torch.no_grad():
        assert actor.log_probs(rollout, slice(0, 3)).log_prob.abs().max() == 0
    nothing = sampled(actor, prompts=["abcdef"])
    assert nothing.loss_mask.shape == (3, 1) and nothing.loss_mask.sum() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, r"prompts is \[\]; give a list of at least one prompt"),
        ({"seeds": [1, 2]}, "seeds has 2 entries for 5 prompts; give 15"),
        ({"images": [[]] * 5}, "used as a text policy and reads no images"),
    ],
)
def test_counts_that_do_not_fit_are_refused(shared, options, message) -> None:
    with pytest.raises(UserError, match=message):
        sampled(shared, **options)


def test_a_tokenizer_without_pad_or_eos() -> None:
    padless = CausalLMPolicy(tiny_model(), tiny_tokenizer(pad=False))
    assert [text.replace("<pad>", "") for text in sampled(padless).text] == list(sampled(policy()).text)
    model = tiny_model()
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    endless = CausalLMPolicy(model, tiny_tokenizer(pad=False, eos=False, template="{{ messages[0].content }}"))
    with pytest.raises(UserError, match="has an end-of-sequence token"):
        sampled(endless)
    rollout = sampled(endless, stopping=StoppingCriteria(max_new_tokens=5, eos_ids=()))
    assert set(rollout.stop_reason) == {"length"}
    ends = StoppingCriteria(max_new_tokens=14, eos_ids=tuple(range(20)))
    assert "eos" in sampled(endless, stopping=ends).stop_reason


def test_broken_weights_are_named() -> None:
    actor = policy()
    with torch.no_grad():
        actor.trainable_parameters()[0][1].fill_(float("nan"))
    with pytest.raises(ValueError, match="logits of row 0 are NaN or all −∞"):
        sampled(actor)
