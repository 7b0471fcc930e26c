# SPDX-License-Identifier: Apache-2.0
"""LoRA files under the keys that other programs write: each layer gets what the file says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, PixArtSigmaPipeline, StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.models.pipelines import tiny_pipeline, trained_weights
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.lora import check_lora_kind
from visalign.adapters.pipeline.families import FAMILIES, SD3_ATTENTION
from visalign.adapters.pipeline.lora import add_lora, load_lora, save_lora, start_from_loras
from visalign.adapters.pipeline.lora_files import (
    METADATA,
    PEFT_FILE,
    WEIGHT_FILE,
    lora_file,
    parse_lora,
    read_adapters,
    read_lora,
)
from visalign.data.assets import resolve_model
from visalign.errors import UserError

PAIR = {"kohya": ("lora_down.weight", "lora_up.weight"), "peft": ("lora_A.weight", "lora_B.weight")}
SGM = {"down": "input_blocks.{}.1", "up": "output_blocks.{}.1", "mid": "middle_block.1"}


@cache
def bare(family: str) -> Any:
    """Reading leaves a pipeline as it was, so all tests share one."""
    if family in ("sd15", "sd3"):
        return DiffusionPipeline.from_pretrained(resolve_model(f"shapes-{family}"))
    return tiny_pipeline(family)[0]


def flat(prefix: str) -> Callable[[str], str]:
    return lambda layer: prefix + layer.replace(".", "_")


def sgm(layer: str) -> str:
    """Name of a layer in Stability's own code, which has two blocks to a level here."""
    match = re.fullmatch(r"(down|up|mid)_blocks?\.?(\d*)\.attentions\.(\d+)\.(.+)", layer)
    side, block, attention, rest = match.groups() if match else ("mid", "", "", layer)
    number = 0 if side == "mid" else 2 * int(block) + int(attention) + (side == "down")
    return f"{SGM[side].format(number)}.{rest}"


def kohya_sgm(layer: str) -> str:
    return flat("lora_unet_")(sgm(layer))


def comfy_sgm(layer: str) -> str:
    return f"diffusion_model.{sgm(layer)}"


def old(layer: str) -> str:
    return "unet." + re.sub(r"\.to_(q|k|v|out)(\.0)?$", r".processor.to_\1_lora", layer)


FORMS = {
    "kohya_sd15": ("sd15", "unet", r"attentions|conv1", flat("lora_unet_"), PAIR["kohya"], 1.0),
    "kohya_encoder": ("sd15", "text_encoder", r"fc|proj", flat("lora_te_text_model_"), PAIR["kohya"], 1.0),
    "diffusers_0.20": ("sd15", "unet", r"to_", old, ("down.weight", "up.weight"), None),
    "kohya_sdxl": ("sdxl", "unet", r"attentions.*(attn|ff)", kohya_sgm, PAIR["kohya"], 4.0),
    "comfy_sdxl": ("sdxl", "unet", r"attentions.*attn", comfy_sgm, PAIR["peft"], None),
    "comfy_sd15": ("sd15", "unet", r"attentions.*attn", comfy_sgm, PAIR["kohya"], 1.0),
    "onetrainer_sd3": ("sd3", "transformer", r"attn|ff", flat("lora_transformer_"), PAIR["kohya"], 1.0),
    "comfy_qwen": ("qwen_image", "transformer", r"attn|mlp", "diffusion_model.{}".format, PAIR["peft"], None),
    "diffusers_wan": ("wan", "transformer", r"attn", "transformer.{}".format, PAIR["peft"], None),
    "peft_pixart": ("pixart", "transformer", r"to_q", "base_model.model.{}".format, PAIR["peft"], None),
}  # fmt: skip


