# SPDX-License-Identifier: Apache-2.0
"""The policy around a language model: gradients, reference, LoRA, other architectures, saved files."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from tests.support.models.language import save_tiny_language_model, tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.core.tokens.entropy_terms import nucleus_entropy
from visalign.errors import UserError
from visalign.text import Sampling, StoppingCriteria, TextRollout

PROMPTS = ["a", "hello there you", "1+2="]
LORA = text_lora(rank=3, alpha=7, seed=5)
STOP = StoppingCriteria(max_new_tokens=10)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9)
SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SMALL |= {"initializer_range": 0.3, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}


def policy(model=None, **options) -> CausalLMPolicy:
    return CausalLMPolicy(model or tiny_model(), tiny_tokenizer(), **options)


def rollout_of(actor: CausalLMPolicy, sampling=NUCLEUS) -> TextRollout:
    return actor.generate(PROMPTS, seeds=1, num_generations=2, sampling=sampling, stopping=STOP)


def perturb(actor: CausalLMPolicy, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, parameter in actor.trainable_parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def gradients(actor: CausalLMPolicy, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [p for _, p in actor.trainable_parameters()]))


def naive(actor: CausalLMPolicy, rollout: TextRollout) -> torch.Tensor:
    """Σ over tokens of c_t log p_t at the temperature, sample by sample through the model's own logits."""
    total = torch.zeros(())
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, rollout.prompt_mask[row] > 0]
        completion = rollout.completion_ids[row, rollout.loss_mask[row] > 0]
        logits = actor.model(torch.cat((prompt, completion))[None]).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / rollout.sampling.temperature).log_softmax(-1).gather(-1, completion[:, None])[:, 0]
        total = total + (log_p * torch.arange(1, len(completion) + 1)).sum()
    return total


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradients_are_those_of_the_models_logits(lora) -> None:
    actor = policy(lora=lora)
    rollout = rollout_of(actor)
    perturb(actor)
    coefficients = torch.arange(1, rollout.loss_mask.shape[1] + 1)
    expected = gradients(actor, naive(actor, rollout))
    ours = gradients(actor, (actor.log_probs(rollout, distribution="full").log_prob * coefficients).sum())
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * max(1, theirs.abs().max().item()))


def test_micro_batches_and_recomputed_activations_change_nothing() -> None:
    actor, saving = policy(), policy(gradient_checkpointing=True)
    rollout = rollout_of(actor)
    coefficients = torch.arange(1, rollout.loss_mask.shape[1] + 1)

    def total(which, rows):
        output = which.log_probs(rollout, rows)
        return (output.log_prob * coefficients + output.entropy).sum()

    full_batch = gradients(actor, total(actor, None))
    shares = [gradients(actor, total(actor, rows)) for rows in torch.tensor([4, 0, 2, 1, 5, 3]).split([1, 3, 2])]
    for mine, *parts in zip(full_batch, *shares, strict=True):
        torch.testing.assert_close(sum(parts), mine, rtol=1e-4, atol=1e-4)
    for mine, other in zip(full_batch, gradients(saving, total(saving, None)), strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        actor.score_batch = 2
        torch.testing.assert_close(actor.log_probs(rollout).log_prob, rollout.log_prob, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), NUCLEUS])
