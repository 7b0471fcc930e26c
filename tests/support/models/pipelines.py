# SPDX-License-Identifier: Apache-2.0
"""A tiny random pipeline of every family in `visalign.adapters.pipeline.families`, without text encoders.

The encoders' place is taken by random embeddings that depend on the prompt's text alone; modular pipelines
have encoders.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers import CLIPTextModel

from tests.support.models.modular import tiny_flux3, tiny_qwen_image_21
from tests.support.models.sd3 import tiny_t5, tiny_text_encoder, tiny_tokenizer
from visalign.adapters import LoraSettings
from visalign.adapters.pipeline.families import FAMILIES
from visalign.adapters.pipeline.policy import PipelinePolicy

diffusers: Any = importlib.import_module("diffusers")
"""Untyped: its annotations are narrower than what it takes."""
NO: Any = None
"""In the place of an encoder."""
Made = tuple[Any, dict[str, tuple[int, ...]], dict[str, Any]]
"""A pipeline, the shapes of its embeddings, and the options of its policy."""


def tiny_pipeline(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline of the family and the options that its policy needs."""
    torch.manual_seed(0)
    pipe, shapes, options = TINY[name]()
    pipe.set_progress_bar_config(disable=True)
    for part in FAMILIES[name].networks:
        if getattr(pipe, part, None) is not None:
            _fill_zeros(getattr(pipe, part).eval())
    if FAMILIES[name].modular:
        return pipe, options
    own = pipe.encode_prompt

    def encode_prompt(prompt: Any = None, *args: Any, **kwargs: Any) -> Any:
        embeds = [v for k, v in kwargs.items() if "prompt_embeds" in k and v is not None]
        if embeds:
            return own(prompt, *args, **kwargs)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        negative = kwargs.get("negative_prompt") or ""
        negatives = [negative] * len(prompts) if isinstance(negative, str) else list(negative)
        return tuple(
            _embedding(n.removeprefix("negative_"), negatives if n.startswith("negative_") else prompts, shapes)
            for n in FAMILIES[name].encodes.split()
        )

    pipe.encode_prompt = encode_prompt
    return pipe, options


def tiny_policy(name: str, change: Callable[[Any], object] | None = None, **options: Any) -> PipelinePolicy:
    """A policy with LoRA on the family's pipeline, which `change` may alter before."""
    pipe, usual = tiny_pipeline(name)
    if change is not None:
        change(pipe)
    return PipelinePolicy(pipe, **{"lora": LoraSettings(rank=2, alpha=4), **usual, **options})


def tiny_folder(name: str, folder: Path) -> Path:
    """A whole pipeline with text encoders as `save_pretrained` writes it."""
    torch.manual_seed(0)
    bare, _, _ = TINY[name]()
    for part in FAMILIES[name].present(bare.config):
        _fill_zeros(getattr(bare, part))
    tokenizer = tiny_tokenizer()
    vocabulary = len(tokenizer)
    parts: dict[str, Any] = {"text_encoder": None, "tokenizer": tokenizer}
    if name == "sdxl":
        parts |= {"text_encoder": CLIPTextModel(tiny_text_encoder(16, vocabulary).config), "tokenizer_2": tokenizer}
        parts["text_encoder_2"] = tiny_text_encoder(16, vocabulary)
    elif name in ("pixart", "wan"):
        parts["text_encoder"] = tiny_t5(vocabulary)
    else:
        parts["text_encoder"] = CLIPTextModel(tiny_text_encoder(32, vocabulary).config).eval()
    if name.startswith("flux"):
        parts |= {"text_encoder_2": tiny_t5(vocabulary), "tokenizer_2": tokenizer}
    options = {"requires_safety_checker": False} if name == "sd15" else {}
    type(bare)(**{**bare.components, **parts}, **options).save_pretrained(folder)
    return folder


def tiny_prompts(name: str, prompts: list[str]) -> list[Any]:
    """Prompts, or records with an image where the family edits one."""
    if FAMILIES[name].source != "needed":
        return list(prompts)
    images = {prompt: random_rows(3, 16, 8, text=prompt).sigmoid() for prompt in prompts}
    return [{"prompt": prompt, "source": images[prompt]} for prompt in prompts]


