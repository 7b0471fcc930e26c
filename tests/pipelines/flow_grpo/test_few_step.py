# SPDX-License-Identifier: Apache-2.0
"""Few-step students before training: distilled models, their teachers, refusals and warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.pipelines import tiny_pipeline
from visalign.adapters import LoraSettings, PipelinePolicy
from visalign.adapters.catalogue import is_distilled
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.parts import load_teacher
from visalign.training.diffusion.few_step import TEACHER, Roles
from visalign.training.diffusion.merging import guidance_scale


def _folder(path: Path, kind: str = "ZImagePipeline", **entries: Any) -> str:
    path.mkdir(parents=True)
    index = {"_class_name": kind, "transformer": ["diffusers", "ZImageTransformer2DModel"], **entries}
    (path / "model_index.json").write_text(json.dumps(index))
    return str(path)


def _config(*overrides: str) -> FlowGRPOConfig:
    names = (
        "rewards.terms={jpeg_size: {}}",
        "data.heldout=shapes:heldout",
        "evaluation={correctness: null, rewards: {jpeg_size: {}}}",
    )
    return load_config(FlowGRPOConfig, None, [*names, *overrides])


@pytest.mark.parametrize(
    ("name", "kind", "entries", "distilled"),
    [
        ("Z-Image", "ZImagePipeline", {}, False),
        ("Z-Image-Turbo", "ZImagePipeline", {}, True),
        ("FLUX.1-schnell", "FluxPipeline", {}, True),
        ("klein", "Flux2KleinPipeline", {"is_distilled": True}, True),
        ("klein-base", "Flux2KleinPipeline", {"is_distilled": False}, False),
        ("own", "QwenImage21TurboModularPipeline", {"sample_sigmas": [1.0, 0.5]}, True),
        ("T2V-Lite-distilled16steps-5s", "Kandinsky5T2VPipeline", {}, True),
        ("hyperion", "StableDiffusion3Pipeline", {}, False),
    ],
)
def test_distilled_models_are_known(name: str, kind: str, entries: Any, distilled: bool, tmp_path: Path) -> None:
    folder = _folder(tmp_path / name, kind, **entries)
    assert is_distilled(folder, folder, None) is distilled


def test_a_distilled_model_is_warned_of_or_needs_its_teacher(tmp_path: Path) -> None:
    model = f"model.path={_folder(tmp_path / 'Z-Image-Turbo')}"
    (note,) = prepare(_config(model, "objective.algorithm=diffusion_nft"), 1).notes
    assert "Z-Image-Turbo is distilled to few steps" in note and "blurs it. objective.algorithm=tdm_r1" in note
    assert prepare(_config(model), 1).notes == ()  # a ratio on its own steps is no denoiser
    with pytest.raises(UserError, match=r"compares it with a teacher of many steps, which is missing. Set obj"):
        prepare(_config(model, "objective.algorithm=tdm_r1"), 1)
    base = _folder(tmp_path / "Z-Image")
    assert prepare(_config(model, f"objective={{algorithm: dmd2, teacher: {base}}}"), 1).notes == ()
    with pytest.raises(
        UserError, match=r"shapes-sd3, whose transformer is a SD3Tran.* a ZImageTransformer2DModel. Name"
    ):
        prepare(_config(model, "objective={algorithm: dmd2, teacher: shapes-sd3}"), 1)
    for option in ("quantization=torchao_int8", "adapter=own.py:Own"):
        with pytest.raises(UserError, match=rf"objective.teacher is x, .*does not work with model.{option}"):
            _config("objective={algorithm: dmd2, teacher: x}", f"model.{option}")
    with pytest.raises(FileNotFoundError, match=r"There is no model folder nope. Give a folder that a diffusers"):
        prepare(_config(model, "objective={algorithm: dmd2, teacher: nope}"), 1)
    turbo = _folder(tmp_path / "turbo", "QwenImage21TurboModularPipeline")
    with pytest.raises(UserError, match=r"teacher_guidance is 4.5, and .*turbo is guided by nothing. Set it to null"):
        prepare(_config(f"model.path={turbo}", f"objective={{algorithm: tdm, teacher: {turbo}}}"), 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objective={algorithm: awm, teacher: x}", "teacher is x, and objective.algorithm=awm has no teacher"),
        ("objective={algorithm: tdm, reset_reference_every: 3}", "objective.algorithm=tdm has no reference"),
        ("objective={algorithm: tdm, changes: {warmup: 100}}", "warmup is 100, and run.iterations is 100, so the stu"),
        ("objective={algorithm: tdmr1}", "there is no algorithm 'tdmr1'. Did you mean 'tdm_r1'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _config(override)


@pytest.mark.parametrize("more", ["run.sharding=true", "dynamic.enabled=true", "data.images=shapes:images"])
def test_features_of_other_trainings_are_refused(more: str) -> None:
    with pytest.raises(UserError, match=r"objective.algorithm=tdm"):
        _config("objective.algorithm=tdm", more)


def test_the_teacher_of_a_distilled_model_is_guided(tmp_path: Path) -> None:
    """A FLUX.2-klein that takes no guidance, and the base that it comes from."""
    pipe, options = tiny_pipeline("flux2_klein")
    pipe.register_to_config(is_distilled=False)
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(1.5)
    pipe.save_pretrained(tmp_path / "base")
    options.pop("guidance", None)
    base = PipelinePolicy(pipe, **options, guidance=3.0)
    student, _ = tiny_pipeline("flux2_klein")
    student.register_to_config(is_distilled=True)
    policy = PipelinePolicy(student, **options, lora=LoraSettings(rank=2, alpha=2))
    x, sigma, prompts = torch.randn(1, *policy.latent_shape), torch.tensor([0.5]), ["a red circle"]
    with torch.no_grad():
        velocity = policy.velocity(x, sigma, policy.encode(prompts))
        roles = Roles(policy, ["critic"], load_teacher(str(tmp_path / "base"), policy))
        with roles.acting(TEACHER), guidance_scale(policy, 3.0):
            taught = policy.velocity(x, sigma, policy.encode(prompts))
        torch.testing.assert_close(taught, base.velocity(x, sigma, base.encode(prompts)), rtol=1e-4, atol=1e-5)
        assert torch.equal(policy.velocity(x, sigma, policy.encode(prompts)), velocity)