def test_a_statistic_is_of_the_distribution_that_was_sampled(sampling) -> None:
    """With a nucleus of 1 it is the entropy, in value and gradient; smaller ones hold less."""
    actor = policy()
    rollout = rollout_of(actor, sampling)
    perturb(actor)
    plain = actor.log_probs(rollout)
    output = actor.log_probs(rollout, statistic=partial(nucleus_entropy, p=1.0))
    assert output.statistic is not None and plain.statistic is None
    torch.testing.assert_close(output.log_prob, plain.log_prob, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.statistic, plain.entropy, rtol=0, atol=1e-5)
    for ours, expected in zip(
        gradients(actor, output.statistic.sum()), gradients(actor, plain.entropy.sum()), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    smaller = actor.log_probs(rollout, statistic=partial(nucleus_entropy, p=0.5)).statistic
    assert smaller is not None and bool((smaller <= output.statistic + 1e-5).all())
    assert float(smaller.sum().detach()) < 0.9 * float(output.statistic.sum().detach())


@torch.no_grad()
def test_a_later_policy_is_scored_on_the_tokens_that_could_be_drawn() -> None:
    actor = policy()
    rollout = rollout_of(actor)
    assert rollout.kept is not None
    perturb(actor, 0.3)
    log_prob = actor.log_probs(rollout).log_prob
    row, column = (rollout.loss_mask > 0).nonzero(as_tuple=True)
    masks = rollout.kept.mask(row, column, 64)
    start = 0
    for sample in range(len(rollout)):
        prompt = rollout.prompt_ids[sample, rollout.prompt_mask[sample] > 0]
        completion = rollout.completion_ids[sample, rollout.loss_mask[sample] > 0]
        logits = actor.model(torch.cat((prompt, completion))[None]).logits[0, len(prompt) - 1 : -1] / 0.7
        allowed = masks[start : start + len(completion)]
        log_normalizer = torch.stack([z[mask].logsumexp(0) for z, mask in zip(logits, allowed, strict=True)])
        expected = logits.gather(-1, completion[:, None])[:, 0] - log_normalizer
        torch.testing.assert_close(log_prob[sample, : len(completion)], expected, rtol=0, atol=1e-4)
        start += len(completion)
    assert torch.isfinite(log_prob).all() and (log_prob - rollout.log_prob).abs().max() > 0.1


def test_holes_in_the_weight_are_left_out_but_stay_in_the_context() -> None:
    actor = policy()
    rollout = rollout_of(actor)
    weight = rollout.loss_mask.clone()
    weight[:, 1:4] = 0
    weight[1, 5:] = 0
    log_prob = actor.log_probs(replace(rollout, loss_mask=weight)).log_prob
    torch.testing.assert_close(log_prob, rollout.log_prob * (weight != 0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("lora", [None, LORA])
@torch.no_grad()
def test_the_reference_is_the_model_before_training(lora) -> None:
    actor = policy(lora=lora)
    rollout = rollout_of(actor)
    before = actor.log_probs(rollout).log_prob
    perturb(actor)
    after = actor.log_probs(rollout).log_prob
    assert (after - before).abs().max() > 0.01
    with actor.reference():
        with actor.reference():
            pass
        torch.testing.assert_close(actor.log_probs(rollout).log_prob, before, rtol=0, atol=0)
    torch.testing.assert_close(actor.log_probs(rollout).log_prob, after, rtol=0, atol=0)
    assert all(parameter.requires_grad for _, parameter in actor.trainable_parameters())


def test_lora_starts_at_the_model_and_depends_on_its_seed_alone() -> None:
    plain = policy(lora=None)
    rollout = rollout_of(plain)
    torch.manual_seed(1)
    first = policy(lora=LORA)
    state = torch.random.get_rng_state()
    second, other = policy(lora=LORA), policy(lora=replace(LORA, seed=6))
    assert torch.equal(state, torch.random.get_rng_state())
    with torch.no_grad():
        torch.testing.assert_close(first.log_probs(rollout).log_prob, plain.log_probs(rollout).log_prob)
    values = [dict(p.trainable_parameters()) for p in (first, second, other)]
    assert len(values[0]) == 2 * 2 * 7 and all("lora_" in name for name in values[0])
    assert all(torch.equal(weight, values[1][name]) for name, weight in values[0].items())
    assert any(not torch.equal(weight, values[2][name]) for name, weight in values[0].items())


def test_lora_places_are_checked() -> None:
    some = policy(lora=text_lora(target_modules=("q_proj", "v_proj")))
    assert len(some.trainable_parameters()) == 2 * 2 * 2
    with pytest.raises(UserError, match=r"targets \['lm_head'\] name no linear layer of Qwen3.*q_proj"):
        policy(lora=text_lora(target_modules=("lm_head",)))
    with pytest.raises(UserError, match=r"already has the adapters .*merge_and_unload"):
        policy(some.model, lora=LORA)


# peft 0.21 reads a property that transformers 5.23 has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("lora", [None, LORA])
def test_what_it_saves_the_libraries_load(tmp_path, lora) -> None:
    base, saved = save_tiny_language_model(tmp_path / "base"), tmp_path / "saved"
    actor = CausalLMPolicy.from_pretrained(base, lora=lora)
    rollout = rollout_of(actor)
    perturb(actor)
    actor.save(saved)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = actor.model(ids).logits
        if lora is None:
            theirs = AutoModelForCausalLM.from_pretrained(saved)
        else:
            assert (saved / "adapter_model.safetensors").is_file()
            theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(saved))
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=0, atol=1e-5)
        again = CausalLMPolicy.from_pretrained(base, lora=replace(lora, seed=9) if lora else None)
        start = again.log_probs(rollout).log_prob
        again.load(saved)
        expected_log_prob = actor.log_probs(rollout).log_prob
        torch.testing.assert_close(again.log_probs(rollout).log_prob, expected_log_prob, rtol=0, atol=1e-6)
        with again.reference():
            torch.testing.assert_close(again.log_probs(rollout).log_prob, start, rtol=0, atol=1e-6)


@torch.no_grad()
def test_training_continues_from_a_lora_which_is_then_the_reference(tmp_path) -> None:
    actor = policy(lora=LORA)
    rollout = rollout_of(actor)
    perturb(actor)
    actor.save(tmp_path / "run" / "lora")
    expected = actor.log_probs(rollout).log_prob
    again = policy(lora_path=tmp_path / "run")
    assert again.lora is not None and (again.lora.rank, again.lora.alpha) == (LORA.rank, LORA.alpha)
    torch.testing.assert_close(again.log_probs(rollout).log_prob, expected, rtol=0, atol=1e-6)
    perturb(again)
    assert (again.log_probs(rollout).log_prob - expected).abs().max() > 0.01
    with again.reference():
        torch.testing.assert_close(again.log_probs(rollout).log_prob, expected, rtol=0, atol=1e-6)


def test_a_lora_of_another_kind_is_refused(tmp_path) -> None:
    policy(lora=LORA).save(tmp_path)
    with pytest.raises(UserError, match=r"alpha 7 there, 7 here; .* there, .* here. Build the policy with"):
        policy(lora=replace(LORA, rank=4)).load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_model\.safetensors"):
        policy(lora=LORA).load(tmp_path / "nowhere")
    config = tmp_path / "adapter_config.json"
    plain = json.loads(config.read_text())
    for setting, value, message in (
        ("init_lora_weights", "pissa_niter_4", "began as 'pissa_niter_4', which changed the base model"),
        ("peft_type", "LOKR", "holds adapters of the kind LOKR"),
        ("use_dora", True, "of the kind DoRA"),
        ("bias", "all", r"of the kind LoRA with biases \(peft's bias is 'all'\)"),
        ("layer_replication", [[0, 1]], "Merge them into their model"),
    ):
        config.write_text(json.dumps(plain | {setting: value}))
        with pytest.raises(UserError, match=message):
            policy(lora_path=tmp_path)


def gemma() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0, sliding_window=4)).eval()


