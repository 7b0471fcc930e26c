# SPDX-License-Identifier: Apache-2.0
"""Whose numbers a result shows: model, revision and identity of each judge, and where it does not belong."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from visalign.data.assets import PACKAGED
from visalign.data.shapes.prompts import parse_prompt
from visalign.interfaces import PointwiseReward, with_capabilities
from visalign.rewards.base.identity import Identity


def whose(judge: Any) -> str:
    """Judge, model, revision or fingerprint of the weights, and digest of the identity, in a line."""
    identity = judge_identity(judge)
    toy = " (packaged: it knows visalign's world of shapes alone)" if _packaged(identity.model) else ""
    return f"{identity.line}{toy}"


def foreign(judge: Any, prompts: Iterable[str]) -> str | None:
    """What is to be said where a packaged judge is asked about prompts that are not of its world."""
    packaged = _packaged(judge_identity(judge).model)
    if not packaged:
        return None
    different = [prompt for prompt in dict.fromkeys(prompts) if prompt.strip()]
    outside = [prompt for prompt in different if not _of_the_world(prompt)]
    if not outside:
        return None
    return (
        f"{len(outside)} of {len(different)} prompts, such as {outside[0][:60]!r}, are not of the world of "
        f"shapes that {', '.join(packaged)} was trained on: these numbers mean nothing. Give published "
        "weights as model."
    )


def _packaged(model: str) -> list[str]:
    """The packaged models among those that an identity names."""
    words = model.replace("×", " ").replace("+", " ").replace("/", " ").split()
    return [name for name in PACKAGED if name in words]


def _of_the_world(prompt: str) -> bool:
    try:
        parse_prompt(prompt)
    except ValueError:
        return False
    return True


def judge_identity(judge: Any) -> Identity:
    """The judge's own identity, or one from its name, unit, class and source file where it has none.

    What such a judge reads besides, weights or settings, is not known: give it an identity to have that seen.
    """
    identity = with_capabilities(judge).identity
    if isinstance(identity, Identity):
        return identity
    kind = f"{type(judge).__module__}:{type(judge).__qualname__}"
    options = {"unit": judge.unit if isinstance(judge, PointwiseReward) else "probability"}
    return Identity(judge=judge.name, model=kind, weights=_source(judge), options=options)


def _source(judge: Any) -> str:
    """SHA-256 of the files that a judge's class, and the user's function in it, are written in."""
    digest = hashlib.sha256()
    for part in (type(judge), getattr(judge, "_function", None)):
        with suppress(TypeError, OSError):  # built in, made on the fly: there is no file
            digest.update(Path(inspect.getfile(part)).read_bytes())  # type: ignore[arg-type]
    return digest.hexdigest()
