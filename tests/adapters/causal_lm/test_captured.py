# SPDX-License-Identifier: Apache-2.0
"""Decoding by one step on a static cache: the completions of the plain loop, for several families of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.support.models.language import tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm import captured, generation
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import Sampling, StoppingCriteria

PROMPTS = ["a", "hello there you", "1+2="]


def model_of(family: str) -> Any:
    if family == "qwen3":
        return tiny_model()
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "vocab_size": len(tiny_tokenizer()),
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    if family == "llama":
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        network: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**config, **sizes, num_key_value_heads=2)
        )
    else:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=config["vocab_size"], **sizes))
    return network.eval()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.2), Sampling(temperature=0)])
def test_completions_are_those_of_the_loop(family: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CausalLMPolicy(model_of(family), tiny_tokenizer(), generate_batch=64)
    stopping = StoppingCriteria(max_new_tokens=40, strings=("b", "7"))
    options: dict[str, Any] = {"seeds": 3, "num_generations": 4, "sampling": sampling, "stopping": stopping}
    expected = policy.generate(PROMPTS, **options)
    attention = policy.model.config._attn_implementation
    used: list[bool] = []
    monkeypatch.setattr(generation, "can_capture", lambda *_: used.append(True) or True)
    actual = policy.generate(PROMPTS, **options)
    assert used and policy.model.config._attn_implementation == attention
    assert torch.equal(actual.completion_ids, expected.completion_ids)
    assert actual.stop_reason == expected.stop_reason
    assert sampling.greedy or len({*expected.stop_reason}) > 1
    for name in ("log_prob", "full_log_prob", "entropy"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_logits_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "can_capture", lambda *_: True)
    network = generation.CausalNetwork(tiny_model())
    network.model.lm_head.weight.data[3] = torch.nan
    prompt = generation.EncodedPrompt(ids=(1, 2))
    ending = generation.Ending(eos_ids=frozenset(), limit=[4], strings=generation.StopStrings((), lambda ids: ""))
    with pytest.raises(ValueError, match="logits of row 0 are NaN"):
        generation.generate_completions(
            network, [prompt], torch.rand(1, 4).double(), sampling=Sampling(), ending=ending, pad_id=0
        )


def test_only_full_attention_on_a_gpu_is_captured() -> None:
    network = generation.CausalNetwork(tiny_model())
    _, cache = network.features(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long), caching=True)
    assert not captured.can_capture(network, cache, Sampling())  # a CPU launches as fast as it computes
