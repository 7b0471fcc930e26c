# SPDX-License-Identifier: Apache-2.0
"""What comes back from a reward server: safetensors with float32 columns, the words in the header.

Under "answer" the header holds JSON with unit, reasons and texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from visalign.interfaces import Preferences, Scores

from .wire import FORMAT, WireError, parse_header


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
    # clone: safetensors refuses tensors that share memory, as rows of one column do
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
    """Read an answer; a row that is called valid and has no finite number is invalid, with that as reason.

    Args:
        raw: what `pack_answer` wrote.
        size: B, the rows it must have.

    Raises:
        WireError: it is something else, or has another number of rows.
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
    main, valid = tensors["main"].float(), tensors["valid"].bool()
    finite = main.isfinite()
    reason = header.get("reason")
    if not bool((finite | ~valid).all()):
        said = reason or [None] * size
        reason = [
            f"the judge's answer is {number}, which is no score" if claimed and not ok else why
            for number, claimed, ok, why in zip(
                main.tolist(), valid.tolist(), finite.tolist(), said, strict=True
            )
        ]
    valid = valid & finite
    main = torch.where(valid, main, torch.nan)
    shared: dict[str, Any] = {
        "valid": valid,
        "std": tensors.get("std"),
        "parts": {n.removeprefix("part."): part for n, part in tensors.items() if n.startswith("part.")},
        "text": header.get("text"),
        "reason": reason,
    }
    if header["kind"] == "scores":
        return Scores(value=main, unit=str(header.get("unit")), **shared)
    return Preferences(prob=main, log_odds=tensors.get("log_odds"), **shared)


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
