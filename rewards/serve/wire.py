# SPDX-License-Identifier: Apache-2.0
"""Messages between a reward server and its clients: safetensors, which cannot run code.

A request holds images as uint8: of one size as one tensor [B, 3, H, W] named "image", of several sizes as
"image.0", "image.1", ... [3, H, W]; for pairs "left" and "right" in the same way. The metadata "request" is
JSON with prompts and records.

An answer holds float32 columns [B]: "main" (value or probability), "valid", "std", "log_odds", "part.NAME";
the metadata "answer" is JSON with kind, unit, texts and reasons.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save as save_arrays
from safetensors.torch import load, save
from torch import Tensor

from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import answer_of, columns_of

FORMAT = "visalign-judge-2"
MEDIA_TYPE = "application/x-safetensors"
JUDGE_HEADER = "X-Visalign-Judge"
"""HTTP header of an answer: digest of the identity of the judge that gave it, or empty."""

Pixels = Tensor | Sequence[Tensor]
"""uint8 [B, 3, H, W], or B tensors [3, H, W]."""


class WireError(ValueError):
    """A message cannot be read."""


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """B images, or B pairs, with prompts and records."""

    images: Pixels
    """The left images if they are pairs."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any] | None]
    right: Pixels | None = None
    """The right images of pairs; None for single images."""
    messages: tuple[bytes | bytearray, ...] = field(default=(), compare=False, repr=False)
    """Bytes that the request was read from; they go to the worker as they are."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def pixels(self) -> int:
        """Pixels of all images together."""
        right = () if self.right is None else self.right
        return sum(image.shape[-1] * image.shape[-2] for image in (*self.images, *right))


def pack_request(request: JudgeRequest) -> bytes:
    """Write a request as safetensors; its records must be JSON values."""
    sides = {"image": request.images}
    if request.right is not None:
        sides = {"left": request.images, "right": request.right}
    tensors: dict[str, Tensor] = {}
    for side, images in sides.items():
        batch = as_batch(images)
        if isinstance(batch, Tensor):
            tensors[side] = batch
        else:
            tensors |= {f"{side}.{i}": image for i, image in enumerate(batch)}
    try:
        text = json.dumps({"prompts": list(request.prompts), "metadata": list(request.metadata)})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The metadata cannot travel to a server: {error}. Give texts, numbers, lists and mappings of them."
        ) from error
    # as arrays, which may share memory where safetensors' tensors may not
    arrays = {name: tensor.cpu().contiguous().numpy() for name, tensor in tensors.items()}
    return save_arrays(arrays, {"format": FORMAT, "request": text})


def unpack_request(raw: bytes | bytearray) -> JudgeRequest:
    """Read a request and check its form."""
    header, tensors = _load(raw, "request")
    prompts = header.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise WireError("'prompts' must be a list of strings.")
    metadata = header.get("metadata")
    records: Any = [None] * len(prompts) if metadata is None else metadata
    is_list = isinstance(records, list) and len(records) == len(prompts)
    if not is_list or not all(record is None or isinstance(record, dict) for record in records):
        raise WireError(f"'metadata' must be a list of {len(prompts)} objects or null, one for each prompt.")
    is_pair = any(name.partition(".")[0] in ("left", "right") for name in tensors)
    sides = ("left", "right") if is_pair else ("image",)
    images, right = [*(_pop_images(tensors, side, len(prompts)) for side in sides), None][:2]
    if images is None or tensors:
        raise WireError(f"tensors that a request does not have: {', '.join(sorted(tensors)[:4])}.")
    return JudgeRequest(images=images, prompts=prompts, metadata=records, right=right, messages=(raw,))


def _pop_images(tensors: dict[str, Tensor], side: str, size: int) -> Pixels:
    is_batch = side in tensors
    images = [tensors.pop(name, None) for name in ([side] if is_batch else [f"{side}.{i}" for i in range(size)])]
    shape = (size, 3) if is_batch else (3,)
    for image in images:
        if image is None or image.dtype != torch.uint8 or image.shape[:-2] != shape or 0 in image.shape:
            raise WireError(
                f"{size} prompts need {side!r} as uint8 [{size}, 3, H, W], or '{side}.0', '{side}.1', … as "
                f"uint8 [3, H, W] each; given is "
                f"{'too few' if image is None else f'{image.dtype} {tuple(image.shape)}'}."
            )
    pixels = [image for image in images if image is not None]
    return pixels[0] if is_batch else pixels


def concatenate_requests(requests: Sequence[JudgeRequest]) -> JudgeRequest:
    """Join requests, all of images or all of pairs; nothing is copied."""
    if len(requests) == 1:
        return requests[0]
    right = [image for request in requests if request.right is not None for image in request.right]
    return JudgeRequest(
        images=[image for request in requests for image in request.images],
        prompts=[prompt for request in requests for prompt in request.prompts],
        metadata=[record for request in requests for record in request.metadata],
        right=None if requests[0].right is None else right,
        messages=tuple(part for request in requests for part in request.messages),
    )


def as_batch(images: Pixels) -> Pixels:
    """Stack images of one size; leave images of several sizes as they are."""
    if isinstance(images, Tensor) or len({image.shape for image in images}) != 1:
        return images
    return torch.stack(list(images))


def _load(raw: bytes | bytearray, key: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the JSON object under `key` of a message's metadata, and the tensors."""
    try:
        metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
        header = json.loads(metadata[key])
        if metadata["format"] == FORMAT and isinstance(header, dict):
            return header, load(bytes(raw))
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"this is no {key} in the format {FORMAT} ({type(error).__name__}: {error}).") from error
    raise WireError(f"this is no {key} in the format {FORMAT}.")


