# SPDX-License-Identifier: Apache-2.0
"""Every family against its pipeline's own run; a family is tested by being in the table.

It warns when diffusers changes: a tiny random pipeline of the installed version, and differences of 0.
"""

from __future__ import annotations

import copy
import logging
import logging.handlers
from typing import Any

import diffusers
import pytest
import torch
from peft import PeftModel
from PIL import Image

from tests.support.models.modular import own_modular_run
from tests.support.models.pipelines import random_rows, tiny_pipeline, tiny_policy, tiny_prompts, trained_weights
from tests.support.ratio import ratio_check
from visalign.adapters import LoraSettings, check_adapter
from visalign.adapters.pipeline.families import FAMILIES
from visalign.adapters.pipeline.lora import loading_code
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.errors import UserError
from visalign.flow.rollout import rollout
from visalign.vision.pixels import read_pixels


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


pytestmark = [
    pytest.mark.filterwarnings("ignore:This QwenImage21Turbo.* was distilled for"),
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated"),
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated"),  # a parent of PRXPipeline
]

PROMPTS = ["a red circle", "two blue squares!", "a red circle"]
CHECKED = ["a red circle", "two blue squares"]
STEPS = 3
ROUNDED = {"sd15": 3e-6, "sdxl": 3e-6, "pixart": 3e-6, "sana": 1e-6}
ROUNDED |= {"flux_kontext": 3e-6, "qwen_image_edit": 3e-6, "qwen_image_edit_plus": 3e-6}
ROUNDED |= {name: 3e-6 for name, family in FAMILIES.items() if family.modular}
"""Largest relative difference. The noise's path has another scale; Sana's attention with adapters
of value 0 rounds differently. Edits, and prompts of modular pipelines, are compared one by one. All others are
equal to the last bit where the processor's kernels round alike, and to EXACT everywhere."""
EXACT = 1e-6


def own_images(
    name: str,
    policy: PipelinePolicy,
    latents: torch.Tensor,
    output_type: str,
    *,
    at: int | None = None,
    pipe: Any = None,
) -> Any:
    """What a pipeline, by default a new one, makes of the latents by itself, with a scheduler of its own."""
    family = FAMILIES[name]
    if (family.source == "needed" or family.alone != "never") and len(latents) > 1:  # one image a call
        parts = [own_images(name, policy, latents[i : i + 1], output_type, at=i, pipe=pipe) for i in range(3)]
        return torch.cat(parts)
    pipe = tiny_pipeline(name)[0] if pipe is None else pipe
    if family.modular:
        size = {side: policy._call.fixed[side] for side in ("height", "width")}
        call = {**size, "num_inference_steps": STEPS}
        return own_modular_run(pipe, PROMPTS, latents, policy.guidance, **call)[output_type == "pt"]
    if not isinstance(pipe.scheduler, (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDIMScheduler)):
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=pipe.scheduler.config.flow_shift)
    if getattr(pipe, "guider", None) is not None:
        pipe.guider = pipe.ocr_guider = diffusers.ClassifierFreeGuidance(guidance_scale=policy.guidance)
    rows = policy.encode(tiny_prompts(name, PROMPTS)).rows()
    rows = rows if at is None else rows[at : at + 1]
    call = {**policy._call.fixed, **policy._call.inputs(rows, guided=policy.guided)}
    call |= {"image": call["image"].image} if "image" in call else {}
    if name.startswith("flux2"):  # its `latents` stand unpacked
        height, width = policy._call.fixed["height"] // 2, policy._call.fixed["width"] // 2
        latents = latents.permute(0, 2, 1).reshape(len(latents), -1, height, width)
    if name == "kandinsky5":  # behind them stand a condition and its mask, both absent
        latents = torch.cat([latents, latents.new_zeros(*latents.shape[:-1], latents.shape[-1] + 1)], -1)
    call |= {"latents": latents.clone(), "num_inference_steps": STEPS, "output_type": output_type}
    with torch.no_grad():
        return torch.as_tensor(pipe(**call, return_dict=False)[0]).float()


