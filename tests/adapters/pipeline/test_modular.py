# SPDX-License-Identifier: Apache-2.0
"""Folders of modular pipelines: the numbers are the pipeline's, and what cannot be used is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.modular import (
    GRID,
    diffusers,
    own_modular_run,
    qwen_image_21_parts,
    save_modular,
    tiny_flux3,
    tiny_qwen_image_21,
)
from tests.support.models.pipelines import tiny_pipeline, tiny_policy
from tests.support.operations import counted_operations
from visalign.adapters import LoraSettings, PipelinePolicy, load_policy
from visalign.adapters.hollow import hollow_pipelines
from visalign.adapters.pipeline.families import FAMILIES
from visalign.errors import UserError
from visalign.flow.rollout import rollout

SIZE: dict[str, Any] = {"height": 16, "width": 8}
NAMES = [name for name, family in FAMILIES.items() if family.modular]
LORA = LoraSettings(rank=2, alpha=4)
PROMPT = "two blue squares left of a star"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("models")
    return {name: save_modular(tiny_pipeline(name)[0], at / name) for name in NAMES}


def policy_of(folder: Path, **options: Any) -> PipelinePolicy:
    policy = load_policy(folder, **{"lora": LORA, "image_size": (16, 8), **options})
    assert isinstance(policy, PipelinePolicy)
    return policy


def whole_pipeline(folder: Path) -> Any:
    """As diffusers reads it."""
    pipe = diffusers.ModularPipeline.from_pretrained(str(folder))
    pipe.load_components()
    return pipe


def scale(name: str) -> float:
    return 1.0 if FAMILIES[name].guidance == "none" else 3.0


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_makes_the_pipelines_images_with_its_adapters_too(folders, name, tmp_path):
    """To the last bit, over steps of which the pipeline keeps the text's keys and values."""
    policy = policy_of(folders[name], guidance=scale(name))
    assert policy.guided == (scale(name) > 1)
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    samples = []
    for moved in (False, True):
        if moved:
            with torch.no_grad():
                for _, weight in policy.trainable_parameters():
                    weight.add_(0.1)
            policy.save(tmp_path)
        sample = rollout(policy, policy.encode([PROMPT]), sigmas=policy.sigmas(3), noise=noise).latents
        pipe = whole_pipeline(folders[name])
        if moved:
            pipe.load_lora_weights(str(tmp_path))
        latents, images = own_modular_run(pipe, [PROMPT], noise, scale(name), num_inference_steps=3, **SIZE)
        assert float((sample - latents).abs().max()) <= 3e-7 * float(latents.abs().max())
        assert float((policy.decode(sample) - images).abs().max()) <= 1e-6 and float(images.std()) > 0.02
        samples.append(sample)
    assert not torch.allclose(*samples, atol=1e-4)


def test_images_with_an_alpha_channel_stand_over_white():
    policy = PipelinePolicy(tiny_qwen_image_21(), lora=LORA, image_size=(16, 8))
    channels = torch.tensor([0.2, 0.4, 0.6, 0.25]).view(1, 4, 1, 1, 1)
    policy.pipe.vae.decode = lambda z, **_: ((channels * 2 - 1).expand(len(z), 4, 1, 16, 8),)
    image = policy.decode(torch.randn(2, *policy.latent_shape))
    expected = torch.tensor([0.25 * c + 0.75 for c in (0.2, 0.4, 0.6)])
    torch.testing.assert_close(image, expected.view(1, 3, 1, 1).expand(2, 3, 16, 8))


def test_the_classic_folder_of_qwen_image_21_goes_the_same_way(tmp_path):
    """diffusers' classic pipeline as the oracle: `sample_sigmas` in its index make it Turbo."""
    torch.manual_seed(0)
    parts = qwen_image_21_parts(turbo=True)
    classic = diffusers.QwenImage21Pipeline(**parts, sample_sigmas=GRID)
    classic.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"This QwenImage21Pipeline is driven by its blocks\. Load its"):
        PipelinePolicy(classic)
    policy = policy_of(tmp_path)
    assert type(policy.pipe).__name__ == "QwenImage21TurboModularPipeline"
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    sample = rollout(policy, policy.encode([PROMPT]), sigmas=policy.sigmas(3), noise=noise).latents
    classic.set_progress_bar_config(disable=True)
    classic.vae_scale_factor = 4  # it assumes 16
    own = classic(PROMPT, latents=noise, output_type="latent", return_dict=False, **SIZE)[0]
    assert float((sample - own).abs().max()) <= 3e-7 * float(own.abs().max())