def select_rows(answer: Scores | Preferences, rows: slice) -> Scores | Preferences:
    """Select rows of an answer."""
    columns = {name: column[rows] for name, column in columns_of(answer).items()}
    text = None if answer.text is None else list(answer.text)[rows]
    reason = None if answer.reason is None else list(answer.reason)[rows]
    unit = answer.unit if isinstance(answer, Scores) else None
    return answer_of(columns, answer.valid[rows], unit, text, reason)


def pack_answer(answer: Scores | Preferences) -> bytes:
    """Write scores or preferences as safetensors."""
    # clone: safetensors refuses tensors that share memory, as rows of one column do
    tensors = {name: column.detach().cpu().float().clone() for name, column in columns_of(answer).items()}
    tensors["valid"] = answer.valid.cpu().to(torch.uint8)
    is_scores = isinstance(answer, Scores)
    about = {
        "kind": "scores" if is_scores else "preferences",
        "unit": answer.unit if is_scores else None,
        "text": None if answer.text is None else list(answer.text),
        "reason": None if answer.reason is None else list(answer.reason),
    }
    return save(tensors, {"format": FORMAT, "answer": json.dumps(about)})


def unpack_answer(raw: bytes, size: int) -> Scores | Preferences:
    """Read an answer of `size` rows; a valid row without a finite number becomes invalid."""
    header, tensors = _load(raw, "answer")
    texts = (header.get("text"), header.get("reason"))
    is_whole = {"main", "valid"} <= tensors.keys() and header.get("kind") in ("scores", "preferences")
    shapes = {tuple(column.shape) for column in tensors.values()}
    if not is_whole or shapes != {(size,)} or any(text is not None and len(text) != size for text in texts):
        raise WireError(f"the answer needs a kind, 'main', 'valid', and {size} rows in each column and text.")
    main, claimed = tensors["main"].float(), tensors.pop("valid").bool()
    valid = claimed & main.isfinite()
    text, reason = header.get("text"), header.get("reason")
    for row in (claimed & ~valid).nonzero().flatten().tolist():
        reason = reason or list[str | None]([None] * size)
        reason[row] = f"the judge's answer is {float(main[row])}, which is no score"
    tensors["main"] = torch.where(valid, main, torch.nan)
    unit = str(header.get("unit")) if header["kind"] == "scores" else None
    return answer_of(tensors, valid, unit, text, reason)
