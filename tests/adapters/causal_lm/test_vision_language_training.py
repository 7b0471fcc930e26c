# SPDX-License-Identifier: Apache-2.0
"""Policies that see, in training: gradients, the reference, LoRA, values, saved files."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.support.models.vision_language import (
    IMAGE,
    KINDS,
    drawn,
    make_image,
    own_logits,
    perturb,
    policy,
    sampled,
    save_tiny_seeing_model,
    tiny_processor,
    tiny_seeing_model,
)
from visalign.adapters.causal_lm.demonstrations import demonstration_lengths, demonstration_rollout
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.text import Sampling

LORA = text_lora(rank=3, alpha=7, seed=5)
ONE, OTHER = make_image(24, 16, 1), make_image(24, 16, 2)


@pytest.mark.parametrize(("kind", "checkpointing"), [*zip(KINDS, [False, True, True], strict=True)])
def test_gradients_are_those_of_the_models_logits(kind, checkpointing) -> None:
    actor = policy(kind, gradient_checkpointing=checkpointing)
    rollout = sampled(actor, Sampling(temperature=1.5), num_generations=8)
    # a sample of each of three prompts, without the image tokens that the library would take for images
    rows = [next(r for r in range(8 * p, 8 * p + 8) if IMAGE not in drawn(rollout, r)) for p in range(3)]
    coefficients = torch.arange(1, rollout.loss_mask.shape[1] + 1)
    names = [name for name, _ in actor.trainable_parameters()]
    parameters = [parameter for _, parameter in actor.trainable_parameters()]
    log_prob = actor.log_probs(rollout, torch.tensor(rows)).log_prob
    ours = torch.autograd.grad((log_prob * coefficients).sum(), parameters, allow_unused=True)
    total = torch.zeros(())
    for row in rows:
        completion = drawn(rollout, row)
        log_p = (own_logits(actor, row // 8, completion) / 1.5).log_softmax(-1)
        total = total + (log_p.gather(-1, completion[:, None])[:, 0] * coefficients[: len(completion)]).sum()
    theirs = torch.autograd.grad(total, parameters, allow_unused=True)
    for name, mine, own in zip(names, ours, theirs, strict=True):
        assert (mine is None) == (own is None), name
        if mine is not None and own is not None:
            torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-3 * max(1, own.abs().max().item()))
    tower = [m for name, m in zip(names, ours, strict=True) if "visual" in name and m is not None]
    assert len(tower) > 10 and max(float(gradient.abs().max()) for gradient in tower) > 1e-3


@pytest.mark.parametrize("targets", [("all-linear",), ("gate_proj", "q_proj")])
def test_lora_is_put_into_the_language_part_alone(targets) -> None:
    # Qwen2.5-VL's vision tower has layers of the same names
    actor = policy("qwen2_5_vl", lora=replace(LORA, target_modules=targets))
    names = [name for name, _ in actor.trainable_parameters()]
    assert len(names) == 2 * 2 * (7 if targets == ("all-linear",) else 2)
    assert all(name.startswith("model.language_model.layers.") for name in names)
    rollout = sampled(actor)
    actor.log_probs(rollout).log_prob.sum().backward()
    moved = [p for _, p in actor.model.named_parameters() if p.grad is not None]
    assert len(moved) == len(names)
    with pytest.raises(UserError, match=r"\['qkv'\] name no linear layer of Qwen2_5"):
        policy("qwen2_5_vl", lora=text_lora(target_modules=("qkv",)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@torch.no_grad()
def test_saved_policies_are_read_by_us_and_by_the_library(tmp_path) -> None:
    base = save_tiny_seeing_model(tmp_path / "base")
    actor = CausalLMPolicy.from_pretrained(base, lora=LORA)
    rollout = sampled(actor)
    torch.testing.assert_close(rollout.log_prob, sampled(policy()).log_prob, rtol=0, atol=1e-5)
    perturb(actor)
    trained = actor.log_probs(rollout).log_prob
    actor.save(tmp_path / "trained")
    same = CausalLMPolicy.from_pretrained(base, lora=LORA)
    same.load(tmp_path / "trained")
    assert torch.equal(same.log_probs(rollout).log_prob, trained)
    with same.reference():
        torch.testing.assert_close(same.log_probs(rollout).log_prob, rollout.log_prob, rtol=0, atol=1e-4)
    peft: Any = PeftModel.from_pretrained(tiny_seeing_model(), str(tmp_path / "trained"))
    merged = CausalLMPolicy(peft.merge_and_unload(), tiny_processor())
    torch.testing.assert_close(merged.log_probs(rollout).log_prob, trained, rtol=0, atol=1e-4)


@torch.no_grad()
def test_demonstrations_may_show_images() -> None:
    actor = policy()
    prompts = [[{"role": "user", "content": [{"type": "image", "image": image}]}] for image in (ONE, OTHER)]
    rollout = demonstration_rollout(actor, prompts, ["a b", "a b"])
    assert rollout.images is not None and [len(row) for row in rollout.images] == [1, 1]
    first, second = actor.log_probs(rollout).log_prob
    assert not torch.allclose(first, second)
    records = [{"prompt": prompts[0], "completion": "a b"}]
    (length,) = demonstration_lengths(actor, records)
    assert length == int(rollout.prompt_mask[0].sum() + rollout.loss_mask[0].sum())  # image tokens too
