# SPDX-License-Identifier: Apache-2.0
"""LoRAs under the keys of ComfyUI: diffusers' own loader makes the same network of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.support.models.pipelines import tiny_pipeline, trained_weights
from visalign.adapters import LoraSettings
from visalign.adapters.pipeline.lora_export import DIFFUSERS_NAMES, RENAMED, export_lora, flux_to_kohya
from visalign.adapters.pipeline.lora_files import METADATA, WEIGHT_FILE, read_adapters
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.errors import UserError
from visalign.pipelines.cli.app import app


def saved(name: str, folder: Path) -> PipelinePolicy:
    pipe, options = tiny_pipeline(name)
    policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=6), **options)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.1)
    policy.save(folder / "lora")
    return policy


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_the_exported_file_makes_the_same_images(name, tmp_path):
    policy = saved(name, tmp_path)
    file = tmp_path / "kohya.safetensors"
    result = CliRunner().invoke(app, ["export-lora", str(tmp_path), "-o", str(file)])
    assert result.exit_code == 0, result.output
    (tmp_path / "new").touch()
    assert file.stat().st_mode == (tmp_path / "new").stat().st_mode
    pipe, _ = tiny_pipeline(name)
    pipe.load_lora_weights(file)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    sigma, condition = torch.tensor([0.8, 0.4]), policy.encode(["a red circle", "two squares"])
    with torch.no_grad():
        expected = policy.velocity(x, sigma, condition)
        policy.networks["unet"].load_state_dict(
            {key.replace("default_0", "default"): w for key, w in pipe.unet.state_dict().items()}
        )
        assert torch.equal(policy.velocity(x, sigma, condition), expected)
    scales = [m.scaling for m in pipe.unet.modules() if hasattr(m, "scaling") and hasattr(m, "lora_A")]
    assert scales and all(set(scale.values()) == {3.0} for scale in scales)


def flux_adapters(rank: int, *more: str) -> dict[str, torch.Tensor]:
    """Of FLUX.1's real shapes, where adapters go by default."""
    joint = "to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out".split()
    names = [f"transformer_blocks.{i}.attn.{name}" for i in range(19) for name in joint]
    names += [f"single_transformer_blocks.{i}.attn.{name}" for i in range(38) for name in joint[:3]]
    shapes = {name: (3072, 3072) for name in names} | {name: (12288, 3072) for name in more}
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for name, (outputs, inputs) in shapes.items():
        weights[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw)
        weights[f"transformer.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw)
    return weights


def write(adapters: dict[str, torch.Tensor], folder: Path, alpha: int) -> Path:
    folder.mkdir()
    entry = {METADATA: json.dumps({"transformer.lora_alpha": alpha})}
    save_file(adapters, folder / WEIGHT_FILE, {"format": "pt", **entry})
    return folder


def test_adapters_of_flux_are_read_back_by_diffusers_as_they_were(tmp_path):
    """At the real shapes: its reader counts 19 and 38 blocks of width 3072."""
    adapters = flux_adapters(2, "single_transformer_blocks.7.proj_mlp")
    file = tmp_path / "kohya.safetensors"
    folder = write(adapters, tmp_path / "lora", alpha=6)
    result = CliRunner().invoke(app, ["export-lora", str(folder), "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{19 * 4 + 38} layers for ComfyUI")
    read, alphas, *_ = FluxPipeline.lora_state_dict(load_file(file), return_alphas=True)
    assert not alphas
    names = {name.removesuffix(".lora_A.weight") for name in adapters if name.endswith("lora_A.weight")}
    extra = {name.removesuffix(".lora_A.weight") for name in read if name.endswith("lora_A.weight")} - names
    assert all(not read[f"{name}.lora_B.weight"].any() for name in extra)
    assert all(name.endswith("proj_mlp") for name in extra)
    for name in names:
        x = torch.randn(adapters[f"{name}.lora_A.weight"].shape[1], generator=torch.Generator().manual_seed(1))
        down, up = (f"{name}.lora_{letter}.weight" for letter in "AB")
        expected = 3 * adapters[up] @ (adapters[down] @ x)
        assert torch.allclose(read[up] @ (read[down] @ x), expected, rtol=1e-4, atol=1e-3), name


def test_layers_of_other_ranks_keep_their_scale_where_flux_joins_them():
    block = "transformer.transformer_blocks.0.attn."
    state = {}
    for name, rank in (("to_q", 1), ("to_k", 2)):
        state[f"{block}{name}.lora_A.weight"] = torch.ones(rank, 4)
        state[f"{block}{name}.lora_B.weight"] = torch.ones(3072, rank)
    converted, layer = flux_to_kohya(state, 6.0), "lora_unet_double_blocks_0_img_attn_qkv"
    down, up, alpha = (converted[f"{layer}.{end}"] for end in ("lora_down.weight", "lora_up.weight", "alpha"))
    query, key, value = (alpha / len(down) * up @ down).chunk(3)
    assert (query == 6).all() and (key == 6).all() and not value.any()  # α / r · r


def test_adapters_of_flux_without_a_key_are_named(tmp_path):
    odd = "single_transformer_blocks.0.attn.norm_q"
    folder = write(flux_adapters(1, odd), tmp_path / "lora", alpha=1)
    result = CliRunner().invoke(app, ["export-lora", str(folder), "-o", str(tmp_path / "k.safetensors")])
    output = " ".join(result.output.split())
    assert result.exit_code != 0 and f"have no name for: {odd}" in output, output


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [*DIFFUSERS_NAMES[:-2], *RENAMED])
def test_a_family_is_read_back_as_it_was(name, tmp_path):
    policy = saved(name, tmp_path)
    file = tmp_path / "comfy.safetensors"
    layers = export_lora(tmp_path / "lora", file, name)
    files = [file, tmp_path / "comfy_transformer_2.safetensors"][: len(policy.networks)]
    assert [*layers] == files
    part = next(iter(policy.networks))
    for network, file in zip(policy.networks.values(), files, strict=True):
        read, expected = read_adapters(tiny_pipeline(name)[0], [part], file)[part], trained_weights(network)
        assert read.keys() == expected.keys() and layers[file] > 0
        for layer, (down, up, scale) in read.items():
            assert torch.allclose(scale * up @ down, expected[layer], atol=1e-4), layer
    with pytest.raises(UserError, match=f"{files[-1]}.* exists, and nothing is overwritten"):
        export_lora(tmp_path / "lora", files[0], name)


def test_encoders_have_kohyas_names_and_their_own_alpha(tmp_path):
    state = {f"{part}.lora_{letter}.weight": torch.ones(4, 4) for part in ("unet.mid_block.attentions.0.proj_in",
             "text_encoder.encoder.layers.0.mlp.fc1") for letter in "AB"}  # fmt: skip
    entry = {"unet.lora_alpha": 8, "text_encoder.lora_alpha": 2}
    save_file(state, tmp_path / WEIGHT_FILE, {"format": "pt", METADATA: json.dumps(entry)})
    export_lora(tmp_path, tmp_path / "k.safetensors", None)
    alphas = {name: float(value) for name, value in load_file(tmp_path / "k.safetensors").items() if "alpha" in name}
    assert alphas == {
        "lora_unet_mid_block_attentions_0_proj_in.alpha": 8,
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": 2,
    }


@pytest.mark.parametrize("scale", ["transformer.alpha_pattern", "transformer.use_rslora", "transformer.to_q.alpha"])
def test_scales_of_single_layers_are_refused(scale, tmp_path):
    state = {f"transformer.to_q.lora_{letter}.weight": torch.ones(2, 2) for letter in "AB"}
    if scale.endswith(".alpha"):
        state[scale] = torch.tensor(1.0)
    save_file(state, tmp_path / WEIGHT_FILE, {"format": "pt", METADATA: json.dumps({scale: {"to_q": 1}})})
    with pytest.raises(UserError, match=rf"has {scale}, and export scales by one α / r"):
        export_lora(tmp_path, tmp_path / "k.safetensors", "sd3")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("sana", r"is of sana, and keys of ComfyUI are written for sd15, .*Diffusers loads"),
        (None, r"its keys do not name. Name it with --model"),
    ],
)
def test_a_family_without_such_keys_is_refused(family, message, tmp_path):
    saved("sana", tmp_path)
    with pytest.raises(UserError, match=message):
        export_lora(tmp_path / "lora", tmp_path / "k.safetensors", family)
    assert not (tmp_path / "k.safetensors").exists()