def adapters(network: nn.Module, pattern: str, rank: int = 2) -> dict[str, tuple[Tensor, Tensor]]:
    """Random A and B of the layers whose names match, feed-forward layers with twice the rank."""
    draw, pairs = torch.Generator().manual_seed(0), {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and re.search(pattern, name):
            r, more = rank * (1 + (".ff" in name)), [1, 1] if isinstance(layer, nn.Conv2d) else []
            down = torch.randn(r, *layer.weight.shape[1:], generator=draw)
            pairs[name] = down, torch.randn(len(layer.weight), r, *more, generator=draw)
    return pairs


load: Any = load_policy


def product(down: Tensor, up: Tensor, scale: float) -> Tensor:
    return scale * up.flatten(1) @ down.flatten(1)


@pytest.mark.parametrize("form", FORMS)
def test_each_layer_gets_what_the_file_says(form, tmp_path):
    family, part, pattern, key, ends, alpha = FORMS[form]
    pipe = bare(family)
    pairs = adapters(getattr(pipe, part), pattern)
    state = {f"{key(layer)}.{end}": w for layer, pair in pairs.items() for end, w in zip(ends, pair, strict=True)}
    if alpha is not None:
        state |= {f"{key(layer)}.alpha": torch.tensor(alpha) for layer in pairs}
    file = tmp_path / ("adapter_model.safetensors" if form.startswith("peft") else "style.safetensors")
    save_file(state, file)
    if form.startswith("peft"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    networks = FAMILIES[family].present({name: [1] for name in pipe.components})
    loaded = read_adapters(pipe, networks, tmp_path)[part]
    assert loaded.keys() == pairs.keys()
    for layer, (down, up) in pairs.items():
        scale = 3.0 if form.startswith("peft") else 1.0 if alpha is None else alpha / len(down)
        assert torch.allclose(product(*loaded[layer]), product(down, up, scale), atol=1e-4), layer


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"use_rslora": True}, (6 / 2**0.5, 6 / 2**0.5)),
        ({"alpha_pattern": {"0.attn2.to_q": 1}}, (0.5, 3.0)),
        ({"r": 4, "rank_pattern": {"to_q": 2}}, (3.0, 3.0)),
    ],
    ids=["use_rslora", "alpha_pattern", "rank_pattern"],
)
@pytest.mark.parametrize("form", ["peft", "diffusers"])
def test_scales_of_peft_are_taken(form, settings, scales, tmp_path):
    pairs = adapters(bare("pixart").transformer, r"attn2\.to_q")
    prefix, entries = "transformer." if form == "diffusers" else "base_model.model.", {"lora_alpha": 6, **settings}
    state = {
        f"{prefix}{n}.lora_{letter}.weight": w for n, p in pairs.items() for letter, w in zip("AB", p, strict=True)
    }
    file = tmp_path / ("adapter_model.safetensors" if form == "peft" else WEIGHT_FILE)
    metadata = {f"transformer.{name}": value for name, value in entries.items()}
    save_file(state, file, {METADATA: json.dumps(metadata)} if form == "diffusers" else None)
    (tmp_path / "adapter_config.json").write_text(json.dumps(entries))
    loaded = read_adapters(bare("pixart"), ["transformer"], tmp_path)["transformer"]
    read_scales = loaded["transformer_blocks.0.attn2.to_q"].scale, loaded["transformer_blocks.1.attn2.to_q"].scale
    assert read_scales == pytest.approx(scales)


def test_joined_layers_of_sd3_are_split(tmp_path):
    transformer = bare("sd3").transformer
    last, width = len(transformer.transformer_blocks) - 1, transformer.inner_dim
    draw, state = torch.Generator().manual_seed(0), {}
    for name, outputs in (("x_block_attn_qkv", 3), ("context_block_adaLN_modulation_1", 2)):
        base = f"lora_unet_joint_blocks_{last}_{name}"
        state[f"{base}.lora_down.weight"] = torch.randn(2, width, generator=draw)
        state[f"{base}.lora_up.weight"] = torch.randn(outputs * width, 2, generator=draw)
    save_file(state, tmp_path / "sd3.safetensors")
    loaded, ups = read_adapters(bare("sd3"), ["transformer"], tmp_path)["transformer"], [*state.values()][1::2]
    block = f"transformer_blocks.{last}"
    for layer, up in zip(("to_q", "to_k", "to_v"), ups[0].chunk(3), strict=True):
        assert torch.equal(loaded[f"{block}.attn.{layer}"].up, up)
    swapped = torch.cat([*ups[1].chunk(2)][::-1])  # scale and shift
    assert torch.equal(loaded[f"{block}.norm1_context.linear"].up, swapped)


@pytest.mark.parametrize(
    "form", ["lora_unet_double_blocks_0_img_attn_qkv", "diffusion_model.double_blocks.0.img_attn.qkv"]
)
def test_joined_layers_of_flux_are_split(form, tmp_path):
    ends, width = PAIR["kohya" if form.startswith("lora") else "peft"], bare("flux").transformer.inner_dim
    down, up = torch.randn(2, width), torch.randn(3 * width, 2)
    save_file({f"{form}.{ends[0]}": down, f"{form}.{ends[1]}": up}, tmp_path / "flux.safetensors")
    loaded = read_adapters(bare("flux"), ["transformer"], tmp_path)["transformer"]
    for layer, rows in zip(("to_q", "to_k", "to_v"), up.chunk(3), strict=True):
        assert torch.allclose(product(*loaded[f"transformer_blocks.0.attn.{layer}"]), rows @ down, atol=1e-5)