def granite() -> nn.Module:
    return GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=3.0)).eval()


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, initializer_range=0.3))


class _OddHead(nn.Linear):
    """A head that is no plain linear layer."""

    def forward(self, input):
        return super().forward(input) ** 3


def odd() -> nn.Module:
    model = tiny_model(tie_word_embeddings=False)
    head = _OddHead(32, 64, bias=False)
    nn.init.normal_(head.weight, std=0.2)
    model.lm_head = head
    return model


@pytest.mark.parametrize(
    ("build", "head"), [(gemma, (1.0, 2.0)), (granite, (1 / 3, None)), (gpt2, (1.0, None)), (odd, None)]
)
def test_other_architectures(build, head) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build()
    actor = policy(model)
    network_head = actor._network.head
    assert (network_head and (network_head.scale, network_head.soft_cap)) == head
    rollout = rollout_of(actor)
    output = actor.log_probs(rollout)
    torch.testing.assert_close(output.log_prob, rollout.log_prob, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.entropy, rollout.entropy, rtol=0, atol=1e-4)
    expected = gradients(actor, naive(actor, rollout))
    coefficients = torch.arange(1, rollout.loss_mask.shape[1] + 1)
    ours = gradients(actor, (actor.log_probs(rollout, distribution="full").log_prob * coefficients).sum())
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3 * max(1, theirs.abs().max().item()))


def test_sixteen_bit_weights_give_float32_log_probs() -> None:
    actor = policy(tiny_model(tie_word_embeddings=False).bfloat16(), lora=LORA)
    rollout = rollout_of(actor)
    assert actor._network.head is not None
    log_prob = actor.log_probs(rollout).log_prob
    assert log_prob.dtype == torch.float32 and all(
        parameter.dtype == torch.float32 for _, parameter in actor.trainable_parameters()
    )
    assert (log_prob - rollout.log_prob).abs().mean() < 0.03
    mixed = policy(autocast=torch.bfloat16)
    rollout = rollout_of(mixed)
    assert (mixed.log_probs(rollout).log_prob - rollout.log_prob).abs().mean() < 0.03


def test_a_truncated_rollout_without_its_sets_is_refused() -> None:
    actor = policy()
    rollout = replace(rollout_of(actor), kept=None)
    with pytest.raises(UserError, match="holds no token sets"):
        actor.log_probs(rollout)
    actor.log_probs(rollout, distribution="full")


def test_what_is_no_language_model_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"The text policy got a Linear; it needs a transformers model"):
        CausalLMPolicy(nn.Linear(2, 2), tiny_tokenizer())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="The tokenizer has 59 tokens and the model 32"):
        policy(tiny_model(vocab_size=32))
    with pytest.raises(FileNotFoundError, match=r"There is no model folder .*nowhere"):
        CausalLMPolicy.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        CausalLMPolicy.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}', encoding="utf-8")
    with pytest.raises(UserError, match="is a clip_vision_model, and no causal language model"):
        CausalLMPolicy.from_pretrained(tmp_path)


def test_without_a_reference_no_copy_is_kept_and_asking_for_it_is_refused():
    policy = CausalLMPolicy(tiny_model(), tiny_tokenizer(), reference=False)
    with pytest.raises(UserError, match="created with reference=False"), policy.reference():
        pass
    adapted = CausalLMPolicy(tiny_model(), tiny_tokenizer(), reference=False, lora=text_lora(rank=2))
    with adapted.reference():  # adapters are switched off: nothing had to be kept
        pass
