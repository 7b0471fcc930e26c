# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of one file load as their folder does; files that are no model are refused by name."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import constants
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.support.models.pipelines import tiny_folder
from tests.support.models.single_files import save_single_file
from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.catalogue import own_sampling
from visalign.adapters.hollow import hollow_pipelines
from visalign.adapters.single_file import checkpoint_kind, model_source
from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.hub import go_offline_if_unreachable
from visalign.pipelines.cli.app import app

VAE = "vae/diffusion_pytorch_model.safetensors"
NETWORK = "model.diffusion_model."
NAMES = ("sd15", "sdxl", "flux", "sd3")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Any, Any]]:
    """name -> (folder, file of the whole pipeline; FLUX has the keys of diffusers for its network)."""
    root = tmp_path_factory.mktemp("models")
    folders: dict[str, Any] = {name: tiny_folder(name, root / "folders" / name) for name in NAMES[:3]}
    folders["sd3"] = resolve_model("shapes-sd3")
    (root / "files").mkdir()
    pipes = {name: DiffusionPipeline.from_pretrained(str(folder)) for name, folder in folders.items()}
    return {n: (folders[n], save_single_file(pipes[n], root / "files" / f"{n}.safetensors")) for n in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_the_weights_of_its_folder(models, name):
    folder, file = models[name]
    policy: Any = load_policy(file, config=folder)
    expected: Any = load_policy(folder)
    assert type(policy) is type(expected)
    for part, module in expected.pipe.components.items():
        if isinstance(module, torch.nn.Module):
            weights = policy.pipe.components[part].state_dict()
            assert all(torch.equal(weights[key], value) for key, value in module.state_dict().items()), part


def test_a_file_of_the_network_alone_takes_the_rest_from_the_folder(models, tmp_path):
    pipe = DiffusionPipeline.from_pretrained(str(models["sd3"][0]))
    pipe.transformer.proj_out.bias.data += 1
    file = save_single_file(pipe, tmp_path / "net.safetensors", network_only=True, dtype=torch.bfloat16)
    policy: Any = load_policy(file, config="shapes-sd3", lora=LoraSettings(rank=2), dtype=torch.bfloat16)
    assert torch.equal(policy.transformer.proj_out.bias, pipe.transformer.proj_out.bias.bfloat16())
    assert own_sampling(str(file), None, "cuda", config="shapes-sd3").dtype == "bfloat16"
    shutil.copytree(models["sd3"][0], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match=r"holds transformer only, and .*bare has no weights of text_encoder"):
        load_policy(file, config=tmp_path / "bare")
    with hollow_pipelines():  # needs no weights
        assert load_policy(file, config=tmp_path / "bare", lora=LoraSettings(rank=2))


def test_a_folder_beside_the_file_describes_it(models, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    go_offline_if_unreachable.cache_clear()
    file = tmp_path / "civit.safetensors"
    shutil.copy(models["sd15"][1], file)
    with pytest.raises(UserError, match=r"civit.safetensors is a checkpoint of the kind v1, without .* has them as"):
        load_policy(file)
    for name in ("one", "two"):
        shutil.copytree(models["sd15"][0], tmp_path / name)
        assert model_source(file).folder == tmp_path / "one" if name == "one" else True
    shutil.copytree(models["sdxl"][0], tmp_path / "civit")  # of another family
    with pytest.raises(UserError, match=r"Say which of .*one, .*two fits: model.config=FOLDER"):
        model_source(file)
    shutil.copy(models["sd15"][0] / "model_index.json", tmp_path)
    assert model_source(file).folder == tmp_path
    go_offline_if_unreachable.cache_clear()


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (4,), "guidance_in.in_layer.bias": (4,)}, "flux-dev"),
        ({f"{NETWORK}double_blocks.0.img_attn.norm.key_norm.scale": (4,)}, "flux-schnell"),
        ({f"{NETWORK}joint_blocks.37.x_block.mlp.fc1.weight": (4, 4)}, "sd35_large"),
        ({f"{NETWORK}input_blocks.0.0.weight": (4, 4), f"{NETWORK}label_emb.0.0.weight": (4,)}, "xl_base"),
        ({f"{NETWORK}layers.0.adaLN_modulation.0.weight": (4,)}, "z-image-turbo"),
        ({"conv_in.weight": (4,)}, None),
    ],
)
def test_kinds_by_their_keys(tmp_path, keys, kind):
    if "flux-dev" == kind:
        keys = {**keys, "img_in.weight": (4, 64)}
    save_file({key: torch.zeros(shape) for key, shape in keys.items()}, tmp_path / "x.safetensors")
    assert checkpoint_kind(tmp_path / "x.safetensors") == kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF\x03\x00\x00\x00" + bytes(60), r"is a GGUF file, whose rounded weights are not trained"),
        (b"PK\x03\x04" + bytes(60), r"is a pickle file \(.ckpt, .pt\), which may run code"),
        (b"<!DOCTYPE html><html>" + bytes(60), r"is a web page without weights\. Log in where the file is"),
        (b"version https://git-lfs.github.com/spec/v1\noid x", r"is a pointer of Git LFS without weights"),
        (b"", r"is no whole safetensors file \("),
        ("cut", r"is no whole safetensors file \(.*\): it was cut off at [\d,]+ bytes"),
        ({"lora_unet_mid_block.lora_up.weight": 1}, r"is a LoRA \(a key: .* a LoRA goes to --lora"),
        ({"double_blocks.0.img_mlp.0.scale_weight": 1}, r"is a checkpoint of rounded weights \(a key: .* Give its"),
        ({"control_model.input_blocks.0.0.weight": 1}, r"is a ControlNet \(a key"),
        ({"double_blocks.0.img.weight": 1}, r"no known family; its keys look like double_blocks.0.img.weight"),
        ({"conv_in.weight": 1}, r"holds one network in diffusers' own layout"),
        (
            {"conditioner.embedders.0.model.transformer.resblocks.9.mlp.c_proj.bias": 1},
            r"is a checkpoint of the kind xl_refiner, wh",
        ),
    ],
)
def test_files_that_are_no_model(models, tmp_path, content, message):
    file = tmp_path / "x.safetensors"
    if isinstance(content, dict):
        save_file({key: torch.zeros(size, 4) for key, size in content.items()}, file)
    else:
        file.write_bytes(models["sd15"][1].read_bytes()[:-9] if content == "cut" else content)
    with pytest.raises(UserError, match=message):
        load_policy(file)


