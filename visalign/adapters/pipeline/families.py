# SPDX-License-Identifier: Apache-2.0
"""The model families of diffusers as data for `PipelinePolicy`.

A family is a row. Each row is tested: `tests/adapters/pipeline` builds a tiny random pipeline of it and holds
the policy against the pipeline's own run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Guidance = Literal["concatenated", "two calls", "embedded", "none"]
"""How a pipeline guides: both halves in one batch, one call of the network for each, the scale as an input of
the network, or not at all."""

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
SD3_ATTENTION = tuple(f"attn.{name}" for name in JOINT)
"""Image and text side of the joint attention; the second attention of SD3.5 is left out, as in Flow-GRPO."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Description of one family of pipelines."""

    pipelines: tuple[str, ...]  # Class names in diffusers
    encodes: str
    """What `encode_prompt` returns, in order, by the names under which the pipeline's call takes it back;
    "-" for what it makes anew."""
    guidance: Guidance
    scale: str = "guidance_scale"  # The call's argument that holds the guidance scale
    off: float = 1.0  # The scale that is no guidance
    usual: float | None = None
    """The scale where none is asked for, of networks that take it as an input; None is `off`."""
    unconditional: int = 0  # Which half of a batch of both is the unconditional one; of two calls it is the second
    negative: str | None = None
    """The negative prompt where none is given, of a call that has none itself and would not guide without."""
    mixed: bool = True  # Whether the samples of one call may stand at different times; otherwise they go by groups
    alone: Literal["never", "guided", "always"] = "never"
    """When a call takes one sample alone: PRX's gives its network two times for 2n guided samples."""
    batch_axis: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the call, or of the network, whose samples do not stand along the first axis."""
    networks: tuple[str, ...] = ("transformer",)  # The parts of the pipeline that denoise; absent ones are skipped
    fixed: Mapping[str, Any] = field(default_factory=dict)  # Arguments of every call
    unit: int = 2  # Height and width are multiples of this times the autoencoder's factor
    lora: tuple[str, ...] = ATTENTION  # Ends of the names of the layers that get adapters, where none are asked for
    unused: str | None = None
    """Pattern of layers, or weights, that the velocity does not depend on; "{last}" is the last block."""
    own_size: bool = False  # Whether the call makes images of an area of its own, whatever it is asked for
    frames: int | None = None  # Of a video where none are asked for; None makes single images
    frame_rate: float = 8.0
    """Frames a second of its videos: as diffusers' example of the pipeline writes them, or by its call."""
    source: Literal["none", "optional", "needed"] = "none"  # Whether the call's `image` is an image to edit
    several: bool = False  # Whether an edit may start from several images, which `image` lists
    modular: bool = False
    """Whether diffusers has it as blocks of a `ModularPipeline`; `encodes` names values of their state."""
    padded: bool = True
    """Whether prompts that have masks may be padded to one length: positions of Qwen-Image 2.1 count it."""

    @property
    def has_halves(self) -> bool:
        """Return True if guidance takes an unconditional half."""
        return self.guidance in ("concatenated", "two calls")

    def present(self, index: Mapping[str, Any]) -> list[str]:
        """Return the networks that a pipeline's index lists."""
        return [part for part in self.networks if isinstance(index.get(part), list | tuple) and any(index[part])]


_FLUX = {"guidance": "embedded", "usual": 3.5, "lora": JOINT}
_QWEN = {
    "encodes": "prompt_embeds prompt_embeds_mask",
    "guidance": "two calls",
    "scale": "true_cfg_scale",
    "negative": " ",
    "lora": JOINT,
    "unused": r"transformer_blocks\.{last}\.attn\.(add_q_proj|to_add_out)",
}
_MASKED = "prompt_embeds prompt_attention_mask negative_prompt_embeds negative_prompt_attention_mask"
_POOLED = "prompt_embeds negative_prompt_embeds pooled_prompt_embeds negative_pooled_prompt_embeds"
_KANDINSKY5 = Family(
    pipelines=("Kandinsky5T2IPipeline",),
    encodes="prompt_embeds_qwen prompt_embeds_clip prompt_cu_seqlens",
    guidance="two calls",
    mixed=False,
    lora=("to_query", "to_key", "to_value", "out_layer"),
)

