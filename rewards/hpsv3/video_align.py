# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501, W291
"""VideoAlign's VideoReward: visual quality, motion quality and text alignment of a clip, by one linear head.

Source: Liu et al., "Improving Video Generation with Human Feedback", arXiv 2501.13918; the question, letter by
letter, the choice of frames and the forward are those of github.com/KwaiVGI/VideoAlign, MIT licence, copyright
(c) 2025 Kling Team, Kuaishou Technology. Checkpoint: the hub's `PUBLISHED`, a LoRA in a Qwen2-VL 2B, saved with
its base in one file. The states of three reward tokens behind the clip go through the head; as with HPSv3
embeddings are handed to the language model without ids, so that positions are plain ("1d").

Differences from the released inference: the LoRA is added to the weights; a reward token in a prompt is
escaped; an odd number of frames, which it cannot cut into pairs, loses one; a prompt may hold braces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.rewards.base.clips import listed_clips, read_clip
from visalign.rewards.base.contract import (
    RewardError,
    make_scores,
    prompt_problem,
    read_metadata,
    scatter,
)
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.vlm.engine import Query, TokenRow, VisionLanguageEngine, check_loading
from visalign.rewards.vlm.loading import find_model
from visalign.rewards.vlm.template import JudgeSettings, question
from visalign.rewards.weights.checkpoint_files import dtype_of, read_folder, read_tensors
from visalign.rewards.weights.hub import SMALL_FILES, revision_of
from visalign.rewards.weights.resize import resize_smoothly

from .loading import current_keys, engine_of_tensors, find_weights, smart_resize

PUBLISHED = "KwaiVGI/VideoReward"
"""Hub id of the published weights."""
BASE = "Qwen/Qwen2-VL-2B-Instruct"
"""Whose config and processor they need, and its weights where a LoRA was saved alone."""
CONFIG = "model_config.json"
PARTS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{part}_reward|>" for part in PARTS)
MIN_PIXELS = 128 * 28 * 28
"""Of a resized frame."""
LEAST, MOST = 4, 768
"""Frames that are judged where their number follows from `fps`."""
PAIR = 2
"""Frames that become one moment."""

_TEXT = """
You are tasked with evaluating a generated video based on three distinct criteria: Visual Quality, Motion Quality, and Text Alignment. Please provide a rating from 0 to 10 for each of the three categories, with 0 being the worst and 10 being the best. Each evaluation should be independent of the others.

**Visual Quality:**  
Evaluate the overall visual quality of the video, with a focus on static factors. The following sub-dimensions should be considered:
- **Reasonableness:** The video should not contain any significant biological or logical errors, such as abnormal body structures or nonsensical environmental setups.
- **Clarity:** Evaluate the sharpness and visibility of the video. The image should be clear and easy to interpret, with no blurring or indistinct areas.
- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements (e.g., hair, clothing, shadows).
- **Aesthetic and Creativity:** Assess the artistic aspects of the video, including the color scheme, composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and balance.
- **Safety:** The video should not contain harmful or inappropriate content, such as political, violent, or adult material. If such content is present, the image quality and satisfaction score should be the lowest possible. 

Please provide the ratings of Visual Quality: <|VQ_reward|>
END

**Motion Quality:**  
Assess the dynamic aspects of the video, with a focus on dynamic factors. Consider the following sub-dimensions:
- **Stability:** Evaluate the continuity and stability between frames. There should be no sudden, unnatural jumps, and the video should maintain stable attributes (e.g., no fluctuating colors, textures, or missing body parts).
- **Naturalness:** The movement should align with physical laws and be realistic. For example, clothing should flow naturally with motion, and facial expressions should change appropriately (e.g., blinking, mouth movements).
- **Aesthetic Quality:** The movement should be smooth and fluid. The transitions between different motions or camera angles should be seamless, and the overall dynamic feel should be visually pleasing.
- **Fusion:** Ensure that elements in motion (e.g., edges of the subject, hair, clothing) blend naturally with the background, without obvious artifacts or the feeling of cut-and-paste effects.
- **Clarity of Motion:** The video should be clear and smooth in motion. Pay attention to any areas where the video might have blurry or unsteady sections that hinder visual continuity.
- **Amplitude:** If the video is largely static or has little movement, assign a low score for motion quality.