def test_a_config_that_does_not_fit(models):
    with pytest.raises(UserError, match=r"kind xl_base, and .* is a StableDiffusionPipeline"):
        load_policy(models["sdxl"][1], config=models["sd15"][0])
    with pytest.raises(UserError, match=r"does not fit the unet \(UNet2DConditionModel\) of .*expected shape"):
        load_policy(models["sd15"][1], config=_with_other_unet(models["sd15"]))
    with pytest.raises(UserError, match=r"model.config is for a model of one file, and .*sd15 is none"):
        load_policy(models["sd15"][0], config="shapes-sd15")


def _with_other_unet(model):
    folder = model[1].parent / "other"
    shutil.copytree(model[0], folder)
    config = json.loads((folder / "unet" / "config.json").read_text())
    (folder / "unet" / "config.json").write_text(json.dumps(config | {"cross_attention_dim": 8}))
    return folder


# Folders as people have them


def _index(folder, **entries):
    index = json.loads((folder / "model_index.json").read_text()) | entries
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if v is not ...}))


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("sd15", {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}),
        ("sd15", {"feature_extractor": ["transformers", "CLIPFeatureExtractor"], "safety_checker": ...}),
        ("sd15", {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"], "feature_extractor": ...}),
        ("sd3", {"text_encoder_3": [None, None], "tokenizer_3": [None, None], "image_encoder": ...}),
        ("sd3", {"text_encoder_3": ..., "tokenizer_3": ...}),
    ],
)
def test_parts_that_are_listed_and_absent(models, tmp_path, name, entries):
    folder = tmp_path / "model"
    shutil.copytree(models[name][0], folder, ignore=shutil.ignore_patterns("*_3"))
    _index(folder, **entries)
    for adapter in (None, "pipeline"):
        policy: Any = load_policy(folder, adapter=adapter, lora=LoraSettings(rank=2))
        assert policy.encode(["a red circle"]) and policy.pipe.components.get("text_encoder_3") is None


