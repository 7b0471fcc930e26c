# SPDX-License-Identifier: Apache-2.0
"""VideoAlign's VideoReward: visual quality, motion quality and text alignment of a clip, by one linear head.

Source: Liu et al., "Improving Video Generation with Human Feedback", arXiv 2501.13918; the choice of frames
and the forward are those of github.com/KwaiVGI/VideoAlign. Checkpoint: the hub's `PUBLISHED`, a LoRA in a
Qwen2-VL 2B, saved with its base in one file. The states of three reward tokens behind the clip go through the
head; as with HPSv3, the language model gets embeddings without ids, so that positions are plain ("1d").

Differences from the released inference: the LoRA is merged into the weights; a reward token in a prompt is
escaped; an odd number of frames, which cannot be cut into pairs, loses one; a prompt may hold braces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Metadata, RewardCapabilities, Scores
from visalign.model_files import read_object
from visalign.rewards.base.clips import read_clip, read_clips
from visalign.rewards.base.contract import (
    RewardError,
    check_rules,
    make_scores,
    prompt_problem,
    scatter,
)
from visalign.rewards.base.identity import Identity, fingerprint
from visalign.rewards.vlm.engine import Query, TokenRow, VisionLanguageEngine, check_loading
from visalign.rewards.vlm.loading import find_model
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.template import JudgeSettings, question
from visalign.rewards.weights.checkpoint_files import dtype_of, read_tensors
from visalign.rewards.weights.hub import SMALL_FILES, revision_of
from visalign.vision.patches import smart_resize

from .loading import engine_of_tensors, find_weights

PUBLISHED = "KwaiVGI/VideoReward"
"""Hub id of the published weights."""
BASE = "Qwen/Qwen2-VL-2B-Instruct"
"""Hub id of the base, for config and processor."""
CONFIG = "model_config.json"
PARTS = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{part}_reward|>" for part in PARTS)
MIN_PIXELS = 128 * 28 * 28
"""Smallest size of a resized frame."""
MIN_FRAMES, MAX_FRAMES = 4, 768
"""Bounds of the number of judged frames where it follows from `fps`."""
PAIR = 2
"""Frames per temporal patch."""

TEMPLATE = question("video_align", published_prompt("video_align"))


def sample_frames(length: int, *, clip_fps: float | None, fps: float, frames: int | None = None) -> list[int] | str:
    """Choose frames of a clip evenly from the first to the last; or return why it cannot be judged.

    Their number is `frames`, or length / clip_fps · fps between 4 and 768; rounded to an even number, at most
    the length.

    >>> sample_frames(81, clip_fps=16, fps=2)
    [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
    """
    longest_even = length // PAIR * PAIR
    if not longest_even:
        return f"a clip of {length} frame shows no motion; {PAIR} frames are needed"
    if frames is None:
        if clip_fps is None:
            return 'its frames a second are not known: give clip_fps, an "fps" in its record, or frames to judge'
        count = min(max(length / clip_fps * fps, MIN_FRAMES), MAX_FRAMES)
    else:
        count = frames
    count = max(PAIR, min(round(count / PAIR) * PAIR, longest_even))
    return torch.linspace(0, length - 1, count).round().long().tolist()


class VideoAlign:
    """Sum of visual quality, motion quality and text alignment of a clip, each in standard deviations.

    The parts "VQ", "MQ" and "TA" are the three, each minus its mean and over its deviation on the authors'
    validation set, which the checkpoint's `model_config.json` holds; "frames" is the number of judged frames.
    Clips come in any form that `Frames` takes. The model is loaded at the first score.

    Args:
        model: the published folder or hub id (`PUBLISHED`), one of its checkpoint folders, or the file of
            weights in one.
        base: folder or hub id of the model that it was trained from, whose config and processor are read.
        clip_fps: frames a second that the clips show, where a clip's record has no "fps".
        fps: frames a second that are judged; those of the checkpoint when None.
        frames: number of judged frames instead, evenly spaced.
        min_pixels: smallest size of a resized frame.
        max_pixels: largest size of a resized frame; that of the checkpoint when None.
    """

    name = "video_align"
    unit = "standard deviations"
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
        min_pixels: int = MIN_PIXELS,
        max_pixels: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **options: Any,
    ) -> None:
        check_loading(self.name, options)
        rates = {"clip_fps": clip_fps, "fps": fps, "frames": frames}
        rules = {
            f"{option} is {value!r}; allowed are numbers above 0": value is None or _is_rate(value)
            for option, value in rates.items()
        }
        check_rules(self.name, rules | {"give fps or frames, not both": fps is None or frames is None})
        self._model, self._base = model, base
        self._clip_fps, self._fps, self._frames = clip_fps, fps, frames
        self._min_pixels, self._max_pixels = min_pixels, max_pixels
        self._options = {"device": device, "dtype": dtype_of(precision, "video_align: ", device), **options}

    @cached_property
    def _loaded(self) -> tuple[VisionLanguageEngine, Tensor, dict[str, Any]]:
        """(engine, head [1 or 3, H], the checkpoint's settings of `_read_config` with the options)."""
        root, weights = _find_files(find_weights(self._model))
        config = _read_config(root / CONFIG)
        options = {"fps": self._fps, "max_pixels": self._max_pixels}
        config |= {name: value for name, value in options.items() if value is not None}
        source = find_model(self._base, SMALL_FILES)
        state = merge_lora(read_tensors(weights), config["lora_scale"], self._options["dtype"])
        head = state.pop("rm_head.weight", None)
        if head is None or head.ndim != 2 or len(head) not in (1, len(PARTS)):
            shape = "no rm_head.weight" if head is None else f"an rm_head.weight of shape {tuple(head.shape)}"
            raise RewardError(f"{weights.name} holds {shape}; the head of VideoAlign is [1 or {len(PARTS)}, width].")
        engine = engine_of_tensors(
            state,
            source,
            tokens=TOKENS,
            settings=JudgeSettings.read(root),
            name=root.name,
            **{"min_pixels": 1, "max_pixels": 1 << 40, **self._options},  # frames are resized in `_read_clip`
        )
        if (kind := engine.model.config.model_type) != "qwen2_vl":
            raise RewardError(f"The base is a {kind!r}, which counts a clip's moments otherwise; give {BASE}.")
        engine.set_fingerprint(fingerprint(weights))
        engine.revision = revision_of(root)
        engine.model.eval().requires_grad_(False)
        return engine, head.float().to(engine.network.device), config

    @property
    def identity(self) -> Identity:
        engine, _, config = self._loaded
        fields = engine.identity_fields(
            engine.template("video_align", TEMPLATE),
            normal=config["normal"],
            clip_fps=self._clip_fps,
            fps=config["fps"],
            frames=self._frames,
        )
        bounds = {"min_pixels": self._min_pixels, "max_pixels": config["max_pixels"]}
        return Identity(judge=self.name, **{**fields, "preprocessing": fields["preprocessing"] | bounds})

    @torch.no_grad()
    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B clips (a sequence, or an array [B, F, ...]) against B prompts; records may hold "fps"."""
        clips, records = read_clips(self.name, images, prompts, metadata)
        size, reasons = len(clips), [prompt_problem(prompt) for prompt in prompts]
        rows: list[int] = []
        queries: list[Query] = []
        for row, (clip, record) in enumerate(zip(clips, records, strict=True)):
            if reasons[row] is None:
                frames, reasons[row] = self._read_clip(clip, record or {})
                if frames is not None:
                    rows.append(row)
                    queries.append(Query(images=[frames], prompt=prompts[row]))
        rewards = self._rewards(queries, rows, reasons)
        parts = {part: scatter(column, rows, size) for part, column in zip(PARTS, rewards.T, strict=True)}
        value = parts["VQ"] + parts["MQ"] + parts["TA"]
        for row in rows:
            if reasons[row] is None and not math.isfinite(float(value[row])):
                reasons[row] = f"the model gave {', '.join(f'{k} {float(v[row])}' for k, v in parts.items())}"
        counts = scatter([len(query.images[0]) for query in queries], rows, size)
        return make_scores(value, reasons, self.unit, parts=parts | {"frames": counts})

    def _read_clip(self, clip: Any, record: Mapping[str, Any]) -> tuple[Tensor | None, str | None]:
        """Return the judged frames, uint8 [n, 3, h, w], resized as torchvision does; or the reason."""
        clip_fps = self._clip_fps if record.get("fps") is None else record["fps"]
        if clip_fps is not None and not _is_rate(clip_fps):
            return None, f'"fps" of its record is {clip_fps!r}; allowed are numbers above 0'
        engine, _, config = self._loaded
        choose = partial(sample_frames, clip_fps=clip_fps, fps=config["fps"], frames=self._frames)
        frames, reason = read_clip(clip, choose)
        if reason is not None:
            return None, reason
        levels = torch.stack(frames).mul(255).round()
        patches = engine.network.images.settings()
        bounds = patches["patch"] * patches["merge"], self._min_pixels, config["max_pixels"]
        try:
            size = smart_resize(levels.shape[-2], levels.shape[-1], *bounds, whole_tokens=True)
        except ValueError as error:
            return None, str(error)
        # in float32, as torchvision resizes: exact values would round otherwise at a few pixels
        resized = F.interpolate(levels, size, mode="bicubic", antialias=True)
        return resized.round().clamp(0, 255).to(torch.uint8), None

    def _rewards(self, queries: Sequence[Query], rows: Sequence[int], reasons: list[str | None]) -> Tensor:
        """Compute [N, 3] float32 of N requests at `rows`, NaN where one gets a reason."""
        rewards = torch.full((len(queries), len(PARTS)), torch.nan)
        if not queries:
            return rewards
        engine, head, config = self._loaded
        template = engine.template("video_align", TEMPLATE)
        by_token: list[list[TokenRow | None]] = []
        for token in TOKENS:
            encoded, encoding_reasons = engine.encode(template, queries, at=token)
            by_token.append(encoded)
            for row, reason in zip(rows, encoding_reasons, strict=True):
                reasons[row] = reasons[row] or reason
        valid = [index for index, row in enumerate(rows) if reasons[row] is None]
        if valid:
            # in sequence, so that the shared beginning of the three rows of a request is computed once
            token_rows = [row for index in valid for column in by_token if (row := column[index]) is not None]
            states = engine.states(token_rows).view(len(valid), len(PARTS), -1)
            rewards[valid] = (states * head).sum(-1).float().cpu()  # a row of the head per token, or one
        mean, std = (torch.tensor([config["normal"][f"{part}_{key}"] for part in PARTS]) for key in ("mean", "std"))
        return (rewards - mean) / std


def merge_lora(state: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Merge peft's LoRA, W + scale · B A, in `dtype`, and rename the weights to the model's own names.

    A state without a LoRA does not change.
    """
    plain: dict[str, Tensor] = {}
    low_rank: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".default.", ".")
        (low_rank if ".lora_" in name else plain)[name] = value
    for name in [name for name in low_rank if ".lora_B." in name]:
        b, target = low_rank.pop(name), name.replace(".lora_B.", ".")
        a = low_rank.pop(name.replace(".lora_B.", ".lora_A."), None)
        if a is None or target not in plain or plain[target].shape != (len(b), a.shape[-1]):
            raise RewardError(f"The LoRA's {name} does not fit the weights in its file; copy the checkpoint again.")
        plain[target] = (plain[target].float() + scale * (b.float() @ a.float())).to(dtype)
    if low_rank:
        raise RewardError(f"The LoRA's {min(low_rank)} lacks its other half; copy the checkpoint again.")
    return plain


def _find_files(path: Path) -> tuple[Path, Path]:
    """Return (folder of the config, file of the weights) of a checkpoint."""
    folder = path if path.is_dir() else path.parent
    root = next((parent for parent in (folder, folder.parent) if (parent / CONFIG).is_file()), None)
    if root is None:
        raise FileNotFoundError(
            f"Neither {folder} nor its parent holds {CONFIG}; give the folder as it was published."
        )
    steps = {int(f.name[11:]): f for f in folder.glob("checkpoint-*") if f.name[11:].isdigit()}
    return root, path if path.is_file() else (steps[max(steps)] if steps else folder) / "model.pth"


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = read_object(file)
        data, model, lora = (config[f"{name}_config"] for name in ("data", "model", "peft_lora"))
        required = {
            "eval_dim": (data["eval_dim"], list(PARTS)),
            "prompt_template_type": (data["prompt_template_type"], "detailed_special"),
            "sample_type": (data.get("sample_type", "uniform"), "uniform"),
            "use_special_tokens": (model["use_special_tokens"], True),
        }
        rank = lora["lora_r"]
        scale = lora["lora_alpha"] / (math.sqrt(rank) if lora.get("use_rslora") else rank)
        inference = config["inference_config"]
        normal = {key: float(inference[key]) for p in PARTS for key in (f"{p}_mean", f"{p}_std")}
        settings = {"fps": data["fps"], "max_pixels": data["max_frame_pixels"], "lora_scale": scale}
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RewardError(f"{file} is no config of VideoAlign ({type(error).__name__}: {error}).") from error
    for name, (value, expected) in required.items():
        if value != expected:
            raise RewardError(f"{file.name} of {file.parent.name} says {name} = {value!r}; allowed is {expected!r}.")
    return settings | {"normal": normal}


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