def trained_weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """layer -> what its active adapter adds to its weight, α/r B A; of a network without adapters its weights."""
    layers: dict[str, Any] = {n: m for n, m in network.named_modules() if isinstance(m, LoraLayer)}
    added = {n: layer.get_delta_weight(layer.active_adapters[0]) for n, layer in layers.items()}
    weights = added or dict(network.named_parameters())
    return {name.removeprefix("base_model.model."): weight.detach() for name, weight in weights.items()}


def random_rows(*shape: int, text: str = "") -> torch.Tensor:
    """Normal numbers that depend on the text alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))


def _embedding(name: str, prompts: list[str], shapes: Mapping[str, tuple[int, ...]]) -> Any:
    if name == "-":
        return torch.zeros(shapes["prompt_embeds"][0], 3)
    shape = shapes[name]
    varies = shape[0] == 0  # as many tokens as the text has letters
    sizes = [len(p) % 5 + 4 if varies else shape[0] for p in prompts]
    if "cu_seqlens" in name:
        return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    if "mask" in name and varies and len(set(sizes)) == 1:
        return None  # as the pipelines have it where every token counts
    if "mask" in name:
        dtype = torch.bool if len(shape) == 2 else torch.long
        return torch.stack([torch.arange(max(sizes)) < size for size in sizes]).to(dtype)
    if shape[0] == -1:  # a list of prompts of their own lengths
        return [random_rows(len(p) % 5 + 4, *shape[1:], text=name + p) for p in prompts]
    if shape[0] == -2:  # layers come first
        return torch.stack([random_rows(shape[1], *shape[2:], text=name + p) for p in prompts], 1)
    return torch.stack([random_rows(n, *shape[1:], text=name + p) for n, p in zip(sizes, prompts, strict=True)])


def _fill_zeros(network: torch.nn.Module) -> None:
    """Gates that start at zero would hide everything behind them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            if not weight.any() or not weight.isfinite().all():
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))


def _flow(**config: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**config)


def _noise(**config: Any) -> Any:
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    return diffusers.DDIMScheduler(**betas, clip_sample=False, set_alpha_to_one=True, steps_offset=1, **config)


def _autoencoder(channels: int, blocks: tuple[int, ...] = (4,), **config: Any) -> Any:
    return diffusers.AutoencoderKL(
        sample_size=32, block_out_channels=blocks, down_block_types=("DownEncoderBlock2D",) * len(blocks),
        up_block_types=("UpDecoderBlock2D",) * len(blocks), layers_per_block=1, latent_channels=channels,
        norm_num_groups=1, shift_factor=0.06, scaling_factor=1.5, **config,
    ).eval()  # fmt: skip


def _qwen_autoencoder() -> Any:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1] * 4, latents_std=[1.5] * 4,
    ).eval()  # fmt: skip


def _hunyuan_autoencoder(channels: int, blocks: tuple[int, ...]) -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=channels, down_block_types=("HunyuanVideoDownBlock3D",) * len(blocks),
        up_block_types=("HunyuanVideoUpBlock3D",) * len(blocks), block_out_channels=blocks,
        layers_per_block=1, norm_num_groups=4, scaling_factor=0.476986, spatial_compression_ratio=8,
        temporal_compression_ratio=4, mid_block_add_attention=True,
    ).eval()  # fmt: skip


def _sd3() -> Made:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64,
    )  # fmt: skip
    pipe = diffusers.StableDiffusion3Pipeline(transformer, _flow(shift=3.0), _autoencoder(4), *[NO] * 6, NO, NO)
    shapes = {"prompt_embeds": (7, 32), "pooled_prompt_embeds": (64,)}
    return pipe, shapes, {"guidance": 4.5, "image_size": (16, 8)}


def _flux() -> Made:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=24, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )  # fmt: skip
    pipe = diffusers.FluxPipeline(_flow(use_dynamic_shifting=True), _autoencoder(4), NO, NO, NO, NO, transformer)
    shapes = {"prompt_embeds": (7, 24), "pooled_prompt_embeds": (32,)}
    return pipe, shapes, {"image_size": (16, 8)}


