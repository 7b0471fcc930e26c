# SPDX-License-Identifier: Apache-2.0
"""What travels to a reward server and back: safetensors, nothing that could run.

A request holds images as uint8: of one size as one tensor [B, 3, H, W] named "image", of several sizes as
"image.0", "image.1", ... [3, H, W]; for pairs "left" and "right" in the same way. In the file's header under
"request" stands JSON with prompts and records. Pixels are written and read without a detour: what was read
are views of the message.

An answer holds float32 columns [B]: "main" (value or probability), "valid", "std", "log_odds", "part.NAME";
under "answer" stands JSON with kind, unit, texts and reasons.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
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
    """A message that cannot be read; what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """B images, or B pairs, with prompts and records."""

    images: Pixels
    """Of pairs the left ones."""
    prompts: Sequence[str]
    metadata: Sequence[Mapping[str, Any] | None]
    right: Pixels | None = None
    """Of pairs the right ones."""
    messages: tuple[bytes | bytearray, ...] = field(default=(), compare=False, repr=False)
    """What it was read from, in order: passed on as it is, where it is passed on."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def pixels(self) -> int:
        """Of all images together."""
        sides = (self.images,) if self.right is None else (self.images, self.right)
        return sum(_area(side) for side in sides)


def pack_request(request: JudgeRequest) -> bytes:
    """A request as safetensors; its records must be JSON values."""
    blocks: dict[str, Tensor] = {}
    sides = {"image": request.images}
    if request.right is not None:
        sides = {"left": request.images, "right": request.right}
    for side, images in sides.items():
        whole = as_batch(images)
        if isinstance(whole, Tensor):
            blocks[side] = whole
        else:
            blocks |= {f"{side}.{i}": image for i, image in enumerate(whole)}
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "request": _words(request)}}
    end = 0
    for name, block in blocks.items():
        if block.dtype != torch.uint8:
            raise ValueError(f"{name} is {block.dtype}; images travel as uint8.")
        start, end = end, end + block.numel()
        header[name] = {"dtype": "U8", "shape": list(block.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    contents = [block.cpu().contiguous().numpy().data for block in blocks.values()]
    return b"".join([len(head).to_bytes(8, "little"), head, *contents])


def unpack_request(raw: bytes | bytearray) -> JudgeRequest:
    """Read a request and check all of its form; the images are views of what can be written to, as a
    bytearray can.
    """
    tensors, header = _read(raw)
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
    named = {side: [side] if side in tensors else [f"{side}.{i}" for i in range(size)] for side in sides}
    if odd := sorted(tensors.keys() ^ {name for names in named.values() for name in names})[:4]:
        raise WireError(
            f"{size} prompts need one tensor {' and '.join(map(repr, sides))}, or as many as there are "
            f"prompts with .0, .1, … after it; missing or extra: {', '.join(odd)}."
        )
    for name, image in tensors.items():
        whole = (size,) if name in sides else ()
        if image.ndim != 3 + len(whole) or image.shape[:-2] != (*whole, 3):
            form = f"[{size}, 3, H, W]" if whole else "[3, H, W]"
            raise WireError(f"{name} is uint8 {tuple(image.shape)}; needed is {form}.")
    columns = [tensors[side] if side in tensors else [tensors[n] for n in named[side]] for side in sides]
    return JudgeRequest(
        images=columns[0],
        prompts=prompts,
        metadata=metadata,
        right=columns[1] if is_pair else None,
        messages=(raw,),
    )


def joined(requests: Sequence[JudgeRequest]) -> JudgeRequest:
    """Several requests, all of images or all of pairs, as one; nothing is copied."""
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
    """Images of one size as one tensor, of several as they are."""
    if isinstance(images, Tensor) or len({image.shape for image in images}) != 1:
        return images
    return torch.stack(list(images))


def _area(images: Pixels) -> int:
    if isinstance(images, Tensor):
        return images.shape[0] * images.shape[2] * images.shape[3]
    return sum(image.shape[1] * image.shape[2] for image in images)


def _words(request: JudgeRequest) -> str:
    """Prompts and records as JSON."""
    try:
        return json.dumps({"prompts": list(request.prompts), "metadata": list(request.metadata)})
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The metadata cannot travel to a server: {error}. Give texts, numbers, lists and "
            "mappings of them."
        ) from error


def parse_header(raw: bytes | bytearray, key: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The header's entries by tensor, the JSON object under `key` of its metadata, and where data begin."""
    try:
        start = 8 + int.from_bytes(raw[:8], "little")
        is_there = 8 < start <= min(len(raw), _LONGEST_HEADER)
        header = json.loads(raw[8:start]) if is_there else {}
        about = header.pop("__metadata__", {})
        if about.get("format") != FORMAT or key not in about:
            raise WireError(f"this is no {key} in the format {FORMAT}.")
        found = json.loads(about[key]) if isinstance(about[key], str) else None
    except WireError:
        raise
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise _unreadable(error) from error
    if not isinstance(found, dict):
        raise WireError(f"the {key} is no JSON object.")
    return header, found, start


def _unreadable(error: object) -> WireError:
    return WireError(f"the body cannot be read as safetensors ({type(error).__name__}: {error}).")


def _read(raw: bytes | bytearray) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Views of the pixels, and what is said of them."""
    header, about, start = parse_header(raw, "request")
    shapes: dict[str, tuple[list[int], int]] = {}
    expected = 0
    for name, entry in header.items():
        shapes[name] = _place(name, entry, len(raw) - start)
        expected += math.prod(shapes[name][0])
    if expected != len(raw) - start:
        raise _unreadable(ValueError(f"{len(raw) - start} bytes follow the header, {expected} are announced"))
    buffer = raw if isinstance(raw, bytearray) else bytearray(raw)  # torch wants to be able to write
    found = {
        name: torch.frombuffer(buffer, dtype=torch.uint8, count=math.prod(shape), offset=start + begin).view(
            shape
        )
        for name, (shape, begin) in shapes.items()
    }
    return found, about


def _place(name: str, entry: Any, size: int) -> tuple[list[int], int]:
    """Shape of a tensor, and where it begins in `size` bytes of data."""
    try:
        kind, shape, (begin, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
        numbers = [*shape, begin, end]
        is_sound = all(type(n) is int and n >= 0 for n in numbers) and len(shape) <= 8 and end <= size
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(error) from error
    if kind != "U8" or 0 in shape:
        raise WireError(f"{name} is {kind} {tuple(shape)}; images are U8 (uint8) with pixels.")
    if not is_sound or end - begin != math.prod(shape):
        where = f"{begin} to {end} of {size} bytes"
        raise _unreadable(ValueError(f"{name} has the shape {shape} and is said to lie at {where}"))
    return shape, begin


def rows_of(answer: Scores | Preferences, rows: slice) -> Scores | Preferences:
    """Some rows of an answer."""
    columns = {name: column[rows] for name, column in columns_of(answer).items()}
    text = None if answer.text is None else list(answer.text)[rows]
    reason = None if answer.reason is None else list(answer.reason)[rows]
    unit = answer.unit if isinstance(answer, Scores) else None
    return answer_of(columns, answer.valid[rows], unit, text, reason)


def pack_answer(answer: Scores | Preferences) -> bytes:
    """Scores or preferences as safetensors."""
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
    """Read an answer of `size` rows; one that is called valid and has no finite number is invalid, with that
    as reason.
    """
    _, header, _ = parse_header(raw, "answer")
    try:
        tensors = load(bytes(raw))
    except (SafetensorError, ValueError, KeyError) as error:
        raise WireError(f"it cannot be read as safetensors ({type(error).__name__}: {error}).") from error
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
