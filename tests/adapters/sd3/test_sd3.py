# SPDX-License-Identifier: Apache-2.0
"""The SD3 policy against the pipeline itself: same images, same grid, same encodings, exact reference."""

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline, StableDiffusionPipeline

from tests.support.models.sd3 import build_tiny_sd3, load_pipeline, tiny_sd3_pipeline
from tests.support.ratio import ratio_check
from visalign.adapters import LoraSettings, PipelinePolicy, SD3Policy
from visalign.errors import UserError
from visalign.flow import replay, rollout
from visalign.flow.schedules import diffusers_timestep_sigmas, timestep_sigmas
from visalign.interfaces import DiffusionPolicy

PROMPTS = ["a red circle", "two blue squares", "a red circle"]
LORA = LoraSettings(rank=3, alpha=7, init="kaiming", seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sd3")
    return {
        "plain": build_tiny_sd3(root / "plain"),
        "sd35": build_tiny_sd3(root / "sd35", sd35=True),
        "t5": build_tiny_sd3(root / "t5", t5=True),
    }


def perturb(policy: SD3Policy, scale: float = 0.3) -> None:
    g = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for _, p in policy.trainable_parameters():
            p.add_(scale * torch.randn(p.shape, generator=g))


def noise(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 8, 8, 8, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def sample(policy: SD3Policy, prompts=PROMPTS, steps: int = 4) -> torch.Tensor:
    """ODE Euler sampling through the policy's public face."""
    x, condition = noise(len(prompts)), policy.encode(prompts)
    grid = policy.sigmas(steps)
    for sigma, following in pairwise(grid):
        x = x + (following - sigma) * policy.velocity(x, sigma.expand(len(x)), condition)
    return policy.decode(x)


def sample_pipe(pipe, guidance: float, prompts=PROMPTS, steps: int = 4, **options) -> torch.Tensor:
    """The same images as a user makes them."""
    options |= {"num_inference_steps": steps, "guidance_scale": guidance, "output_type": "pt"}
    return pipe(prompts, latents=noise(len(prompts)), **options).images


def inputs(policy: SD3Policy):
    return noise(), torch.tensor([0.9, 0.5, 0.1]), policy.encode(PROMPTS)


@pytest.mark.parametrize(("kind", "guidance"), [("plain", 1.0), ("sd35", 3.5), ("t5", 3.5)])
def test_images_equal_the_pipeline(folders, kind, guidance):
    policy = SD3Policy.from_pretrained(folders[kind], guidance=guidance, lora=LORA, max_sequence_length=32)
    expected = sample_pipe(load_pipeline(folders[kind], t5=kind == "t5"), guidance, max_sequence_length=32)
    ours = sample(policy)
    assert ours.dtype == torch.float32 and ours.shape == (3, 3, 64, 64)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    # the policy's own pipe stays usable, with the new attention processor in place
    torch.testing.assert_close(sample_pipe(policy.pipe, guidance, max_sequence_length=32), expected, rtol=0, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.05, "the tiny model must listen to its prompts"


def test_saved_lora_gives_the_same_images_in_a_fresh_pipe(folders, tmp_path):
    kind, guidance = "sd35", 3.5
    policy = SD3Policy.from_pretrained(folders[kind], guidance=guidance, lora=LORA)
    before = sample(policy)
    perturb(policy)
    ours = sample(policy)
    assert (ours - before).abs().max() > 0.02
    policy.save(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["pytorch_lora_weights.safetensors"]
    pipe = load_pipeline(folders[kind])
    pipe.load_lora_weights(tmp_path)
    config = next(iter(pipe.transformer.peft_config.values()))
    assert (config.r, config.lora_alpha) == (3, 7)
    torch.testing.assert_close(sample_pipe(pipe, guidance), ours, rtol=0, atol=1e-4)
    with policy.reference():
        torch.testing.assert_close(sample(policy), before, rtol=0, atol=0)
    again = SD3Policy.from_pretrained(folders[kind], guidance=guidance, lora=replace(LORA, seed=9))
    again.load(tmp_path)
    torch.testing.assert_close(sample(again), ours, rtol=0, atol=0)


def test_the_general_adapter_computes_the_same(folders, tmp_path):
    kind, guidance = "t5", 3.5
    options = {"guidance": guidance, "lora": LORA}
    policy = SD3Policy.from_pretrained(folders[kind], **options)
    perturb(policy)
    policy.save(tmp_path)
    general = PipelinePolicy.from_pretrained(folders[kind], **options)
    general.load(tmp_path)
    assert torch.equal(policy.sigmas(4), general.sigmas(4))
    x, sigma, condition = inputs(policy)
    general_condition = general.encode(PROMPTS)
    with torch.no_grad():
        expected = policy.velocity(x, sigma, condition)
        velocity = general.velocity(x, sigma, general_condition)
    torch.testing.assert_close(velocity, expected, rtol=0, atol=3e-5 * guidance)  # which scales rounding too
    trajectory = rollout(policy, condition, sigmas=policy.sigmas(4), sde_steps=[0, 2], seeds=[1, 2, 3])
    assert ratio_check(general, general_condition, trajectory, batch_size=3).ok
    with general.reference(), torch.no_grad():
        assert (general.velocity(x, sigma, general_condition) - expected).abs().max() > 1e-2


def test_full_fine_tuning_saves_a_whole_pipeline(folders, tmp_path):
    policy = SD3Policy.from_pretrained(folders["plain"])
    before = sample(policy)
    perturb(policy, 0.1)
    ours = sample(policy)
    policy.save(tmp_path / "full")
    torch.testing.assert_close(sample_pipe(load_pipeline(tmp_path / "full"), 1.0), ours, rtol=0, atol=1e-4)
    with policy.reference():
        torch.testing.assert_close(sample(policy), before, rtol=0, atol=0)
    again = SD3Policy.from_pretrained(folders["plain"])
    again.load(tmp_path / "full")
    torch.testing.assert_close(sample(again), ours, rtol=0, atol=0)
    assert len(policy.trainable_parameters()) == len(list(policy.module.parameters()))


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_graph_from_before_the_reference_has_the_gradient_of_the_trained_weights(lora):
    policy = SD3Policy(tiny_sd3_pipeline(), lora=lora)
    perturb(policy, 0.1)
    x, sigma, condition = inputs(policy)
    trained = policy.velocity(x, sigma, condition)
    with pytest.raises(RuntimeError, match="inside"), policy.reference():
        with torch.no_grad():
            assert (policy.velocity(x, sigma, condition) - trained).abs().max() > 1e-3
        raise RuntimeError("inside")
    trained.square().sum().backward()
    used = [p.grad.clone() for _, p in policy.trainable_parameters() if p.grad is not None]
    policy.module.zero_grad()
    policy.velocity(x, sigma, condition).square().sum().backward()
    fresh = [p.grad for _, p in policy.trainable_parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(used, fresh, strict=True))


def test_guidance_under_autocast_keeps_the_gradient():
    """The first pass, without gradient, must cache no weights that cut off the second's gradient."""
    reached = []
    for autocast in (None, torch.bfloat16):
        policy = SD3Policy(tiny_sd3_pipeline(), lora=LORA, guidance=2.0, autocast=autocast)
        perturb(policy)
        policy.velocity(*inputs(policy)).square().mean().backward()
        gradients = {name: p.grad for name, p in policy.trainable_parameters()}
        reached.append({name for name, grad in gradients.items() if grad is not None and grad.abs().sum() > 0})
    assert reached[0] == reached[1] and len(reached[0]) > 8


def test_each_unique_prompt_is_encoded_once(monkeypatch):
    monkeypatch.setattr("visalign.adapters.sd3.text.BATCH", 2)
    policy = SD3Policy(tiny_sd3_pipeline(), guidance=2.0)
    batches = []
    encode_prompt = policy.pipe.encode_prompt
    monkeypatch.setattr(
        policy.pipe, "encode_prompt", lambda *a, **k: batches.append(k["prompt"]) or encode_prompt(*a, **k)
    )
    condition = policy.encode(["b", "a", "b", "two", "a"])
    assert batches == [["b", "a"], ["two"]] and len(condition) == 5
    assert condition.index.tolist() == [0, 1, 0, 2, 1] and condition.embeds.shape == (3, 17, 24)
    assert condition.select(torch.tensor([3, 3])).index.tolist() == [2, 2]
    for _ in range(2):
        with torch.no_grad():
            policy.velocity(noise(2), torch.full((2,), 0.5), condition.select(torch.tensor([0, 1])))
    assert batches[2:] == [[""]]
    assert not condition.embeds.requires_grad


@pytest.mark.parametrize("guidance, counts", [(1.0, [(3, 0), (0, 3)]), (2.0, [(6, 0), (3, 3)])])
def test_guidance_counts_and_gradient(guidance, counts):
    policy = SD3Policy(tiny_sd3_pipeline(), guidance=guidance, lora=LORA)
    assert isinstance(policy, DiffusionPolicy)
    perturb(policy)
    x, sigma, condition = inputs(policy)
    count = policy.forward_count
    with torch.no_grad():
        no_grad = policy.velocity(x, sigma, condition)
    assert (count.forward, count.forward_backward) == counts[0]
    count.forward = 0
    v = policy.velocity(x, sigma, condition)
    assert (count.forward, count.forward_backward) == counts[1]
    torch.testing.assert_close(v, no_grad, rtol=1e-5, atol=1e-5)

    # the unconditional half is a constant: the gradient is guidance times that of the conditional half
    v.sum().backward()
    guided = [p.grad.clone() for _, p in policy.trainable_parameters() if p.grad is not None]
    policy.module.zero_grad()
    policy.guidance = 1.0
    policy.velocity(x, sigma, condition).sum().backward()
    for g, (name, p) in zip(guided, policy.trainable_parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(g, guidance * p.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert all(p.grad is None for n, p in policy.module.named_parameters() if "lora" not in n)


@pytest.mark.parametrize(("shift", "steps"), [(1.0, 1), (3.0, 10)])
def test_grids(shift, steps):
    policy = SD3Policy(tiny_sd3_pipeline(shift=shift))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    assert torch.equal(policy.sigmas(steps), torch.as_tensor(scheduler.sigmas))
    torch.testing.assert_close(policy.sigmas(steps), diffusers_timestep_sigmas(steps, shift=shift))
    assert torch.equal(policy.sigmas(steps, timestep_schedule="plain"), timestep_sigmas(steps, shift=shift))


@pytest.mark.parametrize("dtype, autocast", [("bfloat16", None), ("float32", "bfloat16")])
def test_a_guided_replay_is_its_rollout(dtype, autocast):
    """In 16 bits the two halves in one batch gave |log r| up to 2.6e-4, above the published clip range."""
    cast = None if autocast is None else getattr(torch, autocast)
    pipe = tiny_sd3_pipeline(sd35=True).to(getattr(torch, dtype))
    policy = SD3Policy(pipe, lora=LORA, guidance=4.5, autocast=cast)
    perturb(policy)
    condition = policy.encode(PROMPTS * 4)
    trajectory = rollout(policy, condition, sigmas=policy.sigmas(6), sde_steps=[0, 2, 4], seeds=list(range(12)))
    # one step after the other, as they were made: the same batches, so the same bits
    step_by_step = []
    for s in range(3):
        pairs = trajectory.pairs(torch.arange(12), torch.full((12,), s))
        stats = replay(policy, condition, pairs, trajectory.kernel)
        assert stats.log_prob.requires_grad
        step_by_step.append((stats.log_prob - pairs.log_prob).abs().max())
    assert max(step_by_step) == 0
    assert ratio_check(policy, condition, trajectory, batch_size=12).ok


def test_full_fine_tuning_in_16_bits_moves_float32_weights():
    dtype = torch.bfloat16
    policy = SD3Policy(tiny_sd3_pipeline().to(dtype))
    assert policy.compute_dtype == dtype and policy.pipe.vae.dtype == dtype
    weights = [p for _, p in policy.trainable_parameters()]
    assert {p.dtype for p in weights} == {torch.float32}
    before = [p.detach().clone() for p in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0)
    v = policy.velocity(*inputs(policy))
    v.square().mean().backward()
    optimizer.step()
    used = [(p, b, p.grad != 0) for p, b in zip(weights, before, strict=True) if p.grad is not None]
    moved = torch.cat([(p != b)[has_gradient] for p, b, has_gradient in used])
    assert moved.float().mean() > 0.98  # in bfloat16 a step of 1e-5 moves a few weights in a hundred


def test_what_is_written_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        SD3Policy(tiny_sd3_pipeline(), lora=LORA).save(tmp_path / "lora")
        SD3Policy(tiny_sd3_pipeline()).save(tmp_path / "full")
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 10 and {file.stat().st_mode & 0o777 for file in files} == {0o640}


def test_autocast_and_16_bit_weights_return_float32():
    full = SD3Policy(tiny_sd3_pipeline(), lora=LORA)
    cast = SD3Policy(tiny_sd3_pipeline(), lora=LORA, autocast=torch.bfloat16)
    half = SD3Policy(tiny_sd3_pipeline().to(torch.bfloat16), lora=LORA)
    assert half.storage_dtype == half.compute_dtype == cast.compute_dtype == torch.bfloat16
    assert cast.storage_dtype == full.compute_dtype == torch.float32
    assert {p.dtype for _, p in half.trainable_parameters()} == {torch.float32}
    x, sigma, condition = inputs(full)
    exact = full.velocity(x, sigma, condition)
    for policy in (cast, half):
        v = policy.velocity(x, sigma, policy.encode(PROMPTS))
        assert v.dtype == torch.float32
        assert 0 < (v - exact).abs().max() < 0.1 * exact.abs().max()
        v.sum().backward()
        assert policy.decode(x).dtype == torch.float32


def test_messages_of_the_policy(tmp_path):
    policy = SD3Policy(tiny_sd3_pipeline())
    with pytest.raises(UserError, match=r"guidance is 0.5; it must be at least 1"):
        SD3Policy(tiny_sd3_pipeline(), guidance=0.5)
    policy.pipe.scheduler = DDIMScheduler()
    with pytest.raises(UserError, match="samples with DDIMScheduler, which is no plain flow"):
        policy.sigmas(4)


def test_messages_of_model_folders(folders, tmp_path):
    def copy(name, **changes):
        target = tmp_path / name
        shutil.copytree(folders["plain"], target)
        index = json.loads((target / "model_index.json").read_text())
        (target / "model_index.json").write_text(json.dumps(index | changes))
        return target

    with pytest.raises(FileNotFoundError, match=r"no model nobody/nothing\. The model .* cannot be reached"):
        SD3Policy.from_pretrained("nobody/nothing")
    with pytest.raises(UserError, match=r"got a StableDiffusion3Pipeline without vae; it needs"):
        SD3Policy.from_pretrained(copy("null_vae", vae=[None, None]))
    with pytest.raises(UserError, match=r"has only text_encoder_3 of T5's text_encoder_3, tokenizer_3\. Save"):
        SD3Policy.from_pretrained(copy("half_t5", text_encoder_3=["transformers", "T5EncoderModel"]))
    with pytest.raises(UserError, match="is a StableDiffusionPipeline; the SD3 adapter loads a Stable"):
        SD3Policy.from_pretrained(copy("sd1", _class_name=StableDiffusionPipeline.__name__))


def test_a_null_t5_is_an_absent_one(folders, tmp_path):
    """A pipeline whose T5 gives zeros loads without `text_encoder_3=None`, and is collapsed all the same."""
    folder = build_tiny_sd3(tmp_path / "null", t5="null")
    expected = sample_pipe(load_pipeline(folders["plain"]), 2.0)
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(sample_pipe(pipe, 2.0), expected, rtol=0, atol=1e-5)
    policy = SD3Policy.from_pretrained(folder, guidance=2.0)
    assert policy.encode(PROMPTS).embeds.shape == (2, 17, 24)
    torch.testing.assert_close(sample(policy), expected, rtol=0, atol=1e-4)


def test_decoding_follows_bfloat16_autocast_and_no_other():
    policy = SD3Policy(tiny_sd3_pipeline(), decode_batch=2)
    latents = torch.randn(5, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = policy.decode(latents)
        policy.autocast = torch.bfloat16
        low = policy.decode(latents)
        policy.autocast = torch.float16
        assert torch.equal(policy.decode(latents), exact)
    assert low.dtype == torch.float32 and low.is_contiguous() and exact.is_contiguous()
    assert 0 < (low - exact).abs().mean() < 1 / 255