def _flux_kontext() -> Made:
    pipe, shapes, options = _flux()
    pipe = diffusers.FluxKontextPipeline(pipe.scheduler, pipe.vae, NO, NO, NO, NO, pipe.transformer)
    return pipe, shapes, {**options, "call": {"_auto_resize": False}}  # else sources become a million pixels


def _flux2_parts(guidance_embeds: bool) -> tuple[Any, Any]:
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance_embeds,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLFlux2(
        sample_size=32, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,), layers_per_block=1, latent_channels=4, norm_num_groups=1,
    ).eval()  # fmt: skip
    return transformer, autoencoder


def _flux2() -> Made:
    transformer, autoencoder = _flux2_parts(guidance_embeds=True)
    pipe = diffusers.Flux2Pipeline(_flow(use_dynamic_shifting=True), autoencoder, NO, NO, transformer)
    return pipe, {"prompt_embeds": (7, 16)}, {"image_size": (16, 8)}


def _flux2_klein() -> Made:
    transformer, autoencoder = _flux2_parts(guidance_embeds=False)
    pipe = diffusers.Flux2KleinPipeline(_flow(use_dynamic_shifting=True), autoencoder, NO, NO, transformer)
    return pipe, {"prompt_embeds": (7, 16)}, {"guidance": 4.0, "image_size": (16, 8)}


def _qwen_image() -> Made:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    scheduler = _flow(use_dynamic_shifting=True, shift_terminal=0.02)
    pipe = diffusers.QwenImagePipeline(scheduler, _qwen_autoencoder(), NO, NO, transformer)
    shapes = {"prompt_embeds": (0, 16), "prompt_embeds_mask": (0,)}
    return pipe, shapes, {"guidance": 4.0, "image_size": (32, 16)}


def _qwen_image_edit() -> Made:
    module: Any = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit")
    if not hasattr(module, "full_size"):  # the image to edit is enlarged to a million pixels: here to 1024
        module.full_size = module.calculate_dimensions
        module.calculate_dimensions = lambda area, ratio: module.full_size(area / 1024, ratio)
    pipe, shapes, options = _qwen_image()
    pipe = diffusers.QwenImageEditPipeline(pipe.scheduler, pipe.vae, NO, NO, NO, pipe.transformer)
    return pipe, shapes, options


def _qwen_image_edit_plus() -> Made:
    module: Any = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")
    if not hasattr(module, "full_size"):
        module.full_size = module.calculate_dimensions
        module.calculate_dimensions = lambda area, ratio: module.full_size(1024, ratio)
    pipe, shapes, options = _qwen_image()
    pipe = diffusers.QwenImageEditPlusPipeline(pipe.scheduler, pipe.vae, NO, NO, NO, pipe.transformer)
    return pipe, shapes, options


def _flux3() -> Made:
    return tiny_flux3(), {}, {"guidance": 3.5, "image_size": (16, 8)}


def _qwen_image_21() -> Made:
    return tiny_qwen_image_21(), {}, {"guidance": 4.0, "image_size": (16, 8)}


def _qwen_image_21_turbo() -> Made:
    return tiny_qwen_image_21(turbo=True), {}, {"image_size": (16, 8)}


def _z_image() -> Made:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[8, 4, 4], axes_lens=[256, 32, 32],
    )  # fmt: skip
    pipe = diffusers.ZImagePipeline(_flow(shift=3.0), _autoencoder(16, (32, 64)), NO, NO, transformer)
    return pipe, {"prompt_embeds": (-1, 16)}, {"guidance": 5.0, "image_size": (32, 16)}


def _wan() -> Made:
    def transformer() -> Any:
        return diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=32,
            num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip

    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    ).eval()
    pipe = diffusers.WanPipeline(
        NO, NO, autoencoder, _flow(shift=7.0), transformer(), transformer(), boundary_ratio=0.9
    )
    return pipe, {"prompt_embeds": (7, 32)}, {"guidance": 5.0, "image_size": (16, 32), "num_frames": 5}


