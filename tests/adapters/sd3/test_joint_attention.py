# SPDX-License-Identifier: Apache-2.0
"""One weighted null token is the 256 null tokens of diffusers' SD3 pipeline: outputs and gradients."""

import math
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import FusedJointAttnProcessor2_0

from visalign.adapters.sd3 import joint_attention
from visalign.adapters.sd3.joint_attention import collapse_null_tokens, use_weighted_attention

SD3 = {"dual_attention_layers": (), "qk_norm": None}
SD35 = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}


def make_transformer(**options) -> SD3Transformer2DModel:
    """Two layers, the last one `context_pre_only`, with weights large enough that attention matters."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=4,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=6,
        pos_embed_max_size=4,
        **options,
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                p.mul_(2.0)
            elif p.ndim == 1:
                p.add_(0.3 * torch.randn_like(p))
    return model


def make_inputs(null_tokens: int):
    g = torch.Generator().manual_seed(1)
    context = torch.randn(2, 5 + null_tokens, 12, generator=g)
    context[:, 5:] = 0
    return {
        "hidden_states": torch.randn(2, 4, 4, 4, generator=g),
        "encoder_hidden_states": context,
        "pooled_projections": torch.randn(2, 6, generator=g),
        "timestep": torch.tensor([900.0, 333.3]),
        "return_dict": False,
    }


def output_and_gradients(model, **inputs):
    model.zero_grad()
    out = model(**inputs)[0]
    (out**2).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("options", "checkpointing"), [(SD3, False), (SD35, True)], ids=["sd3", "sd3.5"])
def test_one_weighted_token_equals_256(options, checkpointing):
    dtype, tolerance = torch.float64, 1e-7
    model: Any = make_transformer(**options)
    model.to(dtype)
    inputs = {k: v.to(dtype) if torch.is_tensor(v) else v for k, v in make_inputs(256).items()}
    plain, plain_grad = output_and_gradients(model, **inputs)

    use_weighted_attention(model)
    if checkpointing:
        model.enable_gradient_checkpointing()
    embeds, log_multiplicity = collapse_null_tokens(inputs["encoder_hidden_states"])
    assert embeds.shape == (2, 6, 12)
    weighted = {"context_log_multiplicity": log_multiplicity}
    short, short_grad = output_and_gradients(
        model, **(inputs | {"encoder_hidden_states": embeds, "joint_attention_kwargs": weighted})
    )
    unweighted, _ = output_and_gradients(model, **(inputs | {"encoder_hidden_states": embeds}))

    torch.testing.assert_close(short, plain, rtol=tolerance, atol=2 * tolerance)
    assert (unweighted - plain).abs().max() > 1e-2, "the multiplicity must matter in this test"
    assert short_grad.keys() == plain_grad.keys()
    for name, grad in plain_grad.items():
        scale = float(grad.abs().max().clamp_min(1e-3))
        torch.testing.assert_close(short_grad[name] / scale, grad / scale, rtol=0, atol=6 * tolerance, msg=name)


@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit_queries_keep_the_exact_weight(autocast):
    """In bfloat16 the collapsed output is as near to the float32 one as the plain one is, gradients too."""
    inputs = make_inputs(256)
    embeds, log_multiplicity = collapse_null_tokens(inputs["encoder_hidden_states"])
    weighted = {"context_log_multiplicity": log_multiplicity}
    collapsed = inputs | {"encoder_hidden_states": embeds, "joint_attention_kwargs": weighted}
    exact, exact_grad = output_and_gradients(make_transformer(**SD35), **inputs)
    errors = []
    for chosen in (inputs, collapsed):
        model = make_transformer(**SD35)
        use_weighted_attention(model)
        if not autocast:
            model = model.bfloat16()
            chosen = {k: v.bfloat16() if torch.is_tensor(v) else v for k, v in chosen.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, grad = output_and_gradients(model, **chosen)
        errors.append([float((out - exact).norm() / exact.norm())])
        errors[-1] += [float((grad[n] - g).norm() / g.norm()) for n, g in exact_grad.items() if "blocks.1" in n]
    for plain, short in zip(*errors, strict=True):
        assert short < 2 * plain + 0.01, (plain, short)


@pytest.mark.parametrize("fused", [True, False])
def test_without_null_run_it_is_diffusers_processor(fused, monkeypatch):
    """Bit for bit with torch's kernel; within rounding where attention is written out."""
    if fused:
        monkeypatch.setattr(joint_attention, "SHORT", 0)
    model = make_transformer(**SD35)
    inputs = make_inputs(0)
    plain, plain_grad = output_and_gradients(model, **inputs)
    use_weighted_attention(model)
    same, same_grad = output_and_gradients(model, **inputs)
    torch.testing.assert_close(same, plain, rtol=0, atol=0 if fused else 2e-6)
    for name in plain_grad:
        off = (same_grad[name] - plain_grad[name]).norm() / plain_grad[name].norm().clamp_min(1e-3)
        assert off < (1e-6 if fused else 1e-5), name


def test_collapse_keeps_inner_and_single_null_tokens():
    embeds = torch.ones(2, 6, 3)
    embeds[:, 1] = 0
    embeds[0, 4:] = 0
    embeds[1, 5:] = 0
    same, weight = collapse_null_tokens(embeds)
    assert same is embeds and weight.tolist() == [0.0] * 6
    short, weight = collapse_null_tokens(embeds[:1])
    assert short.shape == (1, 5, 3) and weight.tolist() == pytest.approx([0, 0, 0, 0, math.log(2)])
    empty, weight = collapse_null_tokens(torch.zeros(1, 7, 3))
    assert empty.shape == (1, 1, 3) and weight.tolist() == pytest.approx([math.log(7)])


def test_an_attention_of_another_kind_is_refused():
    model = make_transformer(**SD3)
    model.set_attn_processor(FusedJointAttnProcessor2_0())
    with pytest.raises(ValueError, match=r"\['FusedJointAttnProcessor2_0'\]; only JointAttnProcessor2_0"):
        use_weighted_attention(model)
