# SPDX-License-Identifier: Apache-2.0
"""CLIP score: the cosine between an image's and its prompt's embedding, through open_clip.

Source: Radford et al., arXiv 2103.00020; as a metric Hessel et al., "CLIPScore", arXiv 2104.08718 (whose
    score is
2.5·max(cos, 0)). Peers scale the cosine differently: torchmetrics and the HPSv2 benchmark × 100, PickScore
× exp(logit_scale) ≈ 100, flow_grpo then / 26. Here it is the plain cosine; multiply by 100 to compare with
those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.interfaces import Metadata, Scores

from .contract import make_scores, read_request, scatter
from .open_clip_folder import check_end_token, load_open_clip, save_open_clip
from .resize import model_levels

__all__ = ["ClipScore", "check_end_token", "load_open_clip", "save_open_clip"]


class ClipScore:
    """Cosine of image and prompt, float32; each unique image and each unique prompt is encoded once.

    A prompt longer than the model's context is cut before the end token, and the sample's `text` says so. A
    prompt that spells out the end token in its middle is invalid: the model would stop reading there.
    """

    name = "clip_score"
    unit = "cosine"
    range = (-1.0, 1.0)
    higher_is_better = True

    def __init__(
        self,
        model: str | Path = "shapes-clip",
        *,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
        batch_size: int = 64,
    ) -> None:
        """Load the model.

        Args:
            model: what `load_open_clip` takes: folder, packaged name, hub id, or "architecture:tag".
            device: where the towers run.
            precision: of the towers: "fp32", "bf16" or "fp16"; the cosine is float32 always.
            batch_size: images or prompts in one forward pass.

        Raises:
            ValueError: batch_size below 1.
            FileNotFoundError: the model folder lacks a part.
            RewardError: the model cannot be loaded.
        """
        if batch_size < 1:
            raise ValueError(f"clip_score: batch_size is {batch_size}; allowed are whole numbers from 1.")
        self.model, self.preprocess, self.tokenizer = load_open_clip(
            model, device=device, precision=precision
        )
        self.device = torch.device(device)
        self.batch_size = batch_size
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        self._end = check_end_token(self.model, self.tokenizer)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Cosine per (image, prompt); metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        notes = self._read_prompts(request.prompts, reasons)
        rows, levels = [], []
        for row, image in request.images.readable():
            if reasons[row] is not None:
                continue
            try:
                levels.append(model_levels(image, self.preprocess).to(torch.uint8))
            except ValueError as error:
                reasons[row] = str(error)
                continue
            rows.append(row)
        cosines = []
        if rows:
            picture = self._encode_images(levels)
            text = self._encode_texts([request.prompts[row] for row in rows])
            # A product of two normalised rows may end a rounding error above 1.
            cosines = (picture * text).sum(-1).clamp(-1, 1)
        return make_scores(scatter(cosines, rows, len(request)), reasons, self.unit, text=notes)

    def _encode_images(self, levels: list[Tensor]) -> Tensor:
        """[N, D] normalised float32 of N images given as uint8 levels."""
        mean, std = (torch.tensor(self.preprocess[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
        first, index = _unique([image.cpu().numpy().tobytes() for image in levels])

        def encode(chunk: Tensor) -> Tensor:
            pixels = (torch.stack([levels[i] for i in chunk.tolist()]).cpu().float() / 255 - mean) / std
            return self.model.encode_image(pixels.to(self.device, self._dtype))

        return self._in_chunks(torch.tensor(first), encode)[index]

    def _encode_texts(self, prompts: list[str]) -> Tensor:
        """[N, D] normalised float32 of N prompts."""
        first, index = _unique(prompts)
        tokens = self.tokenizer([prompts[i] for i in first])
        return self._in_chunks(tokens, lambda chunk: self.model.encode_text(chunk.to(self.device)))[index]

    @torch.no_grad()
    def _in_chunks(self, items: Tensor, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Normalised float32 embeddings of all items, `batch_size` at a time."""
        chunks = [encode(chunk).float().cpu() for chunk in items.split(self.batch_size)]
        return F.normalize(torch.cat(chunks), dim=-1)

    def _read_prompts(self, prompts: list[str], reasons: list[str | None]) -> list[str]:
        """Note which prompts are cut; mark the rows whose prompt holds the end token itself."""
        notes = [""] * len(prompts)
        if self._end is None or not prompts:
            return notes
        first, index = _unique(prompts)
        texts = [prompts[i] for i in first]
        tokens = self.tokenizer(texts)
        length = tokens.shape[1]
        ends = (tokens == self._end).int().argmax(1)
        full = self.tokenizer(texts, context_length=4 * length)
        for row, unique in enumerate(index.tolist()):
            rest = full[unique, int(ends[unique]) + 1 :]
            if int(ends[unique]) == length - 1:
                if int((full[unique] == self._end).int().argmax()) > length - 1:
                    notes[row] = f"the prompt was cut to {length} tokens"
            elif len(set(rest.tolist())) > 1:
                reasons[row] = (
                    reasons[row] or "the prompt spells out the model's end token; remove it from the text"
                )
        return notes


def _unique(items: Sequence[Any]) -> tuple[list[int], Tensor]:
    """Position of the first of each distinct item, and for each item the number of its distinct one."""
    seen: dict[Any, int] = {}
    first: list[int] = []
    for position, item in enumerate(items):
        if item not in seen:
            seen[item] = len(first)
            first.append(position)
    return first, torch.tensor([seen[item] for item in items])