_QWEN_21 = Family(
    pipelines=("QwenImage21ModularPipeline", "QwenImage21Pipeline"),
    encodes=(
        "prompt_embeds prompt_embeds_mask image_pad_mask "
        "negative_prompt_embeds negative_prompt_embeds_mask negative_image_pad_mask"
    ),
    guidance="two calls",
    scale="-",
    fixed={"use_kv_cache": False},  # across steps, of which a call has one
    modular=True,
    padded=False,
)

FAMILIES: dict[str, Family] = {
    "sd3": Family(
        pipelines=("StableDiffusion3Pipeline",), encodes=_POOLED, guidance="concatenated", lora=SD3_ATTENTION
    ),
    "sd15": Family(
        pipelines=("StableDiffusionPipeline",),
        encodes="prompt_embeds negative_prompt_embeds",
        guidance="concatenated",
        networks=("unet",),
        unit=1,
    ),
    "sdxl": Family(
        pipelines=("StableDiffusionXLPipeline",), encodes=_POOLED, guidance="concatenated", networks=("unet",), unit=1
    ),
    "pixart": Family(
        pipelines=("PixArtSigmaPipeline",),
        encodes=_MASKED,
        guidance="concatenated",
        fixed={"use_resolution_binning": False},
        unit=1,
    ),
    "flux": Family(
        pipelines=("FluxPipeline",),
        encodes="prompt_embeds pooled_prompt_embeds -",
        **_FLUX,  # type: ignore[arg-type]
    ),
    "flux_kontext": Family(
        pipelines=("FluxKontextPipeline",),
        encodes="prompt_embeds pooled_prompt_embeds -",
        source="needed",
        **{**_FLUX, "usual": 2.5},  # type: ignore[arg-type]
    ),
    "flux2": Family(
        pipelines=("Flux2Pipeline",),
        encodes="prompt_embeds -",
        guidance="embedded",
        usual=4.0,
        source="optional",
        several=True,
        lora=(*JOINT, "to_out", "to_qkv_mlp_proj"),
    ),
    "flux2_klein": Family(
        pipelines=("Flux2KleinPipeline",),
        encodes="prompt_embeds -",
        guidance="two calls",
        source="optional",
        several=True,
        lora=(*JOINT, "to_out", "to_qkv_mlp_proj"),
    ),
    "flux3": Family(
        pipelines=("Flux3ModularPipeline",),
        encodes="prompt_embeds negative_prompt_embeds",
        guidance="two calls",
        scale="-",
        unused=r"\.image_cond\.",  # of images to edit, which are not given
        modular=True,
    ),
    "qwen_image": Family(pipelines=("QwenImagePipeline",), **_QWEN),  # type: ignore[arg-type]
    "qwen_image_edit": Family(pipelines=("QwenImageEditPipeline",), source="needed", **_QWEN),  # type: ignore[arg-type]
    "qwen_image_edit_plus": Family(
        pipelines=("QwenImageEditPlusPipeline",),
        source="needed",
        several=True,
        alone="always",
        **_QWEN,  # type: ignore[arg-type]
    ),
    "qwen_image_21": _QWEN_21,
    "qwen_image_21_turbo": replace(
        _QWEN_21,
        pipelines=("QwenImage21TurboModularPipeline",),
        encodes="prompt_embeds prompt_embeds_mask image_pad_mask",
        guidance="none",
    ),
    "z_image": Family(
        pipelines=("ZImagePipeline",),
        encodes="prompt_embeds negative_prompt_embeds",
        guidance="concatenated",
        off=0.0,  # v(prompt) + g (v(prompt) - v(negative))
        unconditional=1,
        mixed=False,
    ),
    "sana": Family(
        pipelines=("SanaPipeline",),
        encodes=_MASKED,
        guidance="concatenated",
        fixed={"use_resolution_binning": False},
        unit=1,
    ),
    "lumina2": Family(
        pipelines=("Lumina2Pipeline",), encodes=_MASKED, guidance="two calls", fixed={"cfg_trunc_ratio": 1.0}
    ),
    "chroma": Family(
        pipelines=("ChromaPipeline",),
        encodes=("prompt_embeds - prompt_attention_mask negative_prompt_embeds - negative_prompt_attention_mask"),
        guidance="two calls",
        lora=JOINT,
    ),
    "cogview4": Family(
        pipelines=("CogView4Pipeline",), encodes="prompt_embeds negative_prompt_embeds", guidance="two calls"
    ),
    "auraflow": Family(
        pipelines=("AuraFlowPipeline",), encodes=_MASKED, guidance="concatenated", mixed=False, lora=JOINT
    ),
    "hidream": Family(
        pipelines=("HiDreamImagePipeline",),
        encodes=(
            "prompt_embeds_t5 negative_prompt_embeds_t5 prompt_embeds_llama3 negative_prompt_embeds_llama3 "
            "pooled_prompt_embeds negative_pooled_prompt_embeds"
        ),
        guidance="concatenated",
        batch_axis={"prompt_embeds_llama3": 1, "negative_prompt_embeds_llama3": 1, "encoder_hidden_states_llama3": 1},
        own_size=True,
        lora=("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t"),
    ),
    "krea2": Family(
        pipelines=("Krea2Pipeline",),
        encodes="prompt_embeds prompt_embeds_mask",
        guidance="two calls",
        off=0.0,  # as Z-Image
    ),
    "kandinsky5": replace(_KANDINSKY5, pipelines=("Kandinsky5T2VPipeline",), frames=121, frame_rate=24.0),
    "kandinsky5_image": _KANDINSKY5,
    "prx": Family(
        pipelines=("PRXPipeline",),
        encodes=_MASKED,
        guidance="concatenated",
        mixed=False,
        alone="guided",
        fixed={"use_resolution_binning": False},
        lora=("img_qkv_proj", "txt_kv_proj", "to_out.0"),
    ),
    "hunyuan_image": Family(
        pipelines=("HunyuanImagePipeline",),
        encodes="prompt_embeds prompt_embeds_mask prompt_embeds_2 prompt_embeds_mask_2",
        guidance="two calls",
        scale="-",  # its guider has it
        negative="",
        lora=JOINT,
        unit=1,
    ),
    "wan": Family(
        pipelines=("WanPipeline",),
        encodes="prompt_embeds negative_prompt_embeds",
        guidance="two calls",
        networks=("transformer", "transformer_2"),
        frames=81,
        frame_rate=16.0,
    ),
    "hunyuan_video": Family(
        pipelines=("HunyuanVideoPipeline",),
        encodes="prompt_embeds pooled_prompt_embeds prompt_attention_mask",
        guidance="embedded",
        usual=6.0,
        lora=JOINT,
        frames=129,
        frame_rate=15.0,
    ),
    "ltx": Family(
        pipelines=("LTXPipeline",), encodes=_MASKED, guidance="concatenated", frames=161, frame_rate=25.0, unit=1
    ),
}
"""name -> family."""

MEAN_VELOCITY = (
    "predicts the mean velocity of a whole step, which no single time has. Take the model that is not distilled"
)
REFUSED = {"Flux3DistilledModularPipeline": f"{MEAN_VELOCITY} (Flux3ModularPipeline)"}
"""`_class_name` -> why no family has it."""

PIPELINES: dict[str, str] = {kind: name for name, family in FAMILIES.items() for kind in family.pipelines}
"""`_class_name` in an index -> name of the family."""