@pytest.mark.parametrize("name", ["sd15", "qwen_image", "flux3"])
def test_without_guidance_the_network_is_asked_once(name):
    policy = tiny_policy(name, guidance=None)
    assert not policy.guided
    noise = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
    before = policy.forward_count.forward
    condition = policy.encode(tiny_prompts(name, PROMPTS))
    latents = rollout(policy, condition, sigmas=policy.sigmas(STEPS), noise=noise).latents
    assert policy.forward_count.forward - before == 3 * STEPS
    expected = own_images(name, policy, noise, "pt")
    assert float((policy.decode_frames(latents) - expected).abs().max()) <= 5e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_images_are_the_pipelines_own(name):
    policy = tiny_policy(name)
    policy._halves.apart = False  # one batch of both halves, as the pipeline has it: to the last bit
    noise = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
    sigmas = policy.sigmas(STEPS)
    latents = rollout(policy, policy.encode(tiny_prompts(name, PROMPTS)), sigmas=sigmas, noise=noise).latents
    own = own_images(name, policy, noise, "latent")
    exact = ROUNDED.get(name, EXACT)
    assert own.isfinite().all() and own.abs().max() > 0.1
    if not name.startswith("flux2"):  # whose latents come back unpacked
        assert float((latents - own).abs().max()) <= exact * float(own.abs().max())
    images = policy.decode_frames(latents)
    expected = own_images(name, policy, noise, "pt")
    assert images.shape == expected.shape
    assert float((images - expected).abs().max()) <= 1e-5 + 10 * exact
    policy._halves.apart = True
    separate = rollout(policy, policy.encode(tiny_prompts(name, PROMPTS)), sigmas=sigmas, noise=noise).latents
    assert float((latents - separate).abs().max()) <= 1e-4 * float(own.abs().max())
    assert policy.decode(latents).shape[:2] == (3, 3)


