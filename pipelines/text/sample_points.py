# SPDX-License-Identifier: Apache-2.0
"""Judged completions on disk, a file per grid point: what a run that was stopped need not sample again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from visalign.atomic import write_atomic
from visalign.errors import UserError
from visalign.training.text.sampling_grid import Completions, GridPoint

POINTS = "points"
"""Folder of a run."""


def point_file(output: Path, place: int) -> Path:
    """Where the completions of point `place` of the grid stand."""
    return output / POINTS / f"{place:03d}.json"


def save_point(path: Path, completions: Completions) -> None:
    """Write the completions of one grid point, whole or not at all."""
    rewards = [value if math.isfinite(value) else None for value in completions.reward.tolist()]
    point = completions.point[0]
    content = {
        "point": {"temperature": point.temperature, "top_p": point.top_p, "seed": point.seed},
        "prompt": list(completions.prompt),
        "number": list(completions.number),
        "text": list(completions.text),
        "reward": rewards,
        "tokens": list(completions.tokens),
        "truncated": completions.truncated.tolist(),
        "reason": list(completions.reason),
    }
    write_atomic(path, json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8"))


def load_point(path: Path) -> Completions:
    """Read what `save_point` wrote.

    Raises:
        UserError: the file was changed.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        size = len(content["text"])
        reward = [math.nan if value is None else value for value in content["reward"]]
        return Completions(
            prompt=content["prompt"],
            number=content["number"],
            point=[GridPoint(**content["point"])] * size,
            text=content["text"],
            reward=torch.tensor(reward, dtype=torch.float32),
            tokens=content["tokens"],
            truncated=torch.tensor(content["truncated"], dtype=torch.bool),
            reason=content["reason"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The completions in '{path}' cannot be read ({error}). Delete the file and resume: they are "
            "sampled again."
        ) from error
