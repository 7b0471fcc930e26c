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
_LONGEST_HEADER = 100_000_000
"""Bytes, as safetensors has it."""

Pixels = Tensor | Sequence[Tensor]
"""uint8 [B, 3, H, W], or B tensors [3, H, W]."""


class WireError(ValueError):
    """A message cannot be read."""


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """B images, or B pairs, with prompts and records."""

    images: Pixels
    """The left ones of pairs."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any] | None]
    right: Pixels | None = None
    """The right ones of pairs; None for single images."""
    messages: tuple[bytes | bytearray, ...] = field(default=(), compare=False, repr=False)
    """Bytes that it was read from, passed on to the worker as they are."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def pixels(self) -> int:
        """Pixels of all images together."""
        sides = (self.images,) if self.right is None else (self.images, self.right)
        return sum(_area(side) for side in sides)


def pack_request(request: JudgeRequest) -> bytes:
    """Write a request as safetensors; its records must be JSON values."""
    tensors: dict[str, Tensor] = {}
    sides = {"image": request.images}
    if request.right is not None:
        sides = {"left": request.images, "right": request.right}
    for side, images in sides.items():
        batch = as_batch(images)
        if isinstance(batch, Tensor):
            tensors[side] = batch.cpu().contiguous()
        else:
            tensors |= {f"{side}.{i}": image.cpu().contiguous() for i, image in enumerate(batch)}
    if odd := [name for name, tensor in tensors.items() if tensor.dtype != torch.uint8]:
        raise ValueError(f"{odd[0]} is {tensors[odd[0]].dtype}; images travel as uint8.")
    try:
        text = json.dumps({"prompts": list(request.prompts), "metadata": list(request.metadata)})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The metadata cannot travel to a server: {error}. Give texts, numbers, lists and "
            "mappings of them."
        ) from error
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}  # these may share memory, tensors not
    return save_arrays(arrays, {"format": FORMAT, "request": text})


def unpack_request(raw: bytes | bytearray) -> JudgeRequest:
    """Read a request and check its form."""
    header, tensors = parse_header(raw, "request"), _load(raw)
    prompts, metadata = header.get("prompts"), header.get("metadata")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise WireError("'prompts' must be a list of strings.")
    size = len(prompts)
    if metadata is None:
        none: list[Mapping[str, Any] | None] = [None] * size
        metadata = none
    if not isinstance(metadata, list) or not all(
        record is None or isinstance(record, dict) for record in metadata
    ):
        raise WireError("'metadata' must be a list of objects or null.")
    if len(metadata) != size:
        raise WireError(f"{size} prompts and {len(metadata)} metadata records; give one each.")
    is_pair = any(name.partition(".")[0] in ("left", "right") for name in tensors)
    sides = ("left", "right") if is_pair else ("image",)
    expected = {side: [side] if side in tensors else [f"{side}.{i}" for i in range(size)] for side in sides}
    if odd := sorted(tensors.keys() ^ {name for names in expected.values() for name in names})[:4]:
        raise WireError(
            f"{size} prompts need one tensor {' and '.join(map(repr, sides))}, or as many as there are "
            f"prompts with .0, .1, … after it; missing or extra: {', '.join(odd)}."
        )
    for name, image in tensors.items():
        batch = (size,) if name in sides else ()
        if image.dtype != torch.uint8 or image.shape[:-2] != (*batch, 3) or 0 in image.shape:
            needed = f"[{size}, 3, H, W]" if batch else "[3, H, W]"
            raise WireError(f"{name} is {image.dtype} {tuple(image.shape)}; needed is uint8 {needed}.")
    columns = [tensors[side] if side in tensors else [tensors[n] for n in expected[side]] for side in sides]
    return JudgeRequest(
        images=columns[0],
        prompts=prompts,
        metadata=metadata,
        right=columns[1] if is_pair else None,
        messages=(raw,),
    )


def concatenate_requests(requests: Sequence[JudgeRequest]) -> JudgeRequest:
    """Join requests, all of images or all of pairs; nothing is copied."""
    if len(requests) == 1:
        return requests[0]
    right: list[Tensor] | None = None
    if requests[0].right is not None:
        right = [image for request in requests if request.right is not None for image in request.right]
    is_whole = all(request.messages for request in requests)
    return JudgeRequest(
        images=[image for request in requests for image in request.images],
        prompts=[prompt for request in requests for prompt in request.prompts],
        metadata=[record for request in requests for record in request.metadata],
        right=right,
        messages=tuple(part for request in requests for part in request.messages) if is_whole else (),
    )


def as_batch(images: Pixels) -> Pixels:
    """Stack images of one size; leave images of several sizes as they are."""
    if isinstance(images, Tensor) or len({image.shape for image in images}) != 1:
        return images
    return torch.stack(list(images))


def _area(images: Pixels) -> int:
    if isinstance(images, Tensor):
        return images.shape[0] * images.shape[2] * images.shape[3]
    return sum(image.shape[1] * image.shape[2] for image in images)


def parse_header(raw: bytes | bytearray, key: str) -> dict[str, Any]:
    """Read the JSON object under `key` of a message's metadata."""
    try:
        start = 8 + int.from_bytes(raw[:8], "little")
        has_header = 8 < start <= min(len(raw), _LONGEST_HEADER)
        metadata = json.loads(raw[8:start]).get("__metadata__", {}) if has_header else {}
        if metadata.get("format") != FORMAT or key not in metadata:
            raise WireError(f"this is no {key} in the format {FORMAT}.")
        content = json.loads(metadata[key])
    except WireError:
        raise
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise _unreadable(error) from error
    if not isinstance(content, dict):
        raise WireError(f"the {key} is not a JSON object.")
    return content


def _load(raw: bytes | bytearray) -> dict[str, Tensor]:
    try:
        return load(bytes(raw))
    except (SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> WireError:
    return WireError(f"the body cannot be read as safetensors ({type(error).__name__}: {error}).")


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
    header, tensors = parse_header(raw, "answer"), _load(raw)
    if wrong := sorted(name for name, column in tensors.items() if tuple(column.shape) != (size,)):
        raise WireError(f"the answer's columns {', '.join(wrong[:4])} do not have {size} rows.")
    if not {"main", "valid"} <= tensors.keys() or header.get("kind") not in ("scores", "preferences"):
        raise WireError("the answer lacks its columns 'main' and 'valid', or its kind.")
    for name in ("text", "reason"):
        words = header.get(name)
        if words is not None and (not isinstance(words, list) or len(words) != size):
            raise WireError(f"the answer's entry '{name}' is no list of {size} texts.")
    main, claimed = tensors["main"].float(), tensors.pop("valid").bool()
    valid = claimed & main.isfinite()
    reason = header.get("reason")
    for row in (claimed & ~valid).nonzero().flatten().tolist():
        reason = reason or list[str | None]([None] * size)
        reason[row] = f"the judge's answer is {float(main[row])}, which is no score"
    tensors["main"] = torch.where(valid, main, torch.nan)
    unit = str(header.get("unit")) if header["kind"] == "scores" else None
    return answer_of(tensors, valid, unit, header.get("text"), reason)