@pytest.mark.parametrize("name", ["flux2_klein"])
def test_an_edit_of_several_images_is_the_pipelines_own(name):
    """Samples of one source stand in one call, and each image is encoded once."""
    policy, sides = tiny_policy(name), ((64, 64), (96, 64), (64, 128))
    cup, table, wall = (read_pixels(random_rows(3, *side, text=str(side)).sigmoid(), "it") for side in sides)
    images = [Image.fromarray(pixels.permute(1, 2, 0).numpy()) for pixels in (cup, table, wall)]
    lists = [images[:2], images[::-1], images[:2]]
    records = [{"prompt": text, "source": source} for text, source in zip(PROMPTS, lists, strict=True)]
    records[2] = records[0]
    noise = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
    encode, encoded = policy.pipe.vae.encode, []
    policy.pipe.vae.encode = lambda x, *a, **k: (encoded.append(x.shape), encode(x, *a, **k))[1]
    condition = policy.encode(records)
    trajectory = rollout(policy, condition, sigmas=policy.sigmas(STEPS), noise=noise)
    assert len(encoded) == 2 + 3
    del policy.pipe.vae.encode
    pipe, rows, own = tiny_pipeline(name)[0], condition.rows(), []
    for i, listed in enumerate(lists):
        call = {**policy._call.fixed, **policy._call.inputs(rows[i : i + 1], guided=policy.guided)}
        start = noise[i : i + 1].clone()
        if name.startswith("flux2"):
            start = start.permute(0, 2, 1).reshape(1, -1, call["height"] // 2, call["width"] // 2)
        call |= {"image": listed, "latents": start, "num_inference_steps": STEPS, "output_type": "pt"}
        with torch.no_grad():
            own.append(torch.as_tensor(pipe(**call, return_dict=False)[0]).float())
    assert float((policy.decode_frames(trajectory.latents) - torch.cat(own)).abs().max()) <= 3e-5
    single = policy.encode([{**record, "source": record["source"][0]} for record in records])
    other = rollout(policy, single, sigmas=policy.sigmas(STEPS), noise=noise)
    assert float((other.latents - trajectory.latents).abs().max()) > 1e-3, "the second image counts"
    with pytest.raises(UserError, match=r"has 0 images, and .* edits one or several\."):
        policy.encode([{"prompt": "a", "source": []}])


def test_several_images_for_a_pipeline_that_edits_one_are_refused():
    image = torch.zeros(3, 16, 8)
    match = r"has 2 images, and FluxKontextPipeline edits one\."
    with pytest.raises(UserError, match=match):
        tiny_policy("flux_kontext").encode([{"prompt": "a", "source": [image, image]}])


def test_a_velocity_is_silent():
    """Qwen-Image's pipeline warns of the mask that its own encoder left out, at every call."""
    policy, handler = tiny_policy("qwen_image"), logging.handlers.BufferingHandler(100)
    condition = policy.encode(PROMPTS[:1])
    logger = logging.getLogger("diffusers")
    logger.addHandler(handler)
    try:
        level = logger.level
        policy.velocity(torch.randn(1, *policy.latent_shape), torch.full((1,), 0.5), condition)
        assert handler.buffer == [] and logger.level == level
        assert not logging.getLogger(type(policy.pipe).__module__).disabled
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["sd15", "flux3"])
def test_a_velocity_walks_through_no_model(name, monkeypatch):
    """diffusers looks for hooks in every module, five to ten times a call, and longer in larger models."""
    policy, walked = tiny_policy(name), []
    own, kinds = torch.nn.Module.named_modules, [type(part) for part in (policy.pipe, policy.module)]
    x, sigma = torch.randn(1, *policy.latent_shape), torch.full((1,), 0.5)
    condition = policy.encode(tiny_prompts(name, PROMPTS[:1]))
    expected = policy.velocity(x, sigma, condition)

    def named_modules(module: Any, *args: Any, **kwargs: Any) -> Any:
        for entry in own(module, *args, **kwargs):
            walked.append(entry)
            yield entry

    monkeypatch.setattr(torch.nn.Module, "named_modules", named_modules)
    assert policy.velocity(x, sigma, condition).equal(expected)
    count = len(walked)
    assert count < sum(1 for _ in own(policy.module)) / 2, count
    assert [type(part) for part in (policy.pipe, policy.module)] == kinds


def test_answers_are_asked_for_again_when_weights_change():
    policy = tiny_policy("sd15")
    x, sigma = torch.randn(1, *policy.latent_shape), torch.full((1,), 0.5)
    condition = policy.encode(PROMPTS[:1])
    policy.velocity(x, sigma, condition)
    policy.module.double()
    assert policy.velocity(x.double(), sigma, condition).isfinite().all()
    kind = type(policy.pipe)
    with pytest.raises(ValueError, match="The latents are"):
        policy.velocity(x[..., :-1], sigma, condition)
    assert type(policy.pipe) is kind


ONE_OF_EACH_KIND = "sd3 sd15 flux flux2_klein flux3 qwen_image kandinsky5 wan".split()


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_replay_finds_the_rollout(name):
    policy = tiny_policy(name)
    condition = policy.encode(tiny_prompts(name, PROMPTS))
    before = copy.copy(policy.forward_count)
    trajectory = rollout(policy, condition, sigmas=policy.sigmas(STEPS), sde_steps=[0, 1], seeds=[1, 2, 3])
    halves = 2 if policy.guided else 1
    assert policy.forward_count.forward - before.forward == 3 * STEPS * halves
    assert ratio_check(policy, condition, trajectory, batch_size=3).ok


