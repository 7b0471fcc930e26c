# SPDX-License-Identifier: Apache-2.0
"""LoRA: a start that depends on its seed alone, the chosen layers, and messages."""

import json
import math
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import LoraSettings
from visalign.adapters.lora import ADAPTER, insert_adapters
from visalign.adapters.pipeline.families import SD3_ATTENTION
from visalign.adapters.pipeline.lora import METADATA, WEIGHT_FILE, add_lora, load_lora, save_lora
from visalign.errors import UserError


def weights(settings: LoraSettings):
    transformer = tiny_sd3_pipeline().transformer
    add_lora(transformer, settings, SD3_ATTENTION)
    return {n: p for n, p in transformer.named_parameters() if p.requires_grad}


def test_start_depends_on_the_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights(LoraSettings(rank=2, alpha=4, seed=7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = weights(LoraSettings(rank=2, alpha=4, seed=7))
    other = weights(LoraSettings(rank=2, alpha=4, seed=8))
    assert all(torch.equal(first[n], second[n]) for n in first)
    a = [n for n in first if "lora_A" in n]
    assert not any(torch.equal(first[n], other[n]) for n in a)
    assert all(not first[n].any() for n in first if "lora_B" in n)
    # peft's "gaussian", which diffusers' trainers use, has std 1 / rank; its default is uniform
    together = torch.cat([first[n].flatten() for n in a])
    assert float(together.detach().std()) == pytest.approx(1 / 2, rel=0.1)
    bound = 1 / math.sqrt(16)
    uniform = weights(LoraSettings(rank=2, alpha=4, seed=7, init="kaiming"))
    together = torch.cat([uniform[n].flatten() for n in a])
    assert together.abs().max() <= bound
    assert float(together.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_places_and_sizes():
    first = weights(LoraSettings(rank=2, alpha=4))
    # two blocks of eight projections, less the context output that SD3's last block does not have
    assert len(first) == 2 * (8 + 7) and all(".attn." in n for n in first)
    only = weights(LoraSettings(rank=2, alpha=4, target_modules=("to_q", "ff.net.2")))
    assert {n.split("transformer_blocks.")[1].split(".lora")[0] for n in only} == {
        f"{i}.{end}" for i in range(2) for end in ("attn.to_q", "ff.net.2")
    }
    sd35 = tiny_sd3_pipeline(sd35=True).transformer
    assert len(add_lora(sd35, LoraSettings(rank=2), SD3_ATTENTION)) == 15 and not any(
        "attn2" in n and "lora" in n for n, _ in sd35.named_parameters()
    )


def test_messages(tmp_path):
    transformer = tiny_sd3_pipeline().transformer
    with pytest.raises(UserError, match=r"targets \['to_query'\] name no linear layer.*attn\.to_q"):
        add_lora(transformer, LoraSettings(target_modules=("to_query", "to_v")), SD3_ATTENTION)
    add_lora(transformer, LoraSettings(rank=2, alpha=3), SD3_ATTENTION)
    with pytest.raises(UserError, match=r"already has the adapters \['default'\].*fuse_lora"):
        add_lora(transformer, LoraSettings(rank=2), SD3_ATTENTION)
    save_lora(StableDiffusion3Pipeline, {"transformer": transformer}, tmp_path)
    wider = tiny_sd3_pipeline().transformer
    add_lora(wider, LoraSettings(rank=3, alpha=3), SD3_ATTENTION)
    with pytest.raises(UserError, match=r"does not fit this model: .*\(2, 16\) there, \(3, 16\) here"):
        load_lora({"transformer": wider}, tmp_path)
    stronger = tiny_sd3_pipeline().transformer
    add_lora(stronger, LoraSettings(rank=2, alpha=6), SD3_ATTENTION)
    with pytest.raises(UserError, match=r"alpha 3 there, 6 here\. Build"):
        load_lora({"transformer": stronger}, tmp_path)


def test_a_file_without_alpha_has_the_scale_that_diffusers_takes(tmp_path):
    networks = [tiny_sd3_pipeline().transformer for _ in range(3)]
    for network, alpha in zip(networks, (3, 2, 3), strict=True):
        add_lora(network, LoraSettings(rank=2, alpha=alpha), SD3_ATTENTION)
    save_lora(StableDiffusion3Pipeline, {"transformer": networks[0]}, tmp_path)
    file = tmp_path / WEIGHT_FILE
    save_file(load_file(file), file, {"format": "pt"})  # without the metadata
    load_lora({"transformer": networks[1]}, tmp_path)
    with pytest.raises(UserError, match=r"alpha 2 there, 3 here"):
        load_lora({"transformer": networks[2]}, tmp_path)
    save_file(load_file(file), file, {"format": "pt", METADATA: json.dumps({"transformer.use_rslora": True})})
    with pytest.raises(UserError, match=r"has transformer\.use_rslora, and this policy scales by α / r alone"):
        load_lora({"transformer": networks[1]}, tmp_path)


def test_adapters_multiply_in_the_dtype_of_their_input_and_learn_in_float32():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 48)), torch.randn(8, 64)
    layer: Any = insert_adapters(model, LoraSettings(rank=4, alpha=6), ["0"])[0]
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    nn.init.normal_(b, std=0.1)
    expected = x @ layer.base_layer.weight.T + layer.base_layer.bias + 1.5 * x @ a.T @ b.T  # α / r = 1.5
    exact = torch.autograd.grad(expected.square().sum(), (a, b))
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    layer.base_layer.to(torch.bfloat16)
    low = model(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected.detach(), rtol=2e-2, atol=2e-2 * float(expected.detach().std()))
    gradients = torch.autograd.grad(low.float().square().sum(), (a, b))
    for gradient, reference in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.float32
        assert float((gradient - reference).norm() / reference.norm()) < 1e-2
