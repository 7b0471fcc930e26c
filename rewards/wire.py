# SPDX-License-Identifier: Apache-2.0
"""What travels between a reward server and its clients: safetensors both ways, nothing that could run.

A request holds images as uint8 [3, H, W] ("image.0", "image.1", ...; for pairs "left.0", "right.0", ...) and,
in the file's header under "request", JSON with prompts and records. An answer holds float32 columns and,
under "answer", JSON with unit, reasons and texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from visalign.interfaces import Preferences, Scores

FORMAT = "visalign-judge-1"
MEDIA_TYPE = "application/x-safetensors"
JUDGE_HEADER = "X-Visalign-Judge"
"""HTTP header of an answer: digest of the identity of the judge that gave it, or empty."""


class WireError(ValueError):
    """A message that cannot be read; what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """B images, or B pairs, with prompts and records."""

    images: list[Tensor]
    """uint8 [3, H, W]; of pairs the left ones."""
    prompts: list[str]
    metadata: list[Mapping[str, Any] | None]
    right: list[Tensor] | None = None
    """Of pairs the right ones."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def pixels(self) -> int:
        """Of all images together."""
        return sum(image.shape[1] * image.shape[2] for image in (*self.images, *(self.right or ())))


def pack_request(request: JudgeRequest) -> bytes:
    """A request as safetensors.

    Args:
        request: records must be JSON values.

    Raises:
        TypeError: a record holds something that JSON does not have.
    """
    tensors: dict[str, Tensor] = {}
    sides = (
        {"image": request.images}
        if request.right is None
        else {"left": request.images, "right": request.right}
    )
    for side, images in sides.items():
        # clone: safetensors refuses tensors that share memory, as rows of one batch and repeats do
        tensors |= {f"{side}.{i}": image.contiguous().clone() for i, image in enumerate(images)}
    about = {"prompts": request.prompts, "metadata": request.metadata}
    return save(tensors, {"format": FORMAT, "request": json.dumps(about)})


def unpack_request(raw: bytes) -> JudgeRequest:
    """Read a request and check all of its form.

    Raises:
        WireError: it is not what `pack_request` writes.
    """
    tensors, header = _read(raw, "request")
    prompts, metadata = header.get("prompts"), header.get("metadata")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise WireError("'prompts' must be a list of strings.")
    if metadata is None:
        none: list[Mapping[str, Any] | None] = [None] * len(prompts)
        metadata = none
    if not isinstance(metadata, list) or not all(
        record is None or isinstance(record, dict) for record in metadata
    ):
        raise WireError("'metadata' must be a list of objects or null.")
    if len(metadata) != len(prompts):
        raise WireError(f"{len(prompts)} prompts and {len(metadata)} metadata records; give one each.")
    is_pair = any(name.startswith(("left.", "right.")) for name in tensors)
    sides = ("left", "right") if is_pair else ("image",)
    expected = {f"{side}.{i}" for side in sides for i in range(len(prompts))}
    if tensors.keys() != expected:
        odd = sorted(tensors.keys() ^ expected)[:4]
        raise WireError(
            f"{len(prompts)} prompts need as many tensors {' and '.join(f'{side}.0, …' for side in sides)}; "
            f"missing or extra: {', '.join(odd)}."
        )
    for name, image in tensors.items():
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
            raise WireError(
                f"{name} is {str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}; images are uint8 "
                "[3, H, W] with pixels."
            )
    columns = [[tensors[f"{side}.{i}"] for i in range(len(prompts))] for side in sides]
    return JudgeRequest(
        images=columns[0], prompts=prompts, metadata=metadata, right=columns[1] if is_pair else None
    )


def pack_answer(answer: Scores | Preferences) -> bytes:
    """Scores or preferences as safetensors.

    Args:
        answer: B rows.
    """
    main = answer.value if isinstance(answer, Scores) else answer.prob
    columns = {"main": main, "std": answer.std}
    if isinstance(answer, Preferences):
        columns["log_odds"] = answer.log_odds
    tensors = {name: column for name, column in columns.items() if column is not None}
    tensors |= {f"part.{name}": part for name, part in answer.parts.items()}
    tensors = {name: column.detach().cpu().float().contiguous().clone() for name, column in tensors.items()}
    tensors["valid"] = answer.valid.cpu().to(torch.uint8)
    about = {
        "kind": "scores" if isinstance(answer, Scores) else "preferences",
        "unit": answer.unit if isinstance(answer, Scores) else None,
        "text": None if answer.text is None else list(answer.text),
        "reason": None if answer.reason is None else list(answer.reason),
    }
    return save(tensors, {"format": FORMAT, "answer": json.dumps(about)})


def unpack_answer(raw: bytes, size: int) -> Scores | Preferences:
    """Read an answer.

    Args:
        raw: what `pack_answer` wrote.
        size: B, the rows it must have.

    Raises:
        WireError: it is something else, or has another number of rows.
    """
    tensors, header = _read(raw, "answer")
    if wrong := [name for name, column in tensors.items() if tuple(column.shape) != (size,)]:
        raise WireError(f"the answer's columns {', '.join(wrong[:4])} do not have {size} rows.")
    if not {"main", "valid"} <= tensors.keys() or header.get("kind") not in ("scores", "preferences"):
        raise WireError("the answer lacks its columns 'main' and 'valid', or its kind.")
    for name in ("text", "reason"):
        if header.get(name) is not None and len(header[name]) != size:
            raise WireError(f"the answer has {len(header[name])} entries of '{name}' for {size} rows.")
    shared: dict[str, Any] = {
        "valid": tensors["valid"].bool(),
        "std": tensors.get("std"),
        "parts": {n.removeprefix("part."): part for n, part in tensors.items() if n.startswith("part.")},
        "text": header.get("text"),
        "reason": header.get("reason"),
    }
    if header["kind"] == "scores":
        return Scores(value=tensors["main"], unit=str(header.get("unit")), **shared)
    return Preferences(prob=tensors["main"], log_odds=tensors.get("log_odds"), **shared)


def rows_of(answer: Scores | Preferences, rows: slice) -> Scores | Preferences:
    """Some rows of an answer.

    Args:
        answer: B rows.
        rows: which.
    """

    def part(column: Tensor | None) -> Tensor | None:
        return None if column is None else column[rows]

    def some(items: Sequence[Any] | None) -> list[Any] | None:
        return None if items is None else list(items)[rows]

    shared: dict[str, Any] = {
        "valid": answer.valid[rows],
        "std": part(answer.std),
        "parts": {name: column[rows] for name, column in answer.parts.items()},
        "text": some(answer.text),
        "reason": some(answer.reason),
    }
    if isinstance(answer, Scores):
        return Scores(value=answer.value[rows], unit=answer.unit, **shared)
    return Preferences(prob=answer.prob[rows], log_odds=part(answer.log_odds), **shared)


def _read(raw: bytes, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the JSON of the header's entry `key`."""
    try:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length]) if 0 < length <= len(raw) - 8 else None
        about = (header or {}).get("__metadata__", {})
        if about.get("format") != FORMAT or key not in about:
            raise WireError(f"this is no {key} in the format {FORMAT}.")
        found = json.loads(about[key]) if isinstance(about[key], str) else None
        if not isinstance(found, dict):
            raise WireError(f"the {key} is no JSON object.")
        return load(raw), found
    except WireError:
        raise
    except (SafetensorError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise WireError(
            f"the body cannot be read as safetensors ({type(error).__name__}: {error})."
        ) from error
