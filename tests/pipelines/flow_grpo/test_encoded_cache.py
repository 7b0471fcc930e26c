# SPDX-License-Identifier: Apache-2.0
"""`data.cache`: the same run from encoded images and prompts, without text encoders, and what changes an entry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save

from tests.support.models.pipelines import tiny_folder
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import load_policy
from visalign.adapters.pipeline.lora_files import WEIGHT_FILE
from visalign.adapters.prompt_cache import PromptCache
from visalign.config import load_config
from visalign.errors import ConfigError
from visalign.evaluation import evaluate, load_heldout
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.flow_grpo.encoded_cache import cached_latents
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import SFTImagesConfig, run
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.pipelines.flow_grpo.stored_pairs import stored_latents
from visalign.training.loop.metrics import read_metrics

SMALL = (
    "model.lora.rank=4",
    "rollout={prompts_per_iteration: 4, group_size: 1, steps: 2}",
    "optimizer={lr: 1e-3, updates_per_iteration: 2, micro_batch: 4}",
    "evaluation={seeds: [0], rewards: {jpeg_size: {}}, correctness: null}",
    "run={iterations: 2, device: cpu}",
)


SFT = ("objective.algorithm=sft", "rollout.group_size=1")


def _images(folder: Path) -> Path:
    folder.mkdir()
    for number in range(8):
        Image.effect_noise((48, 64), 20 * number).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing number {number}")
    return folder


def _model(kind: str, folder: Path) -> Path:
    if kind != "sd3":
        return tiny_folder(kind, folder)
    tiny_sd3_pipeline().save_pretrained(folder)
    return folder


def _config(model: Path, images: Path, *overrides: str) -> SFTImagesConfig:
    data = f"data={{images: {images}, caption_dropout: 0.3}}"
    return load_config(SFTImagesConfig, None, [*SMALL, f"model.path={model}", data, *overrides])


def _losses(output: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(output / "metrics.jsonl")]


def test_a_run_from_the_cache_equals_one_without(tmp_path, capsys, monkeypatch):
    model, images = _model("sd3", tmp_path / "model"), _images(tmp_path / "set")
    sizes = "rollout.image_sizes=[32, [48, 32]]", "evaluation.guidance=3"
    plain = _config(model, images, *sizes)
    run(plain, tmp_path / "plain")
    cached = _config(model, images, *sizes, f"data.cache={tmp_path}/cache")
    run(cached, tmp_path / "filling")
    assert "the text encoders are freed: " in "".join(capsys.readouterr())
    files = sorted((tmp_path / "cache").rglob("*.pt"))
    stamps = [file.stat().st_mtime_ns for file in files]
    monkeypatch.setattr(
        "visalign.adapters.pipeline.base.DiffusersPolicy.encode_images", None
    )  # only tried at the start
    run(cached, tmp_path / "read")
    assert "the text encoders are not loaded" in "".join(capsys.readouterr())
    assert _losses(tmp_path / "plain") == _losses(tmp_path / "filling") == _losses(tmp_path / "read")
    weights = [load_file(tmp_path / name / "lora/pytorch_lora_weights.safetensors") for name in ("plain", "read")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    guided: Any = load_policy(model, guidance=3.0)
    inputs = prepare(plain, 1)
    drawing: Any = {"records": inputs.heldout, "seeds": [0], "batch_size": 128, "correctness": None}
    images_of_it = evaluate(guided, inputs.rewards, sigmas=guided.sigmas(2), **drawing).images
    assert all(
        np.array_equal(load_heldout(tmp_path / name / "before.npz").images, images_of_it) for name in ("plain", "read")
    )
    assert files == sorted((tmp_path / "cache").rglob("*.pt"))
    assert stamps == [file.stat().st_mtime_ns for file in files]


def test_a_guided_reference_has_its_negative_prompt(tmp_path):
    changes = "objective.changes={kl: 0.1, reference_guidance: 3}"
    plain = _config(_model("sd15", tmp_path / "model"), _images(tmp_path / "set"), changes)
    run(plain, tmp_path / "plain")
    cached = replace(plain, data=replace(plain.data, cache=f"{tmp_path}/cache"))
    unguided = replace(cached.objective, changes={"kl": 0.1, "reference_guidance": 1.0})
    run(replace(cached, objective=unguided), tmp_path / "unguided")  # fills the cache without a negative prompt
    run(cached, tmp_path / "cached")
    assert _losses(tmp_path / "plain") == _losses(tmp_path / "cached")


@pytest.mark.parametrize("kind", ["sd3", "sdxl"])
def test_encoders_are_not_loaded_and_lost_files_are_named(tmp_path, kind: str):
    model, prompts = _model(kind, tmp_path / "model"), ["a cat", ""]
    cache = PromptCache(tmp_path / "cache", {}, prompts)
    full: Any = load_policy(model, prompt_cache=cache)
    first = full.encode(prompts)
    cache.mark_whole()
    policy: Any = load_policy(model, prompt_cache=PromptCache(tmp_path / "cache", {}, prompts))
    assert full.pipe.text_encoder is not None and policy.pipe.text_encoder is policy.pipe.text_encoder_2 is None
    x, sigma = torch.ones(2, *policy.latent_shape), torch.full((2,), 0.5)
    assert torch.equal(full.velocity(x, sigma, first), policy.velocity(x, sigma, policy.encode(prompts)))
    for file in (tmp_path / "cache").rglob("*.pt"):
        file.write_bytes(file.read_bytes()[:100])
    assert not cache.is_whole and len(full.encode(prompts)) == 2  # a damaged file is written again
    with pytest.raises(FileNotFoundError, match=r"^data.cache: .*cache has lost files.*Delete the folder"):
        policy.encode(["a dog"])


def test_layers_of_text_encoders_are_applied_and_kept(tmp_path, capsys):
    model, images, lora = _model("sd3", tmp_path / "model"), _images(tmp_path / "set"), tmp_path / "lora.safetensors"
    run(_config(model, images), tmp_path / "first")
    tensors = load_file(tmp_path / "first/lora" / WEIGHT_FILE)
    layer = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    policy: Any = load_policy(model)
    width = len(policy.pipe.text_encoder.get_submodule(layer.partition(".")[2]).weight)
    tensors |= {
        f"{layer}.lora_{side}.weight": torch.ones(shape) for side, shape in {"A": (4, width), "B": (width, 4)}.items()
    }
    lora.write_bytes(save(tensors))
    start, cache = f"model.lora_path={lora}", f"data.cache={tmp_path}/cache"
    run(_config(model, images, start), tmp_path / "plain")
    run(_config(model, images, cache), tmp_path / "other")  # without these layers
    for name in ("filling", "read"):
        run(_config(model, images, start, cache), tmp_path / name)
        assert _losses(tmp_path / name) == _losses(tmp_path / "plain") != _losses(tmp_path / "other")
        assert any(key.startswith("text_encoder.") for key in load_file(tmp_path / name / "lora" / WEIGHT_FILE))
    assert "the text encoders stay" in "".join(capsys.readouterr())


def test_an_entry_depends_on_image_size_and_model(tmp_path):
    model, images = _model("sd3", tmp_path / "model"), _images(tmp_path / "set")
    latents = []
    for number, size in enumerate((32, 48, 32, 32)):
        if number == 2:  # another autoencoder of the same size
            (weights := tmp_path / "model/vae/diffusion_pytorch_model.safetensors").write_bytes(
                save({name: weight * 1.01 for name, weight in load_file(weights).items()})
            )
        if number == 3:
            Image.new("RGB", (64, 48)).save(images / "0.png")
        config = _config(model, images, f"data.cache={tmp_path}/cache", f"model.image_size={size}")
        policy = build_policy(config.model, torch.device("cpu"), 0)
        stored = cached_latents(stored_latents(policy), policy, config)
        latents.append(stored([{"image": str(images / "0.png"), "where": "a test"}] * 2))
        assert latents[-1].shape == (2, *policy.latent_shape)
    assert len({float(latent.sum()) for latent in latents}) == 4
    assert len([*(tmp_path / "cache").rglob("*.pt")]) == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data={cache: c, images: null}", "objective.algorithm=awm"),
            r"data\.cache keeps encoded images.*Leave it out",
        ),
        (("data={cache: c, images: s}", "model.adapter=a.py:Own", *SFT), r"one of your own\. Leave data\.cache out"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(overrides: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(FlowGRPOConfig, None, [*overrides])
