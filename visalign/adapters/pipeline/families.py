# SPDX-License-Identifier: Apache-2.0
"""The model families of diffusers as data for `PipelinePolicy`.

A family is a row. Each row is tested: `tests/adapters/pipeline` builds a tiny random pipeline of it and holds
the policy against the pipeline's own run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

Guidance = Literal["concatenated", "two calls", "embedded", "none"]
"""Guidance: both halves in one batch, a call of the network for each, the scale as an input, or none."""

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
SD3_ATTENTION = tuple(f"attn.{name}" for name in JOINT)
"""Image and text side of the joint attention; the second attention of SD3.5 is left out, as in Flow-GRPO."""


@dataclass(frozen=True)
class Family:
    """Description of one family of pipelines."""

    pipelines: tuple[str, ...]  # Class names in diffusers
    encodes: str
    """What `encode_prompt` returns, in order, by the names of the call's arguments; "-" for what it makes anew."""
    guidance: Guidance
    _: KW_ONLY
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


_PLAIN = "prompt_embeds negative_prompt_embeds"
_MASKED = "prompt_embeds prompt_attention_mask negative_prompt_embeds negative_prompt_attention_mask"
_POOLED = "prompt_embeds negative_prompt_embeds pooled_prompt_embeds negative_pooled_prompt_embeds"
_FLUX = Family(("FluxPipeline",), "prompt_embeds pooled_prompt_embeds -", "embedded", usual=3.5, lora=JOINT)
_UNBINNED = {"use_resolution_binning": False}
_FLUX2_LORA = (*JOINT, "to_out", "to_qkv_mlp_proj")
_QWEN = Family(
    ("QwenImagePipeline",), "prompt_embeds prompt_embeds_mask", "two calls", scale="true_cfg_scale", negative=" ",
    lora=JOINT, unused=r"transformer_blocks\.{last}\.attn\.(add_q_proj|to_add_out)",
)  # fmt: skip
_KANDINSKY5 = Family(
    ("Kandinsky5T2IPipeline",), "prompt_embeds_qwen prompt_embeds_clip prompt_cu_seqlens", "two calls", mixed=False,
    lora=("to_query", "to_key", "to_value", "out_layer"),
)  # fmt: skip
_QWEN_21 = Family(
    ("QwenImage21ModularPipeline", "QwenImage21Pipeline"),
    "prompt_embeds prompt_embeds_mask image_pad_mask "
    "negative_prompt_embeds negative_prompt_embeds_mask negative_image_pad_mask",
    "two calls",
    scale="-",
    fixed={"use_kv_cache": False},  # across steps, of which a call has one
    modular=True,
    padded=False,
)
FAMILIES: dict[str, Family] = {
    "sd3": Family(("StableDiffusion3Pipeline",), _POOLED, "concatenated", lora=SD3_ATTENTION),
    "sd15": Family(("StableDiffusionPipeline",), _PLAIN, "concatenated", networks=("unet",), unit=1),
    "sdxl": Family(("StableDiffusionXLPipeline",), _POOLED, "concatenated", networks=("unet",), unit=1),
    "pixart": Family(("PixArtSigmaPipeline",), _MASKED, "concatenated", fixed=_UNBINNED, unit=1),
    "flux": _FLUX,
    "flux_kontext": replace(_FLUX, pipelines=("FluxKontextPipeline",), source="needed", usual=2.5),
    "flux2": Family(
        ("Flux2Pipeline",), "prompt_embeds -", "embedded", usual=4.0, source="optional", several=True, lora=_FLUX2_LORA
    ),
    "flux2_klein": Family(
        ("Flux2KleinPipeline",), "prompt_embeds -", "two calls", source="optional", several=True, lora=_FLUX2_LORA
    ),
    "flux3": Family(  # unused: of images to edit, which are not given
        ("Flux3ModularPipeline",), _PLAIN, "two calls", scale="-", modular=True, unused=r"\.image_cond\."
    ),
    "qwen_image": _QWEN,
    "qwen_image_edit": replace(_QWEN, pipelines=("QwenImageEditPipeline",), source="needed"),
    "qwen_image_edit_plus": replace(
        _QWEN, pipelines=("QwenImageEditPlusPipeline",), source="needed", several=True, alone="always"
    ),
    "qwen_image_21": _QWEN_21,
    "qwen_image_21_turbo": replace(
        _QWEN_21,
        pipelines=("QwenImage21TurboModularPipeline",),
        encodes="prompt_embeds prompt_embeds_mask image_pad_mask",
        guidance="none",
    ),
    "z_image": Family(  # v(prompt) + g (v(prompt) - v(negative))
        ("ZImagePipeline",), _PLAIN, "concatenated", off=0.0, unconditional=1, mixed=False
    ),
    "sana": Family(("SanaPipeline",), _MASKED, "concatenated", fixed=_UNBINNED, unit=1),
    "lumina2": Family(("Lumina2Pipeline",), _MASKED, "two calls", fixed={"cfg_trunc_ratio": 1.0}),
    "chroma": Family(
        ("ChromaPipeline",),
        "prompt_embeds - prompt_attention_mask negative_prompt_embeds - negative_prompt_attention_mask",
        "two calls",
        lora=JOINT,
    ),
    "cogview4": Family(("CogView4Pipeline",), _PLAIN, "two calls"),
    "auraflow": Family(("AuraFlowPipeline",), _MASKED, "concatenated", mixed=False, lora=JOINT),
    "hidream": Family(
        ("HiDreamImagePipeline",),
        "prompt_embeds_t5 negative_prompt_embeds_t5 prompt_embeds_llama3 negative_prompt_embeds_llama3 "
        "pooled_prompt_embeds negative_pooled_prompt_embeds",
        "concatenated",
        batch_axis={"prompt_embeds_llama3": 1, "negative_prompt_embeds_llama3": 1, "encoder_hidden_states_llama3": 1},
        own_size=True,
        lora=("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t"),
    ),
    "krea2": Family(("Krea2Pipeline",), "prompt_embeds prompt_embeds_mask", "two calls", off=0.0),  # as Z-Image
    "kandinsky5": replace(_KANDINSKY5, pipelines=("Kandinsky5T2VPipeline",), frames=121, frame_rate=24.0),
    "kandinsky5_image": _KANDINSKY5,
    "prx": Family(
        ("PRXPipeline",),
        _MASKED,
        "concatenated",
        mixed=False,
        alone="guided",
        fixed=_UNBINNED,
        lora=("img_qkv_proj", "txt_kv_proj", "to_out.0"),
    ),
    "hunyuan_image": Family(
        ("HunyuanImagePipeline",),
        "prompt_embeds prompt_embeds_mask prompt_embeds_2 prompt_embeds_mask_2",
        "two calls",
        scale="-",  # its guider has it
        negative="",
        lora=JOINT,
        unit=1,
    ),
    "wan": Family(
        ("WanPipeline",), _PLAIN, "two calls", networks=("transformer", "transformer_2"), frames=81, frame_rate=16.0
    ),
    "hunyuan_video": Family(
        ("HunyuanVideoPipeline",),
        "prompt_embeds pooled_prompt_embeds prompt_attention_mask",
        "embedded",
        usual=6.0,
        lora=JOINT,
        frames=129,
        frame_rate=15.0,
    ),
    "ltx": Family(("LTXPipeline",), _MASKED, "concatenated", frames=161, frame_rate=25.0, unit=1),
}
"""name -> family."""

MEAN_VELOCITY = (
    "predicts the mean velocity of a whole step, which no single time has. Take the model that is not distilled"
)
REFUSED = {"Flux3DistilledModularPipeline": f"{MEAN_VELOCITY} (Flux3ModularPipeline)"}
"""`_class_name` -> why no family has it."""

PIPELINES: dict[str, str] = {kind: name for name, family in FAMILIES.items() for kind in family.pipelines}
"""`_class_name` in an index -> name of the family."""