def test_variants_and_shards(models, tmp_path):
    pipe = DiffusionPipeline.from_pretrained(str(models["sd15"][0]))
    pipe.unet.conv_in.bias.data += 1
    shutil.copytree(models["sd15"][0], tmp_path / "both")
    pipe.to(torch.float16).save_pretrained(tmp_path / "both", variant="fp16", max_shard_size="20KB")
    load: Any = load_policy
    biases = {
        variant: float(load(tmp_path / "both", variant=variant).pipe.unet.conv_in.bias.data.mean())
        for variant in (None, "fp16")
    }
    assert biases["fp16"] == pytest.approx(biases[None] + 1, abs=1e-3)
    own = own_sampling(str(tmp_path / "both"), None, "cuda", variant="fp16")
    assert own.dtype == "float16" and own_sampling(str(tmp_path / "both"), None, "cuda").dtype == "float32"
    with pytest.raises(UserError, match=r"has no weights of the variant 'bf16'; its variants are: fp16\. Correct"):
        load_policy(tmp_path / "both", variant="bf16")
    pipe.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert float(load(tmp_path / "pickled").pipe.unet.conv_in.bias.data.mean()) == pytest.approx(biases["fp16"])


def test_a_folder_of_the_hubs_cache_is_its_snapshot(models, tmp_path, monkeypatch):
    cached = tmp_path / "models--owner--name"
    shutil.copytree(models["sd15"][0], cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert resolve_model(cached) == cached / "snapshots" / "abc"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_policy("~/models--owner--name")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: shutil.rmtree(f / "unet"), r"lacks unet\. Copy them"),
        (lambda f: _index(f, vae=None), r"model_index.json lists vae as null\. Write \[null, null\]"),
        (
            lambda f: (f / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x90" + bytes(7) + b"{"),
            r"cut off",
        ),
        (
            lambda f: (f / "vae" / "diffusion_pytorch_model.safetensors").unlink(),
            r"cannot be loaded as StableDiffusion.* \(.*\)\. Copy it",
        ),
    ],
)
def test_damaged_folders(models, tmp_path, damage, message):
    shutil.copytree(models["sd15"][0], tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises((UserError, FileNotFoundError), match=message):
        load_policy(tmp_path / "model")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.safetensors", r"There is no model file nowhere.safetensors\. Give a folder"),
        ("https://civitai.com/api/download/models/1", r"models/1 is an address\. Download the file"),
        ("run", r"It holds a LoRA: give its base model here, and this folder as the LoRA"),
    ],
)
def test_paths_that_are_no_model(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "lora").mkdir(parents=True)
    with pytest.raises((UserError, FileNotFoundError), match=message):
        load_policy(path)


def test_export_lora_knows_a_file_by_the_runs_configuration(models, tmp_path):
    file, run = tmp_path / "civit.safetensors", tmp_path / "run"
    shutil.copy(models["sd15"][1], file)
    policy: Any = load_policy(file, config=models["sd15"][0], lora=LoraSettings(rank=2))
    policy.save(run / "lora")
    (run / "config.yaml").write_text(json.dumps({"model": {"path": str(file), "config": str(models["sd15"][0])}}))
    result = CliRunner().invoke(app, ["export-lora", str(run), "-o", str(tmp_path / "comfy.safetensors")])
    assert "layers for ComfyUI (sd15)" in result.output