def test_a_prompt_is_upsampled_once_and_the_upsampler_may_be_left_out(folders, tmp_path):
    folder = save_modular(tiny_flux3(upsampler=True), tmp_path)
    policy = policy_of(folder, call={"max_new_tokens": 12})
    model, calls = policy.pipe.prompt_upsampler, []
    own = model.generate
    model.generate = lambda **inputs: (calls.append(inputs["input_ids"]), own(**inputs))[1]
    condition = policy.encode([PROMPT, "a cat", PROMPT])
    assert len(calls) == 2 and PROMPT not in policy.pipe._captions[PROMPT]
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    again = policy.encode([PROMPT])
    assert len(calls) == 2 and torch.equal(again.rows()[0]["prompt_embeds"], condition.rows()[0]["prompt_embeds"])
    sample = rollout(policy, again, sigmas=policy.sigmas(3), noise=noise).latents
    call = {**SIZE, "num_inference_steps": 3, "max_new_tokens": 12}
    latents, _ = own_modular_run(whole_pipeline(folder), [PROMPT], noise, 1.0, **call)
    assert float((sample - latents).abs().max()) <= 3e-7 * float(latents.abs().max())
    with hollow_pipelines():
        assert policy_of(folder).encode([PROMPT]).rows()[0]["prompt_embeds"].shape[1] > 80
    plain = policy_of(folder, without=["prompt_upsampler"])
    assert plain.pipe.prompt_upsampler is None and plain.pipe.prompt_upsampler_processor is None
    message = r"without names vae; give a list of what this Flux3ModularPipeline can do without: prompt_up"
    with pytest.raises(UserError, match=message):
        policy_of(folders["flux3"], without=["vae"])


def test_parts_that_are_missing_are_named(folders, tmp_path):
    index = json.loads((folders["flux3"] / "modular_model_index.json").read_text())
    part = index["prompt_upsampler"]
    part[2]["pretrained_model_name_or_path"] = str(tmp_path / "nowhere")
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    for name in ("text_encoder", "tokenizer", "transformer", "vae"):
        (tmp_path / name).symlink_to(folders["flux3"] / name)
    with pytest.raises(FileNotFoundError, match=r"loaded as Flux3Mod.* \(Unable to load prompt_upsam"):
        policy_of(tmp_path)
    assert not policy_of(tmp_path, without=["prompt_upsampler"]).guided
    pipe = diffusers.ModularPipeline.from_pretrained(str(folders["flux3"]))
    with pytest.raises(UserError, match=r"Flux3ModularPipeline has no text_encoder, .*load_com"):
        PipelinePolicy(pipe, lora=LORA)
    with pytest.raises(FileNotFoundError, match=r"no model_index.json or modular_model_index.json, so it"):
        policy_of(folders["flux3"] / "vae")


def test_a_variant_of_one_part_alone(folders, tmp_path):
    source, folder = folders["qwen_image_21"], tmp_path / "model"
    shutil.copytree(source, folder)
    index = folder / "modular_model_index.json"
    index.write_text(index.read_text().replace(str(source), str(folder)))
    for file in (folder / "transformer").glob("diffusion_pytorch_model*"):
        file.rename(file.with_name(file.name.replace("model.", "model.fp16.")))
    policy_of(folder)
    with pytest.raises(UserError, match=r"has no weights of the variant 'bf16'; its variants are: fp16\."):
        policy_of(folder, variant="bf16")