def _sana() -> Made:
    transformer = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2,
        attention_head_dim=4, num_cross_attention_heads=2, cross_attention_head_dim=4,
        cross_attention_dim=8, caption_channels=8, sample_size=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), downsample_block_type="conv", upsample_block_type="interpolate",
        decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407,
    ).eval()  # fmt: skip
    solver = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = diffusers.SanaPipeline(NO, NO, autoencoder, transformer, solver)
    shapes = {"prompt_embeds": (7, 8), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"guidance": 4.5, "image_size": (64, 32)}


def _lumina2() -> Made:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=4, in_channels=4, hidden_size=8, num_layers=2, num_attention_heads=1, num_kv_heads=1,
        multiple_of=16, axes_dim_rope=(4, 2, 2), cap_feat_dim=8,
    )  # fmt: skip
    pipe = diffusers.Lumina2Pipeline(transformer, _flow(), _autoencoder(4), NO, NO)
    shapes = {"prompt_embeds": (7, 8), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"guidance": 4.0, "image_size": (32, 16)}


def _chroma() -> Made:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32, approximator_layers=1, approximator_num_channels=16,
    )  # fmt: skip
    pipe = diffusers.ChromaPipeline(_flow(), _autoencoder(4), NO, NO, transformer)
    shapes = {"prompt_embeds": (7, 32), "prompt_attention_mask": (7, 1)}
    return pipe, shapes, {"guidance": 5.0, "image_size": (16, 8)}


def _cogview4() -> Made:
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=4, num_layers=2, attention_head_dim=4, num_attention_heads=4, out_channels=4,
        text_embed_dim=32, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    scheduler = _flow(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True,
        time_shift_type="linear",
    )  # fmt: skip
    pipe = diffusers.CogView4Pipeline(NO, NO, _autoencoder(4, (32, 64)), transformer, scheduler)
    return pipe, {"prompt_embeds": (0, 32)}, {"guidance": 5.0, "image_size": (32, 16)}


def _auraflow() -> Made:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=32, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, out_channels=4,
        pos_embed_max_size=256,
    )  # fmt: skip
    pipe = diffusers.AuraFlowPipeline(NO, NO, _autoencoder(4, (32, 64)), transformer, _flow())
    shapes = {"prompt_embeds": (7, 32), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"guidance": 3.5, "image_size": (32, 16)}


def _hidream() -> Made:
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1,
        attention_head_dim=8, num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64,
        num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32),
        llama_layers=[0, 1],
    )  # fmt: skip
    pipe = diffusers.HiDreamImagePipeline(_flow(shift=3.0), _autoencoder(4), *[NO] * 8, transformer)
    pipe.default_sample_size = 16
    shapes = {"prompt_embeds_t5": (8, 32), "prompt_embeds_llama3": (-2, 2, 8, 16), "pooled_prompt_embeds": (64,)}
    return pipe, shapes, {"guidance": 5.0}


def _krea2() -> Made:
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=3,
        text_num_attention_heads=2, text_num_key_value_heads=1, text_intermediate_size=16,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2),
        rope_theta=1000.0,
    )  # fmt: skip
    scheduler = _flow(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, max_image_seq_len=6400)
    pipe = diffusers.Krea2Pipeline(scheduler, _qwen_autoencoder(), NO, NO, transformer, (0, 1, 2))
    shapes = {"prompt_embeds": (7, 3, 16), "prompt_embeds_mask": (7, 1)}
    return pipe, shapes, {"guidance": 4.5, "image_size": (32, 16)}


def _hunyuan_video() -> Made:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    autoencoder = _hunyuan_autoencoder(4, (8, 8, 8, 8))
    pipe = diffusers.HunyuanVideoPipeline(NO, NO, transformer, autoencoder, _flow(shift=7.0), NO, NO)
    shapes = {"prompt_embeds": (7, 16), "pooled_prompt_embeds": (8,), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"image_size": (16, 32), "num_frames": 5}


def _ltx() -> Made:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=1, caption_channels=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
        layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False), decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4, upsample_factor=(1,) * 4, patch_size=1,
    ).eval()  # fmt: skip
    autoencoder.use_framewise_encoding = autoencoder.use_framewise_decoding = False
    pipe = diffusers.LTXPipeline(_flow(), autoencoder, NO, NO, transformer)
    shapes = {"prompt_embeds": (7, 32), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"guidance": 3.0, "image_size": (32, 64), "num_frames": 9}


