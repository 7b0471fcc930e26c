# SPDX-License-Identifier: Apache-2.0
"""A frozen network in int8 under LoRA: it learns, replays and is saved as one of full precision is."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import diffusers
import pytest
import torch

from tests.support.models.modular import save_modular, tiny_flux3, tiny_qwen_image_21
from tests.support.models.pipelines import tiny_folder
from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.ratio import ratio_check
from visalign.adapters import LoraSettings, load_policy
from visalign.adapters.hollow import hollow_pipelines
from visalign.adapters.pipeline import quantization
from visalign.errors import UserError
from visalign.flow.rollout import rollout
from visalign.pipelines.shared.plan import weight_bytes

LORA = LoraSettings(rank=2, alpha=4)
SIZES = {"sd15": (32, 16), "flux": (16, 8), "sd3": (16, 16), "flux3": (16, 8), "qwen_image_21": (16, 8)}
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_sd3_pipeline().save_pretrained(folder / "sd3")
    modular = {"flux3": tiny_flux3(), "qwen_image_21": tiny_qwen_image_21()}
    paths = {name: tiny_folder(name, folder / name) for name in ("sd15", "flux")}
    paths |= {name: save_modular(pipe, folder / name) for name, pipe in modular.items()}
    return {**paths, "sd3": folder / "sd3"}


def int8(folders: Any, name: str, **options: Any) -> Any:
    settings = {"lora": LORA, "image_size": SIZES[name], "quantization": "torchao_int8", **options}
    return load_policy(folders[name], **settings)


def asked(policy: Any, count: int = 2) -> tuple[Any, ...]:
    x = torch.randn(count, *policy.latent_shape, generator=torch.Generator().manual_seed(1))
    return x, torch.linspace(0.8, 0.4, count), policy.encode(["a red circle", "two squares"] * (count // 2))


@needs_torchao
def test_lora_learns_on_a_rounded_network(folders, tmp_path):
    policy = int8(folders, "sd3")
    network = policy.module
    rounded = [n for n, w in network.named_parameters() if type(w).__name__ == "Int8Tensor"]
    assert any(".to_q." in n for n in rounded) and all("lora_" not in n for n in rounded)
    parameters = policy.trainable_parameters()
    assert parameters and all("lora_" in n and w.dtype == torch.float32 for n, w in parameters)
    pairs = asked(policy)
    goal = torch.zeros_like(pairs[0])
    frozen = {n: w.detach().clone() for n, w in network.named_parameters() if not w.requires_grad}
    optimizer, losses = torch.optim.AdamW([w for _, w in parameters], lr=1e-2), []
    for _ in range(8):
        loss = (policy.velocity(*pairs) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    assert {n for n, w in network.named_parameters() if w.grad is not None} == {n for n, _ in parameters}
    assert all(torch.equal(plain(network.get_parameter(n)), plain(w)) for n, w in frozen.items())
    condition = policy.encode(["a red circle", "two squares"])
    trajectory = rollout(policy, condition, sigmas=policy.sigmas(3), sde_steps=[0, 1], seeds=[1, 2])
    assert ratio_check(policy, condition, trajectory, batch_size=2).ok
    policy.save(tmp_path)
    with torch.no_grad():
        expected = policy.velocity(*pairs)
        pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folders["sd3"], text_encoder_3=None, tokenizer_3=None)
        pipe.load_lora_weights(tmp_path)
        loaded = {n.replace("default_0", "default"): w for n, w in pipe.transformer.state_dict().items()}
        assert parameters and all(torch.equal(loaded[n], w) for n, w in parameters)
        plain_policy: Any = load_policy(folders["sd3"], image_size=SIZES["sd3"], lora=LORA)
        plain_policy.load(tmp_path)
        plain_velocity = plain_policy.velocity(*pairs)
        with policy.reference(), plain_policy.reference():
            start, plain_start = policy.velocity(*pairs), plain_policy.velocity(*pairs)
    moved = (expected - start).norm()
    assert moved > 10 * (start - plain_start).norm()  # rounding is far smaller than what was learned
    assert ((plain_velocity - plain_start) - (expected - start)).norm() < 0.1 * moved


def plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.dequantize() if type(weight).__name__ == "Int8Tensor" else weight


@needs_torchao
def test_the_backward_of_rounded_layers():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # type: ignore[import-not-found]

    layer: Any = torch.nn.Linear(24, 8).requires_grad_(False)
    quantize_(layer, Int8WeightOnlyConfig(version=2))
    x = torch.randn(3, 5, 24)
    ours, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = layer(own)
    quantization.keep_rounded(layer)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        output = layer(ours)
    assert not saved and torch.equal(output, expected)
    for out in (output, expected):
        out.float().square().sum().backward()
    assert ours.grad is not None and own.grad is not None
    assert torch.allclose(ours.grad, own.grad, atol=1e-5)


@pytest.mark.parametrize("name", ["flux", "flux3"])
def test_a_plan_rounds_every_frozen_linear_layer_to_four_bits(folders, name):
    """Half a byte in place of two, a float32 for 64 weights, and a table of 16 float32 for a layer."""
    with hollow_pipelines():
        unrounded, rounded = (
            int8(folders, name, quantization=kind, dtype=torch.bfloat16) for kind in (None, "bitsandbytes_4bit")
        )
    counts = [
        m.weight.numel()
        for m in unrounded.module.modules()
        if isinstance(m, torch.nn.Linear) and not m.weight.requires_grad
    ]
    fewer = weight_bytes(unrounded.module) - weight_bytes(rounded.module)
    assert counts and fewer == sum(2 * n - ((n + 1) // 2 + 4 * -(-n // 64) + 64) for n in counts)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flux", {"quantization": "int3"}, r"quantization is 'int3'; allowed are torchao_int8, bitsandbytes_4"),
        ("sd3", {"lora": None}, r"quantization is 'torchao_int8'; rounded weights cannot be trained"),
        ("sd3", {}, r"quantization is 'torchao_int8'; it needs torchao: pip install torchao"),
    ],
)
def test_refusals(folders, monkeypatch, name, options, message):
    monkeypatch.setattr(quantization, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=message):
        int8(folders, name, **options)


def test_what_does_not_run_where(folders, monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda package: package)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"DistributedDataParallel cannot share weights that torchao rounded"):
        int8(folders, "flux")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"'bitsandbytes_4bit'; diffusers reads it only on a GPU"):
        int8(folders, "flux", quantization="bitsandbytes_4bit")


def test_a_network_that_is_all_bytes_has_the_dtype_of_its_products(folders):
    """FLUX.3 has no bias and keeps no norm: only what LoRA adds is floating point."""
    with hollow_pipelines():
        policy: Any = int8(folders, "flux3", quantization="bitsandbytes_4bit", dtype=torch.bfloat16)
        assert policy.storage_dtype == policy.compute_dtype == torch.bfloat16
        velocity = policy.velocity(*asked(policy))
    assert velocity.dtype == torch.float32