@pytest.mark.parametrize(
    ("family", "path", "message"),
    [
        ("sd3", "shapes-sd3", "layers for ComfyUI (sd3)"),
        ("sd15", "a/folder/elsewhere", "layers for ComfyUI:"),
    ],
)
def test_the_family_is_that_of_the_runs_model(family, path, message, tmp_path):
    (tmp_path / "config.yaml").write_text(f"model: {{path: {path}}}")
    saved(family, tmp_path)
    result = CliRunner().invoke(app, ["export-lora", str(tmp_path / "lora"), "-o", str(tmp_path / "k.safetensors")])
    assert message in " ".join(result.output.split())


def test_a_run_of_the_whole_model_has_no_lora_to_export(tmp_path):
    (tmp_path / "model").mkdir()
    result = CliRunner().invoke(app, ["export-lora", str(tmp_path), "-o", str(tmp_path / "k.safetensors")])
    assert result.exit_code == 2 and "trained the whole model, so it has no LoRA" in " ".join(result.output.split())
    assert not (tmp_path / "k.safetensors").exists()


def test_t5_has_kohyas_names_beside_diffusers_own(tmp_path):
    t5, rest = "encoder.block.0.layer.0.SelfAttention.q", ("transformer.proj", "text_encoder.encoder.layers.0.mlp.fc1")
    names = [f"{part}.lora_{letter}.weight" for part in (f"text_encoder_3.{t5}", *rest) for letter in "AB"]
    save_file({name: torch.ones(4, 4) for name in names}, tmp_path / WEIGHT_FILE, {"format": "pt"})
    export_lora(tmp_path, tmp_path / "c.safetensors", "sd3")
    written = {name.removesuffix(".lora_A.weight") for name in load_file(tmp_path / "c.safetensors") if "_A." in name}
    clip = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    assert written == {f"lora_te3_{t5.replace('.', '_')}", rest[0], clip}
