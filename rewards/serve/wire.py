# SPDX-License-Identifier: Apache-2.0
"""Messages between a reward server and its clients, in formats that cannot run code.

A request is safetensors: uint8 images [3, H, W] named "image.0", "image.1", ..., of pairs "left.0", ... and
"right.0", ...; the metadata "request" is JSON with prompts and records. An answer is JSON: the unit of scores
(null for preferences) and `rows` as `rows_of` writes them, with NaN and Infinity as Python writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save as save_arrays
from safetensors.torch import load
from torch import Tensor

from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import answer_of, rows_of

FORMAT = "visalign-judge-3"
MEDIA_TYPE = "application/x-safetensors"
CAPABILITIES = ("needs_group", "needs_batch", "needs_prompt", "both_orders")  # Those that a judge's card declares
JUDGE_HEADER = "X-Visalign-Judge"
"""HTTP header of an answer: digest of the identity of the judge that gave it, or empty."""


class WireError(ValueError):
    """A message cannot be read."""


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """B images, or B pairs, with prompts and records."""

    images: Sequence[Tensor]  # uint8 [3, H, W] each; the left images if they are pairs
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any] | None]
    right: Sequence[Tensor] | None = None  # The right images of pairs; None for single images
    messages: tuple[bytes | bytearray, ...] = field(default=(), compare=False, repr=False)
    """Bytes that the request was read from; they go to the worker as they are."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def pixels(self) -> int:
        return sum(image.shape[1] * image.shape[2] for image in (*self.images, *(self.right or ())))


def pack_request(request: JudgeRequest) -> bytes:
    """Write a request as safetensors; its records must be JSON values."""
    is_pair = request.right is not None
    sides = {"left": request.images, "right": request.right or ()} if is_pair else {"image": request.images}
    # as arrays, which may share memory where safetensors' tensors may not
    arrays = {
        f"{side}.{row}": image.cpu().contiguous().numpy()
        for side, images in sides.items()
        for row, image in enumerate(images)
    }
    try:
        text = json.dumps({"prompts": list(request.prompts), "metadata": list(request.metadata)})
    except (TypeError, ValueError) as error:
        raise TypeError(f"The metadata cannot travel to a server: {error}. Give plain JSON values.") from error
    return save_arrays(arrays, {"format": FORMAT, "request": text})


def unpack_request(raw: bytes | bytearray) -> JudgeRequest:
    try:
        about = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        header, tensors = json.loads(about["request"]), load(bytes(raw))
        prompts = header["prompts"]
        records = header.get("metadata", [None] * len(prompts))
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"this is no request in the format {FORMAT} ({type(error).__name__}: {error}).") from error
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise WireError("'prompts' must be a list of strings.")
    size = len(prompts)
    is_list = isinstance(records, list) and len(records) == size
    if not is_list or not all(record is None or isinstance(record, dict) for record in records):
        raise WireError(f"'metadata' must be a list of {size} objects or null, one for each prompt.")
    is_pair = "left.0" in tensors
    names = [f"{side}.{row}" for side in (("left", "right") if is_pair else ("image",)) for row in range(size)]
    images = [tensors.pop(name) for name in names if name in tensors]
    is_image = [image.dtype == torch.uint8 and image.ndim == 3 and len(image) == 3 for image in images]
    if len(images) < len(names) or tensors or not all(is_image) or any(0 in image.shape for image in images):
        raise WireError(
            f"{size} prompts need as many uint8 tensors [3, H, W] 'image.0', …, or of pairs 'left.0', …, 'right.0', …."
        )
    right = images[size:] if is_pair else None
    return JudgeRequest(images=images[:size], prompts=prompts, metadata=records, right=right, messages=(raw,))


def concatenate_requests(requests: Sequence[JudgeRequest]) -> JudgeRequest:
    """Join requests, all of images or all of pairs; nothing is copied."""
    right = [image for request in requests for image in request.right or ()]
    return JudgeRequest(
        images=[image for request in requests for image in request.images],
        prompts=[prompt for request in requests for prompt in request.prompts],
        metadata=[record for request in requests for record in request.metadata],
        right=None if requests[0].right is None else right,
        messages=tuple(part for request in requests for part in request.messages),
    )


def pack_answer(answer: Scores | Preferences) -> bytes:
    unit = answer.unit if isinstance(answer, Scores) else None
    return json.dumps({"format": FORMAT, "unit": unit, "rows": rows_of(answer)}).encode()


def unpack_answer(raw: bytes, size: int) -> Scores | Preferences:
    """Read an answer of `size` rows."""
    try:
        about = json.loads(raw)
        rows = about["rows"]
        if about["format"] != FORMAT or len(rows) != size:
            raise ValueError(f"{len(rows)} rows for {size} samples, in the format {about['format']!r}")
        return answer_of(rows, about["unit"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"an answer in the format {FORMAT} ({type(error).__name__}: {error})") from error