@pytest.mark.parametrize("name", [*ONE_OF_EACH_KIND, "flux_kontext", "qwen_image_21"])
def test_the_contract(name, tmp_path):
    policy = tiny_policy(name)
    assert len(check_adapter(policy, prompts=tiny_prompts(name, CHECKED))) == 13
    trained = [n for n, p in policy.module.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.1)
    policy.save(tmp_path)
    x, sigma = torch.randn(2, *policy.latent_shape), torch.tensor([0.8, 0.4])
    condition = policy.encode(tiny_prompts(name, PROMPTS[:2]))
    with torch.no_grad():
        expected = policy.velocity(x, sigma, condition)
    other = tiny_policy(name, lora_path=tmp_path)
    assert other.lora is not None
    assert other.lora == LoraSettings(rank=2, alpha=4, target_modules=other.lora.target_modules)
    with torch.no_grad():
        assert torch.equal(other.velocity(x, sigma, condition), expected)
        with other.reference():  # the reference of a run that goes on is where it goes on from
            assert torch.equal(other.velocity(x, sigma, condition), expected)
    noise = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
    condition = policy.encode(tiny_prompts(name, PROMPTS))
    images = policy.decode_frames(rollout(policy, condition, sigmas=policy.sigmas(STEPS), noise=noise).latents)
    loaded, _ = tiny_pipeline(name)
    code = loading_code(type(loaded).__name__, list(policy.networks), tmp_path)
    exec(code, {"pipe": loaded, "PeftModel": PeftModel})
    for part, network in policy.networks.items():
        weights = trained_weights(getattr(loaded, part))
        assert weights.keys() == trained_weights(network).keys()
        assert all(torch.equal(weights[layer], own) for layer, own in trained_weights(network).items())
    assert float((images - own_images(name, policy, noise, "pt", pipe=loaded)).abs().max()) <= 5e-5


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_all_weights_are_trained_without_an_adapter(name):
    policy = tiny_policy(name, lora=None)
    x, condition = torch.randn(1, *policy.latent_shape), policy.encode(tiny_prompts(name, PROMPTS[:1]))
    policy.velocity(x, torch.tensor([0.5]), condition).square().mean().backward()
    reached = [weight.grad for _, weight in policy.trainable_parameters() if weight.grad is not None]
    assert len(reached) > 10 and all(grad.isfinite().all() for grad in reached)  # one expert of two, of Wan


@pytest.mark.parametrize("name", ["sd15", "flux", "kandinsky5_image", "wan", "flux3"])
def test_another_size_is_as_if_built_with_it(name):
    policy = tiny_policy(name)
    own, latent_shape = policy.image_size, policy.latent_shape
    height, width = (policy._call.fixed[side] for side in ("height", "width"))
    resolutions = [(h, w) for w, h in getattr(policy.pipe, "resolutions", None) or ()]
    size = next((resolution for resolution in resolutions if resolution != (height, width)), (height, 2 * width))
    new = tiny_policy(name, image_size=size)

    def said(policy: PipelinePolicy) -> list[torch.Tensor]:
        x = torch.randn(3, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
        sigmas = policy.sigmas(STEPS)
        condition = policy.encode(tiny_prompts(name, PROMPTS))
        with torch.no_grad():
            v = policy.velocity(x.to(policy.storage_dtype), sigmas[:-1], condition)
        plain = policy.sigmas(STEPS, timestep_schedule="plain")
        outputs = [sigmas, plain, policy.times(plain), v, policy.decode(x)]
        if FAMILIES[name].frames is None:
            outputs.insert(0, policy.encode_images([torch.rand(3, 24, 20, generator=torch.Generator())]))
        return outputs

    before = said(policy)
    policy.image_size = size
    assert policy.image_size == size and policy.latent_shape == new.latent_shape != latent_shape
    resized = said(policy)
    assert resized[-1].shape != before[-1].shape
    assert all(torch.equal(output, other) for output, other in zip(resized, said(new), strict=True))
    with pytest.raises(UserError, match=r"image_size is 7|7 and 7"):
        policy.image_size = 7
    assert policy.image_size == size and policy.latent_shape == new.latent_shape
    policy.image_size = own
    assert policy.latent_shape == latent_shape
    assert all(torch.equal(output, other) for output, other in zip(before, said(policy), strict=True))


def test_a_size_beyond_the_rotary_table_of_wan_is_refused() -> None:
    with pytest.raises(UserError, match=r"image_size is 16 x 1024 pixels, and the rotary table .* ends at 512 a side"):
        tiny_policy("wan", image_size=(16, 1024))