Please provide the ratings of Motion Quality: <|MQ_reward|>
END

**Text Alignment:**  
Assess how well the video matches the textual prompt across the following sub-dimensions:
- **Subject Relevance** Evaluate how accurately the subject(s) in the video (e.g., person, animal, object) align with the textual description. The subject should match the description in terms of number, appearance, and behavior.
- **Motion Relevance:** Evaluate if the dynamic actions (e.g., gestures, posture, facial expressions like talking or blinking) align with the described prompt. The motion should match the prompt in terms of type, scale, and direction.
- **Environment Relevance:** Assess whether the background and scene fit the prompt. This includes checking if real-world locations or scenes are accurately represented, though some stylistic adaptation is acceptable.  
- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the video adheres to this style.
- **Camera Movement Relevance:** Check if the camera movements (e.g., following the subject, focus shifts) are consistent with the expected behavior from the prompt.

Textual prompt - {prompt}
Please provide the ratings of Text Alignment: <|TA_reward|>
END
"""

TEMPLATE = question("video_align", _TEXT)


def sampled_frames(
    length: int, *, clip_fps: float | None, fps: float, frames: int | None = None
) -> list[int] | str:
    """Which of a clip's frames are judged, evenly from the first to the last; or why it cannot be judged.

    Their number is `frames`, or length / clip_fps · fps between 4 and 768; an even one of those there are.

    >>> sampled_frames(81, clip_fps=16, fps=2)
    [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
    """
    even = length // PAIR * PAIR
    if not even:
        return f"a clip of {length} frame shows no motion; {PAIR} frames are needed"
    if frames is not None:
        wanted = frames
    elif clip_fps is None:
        return (
            'it is not known how many frames a second the clip shows: give clip_fps, an "fps" in its record, '
            "or frames, the number of frames that are judged"
        )
    else:
        wanted = min(max(length / clip_fps * fps, LEAST), MOST)
    count = max(PAIR, min(round(wanted / PAIR) * PAIR, even))
    return torch.linspace(0, length - 1, count).round().long().tolist()


class VideoAlign:
    """Sum of visual quality, motion quality and text alignment of a clip, each in standard deviations.

    The parts "VQ", "MQ" and "TA" are the three, each less its mean and over its deviation on the authors'
    validation set, which the checkpoint's `model_config.json` holds; "frames" is how many were judged. With
    normalise=False they are the head's own outputs, in Bradley-Terry logits. Clips come in any form that
    `Frames` takes.
    """

    name = "video_align"
    range = (-math.inf, math.inf)
    higher_is_better = True
    capabilities = RewardCapabilities(takes_clips=True)

    def __init__(
        self,
        model: str | Path,
        *,
        base: str | Path = BASE,
        clip_fps: float | None = None,
        fps: float | None = None,
        frames: int | None = None,
        normalise: bool = True,
        min_pixels: int = MIN_PIXELS,
        max_pixels: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **options: Any,
    ) -> None:
        """Note the model, which is loaded at the first score.

        Args:
            model: the published folder or hub id (`PUBLISHED`), one of its checkpoint folders, or the file of
                weights in one; a training's own, too, which saved the LoRA alone.
            base: folder or hub id of the model that it was trained from.
            clip_fps: frames a second that the clips show, where a clip's record has no "fps".
            fps: frames a second that are judged; those of the checkpoint when None.
            frames: how many frames are judged instead, evenly spaced.
            normalise: whether the parts are in standard deviations.
            min_pixels: of a resized frame.
            max_pixels: of a resized frame; those of the checkpoint when None.
            device: where it runs.
            precision: of the vision-language model, as in `engine_of`; the head is float32 always.
            **options: of `engine_of`: attention, device_map, quantization, positions, max_tokens_per_batch, ...

        Raises:
            RewardError: numbers of frames that are none, or both `fps` and `frames`.
            ValueError: an unknown precision. What loading raises comes with the first score.
        """
        check_loading(self.name, options)
        for label, value in (("clip_fps", clip_fps), ("fps", fps), ("frames", frames)):
            if value is not None and not _is_rate(value):
                raise RewardError(f"{self.name}: {label} is {value!r}; allowed are numbers above 0.")
        if fps is not None and frames is not None:
            raise RewardError(f"{self.name}: give fps or frames, not both.")
        self.unit = "standard deviations" if normalise else "logit"
        self._model, self._base, self._normalise = model, base, normalise
        self._clip_fps, self._fps, self._frames = clip_fps, fps, frames
        self._pixels = min_pixels, max_pixels
        self._options = {"device": device, "dtype": dtype_of(precision, "video_align: ", device), **options}

    @cached_property
    def _loaded(self) -> tuple[VisionLanguageEngine, Tensor, dict[str, Any]]:
        """(engine, head [1 or 3, H], what the checkpoint's config says)."""
        root, weights = _layout(find_weights(self._model))
        config = _read_config(root / CONFIG)
        if self._normalise and not config["normal"]:
            raise RewardError(
                f"{CONFIG} of {root.name} has no inference_config with the means and deviations of VQ, MQ and "
                "TA; take the head's own outputs by normalise=False."
            )
        is_whole = weights.is_file()
        source = find_model(self._base, SMALL_FILES) if is_whole else find_model(self._base)
        state = read_tensors(weights) if is_whole else _saved_apart(weights, source)
        state = merged(state, config["lora_scale"], self._options["dtype"])
        head = state.pop("rm_head.weight", None)
        if head is None or head.ndim != 2 or len(head) not in (1, len(PARTS)):
            shape = "no rm_head.weight" if head is None else f"an rm_head.weight of shape {tuple(head.shape)}"
            raise RewardError(
                f"{weights.name} holds {shape}; the head of VideoAlign is [1, width] or [{len(PARTS)}, width]."
            )
        engine = engine_of_tensors(
            state,
            source,
            tokens=TOKENS,
            settings=JudgeSettings.read(root),
            name=root.name,
            **{"min_pixels": 1, "max_pixels": 1 << 40, **self._options},
        )
        if (kind := engine.model.config.model_type) != "qwen2_vl":
            raise RewardError(
                f"The base is a {kind!r}, which counts a clip's moments otherwise; give {BASE}."
            )
        engine.settle(fingerprint(weights))
        engine.revision = revision_of(root)
        engine.model.eval().requires_grad_(False)
        return engine, head.float().to(engine.network.device), config

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        engine, _, config = self._loaded
        normal = config["normal"] if self._normalise else None
        asked = {"clip_fps": self._clip_fps, "fps": self._rate(config), "frames": self._frames}
        template = engine.template("video_align", TEMPLATE)
        bounds = {"min_pixels": self._pixels[0], "max_pixels": self._most(config)}
        fields = engine.identity_fields(template, normal=normal, **asked)
        return Identity(judge=self.name, **{**fields, "preprocessing": fields["preprocessing"] | bounds})

    def _rate(self, config: Mapping[str, Any]) -> float:
        return config["fps"] if self._fps is None else self._fps

    def _most(self, config: Mapping[str, Any]) -> int:
        return config["max_pixels"] if self._pixels[1] is None else self._pixels[1]

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B clips against B prompts.

        Args:
            images: B clips: a sequence, or an array [B, F, ...].
            prompts: B texts.
            metadata: B records, or None; "fps" is how many frames a second a clip shows.

        Raises:
            TypeError: no sequence of clips.
            ValueError: a clip of no frames or of mixed sizes, or not one prompt per clip.
        """
        clips = listed_clips(self.name, images)
        if len(clips) != len(prompts):
            raise ValueError(f"{self.name}: {len(clips)} clips and {len(prompts)} prompts; give one each.")
        records = read_metadata(self.name, metadata, len(clips), noun="clip")
        reasons = [prompt_problem(prompt) for prompt in prompts]
        rows: list[int] = []
        queries: list[Query] = []
        for row, (clip, record) in enumerate(zip(clips, records, strict=True)):
            if reasons[row] is None:
                shown, reasons[row] = self._shown(f"{self.name}: images[{row}]", clip, record or {})
                if shown is not None:
                    rows.append(row)
                    queries.append(Query(images=[shown], prompt=prompts[row]))
        found = self._rewards(queries, rows, reasons)
        size = len(clips)
        parts = {part: scatter(column, rows, size) for part, column in zip(PARTS, found.T, strict=True)}
        value = parts["VQ"] + parts["MQ"] + parts["TA"]
        for row in rows:
            if reasons[row] is None and not math.isfinite(float(value[row])):
                reasons[row] = f"the model gave {', '.join(f'{k} {float(v[row])}' for k, v in parts.items())}"
        counts = scatter([len(query.images[0]) for query in queries], rows, size)
        return make_scores(value, reasons, self.unit, parts=parts | {"frames": counts})

    def _shown(self, where: str, clip: Any, record: Mapping[str, Any]) -> tuple[Tensor | None, str | None]:
        """The frames of a clip that are judged, uint8 [n, 3, h, w] as torchvision resizes tensors; or why."""
        told = record.get("fps", self._clip_fps)
        if told is not None and not _is_rate(told):
            return None, f'"fps" of its record is {told!r}; allowed are numbers above 0'
        engine, _, config = self._loaded

        def choose(length: int) -> list[int] | str:
            return sampled_frames(length, clip_fps=told, fps=self._rate(config), frames=self._frames)

        frames, reason = read_clip(where, clip, choose)
        if reason is not None:
            return None, reason
        levels = torch.stack(frames).mul(255).round().double()
        cutter = engine.network.images.settings()
        bounds = {"min_pixels": self._pixels[0], "max_pixels": self._most(config)}
        try:
            size = smart_resize(*levels.shape[-2:], factor=cutter["patch"] * cutter["merge"], **bounds)
        except ValueError as error:
            return None, str(error)
        return resize_smoothly(levels, size).round().clamp(0, 255).to(torch.uint8), None

    def _rewards(self, queries: Sequence[Query], rows: Sequence[int], reasons: list[str | None]) -> Tensor:
        """[N, 3] float32 of N requests, NaN where one gets a reason; `rows` are their places among all."""
        found = torch.full((len(queries), len(PARTS)), torch.nan)
        if not queries:
            return found
        engine, head, config = self._loaded
        template = engine.template("video_align", TEMPLATE)
        ends: list[list[TokenRow | None]] = []
        for token in TOKENS:
            encoded, why = engine.encode(template, queries, at=token)
            ends.append(encoded)
            for row, reason in zip(rows, why, strict=True):
                reasons[row] = reasons[row] or reason
        kept = [place for place, row in enumerate(rows) if reasons[row] is None]
        if kept:
            # behind each other, so that the three beginnings of one request are computed once
            read = [end for place in kept for column in ends if (end := column[place]) is not None]
            states = engine.states(read).view(len(kept), len(PARTS), -1)
            found[kept] = (
                (states * head).sum(-1).float().cpu()
            )  # each token by its own row of the head, or by one
        if self._normalise:
            mean, std = (
                torch.tensor([config["normal"][f"{p}_{of}"] for p in PARTS]) for of in ("mean", "std")
            )
            found = (found - mean) / std
        return found


def merged(state: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights W + scale · B A in `dtype` of those that peft wraps, under the names that the model itself has;
    a state without a LoRA is left as it is.
    """
    plain: dict[str, Tensor] = {}
    low: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")
        (low if ".lora_" in name else plain)[name] = value
    for name in [name for name in low if ".lora_B." in name]:
        b, target = low.pop(name), name.replace(".lora_B.", ".")
        a = low.pop(name.replace(".lora_B.", ".lora_A."), None)
        if a is None or target not in plain or plain[target].shape != (len(b), a.shape[-1]):
            raise RewardError(
                f"The LoRA's {name} does not fit the weights beside it; copy the checkpoint again."
            )
        plain[target] = (plain[target].float() + scale * (b.float() @ a.float())).to(dtype)
    if low:
        raise RewardError(f"The LoRA's {min(low)} lacks its other half; copy the checkpoint again.")
    return plain


def _saved_apart(folder: Path, base: Path) -> dict[str, Tensor]:
    """The base's weights with a training's over them: those it changed whole, and its LoRA."""
    state: dict[str, Tensor] = current_keys(read_folder(base))
    for name in ("non_lora_state_dict.pth", "adapter_model.safetensors"):
        found = read_tensors(folder / name)
        state |= current_keys({key.removeprefix("base_model.model."): held for key, held in found.items()})
    # the head of words, tied in the base and never read here, is as long as the embeddings
    return state | {"lm_head.weight": state["model.language_model.embed_tokens.weight"]}


def _layout(place: Path) -> tuple[Path, Path]:
    """(folder of the config; file of the whole weights, or folder of a LoRA and what was trained beside it)."""
    folder = place if place.is_dir() else place.parent
    root = next((one for one in (folder, folder.parent) if (one / CONFIG).is_file()), None)
    if root is None:
        raise FileNotFoundError(
            f"Neither {folder} nor the folder above it holds {CONFIG}; give the folder as it was published "
            f"({PUBLISHED})."
        )
    if place.is_file():
        return root, place
    steps = {int(one.name[11:]): one for one in folder.glob("checkpoint-*") if one.name[11:].isdigit()}
    folder = steps[max(steps)] if steps else folder
    if (folder / "model.pth").is_file():
        return root, folder / "model.pth"
    lacks = [
        n for n in ("adapter_model.safetensors", "non_lora_state_dict.pth") if not (folder / n).is_file()
    ]
    if lacks:
        raise FileNotFoundError(
            f"{folder} holds no model.pth, and for a LoRA it lacks {' and '.join(lacks)}; copy it again."
        )
    return root, folder


def _read_config(file: Path) -> dict[str, Any]:
    """What the judge needs of a checkpoint's config; one that was trained otherwise is refused by name."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        data, model, lora = (told[f"{name}_config"] for name in ("data", "model", "peft_lora"))
        asked = {
            "eval_dim": (data["eval_dim"], list(PARTS)),
            "prompt_template_type": (data["prompt_template_type"], "detailed_special"),
            "sample_type": (data.get("sample_type", "uniform"), "uniform"),
            "use_special_tokens": (model["use_special_tokens"], True),
        }
        rank = lora["lora_r"]
        scale = lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank)
        found = {"fps": data["fps"], "max_pixels": data["max_frame_pixels"], "lora_scale": scale}
        normal = told.get("inference_config")
        normal = normal and {
            f"{part}_{of}": float(normal[f"{part}_{of}"]) for part in PARTS for of in ("mean", "std")
        }
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RewardError(
            f"{file.name} of {file.parent.name} is no config of VideoAlign ({type(error).__name__}: {error})."
        ) from error
    for name, (given, known) in asked.items():
        if given != known:
            raise RewardError(
                f"{file.name} of {file.parent.name} says {name} = {given!r}; known is {known!r}, as the "
                f"published {PUBLISHED} has it."
            )
    return found | {"normal": normal}


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
