# SPDX-License-Identifier: Apache-2.0
"""Folders with text encoders: the policy's images are the pipeline's; what cannot be used is refused."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from tests.support.models.pipelines import tiny_folder, tiny_policy, tiny_prompts
from visalign.adapters import LoraSettings, PipelinePolicy, load_policy
from visalign.adapters.pipeline.condition import image_of
from visalign.errors import UserError
from visalign.flow.rollout import encoder_inputs, rollout
from visalign.training.diffusion.merging import guidance_scale


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


SIZES: dict[str, tuple[int, int]] = {"sd15": (32, 16), "sdxl": (32, 16), "flux": (16, 8)}
PROMPTS = ["a red circle", "two blue squares left of a star"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tiny_folder(name, tmp_path_factory.mktemp("models") / name) for name in SIZES}


@pytest.mark.parametrize("name", SIZES)
def test_prompts_make_the_pipelines_images(folders, name):
    guidance = None if name == "flux" else 3.0
    size = SIZES[name]
    policy = load_policy(folders[name], guidance=guidance, image_size=size)
    assert isinstance(policy, PipelinePolicy)
    noise = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    latents = rollout(policy, policy.encode(PROMPTS), sigmas=policy.sigmas(3), noise=noise).latents
    pipe: Any = DiffusionPipeline.from_pretrained(folders[name], safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    call = {"guidance_scale": guidance} if guidance else {}
    expected = pipe(
        PROMPTS, height=size[0], width=size[1], latents=noise, num_inference_steps=3, output_type="pt", **call
    )[0]
    assert float((policy.decode(latents) - expected).abs().max()) <= 2e-5


@pytest.mark.parametrize("name", ["sd15", "qwen_image"])
def test_a_scale_that_is_set_later(name):
    usual, later = tiny_policy(name), tiny_policy(name, guidance=None)
    x, sigma = torch.randn(1, *later.latent_shape), torch.tensor([0.5])
    with torch.no_grad():
        plain = later.velocity(x, sigma, later.encode(PROMPTS[:1]))
        later.guidance = usual.guidance
        guided = later.velocity(x, sigma, later.encode(PROMPTS[:1]))
        assert torch.equal(guided, usual.velocity(x, sigma, usual.encode(PROMPTS[:1])))
    assert not torch.allclose(guided, plain, atol=1e-4)


def test_a_later_scale_has_its_negative_prompt_beside_the_image_to_edit():
    def look_at_image(pipe):
        encode_text = pipe.encode_prompt

        def encode_prompt(image, **kwargs):
            return tuple(value if value is None else value + np.mean(image) for value in encode_text(**kwargs))

        pipe.encode_prompt = encode_prompt

    policy, prompts = tiny_policy("qwen_image_edit", look_at_image), tiny_prompts("qwen_image_edit", PROMPTS[:1])
    x, sigma = torch.randn(1, *policy.latent_shape), torch.tensor([0.5])
    with torch.no_grad():
        expected = policy.velocity(x, sigma, policy.encode(prompts))
        with guidance_scale(policy, 1.0):
            condition = policy.encode(prompts)
        assert torch.equal(policy.velocity(x, sigma, condition), expected)


def test_the_negative_prompt_is_encoded_without_autocast(folders):
    options = {"guidance": 3.0, "autocast": torch.bfloat16, "image_size": SIZES["sd15"]}
    policies: list[Any] = [load_policy(folders["sd15"], **options) for _ in range(2)]
    early, late = policies
    early.encode_negative()
    x, sigma = torch.randn(1, *late.latent_shape), torch.tensor([0.5])
    with torch.no_grad():
        pair = [policy.velocity(x, sigma, policy.encode(PROMPTS[:1])) for policy in (early, late)]
    assert torch.equal(*pair)


def test_times_of_a_shift_that_the_noise_levels_do_not_share():
    """CogView4: σ = μ / (μ + 1/u − 1), t = 1000 u."""
    policy = tiny_policy("cogview4")
    sigmas, mu = policy.sigmas(4, timestep_schedule="plain"), policy._call.scheduler.mu
    assert mu is not None
    u = torch.tensor([1.0, 0.75, 0.5, 0.25])
    torch.testing.assert_close(sigmas[:-1], mu / (mu + 1 / u - 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(policy.times(sigmas[:-1]), 1000 * u, rtol=2e-3, atol=1.0)


def test_times_that_are_laid_on_tokens_go_one_by_one():

    def change(pipe: Any) -> None:
        pipe.register_to_config(expand_timesteps=True, boundary_ratio=None)
        pipe.transformer_2 = None

    policy = tiny_policy("wan", change)
    x, sigma = torch.randn(3, *policy.latent_shape), torch.tensor([0.9, 0.5, 0.2])
    condition = policy.encode([*PROMPTS, PROMPTS[0]])
    with torch.no_grad():
        together = policy.velocity(x, sigma, condition)
        single = policy.velocity(x[1:2], sigma[1:2], condition.select(torch.tensor([1])))
    torch.testing.assert_close(together[1:2], single, rtol=1e-4, atol=1e-4)


def test_dtypes_of_the_parts(folders):
    policy = PipelinePolicy.from_pretrained(
        folders["sd15"],
        dtype=torch.bfloat16,
        decoder_dtype=torch.float32,
        encoder_dtype=torch.float32,
        lora=LoraSettings(rank=2),
        gradient_checkpointing=True,
    )
    dtypes = [getattr(policy.pipe, part).dtype for part in ("unet", "vae", "text_encoder")]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert policy.storage_dtype == torch.bfloat16
    x = torch.randn(1, *policy.latent_shape)
    v = policy.velocity(x, torch.tensor([0.5]), policy.encode(["a red circle"]))
    v.square().mean().backward()
    assert all(p.dtype == torch.float32 and p.grad is not None for _, p in policy.trainable_parameters())
    assert policy.decode(x).dtype == torch.float32


def test_the_whole_network_in_16_bits(folders, tmp_path):
    policy = PipelinePolicy.from_pretrained(folders["flux"], dtype=torch.bfloat16)
    assert policy.compute_dtype == torch.bfloat16 and policy.storage_dtype == torch.float32
    assert all(p.dtype == torch.float32 for _, p in policy.trainable_parameters())
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.mul_(1.01)
    policy.save(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["scheduler"] == ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    again = PipelinePolicy.from_pretrained(folders["flux"])
    again.load(tmp_path / "model")
    pairs = zip(policy.trainable_parameters(), again.trainable_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sd3", {"guidance": 0.5}, r"is guided by at least 1, and 1 switches guidance off; guidance is 0\.5"),
        ("sd3", {"image_size": 13}, r"image_size is 13; this model makes multiples of 2 pixels"),
        ("sana", {"image_size": (32, 16)}, r"SanaPipeline refuses its call: `height` and `width` have to be"),
        ("hidream", {"image_size": 32}, r"makes images of an area of its own\. Leave image_size out"),
        ("wan", {"num_frames": 6}, r"num_frames is 6; WanPipeline makes 1 \+ a multiple of 4 frames"),
        ("sd3", {"call": {"skip_guidance_layers": [0]}}, r"call names skip_guidance_layers, which .* be off"),
        ("sd3", {"call": {"steps": 3}}, r"call names steps, which StableDiffusion3Pipeline does not take"),
    ],
)
def test_refusals(name, options, message):
    with pytest.raises(UserError, match=message):
        tiny_policy(name, **options)


def test_refusals_of_what_is_given(folders, tmp_path):
    with pytest.raises(UserError, match=r"is a DDPMPipeline, which is of no family that is known: .*flux"):
        PipelinePolicy(type("DDPMPipeline", (), {"scheduler": None})())
    with pytest.raises(UserError, match=r"samples with Odd, neither a flow nor a noise schedule"):
        tiny_policy("sd15", lambda pipe: setattr(pipe, "scheduler", type("Odd", (), {"config": {}})()))
    policy = PipelinePolicy.from_pretrained(folders["sd15"], lora=LoraSettings(rank=2))
    shutil.copytree(folders["sd15"] / "unet", tmp_path / "unet")
    (tmp_path / "model_index.json").write_bytes((folders["sd15"] / "model_index.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r" lacks scheduler, text_encoder, tokenizer, vae\. Copy them"):
        PipelinePolicy.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="velocity got a list"):
        policy.velocity(torch.zeros(1, *policy.latent_shape), torch.tensor([0.5]), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="velocity got 2 latents, sigma"):
        policy.velocity(torch.zeros(2, *policy.latent_shape), torch.tensor([0.5]), policy.encode(["a"]))
    policy.save(tmp_path / "lora")
    with pytest.raises(UserError, match=r"does not fit this FluxPipeline: it is a LoRA of Stable Diffusion"):
        PipelinePolicy.from_pretrained(folders["flux"], lora_path=tmp_path / "lora")


def test_a_flux_that_is_distilled_takes_no_guidance():
    """FLUX.1-schnell: its network has no input for the scale."""

    def distil(pipe: Any) -> None:
        config = {**pipe.transformer.config, "guidance_embeds": False}
        pipe.transformer = type(pipe.transformer).from_config(config)

    with pytest.raises(UserError, match=r"FluxPipeline is distilled: .*guidance is 3\.5"):
        tiny_policy("flux", distil, guidance=3.5)
    policy = tiny_policy("flux", distil)
    x, condition = torch.randn(1, *policy.latent_shape), policy.encode(PROMPTS[:1])
    assert not policy.guided and policy.velocity(x, torch.tensor([0.5]), condition).isfinite().all()


def test_images_to_edit(tmp_path):
    """A file, an image or a tensor; each image goes in a call of its own."""
    policy = tiny_policy("flux_kontext")
    pixels = torch.rand(3, 16, 8, generator=torch.Generator().manual_seed(1)).mul(255).round() / 255
    image = image_of(pixels)
    image.save(tmp_path / "a.png")
    sources = [str(tmp_path / "a.png"), image, pixels, torch.zeros(3, 16, 8)]
    condition = policy.encode([{"prompt": "a red circle", "source": source} for source in sources])
    x = torch.randn(1, *policy.latent_shape).repeat(4, 1, 1)
    with torch.no_grad():
        v = policy.velocity(x, torch.full((4,), 0.5), condition)
    assert torch.equal(v[0], v[1]) and torch.equal(v[0], v[2]) and not torch.allclose(v[0], v[3], atol=1e-4)
    records = [{"prompt": "a red circle"}]
    assert encoder_inputs(policy, records) is records
    with pytest.raises(UserError, match=r"FluxKontextPipeline edits an image, and a record has no 'source'"):
        policy.encode(records)
    with pytest.raises(UserError, match=r"The source 'nowhere.png' is no image that can be read"):
        policy.encode([{"prompt": "a", "source": "nowhere.png"}])
    assert encoder_inputs(tiny_policy("sd3"), records) == ["a red circle"]


def test_a_video_is_judged_by_its_middle_frame():
    policy = tiny_policy("wan")
    x = torch.randn(2, *policy.latent_shape)
    frames = policy.decode_frames(x)
    assert frames.shape == (2, 5, 3, 16, 32) and torch.equal(policy.decode(x), frames[:, 2])