def test_several_loras_are_summed_and_encoders_are_saved_again(tmp_path):
    folder, pipe, state = resolve_model("shapes-sd15"), bare("sd15"), {}
    for part, prefix, pattern in (("unet", "lora_unet_", r"attn|conv1"), ("text_encoder", "lora_te_", r"fc1")):
        for layer, (down, up) in adapters(getattr(pipe, part), pattern).items():
            base = prefix + layer.replace(".", "_")
            state |= {f"{base}.lora_down.weight": down, f"{base}.lora_up.weight": up}
    file = tmp_path / "style.safetensors"
    save_file(state, file)
    once, both = (load(folder, lora_path=loras) for loras in (f"{file}:0.5", [f"{file}:0.75", f"{file}:-0.25"]))
    both.save(tmp_path / "lora")
    again = load(folder, lora_path=tmp_path)
    expected, original = trained_weights(once.networks["unet"]), pipe.text_encoder.state_dict()
    changed = once.pipe.text_encoder.state_dict()
    for policy in (both, again):
        weights = trained_weights(policy.networks["unet"])
        assert all(torch.allclose(weights[layer], weight, atol=1e-4) for layer, weight in expected.items())
        for name, weight in policy.pipe.text_encoder.state_dict().items():
            assert torch.allclose(weight, changed[name], atol=1e-5)
            assert torch.equal(weight, original[name]) != name.endswith("fc1.weight")


@pytest.mark.parametrize("kind", [StableDiffusion3Pipeline, PixArtSigmaPipeline])
def test_encoders_that_diffusers_does_not_save_are_saved_too(kind, tmp_path):
    pipe = tiny_sd3_pipeline(t5=True)
    pairs = adapters(pipe.text_encoder_3, r"SelfAttention\.q")
    layers = {f"text_encoder_3.{name}": pair for name, pair in pairs.items()}
    state = {f"{layer}.{end}": w for layer, p in layers.items() for end, w in zip(PAIR["peft"], p, strict=True)}
    save_file(state, tmp_path / "t5.safetensors")
    start = start_from_loras(pipe, ["transformer"], f"{tmp_path}/t5.safetensors:0.5", LoraSettings(rank=2))
    add_lora(pipe.transformer, start.settings, SD3_ATTENTION)
    save_lora(kind, {"transformer": pipe.transformer}, tmp_path / "lora", start)
    fresh = tiny_sd3_pipeline(t5=True)
    loaded = read_adapters(fresh, ["transformer"], tmp_path / "lora")
    assert loaded.keys() == {"transformer", "text_encoder_3"} and loaded["text_encoder_3"].keys() == pairs.keys()
    for layer, (down, up) in pairs.items():
        assert torch.allclose(product(*loaded["text_encoder_3"][layer]), product(down, up, 0.5), atol=1e-5)
    fresh.load_lora_weights(tmp_path / "lora")  # diffusers passes over what it has no place for
    load_lora({"transformer": pipe.transformer}, tmp_path / "lora")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["lora_unet_a.dora_scale", "lora_unet_a.lora_up.weight"], r"is a DoRA \(keys"),
        (["lora_unet_a.hada_w1_a"], r"is a LoHa .*Merge it into its model"),
        (["lora_unet_a.lokr_w1"], r"is a LoKr "),
        (["lora_unet_a.lora_up.bias"], r"is a LoRA with biases .*Merge it into its model"),
        (["unet.a.lora_B.default.bias"], r"is a LoRA with biases .*Merge it into its model"),
        (["emb_params"], r"is no LoRA: .*Give the file of a LoRA"),
        (
            [f"lora_unet_double_blocks_0_img_mlp_0.lora_{end}.weight" for end in ("up", "down")],
            r"StableDiffusionPipeline: .*LoRA of FLUX",
        ),
        (
            [f"lora_unet_mid_block_attentions_0_proj_in.lora_{end}.weight" for end in ("up", "down")],
            r"a LoRA of Stable Diffusion, whose unet.mid_block.*proj_in takes 7 to 7, and here it takes 80 to 80",
        ),
    ],
    ids=lambda value: value[0].rpartition(".")[2] if isinstance(value, list) else "",
)
def test_what_cannot_be_read_is_named(keys, message, tmp_path):
    save_file({key: torch.ones(7, 7, 1, 1) for key in keys}, tmp_path / "{x}.safetensors")
    with pytest.raises(UserError, match=message):
        read_adapters(bare("sd15"), ["unet"], tmp_path / "{x}.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_up.weight": None}, r"lora_down\.weight is there without lora_unet_a\.lora_up\.weight"),
        ({"lora_down.weight": None}, r"lora_up\.weight is there without lora_unet_a\.lora_down\.weight"),
        (
            {"lora_up.weight": torch.ones(8, 3)},
            r"shapes \(2, 8\) of .*down\.weight and \(8, 3\) of .* no rank",
        ),
        ({"lora_down.weight": torch.ones(2)}, r"shapes \(2,\) of lora_unet_a\.lora_down\.weight"),
        ({"alpha": torch.ones(2)}, r"lora_unet_a\.alpha has 2 values instead of 1"),
        ({"lora_up.weight": torch.full((8, 2), torch.nan)}, r"lora_unet_a\.lora_up\.weight has values that are not"),
    ],
)
def test_a_damaged_layer_is_named(changed, message, tmp_path):
    layer = {"lora_down.weight": torch.ones(2, 8), "lora_up.weight": torch.ones(8, 2), **changed}
    state = {f"lora_unet_a.{end}": weight for end, weight in layer.items() if weight is not None}
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=rf"x\.safetensors is damaged: .*{message}.*Copy it again"):
        read_adapters(bare("sd15"), ["unet"], tmp_path)