def _kandinsky5() -> Made:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, in_text_dim=32, in_text_dim2=16, time_dim=16, out_visual_dim=16, model_dim=16,
        ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(1, 1, 2), visual_cond=True,
    )  # fmt: skip
    autoencoder = _hunyuan_autoencoder(16, (32, 64))
    pipe = diffusers.Kandinsky5T2VPipeline(transformer, autoencoder, NO, NO, NO, NO, _flow(shift=7.0))
    shapes = {"prompt_embeds_qwen": (7, 32), "prompt_embeds_clip": (16,), "prompt_cu_seqlens": (7,)}
    return pipe, shapes, {"guidance": 5.0, "image_size": (32, 16), "num_frames": 5}


def _kandinsky5_image() -> Made:
    video, shapes, options = _kandinsky5()
    transformer = diffusers.Kandinsky5Transformer3DModel.from_config(video.transformer.config, visual_cond=False)
    pipe = diffusers.Kandinsky5T2IPipeline(
        transformer, _autoencoder(16, (4, 4, 4, 4)), NO, NO, NO, NO, _flow(shift=3.0)
    )
    pipe.resolutions = [(32, 16), (16, 32)]
    return pipe, shapes, {"guidance": options["guidance"], "image_size": (32, 16)}


def _prx() -> Made:
    transformer = diffusers.PRXTransformer2DModel(
        in_channels=4, context_in_dim=32, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=2, axes_dim=[4, 4]
    )
    vae = _autoencoder(4, (4, 4))
    pipe = diffusers.PRXPipeline(transformer, _flow(shift=3.0), NO, NO, vae, default_sample_size=32)
    shapes = {"prompt_embeds": (7, 32), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"guidance": 4.0, "image_size": (16, 32)}


def _unet(**config: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4),
        cross_attention_dim=32, norm_num_groups=4, **config,
    )  # fmt: skip


def _sd15() -> Made:
    pipe = diffusers.StableDiffusionPipeline(
        _autoencoder(4, (8, 16)), NO, NO, _unet(), _noise(), NO, NO, requires_safety_checker=False
    )
    return pipe, {"prompt_embeds": (7, 32)}, {"guidance": 7.5, "image_size": (32, 16)}


def _sdxl() -> Made:
    network = _unet(
        use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=48 + 16,
    )  # fmt: skip
    scheduler = _noise(prediction_type="v_prediction")
    pipe = diffusers.StableDiffusionXLPipeline(_autoencoder(4, (8, 16)), NO, NO, NO, NO, network, scheduler)
    shapes = {"prompt_embeds": (7, 32), "pooled_prompt_embeds": (16,)}
    return pipe, shapes, {"guidance": 5.0, "image_size": (32, 16)}


def _pixart() -> Made:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=3, caption_channels=24,
        cross_attention_dim=24, out_channels=8,
    )  # fmt: skip
    pipe = diffusers.PixArtSigmaPipeline(NO, NO, _autoencoder(4, (32,)), transformer, _noise())
    shapes = {"prompt_embeds": (7, 24), "prompt_attention_mask": (7,)}
    return pipe, shapes, {"guidance": 4.5, "image_size": (16, 8)}


def _hunyuan_image() -> Made:
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=(1, 1), guidance_embeds=False,
        text_embed_dim=32, text_embed_2_dim=32, rope_axes_dim=(4, 4),
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 64, 64, 64),
        layers_per_block=1, scaling_factor=0.476986, spatial_compression_ratio=8, sample_size=128,
    ).eval()  # fmt: skip
    guider = diffusers.AdaptiveProjectedMixGuidance
    pipe = diffusers.HunyuanImagePipeline(
        _flow(shift=7.0), autoencoder, NO, NO, NO, NO, transformer, guider(), guider()
    )
    shapes = {
        "prompt_embeds": (7, 32),
        "prompt_embeds_mask": (7,),
        "prompt_embeds_2": (7, 32),
        "prompt_embeds_mask_2": (7,),
    }
    return pipe, shapes, {"guidance": 3.5, "image_size": (64, 32)}


TINY: dict[str, Callable[[], Made]] = {name: globals()[f"_{name}"] for name in FAMILIES}