def test_the_whole_network_is_saved_as_diffusers_reads_it(folders, tmp_path):
    policy = policy_of(folders["qwen_image_21"], lora=None, guidance=2.0)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.mul_(1.1)
    policy.save(tmp_path / "written")
    (tmp_path / "written").rename(tmp_path / "model")  # the index names the folder that it was written to
    x, sigma = torch.randn(1, *policy.latent_shape), torch.tensor([0.5])
    again = policy_of(tmp_path / "model", guidance=2.0)
    with torch.no_grad():
        expected = policy.velocity(x, sigma, policy.encode([PROMPT]))
        assert torch.equal(again.velocity(x, sigma, again.encode([PROMPT])), expected)
    other = policy_of(folders["qwen_image_21"], lora=None)
    other.load(tmp_path / "model")
    pairs = zip(policy.trainable_parameters(), other.trainable_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_a_network_trained_whole_and_a_rewards_gradient():
    policy = tiny_policy("flux3", lora=None, gradient_checkpointing=True)
    x, sigma = torch.randn(2, *policy.latent_shape), torch.tensor([0.7, 0.7])
    v = policy.velocity(x, sigma, policy.encode([PROMPT, "a star"]))
    policy.decode(x - 0.7 * v).mean().backward()
    without = [n for n, p in policy.trainable_parameters() if p.grad is None or not p.grad.any()]
    frozen = [n for n, p in policy.module.named_parameters() if not p.requires_grad]
    assert without == [] and frozen and all(".image_cond." in n for n in frozen)


def test_a_distilled_model_says_what_it_allows(folders):
    message = r"This QwenImage21TurboModularPipeline is distilled: it takes no guidance\. .*guidance is 3\.0"
    with pytest.raises(UserError, match=message):
        policy_of(folders["qwen_image_21_turbo"], guidance=3.0)
    with pytest.raises(UserError, match=r"negative_prompt is 'ugly', and QwenImage21Turbo.* is not"):
        policy_of(folders["qwen_image_21_turbo"], negative_prompt="ugly")
    policy = policy_of(folders["qwen_image_21_turbo"])
    torch.testing.assert_close(policy.sigmas(3), torch.tensor([*GRID, 0.0]))
    with pytest.warns(UserWarning, match=r"was distilled for 3 steps .* Set the steps to 3"):
        assert len(policy.sigmas(4)) == 5
    assert len(policy.sigmas(4, timestep_schedule="plain")) == 5


def test_a_flow_map_is_refused(tmp_path):
    """Its network takes the time a step jumps to, which a single velocity lacks."""
    folder = save_modular(tiny_flux3(flow_map=True), tmp_path)
    message = r"is a Flux3DistilledModularPipeline, which predicts the mean velocity of a whole step"
    for load in (load_policy, PipelinePolicy.from_pretrained):
        with pytest.raises(UserError, match=message):
            load(folder)
    with pytest.raises(UserError, match=r"predicts the mean velocity of a whole step"):
        tiny_policy("flux3", lambda pipe: pipe.transformer.register_to_config(flow_map=True))


def test_other_guiders_are_refused():
    with pytest.raises(UserError, match=r"has a AdaptiveProjectedGuidance as guider"):
        tiny_policy("flux3", lambda pipe: pipe.update_components(guider=diffusers.AdaptiveProjectedGuidance()))


def test_a_negative_prompt_leads_away(folders, caplog):
    x, sigma = torch.randn(1, *policy_of(folders["flux3"]).latent_shape), torch.tensor([0.5])
    velocities = []
    for guidance, negative in ((3.0, None), (3.0, "a star"), (1.0, "a star")):
        policy = policy_of(folders["flux3"], guidance=guidance, negative_prompt=negative)
        with torch.no_grad():
            velocities.append(policy.velocity(x, sigma, policy.encode([PROMPT])))
            star, scene = (policy.velocity(x, sigma, policy.encode([p])) for p in ("a star", PROMPT))
    assert not torch.allclose(velocities[0], velocities[1], atol=1e-4)
    torch.testing.assert_close(velocities[1], star + 3 * (scene - star), rtol=1e-4, atol=1e-5)
    assert "will be ignored" not in caplog.text  # as diffusers would say at each prompt


def test_a_folder_is_planned_by_shapes(folders, monkeypatch):
    """Qwen-Image 2.1 reads from a mask where its tokens are, and so how many."""
    monkeypatch.setattr("visalign.adapters.hollow.SMALL", 0)  # the encoder too
    policy = policy_of(folders["qwen_image_21"], guidance=3.0)
    with hollow_pipelines() as trace:
        hollow: Any = policy_of(folders["qwen_image_21"], guidance=3.0)
        condition = hollow.encode([PROMPT])
        trace.clear()
        x, sigma = torch.zeros(1, *hollow.latent_shape), torch.tensor([0.5])
        assert hollow.velocity(x, sigma, condition).shape == x.shape
    own = policy.encode([PROMPT])
    policy.velocity(x, sigma, own)  # which encodes the null prompt
    with counted_operations() as counter:
        policy.velocity(x, sigma, own)
    assert policy.forward_count.equivalents == 2 * hollow.forward_count.equivalents
    assert trace.flops["transformer"] == counter.get_total_flops()