@pytest.mark.parametrize("name", ["init_lora_weights", "transformer.init_lora_weights"])
def test_a_start_that_changed_the_base_is_refused(name, tmp_path):
    for start in (True, "gaussian", "orthogonal"):
        check_lora_kind(tmp_path, {name: start})
    for start in ("pissa", "pissa_niter_16", "olora"):
        with pytest.raises(UserError, match=f"began as '{start}', which changed the base model"):
            check_lora_kind(tmp_path, {name: start})
    save_file({"a.lora_A.weight": torch.ones(1, 2), "a.lora_B.weight": torch.ones(2, 1)}, tmp_path / PEFT_FILE)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1, "init_lora_weights": "olora"}))
    with pytest.raises(UserError, match="began as 'olora'"):
        read_lora(tmp_path)


def test_a_lora_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("visalign.hub.go_offline_if_unreachable", lambda: "")
    files = {"me/style/x.safetensors": tmp_path / "x.safetensors", f"me/run/{WEIGHT_FILE}": tmp_path / WEIGHT_FILE}

    def download(name, file):
        if f"{name}/{file}" not in files:
            raise OSError("404 Client Error")
        return str(files[f"{name}/{file}"])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for path in files.values():
        path.touch()
    assert lora_file(Path("me/style/x.safetensors")) == tmp_path / "x.safetensors"
    assert lora_file(Path("me/run")) == tmp_path / WEIGHT_FILE
    with pytest.raises(FileNotFoundError, match=r"no LoRA me/other\. .* given as owner/name/FILE.safetensors"):
        lora_file(Path("me/other"))


def test_places_of_a_lora(tmp_path):
    for name in ("a.safetensors", "b.safetensors", "a:0.5.safetensors", "old.pt"):
        (tmp_path / name).touch()
    assert parse_lora(f"{tmp_path}/a.safetensors:-0.5") == (tmp_path / "a.safetensors", -0.5)
    assert parse_lora(f"{tmp_path}/a:0.5.safetensors") == (tmp_path / "a:0.5.safetensors", 1.0)
    assert parse_lora(r"C:\loras\a.safetensors:0.8") == (Path(r"C:\loras\a.safetensors"), 0.8)
    assert parse_lora(r"C:\loras\a.safetensors")[1] == 1.0
    for wrong in (f"{tmp_path}/a.safetensors:strong", "a.safetensors:nan", ":0.5", ""):
        with pytest.raises(UserError, match=rf"The LoRA is '{wrong}'\. Give PATH or PATH:WEIGHT, such as .+:0\.8"):
            parse_lora(wrong)
    (tmp_path / "run").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "a.safetensors").write_bytes(b"\x80\x67" + bytes(6) + b'{"__metadata__": {"for')
    for path, message in (
        (tmp_path, r"holds a.safetensors, a:0.5.safetensors, b.safetensors\. Name the file"),
        (tmp_path / "old.pt", r"is no .safetensors file"),
        (tmp_path / "c.safetensors", r"There is no LoRA .*c.safetensors\. Give a run folder"),
        (tmp_path / "cut", r"is no whole safetensors file .*cut off at 30 bytes"),
        (tmp_path / "run", r"holds no pytorch_lora_weights.safetensors .* when it ends"),
        (tmp_path / "a.safetensors", r"is no whole safetensors file"),
    ):
        with pytest.raises((UserError, FileNotFoundError), match=message):
            read_adapters(bare("sd15"), ["unet"], path)
